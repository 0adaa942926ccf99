"""The journey of `merge`: from a run's adapters to a whole model, with the difference between the two."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from foretune.api.evaluation import source_of
from foretune.devices import host_memory
from foretune.errors import ConfigError, RunDirectoryError
from foretune.evidence import MergeCheck, RunRecord, WeightDtype
from foretune.models import WeightFiles, fetch_weights
from foretune.units import format_bytes
from foretune.values import Value

if TYPE_CHECKING:
    from foretune.runtime.artifact import ArtifactFacts
    from foretune.runtime.interrupts import Interrupts
    from foretune.runtime.merge import MergeTask
    from foretune.runtime.run_events import PhaseBegan

__all__ = ["MergeAnswer", "MergePlan", "merge", "plan_merge"]

DEFAULT_OUTPUT = "merged"


class MergePlan(Value, frozen=True, kw_only=True):
    """What a merge would do, and what it takes. Sizes are estimated from the headers of the base's files."""

    run: str
    output: str
    base: str
    updates: int
    """That the adapters were trained for."""
    quantization: Literal["nf4", "int8"] | None
    """Of the base in training; what is merged into is the unquantized one."""
    dtypes: tuple[WeightDtype, ...]
    """Of the weights that are merged into, and of the merged ones."""
    num_layers: int
    """Whose weight takes up an adapter."""
    num_replaced: int
    """Tensors of modules that were trained whole."""
    num_copied: int
    """Tensors that stay as they are."""
    disk_bytes: int
    """That are written."""
    free_disk_bytes: int
    host_bytes: int
    """Memory that is held at most at once."""
    available_host_bytes: int | None
    """None: the system does not tell."""


class MergeAnswer(Value, frozen=True, kw_only=True):
    """A merged model, and whether it is the one that was trained."""

    run: str
    output: str
    plan: MergePlan
    record: RunRecord
    record_file: str

    @property
    def check(self) -> MergeCheck:
        """The differences and the verdict."""
        assert self.record.merge_check is not None
        return self.record.merge_check


class _Planned(NamedTuple):
    task: "MergeTask"
    plan: MergePlan


def plan_merge(run: str, *, output: str | None = None, offline: bool = False) -> MergePlan:
    """Check everything that a merge checks before it begins; nothing is written and nothing downloaded.

    Raises as `merge` does before it writes, and ConfigError where the base's files are not on this machine.

        plan_merge("runs/first").disk_bytes
    """
    return _planned(run, output, offline=offline, fetch=_on_this_machine).plan


def merge(run: str, *, output: str | None = None, offline: bool = False) -> "Iterator[PhaseBegan | MergeAnswer]":
    """Merge a run's adapters into their base, and say how far the result is from what was trained; the answer is last.

    Written to `output` (RUN/merged), which may not exist; a record goes to RUN/merges. What is not verified is written
    all the same: ask `answer.check.verdict`. Closing the iterator ends it as Ctrl-C does, and leaves nothing.

    Raises RunDirectoryError for a run without success or without adapters, a busy one, another base model or an output
    that exists; ConfigError where disk or memory do not suffice; UnsupportedError for weights that cannot be merged;
    VerificationError where a merged weight is not what its layer does; SaveError, InterruptedRunError.

        *_, answer = merge("runs/first")
        answer.check.verdict, answer.check.max_abs_logit_difference
    """
    from foretune.runtime.interrupts import Interrupts, Stopped

    interrupts = Interrupts()
    try:
        with interrupts.listening():
            yield from _merged(run, output, interrupts, offline=offline)
    except (Stopped, KeyboardInterrupt) as stop:
        raise interrupts.error() from stop


def _merged(
    run: str, output: str | None, interrupts: "Interrupts", *, offline: bool
) -> "Iterator[PhaseBegan | MergeAnswer]":
    planned = _planned(run, output, offline=offline, fetch=fetch_weights)
    from foretune.runtime.merge import MergeDone, merge_run, refuse_taken
    from foretune.runtime.run_folder import hold_run

    with hold_run(Path(run)), closing(merge_run(planned.task, interrupts)) as events:
        refuse_taken(planned.task.final)
        for event in events:
            if not isinstance(event, MergeDone):
                yield event
                continue
            yield MergeAnswer(
                run=run,
                output=planned.plan.output,
                plan=planned.plan,
                record=event.record,
                record_file=str(event.record_file),
            )


def _planned(run: str, output: str | None, *, offline: bool, fetch: Callable[[WeightFiles], WeightFiles]) -> _Planned:
    """Check run, base, weights, disk and memory, in this order."""
    from foretune.runtime.libraries import libraries_for, require_libraries

    require_libraries("torch", "transformers", "peft")
    from foretune.memory.figures import facts_of
    from foretune.runtime.merge import merge_task, refuse_inside, refuse_taken
    from foretune.runtime.reload import finished_run
    from foretune.runtime.run_folder import CHECKPOINTS

    found = finished_run(Path(run))
    trained, _, described = found
    _require_adapters(run, described)
    final = Path(run) / DEFAULT_OUTPUT if output is None else Path(output)
    refuse_taken(final)
    require_libraries(*libraries_for(trained.requested))
    source = source_of(*found, offline=offline, fetch=fetch)
    assert source.weights is not None
    refuse_inside(final, found[1], Path(run) / CHECKPOINTS, source.weights.folder)
    facts = facts_of(trained.requested, source.shape)
    task = merge_task(Path(run), final, found, source.weights, source.raw_config, facts)
    plan = _plan_of(task)
    _require_host(plan)
    return _Planned(task, plan)


def _require_adapters(run: str, described: "ArtifactFacts") -> None:
    if described.kind != "adapter":
        raise RunDirectoryError(
            f"{run} trained every weight: its artifact is a whole model, and there is nothing to merge.",
            hint=f"Use {run}/model as it is.",
        )


def _on_this_machine(weights: WeightFiles) -> WeightFiles:
    """Refuse to download anything for a plan. Raises ConfigError."""
    if weights.folder is None:
        raise ConfigError(
            f"The weights of {weights.name} are not on this machine, and a plan downloads nothing.",
            hint="Leave --dry-run out: the base is downloaded then, and the plan is made before anything is written.",
        )
    return weights


def _plan_of(task: "MergeTask") -> MergePlan:
    from foretune.runtime.merge import disk_bytes, host_bytes
    from foretune.runtime.preflight import require_room

    config, skeleton = task.trained.requested, task.skeleton
    needed, host = disk_bytes(task), host_memory()
    return MergePlan(
        run=str(task.run),
        output=str(task.final),
        base=task.described.base.id,
        updates=task.described.updates,
        quantization=None if config.quantization is None else config.quantization.scheme,
        dtypes=task.dtypes,
        num_layers=len(skeleton.layers),
        num_replaced=len(skeleton.whole),
        num_copied=len(task.tensors) - len(skeleton.layers) - len(skeleton.whole),
        disk_bytes=needed,
        free_disk_bytes=require_room(task.final, needed),
        host_bytes=host_bytes(task),
        available_host_bytes=None if host is None else host.free_bytes,
    )


def _require_host(plan: MergePlan) -> None:
    """Refuse a merge for which this machine's memory does not suffice. Raises ConfigError."""
    if plan.available_host_bytes is not None and plan.host_bytes > plan.available_host_bytes:
        raise ConfigError(
            f"The merge holds up to {format_bytes(plan.host_bytes)} of this machine's memory at once (estimated), and "
            f"{format_bytes(plan.available_host_bytes)} are available.",
            hint="End what else runs here, or copy the run to a machine that has more.",
        )
