"""From a configuration and a model's shape to what it needs: record, replay, attribute."""

from functools import cached_property

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec
from foretune.errors import ConfigError, UnsupportedError
from foretune.memory.allocator import Program
from foretune.memory.answer import MemoryEstimate
from foretune.memory.components import COMPONENT_ORDER, ITEM, Facts
from foretune.memory.figures import Figures, assemble, facts_of, figures_of, kernels_for
from foretune.memory.interval import intervals_around
from foretune.memory.kernels import NUM_UPDATES
from foretune.memory.overhead import context_bytes
from foretune.memory.program import record_program
from foretune.memory.qualify import require_device, require_program
from foretune.memory.stack import FORETUNE, StackProfile
from foretune.memory.templates import Recording, Walk
from foretune.models import ModelShape, litgpt_shape

__all__ = [
    "Recorded",
    "emit_program",
    "estimate_memory",
    "estimate_recorded",
    "least_bytes",
    "record",
    "record_memory",
    "requested_bytes",
]

MAX_BYTES = 1 << 60
MAX_EVENTS = 280_000
"""Longer programs are replayed with fewer layers; their requests are walked at full depth."""
MAX_EMITTED = 1_000_000
"""Longer programs are not emitted for who wants to see them: about 0.2 GB of host memory."""


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
    config: TrainingConfig,
    shape: ModelShape,
    device: DeviceSpec | None,
    stack: StackProfile,
    *,
    num_updates: int = NUM_UPDATES,
) -> tuple[Recording, Facts]:
    """Record the program after checking that there is one; returns it with the counts it was made from."""
    if stack.model_code != "transformers":
        shape = litgpt_shape(shape)
    require_program(config, shape, stack)
    stack = stack.on(device)
    if device is not None:
        require_device(config, device)
    facts = facts_of(config, shape)
    kernels = kernels_for(config, shape, device, stack)
    return record_program(config, shape, stack, kernels, facts.adapted, num_updates=num_updates), facts


class Recorded:
    """A fine-tune of which only one update is recorded: what a search walks. It is replayed only where it may fit."""

    def __init__(
        self, config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None, stack: StackProfile
    ) -> None:
        self.config, self.shape, self.device, self.stack = config, shape, device, stack
        self.first_update, _ = record(config, shape, device, stack, num_updates=1)

    @cached_property
    def least_requested_bytes(self) -> int:
        """A bound that the requested peak does not go below: in later updates the states are there from the start."""
        walk = self.first_update.walk()
        steps = [num_bytes for phase, num_bytes in walk.phases.items() if phase in ("forward", "loss", "backward")]
        return max(walk.peak, max(steps) + walk.end["optimizer states"])

    @cached_property
    def least_need_bytes(self) -> int:
        """What must be free at least: the need if the allocator reserved no more than that."""
        least = self.least_requested_bytes
        around = intervals_around(
            self.config,
            self.stack,
            context_bytes(self.device),
            allocated_bytes=least,
            reserved_bytes=least,
            num_params=self.shape.total_params,
            is_untested=False,
            is_extrapolated=False,
        )
        return around.process.high_bytes

    def estimate(self) -> MemoryEstimate:
        """Record all updates and replay them. Raises ConfigError beyond 2^60 bytes."""
        return estimate_memory(self.config, self.shape, self.device, stack=self.stack)


def record_memory(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None = None, *, stack: StackProfile = FORETUNE
) -> Recorded:
    """Record what `estimate_memory` replays. Raises as it does."""
    return Recorded(config, shape, device, stack)


def least_bytes(config: TrainingConfig, shape: ModelShape) -> int:
    """Return a bound that the requested peak does not go below, by arithmetic alone: what a search asks first.

    Formula: s*(P - Q) + Q/2 + a*A + k*G, and the larger of what the optimizer's step and the loss hold beside: all
    gradients g*G, or 8*T*V with full logits (log-probabilities and their gradient) and, without checkpointing, the
    inputs of the adapted layers in the adapters' format (training all weights: of the widest layer). A: adapters;
    G: trained parameters; k: bytes of states. Leaves out all else, so it is far too low for an estimate.
    """
    facts = facts_of(config, shape)
    quantized, item, tokens = facts.quantized_params, facts.trained_item_bytes, facts.tokens
    weights = (shape.total_params - quantized) * ITEM[config.precision.dtype] + quantized // 2
    adapters = facts.trainable_params * item if config.lora is not None else 0
    states = facts.trainable_params * {"adamw": 2 * item, "adamw_8bit": 2}.get(config.optimizer.name, 0)
    at_loss = 8 * tokens * shape.vocab_size if config.loss == "stock" else 0
    if not config.gradient_checkpointing:
        at_loss += tokens * _kept_width(facts)
    return weights + adapters + states + max(facts.trainable_params * item, at_loss)


def _kept_width(facts: Facts) -> int:
    """Bytes of a token that the linear layers keep for backward, at least: PEFT casts each adapted layer's input for
    itself; layers that train their own weight may share one."""
    config, layers = facts.config, facts.shape.num_layers
    if config.lora is None:
        widest = [
            max((p.in_features for p in facts.shape.projections if i in p.layers), default=0) for i in range(layers)
        ]
        return sum(widest) * ITEM[config.precision.dtype]
    if config.precision.adapter_dtype == config.precision.dtype:
        return 0
    return sum(p.in_features * len(p.layers) for p in facts.adapted) * ITEM[config.precision.adapter_dtype]


def requested_bytes(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None = None, *, stack: StackProfile = FORETUNE
) -> int:
    """Return the peak of requested bytes alone, without allocator: a lower bound of allocated, close to it."""
    return record(config, shape, device, stack)[0].requested_peak()


def emit_program(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None = None, *, stack: StackProfile = FORETUNE
) -> Program:
    """Emit the program that an estimate rests on, at full depth even where it is replayed with fewer layers.

    Raises what `estimate_memory` raises, and UnsupportedError where it is longer than MAX_EMITTED events.
    """
    recording = record(config, shape, device, stack)[0]
    if recording.num_events > MAX_EMITTED:
        raise UnsupportedError(
            f"The program of {shape.id} has {recording.num_events:,} allocations and frees, too many to be drawn: at "
            f"most {MAX_EMITTED:,} are.",
            hint="The figures alone have no such limit; fewer accumulation steps make the program shorter.",
        )
    return recording.expand()


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
