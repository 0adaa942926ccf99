"""What a fine-tune is: one frozen value that means the same in an estimate, a recipe, a run and a record.

Nothing here depends on the machine. The line under a field is its documentation: the settings page and the JSON
Schema are made from it. Rules that need two fields stand in `rules.py`.
"""

from typing import Annotated, Literal

from msgspec import Meta

from foretune.values import Value

__all__ = [
    "BatchSettings",
    "CheckpointSettings",
    "DataSettings",
    "EvaluationSettings",
    "LoraSettings",
    "ModelSource",
    "OptimizerSettings",
    "PrecisionSettings",
    "QuantizationSettings",
    "ScheduleSettings",
    "TrainingConfig",
]

Count = Annotated[int, Meta(ge=1, le=10**9)]
Share = Annotated[float, Meta(ge=0.0, lt=1.0)]
ProperShare = Annotated[float, Meta(gt=0.0, lt=1.0)]
Positive = Annotated[float, Meta(gt=0.0, le=1e9)]
NonNegative = Annotated[float, Meta(ge=0.0, le=1e9)]
Text = Annotated[str, Meta(min_length=1, max_length=4096)]

Dtype = Literal["bf16", "fp16", "fp32"]


class ModelSource(Value, frozen=True, kw_only=True):
    """Which base model, and which revision of it."""

    id: Text
    """A catalogue or hub id (`Qwen/Qwen2.5-0.5B`), or the path of a local folder or `config.json`. What starts with
    `./`, `../`, `/` or `~`, or exists, is a path, with the same path rules as `data.train`."""
    revision: Text | None = None
    """A branch, tag or commit of the hub; a run resolves it to a commit and records that. None: the default branch."""


class PrecisionSettings(Value, frozen=True, kw_only=True):
    """The number formats of the base weights and of the computation."""

    dtype: Dtype
    """Format in which base weights are held and multiplied. A file must say it; the command line's default is bf16."""
    adapter_dtype: Dtype = "fp32"
    """Format of LoRA's matrices. PEFT keeps them in fp32 whatever the base model has."""


class QuantizationSettings(Value, frozen=True, kw_only=True):
    """Hold the linear layers of the base model in fewer bits (bitsandbytes)."""

    scheme: Literal["nf4", "int8"] = "nf4"
    """`nf4`: 4-bit NormalFloat blocks of 64 (QLoRA). `int8`: LLM.int8()."""
    double_quant: bool | None = None
    """Quantize the scales of nf4 as well, which saves 0.37 bit per parameter. None: yes with nf4; int8 has none."""
    compute_dtype: Dtype | None = None
    """Format in which nf4 layers multiply. None: `precision.dtype`. int8 chooses its own."""

    @property
    def uses_double_quant(self) -> bool:
        """Whether the scales are quantized too: by default with nf4, never with int8."""
        return self.scheme == "nf4" and self.double_quant is not False

    def compute_dtype_for(self, precision: PrecisionSettings) -> Dtype:
        """Return the format in which nf4 layers multiply (int8: that of their inputs and outputs)."""
        return self.compute_dtype or precision.dtype


class LoraSettings(Value, frozen=True, kw_only=True):
    """Low-rank adapters on the targeted linear layers; everything else is frozen."""

    rank: Annotated[int, Meta(ge=1, le=65536)] = 16
    """r, the inner dimension of the update B @ A."""
    alpha: Positive = 32.0
    """The update is scaled by alpha / rank (alpha / sqrt(rank) with `use_rslora`)."""
    dropout: Share = 0.0
    """Share of an adapter's inputs that are zeroed in training."""
    targets: Literal["all-linear", "attention", "mlp"] | Annotated[tuple[Text, ...], Meta(min_length=1)] = "all-linear"
    """A scope, or names of linear layers as the model spells them (`q_proj`); a name that matches nothing fails."""
    modules_to_save: tuple[Text, ...] = ()
    """Modules trained whole beside the adapters, for example `lm_head`; held in `precision.dtype`."""
    use_dora: bool = False
    """Weight-decomposed adapters: a trained magnitude per output (Liu et al. 2024)."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) (Kalajdzievski 2023)."""


class OptimizerSettings(Value, frozen=True, kw_only=True):
    """How gradients become updates."""

    name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "sgd"] = "adamw"
    """`adamw` and `sgd` are torch's; `adamw_8bit` and `paged_adamw_8bit` are bitsandbytes'."""
    implementation: Literal["fused", "foreach"] | None = None
    """torch's kernel for `adamw` and `sgd`; `foreach` needs a temporary of the size of the trained weights. None: fused
    for these two; bitsandbytes has its own."""
    learning_rate: Positive = 2e-4
    """Peak learning rate."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    beta1: Share = 0.9
    """AdamW's decay of the first moment."""
    beta2: Share = 0.999
    """AdamW's decay of the second moment."""
    epsilon: Positive = 1e-8
    """AdamW's term in the denominator."""
    momentum: Share = 0.0
    """SGD's momentum; above 0 it keeps one state per trained weight."""
    max_grad_norm: Positive | None = 1.0
    """Clip the global norm of the gradients. None: no clipping."""

    @property
    def kernel(self) -> Literal["fused", "foreach"] | None:
        """torch's kernel that runs: what was asked for, else fused. None for bitsandbytes' optimizers."""
        if self.name not in ("adamw", "sgd"):
            return None
        return self.implementation or "fused"


class ScheduleSettings(Value, frozen=True, kw_only=True):
    """How long the run is and how the learning rate moves."""

    updates: Count | None = None
    """Number of optimizer updates. None: what `epochs` gives."""
    epochs: Positive | None = None
    """Passes over the data, where `updates` is None. None: 1 then. Excludes `updates`."""
    shape: Literal["constant", "linear", "cosine"] = "cosine"
    """Learning rate after warm-up."""
    warmup_updates: Annotated[int, Meta(ge=0, le=10**9)] = 0
    """Updates over which the learning rate rises from 0; must be fewer than all."""

    @property
    def passes(self) -> float | None:
        """Passes over the data: `epochs`, or 1 where neither is given. None where `updates` decides."""
        if self.updates is not None:
            return None
        return 1.0 if self.epochs is None else self.epochs


class BatchSettings(Value, frozen=True, kw_only=True):
    """How many tokens are on the device at once."""

    micro_batch_size: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    """Sequences in one forward on one device (`per_device_train_batch_size`)."""
    accumulation_steps: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    """Microsteps per update (`gradient_accumulation_steps`)."""
    sequence_length: Annotated[int, Meta(ge=1, le=1 << 30)] = 1024
    """Tokens per row on the device after truncation, packing and padding."""
    packing: bool = False
    """Fill rows with several examples, isolated from each other."""
    sort_by_length: bool = False
    """Form batches from rows of similar length; the order stays a function of seed and epoch."""


class DataSettings(Value, frozen=True, kw_only=True):
    """Which rows, and which of their tokens carry loss."""

    train: Text | None = None
    """Path of a JSONL file. In YAML relative to the file, on the command line relative to the shell."""
    supervision: Literal["all_tokens", "assistant_only"] = "all_tokens"
    """Which tokens carry loss."""
    spans: Literal["verified", "template"] = "verified"
    """How `assistant_only` finds answers: generation tags only, or tags else verified marker rendering."""
    truncation: Literal["error", "right"] = "error"
    """What to do with a row longer than `batch.sequence_length`."""
    allow_template_rewrite: bool = False
    """Accept a chat template that changes or drops a turn; such rows are counted."""
    template_date: Text | None = None
    """The day (`2026-01-31`) that a chat template is told where it asks for today's. None: the day of the run, which
    is recorded."""


class EvaluationSettings(Value, frozen=True, kw_only=True):
    """Loss on rows that are not trained on."""

    data: Text | None = None
    """Path of a JSONL file; the same path rules as `data.train`."""
    split: ProperShare | None = None
    """Share of the training rows to hold out, chosen by the seed. Excludes `data`."""
    every_updates: Count | None = None
    """Evaluate after every so many updates. None: at the end."""

    @property
    def is_asked_for(self) -> bool:
        """Whether there are rows to evaluate on."""
        return self.data is not None or self.split is not None


class CheckpointSettings(Value, frozen=True, kw_only=True):
    """What an interrupted run can resume from."""

    every_updates: Count | None = None
    """Save after every so many updates."""
    every_minutes: Positive | None = None
    """Save when so many minutes have passed since the last one."""
    keep: Annotated[int, Meta(ge=1, le=1000)] = 1
    """How many of the newest to keep."""


class TrainingConfig(Value, frozen=True, kw_only=True):
    """A fine-tune: model, device, formats, adapters, optimizer, batch, data, and where the result goes."""

    model: ModelSource
    """The base model."""
    precision: PrecisionSettings
    """Number formats; never inferred."""
    device: Annotated[str, Meta(min_length=1, max_length=64)] = "cuda"
    """`cuda` (the default device) or `cpu`."""
    quantization: QuantizationSettings | None = None
    """None holds the base model in `precision.dtype`."""
    lora: LoraSettings | None = None
    """None trains every weight."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """How gradients become updates."""
    schedule: ScheduleSettings = ScheduleSettings()
    """Length of the run and learning rate."""
    batch: BatchSettings = BatchSettings()
    """Tokens on the device at once."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention implementation of Transformers. `flash_attention_2` is experimental."""
    gradient_checkpointing: bool = True
    """Recompute activations in backward instead of keeping them (torch's non-reentrant form)."""
    loss: Literal["stock", "chunked", "liger"] = "stock"
    """`stock`: full logits. `chunked`: head and loss in chunks, recomputed in backward. `liger`: experimental."""
    parallelism: Literal["single", "ddp", "fsdp"] = "single"
    """How several devices share the work. Only `single` is qualified."""
    data: DataSettings = DataSettings()
    """Rows and supervision."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """Held-out loss."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Resume points."""
    output: Text | None = None
    """Folder of the run; it must not exist or be empty. The same path rules as `data.train`."""
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0
    """Seeds weights, order and dropout."""

    @property
    def method(self) -> Literal["full", "lora", "qlora"]:
        """The usual name: `full`, `lora`, or `qlora` where the base is quantized."""
        if self.lora is None:
            return "full"
        return "qlora" if self.quantization is not None else "lora"
