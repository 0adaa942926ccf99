"""From a published row to the question that an engine is asked, or the reason why it is not asked.

What the contract has no word for is refused by name, unless a nearest setting is sensible: then that is taken, and the
row is foreign. The tables below are the whole of it.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec, multiprocessors_like
from foretune.errors import ConfigError, UnsupportedError
from foretune.evidence.observations import UNKNOWN, LoraFacts, Observation, TrainingFacts
from foretune.evidence.stacks import choose_stack
from foretune.memory import StackProfile
from foretune.models import WITHOUT_CLASS, ModelShape, shape_from_config
from foretune.values import Value

__all__ = ["Asked", "Request", "request_of"]


class Request(Value, frozen=True, kw_only=True):
    """What an engine is asked. Rows that ask the same are answered once."""

    model: str
    model_config: str
    """The model's config.json, as JSON text."""
    config: TrainingConfig
    device: DeviceSpec | None
    """None: neither its memory nor a card of its name is known."""
    stack: StackProfile

    @property
    def shape(self) -> ModelShape:
        """What the model consists of. Raises ConfigError and UnsupportedError."""
        return _shape(self.model, self.model_config)

    @property
    def raw_config(self) -> dict[str, Any]:
        """The model's config.json."""
        data: dict[str, Any] = msgspec.json.decode(self.model_config)
        return data


class Asked(NamedTuple):
    """A request, and how its answer is to be held against the row."""

    request: Request
    foreign_because: tuple[str, ...]
    """What no profile or setting describes; empty: everything is described."""
    leaves_out_first: bool
    """The peak was taken after loading and the first update."""
    is_first_batch: bool = False
    """The row's length is that of the first batch alone, so its peak is that of the first update."""


_QUANTIZED = {"none": None, "nf4": ("nf4", False), "nf4_double_quant": ("nf4", True), "int8": ("int8", None)}
_CHECKPOINTED = {"none": False, "non_reentrant": True, "reentrant": True}
_NEAREST_CHECKPOINTED: Mapping[str, str] = {"offloaded": "non_reentrant"}
"""On the host what is kept is no longer on the device: the prediction is too high by L*T*h*s."""
_ZERO = ("zero2", "zero3")
_OPTIMIZERS = {
    "adamw_torch": ("adamw", "foreach"),
    "adamw_torch_fused": ("adamw", "fused"),
    "adamw_8bit": ("adamw_8bit", None),
    "paged_adamw_8bit": ("paged_adamw_8bit", None),
    "sgd": ("sgd", "foreach"),
}
_NEAREST_OPTIMIZER: Mapping[str, str] = {
    "paged_adamw_32bit": "paged_adamw_8bit",  # its large states lie outside the device's memory too
    "adamw_8bit_torchao": "adamw_8bit",
    "adamw_4bit_torchao": "adamw_8bit",
    "adamw_torchao": "adamw_torch",
}
_OF_QKV = ("qkv_proj", "query_key_value", "W_pack", "c_attn")
_FUSED_NAMES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), _OF_QKV),
    **dict.fromkeys(("gate_proj", "up_proj"), ("gate_up_proj", "dense_h_to_4h")),
    "o_proj": ("dense",),
    "down_proj": ("dense_4h_to_h",),
}
"""Names that tools with modules of their own use, and those of the layers that hold them in Transformers' classes."""
_DTYPES = ("bf16", "fp16", "fp32")
_ATTENTIONS = ("sdpa", "eager")
_NEAREST_ATTENTION: Mapping[str, str] = {"flash_attention_2": "sdpa", UNKNOWN: "sdpa"}
"""torch's own kernel is the same algorithm."""
_LOSSES: Mapping[str, str] = {"stock": "stock", "foretune_chunked": "chunked"}
_KERNEL_OF_LOSS = {"triton_ce": "triton", "liger_fused": "liger"}
_LITGPT_LOSS = {True: "chunked_ce_full_logits", False: "chunked"}
"""By whether every weight is trained."""
_NEAREST_LOSS: Mapping[str, str] = {
    "chunked": "stock",  # all chunks of the logits are alive together
    "chunked_ce_full_logits": "stock",
    "triton_ce": "stock",
    "none": "stock",
    UNKNOWN: "stock",
    "liger_fused": "chunked",  # never whole, as in our chunks
    "cut_cross_entropy": "chunked",
}


class _Refusal(NamedTuple):
    """A kind of row that is not asked about."""

    applies: Callable[[Observation], bool]
    reason: Callable[[Observation], str]


_REFUSALS = (
    _Refusal(lambda row: row.outcome not in ("ok", "oom"), lambda row: f"The run failed (outcome: {row.outcome})."),
    _Refusal(lambda row: row.kind != "train_peak", lambda row: f"It is no peak of training (kind: {row.kind})."),
    _Refusal(
        lambda row: row.device.count > 1 or row.training.parallel.world_size > 1,
        lambda row: "It ran on several devices, and one is predicted.",
    ),
    _Refusal(
        lambda row: row.training.parallel.strategy not in ("single", *_ZERO),
        lambda row: f"Its work was divided by {row.training.parallel.strategy}, and one device alone is predicted.",
    ),
    _Refusal(
        lambda row: row.training.parallel.cpu_offload,
        lambda row: "A part of it was moved to the host, which is not predicted.",
    ),
    _Refusal(
        lambda row: row.training.method not in ("full", "lora", "qlora"),
        lambda row: f"Its method is {row.training.method}; full, lora and qlora are predicted.",
    ),
    _Refusal(
        lambda row: (row.training.method == "full") != (row.training.lora is None),
        lambda row: f"Its method is {row.training.method}, and its adapters say otherwise.",
    ),
    _Refusal(lambda row: row.training.seq_len is None, lambda row: "Its sequence length is not known."),
    _Refusal(lambda row: row.training.micro_batch_size is None, lambda row: "Its micro batch size is not known."),
    _Refusal(lambda row: row.model.config is None, lambda row: "The config of its model is not known."),
    _Refusal(
        lambda row: row.training.quantization not in _QUANTIZED,
        lambda row: f"Its quantization is {row.training.quantization}, which no setting describes.",
    ),
    _Refusal(
        lambda row: row.training.base_dtype not in _DTYPES,
        lambda row: f"The format of its base weights is {row.training.base_dtype}, which no setting describes.",
    ),
    _Refusal(
        lambda row: row.training.compute_dtype not in (*_DTYPES, UNKNOWN),
        lambda row: f"It computes in {row.training.compute_dtype}, which no setting describes.",
    ),
    _Refusal(
        lambda row: row.training.optimizer not in (*_OPTIMIZERS, *_NEAREST_OPTIMIZER),
        lambda row: f"Its optimizer is {row.training.optimizer}, which no setting describes.",
    ),
    _Refusal(
        lambda row: row.training.optimizer_in_backward,
        lambda row: "Its optimizer steps within backward, which no setting describes.",
    ),
    _Refusal(
        lambda row: row.training.gradient_checkpointing not in (*_CHECKPOINTED, *_NEAREST_CHECKPOINTED),
        lambda row: f"Its checkpointing is {row.training.gradient_checkpointing}, which no setting describes.",
    ),
    _Refusal(
        lambda row: row.training.attention not in (*_ATTENTIONS, *_NEAREST_ATTENTION),
        lambda row: f"Its attention is {row.training.attention}, which no setting describes.",
    ),
    _Refusal(
        lambda row: row.training.loss not in (*_LOSSES, *_NEAREST_LOSS),
        lambda row: f"Its loss is {row.training.loss}, which no setting describes.",
    ),
    _Refusal(
        lambda row: row.training.padding_mask is True,
        lambda row: "Its rows are padded and the model gets a mask, which no setting describes.",
    ),
    _Refusal(
        lambda row: row.software.allocator_conf is not None,
        lambda row: f"Its allocator is set to {row.software.allocator_conf}, which no setting describes.",
    ),
)
"""Asked in this order; the first that applies is the reason."""


def request_of(row: Observation) -> Asked:
    """Return what an engine is asked about a row.

    Raises UnsupportedError with the reason why it is not asked, and ConfigError for a model or settings that make no
    sense.
    """
    for refusal in _REFUSALS:
        if refusal.applies(row):
            raise UnsupportedError(refusal.reason(row))
    assert row.model.config is not None
    shape = _shape(row.model.id, row.model.config)
    choice = choose_stack(row)
    because = [*choice.foreign_because]
    if shape.model_type in WITHOUT_CLASS:
        because.append(f"the code of {shape.model_type} models is remote, and of its time")
    try:
        config = TrainingConfig.create(**_settings(row, shape, choice.profile, because))
    except msgspec.ValidationError as error:
        raise ConfigError(f"Its settings make no configuration: {error}.") from error
    request = Request(
        model=row.model.id,
        model_config=row.model.config,
        config=config,
        device=_device(row),
        stack=choice.profile.with_(is_nearest=True) if because else choice.profile,
    )
    leaves_out_first = row.measured.scope == "train_steps_after_warmup"
    return Asked(request, tuple(because), leaves_out_first, _is_first_batch(row))


def _is_first_batch(row: Observation) -> bool:
    return row.training.seq_len_kind == "longest_known"


def _settings(row: Observation, shape: ModelShape, stack: StackProfile, because: list[str]) -> dict[str, Any]:
    """Return a row's settings in the contract's words; where the nearest is taken, `because` gains the reason."""
    training = row.training
    checkpointing = _nearest(training.gradient_checkpointing, _NEAREST_CHECKPOINTED, "checkpointing", because)
    settings: dict[str, Any] = {
        "model": {"id": row.model.id},
        "precision": {"dtype": training.base_dtype},
        "optimizer": _optimizer(training, stack, because),
        "batch": {
            "micro_batch_size": training.micro_batch_size,
            "accumulation_steps": 1 if _is_first_batch(row) else training.gradient_accumulation_steps or 1,
            "sequence_length": training.seq_len,  # packed rows are full rows: what isolates them is not predicted
        },
        "attention": _attention(training, shape, stack, because),
        "loss": _loss(training, stack, because),
        "gradient_checkpointing": _CHECKPOINTED[checkpointing],
    }
    if training.parallel.strategy in _ZERO:
        because.append(
            f"{training.parallel.strategy} with one process, whose fp32 copies and buffers are not predicted"
        )
    quantized = _QUANTIZED[training.quantization]
    if quantized is not None:
        scheme, double_quant = quantized
        compute = None if training.compute_dtype == UNKNOWN or scheme == "int8" else training.compute_dtype
        settings["quantization"] = {"scheme": scheme, "double_quant": double_quant, "compute_dtype": compute}
    if training.lora is not None:
        settings["lora"] = _lora(training.lora, shape, stack, because)
        if training.adapter_dtype in _DTYPES:
            settings["precision"]["adapter_dtype"] = training.adapter_dtype
        else:
            because.append("the format of its adapters is not known")
            if _makes_adapters_in_the_bases_format(stack):
                settings["precision"]["adapter_dtype"] = training.base_dtype
    return settings


def _makes_adapters_in_the_bases_format(stack: StackProfile) -> bool:
    """PEFT up to 0.11; since then autocast_adapter_dtype makes them fp32."""
    major, _, minor = stack.peft.partition(".")
    return (major, minor.isdigit() and int(minor) < 12) == ("0", True)


def _lora(lora: LoraFacts, shape: ModelShape, stack: StackProfile, because: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "rank": lora.rank,
        "modules_to_save": lora.modules_to_save,
        "use_dora": lora.use_dora,
        "use_rslora": lora.use_rslora,
        "dropout": lora.dropout or 0.0,
    }
    if lora.alpha:
        settings["alpha"] = lora.alpha
    if lora.target_modules:
        is_own = stack.model_code != "transformers"
        settings["targets"] = lora.target_modules if is_own else _targets(lora.target_modules, shape, because)
    else:
        because.append("which layers its adapters are on is not known")
    return settings


def _targets(names: tuple[str, ...], shape: ModelShape, because: list[str]) -> tuple[str, ...]:
    """Return the names of targets; a part of a layer that the class fuses stands for the whole of it."""
    leaves = {projection.name.rpartition(".")[2] for projection in shape.projections}
    found: dict[str, None] = {}
    for name in names:
        fused = next((f for f in _FUSED_NAMES.get(name, ()) if f in leaves), None)
        if name not in leaves and fused is not None:
            because.append(f"an adapter on {name}, a part of {fused}")
            name = fused
        found[name] = None
    return tuple(found)


def _optimizer(training: TrainingFacts, stack: StackProfile, because: list[str]) -> dict[str, Any]:
    is_litgpts = stack.loss == "litgpt" and training.quantization != "none"
    stated = training.optimizer
    if is_litgpts and stated == "paged_adamw_32bit":
        stated = "adamw_torch"  # what litgpt makes of it there
    else:
        stated = _nearest(stated, _NEAREST_OPTIMIZER, "optimizer", because)
    name, kernel = _OPTIMIZERS[stated]
    if kernel == "foreach" and training.optimizer_foreach is False:
        because.append("its optimizer goes tensor by tensor")
        kernel = "fused"  # like it without a temporary of the size of all that is trained
    settings: dict[str, Any] = {"name": name, "implementation": kernel}
    if not isinstance(training.grad_clip, msgspec.UnsetType):
        settings["max_grad_norm"] = training.grad_clip
    return settings


def _loss(training: TrainingFacts, stack: StackProfile, because: list[str]) -> str:
    """A kernel of the profile's stands in the place of the stock loss."""
    if _KERNEL_OF_LOSS.get(training.loss) == stack.loss_kernel:
        return "stock"
    if stack.loss == "litgpt" and training.loss == _LITGPT_LOSS[training.lora is None]:
        return "stock"
    return _LOSSES.get(training.loss) or _nearest(training.loss, _NEAREST_LOSS, "loss", because)


def _attention(training: TrainingFacts, shape: ModelShape, stack: StackProfile, because: list[str]) -> str:
    if training.attention == "flash_attention_2" and stack.has_flash_package:
        return training.attention
    attention = _nearest(training.attention, _NEAREST_ATTENTION, "attention", because)
    if attention == "sdpa" and shape.refuses_sdpa and stack.model_code == "transformers":
        because.append("attention: sdpa, where Transformers takes eager for scores that are capped")
        return "eager"
    return attention


def _nearest(value: str, nearest: Mapping[str, str], name: str, because: list[str]) -> str:
    """Return a value, or the nearest setting with the reason added."""
    if value not in nearest:
        return value
    because.append(f"{name}: {value}")
    return nearest[value]


def _device(row: Observation) -> DeviceSpec | None:
    """Return the device by what the row says of it, never by its name; None where its memory is not known."""
    facts = row.device
    if facts.memory_total_bytes is None:
        return None
    return DeviceSpec(
        name=facts.name,
        total_bytes=facts.memory_total_bytes,
        total_is="reported" if facts.memory_source == "measured" else "marketing",
        compute_capability=facts.compute_capability,
        multiprocessors=multiprocessors_like(facts.compute_capability, facts.memory_total_bytes),
        platform="windows" if row.software.os == "windows" else "linux",
    )


@lru_cache(maxsize=64)
def _shape(model: str, config: str) -> ModelShape:
    return shape_from_config(msgspec.json.decode(config), id=model, source="file")
