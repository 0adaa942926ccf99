"""From a configuration and a model's shape to what it needs: record, replay, attribute."""

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec
from foretune.errors import ConfigError
from foretune.memory.answer import MemoryEstimate
from foretune.memory.components import COMPONENT_ORDER, Facts
from foretune.memory.figures import Figures, assemble, facts_of, figures_of, kernels_of
from foretune.memory.program import record_program
from foretune.memory.qualify import require_device, require_program
from foretune.memory.stack import FORETUNE, StackProfile
from foretune.memory.templates import Recording, Walk
from foretune.models import ModelShape, litgpt_shape

__all__ = ["estimate_memory", "estimate_recorded", "record", "requested_bytes"]

MAX_BYTES = 1 << 60
MAX_EVENTS = 280_000
"""Longer programs are replayed with fewer layers; their requests are walked at full depth."""


def estimate_memory(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None = None, *, stack: StackProfile = FORETUNE
) -> MemoryEstimate:
    """Estimate what a fine-tune needs, from its allocation program replayed through the allocator.

    `device` decides which kernels run and what is known of its context; its size has no influence. Raises
    UnsupportedError for what has no program, ConfigError for what the device cannot do, for unknown LoRA targets and
    beyond 2^60 bytes.
    """
    recording, facts = record(config, shape, device, stack)
    return estimate_recorded(recording, facts, device, stack)


def estimate_recorded(
    recording: Recording, facts: Facts, device: DeviceSpec | None, stack: StackProfile
) -> MemoryEstimate:
    """Replay what `record` returned. Raises ConfigError beyond 2^60 bytes."""
    requested = recording.requested_peak()
    if requested > MAX_BYTES:
        raise ConfigError(
            f"{facts.shape.id} with these settings needs more than 2^60 bytes, beyond any device.",
            hint="Check batch.micro_batch_size, batch.sequence_length and the model's sizes.",
        )
    figures, is_extrapolated = _figures(recording)
    return assemble(
        "estimated",
        figures,
        facts,
        device,
        stack,
        requested_bytes=requested,
        kernels_run=recording.kernels_run,
        is_extrapolated=is_extrapolated,
    )


def record(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None, stack: StackProfile
) -> tuple[Recording, Facts]:
    """Record the program after checking that there is one; returns it with the counts it was made from."""
    if stack.model_code != "transformers":
        shape = litgpt_shape(shape)
    require_program(config, shape, stack)
    stack = stack.on(device)
    if device is not None:
        require_device(config, device)
    facts = facts_of(config, shape)
    return record_program(config, shape, stack, kernels_of(device, stack), facts.adapted), facts


def requested_bytes(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None = None, *, stack: StackProfile = FORETUNE
) -> int:
    """Return the peak of requested bytes alone, without allocator: a lower bound of allocated, close to it."""
    return record(config, shape, device, stack)[0].requested_peak()


def _figures(recording: Recording) -> tuple[Figures, bool]:
    """Replay the program; one that is too long is replayed with fewer layers and continued by its walk."""
    if recording.num_events <= MAX_EVENTS:
        return figures_of(recording.expand()), False
    half, third = recording.shortened(MAX_EVENTS // 2), recording.shortened(MAX_EVENTS // 3)
    if not third.num_layers < half.num_layers < recording.num_layers:
        return figures_of(recording.expand()), False  # its layers have too little in common
    figures, gap = figures_of(half.expand()), _gap(third)
    depth, deeper = half.num_layers - third.num_layers, recording.num_layers - half.num_layers
    gap_at_depth = max(_gap_of(figures) + (_gap_of(figures) - gap) * deeper // depth, 0)
    return _continued(figures, half.walk(), recording.walk(), gap_at_depth), True


def _gap(recording: Recording) -> int:
    return _gap_of(figures_of(recording.expand()))


def _gap_of(figures: Figures) -> int:
    """What the allocator holds beyond what is allocated."""
    return figures.reserved - figures.allocated


def _continued(replayed: Figures, shallow: Walk, deep: Walk, gap: int) -> Figures:
    """Carry a shallower program's figures to a deeper one: requests from its walk, slack in proportion, the given gap
    between reserved and allocated."""
    sums = dict.fromkeys(COMPONENT_ORDER, 0) | deep.sums
    sums["allocator slack"] = max(replayed.allocated * deep.peak // shallow.peak - deep.peak, 0)
    allocated = sum(sums.values())
    phases = []
    for name, phase_allocated, _ in replayed.phases:
        at_depth = phase_allocated * deep.phases[name] // shallow.phases[name]
        phases.append((name, at_depth, at_depth + gap))
    return Figures(allocated, allocated + gap, tuple(phases), deep.peak_phase, replayed.peak_position, sums)
