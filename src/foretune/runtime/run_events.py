"""What happens in a run, one value at a time; the faces draw them, and `updates.jsonl` keeps some."""

from foretune.evidence import EvaluationReading, RunRecord
from foretune.values import Value

__all__ = ["CheckpointSaved", "PhaseBegan", "RunEvent", "RunFinished", "RunResumed", "UpdateDone"]


class PhaseBegan(Value, frozen=True, kw_only=True):
    """A phase that takes its time begins: load, prepare, rehearsal, evaluation, save."""

    phase: str


class UpdateDone(Value, frozen=True, kw_only=True):
    """An update was applied."""

    update: int
    """From 1."""
    num_updates: int
    epoch: float
    """Passes over the data until now."""
    loss: float
    """Mean over the tokens of the update that carry loss."""
    learning_rate: float
    gradient_norm: float | None
    """Before clipping; None: not computed."""
    num_tokens: int
    """Of this update, without padding."""
    tokens_per_second: float
    was_skipped: bool = False
    """fp16 only: a gradient overflowed, so no weight moved."""


class CheckpointSaved(Value, frozen=True, kw_only=True):
    """A checkpoint is on disk."""

    update: int
    path: str


class RunResumed(Value, frozen=True, kw_only=True):
    """A run goes on where an earlier process stopped."""

    update: int
    """Updates that are done; 0: there was no checkpoint, and it begins anew."""
    warnings: tuple[str, ...]
    """What there is to say about that, and about the run."""


class RunFinished(Value, frozen=True, kw_only=True):
    """The run has its artifact."""

    folder: str
    record: RunRecord


RunEvent = PhaseBegan | UpdateDone | EvaluationReading | CheckpointSaved | RunResumed | RunFinished
