"""`foretune config import`: a configuration of another tool in our words, with what it cannot say."""

# os.path, as in the contract: pathlib costs 3 ms of every start.
# ruff: noqa: PTH120

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from foretune.cli.commands import Command, Example, completes, option
from foretune.cli.files import require_new, write_new
from foretune.cli.output import Reply
from foretune.cli.terminal import Terminal, escape, wrapped

if TYPE_CHECKING:
    from foretune.foreign import Decision, Entry, ImportedConfig, Setting
    from foretune.memory import StackProfile

__all__ = ["draw_priced", "import_command"]

TOOLS = ("axolotl", "llama-factory", "trl", "canifinetune")
_CHANGES = {"result": "what is trained", "memory": "the memory", "both": "what is trained and the memory"}


@click.command(
    cls=Command,
    name="import",
    examples=[
        Example("What a file of axolotl means here", "foretune config import axolotl.yml"),
        Example(
            "Decide what is open, and write a configuration",
            "foretune config import axolotl.yml --set precision.dtype=bf16 --output new.yml",
        ),
        Example("What will it need? As axolotl runs it", "foretune estimate --import axolotl.yml --dtype bf16"),
    ],
)
@click.argument("file", type=click.Path())
@option(
    "--tool",
    group="Content",
    metavar="NAME",
    shell_complete=completes(lambda: TOOLS),
    help=f"Whose file it is: {', '.join(TOOLS)}.  [default: told by its keys]",
)
@option("--set", "settings", group="Content", metavar="KEY=VALUE", multiple=True, help="Decide a field; repeatable.")
@option("--without", group="Content", metavar="KEY", multiple=True, help="Leave out a key of the file; repeatable.")
@option(
    "--output",
    group="Content",
    metavar="FILE",
    type=click.Path(),
    help="Write the configuration, once nothing is left to decide. The file may not exist yet.",
)
def import_command(
    file: str, tool: str | None, settings: Sequence[str], without: Sequence[str], output: str | None
) -> Reply:
    """Read a configuration of axolotl, LLaMA-Factory, TRL or canifinetune, and account for each of its keys.

    The answer has three parts: what maps, what has no counterpart, and what must be decided. A command line
    (`trl sft --model_name_or_path ...`) may stand in a text file.
    """
    from foretune import api
    from foretune.cli.config import write_schema

    if output is not None:
        require_new(output)
    imported = api.import_config(file, tool=tool, overrides=settings, without=without)
    notes: tuple[str, ...] = ()
    if output is not None:
        config = api.build_imported(imported, "run", overrides=settings).config
        text = api.dump_config(config, comments=True, folder=os.path.dirname(output) or ".")
        modeline, newline, rest = text.partition("\n")
        write_new(output, [modeline, newline, *_provenance(imported), rest])
        notes = (f"Written: {escape(output)}", *write_schema(os.path.dirname(output)).notes)
    document = {**imported.to_dict(), "output_file": output}
    return Reply("config.import", lambda: document, lambda terminal: _draw(imported, settings, terminal), notes=notes)


def _provenance(imported: "ImportedConfig") -> Iterator[str]:
    """Say in the written file where it comes from, and what was left out of it."""
    yield f"# Imported from {escape(imported.file)}, a file of {imported.title}.\n"
    for entry in imported.of("decided"):
        if not entry.settings and entry.note and "--without" in entry.note:
            yield f"# Left out: {escape(entry.key)}: {escape(entry.value)}\n"


def _draw(imported: "ImportedConfig", settings: Sequence[str], terminal: Terminal) -> Iterator[str]:
    told = f", told by {', '.join(imported.recognised_by[:4])}" if imported.recognised_by else ""
    yield from wrapped(f"{escape(imported.file)}: {imported.title}{escape(told)}.", terminal)
    yield from _section("Maps", terminal)
    for entry in imported.of("mapped"):
        yield from _mapped(entry, imported, terminal)
    decided = imported.of("decided")
    if decided or settings:
        yield from _section("You decided", terminal)
        for setting in settings:
            yield from wrapped(f"--set {escape(setting)}", terminal, indent="  ")
        for entry in decided:
            yield from _plain(entry, terminal)
    blocked = imported.of("refused", "unknown")
    yield from _section("No counterpart, and it changes the result", terminal, is_empty=not blocked)
    for entry in blocked:
        yield from _blocked(entry, terminal)
    without = imported.of("no effect")
    yield from _section("No counterpart, or off: nothing changes", terminal, is_empty=not without)
    for entry in without:
        yield from _plain(entry, terminal)
    yield from _section("To decide", terminal, is_empty=not imported.decisions)
    for decision in imported.decisions:
        yield from _decision(decision, terminal)
    number = len(imported.decisions)
    is_complete = "Nothing is open: --output FILE writes it."
    yield ""
    yield is_complete if number == 0 else f"{number} to decide before --output FILE writes it."
    for note in imported.notes:
        yield from wrapped(note, terminal)
    yield from draw_priced(imported, imported.stack, terminal, is_full=False)


def draw_priced(
    imported: "ImportedConfig", stack: "StackProfile", terminal: Terminal, *, is_full: bool = True
) -> Iterator[str]:
    """Say on which profile a foreign file is priced, and what that does not describe."""
    if is_full:
        yield ""
        yield from wrapped(f"Imported from {imported.title}. `foretune config import` accounts for its keys.", terminal)
    if stack != imported.stack:
        return
    yield from wrapped(f"Priced as {imported.title} runs it, {stack.description}.", terminal)
    for note in imported.stack_notes:
        yield from wrapped(note, terminal, indent="  ", bullet="- ")
    if imported.priced:
        settings = ", ".join(map(_written, imported.priced))
        yield from wrapped(f"There an estimate takes {settings}.", terminal, indent="  ", bullet="- ")


def _section(title: str, terminal: Terminal, *, is_empty: bool = False) -> Iterable[str]:
    yield ""
    yield terminal.paint(title, "bold") + (": nothing." if is_empty else "")


def _mapped(entry: "Entry", imported: "ImportedConfig", terminal: Terminal) -> Iterator[str]:
    ours = ", ".join(map(_written, entry.settings))
    if not ours:
        yield from wrapped(f"{_key(entry)} -> {escape(entry.note or '')}", terminal, indent="  ")
        return
    origin = f" (by default of {imported.title})" if entry.place is None else ""
    yield from wrapped(f"{_key(entry)}{origin} -> {ours}", terminal, indent="  ")
    if entry.note:
        yield from wrapped(escape(entry.note), terminal, indent="    ")


def _blocked(entry: "Entry", terminal: Terminal) -> Iterator[str]:
    what = _CHANGES.get(entry.changes, "")
    text = f"{_where(entry)}{_key(entry)}: {escape(entry.note or 'The value is not one of it.')}"
    yield from wrapped(text, terminal, indent="  ")
    yield from wrapped(terminal.paint(f"changes {what}", "red"), terminal, indent="    ")


def _plain(entry: "Entry", terminal: Terminal) -> Iterator[str]:
    yield from wrapped(f"{_key(entry)}  {escape(entry.note or '')}", terminal, indent="  ")


def _decision(decision: "Decision", terminal: Terminal) -> Iterator[str]:
    place = f"{escape(decision.place)}: " if decision.place else ""
    yield from wrapped(f"{place}{escape(decision.message)}", terminal, indent="  ")
    yield f"    {terminal.paint(escape(decision.flag), 'cyan')}"


def _where(entry: "Entry") -> str:
    return f"{escape(entry.place)}: " if entry.place else ""


def _key(entry: "Entry") -> str:
    return f"{escape(entry.key)}: {escape(entry.value)}"


def _written(setting: "Setting") -> str:
    from foretune.contract.dump import write_value

    return escape(f"{setting.field}: {write_value(setting.value)}")
