"""An estimate held against a device, and the nearest changes where the answer is no."""

from typing import Any, NamedTuple

from foretune.contract import TrainingConfig, check_config
from foretune.devices import DeviceSpec
from foretune.errors import ForetuneError
from foretune.memory.allocator import replay
from foretune.memory.answer import Change, Fit, MemoryEstimate, Verdict
from foretune.memory.estimate import MAX_EVENTS, estimate_memory, record
from foretune.memory.stack import FORETUNE, StackProfile
from foretune.models import ModelShape
from foretune.units import format_bytes

__all__ = ["assess_fit", "published_quantized_because"]

NUM_CHANGES = 3


def assess_fit(
    estimate: MemoryEstimate,
    config: TrainingConfig,
    shape: ModelShape,
    device: DeviceSpec,
    *,
    stack: StackProfile = FORETUNE,
    with_changes: bool = True,
) -> Fit:
    """Say whether an estimate fits a device, against what is free now where that is known.

    fits: reserved, the context's upper end and the safety margin are within the budget. tight: reserved and the
    context's lower end are, or the allocator gets by when it empties its cache. does not fit: neither. unknown: the
    model is published only quantized, the device does not run CUDA or shares its memory with the CPU.
    """
    budget = device.free_bytes if device.free_bytes is not None else device.total_bytes
    unknown = _unknown_because(shape, device)
    verdict: Verdict = "unknown" if unknown else _verdict(estimate, config, shape, device, stack, budget)
    changes: tuple[Change, ...] = ()
    if verdict == "does not fit" and with_changes:
        changes = _nearest_changes(estimate, config, shape, device, stack, budget)
    return Fit(
        verdict=verdict,
        device=device,
        budget_bytes=budget,
        budget_is="free now" if device.free_bytes is not None else "total",
        headroom_bytes=budget - estimate.need_bytes,
        because=unknown or _because(estimate, verdict, budget),
        changes=changes,
    )


def published_quantized_because(shape: ModelShape) -> str | None:
    """Say why nothing is known of a model that is published only quantized; None for all others."""
    if shape.published_only_as is None:
        return None
    return (
        f"{shape.id} is published only as {shape.published_only_as}. Its {shape.total_params:,} parameters describe "
        "the unquantized architecture, for which there is no checkpoint to load; the published one is refused before "
        "any weight, because its own quantization could override what is asked for."
    )


def _unknown_because(shape: ModelShape, device: DeviceSpec) -> str | None:
    because = published_quantized_because(shape)
    if because is not None:
        return because
    if device.vendor not in (None, "NVIDIA"):
        return f"{device.name} does not run CUDA; the figures are of torch's CUDA allocator and kernels."
    if device.is_unified:
        return f"{device.name} shares its memory with the CPU, so its size is not a budget for the GPU alone."
    return None


def _verdict(
    estimate: MemoryEstimate,
    config: TrainingConfig,
    shape: ModelShape,
    device: DeviceSpec,
    stack: StackProfile,
    budget: int,
) -> Verdict:
    if estimate.need_bytes <= budget:
        return "fits"
    if estimate.reserved_bytes + estimate.context.low_bytes <= budget:
        return "tight"
    capacity = budget - estimate.context.low_bytes
    if estimate.allocated_bytes <= capacity and _runs_within(capacity, config, shape, device, stack):
        return "tight"
    return "does not fit"


def _runs_within(
    capacity: int, config: TrainingConfig, shape: ModelShape, device: DeviceSpec, stack: StackProfile
) -> bool:
    """Replay the program on an allocator that gets no more than `capacity` and empties its cache when full."""
    recording, _ = record(config, shape, device, stack)
    if recording.num_events > MAX_EVENTS:
        return False
    return replay(recording.expand().events, capacity=capacity).out_of_memory is None


def _because(estimate: MemoryEstimate, verdict: Verdict, budget: int) -> str:
    need, largest = format_bytes(estimate.need_bytes), estimate.largest_component
    share = f"The largest part is {largest.name}, {format_bytes(largest.num_bytes)}."
    if verdict == "fits":
        return f"It needs {need} of {format_bytes(budget)}, context and safety margin included. {share}"
    if verdict == "tight":
        return f"It needs {need} with context and safety margin, and the budget is {format_bytes(budget)}. {share}"
    return f"It needs {need}, and the budget is {format_bytes(budget)}. {share}"


class _Step(NamedTuple):
    """A change of settings, nearest first."""

    label: str
    fields: dict[str, Any]
    """Section or field of TrainingConfig to its new value."""
    settings: tuple[str, ...]


def _steps(config: TrainingConfig) -> list[_Step]:
    """List single changes, those first that leave what is learnt as it is."""
    batch, optimizer, lora = config.batch, config.optimizer, config.lora
    steps = []
    if not config.gradient_checkpointing:
        label = "recompute activations (gradient checkpointing)"
        steps.append(_Step(label, {"gradient_checkpointing": True}, ("gradient_checkpointing=true",)))
    if config.loss == "stock":
        steps.append(_Step("compute the loss in chunks", {"loss": "chunked"}, ("loss=chunked",)))
    if batch.micro_batch_size > 1:
        total = batch.micro_batch_size * batch.accumulation_steps
        settings = ("batch.micro_batch_size=1", f"batch.accumulation_steps={total}")
        changed = batch.with_(micro_batch_size=1, accumulation_steps=total)
        steps.append(_Step("one sequence at a time, accumulated to the same batch", {"batch": changed}, settings))
    if optimizer.kernel == "foreach":
        changed_optimizer = optimizer.with_(implementation="fused")
        steps.append(
            _Step("the fused optimizer", {"optimizer": changed_optimizer}, ("optimizer.implementation=fused",))
        )
    if optimizer.name == "adamw" and lora is None:
        changed_optimizer = optimizer.with_(name="adamw_8bit", implementation=None)
        steps.append(_Step("8-bit optimizer states", {"optimizer": changed_optimizer}, ("optimizer.name=adamw_8bit",)))
    if batch.sequence_length > 256:
        half = batch.sequence_length // 2
        changed = batch.with_(sequence_length=half)
        label = f"rows of at most {half} tokens (longer ones must be cut)"
        steps.append(_Step(label, {"batch": changed}, (f"batch.sequence_length={half}",)))
    if lora is not None and config.quantization is None:
        steps.append(_Step("hold the base model in 4 bits (QLoRA)", {"quantization": {}}, ("quantization.scheme=nf4",)))
    if lora is not None and lora.rank > 8:
        changed_lora = lora.with_(rank=lora.rank // 2)
        label = f"rank {lora.rank // 2} (changes what is trained)"
        steps.append(_Step(label, {"lora": changed_lora}, (f"lora.rank={lora.rank // 2}",)))
    if lora is None:
        label = "train LoRA adapters instead of all weights (changes what is trained)"
        steps.append(_Step(label, {"lora": {}}, ("lora.rank=16",)))
        both: dict[str, Any] = {"lora": {}, "quantization": {}}
        label = "train LoRA adapters on a 4-bit base (changes what is trained)"
        steps.append(_Step(label, both, ("lora.rank=16", "quantization.scheme=nf4")))
    return steps


def _nearest_changes(
    estimate: MemoryEstimate,
    config: TrainingConfig,
    shape: ModelShape,
    device: DeviceSpec,
    stack: StackProfile,
    budget: int,
) -> tuple[Change, ...]:
    """Re-estimate single changes: the first three that fit, filled up with those that save most."""
    changes = []
    for step in _steps(config):
        changed = _changed(config, step)
        if changed is None:
            continue
        try:
            new = estimate_memory(changed, shape, device, stack=stack)
        except ForetuneError:
            continue  # a change that is not estimated is not proposed
        verdict: Verdict = "does not fit"
        if new.need_bytes <= budget:
            verdict = "fits"
        elif new.reserved_bytes + new.context.low_bytes <= budget:
            verdict = "tight"
        if new.need_bytes < estimate.need_bytes:
            changes.append(
                Change(
                    label=step.label,
                    settings=step.settings,
                    need_bytes=new.need_bytes,
                    allocated_bytes=new.allocated_bytes,
                    verdict=verdict,
                )
            )
    enough = [change for change in changes if change.verdict != "does not fit"][:NUM_CHANGES]
    rest = sorted((c for c in changes if c not in enough), key=lambda change: change.need_bytes)
    return (*enough, *rest[: NUM_CHANGES - len(enough)])


def _changed(config: TrainingConfig, step: _Step) -> TrainingConfig | None:
    """Return the changed configuration, or None where it would break a rule."""
    changed = config.with_(**step.fields)
    try:
        check_config(changed)
    except ForetuneError:
        return None
    return changed
