"""What is estimated and what is refused by name: a program that is not known is never approximated."""

from typing import NamedTuple

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec
from foretune.errors import ConfigError, Problem, UnsupportedError
from foretune.memory.blocks import ACTIVATIONS
from foretune.memory.families import DECODERS
from foretune.memory.stack import StackProfile
from foretune.models import ModelShape

__all__ = ["REFUSED_SETTINGS", "class_problems", "require_device", "require_program", "setting_problems"]


class _Refusal(NamedTuple):
    """A setting whose memory is not known yet."""

    field: str
    value: object
    what: str
    instead: str
    is_traced: bool = False
    """The trace runs it, as an experiment that no measurement has touched."""


REFUSED_SETTINGS = (
    _Refusal("device", "cpu", "the memory of a run on the CPU", "Set device: cuda."),
    _Refusal("quantization.scheme", "int8", "an 8-bit base", "Set quantization.scheme: nf4, or trace it.", True),
    _Refusal("lora.use_dora", True, "DoRA", "Set lora.use_dora: false, or trace it.", True),
    _Refusal("batch.packing", True, "a batch of packed rows", "Set batch.packing: false."),
)
"""Each is refused by `estimate`, and by `trace` too unless it says so."""


# fmt: off
_UNTRACED = frozenset(
    {
        # loops over tokens, where a GPU has a kernel
        "falcon_mamba", "jamba", "mamba", "recurrent_gemma",
        # no class in Transformers
        "internlm2", "kimi_k2", "mimo", "minicpm",
        # no causal class for the whole of text and images
        "idefics3", "kimi_k25", "mistral3", "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe",
        "smolvlm", "step3p7",
        # PEFT adapts their stacked experts or routers too, which the counts do not have yet
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "ernie4_5_moe", "exaone_moe", "glm4_moe",
        "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "llama4", "phimoe", "qwen3_next", "solar_open", "zamba2",
    }
)
# fmt: on
"""Families that the trace cannot run either, so that nobody is sent there."""


def require_program(config: TrainingConfig, shape: ModelShape, stack: StackProfile) -> None:
    """Raise UnsupportedError for everything about a request whose program is not written, all at once."""
    problems = [*setting_problems(config, stack, "estimated"), *_shape_problems(config, shape)]
    problems += class_problems(shape, stack)
    if stack.loss_kernel == "trl" and shape.count("experts"):
        text = f"{shape.id}: the routers' loss that the stack {stack.name} adds is not estimated yet."
        problems.append(Problem(text, "Trace it, or choose a dense model.", None, "model.id"))
    if problems:
        raise UnsupportedError.of(problems)


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
    if config.loss != "stock" and stack.loss != "own":
        text = f"loss is {config.loss}: the stack {stack.name} has no {config.loss} loss."
        problems.append(Problem(text, "Set loss: stock, or take the stack foretune.", None, "loss"))
    lora = config.lora
    if lora is not None and lora.modules_to_save and verb == "estimated":
        text = "lora.modules_to_save: a module trained whole beside adapters is not estimated yet."
        problems.append(Problem(text, "Leave it empty, or trace it.", None, "lora.modules_to_save"))
    if lora is not None and lora.use_dora and config.quantization is not None:
        text = f"lora.use_dora is true: DoRA on a quantized base is not {verb} yet."
        problems.append(Problem(text, "Leave quantization out, or set lora.use_dora: false.", None, "lora.use_dora"))
    return problems


def class_problems(shape: ModelShape, stack: StackProfile) -> list[Problem]:
    """Say where a model's class was another one in the stack's Transformers.

    Up to 4.57 experts were linear layers of their own, which are quantized and adapted; today's are stacked.
    """
    if not shape.count("experts") or int(stack.transformers.split(".")[0]) >= 5:
        return []
    text = (
        f"{shape.id}: its experts are stacked today; in Transformers {stack.transformers} they were layers of "
        "their own, and that class is not here to be run."
    )
    return [Problem(text, "Choose a dense model, or a stack of today.", None, "model.id")]


def _shape_problems(config: TrainingConfig, shape: ModelShape) -> list[Problem]:
    family, traits = shape.model_type, shape.traits
    if family not in DECODERS:
        text = f"{shape.id}: the memory of {family} models is not estimated yet."
        hint = f"Families that are: {', '.join(sorted(DECODERS))}. `foretune models show` counts this one."
        if family not in _UNTRACED:
            hint = "`foretune trace` runs the real program instead (it needs: pip install 'foretune[train]')."
        return [Problem(text, hint, None, "model.id")]
    problems = []
    if shape.tower_params:
        text = f"{shape.id} has parts beside the language model (vision or audio), which are not estimated yet."
        problems.append(Problem(text, "Use a text-only checkpoint of the family.", None, "model.id"))
    if config.loss == "liger" and traits.final_softcap is not None:
        text = f"loss is liger: {shape.id} caps its logits after the head, which a fused loss does not."
        problems.append(Problem(text, "Set loss: chunked.", None, "loss"))
    if traits.activation is not None and traits.activation not in ACTIVATIONS:
        text = f"{shape.id}: the activation {traits.activation!r} has no known kernels."
        problems.append(Problem(text, f"Known are {', '.join(sorted(ACTIVATIONS))}.", None, "model.id"))
    if shape.refuses_sdpa and config.attention == "sdpa":
        text = f"attention is sdpa, but {shape.id} can cap its attention scores, and Transformers refuses sdpa for it."
        problems.append(Problem(text, "Set attention: eager.", None, "attention"))
    if family == "falcon" and (traits.rotary_dim is None or config.attention == "eager"):
        what = "Falcon with alibi" if traits.rotary_dim is None else "Falcon with eager attention"
        problems.append(Problem(f"{shape.id}: {what} is not estimated yet.", "Choose another model.", None, "model.id"))
    if traits.num_heads and traits.num_kv_heads and traits.num_heads % traits.num_kv_heads:
        text = f"{shape.id}: {traits.num_heads} heads cannot share {traits.num_kv_heads} key/value heads evenly."
        problems.append(Problem(text, "Check num_attention_heads and num_key_value_heads.", None, "model.id"))
    if family == "falcon" and config.quantization is not None and _has_biases(shape):
        text = f"{shape.id}: Falcon adds in place to a 4-bit layer's output with bias, which torch's autograd forbids."
        problems.append(Problem(text, "Choose lora without quantization.", None, "quantization"))
    if traits.rotary_dim is not None and (traits.rotary_dim < 2 or traits.rotary_dim % 2):
        text = f"{shape.id}: a rotary width of {traits.rotary_dim} cannot be halved, so the model cannot run."
        problems.append(Problem(text, "Check head_dim and partial_rotary_factor.", None, "model.id"))
    if config.quantization is not None and not any(p.is_quantizable for p in shape.projections):
        text = f"{shape.id} has no nn.Linear in its layers, so there is nothing to quantize."
        problems.append(Problem(text, "Leave quantization out.", None, "quantization"))
    length, limit = config.batch.sequence_length, shape.max_positions
    if traits.rotary_dim is None and limit is not None and length > limit:
        text = f"batch.sequence_length is {length}, but {shape.id} has {limit} learned positions."
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
