"""`foretune merge`: a run's adapters and their base as one model, and how far it is from what was trained."""

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from foretune.cli.commands import Command, Example, option
from foretune.cli.output import Reply
from foretune.cli.run_view import RunView, bytes_or_unknown
from foretune.cli.terminal import Terminal, escape, wrapped
from foretune.units import format_bytes

if TYPE_CHECKING:
    from foretune.api import MergeAnswer, MergePlan

__all__ = ["merge"]

NOT_VERIFIED = 3
"""Exit code with --check: the answer is no."""


@click.command(
    cls=Command,
    name="merge",
    examples=[
        Example("What would be written, and what does it take?", "foretune merge runs/first --dry-run"),
        Example("Merge, and fail unless it is verified", "foretune merge runs/first --check"),
        Example("To another place", "foretune merge runs/first --output models/first"),
    ],
)
@click.argument("run", type=click.Path(), metavar="RUN")
@option(
    "--output", group="Merge", metavar="FOLDER", help="The model's folder, which may not exist.  [default: RUN/merged]"
)
@option("--dry-run", group="Merge", is_flag=True, help="Check everything and show the plan; nothing is written.")
@option("--check", group="Merge", is_flag=True, help="Exit with 3 unless the merged model is verified.")
@option("--offline", group="Model", is_flag=True, help="Never ask the hub; paths and cache only.")
def merge(run: str, **given: Any) -> Reply:
    """Merge the adapters of a run into their base: a model that loads without PEFT.

    Weights are merged layer by layer on the CPU, by PEFT's own layers, in the format of the base's files; adapters of a
    4-bit or 8-bit base go into the unquantized one. The result is held against the logits that the run stored:
    verified, or not verified, with the difference and the bound. What is not verified is written all the same, and the
    exit code is 0; with --check it is 3. RUN is the run's folder or the configuration file that it was run from.
    """
    from foretune import api
    from foretune.cli.request import run_folder

    run = run_folder(run)
    if given["dry_run"]:
        plan = api.plan_merge(run, output=given["output"], offline=given["offline"])
        return Reply("merge.plan", plan.to_dict, lambda terminal: _draw_plan(plan, terminal))
    answer = _watched(api.merge(run, output=given["output"], offline=given["offline"]))
    code = NOT_VERIFIED if given["check"] and not answer.check.is_verified else 0
    return Reply("merge", answer.to_dict, lambda terminal: _draw(answer, terminal), exit_code=code)


def _watched(run: Any) -> "MergeAnswer":
    """Say on stderr which phase goes on, and return the answer."""
    view, last = RunView(), None
    with closing(run) as events:
        for event in events:
            last = event
            if type(event).__name__ == "PhaseBegan":
                view.phase(f"merge.{event.phase}")
    view.end()
    assert last is not None
    answer: MergeAnswer = last
    return answer


def _draw_plan(plan: "MergePlan", terminal: Terminal) -> Iterator[str]:
    title = f"{escape(plan.base)} and the adapters of {escape(plan.run)}, to {escape(plan.output)}"
    yield from (terminal.paint(line, "bold") for line in wrapped(title, terminal))
    for text in (*_plan_facts(plan), "Nothing was written."):
        yield from wrapped(text, terminal, indent="  ")


def _plan_facts(plan: "MergePlan") -> Iterator[str]:
    whole = f"{plan.num_replaced:,} tensors were trained whole and are replaced; " if plan.num_replaced else ""
    yield (
        f"{plan.num_layers:,} layers take up an adapter of {plan.updates:,} updates, in {', '.join(plan.dtypes)}; "
        f"{whole}{plan.num_copied:,} tensors stay as they are."
    )
    if plan.quantization is not None:
        yield (
            f"Trained on a base in {plan.quantization}, merged into the unquantized one: the result is another model, "
            "and the difference is measured."
        )
    yield f"Disk: {format_bytes(plan.disk_bytes)} are written; {format_bytes(plan.free_disk_bytes)} are free there."
    available = bytes_or_unknown(plan.available_host_bytes)
    yield f"Memory: up to {format_bytes(plan.host_bytes)} at once (estimated); {available} are available."


def _draw(answer: "MergeAnswer", terminal: Terminal) -> Iterator[str]:
    check = answer.check
    title = f"{escape(answer.output)}: merged, {check.verdict}"
    yield from (terminal.paint(line, "bold") for line in wrapped(title, terminal))
    for text in (check.because, *_facts(answer)):
        yield from wrapped(escape(text), terminal, indent="  ")
    yield from wrapped(f"Record: {escape(answer.record_file)}", terminal)


def _facts(answer: "MergeAnswer") -> Iterator[str]:
    yield from answer.check.measured()
    yield f"GGUF is made by llama.cpp: {answer.output}/README.md says how."
