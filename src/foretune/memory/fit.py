"""An estimate held against a device, and the nearest changes where the answer is not yes."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from foretune.contract import TrainingConfig, check_config
from foretune.devices import DeviceSpec
from foretune.errors import ForetuneError
from foretune.memory.allocator import Program, replay
from foretune.memory.answer import Change, Fit, MemoryEstimate, Verdict
from foretune.memory.components import Facts
from foretune.memory.estimate import MAX_EVENTS, estimate_recorded, record
from foretune.memory.stack import FORETUNE, StackProfile
from foretune.memory.templates import Recording
from foretune.models import ModelShape
from foretune.units import format_bytes

__all__ = ["assess_fit", "published_quantized_because", "sure_budget"]

SPILLING = frozenset({"windows", "wsl"})
SPILL = (
    "On Windows and WSL the driver does not stop there but spills into system memory, where steps take many times "
    "longer; only the card's own memory is counted here."
)
NUM_CHANGES = 3
MOST_STEPS = 16
MISSING_OF_MARKETING_PERCENT = 7
"""Of the GB on a box the driver reports up to so much less (published nvidia-smi outputs against vendors' sizes)."""


def assess_fit(
    estimate: MemoryEstimate,
    config: TrainingConfig,
    shape: ModelShape,
    device: DeviceSpec,
    *,
    stack: StackProfile = FORETUNE,
    program: Program | None = None,
    with_changes: bool = True,
) -> Fit:
    """Say whether an estimate fits a device, against what is free now where that is known.

    fits: the upper end of the process' 90 % interval is within what is surely there. tight: its lower end is within
    the budget, or the allocator gets by when it empties its cache. does not fit: neither. unknown: the model is
    published only quantized, the device does not run CUDA or shares its memory with the CPU. `program` is what a trace
    rests on; without it the estimate's is recorded where it must be replayed.
    """
    budget = device.free_bytes if device.free_bytes is not None else device.total_bytes
    unknown = _unknown_because(shape, device)
    case = _Case(estimate, shape, device, stack, budget)
    verdict: Verdict = "unknown"
    because = unknown or ""
    if unknown is None:
        verdict, because = case.judge(estimate, lambda: program or _program_of(record(config, shape, device, stack)[0]))
    if verdict in ("tight", "does not fit") and (device.platform in SPILLING or stack.platform in SPILLING):
        because = f"{because} {SPILL}"
    changes: tuple[Change, ...] = ()
    if verdict in ("tight", "does not fit") and with_changes:
        changes = case.nearest_changes(config, verdict)
    return Fit(
        verdict=verdict,
        device=device,
        budget_bytes=budget,
        budget_is="free now" if device.free_bytes is not None else "total",
        headroom_bytes=budget - estimate.need_bytes,
        because=because,
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


def sure_budget(device: DeviceSpec) -> int:
    """Return what is surely there: what is free now, else the total; of a size on a box less what may be missing."""
    if device.free_bytes is not None:
        return device.free_bytes
    is_marketing = device.total_is == "marketing"
    return device.total_bytes * (100 - MISSING_OF_MARKETING_PERCENT) // 100 if is_marketing else device.total_bytes


def _unknown_because(shape: ModelShape, device: DeviceSpec) -> str | None:
    because = published_quantized_because(shape)
    if because is not None:
        return because
    if device.vendor not in (None, "NVIDIA"):
        return f"{device.name} does not run CUDA; the figures are of torch's CUDA allocator and kernels."
    if device.is_unified:
        return f"{device.name} shares its memory with the CPU, so its size is not a budget for the GPU alone."
    return None


class _Candidate(NamedTuple):
    """A changed configuration with its recorded program."""

    step: "_Step"
    config: TrainingConfig
    recording: Recording
    facts: Facts
    requested: int


class _Case(NamedTuple):
    """What all judgements of one question share."""

    estimate: MemoryEstimate
    shape: ModelShape
    device: DeviceSpec
    stack: StackProfile
    budget: int

    def judge(self, need: MemoryEstimate, program: Callable[[], Program | None]) -> tuple[Verdict, str]:
        """Return the verdict and what it rests on; `program` is called where it must be replayed."""
        budget, total = self.budget, format_bytes(need.need_bytes)
        sure = sure_budget(self.device)
        least = need.process_interval.low_bytes
        capacity = budget - need.context.low_bytes
        largest = need.largest_component
        share = f"The largest part is {largest.name}, {format_bytes(largest.num_bytes)}."
        if need.need_bytes <= sure:
            return "fits", f"It needs {total} of {format_bytes(budget)}, context and safety margin included. {share}"
        if need.need_bytes <= budget:
            missing = f"up to {MISSING_OF_MARKETING_PERCENT} % of the size on the box may not be there"
            return "tight", f"It needs {total}, and {missing}: {format_bytes(sure)} are sure. {share}"
        more = format_bytes(need.need_bytes - budget)
        if least <= budget:
            text = f"It may run: at the lower end of its interval it needs {format_bytes(least)}."
            return "tight", f"{text} To be sure, {more} more must be free. {share}"
        if need.allocated_bytes <= capacity and _runs_within(capacity, program()):
            text = "It runs only where the allocator empties its cache each time it is full, which costs time"
            return "tight", f"{text}; without that it reserves {format_bytes(need.reserved_bytes)}. {share}"
        return "does not fit", f"It needs {total}, and the budget is {format_bytes(budget)}: {more} too much. {share}"

    def nearest_changes(self, config: TrainingConfig, verdict: Verdict) -> tuple[Change, ...]:
        """Re-estimate single changes: the first three that help, filled up with those that save most.

        Where no single one helps, several together stand first: as few as may do, and as many as fit.
        """
        better: tuple[Verdict, ...] = ("fits",) if verdict == "tight" else ("fits", "tight")
        helpful: list[Change] = []
        others: list[_Candidate] = []
        for step in _steps(config):
            candidate = self._candidate(config, step)
            if candidate is None:
                continue
            change = self._change(candidate) if self._may_fit(candidate) else None
            if change is not None and change.verdict in better:
                helpful.append(change)
            else:
                others.append(candidate)
            if len(helpful) == NUM_CHANGES:
                return tuple(helpful)
        if not helpful:
            combined = [change for change in self._combined(config) if change.verdict in better]
            helpful = [*combined[:1], *combined[1:][-1:]]
        others.sort(key=lambda candidate: candidate.requested)
        rest = [self._change(candidate) for candidate in others[: NUM_CHANGES - len(helpful)]]
        return (*helpful, *(change for change in rest if change.need_bytes < self.estimate.need_bytes))

    def _candidate(self, config: TrainingConfig, step: "_Step") -> _Candidate | None:
        """Record a changed configuration; None where it breaks a rule, has no estimate or saves nothing."""
        changed = config.with_(**step.fields)
        try:
            check_config(changed)
            recording, facts = record(changed, self.shape, self.device, self.stack)
        except ForetuneError:
            return None
        requested = recording.requested_peak()
        return _Candidate(step, changed, recording, facts, requested) if self._saves(requested) else None

    def _saves(self, requested: int) -> bool:
        return requested < self.estimate.requested_bytes

    def _may_fit(self, candidate: _Candidate) -> bool:
        return candidate.requested + self.estimate.context.low_bytes <= self.budget

    def _change(self, candidate: _Candidate) -> Change:
        need = estimate_recorded(candidate.recording, candidate.facts, self.device, self.stack)
        verdict, _ = self.judge(need, lambda: _program_of(candidate.recording))
        return Change(
            label=candidate.step.label,
            settings=candidate.step.settings,
            method=candidate.config.method,
            need_bytes=need.need_bytes,
            allocated_bytes=need.allocated_bytes,
            verdict=verdict,
        )

    def _combined(self, config: TrainingConfig) -> Iterator[Change]:
        """Apply changes one on top of the other, those of the rows' length last; yield each that may fit."""
        taken: dict[str, str] = {}
        labels: dict[str, str] = {}
        current = config
        for _ in range(MOST_STEPS):
            steps = [step for step in _steps(current) if step.kind != "rank"]
            steps.sort(key=lambda step: step.kind == "rows")
            candidates = (self._candidate(current, step) for step in steps)
            candidate = next((candidate for candidate in candidates if candidate is not None), None)
            if candidate is None:
                return
            current = candidate.config
            labels[candidate.step.kind] = candidate.step.label
            taken |= {setting.partition("=")[0]: setting for setting in candidate.step.settings}
            if self._may_fit(candidate):
                whole = _Step("; ".join(labels.values()), {}, tuple(taken.values()), "all")
                change = self._change(candidate._replace(step=whole))
                yield change
                if change.verdict == "fits":
                    return


def _program_of(recording: Recording) -> Program | None:
    """Emit the program; None where it is too long to be replayed whole."""
    return recording.expand() if recording.num_events <= MAX_EVENTS else None


def _runs_within(capacity: int, program: Program | None) -> bool:
    """Replay a program on an allocator that gets no more than `capacity` and empties its cache when full."""
    return program is not None and replay(program.events, capacity=capacity).out_of_memory is None


class _Step(NamedTuple):
    """A change of settings, nearest first."""

    label: str
    fields: dict[str, Any]
    """Section or field of TrainingConfig to its new value."""
    settings: tuple[str, ...]
    kind: str


def _steps(config: TrainingConfig) -> list[_Step]:
    """List single changes, those first that leave what is learnt as it is."""
    return [*_cheaper(config), *_shorter(config), *_smaller(config)]


def _cheaper(config: TrainingConfig) -> Iterator[_Step]:
    batch, optimizer = config.batch, config.optimizer
    if not config.gradient_checkpointing:
        label = "recompute activations (gradient checkpointing)"
        yield _Step(label, {"gradient_checkpointing": True}, ("gradient_checkpointing=true",), "checkpointing")
    if config.loss == "stock":
        yield _Step("compute the loss in chunks", {"loss": "chunked"}, ("loss=chunked",), "loss")
    if batch.micro_batch_size > 1:
        total = batch.micro_batch_size * batch.accumulation_steps
        accumulated = ("batch.micro_batch_size=1", f"batch.accumulation_steps={total}")
        changed = batch.with_(micro_batch_size=1, accumulation_steps=total)
        yield _Step("one sequence at a time, accumulated to the same batch", {"batch": changed}, accumulated, "batch")
    if optimizer.kernel == "foreach":
        fused = {"optimizer": optimizer.with_(implementation="fused")}
        yield _Step("the fused optimizer", fused, ("optimizer.implementation=fused",), "optimizer")
    if optimizer.name == "adamw" and config.lora is None:
        settings: tuple[str, ...] = ("optimizer.name=adamw_8bit",)
        if optimizer.implementation is not None:
            settings = (*settings, "optimizer.implementation=null")
        eight_bit = {"optimizer": optimizer.with_(name="adamw_8bit", implementation=None)}
        yield _Step("8-bit optimizer states", eight_bit, settings, "optimizer")


def _shorter(config: TrainingConfig) -> Iterator[_Step]:
    batch = config.batch
    if batch.sequence_length > 256:
        half = batch.sequence_length // 2
        label = f"rows of at most {half:,} tokens (longer ones must be cut)"
        changed = {"batch": batch.with_(sequence_length=half)}
        yield _Step(label, changed, (f"batch.sequence_length={half}",), "rows")


def _smaller(config: TrainingConfig) -> Iterator[_Step]:
    lora = config.lora
    if lora is None:
        label = "train LoRA adapters instead of all weights (changes what is trained)"
        yield _Step(label, {"lora": {}}, ("lora.rank=16",), "method")
        label = "train LoRA adapters on a 4-bit base (changes what is trained)"
        settings: tuple[str, ...] = ("lora.rank=16", "quantization.scheme=nf4")
        yield _Step(label, {"lora": {}, "quantization": {}}, settings, "method")
        return
    if config.quantization is None:
        label = "hold the base model in 4 bits (QLoRA)"
        yield _Step(label, {"quantization": {}}, ("quantization.scheme=nf4",), "quantization")
    if lora.rank > 8:
        label = f"rank {lora.rank // 2} (changes what is trained)"
        yield _Step(label, {"lora": lora.with_(rank=lora.rank // 2)}, (f"lora.rank={lora.rank // 2}",), "rank")
