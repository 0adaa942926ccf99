"""The journeys that run something: from a configuration to an artifact, and from an artifact to what it says."""

from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from foretune.api.planning import Planned, Request, RunPlanned, first_record, plan_run
from foretune.contract import TrainingConfig
from foretune.data import cache_folder
from foretune.errors import ForetuneError
from foretune.evidence import RunRecord
from foretune.models import WeightFiles, fetch_weights
from foretune.runtime.preparation import Progress

if TYPE_CHECKING:
    from foretune.runtime.interrupts import Interrupts
    from foretune.runtime.meter import Meter
    from foretune.runtime.run_events import RunEvent
    from foretune.runtime.run_plan import RunPlan

__all__ = ["RunPlanned", "plan_training", "train"]


def plan_training(
    config: TrainingConfig, *, offline: bool = False, workers: int | None = None, allow_infeasible: bool = False
) -> Iterator[Progress | RunPlanned]:
    """Check everything that a run checks before it begins, and write nothing; the last item is the plan.

    Raises as `train` does before its folder exists.

        *_, planned = plan_training(load_config("run.yaml").config)
        planned.num_updates, planned.disk_bytes
    """
    asked = Request(offline=offline, workers=workers, allow_infeasible=allow_infeasible)
    planned = yield from plan_run(first_record(config), asked, cache=None, note=lambda record: None)
    yield planned.answer


def train(
    config: TrainingConfig,
    *,
    resume: bool = False,
    offline: bool = False,
    workers: int | None = None,
    use_cache: bool = True,
    allow_infeasible: bool = False,
    meter: "Meter | None" = None,
) -> "Iterator[Progress | RunPlanned | RunEvent]":
    """Run a fine-tune: an iterator of what happens, whose last item is the finished run with its record.

    Everything is checked before the run's folder exists; a start that fails leaves `OUTPUT.failed-start.json` and no
    folder. `resume` goes on after the newest checkpoint of a run that ended early. `meter` reads what is used (a test
    passes its own). Closing the iterator ends the run as Ctrl-C does.

    Raises ConfigError, UnsupportedError, ModelAccessError, DataError, MissingDependencyError and RunDirectoryError
    before; OutOfMemoryError, VerificationError, NonFiniteLossError, SaveError, InterruptedRunError and RunError while
    it runs. `error.record` is the path of the record.

        *_, finished = train(load_config("run.yaml").config)
        finished.record.scope.tokens_per_second
    """
    from foretune.runtime.interrupts import Interrupts

    asked, interrupts = Request(offline, workers, allow_infeasible, resume), Interrupts()
    yield from _attended(_trained(config, asked, interrupts, use_cache=use_cache, meter=meter), interrupts)


def _attended(
    events: "Generator[Progress | RunPlanned | RunEvent]", interrupts: "Interrupts"
) -> "Iterator[Progress | RunPlanned | RunEvent]":
    """Yield events. A signal that comes while the caller looks at one is heard by the run, when it goes on."""
    from foretune.runtime.interrupts import Stopped

    with closing(events):
        for event in events:
            try:
                with interrupts.outside():
                    yield event
            except Stopped as stop:
                events.throw(stop)


def _trained(
    config: TrainingConfig, asked: Request, interrupts: "Interrupts", *, use_cache: bool, meter: "Meter | None"
) -> "Generator[Progress | RunPlanned | RunEvent]":
    from foretune.runtime.interrupts import Stopped
    from foretune.runtime.run_folder import begin_anew, note_failed_start

    grown = [first_record(config)]
    with ExitStack() as stack:
        stack.enter_context(interrupts.listening())
        cache = cache_folder()
        if not use_cache:
            cache = Path(stack.enter_context(TemporaryDirectory(prefix="foretune-")))
        try:
            planned = yield from plan_run(grown[0], asked, cache=cache, note=grown.append)
            yield planned.answer
            weights = fetch_weights(planned.weights)
            plan = _run_plan(planned, weights, grown)
        except ForetuneError as error:
            with suppress(Stopped), interrupts.shielded():
                note_failed_start(error, grown[-1])
            raise
        except Exception as error:
            note_failed_start(ForetuneError(f"A mistake in foretune: {type(error).__name__}: {error}"), grown[-1])
            raise
        except (Stopped, KeyboardInterrupt) as stop:
            stopped = interrupts.error()
            with suppress(Stopped), interrupts.shielded():  # what came meanwhile ends what is ending
                note_failed_start(stopped, grown[-1])
            raise stopped from stop
        begin_anew(config)
        yield from _run(plan, asked, interrupts, meter)


def _run_plan(planned: Planned, weights: WeightFiles, grown: list[RunRecord]) -> "RunPlan":
    """Make a plan of what was checked, now that the weights are here."""
    from foretune.memory.figures import facts_of
    from foretune.runtime.artifact import prompt_format
    from foretune.runtime.checkpoint import first_progress
    from foretune.runtime.feed import Feed
    from foretune.runtime.run_plan import RunPlan
    from foretune.runtime.stops import base_stop_ids, closing_ids, strange_closings
    from foretune.runtime.tokenizer import load_tokenizer

    config, rows, stats = planned.answer.config, planned.rows, planned.answer.stats
    assert weights.folder is not None
    tokenizer = load_tokenizer(
        rows.tokenizer_folder, name=planned.answer.model, template=None, template_date=rows.template_date
    )
    form = prompt_format(
        tokenizer,
        num_conversations=stats.num_message_rows,
        num_instructions=stats.num_instruction_rows,
        template_date=rows.identity.template_date,
    )
    closing, own = closing_ids(rows.train, tokenizer), base_stop_ids(weights.folder, planned.raw_config)
    record = planned.record.with_(warnings=(*planned.record.warnings, *strange_closings(closing, own)))
    grown.append(record)
    unpacked = config.with_(batch=config.batch.with_(packing=False))
    return RunPlan(
        config=config,
        shape=planned.shape,
        facts=facts_of(config, planned.shape),
        raw_config=planned.raw_config,
        weights=weights,
        feed=Feed(rows.train, config, rows.padding.id),
        evaluation=None if rows.held_out is None else Feed(rows.held_out, unpacked, rows.padding.id),
        length=planned.length,
        record=record,
        progress=first_progress(record, weights.fingerprint()),
        tokenizer_folder=rows.tokenizer_folder,
        example_ids=list(tokenizer.encode([form.example_prompt])[0].ids),
        format=form,
        stop_ids=tuple(sorted({*closing, *own})),
        device=planned.device,
    )


def _run(plan: "RunPlan", asked: Request, interrupts: "Interrupts", meter: "Meter | None") -> "Iterator[RunEvent]":
    from foretune.runtime.interrupts import Stopped
    from foretune.runtime.meter import Meter
    from foretune.runtime.run_folder import open_run
    from foretune.runtime.run_plan import resume_plan
    from foretune.runtime.train import train_run

    assert plan.config.output is not None
    try:
        with open_run(Path(plan.config.output), resumes=asked.resumes) as folder:
            checkpoint = None
            if asked.resumes:
                plan, checkpoint = resume_plan(plan, folder)
            used = meter or Meter(plan.config.device)
            yield from train_run(plan, folder, interrupts, meter=used, checkpoint=checkpoint)
    except (Stopped, KeyboardInterrupt) as stop:
        raise interrupts.error() from stop
