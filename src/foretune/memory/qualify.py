"""What is estimated and what is refused by name: a program that is not known is never approximated."""

from typing import NamedTuple

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec
from foretune.errors import ConfigError, Problem, UnsupportedError
from foretune.memory.blocks import ACTIVATIONS
from foretune.memory.families import DECODERS, find_decoder
from foretune.memory.packing import packed_model_problems, packed_setting_problems
from foretune.memory.stack import StackProfile
from foretune.models import ModelShape

__all__ = [
    "REFUSED_SETTINGS",
    "class_problems",
    "kernel_packages",
    "require_device",
    "require_program",
    "setting_problems",
]


class _Refusal(NamedTuple):
    """A setting whose memory is not known yet."""

    field: str
    value: object
    what: str
    instead: str
    is_traced: bool = False
    """The trace runs it."""


REFUSED_SETTINGS = (
    _Refusal(
        "device",
        "cpu",
        "the memory of a run on the CPU",
        "`foretune trace` answers for it; or set device: cuda.",
        is_traced=True,
    ),
)
"""Each is refused by `estimate`, and by `trace` too unless it says so."""


_WITHOUT_LIMIT = frozenset({"bloom", "falcon", "granitemoehybrid", "mamba2", "nemotron_h"})
"""Families without rotary embedding that take any length: with linear biases, or without positions."""
_WITH_POSITION_TABLE = frozenset({"codegen", "gptj"})
"""Families that read their sines from a buffer of a fixed length."""


_TOKEN_LOOPS = frozenset({"falcon_mamba", "jamba", "mamba", "recurrent_gemma"})
"""Families whose torch code loops over tokens: millions of events, where a GPU has one kernel."""


# fmt: off
_UNTRACED = frozenset(
    {
        # no class in Transformers
        "baichuan", "chatglm", "internlm2", "kimi_k2", "mimo", "minicpm", "qwen",
        # no causal class for the whole of text and images
        "idefics3", "kimi_k25", "mistral3", "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe",
        "smolvlm", "step3p7",
    }
)
# fmt: on
"""Families that the trace cannot run either, so that nobody is sent there."""


def require_program(config: TrainingConfig, shape: ModelShape, stack: StackProfile) -> None:
    """Raise UnsupportedError for everything about a request whose program is not written, all at once."""
    problems = [*setting_problems(config, stack, "estimated"), *_shape_problems(config, shape)]
    problems += [*class_problems(shape, stack), *packed_model_problems(config, shape)]
    if stack.loss_kernel == "trl" and shape.count("experts"):
        text = f"{shape.id}: the routers' loss that the stack {stack.name} adds is not estimated yet."
        problems.append(Problem(text, "Trace it, or choose a dense model.", None, "model.id"))
    problems += [*_scan_problems(config, shape, stack), *_weights_problems(config, shape, stack)]
    if problems:
        raise UnsupportedError.of(problems)


def kernel_packages(shape: ModelShape) -> str:
    """Name the packages whose kernels a model's own layers would run if they were installed; empty: it has none."""
    family = DECODERS.get(shape.model_type)
    has_convolution = any("conv" in p.name and p.role == "other" for kind in shape.kinds for p in kind.parameters)
    return family.kernel_packages if family is not None and has_convolution else ""


def _weights_problems(config: TrainingConfig, shape: ModelShape, stack: StackProfile) -> list[Problem]:
    """Layers that hand on their attention weights, under reentrant checkpointing: these get a gradient of zeros."""
    is_reentrant = config.gradient_checkpointing and stack.checkpoint_form == "reentrant"
    if not (is_reentrant and config.attention == "eager" and getattr(find_decoder(shape), "returns_tuples", False)):
        return []
    text = f"{shape.id}: its layers return their attention weights, which is not estimated under the reentrant form."
    return [Problem(text, "Set attention: sdpa, or trace it.", None, "attention")]


def _scan_problems(config: TrainingConfig, shape: ModelShape, stack: StackProfile) -> list[Problem]:
    """What is not known of convolutions and scans on other stacks than foretune's."""
    problems, packages = [], kernel_packages(shape)
    if packages and stack.autocast != "none" and packages != "causal-conv1d":
        text = f"{shape.id}: its scans under autocast, as the stack {stack.name} has it, are not estimated yet."
        problems.append(Problem(text, "Take the stack foretune.", None, "model.id"))
    if packages and stack.keeps_cache and not config.gradient_checkpointing:
        text = (
            f"The stack {stack.name} keeps a cache without checkpointing, where {shape.id}'s states are not estimated."
        )
        problems.append(Problem(text, "Set gradient_checkpointing: true.", None, "gradient_checkpointing"))
    return problems


def setting_problems(config: TrainingConfig, stack: StackProfile, verb: str) -> list[Problem]:
    """List the settings whose memory is not known yet; `verb` says what is not done: estimated, traced."""
    problems = []
    for refusal in REFUSED_SETTINGS:
        if refusal.is_traced and verb == "traced":
            continue
        value: object = config
        for name in refusal.field.split("."):
            value = getattr(value, name, None)
        if value == refusal.value:
            text = f"{refusal.field} is {str(refusal.value).lower()}: {refusal.what} is not {verb} yet."
            problems.append(Problem(text, refusal.instead, None, refusal.field))
    problems += packed_setting_problems(config, stack, verb)
    if config.loss != "stock" and stack.loss != "own":
        text = f"loss is {config.loss}: the stack {stack.name} has no {config.loss} loss."
        problems.append(Problem(text, "Set loss: stock, or take the stack foretune.", None, "loss"))
    problems += _litgpt_problems(config, stack, verb) if stack.model_code != "transformers" else []
    lora = config.lora
    is_4bit = config.quantization is not None and config.quantization.scheme == "nf4"
    if lora is not None and lora.use_dora and is_4bit and not stack.copies_code_tables:
        text = f"lora.use_dora is true: DoRA on a 4-bit base is not {verb} yet for the stack {stack.name}."
        problems.append(Problem(text, "Leave quantization out, or set lora.use_dora: false.", None, "lora.use_dora"))
    return problems


def _litgpt_problems(config: TrainingConfig, stack: StackProfile, verb: str) -> list[Problem]:
    """litgpt has its own model classes, and what it leaves no choice about."""
    if verb == "traced":
        text = f"The stack {stack.name} runs litgpt's own model classes, which are not traced."
        return [Problem(text, f"`foretune estimate --stack {stack.name}` has their program.", None, None)]
    wrong: list[tuple[str, str, str]] = []
    if config.gradient_checkpointing:
        wrong.append(("gradient_checkpointing", "true: litgpt checkpoints nothing on one device", "false"))
    if config.attention != "sdpa":
        wrong.append(("attention", f"{config.attention}: litgpt calls torch's, or its own for capped scores", "sdpa"))
    precision = config.precision
    if config.lora is not None and precision.adapter_dtype != precision.dtype:
        own = f"{precision.adapter_dtype}: litgpt's adapters have the format of its weights"
        wrong.append(("precision.adapter_dtype", own, precision.dtype))
    lora = config.lora
    if lora is not None and lora.use_dora:
        wrong.append(("lora.use_dora", "true: litgpt has none", "false"))
    if lora is not None and lora.modules_to_save:
        wrong.append(("lora.modules_to_save", "set: litgpt trains adapters alone", "[]"))
    if config.quantization is not None and config.quantization.scheme != "nf4":
        what = f"{config.quantization.scheme}: litgpt's base of that kind is not estimated yet"
        wrong.append(("quantization.scheme", what, "nf4"))
    if config.quantization is not None and config.optimizer.name != "adamw":
        name = f"{config.optimizer.name}: under a quantized base litgpt takes bitsandbytes' paged AdamW"
        wrong.append(("optimizer.name", name, "adamw"))
    return [Problem(f"{field} is {what}.", f"Set {field}: {to}.", None, field) for field, what, to in wrong]


def class_problems(shape: ModelShape, stack: StackProfile) -> list[Problem]:
    """Say where a model's class was another one in the stack's Transformers.

    Up to 4.57 experts were linear layers of their own, which are quantized and adapted; today's are stacked.
    """
    is_older = stack.model_code == "transformers" and int(stack.transformers.split(".")[0]) < 5
    if not (is_older and shape.count("experts")):
        return []
    text = (
        f"{shape.id}: its experts are stacked today; in Transformers {stack.transformers} they were layers of "
        "their own, and that class is not here to be run."
    )
    return [Problem(text, "Choose a dense model, or a stack of today.", None, "model.id")]


def _unknown_family(shape: ModelShape) -> Problem:
    """Say that a family has no program, and where to go instead."""
    family = shape.model_type
    if family in _TOKEN_LOOPS:
        text = f"{shape.id}: {family} loops over tokens in torch; the memory of a kernel in its place is not known."
        hint = "Choose a family whose layers run in chunks: falcon_h1, granitemoehybrid, nemotron_h, qwen3_5_text."
        return Problem(text, hint, None, "model.id")
    text = f"{shape.id}: the memory of {family} models is not estimated yet."
    if not _UNTRACED & {family, shape.outer_type}:
        hint = "`foretune trace` runs the real program instead (it needs: pip install 'foretune[train]')."
    elif shape.outer_type is not None:
        hint = "Use a text-only checkpoint of the family. `foretune models show` counts this one."
    else:
        hint = "Choose another model. `foretune models show` counts this one."
    return Problem(text, hint, None, "model.id")


def _shape_problems(config: TrainingConfig, shape: ModelShape) -> list[Problem]:
    family, traits = shape.model_type, shape.traits
    if find_decoder(shape) is None and family not in DECODERS:
        return [_unknown_family(shape)]
    problems = []
    for key in traits.unwritten:
        text = f"{shape.id} sets {key}, which is not estimated yet."
        problems.append(Problem(text, "`foretune trace` runs it.", None, "model.id"))
    if find_decoder(shape) is None:
        text = f"{shape.id} has parts beside the language model (vision or audio), which are not estimated yet."
        problems.append(Problem(text, "Use a text-only checkpoint of the family.", None, "model.id"))
    if config.loss == "liger" and traits.final_softcap is not None:
        text = f"loss is liger: {shape.id} caps its logits after the head, which a fused loss does not."
        problems.append(Problem(text, "Set loss: chunked.", None, "loss"))
    known = {*ACTIVATIONS, *DECODERS[family].own_activations}
    if traits.activation is not None and traits.activation not in known:
        text = f"{shape.id}: the activation {traits.activation!r} has no known kernels."
        problems.append(Problem(text, f"Known are {', '.join(sorted(known))}.", None, "model.id"))
    if shape.refuses_sdpa and config.attention == "sdpa":
        own = "can cap its attention scores" if family == "gemma2" else "writes out its attention scores"
        what = {"gpt_oss": "has attention sinks", "mamba2": "has no attention"}.get(family, own)
        text = f"attention is sdpa, but {shape.id} {what}, and Transformers refuses sdpa for it."
        problems.append(Problem(text, "Set attention: eager.", None, "attention"))
    if traits.num_heads and traits.num_kv_heads and traits.num_heads % traits.num_kv_heads:
        text = f"{shape.id}: {traits.num_heads} heads cannot share {traits.num_kv_heads} key/value heads evenly."
        problems.append(Problem(text, "Check num_attention_heads and num_key_value_heads.", None, "model.id"))
    if family == "opt" and config.loss == "chunked":
        text = f"loss is chunked: {shape.id} is an OPT, whose backbone lies where the chunked loss does not look."
        problems.append(Problem(text, "Set loss: stock.", None, "loss"))
    width = (traits.num_heads or 0) * (traits.head_dim or 0)
    if family in ("bitnet", "helium") and width != traits.hidden_size:
        text = f"{shape.id}: {family} needs heads that together are as wide as the model: {width} is not "
        problems.append(Problem(f"{text}{traits.hidden_size}.", "Check head_dim and hidden_size.", None, "model.id"))
    if family == "falcon" and config.quantization is not None and _has_biases(shape):
        text = f"{shape.id}: Falcon adds in place to a 4-bit layer's output with bias, which torch's autograd forbids."
        problems.append(Problem(text, "Choose lora without quantization.", None, "quantization"))
    if "altup_coef_clip" in traits.flags and config.quantization is not None:
        text = f"{shape.id}: its class clips the weights of its streams in place, which 4-bit weights do not allow."
        problems.append(Problem(text, "Choose lora without quantization.", None, "quantization"))
    if traits.rotary_dim is not None and (traits.rotary_dim < 2 or traits.rotary_dim % 2):
        text = f"{shape.id}: a rotary width of {traits.rotary_dim} cannot be halved, so the model cannot run."
        problems.append(Problem(text, "Check head_dim and partial_rotary_factor.", None, "model.id"))
    if config.quantization is not None and not any(p.is_quantizable for p in shape.projections):
        text = f"{shape.id} has no nn.Linear in its layers, so there is nothing to quantize."
        problems.append(Problem(text, "Leave quantization out.", None, "quantization"))
    length, limit = config.batch.sequence_length, shape.max_positions
    has_table = family in _WITH_POSITION_TABLE or (traits.rotary_dim is None and family not in _WITHOUT_LIMIT)
    if has_table and limit is not None and length > limit:
        text = f"batch.sequence_length is {length}, but {shape.id} has a table of {limit} positions."
        problems.append(Problem(text, f"Set it to {limit} or less.", None, "batch.sequence_length"))
    return problems


def _has_biases(shape: ModelShape) -> bool:
    return any(parameter.role == "bias" for kind in shape.kinds for parameter in kind.parameters)


def require_device(config: TrainingConfig, device: DeviceSpec) -> None:
    """Raise ConfigError where a device cannot do what is asked for: bf16 without hardware support."""
    if config.precision.dtype == "bf16" and device.has_bf16 is False:
        capability = f" (compute capability {device.compute_capability})" if device.compute_capability else ""
        raise ConfigError(
            f"precision.dtype is bf16, but {device.name}{capability} has no bfloat16: it needs 8.0 or later.",
            hint="Set precision.dtype: fp16 for lora or qlora, fp32 for full, or choose another device.",
            field="precision.dtype",
        )
