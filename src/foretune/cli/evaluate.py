"""`foretune evaluate`: reload what a run made, and say what it does."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from foretune.cli.commands import Choice, Command, Example, Whole, option
from foretune.cli.output import Reply
from foretune.cli.progress import watched
from foretune.cli.terminal import Terminal, escape, wrapped

if TYPE_CHECKING:
    from foretune.api import EvaluationAnswer

__all__ = ["evaluate"]


@click.command(
    cls=Command,
    name="evaluate",
    examples=[
        Example("Does the artifact reload as it was saved?", "foretune evaluate runs/first"),
        Example("Its loss on other rows", "foretune evaluate runs/first --data held-out.jsonl"),
        Example("What it says", 'foretune evaluate runs/first --prompt "What is the capital of France?"'),
    ],
)
@click.argument("run", type=click.Path(), metavar="RUN")
@option("--data", group="Loss", metavar="FILE", type=click.Path(), help="A JSONL file of rows; its loss is measured.")
@option("--prompt", "prompts", group="Generation", metavar="TEXT", multiple=True, help="Answer it; repeatable.")
@option(
    "--max-tokens",
    group="Generation",
    type=Whole(1, 1 << 20),
    default=128,
    metavar="N",
    help="Of an answer.  [default: 128]",
)
@option(
    "--format",
    group="Generation",
    type=Choice(["messages", "instruction"]),
    metavar="NAME",
    help="How prompts are written: messages or instruction.  [default: as in training]",
)
@option("--allow-other-format", group="Generation", is_flag=True, help="Take a --format that was not trained.")
@option("--offline", group="Model", is_flag=True, help="Never ask the hub; paths and cache only.")
@option("--workers", group="Work", type=Whole(1, 256), metavar="N", help="Encode rows in so many processes.")
def evaluate(run: str, **given: Any) -> Reply:
    """Reload the artifact of a run that ended with success, and compare it with what was trained.

    The base model must be the one of the run, and the logits those that the run stored. With --data the loss of other
    rows is measured, with --prompt the model answers in the format it was trained in. RUN is the run's folder or the
    configuration file that it was run from; RUN/merged is what `merge` made.
    """
    from foretune import api
    from foretune.cli.request import run_folder

    answer = watched(
        api.evaluate(
            run_folder(run),
            data=given["data"],
            prompts=given["prompts"],
            format=given["format"],
            allow_other_format=given["allow_other_format"],
            max_new_tokens=given["max_tokens"],
            offline=given["offline"],
            workers=given["workers"],
        )
    )
    return Reply("evaluate", answer.to_dict, lambda terminal: _draw(answer, terminal))


def _draw(answer: "EvaluationAnswer", terminal: Terminal) -> Iterator[str]:
    title = f"{escape(answer.artifact)}: the {answer.kind} reloads"
    yield from (terminal.paint(line, "bold") for line in wrapped(title, terminal))
    for text in _facts(answer):
        yield from wrapped(text, terminal, indent="  ")
    for said in answer.generations:
        yield ""
        yield from wrapped(escape(said.prompt), terminal, indent="  ", bullet="> ")
        yield from wrapped(escape(said.text) or "(nothing)", terminal, indent="  ")
        end = "a stop token" if said.ended_by == "stop" else "the number of tokens that was allowed"
        yield from (terminal.paint(line, "dim") for line in wrapped(f"Ended by {end}.", terminal, indent="  "))
    yield from wrapped(f"Record: {escape(answer.record_file)}", terminal)


def _facts(answer: "EvaluationAnswer") -> Iterator[str]:
    probe = answer.record.probe
    assert probe is not None
    same = "equal bit by bit" if probe.is_bitwise_equal else f"within {probe.tolerance:g} (measured)"
    yield (
        f"Logits of the stored probe rows: {same}; the largest difference is {probe.max_abs_difference:.3g} of "
        f"{probe.tolerance:g} allowed."
    )
    if probe.adapter_dtype is not None:
        yield f"Adapters are in {probe.adapter_dtype}."
    yield f"Prompts as in training: {answer.format}. Answers end at the tokens {', '.join(map(str, answer.stop_ids))}."
    if answer.loss is not None and answer.stats is not None:
        perplexity = "too large for a number" if answer.perplexity is None else f"{answer.perplexity:,.2f}"
        yield (
            f"Loss on {answer.stats.num_rows:,} rows: {answer.loss:.4f} over {answer.stats.num_supervised_tokens:,} "
            f"tokens (measured); perplexity {perplexity}."
        )
