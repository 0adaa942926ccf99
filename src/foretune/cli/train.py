"""`foretune train`: run a fine-tune with every promise checked."""

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from foretune.cli.commands import Command, Example, Whole, option
from foretune.cli.output import Reply
from foretune.cli.progress import watched
from foretune.cli.run_view import RunView, bytes_or_unknown
from foretune.cli.terminal import Terminal, escape, wrapped
from foretune.errors import ForetuneError
from foretune.texts import quoted
from foretune.units import format_bytes

if TYPE_CHECKING:
    from foretune.api import RunPlanned, TrainingConfig
    from foretune.evidence import PhasePair, RunRecord

__all__ = ["train"]


@click.command(
    cls=Command,
    name="train",
    examples=[
        Example("What would be run, without running it?", "foretune train run.yaml --dry-run"),
        Example("Run it", "foretune train run.yaml"),
        Example("Go on with a run that was interrupted", "foretune train run.yaml --resume"),
    ],
)
@click.argument("config", type=click.Path(), metavar="CONFIG")
@option("--set", "settings", group="Configuration", metavar="KEY=VALUE", multiple=True, help="Any field; repeatable.")
@option("--output", group="Configuration", metavar="FOLDER", help="The run's folder; it may not exist, or be empty.")
@option("--resume", group="Run", is_flag=True, help="Go on after the newest checkpoint of the run in that folder.")
@option("--dry-run", group="Run", is_flag=True, help="Check everything and show the plan; nothing is written.")
@option("--allow-infeasible", group="Run", is_flag=True, help="Run although the prediction says that it does not fit.")
@option("--offline", group="Run", is_flag=True, help="Never ask the hub; paths and cache only.")
@option(
    "--workers",
    group="Run",
    type=Whole(1, 256),
    metavar="N",
    help="Encode rows in so many processes.  [default: one a core, at most 4]",
)
@option("--no-cache", group="Run", is_flag=True, help="Neither use nor keep encoded rows.")
def train(config: str, **given: Any) -> Reply | Iterator[Reply | ForetuneError]:
    """Run the fine-tune of a configuration file.

    Everything is checked before the run's folder exists: libraries, device, data, memory, disk. What runs is verified
    before the first update and after the last one, and the artifact is there whole or not at all. Ctrl-C stops after
    the update, with a checkpoint; a second one at once. Needs: pip install 'foretune[train]'.
    """
    from foretune.cli.request import run_config
    from foretune.contract import Override

    overrides: list[str | Override] = list(given["settings"])
    if given["output"] is not None:
        overrides.append(Override("output", given["output"], "--output"))
    loaded = run_config(config, overrides)
    if given["dry_run"]:
        return _plan(loaded.config, given)
    return _events(loaded.config, given)


def _plan(config: "TrainingConfig", given: dict[str, Any]) -> Reply:
    from foretune import api

    plan = watched(
        api.plan_training(
            config,
            offline=given["offline"],
            workers=given["workers"],
            allow_infeasible=given["allow_infeasible"],
        )
    )
    return Reply("train.plan", plan.to_dict, lambda terminal: _draw_plan(plan, terminal))


def _events(config: "TrainingConfig", given: dict[str, Any]) -> Iterator[Reply | ForetuneError]:
    from foretune import api

    view = RunView()
    run = api.train(
        config,
        resume=given["resume"],
        offline=given["offline"],
        workers=given["workers"],
        use_cache=not given["no_cache"],
        allow_infeasible=given["allow_infeasible"],
    )
    try:
        with closing(run) as events:  # type: ignore[type-var] # it is a generator: what ends here ends the run
            for event in events:
                yield from _shown(event, view)
    except ForetuneError as error:
        view.end()
        yield error


def _shown(event: Any, view: RunView) -> Iterator[Reply]:
    """Show an event to a person, and give it to a program."""
    name = type(event).__name__
    if name == "Progress":
        view.rows(event)
        return
    if name == "RunFinished":
        view.end()
        yield Reply("train", event.to_dict, lambda terminal: _draw_finished(event, terminal))
        return
    if name == "RunPlanned":
        for line in _brief(event):
            view.say(line)
    elif name == "RunResumed":
        for line in event.warnings:
            view.say(line)
        view.say(f"Going on after update {event.update:,}." if event.update else "No checkpoint yet: beginning anew.")
    elif name == "PhaseBegan":
        view.phase(event.phase)
    elif name == "UpdateDone":
        view.update(event)
    elif name == "EvaluationReading":
        view.say(f"evaluation after update {event.update:,}: loss {event.loss:.4f}{' (best)' * event.is_best}")
    elif name == "CheckpointSaved":
        view.say(f"checkpoint after update {event.update:,}: {event.path}")
    yield Reply(f"train.{EVENTS[name]}", event.to_dict, lambda terminal: (), is_event=True)


EVENTS = {
    "RunPlanned": "plan",
    "PhaseBegan": "phase",
    "UpdateDone": "update",
    "EvaluationReading": "evaluation",
    "CheckpointSaved": "checkpoint",
    "RunResumed": "resumed",
}
"""What each event is called in `foretune.train.NAME/1`."""


# -- text


def _brief(plan: "RunPlanned") -> Iterator[str]:
    """Say first what a person must know, then what will happen."""
    yield from plan.warnings
    trained = f"{plan.trainable_params:,} of {plan.total_params:,} parameters trained"
    yield f"{plan.model}, {plan.config.method} on {plan.hardware.device}: {trained}."
    yield f"{_rows(plan)} {_length(plan)}"
    yield _memory(plan)


def _rows(plan: "RunPlanned") -> str:
    data, held = plan.data, plan.data.evaluation_rows
    num_trained = data.num_rows - data.held_out_rows
    text = f"{num_trained:,} rows"
    return f"{text}, {held:,} held out;" if held else f"{text};"


def _length(plan: "RunPlanned") -> str:
    steps = plan.microsteps_per_update
    each = f"{steps:,} micro batch{'es' * (steps != 1)}"
    text = f"{plan.num_updates:,} updates of {each}, {plan.updates_per_epoch:,} an epoch"
    if plan.last_microsteps != steps:
        text += f" (the last one of {plan.last_microsteps:,})"
    return f"{text}; learning rate up to {plan.peak_learning_rate:g}."


def _memory(plan: "RunPlanned") -> str:
    widest = f"{plan.widest_rows:,} x {plan.widest_tokens:,} tokens"
    need = plan.prediction
    if need is None:
        return f"Widest micro batch: {widest}. Memory: unknown."
    free = bytes_or_unknown(plan.hardware.free_bytes)
    return (
        f"Widest micro batch: {widest}. Memory ({need.kind}): {format_bytes(need.allocated_bytes)} of tensors, "
        f"{format_bytes(need.need_bytes)} must be free; {free} are."
    )


def _draw_plan(plan: "RunPlanned", terminal: Terminal) -> Iterator[str]:
    title = f"{escape(plan.model)}: {plan.config.method} on {escape(plan.hardware.device)}, to {escape(plan.output)}"
    yield from (terminal.paint(line, "bold") for line in wrapped(title, terminal))
    trained = f"{plan.trainable_params:,} of {plan.total_params:,} parameters are trained."
    disk = (
        f"Disk: up to {format_bytes(plan.disk_bytes)} are written; {format_bytes(plan.free_disk_bytes)} are free there."
    )
    for text in (trained, f"{_rows(plan)} {_length(plan)}", _memory(plan), disk, "Nothing was written."):
        yield from wrapped(text, terminal, indent="  ")
    if plan.warnings:
        yield ""
        yield terminal.paint("To know", "bold")
        for text in plan.warnings:
            yield from wrapped(escape(text), terminal, indent="  ", bullet="- ")


def _draw_finished(event: Any, terminal: Terminal) -> Iterator[str]:
    record: RunRecord = event.record
    title = f"Trained: {escape(event.folder)}/{record.artifact}"
    yield from (terminal.paint(line, "bold") for line in wrapped(title, terminal))
    for text in _facts(record):
        yield from wrapped(text, terminal, indent="  ")
    yield from _draw_phases(record, terminal)
    if record.warnings:
        yield terminal.paint("To know", "bold")
        for text in record.warnings:
            yield from wrapped(escape(text), terminal, indent="  ", bullet="- ")
        yield ""
    yield from wrapped(f"Next: foretune evaluate {quoted(event.folder)}", terminal)


def _facts(record: "RunRecord") -> Iterator[str]:
    scope = record.scope
    assert scope is not None
    rate = scope.tokens_per_second
    speed = "" if rate is None else f", {rate:,.0f} tokens/s without padding (measured)"
    yield f"{scope.updates_done:,} updates, {scope.num_tokens:,} tokens{speed}."
    if scope.first_loss is not None and scope.last_loss is not None:
        yield f"Loss of the first update {scope.first_loss:.4f}, of the last {scope.last_loss:.4f}."
    if record.evaluations:
        last, best = record.evaluations[-1], min(record.evaluations, key=lambda each: each.loss)
        also = "" if best.update == last.update else f"; the best was {best.loss:.4f} after update {best.update:,}"
        kept = f" ({record.best_checkpoint})" if record.best_checkpoint and also else ""
        yield f"Held-out loss {last.loss:.4f}{also}{kept}."
    num_checks = len(record.checks)
    yield f"Verified: {num_checks:,} checks of requested against effective, before the first update and after the last."


def _draw_phases(record: "RunRecord", terminal: Terminal) -> Iterator[str]:
    """Draw the measured peak of each phase beside the predicted one."""
    kind = "unknown" if record.prediction is None else record.prediction.kind
    peak = record.peak_pair
    yield ""
    if peak is None:
        yield "Memory was not measured."
        return
    what = "Growth of the process" if record.is_on_host else "Allocated, at the peak"
    yield terminal.paint(f"{what:<22}  {'measured':>10}  {f'predicted ({kind})':>20}", "bold")
    for pair in record.phase_pairs:
        yield _pair(pair, "-")
    yield _pair(peak, "unknown")
    need = None if record.prediction is None else record.prediction.need_bytes
    if record.is_on_host and need is not None and (peak.measured_bytes or 0) > need:
        told = f"That is more than the {format_bytes(need)} that the plan said must be free: please report both."
        yield from wrapped(told, terminal, indent="  ")
    yield ""


def _pair(pair: "PhasePair", unknown: str) -> str:
    assert pair.measured_bytes is not None
    beside = unknown if pair.predicted_bytes is None else format_bytes(pair.predicted_bytes)
    return f"  {escape(pair.phase):<20}  {format_bytes(pair.measured_bytes):>10}  {beside:>20}"
