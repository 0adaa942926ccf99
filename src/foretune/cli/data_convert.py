"""`foretune data convert`: a file of another format, made into ours without loss, or refused."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from foretune.cli.commands import Choice, Command, Example, option
from foretune.cli.files import require_new, write_new
from foretune.cli.output import Reply
from foretune.cli.terminal import Terminal, escape, wrapped

if TYPE_CHECKING:
    from foretune.data import Converted

__all__ = ["convert_command"]

FORMATS = ("sharegpt", "alpaca", "prompt-completion", "openai")
EXAMPLES = [
    Example("Conversations of ShareGPT", "foretune data convert --from sharegpt chats.jsonl rows.jsonl"),
    Example("Lose a key knowingly", "foretune data convert --from alpaca stanford.json rows.jsonl --drop text"),
]


@click.command(cls=Command, name="convert", examples=EXAMPLES)
@click.argument("in_file", metavar="IN", type=click.Path())
@click.argument("out_file", metavar="OUT", type=click.Path())
@option(
    "--from",
    "source",
    group="Conversion",
    type=Choice(FORMATS),
    required=True,
    metavar="FORMAT",
    help="What IN is: sharegpt, alpaca, prompt-completion or openai.",
)
@option("--drop", group="Conversion", metavar="KEY", multiple=True, help="Lose this key of each row; repeatable.")
def convert_command(in_file: str, out_file: str, source: Any, drop: Sequence[str]) -> Reply:
    """Make rows of another format ours: without loss, or refused with the line and the reason.

    IN is JSONL or one JSON array of objects (up to 256 MiB). OUT may not exist yet, and is written whole or not at
    all. A key that holds something and has no place in our rows is refused, unless --drop names it.
    """
    from foretune.data import convert_rows

    require_new(out_file)
    counts = Counter[str]()
    dropped = Counter(dict.fromkeys(drop, 0))
    write_new(out_file, _lines(convert_rows(in_file, source, drop=drop), counts, dropped))
    answer = {
        "in_file": in_file,
        "out_file": out_file,
        "from": source,
        "rows": counts["InstructionRow"] + counts["MessagesRow"],
        "instruction_rows": counts["InstructionRow"],
        "messages_rows": counts["MessagesRow"],
        "blank_lines": counts["blank"],
        "dropped": dict(dropped),
    }
    unseen = tuple(f"--drop {escape(key)}: no row has anything there." for key, count in dropped.items() if not count)
    return Reply("data.convert", lambda: answer, lambda terminal: _draw(answer, terminal), notes=unseen)


def _lines(converted: "Iterator[Converted | None]", counts: Counter[str], dropped: Counter[str]) -> Iterator[str]:
    """Yield the lines to write, and count what they are."""
    for one in converted:
        if one is None:
            counts["blank"] += 1
            continue
        counts[type(one.row).__name__] += 1
        dropped.update(one.dropped)
        yield f"{one.text}\n"


def _draw(answer: dict[str, Any], terminal: Terminal) -> Iterator[str]:
    kinds = f"{answer['instruction_rows']:,} instructions, {answer['messages_rows']:,} conversations"
    yield from wrapped(f"{escape(answer['out_file'])}: {answer['rows']:,} rows ({kinds})", terminal)
    if answer["blank_lines"]:
        yield f"blank lines left out: {answer['blank_lines']:,}"
    for key, count in answer["dropped"].items():
        yield from wrapped(f"dropped: {escape(key)} of {count:,} rows", terminal)
