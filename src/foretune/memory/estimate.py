"""From a configuration and a model's shape to what it needs: record, replay, attribute."""

from typing import NamedTuple

from foretune.contract import TrainingConfig, fingerprint
from foretune.devices import DeviceSpec
from foretune.errors import ConfigError
from foretune.memory.allocator import Program, Replay, replay
from foretune.memory.answer import MemoryEstimate, PhaseMemory
from foretune.memory.components import COMPONENT_ORDER, Facts, components_at, describe_components
from foretune.memory.kernels import AttentionKernels
from foretune.memory.overhead import context_bytes, host_need, safety_margin
from foretune.memory.program import emitted_microsteps, record_program
from foretune.memory.qualify import require_device, require_program
from foretune.memory.stack import FORETUNE, StackProfile
from foretune.memory.templates import Recording, Walk
from foretune.models import ModelShape, Projection, lora_parameters, resolve_targets

__all__ = ["ESTIMATOR_VERSION", "estimate_memory", "kernels_of", "record", "requested_bytes"]

ESTIMATOR_VERSION = "1"
"""Rises whenever a number moves."""

MAX_BYTES = 1 << 60
MAX_EVENTS = 280_000
"""Longer programs are replayed with fewer layers; their requests are walked at full depth."""


class _Figures(NamedTuple):
    """What a replay gives, with the peak's components."""

    allocated: int
    reserved: int
    phases: tuple[tuple[str, int, int], ...]
    peak_phase: str
    sums: dict[str, int]


def estimate_memory(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None = None, *, stack: StackProfile = FORETUNE
) -> MemoryEstimate:
    """Estimate what a fine-tune needs, from its allocation program replayed through the allocator.

    `device` decides which kernels run and what is known of its context; its size has no influence. Raises
    UnsupportedError for what has no program, ConfigError for what the device cannot do, for unknown LoRA targets and
    beyond 2^60 bytes.
    """
    recording, facts = record(config, shape, device, stack)
    requested = recording.requested_peak()
    if requested > MAX_BYTES:
        raise ConfigError(
            f"{shape.id} with these settings needs more than 2^60 bytes, beyond any device.",
            hint="Check batch.micro_batch_size, batch.sequence_length and the model's sizes.",
        )
    figures, is_extrapolated = _figures(recording)
    context = context_bytes(device)
    margin, basis = safety_margin(config, figures.reserved)
    return MemoryEstimate(
        estimator_version=ESTIMATOR_VERSION,
        model=shape.id,
        model_type=shape.model_type,
        total_params=shape.total_params,
        trainable_params=facts.trainable_params,
        quantized_params=facts.quantized_params,
        adapted_params=sum(p.in_features * p.out_features * len(p.layers) for p in facts.adapted),
        method=config.method,
        fingerprint=fingerprint(config),
        stack=stack.description,
        attention_kernel=_kernel_name(config, shape, kernels_of(device, stack)),
        requested_bytes=requested,
        allocated_bytes=figures.allocated,
        reserved_bytes=figures.reserved,
        context=context,
        process_bytes=figures.reserved + context.likely_bytes,
        safety_margin_bytes=margin,
        safety_margin_basis=basis,
        need_bytes=figures.reserved + context.high_bytes + margin,
        peak_phase=figures.peak_phase,
        components=describe_components(figures.sums, facts),
        phases=tuple(
            PhaseMemory(phase=name, allocated_bytes=allocated, reserved_bytes=reserved)
            for name, allocated, reserved in figures.phases
        ),
        host=host_need(config, shape, facts.trainable_params),
        assumptions=_assumptions(config, shape, device, stack, is_extrapolated),
        untested_paths=_untested_paths(config, device),
    )


def record(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None, stack: StackProfile
) -> tuple[Recording, Facts]:
    """Record the program after checking that there is one; returns it with the counts it was made from."""
    require_program(config, shape, stack)
    if device is not None:
        require_device(config, device)
    adapted = _adapted(config, shape)
    if config.lora is None:
        trainable = shape.text_params
    else:
        trainable = lora_parameters(adapted, config.lora.rank)
    quantized = sum(p.in_features * p.out_features * len(p.layers) for p in shape.projections if p.is_quantizable)
    facts = Facts(config, shape, adapted, trainable, quantized if config.quantization is not None else 0)
    return record_program(config, shape, stack, kernels_of(device, stack), adapted), facts


def requested_bytes(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None = None, *, stack: StackProfile = FORETUNE
) -> int:
    """Return the peak of requested bytes alone, without allocator: a lower bound of allocated, close to it."""
    return record(config, shape, device, stack)[0].requested_peak()


def kernels_of(device: DeviceSpec | None, stack: StackProfile) -> AttentionKernels:
    """Say which attention kernels run; an unknown device is taken to have compute capability 8.0 or later."""
    capability = device.compute_capability if device is not None else None
    is_recent = capability is None or float(capability) >= 8.0
    on_windows = stack.platform == "windows" or (device is not None and device.platform == "windows")
    return AttentionKernels(
        has_flash=is_recent and not on_windows,
        tensor_core_alignment=is_recent,
        repeats_heads=stack.repeats_heads_for_sdpa,
    )


def _adapted(config: TrainingConfig, shape: ModelShape) -> tuple[Projection, ...]:
    return () if config.lora is None else resolve_targets(shape, config.lora.targets)


def _figures(recording: Recording) -> tuple[_Figures, bool]:
    """Replay the program; one that is too long is replayed with fewer layers and continued by its walk."""
    if recording.num_events <= MAX_EVENTS or recording.units.total == len(recording.units.recorded):
        return _replayed(recording), False
    half = _with_events(recording, MAX_EVENTS // 2)
    third = _with_events(recording, MAX_EVENTS // 3)
    half = half.with_total(max(half.units.total, third.units.total + 1))
    figures, gap = _replayed(half), _gap(third)
    depth, deeper = half.units.total - third.units.total, recording.units.total - half.units.total
    gap_at_depth = max(_gap_of(figures) + (_gap_of(figures) - gap) * deeper // depth, 0)
    return _continued(figures, half.walk(), recording.walk(), gap_at_depth), True


def _gap(recording: Recording) -> int:
    return _gap_of(_replayed(recording))


def _gap_of(figures: _Figures) -> int:
    """What the allocator holds beyond what is allocated."""
    return figures.reserved - figures.allocated


def _with_events(recording: Recording, num_events: int) -> Recording:
    """The same program with as many units as `num_events` events allow, at least one more than are recorded."""
    fewest = len(recording.units.recorded) + 1
    base = recording.with_total(fewest).num_events
    each = recording.with_total(fewest + 1).num_events - base
    return recording.with_total(fewest + max(num_events - base, 0) // each)


def _replayed(recording: Recording) -> _Figures:
    program = recording.expand()
    result = replay(program.events, program.marks)
    sums = components_at(program, result.peak_position, result.allocated_peak)
    return _Figures(
        result.allocated_peak, result.reserved_peak, _phases(program.phases, result), _peak_phase(program, result), sums
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


def _continued(replayed: _Figures, shallow: Walk, deep: Walk, gap: int) -> _Figures:
    """Carry a shallower program's figures to a deeper one: requests from its walk, slack in proportion, the given gap
    between reserved and allocated."""
    sums = dict.fromkeys(COMPONENT_ORDER, 0) | deep.sums
    sums["allocator slack"] = max(replayed.allocated * deep.peak // shallow.peak - deep.peak, 0)
    allocated = sum(sums.values())
    phases = []
    for name, phase_allocated, _ in replayed.phases:
        at_depth = phase_allocated * deep.phases[name] // shallow.phases[name]
        phases.append((name, at_depth, at_depth + gap))
    return _Figures(allocated, allocated + gap, tuple(phases), deep.peak_phase, sums)


def _kernel_name(config: TrainingConfig, shape: ModelShape, kernels: AttentionKernels) -> str:
    """Name the kernel that unmasked attention runs on."""
    if config.attention == "eager":
        return "eager"
    t = shape.traits
    is_half = config.precision.dtype != "fp32"
    if kernels.has_flash and is_half and (t.head_dim or 0) <= 256 and shape.model_type != "falcon":
        return "sdpa: flash"
    return "sdpa: math" if t.num_heads != t.num_kv_heads else "sdpa: memory-efficient"


def _assumptions(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None, stack: StackProfile, is_extrapolated: bool
) -> tuple[str, ...]:
    """State in words what the figures rest on."""
    batch = config.batch
    texts = [f"Every row has {batch.sequence_length} tokens, padded where it is shorter."]
    if device is None or device.compute_capability is None:
        texts.append("The device's compute capability is taken to be 8.0 or later, on Linux.")
    if batch.accumulation_steps > emitted_microsteps(config):
        texts.append(f"Of {batch.accumulation_steps} microsteps three are replayed; the others repeat the second.")
    if shape.max_positions is not None and batch.sequence_length > shape.max_positions:
        texts.append(f"{batch.sequence_length} tokens lie beyond the model's context of {shape.max_positions}.")
    if (
        config.quantization is not None
        and stack.has_gemm_4bit
        and batch.micro_batch_size * batch.sequence_length <= 1536
    ):
        texts.append("Up to 1,536 tokens bitsandbytes may skip the dequantized buffer in forward; it is counted.")
    if config.optimizer.name == "paged_adamw_8bit":
        texts.append(
            "Paged states of 1e5 elements and more lie in managed memory, outside these figures; they may move to the "
            "host, and steps then take longer."
        )
    if is_extrapolated:
        texts.append("So long a program is replayed with fewer layers; what the allocator adds is extrapolated.")
    return tuple(texts)


def _untested_paths(config: TrainingConfig, device: DeviceSpec | None) -> tuple[str, ...]:
    """Name what no published measurement of a known stack has touched."""
    texts = []
    is_bf16, capability = config.precision.dtype == "bf16", device.compute_capability if device else None
    if is_bf16 and config.attention == "eager":
        texts.append("eager attention in bf16")
    if capability is not None and float(capability) >= 9.0:
        texts.append(f"compute capability {capability} (its cuBLAS workspace and attention kernels)")
    if config.loss == "chunked":
        texts.append("the chunked loss")
    if config.optimizer.kernel == "fused":
        texts.append("the fused optimizer")
    return tuple(texts)
