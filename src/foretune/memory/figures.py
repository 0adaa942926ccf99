"""From a replayed program to the values that a person gets: peaks, phases, components, assumptions in words.

Estimate and trace both end here; neither knows how the other came by its events.
"""

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

from foretune.contract import LoraSettings, TrainingConfig, fingerprint
from foretune.devices import DeviceSpec
from foretune.errors import ConfigError, UnsupportedError
from foretune.memory.allocator import Program, Replay, replay
from foretune.memory.answer import MemoryEstimate, PhaseMemory
from foretune.memory.components import Facts, components_at, describe_components
from foretune.memory.interval import intervals_around
from foretune.memory.kernels import CUDNN_MAX_WIDTHS, MAX_MICROSTEPS, SORTED_FROM_TOKENS, AttentionKernels
from foretune.memory.overhead import context_bytes, host_need
from foretune.memory.qualify import kernel_packages
from foretune.memory.stack import StackProfile
from foretune.models import (
    REMOTE_CODE_TYPES,
    ModelShape,
    Projection,
    lora_parameters,
    quantizable_params,
    resolve_targets,
)

__all__ = [
    "ESTIMATOR_VERSION",
    "Figures",
    "answered_for",
    "assemble",
    "facts_of",
    "figures_of",
    "kernels_for",
    "kernels_of",
]

EXTRAPOLATED = "So long a program is replayed with fewer layers; what the allocator adds is extrapolated."
KERNEL_WORDS = {"cudnn": "cuDNN", "flash": "flash", "efficient": "memory-efficient", "math": "math"}
ESTIMATOR_VERSION = "3"
"""Rises whenever a number moves."""


class Figures(NamedTuple):
    """What a replay gives, with the peak's components."""

    allocated: int
    reserved: int
    phases: tuple[tuple[str, int, int], ...]
    peak_phase: str
    peak_position: int
    """Index of the event that brought the peak."""
    sums: dict[str, int]


def figures_of(program: Program) -> Figures:
    """Replay a program and read off its peaks, phase by phase, and what is alive at the highest."""
    result = replay(program.events, program.marks)
    sums = components_at(program, result.peak_position, result.allocated_peak)
    return Figures(
        result.allocated_peak,
        result.reserved_peak,
        _phases(program.phases, result),
        _peak_phase(program, result),
        result.peak_position,
        sums,
    )


def _phases(names: tuple[str, ...], result: Replay) -> tuple[tuple[str, int, int], ...]:
    """Peaks of each phase: the microsteps of an update are put together."""
    peaks: dict[str, tuple[int, int]] = {}
    for name, phase in zip(names, result.phases, strict=True):
        allocated, reserved = peaks.get(name, (0, 0))
        peaks[name] = max(allocated, phase.allocated_peak), max(reserved, phase.reserved_peak)
    return tuple((name, *pair) for name, pair in peaks.items())


def _peak_phase(program: Program, result: Replay) -> str:
    return program.phases[sum(mark <= result.peak_position for mark in program.marks)]


def facts_of(config: TrainingConfig, shape: ModelShape) -> Facts:
    """Count what is trained, adapted and quantized. Raises ConfigError for unknown LoRA targets."""
    lora = config.lora
    adapted = () if lora is None else resolve_targets(shape, lora.targets, lora.modules_to_save)
    trainable = shape.text_params - shape.frozen_params if lora is None else lora_parameters(adapted, lora.rank)
    magnitudes = whole = 0
    if lora is not None:
        magnitudes = sum(p.out_features * len(p.layers) for p in adapted) if lora.use_dora else 0
        whole = _trained_whole(config, lora, shape, adapted)
    quantized = quantizable_params(shape)
    quantized += sum(p.num_elements for tower in shape.towers for p in tower.parameters if p.role == "linear")
    return Facts(
        config=config,
        shape=shape,
        adapted=adapted,
        trainable_params=trainable + magnitudes + whole,
        quantized_params=quantized if config.quantization is not None else 0,
        magnitudes=magnitudes,
        whole_params=whole,
    )


def _trained_whole(
    config: TrainingConfig, lora: LoraSettings, shape: ModelShape, adapted: tuple[Projection, ...]
) -> int:
    """Count the parameters of modules that are trained whole (PEFT matches ends of names).

    Raises ConfigError for a module that is not there, which PEFT would pass over in silence, and UnsupportedError for
    what PEFT would not train so: embeddings whose weight is the head's too (a copy that the head does not have), a
    quantized layer, an adapted one, a module made of others.
    """
    if not lora.modules_to_save:
        return 0
    modules = [(spec.name.rpartition(".")[0], spec.num_elements) for _, spec in shape.parameters()]
    embedding = next((spec.name for spec in shape.before if spec.role == "embedding"), "").rpartition(".")[0]
    if shape.tied_embeddings and embedding.endswith(tuple(lora.modules_to_save)):
        raise UnsupportedError(
            f"lora.modules_to_save names {embedding}, whose weight is {shape.id}'s head too: a copy of it would be "
            "trained, and the head would keep the old one.",
            hint="Leave it out, or choose a model with a head of its own.",
            field="lora.modules_to_save",
        )
    for name in lora.modules_to_save:
        if not any(module.endswith(name) for module, _ in modules):
            tied = " Its head is the embeddings' weight." if shape.tied_embeddings else ""
            raise ConfigError(
                f"lora.modules_to_save: {name[:60]!r} is no module of {shape.id} with weights of its own.{tied}",
                hint="`foretune models show MODEL` lists its parts.",
                field="lora.modules_to_save",
            )
    _require_whole_modules(config, lora, shape, adapted, {module for module, _ in modules})
    return sum(count for module, count in modules if module.endswith(tuple(lora.modules_to_save)))


def _require_whole_modules(
    config: TrainingConfig, lora: LoraSettings, shape: ModelShape, adapted: tuple[Projection, ...], modules: set[str]
) -> None:
    """Raise UnsupportedError for names that reach modules of other modules, quantized layers, adapted ones, towers."""
    containers = {module[:end] for module in modules for end, letter in enumerate(module) if letter == "."} - modules
    quantized = [p.name for p in shape.projections if p.is_quantizable] if config.quantization is not None else []
    towers = {spec.name.rpartition(".")[0] for tower in shape.towers for spec in tower.parameters}
    reasons = (
        (towers, "a part of a tower beside the language model", "Name it by more of its path."),
        (containers, "made of others", "Name those that it is made of."),
        (quantized, "quantized, and whole numbers cannot be trained", "Leave it out, or leave quantization out."),
        ([p.name for p in adapted], "adapted too", "Name it by its whole last part, or take it out of lora.targets."),
    )
    for name in lora.modules_to_save:
        for among, reason, hint in reasons:
            reached = next((module for module in sorted(among) if module.endswith(name)), None)
            if reached is not None:
                raise UnsupportedError(
                    f"lora.modules_to_save: {name[:60]!r} reaches {reached} of {shape.id}, which is {reason}.",
                    hint=hint,
                    field="lora.modules_to_save",
                )


def assemble(
    kind: Literal["estimated", "traced"],
    figures: Figures,
    facts: Facts,
    device: DeviceSpec | None,
    stack: StackProfile,
    *,
    requested_bytes: int,
    kernels_run: Collection[str],
    is_extrapolated: bool = False,
) -> MemoryEstimate:
    """Put the answer together from a program's figures; `kernels_run` are the attention kernels that sdpa chose."""
    config, shape = facts.config, facts.shape
    context = context_bytes(device)
    attention_kernel = _kernel_name(config, kernels_run)
    untested = _untested_paths(config, shape, device, stack, attention_kernel)
    around = intervals_around(
        config,
        stack,
        context,
        allocated_bytes=figures.allocated,
        reserved_bytes=figures.reserved,
        num_params=shape.total_params,
        is_untested=bool(untested),
        is_extrapolated=is_extrapolated,
    )
    return MemoryEstimate(
        kind=kind,
        **answered_for(facts, stack),
        attention_kernel=attention_kernel,
        requested_bytes=requested_bytes,
        allocated_bytes=figures.allocated,
        reserved_bytes=figures.reserved,
        allocated_interval=around.allocated,
        reserved_interval=around.reserved,
        process_interval=around.process,
        context=context,
        process_bytes=around.process.likely_bytes,
        safety_margin_bytes=around.reserved.high_bytes - figures.reserved,
        safety_margin_basis=around.reserved.basis,
        need_bytes=around.process.high_bytes,
        peak_phase=figures.peak_phase,
        components=describe_components(figures.sums, facts),
        phases=tuple(
            PhaseMemory(phase=name, allocated_bytes=allocated, reserved_bytes=reserved)
            for name, allocated, reserved in figures.phases
        ),
        host=host_need(config, shape, facts.trainable_params),
        assumptions=(*_assumptions(config, shape, device, stack), *([EXTRAPOLATED] if is_extrapolated else [])),
        untested_paths=untested,
    )


def answered_for(facts: Facts, stack: StackProfile) -> dict[str, Any]:
    """Return the fields of an answer that say what it is for."""
    shape = facts.shape
    return {
        "estimator_version": ESTIMATOR_VERSION,
        "model": shape.id,
        "model_type": shape.model_type,
        "total_params": shape.total_params,
        "trainable_params": facts.trainable_params,
        "quantized_params": facts.quantized_params,
        "adapted_params": sum(p.in_features * p.out_features * len(p.layers) for p in facts.adapted),
        "method": facts.config.method,
        "fingerprint": fingerprint(facts.config),
        "stack": stack.description,
    }


def kernels_of(device: DeviceSpec | None, stack: StackProfile) -> AttentionKernels:
    """Say which attention kernels run; an unknown device is taken to have compute capability 8.0 or later."""
    capability = device.compute_capability if device is not None else None
    is_recent = capability is None or float(capability) >= 8.0
    on_windows = stack.platform == "windows" or (device is not None and device.platform == "windows")
    return AttentionKernels(
        has_flash=is_recent and not on_windows,
        tensor_core_alignment=is_recent,
        repeats_heads=stack.repeats_heads_for_sdpa,
        cudnn_max_width=CUDNN_MAX_WIDTHS.get(capability or "", 0) if stack.prefers_cudnn else 0,
        has_safe_softmax=stack.has_safe_softmax,
    )


def kernels_for(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None, stack: StackProfile
) -> AttentionKernels:
    """Say which attention kernels run for a model: the flash-attn package's where it is asked for."""
    kernels = kernels_of(device, stack)
    if config.attention != "flash_attention_2":
        return kernels
    repeats_heads = shape.model_type in stack.flash_repeats_heads_of
    return kernels._replace(is_package=True, repeats_heads=repeats_heads)


def _kernel_name(config: TrainingConfig, kernels_run: Collection[str]) -> str:
    if config.attention != "sdpa":
        return "eager" if config.attention == "eager" else "flash-attn"
    return "sdpa: " + " and ".join(word for kernel, word in KERNEL_WORDS.items() if kernel in kernels_run)


def _assumptions(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None, stack: StackProfile
) -> tuple[str, ...]:
    """State in words what the figures rest on."""
    batch = config.batch
    rows = "of several examples" if batch.packing else "padded where it is shorter"
    texts = [f"Every row has {batch.sequence_length:,} tokens, {rows}."]
    if device is None or device.compute_capability is None:
        texts.append("The device's compute capability is taken to be 8.0 or later, on Linux.")
    if shape.model_type in REMOTE_CODE_TYPES:
        stand_in = REMOTE_CODE_TYPES[shape.model_type]
        texts.append(
            f"Transformers has no class for {shape.model_type}: its program is taken to be that of {stand_in}."
        )
    packages = kernel_packages(shape)
    if packages:
        texts.append(
            f"{packages} {'are' if ' and ' in packages else 'is'} not installed: Transformers' own torch code runs, "
            "where kernels would need other memory."
        )
    if batch.accumulation_steps > MAX_MICROSTEPS:
        texts.append(f"Of {batch.accumulation_steps:,} microsteps three are replayed; the others repeat the second.")
    if shape.max_positions is not None and batch.sequence_length > shape.max_positions:
        texts.append(f"{batch.sequence_length:,} tokens lie beyond the model's context of {shape.max_positions:,}.")
    if (
        config.quantization is not None
        and config.quantization.scheme == "nf4"
        and stack.has_gemm_4bit
        and batch.micro_batch_size * batch.sequence_length <= 1536
    ):
        texts.append("Up to 1,536 tokens bitsandbytes may skip the dequantized buffer in forward; it is counted.")
    if config.evaluation.is_asked_for and stack.loss != "own":
        texts.append(f"Evaluation is left out: how the stack {stack.name} evaluates is not known.")
    if config.optimizer.name == "paged_adamw_8bit":
        texts.append(
            "Paged states of 1e5 elements and more lie in managed memory, outside these figures; they may move to the "
            "host, and steps then take longer."
        )
    return tuple(texts)


def _untested_paths(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None, stack: StackProfile, attention_kernel: str
) -> tuple[str, ...]:
    """Name what no measurement of a known stack has touched (docs/accuracy.md says which did)."""
    texts = []
    capability = device.compute_capability if device else None
    if config.attention == "flash_attention_2" and not stack.has_flash_package:
        texts.append("the flash-attn package, which is experimental here")
    elif "flash" in attention_kernel.split(": ")[-1]:
        texts.append("flash attention's workspaces in backward (no measured peak lies in them)")
    if config.quantization is not None and config.quantization.scheme == "int8":
        texts.append("the 8-bit base (no column is taken to have outliers)")
    if config.loss == "liger":
        texts.append("Liger's loss on this stack")
    if config.batch.packing:
        texts.append("packed rows (their masks, and the attention kernel that takes one)")
    if config.lora is not None and config.lora.use_dora and config.quantization is not None:
        texts.append("DoRA on a quantized base")
    tokens = config.batch.micro_batch_size * config.batch.sequence_length
    if _trains_embeddings(config, shape) and tokens > SORTED_FROM_TOKENS:
        texts.append(f"the embedding's gradient for more than {SORTED_FROM_TOKENS:,} tokens (sorting them)")
    if config.lora is None and _has_layer_norms(shape):
        texts.append("the gradients of layer norms")
    if kernel_packages(shape):
        texts.append("convolutions and scans in torch (what a kernel takes beside its results is not counted)")
    if shape.count("experts"):
        texts.append("products of stacked experts")
    if capability is not None and float(capability) >= 10.0:
        texts.append(f"compute capability {capability} (its cuBLAS workspace and attention kernels)")
    return tuple(texts)


def _trains_embeddings(config: TrainingConfig, shape: ModelShape) -> bool:
    if config.lora is None:
        return True
    tables = [parameter.name.removesuffix(".weight") for parameter in shape.before if parameter.role == "embedding"]
    return any(table.endswith(config.lora.modules_to_save) for table in tables)


def _has_layer_norms(shape: ModelShape) -> bool:
    norms = (p for p in (*shape.before, *shape.after, *(q for kind in shape.kinds for q in kind.parameters)))
    return any(p.role == "norm" and p.name.endswith("bias") for p in norms)
