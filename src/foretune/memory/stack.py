"""Stack profiles: what a set of library versions, a platform and a training loop allocate.

One table for the estimate and for the trace. A profile is keyed by versions, platform and driver, never by a source
of measurements. Every rule says where it is read off.
"""

from typing import Literal

from foretune.devices import DeviceSpec
from foretune.memory.kernels import Multiprocessors
from foretune.memory.tape import DeviceRules
from foretune.values import Value

RECENT_CUBLAS_BYTES = 32 << 20
"""aten/src/ATen/cuda/CublasHandlePool.cpp (parseChosenWorkspaceSize): compute capability 9, 10 and 12."""

FEWER_THREADS = {"7.5": 1024, "8.6": 1536, "8.7": 1536, "8.9": 1536, "12.0": 1536, "12.1": 1536}
"""Threads of a multiprocessor where they are not 2,048 (CUDA programming guide, compute capabilities)."""

__all__ = [
    "FMS_4_45",
    "FMS_4_48",
    "FORETUNE",
    "LITGPT",
    "LITGPT_0_2",
    "LITGPT_0_4",
    "MANUAL_LOOP",
    "PROFILES",
    "TRAINER",
    "TRAINER_4_36",
    "TRL",
    "StackProfile",
]


class StackProfile(Value, frozen=True, kw_only=True):
    """What one stack does. The defaults are foretune's own runtime."""

    name: str
    is_nearest: bool = False
    """What will run is another stack, which no profile describes: this one is only the nearest."""
    torch: str = "2.13"
    transformers: str = "5.24"
    peft: str = "0.21"
    bitsandbytes: str = "0.50"
    platform: Literal["linux", "windows"] = "linux"
    model_code: Literal["transformers", "litgpt 0.2", "litgpt 0.4", "litgpt 0.5"] = "transformers"
    """Whose model classes, adapters and loss run. litgpt: its own GPT class, built on the device in the format of the
    weights, without checkpointing on one device; a quantized base has all linear layers in 4 bits, packed from fp16
    (lightning/fabric/plugins/precision/bitsandbytes.py), and a paged 32-bit AdamW."""
    # -- loading
    has_warmup_block: bool = False
    """Transformers' loader first allocates one block of the model's packed size (caching_allocator_warmup)."""
    load_order: Literal["module", "natural"] = "module"
    """Parameters in module order, or in natural order of their checkpoint names (Transformers' loader)."""
    loads_onto_device: bool = False
    """The loader's warm-up and order show without quantization too: weights are read straight onto the device, where
    the others read an unquantized model into host memory (trl/trainer/utils.py, create_model_from_path)."""
    copies_code_tables: bool = True
    """bitsandbytes 0.50 keeps a 64 B code table and, nested, a copy of the 1 KiB map with each weight."""
    quantizes_on_threads: bool = False
    """The loader quantizes on four threads, in no fixed order (Transformers 5.0 to 5.16): what is reserved varies."""
    kbit_upcast: Literal["none", "norms", "all"] = "none"
    """Which unquantized parameters become fp32 under quantization (prepare_model_for_kbit_training: all)."""
    empties_cache: bool = True
    """The cache is emptied after loading and preparing (PEFT from 0.20 does so after its upcast)."""
    # -- the step
    embeddings_want_grad: bool = False
    """enable_input_require_grads makes the embeddings' output a leaf that keeps its gradient."""
    keeps_cache: bool = False
    """Without checkpointing a DynamicCache is filled (use_cache is left on)."""
    passes_mask: bool = False
    """An attention mask of ones goes with every batch."""
    loss: Literal["own", "transformers", "transformers 4.48", "transformers 4.45", "litgpt"] = "own"
    """Whose cross-entropy: ours (shifted targets come with the batch), litgpt's in chunks, or the model's: of
    Transformers 5; of 4.46 to 4.48, where logits are shifted, which copies them, and the loss makes them fp32; up to
    4.45, where the model does.
    """
    loss_kernel: Literal["none", "triton", "liger", "trl"] = "none"
    """A kernel in the place of torch's cross-entropy: Triton's writes over full logits, Liger's never has them, TRL's
    makes them in tiles of 4,096 tokens by 32,768 words (trl/kernels/chunked_logprob.py).
    """
    holds_outputs: Literal["no", "through the update", "into the next forward"] = "no"
    """How long the caller holds the model's outputs, and with them the logits."""
    keeps_batch: bool = False
    """One batch is made before the first step and used for all."""
    collects_batches: bool = False
    """All batches of an update are made before its first forward and their targets counted: the loss is a sum divided
    by that number, and the batches stay until the next update's are there (transformers/trainer.py, get_batch_samples).
    """
    zeroes_grads_first: bool = False
    """zero_grad stands at the start of an update instead of its end."""
    scales_every_loss: bool = True
    """The loss is divided before backward even without accumulation."""
    splits_decay: bool = False
    """The optimizer has two groups, each with its own pass: with weight decay, and norms and biases without
    (transformers/trainer.py, create_optimizer)."""
    embeddings_in_32bit: bool = False
    """8-bit optimizers keep fp32 states for embeddings (transformers/trainer.py, create_optimizer)."""
    casts_adapters: bool = False
    """Adapters of a quantized base are cast to bf16 once they are there (trl/trainer/sft_trainer.py)."""
    has_triton: bool = True
    """Triton is there, as in torch's wheels for Linux; TRL's loss kernel is torch's operators without it."""
    has_gemm_4bit: bool = True
    """bitsandbytes 0.50 computes 4-bit products in one operator that dequantizes inside."""
    rotary_by_product: bool = False
    """Rotary angles are a matrix product (Transformers before 5.24), and so the first to need cuBLAS."""
    repeats_heads_for_sdpa: bool = False
    """The caller's attention repeats keys and values for grouped heads before torch's kernel."""
    autocast: Literal["none", "bf16", "fp16"] = "none"
    """What the caller's forward is autocast to."""
    losses_without_upcast: tuple[str, ...] = ()
    """Model types whose class computes its loss itself, on logits as they are (up to Transformers 4.48)."""
    caches_though_checkpointed: tuple[str, ...] = ()
    """Model types whose class does not switch its cache off for checkpointing (gpt_bigcode's up to 4.48)."""
    converts_outputs: bool = False
    """Accelerate's mixed precision hands the model's outputs on as fp32 copies."""
    checkpoint_form: Literal["non-reentrant", "reentrant"] = "non-reentrant"
    """torch's form of activation checkpointing."""
    # -- kernels
    has_safe_softmax: bool = True
    """torch's math attention looks for rows without any allowed key, and masks are made by `where` (learnt on torch
    2.11, H200); not so in 2.6 (learnt on RTX 4080)."""
    prefers_cudnn: bool = True
    """cuDNN's attention comes first on compute capability 9.0 and 10.0 (torch from 2.11, whose wheels bring cuDNN 9.15
    and later; sdp_utils.cpp, check_prefer_cudnn_attention)."""
    multiprocessors: Multiprocessors = Multiprocessors(108, 2048)
    """Of the device (`on` knows them): they decide into how many partial sums a long sum is divided."""
    has_flash_package: bool = False
    """flash-attn is there: no mask is made, and Transformers' wrapper casts fp32 inputs first."""
    flash_repeats_heads_of: tuple[str, ...] = ()
    """Model types whose flash class repeats keys and values for grouped heads (Mistral's up to Transformers 4.47)."""
    fused: tuple[Literal["rmsnorm", "rope", "lora"], ...] = ()
    """Fused kernels of fms-acceleration: norms and rotary embeddings in place, adapters with a quantized base."""
    cublas_bytes: int = 8_519_680
    """cuBLAS workspace of one handle, of which there are two; before compute capability 9.0 (`on` knows the others)."""
    cublaslt_bytes: int = 1 << 20
    """cublasLt workspace, as soon as a linear has a bias (CUDABlas.cpp); Windows builds have that path compiled out."""
    sums_in_place: bool = True
    """The engine adds gradients in place (torch/csrc/autograd/input_buffer.cpp)."""

    @property
    def description(self) -> str:
        """Name and versions in one line."""
        libraries = f"torch {self.torch}, transformers {self.transformers}, peft {self.peft}"
        name = f"nearest to {self.name}" if self.is_nearest else self.name
        return f"{name}: {libraries}, bitsandbytes {self.bitsandbytes}, {self.platform}"

    def __repr__(self) -> str:
        return f"<StackProfile {self.description}>"

    def on(self, device: DeviceSpec | None) -> "StackProfile":
        """Return the profile with what depends on the device: from compute capability 9.0 larger workspaces."""
        if device is None or device.compute_capability is None:
            return self
        capability = device.compute_capability
        count = device.multiprocessors or self.multiprocessors.number
        on = self.with_(multiprocessors=Multiprocessors(count, FEWER_THREADS.get(capability, 2048)))
        return on if float(capability) < 9.0 else on.with_(cublas_bytes=RECENT_CUBLAS_BYTES)

    def device_rules(self) -> DeviceRules:
        """Return the part of the profile that the tape's operations read."""
        return DeviceRules(
            cublas_bytes=self.cublas_bytes,
            cublaslt_bytes=self.cublaslt_bytes,
            sums_in_place=self.sums_in_place,
            rotary_by_product=self.rotary_by_product,
            multiprocessors=self.multiprocessors,
        )


FORETUNE = StackProfile(name="foretune")
"""The runtime of this package: its own loader, step and loop on the libraries it is tested with."""

MANUAL_LOOP = StackProfile(
    name="manual-loop",
    torch="2.14",
    transformers="5.17",
    peft="0.20",
    bitsandbytes="0.50",
    has_warmup_block=True,
    load_order="natural",
    kbit_upcast="all",
    empties_cache=True,
    embeddings_want_grad=True,
    loss="transformers",
    holds_outputs="through the update",
    keeps_batch=True,
    zeroes_grads_first=True,
    scales_every_loss=False,
    rotary_by_product=True,
    repeats_heads_for_sdpa=True,
)
"""A plain loop around Transformers and PEFT: from_pretrained, prepare_model_for_kbit_training, get_peft_model with
input gradients on, one batch, `model(input_ids=..., labels=...)`; keys and values are repeated before attention."""

MANUAL_LOOP_5_0 = MANUAL_LOOP.with_(
    name="manual-loop-5.0",
    torch="2.10",
    transformers="5.0",
    peft="0.19",
    empties_cache=False,
    prefers_cudnn=False,
    quantizes_on_threads=True,
)
"""The same on Transformers 5.0 and PEFT 0.19, which does not empty the cache. Its loader quantizes on four threads,
so under nf4 reserved varies from run to run; the order here is one of them."""

MANUAL_LOOP_WINDOWS = MANUAL_LOOP.with_(
    name="manual-loop-windows",
    torch="2.6",
    transformers="5.8",
    peft="0.19",
    bitsandbytes="0.49",
    platform="windows",
    copies_code_tables=False,
    empties_cache=False,
    keeps_cache=True,
    passes_mask=True,
    holds_outputs="into the next forward",
    keeps_batch=False,
    zeroes_grads_first=False,
    has_gemm_4bit=False,
    repeats_heads_for_sdpa=False,
    has_safe_softmax=False,
    prefers_cudnn=False,
    cublaslt_bytes=0,
)
"""A plain loop on Windows, whose wheels have no flash attention: a new batch with a mask of ones for each step, and
outputs that live into the next one; use_cache is left on."""

FMS_4_48 = StackProfile(
    name="fms-4.48",
    torch="2.4",
    transformers="4.48",
    peft="0.13",
    bitsandbytes="0.43",
    copies_code_tables=False,
    empties_cache=False,
    embeddings_want_grad=True,
    passes_mask=True,
    loss="transformers 4.48",
    has_gemm_4bit=False,
    rotary_by_product=True,
    losses_without_upcast=("bloom", "dbrx", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "mpt", "opt"),
    caches_though_checkpointed=("gpt_bigcode",),
    checkpoint_form="reentrant",
    prefers_cudnn=False,
    has_flash_package=True,
)
"""fms-hf-tuning: TRL 0.13's SFTTrainer on Transformers 4.48 and flash-attn, checkpointing reentrant. Which autocast and
which kernels run is the caller's choice (`with_`)."""

FMS_4_45 = FMS_4_48.with_(
    name="fms-4.45", transformers="4.45", loss="transformers 4.45", flash_repeats_heads_of=("mistral",)
)
"""The same on Transformers 4.45."""

TRAINER = StackProfile(
    name="trainer",
    has_warmup_block=True,
    load_order="natural",
    kbit_upcast="all",
    embeddings_want_grad=True,
    passes_mask=True,
    loss="transformers",
    collects_batches=True,
    splits_decay=True,
    embeddings_in_32bit=True,
    autocast="bf16",
    converts_outputs=True,
)
"""Transformers' Trainer with bf16=True: Accelerate's autocast, and outputs handed on in fp32. Under a 4-bit base
prepare_model_for_kbit_training comes first. Without bf16=True neither `autocast` nor `converts_outputs` (`with_`)."""

TRL = TRAINER.with_(name="trl", kbit_upcast="none", loss_kernel="trl", casts_adapters=True, loads_onto_device=True)
"""TRL 1.16's SFTTrainer, which is a Trainer: its own loss in tiles, no k-bit preparation, adapters of a 4-bit base in
bf16. It loads models in fp32 unless a dtype is asked for, and checkpointing is on unless switched off."""

TRAINER_4_36 = TRAINER.with_(
    name="trainer-4.36",
    torch="2.1",
    transformers="4.36",
    peft="0.7",
    bitsandbytes="0.41",
    has_warmup_block=False,
    load_order="module",
    copies_code_tables=False,
    empties_cache=False,
    loss="transformers 4.45",
    losses_without_upcast=("baichuan", "qwen"),
    collects_batches=False,
    embeddings_in_32bit=False,
    has_gemm_4bit=False,
    rotary_by_product=True,
    checkpoint_form="reentrant",
    has_safe_softmax=False,
    prefers_cudnn=False,
    has_flash_package=True,
    flash_repeats_heads_of=("mistral",),
)
"""Trainer of 2023 under scripts of that time (ms-swift 1.x's sft, Qwen's finetune.py): bf16 autocast over weights in
bf16, reentrant checkpointing, flash-attn, adapters in the format of the base, as PEFT made them up to 0.11."""

LITGPT = StackProfile(
    name="litgpt",
    torch="2.4",
    transformers="none",
    peft="none",
    bitsandbytes="0.42",
    model_code="litgpt 0.5",
    copies_code_tables=False,
    empties_cache=False,
    loss="litgpt",
    holds_outputs="into the next forward",
    has_triton=False,
    has_gemm_4bit=False,
    has_safe_softmax=False,
    prefers_cudnn=False,
)
"""litgpt 0.5's `finetune` and `finetune_full` on one device with `--precision bf16-true`: its own models and adapters
(litgpt/model.py, lora.py), built on the device; outputs handed on in fp32; nothing is checkpointed or clipped.
Under a quantized base the embedding is bitsandbytes' StableEmbedding, which has gradients that no optimizer takes, and
the old one lives on in the optimizer."""

LITGPT_0_4 = LITGPT.with_(name="litgpt-0.4", torch="2.3", model_code="litgpt 0.4")
"""litgpt 0.4 (its last, 0.4.13): embeddings stay as they are under a quantized base."""

LITGPT_0_2 = LITGPT.with_(name="litgpt-0.2", torch="2.1", bitsandbytes="0.41", model_code="litgpt 0.2")
"""litgpt 0.2, the first that was published, on torch 2.1 and bitsandbytes 0.41: norms cast before they scale, and the
adapter of the fused projection is padded in a copy."""

PROFILES: dict[str, StackProfile] = {
    profile.name: profile
    for profile in (
        FORETUNE,
        MANUAL_LOOP,
        MANUAL_LOOP_5_0,
        MANUAL_LOOP_WINDOWS,
        FMS_4_48,
        FMS_4_45,
        TRAINER,
        TRAINER_4_36,
        TRL,
        LITGPT,
        LITGPT_0_4,
        LITGPT_0_2,
    )
}
