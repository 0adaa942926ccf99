"""A run that was checked: what it works on, and where it begins, at its start or at an earlier process' checkpoint."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec
from foretune.errors import RunDirectoryError, SaveError
from foretune.evidence import RunRecord, read_record
from foretune.memory.components import Facts
from foretune.models import ModelShape, WeightFiles
from foretune.runtime.artifact import PromptFormat
from foretune.runtime.checkpoint import ProgressState, checkpoints, read_progress
from foretune.runtime.feed import Feed
from foretune.runtime.run_folder import RECORD, RunFolder
from foretune.runtime.schedule import RunLength

__all__ = ["RunPlan", "resume_plan"]


class RunPlan(NamedTuple):
    """A run that was checked and can begin."""

    config: TrainingConfig
    shape: ModelShape
    facts: Facts
    raw_config: Mapping[str, Any]
    weights: WeightFiles
    feed: Feed
    evaluation: Feed | None
    length: RunLength
    record: RunRecord
    """As it is written first."""
    progress: ProgressState
    """Where it begins: at update 0, or at a checkpoint's."""
    tokenizer_folder: Path
    example_ids: list[int]
    format: PromptFormat
    stop_ids: tuple[int, ...]
    device: DeviceSpec | None = None
    """The card; None on a CPU."""


def resume_plan(plan: RunPlan, folder: RunFolder) -> tuple[RunPlan, Path | None]:
    """Return the plan from the newest checkpoint on; without one it begins anew in the same folder.

    A checkpoint whose files are not whole is passed over for the one before, and the record says so. Raises
    RunDirectoryError where the run has ended well, where what it began with has changed, and where there are
    checkpoints and none can be read.
    """
    before = read_record(folder.path / RECORD)
    if before.is_success:
        raise RunDirectoryError(
            f"{folder.path} holds a run that is finished.",
            hint="To train anew, choose another output: --output FOLDER.",
        )
    record = plan.record.with_(started_at=before.started_at)
    found_any = checkpoints(folder.checkpoints)
    for _, checkpoint in reversed(found_any):
        try:
            found = read_progress(checkpoint)
        except SaveError as error:
            record = record.with_(warnings=(*record.warnings, f"A checkpoint was passed over: {error.message}"))
            continue
        _require_same(found, plan.progress, folder.path)
        changed = _changed_machine(found, plan.progress)
        record = record.with_(
            resumed_at=(*before.resumed_at, found.update),
            evaluations=found.evaluations,
            warnings=(*record.warnings, *changed),
        )
        same = {"libraries": plan.progress.libraries, "num_threads": plan.progress.num_threads}
        return plan._replace(record=record, progress=found.with_(**same)), checkpoint
    if found_any:
        raise RunDirectoryError(
            f"None of the {len(found_any)} checkpoints in {folder.checkpoints} is whole: {record.warnings[-1]}",
            hint="Check the disk. To train anew, choose another output: --output FOLDER.",
        )
    return plan._replace(record=record.with_(resumed_at=(*before.resumed_at, 0))), None


def _require_same(found: ProgressState, expected: ProgressState, folder: Path) -> None:
    for field, what in (
        ("fingerprint", "the configuration"),
        ("label_sha256", "the training rows, or how they are tokenized,"),
        ("evaluation_label_sha256", "the evaluation rows"),
        ("base_sha256", "the base model's files"),
    ):
        if getattr(found, field) != getattr(expected, field):
            raise RunDirectoryError(
                f"{folder} cannot be resumed: {what} changed since its checkpoint.",
                hint="Resume with what it began with. To train anew, choose another output: --output FOLDER.",
            )


def _changed_machine(found: ProgressState, expected: ProgressState) -> Iterator[str]:
    """Say where bitwise equality cannot be promised: other libraries or threads."""
    if (found.libraries, found.num_threads) != (expected.libraries, expected.num_threads):
        yield (
            "Resumed with other libraries or another number of threads than before, so losses may differ in their last "
            f"digits: {', '.join(found.libraries)}, {found.num_threads} threads then."
        )
