"""`foretune models`: what is known about models, without their weights."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from foretune.cli.commands import Command, Example, Group, LazyCommand, completes, option
from foretune.cli.options import model_ids
from foretune.cli.output import Reply
from foretune.cli.terminal import Heading, Terminal, escape, table, wrapped

if TYPE_CHECKING:
    from foretune.api import ModelSummary
    from foretune.models import ModelEntry

__all__ = ["list_command", "models", "show_command"]

LICENCE_WIDTH = 11
"""So that the longest id of the catalogue stays within 80 columns."""

models = Group(
    name="models",
    help="The models whose architecture is known. No weights are read.",
    lazy={
        "list": LazyCommand(__name__, "list_command", "List the catalogue."),
        "show": LazyCommand(__name__, "show_command", "Show what a model is made of."),
    },
    examples=[
        Example("What does the catalogue have of Qwen?", "foretune models list --search qwen"),
        Example("Exact counts, and what LoRA reaches", "foretune models show Qwen/Qwen2.5-0.5B"),
    ],
)


@click.command(
    cls=Command,
    name="list",
    examples=[
        Example("Everything", "foretune models list"),
        Example("Names, aliases and types that hold a text", "foretune models list --search mistral"),
    ],
)
@option("--search", group="Choice", metavar="TEXT", help="Only what holds this text, in any case.")
def list_command(search: str | None) -> Reply:
    """List the models of the catalogue: parameters (exact with --json), context length, licence."""
    from foretune.models import list_models

    found = [entry for entry in list_models() if search is None or _holds(entry, search.lower())]
    nothing = f"No model of the catalogue holds {escape(search or '')!r}; `models show` also takes hub ids and paths."
    return Reply(
        "models.list",
        lambda: {"models": [entry.to_dict() for entry in found]},
        lambda terminal: _draw_list(found, terminal),
        notes=() if found else (nothing,),
    )


def _holds(entry: "ModelEntry", text: str) -> bool:
    return any(text in name.lower() for name in (entry.id, entry.model_type, *entry.aliases))


def _draw_list(found: "Sequence[ModelEntry]", terminal: Terminal) -> list[str]:
    if not found:
        return []
    headings = (Heading("model"), Heading("params", True), Heading("context", True), Heading("licence"))
    rows = [
        (entry.id, _rounded(entry.total_params), _count(entry.context_length), _licence(entry.licence))
        for entry in found
    ]
    return table(headings, rows, terminal)


def _rounded(number: int) -> str:
    """Write a count with four digits: `494.0 M`, `7.616 B`."""
    unit, letter = (10**9, "B") if number >= 10**9 else (10**6, "M")
    digits = 4 - len(str(number // unit))
    return f"{number / unit:,.{max(digits, 0)}f} {letter}"


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _licence(text: str | None) -> str:
    return "?" if text is None else text if len(text) <= LICENCE_WIDTH else f"{text[: LICENCE_WIDTH - 1]}…"


@click.command(
    cls=Command,
    name="show",
    examples=[
        Example("By id, in any case, or alias", "foretune models show qwen2.5-0.5b"),
        Example("For a script: .total_params", "foretune models show Qwen/Qwen2.5-0.5B --offline --json"),
    ],
)
@click.argument("model", metavar="ID|PATH", shell_complete=completes(model_ids))
@option("--revision", group="Choice", metavar="REV", help="Branch, tag or commit of the hub.")
@option("--offline", group="Choice", is_flag=True, help="Never ask the hub; catalogue, paths and cache only.")
def show_command(model: str, revision: str | None, offline: bool) -> Reply:
    """Show what a model is made of: counts, layers, linear layers, and what LoRA and 4-bit reach.

    The model is an id, or the path of a config.json or its folder.
    """
    from foretune.api import describe_model, resolve_model

    summary = describe_model(resolve_model(model, revision=revision, offline=offline))
    return Reply("models.show", lambda: _document(summary), lambda terminal: _draw(summary, terminal))


def _document(summary: "ModelSummary") -> dict[str, Any]:
    shares = {"adaptable_share": summary.adaptable_share, "quantizable_share": summary.quantizable_share}
    document = {**summary.to_dict(), **shares}
    for projection in document["projections"]:
        projection["num_layers"] = len(projection["layers"])
    return document


def _draw(summary: "ModelSummary", terminal: Terminal) -> Iterator[str]:
    at = f" at {escape(summary.revision)}" if summary.revision else ""
    yield from wrapped(f"{escape(summary.id)} ({summary.model_type}, from the {summary.source}{at})", terminal)
    yield ""
    rows = [
        ("parameters", f"{summary.total_params:,}"),
        ("language model", f"{summary.text_params:,}"),
        ("other towers", f"{summary.tower_params:,}"),
        ("LoRA can reach", f"{summary.adaptable_params:,} ({summary.adaptable_share:.1%})"),
        ("4-bit can reach", f"{summary.quantizable_params:,} ({summary.quantizable_share:.1%})"),
        ("layers", f"{summary.num_layers:,}"),
        ("hidden size", f"{summary.hidden_size:,}"),
        ("vocabulary", f"{summary.vocab_size:,}"),
        ("output head", "tied to the embeddings" if summary.tied_embeddings else "its own weights"),
        ("context length", "not known" if summary.context_length is None else f"{summary.context_length:,}"),
    ]
    yield from (f"{name:<17}{value}" for name, value in rows)
    yield ""
    headings = (Heading("linear layer"), Heading("in", True), Heading("out", True), Heading("layers", True))
    yield from table(
        headings,
        [(p.name, f"{p.in_features:,}", f"{p.out_features:,}", f"{len(p.layers):,}") for p in summary.projections],
        terminal,
    )
    for note in summary.notes:
        yield from wrapped(escape(note), terminal, bullet="- ")
