"""What rows of given lengths need, as text: the data, the need at each length, what padding and packing cost."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from foretune.cli.terminal import Heading, Terminal, escape, table, wrapped
from foretune.units import format_bytes

if TYPE_CHECKING:
    from foretune.api import LengthNeed, LengthsAnswer

__all__ = ["draw_lengths"]


def draw_lengths(answer: "LengthsAnswer", file: str, terminal: Terminal) -> Iterator[str]:
    """Yield the lines that `--lengths` adds to an estimate."""
    yield ""
    title = f"By the lengths in {escape(file)} ({answer.kind})"
    yield from (terminal.paint(line, "bold") for line in wrapped(title, terminal))
    data, long_rows = answer.data, answer.long_rows
    text = (
        f"{_rows(data.num_rows)}, {data.num_tokens:,} tokens: {data.shortest:,} to {data.longest:,} a row, "
        f"{data.mean_tokens:,.1f} in the mean."
    )
    yield from wrapped(text, terminal, indent="  ")
    if long_rows.num_rows:
        verb = "is" if long_rows.num_rows == 1 else "are"
        yield from wrapped(
            f"{_rows(long_rows.num_rows)} ({_percent(long_rows.share)}) {verb} longer than batch.sequence_length, "
            f"{answer.packing.row_tokens:,}; {long_rows.tokens_beyond:,} tokens lie beyond it.",
            terminal,
            indent="  ",
        )
    yield ""
    headings = (Heading(f"  Rows ({answer.kind})"), Heading("tokens", True), Heading("need", True), Heading("verdict"))
    yield from table(headings, [_cells(need) for need in answer.needs], terminal)
    yield ""
    yield from _batches(answer, terminal)
    for need in answer.needs:
        if need.refused_because is not None:
            text = f"{need.rows}, {need.tokens:,} tokens: {escape(need.refused_because)}"
            yield from wrapped(text, terminal, indent="  ", bullet="- ")
    for text in answer.assumptions:
        yield from wrapped(text, terminal, indent="  ", bullet="- ")


def _cells(need: "LengthNeed") -> tuple[str, ...]:
    words: list[str] = ["refused" if need.need_bytes is None else need.verdict or ""]
    if need.is_beyond:
        words.append("too long")
    size = "" if need.need_bytes is None else format_bytes(need.need_bytes)
    return f"  {need.rows}", f"{need.tokens:,}", size, ", ".join(word for word in words if word)


def _batches(answer: "LengthsAnswer", terminal: Terminal) -> Iterator[str]:
    padding, packing = answer.padding, answer.packing
    yield from wrapped(
        f"Padded, micro batches of {_rows(padding.micro_batch_size)}: {padding.mean_tokens:,.1f} tokens a row in the "
        f"mean, {padding.worst_tokens:,} at worst; {_percent(padding.real_share)} of them real.",
        terminal,
        indent="  ",
    )
    yield from wrapped(
        f"Packed to {packing.row_tokens:,} tokens: {_rows(packing.num_rows)}; {_percent(packing.real_share)} of the "
        "tokens real.",
        terminal,
        indent="  ",
    )


def _rows(number: int) -> str:
    return f"{number:,} row" if number == 1 else f"{number:,} rows"


def _percent(share: float) -> str:
    """Write a share in percent; what is neither none nor all never reads as such."""
    if 0 < share < 0.001:
        return "below 0.1 %"
    if 0.999 < share < 1:
        return "above 99.9 %"
    return f"{share:.1%}".replace("%", " %")
