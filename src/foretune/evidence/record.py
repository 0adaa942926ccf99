"""What a run leaves behind: what was asked for, what ran, on what, what it used, and how it ended.

A record exists from a run's first moment, with outcome `started`; a process that is killed leaves that. What was not
measured is absent, never zero.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from foretune.contract import TrainingConfig
from foretune.errors import EvidenceError
from foretune.evidence.merging import MergeCheck
from foretune.memory.answer import MemoryEstimate
from foretune.texts import escape
from foretune.values import Value, encode_json

__all__ = [
    "BaseIdentity",
    "Check",
    "CodeIdentity",
    "DataIdentity",
    "EvaluationReading",
    "Failure",
    "Hardware",
    "Outcome",
    "Padding",
    "PhasePair",
    "PhaseReading",
    "ProbeCheck",
    "ProcessIdentity",
    "RunRecord",
    "Scope",
    "encode_record",
    "read_record",
]

Bytes = Annotated[int, Meta(ge=0, lt=1 << 62)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]

Outcome = Literal[
    "started",
    "success",
    "interrupted",
    "oom",
    "data-error",
    "config-error",
    "access-error",
    "dependency-error",
    "runtime-error",
    "non-finite",
    "verification-error",
    "save-error",
]


class PhaseReading(Value, frozen=True, kw_only=True):
    """Peaks of one phase. None: not measured."""

    phase: str
    peak_allocated_bytes: Bytes | None = None
    """`torch.cuda.max_memory_allocated`."""
    peak_reserved_bytes: Bytes | None = None
    """`torch.cuda.max_memory_reserved`."""
    peak_process_bytes: Bytes | None = None
    """On a CPU: resident memory (VmHWM) above what was resident before anything was loaded."""

    def larger(self, other: "PhaseReading") -> "PhaseReading":
        """Return the larger of each figure of two readings of one phase."""

        def pick(one: int | None, two: int | None) -> int | None:
            return max(found) if (found := [value for value in (one, two) if value is not None]) else None

        return PhaseReading(
            phase=self.phase,
            peak_allocated_bytes=pick(self.peak_allocated_bytes, other.peak_allocated_bytes),
            peak_reserved_bytes=pick(self.peak_reserved_bytes, other.peak_reserved_bytes),
            peak_process_bytes=pick(self.peak_process_bytes, other.peak_process_bytes),
        )


class Check(Value, frozen=True, kw_only=True):
    """One thing that was asked for, and what was found on the living model and optimizer."""

    field: str
    """The dotted path in the configuration, or what is checked beside it."""
    moment: Literal["before", "after"]
    """Before the first update of this process, or after the last."""
    requested: str
    effective: str

    @property
    def holds(self) -> bool:
        """Whether both are the same."""
        return self.requested == self.effective


class CodeIdentity(Value, frozen=True, kw_only=True):
    """Which code ran."""

    foretune: str
    source_sha256: str
    """Of all Python files of the package: tells an edited installation from a released one."""
    python: str
    libraries: tuple[str, ...]
    """`torch 2.13.0`, ..."""


class BaseIdentity(Value, frozen=True, kw_only=True):
    """Which base model was trained."""

    id: str
    resolved_revision: str | None = None
    """The commit of the Hub; None for a local folder."""
    weights_sha256: str | None = None
    """Of config.json and the weights' files; None: not read yet."""
    model_class: str | None = None
    """Of Transformers, as it was loaded; None: not loaded yet."""
    unused_tensors: tuple[str, ...] = ()
    """Names in the files that the class has no place for (the first hundred)."""


class DataIdentity(Value, frozen=True, kw_only=True):
    """Which rows were trained on."""

    file: str
    label_sha256: str
    """Of ids and labels in the order of the file."""
    num_rows: Count
    num_blank_lines: Count
    dropped_rows: Literal[0]
    num_tokens: Count
    num_supervised_tokens: Count
    truncated_rows: Count
    held_out_rows: Count = 0
    evaluation_file: str | None = None
    evaluation_label_sha256: str | None = None
    evaluation_rows: Count = 0
    tokenizer_sha256: str
    template_date: str | None = None


class Hardware(Value, frozen=True, kw_only=True):
    """On what it ran, before it began. None: not known."""

    device: str
    """`cpu`, or the card's name."""
    total_bytes: Bytes | None = None
    """Of the device; on a CPU of the machine."""
    free_bytes: Bytes | None = None
    """Before the run."""
    compute_capability: str | None = None
    driver: str | None = None
    other_processes: Count | None = None
    """That held memory of the card before the run."""
    processor: str | None = None
    num_threads: Count | None = None
    platform: str | None = None


class ProcessIdentity(Value, frozen=True, kw_only=True):
    """Which process wrote it: says of a record that is only `started` whether its run may still be going."""

    pid: int
    host: str
    boot_id: str | None = None


class Padding(Value, frozen=True, kw_only=True):
    """The token that fills rows; it is masked by its place."""

    id: int
    source: Literal["pad", "eos"]


class EvaluationReading(Value, frozen=True, kw_only=True):
    """Loss on rows that are not trained on."""

    update: Count
    """After so many updates."""
    loss: float
    """Mean over the tokens that carry loss."""
    num_tokens: Count
    """That carry loss."""
    is_best: bool


class Scope(Value, frozen=True, kw_only=True):
    """What was done and is measured: updates of the optimizer, each with all its microsteps."""

    num_updates: Count
    """Planned."""
    updates_done: Count = 0
    updates_skipped: Count = 0
    """By the loss scaler of fp16."""
    num_tokens: Count = 0
    """Trained, without padding, in this process."""
    num_supervised_tokens: Count = 0
    seconds: float | None = None
    """Of the updates of this process alone: no loading, evaluation or saving."""
    first_loss: float | None = None
    last_loss: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Real tokens a second, without padding."""
        return self.num_tokens / self.seconds if self.seconds else None


class ProbeCheck(Value, frozen=True, kw_only=True):
    """Logits of a reloaded artifact beside those that its run stored."""

    max_abs_difference: float
    tolerance: float
    adapter_dtype: str | None
    """As reloaded; None without adapters."""
    is_bitwise_equal: bool


class Failure(Value, frozen=True, kw_only=True):
    """How a run failed."""

    code: str
    message: str
    hint: str | None = None
    phase: str | None = None
    requested_bytes: Bytes | None = None
    """The request that failed for lack of memory, where it is known; no peak is."""


class PhasePair(NamedTuple):
    """The measured peak of a phase beside the predicted one, in bytes. None: not measured, or not predicted."""

    phase: str
    measured_bytes: int | None
    predicted_bytes: int | None


class RunRecord(Value, frozen=True, kw_only=True):
    """One run of `train`, `evaluate` or `merge`."""

    schema: Literal["foretune.record/1"] = "foretune.record/1"
    kind: Literal["train", "evaluate", "merge"]
    outcome: Outcome
    started_at: str
    """UTC, ISO 8601."""
    finished_at: str | None = None
    requested: TrainingConfig
    fingerprint: str
    """Of the requested configuration."""
    checks: tuple[Check, ...] = ()
    """Requested beside effective."""
    code: CodeIdentity
    process: ProcessIdentity
    base: BaseIdentity | None = None
    data: DataIdentity | None = None
    hardware: Hardware | None = None
    pad: Padding | None = None
    init_adapter_sha256: str | None = None
    """Of the adapters as they were made, before any update; None without adapters."""
    row_order_sha256: str | None = None
    """Of the first epoch's micro batches."""
    prediction: MemoryEstimate | None = None
    """Made before the run and never changed."""
    readings: tuple[PhaseReading, ...] = ()
    scope: Scope | None = None
    evaluations: tuple[EvaluationReading, ...] = ()
    best_update: Count | None = None
    best_checkpoint: str | None = None
    resumed_at: tuple[int, ...] = ()
    """Updates after which a later process went on."""
    artifact: str | None = None
    """Path within the run's folder."""
    probe: ProbeCheck | None = None
    """Of `evaluate`."""
    merge_check: MergeCheck | None = None
    """Of `merge`."""
    warnings: tuple[str, ...] = ()
    failure: Failure | None = None

    @property
    def is_success(self) -> bool:
        """Whether the run ended as it should, with an artifact."""
        return self.outcome == "success"

    @property
    def is_on_host(self) -> bool:
        """Whether it ran on a CPU: then peaks are of the process' growth, else of what the allocator gave out."""
        return self.requested.device == "cpu"

    @property
    def phase_pairs(self) -> tuple[PhasePair, ...]:
        """The peaks that were measured, each beside its prediction, in the order in which they were read."""
        phases = () if self.prediction is None else self.prediction.phases
        predicted = {each.phase: each.reserved_bytes if self.is_on_host else each.allocated_bytes for each in phases}
        pairs = (
            PhasePair(
                each.phase,
                each.peak_process_bytes if self.is_on_host else each.peak_allocated_bytes,
                predicted.get(each.phase),
            )
            for each in self.readings
        )
        return tuple(pair for pair in pairs if pair.measured_bytes is not None)

    @property
    def peak_pair(self) -> PhasePair | None:
        """The largest of the measured peaks beside the predicted one of the whole run; None: nothing was measured."""
        measured = [pair.measured_bytes for pair in self.phase_pairs if pair.measured_bytes is not None]
        if not measured:
            return None
        need = self.prediction
        predicted = None if need is None else need.process_bytes if self.is_on_host else need.allocated_bytes
        return PhasePair("all", max(measured), predicted)

    def __repr__(self) -> str:
        model, method = escape(self.requested.model.id), self.requested.method
        return f"<RunRecord of {self.kind}: {self.outcome}, {model}, {method}, begun {escape(self.started_at)}>"

    def _repr_html_(self) -> str:
        from foretune.evidence.notebook import show_record

        return show_record(self)


def encode_record(record: RunRecord) -> bytes:
    """Return a record as its file holds it: what is None is left out."""
    return f"{encode_json(_known(msgspec.to_builtins(record)))}\n".encode()


def _known(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _known(value) for key, value in data.items() if value is not None}
    return [_known(item) for item in data] if isinstance(data, (list, tuple)) else data


def read_record(path: str | os.PathLike[str]) -> RunRecord:
    """Read the record of a run, `RUN/record.json`.

    Raises EvidenceError where there is none, or where it cannot be read.

        record = read_record("runs/first/record.json")
        record.outcome, record.peak_pair
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=RunRecord)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise EvidenceError(
            f"There is no record: {reason}.", hint="Name the folder of a run.", place=str(path)
        ) from error
    except (msgspec.MsgspecError, RecursionError) as error:
        hint = "It is damaged, or of another version of foretune."
        raise EvidenceError(f"The record cannot be read: {error}.", hint=hint, place=str(path)) from error
