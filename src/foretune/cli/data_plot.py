"""How long rows are, as an SVG that needs nothing else."""

from collections.abc import Iterator
from math import log2
from typing import TYPE_CHECKING

from foretune.pictures import COLORS, framed, label
from foretune.texts import text_of

if TYPE_CHECKING:
    from foretune.api import DataAnswer

__all__ = ["draw_lengths_plot"]

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 76, 828, 112, 406


def draw_lengths_plot(answer: "DataAnswer") -> str:
    """Return a histogram of the rows by their tokens as the text of an SVG file; the tokens are logarithmic."""
    bins, lengths = answer.length_bins, answer.stats.lengths
    first, last = log2(bins[0].first), log2(bins[-1].last + 1)
    most = max(each.num_rows for each in bins)

    def x(tokens: float) -> float:
        return LEFT + (RIGHT - LEFT) * (log2(tokens) - first) / max(last - first, 1e-9)

    def y(rows: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * rows / most

    def axes() -> Iterator[str]:
        for part in (0.25, 0.5, 0.75, 1.0):
            rows = round(most * part)
            yield f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y(rows):.1f}" y2="{y(rows):.1f}"/>'
            yield label(LEFT - 8, y(rows) + 4, f"{rows:,}", "dim", anchor="end")
        tick = 1
        while tick <= bins[-1].last:
            if tick >= bins[0].first:
                yield label(x(tick), BOTTOM + 18, f"{tick:,}", "dim", anchor="middle")
            tick *= 2
        yield label((LEFT + RIGHT) / 2, BOTTOM + 40, "tokens in a row, before truncation", "dim", anchor="middle")
        yield label(8, TOP - 12, "rows", "dim")

    def bars() -> Iterator[str]:
        for each in bins:
            left, right = x(each.first), x(each.last + 1)
            place = f'x="{left:.1f}" width="{max(right - left - 1, 1):.1f}" y="{y(each.num_rows):.1f}"'
            tip = text_of(f"{each.first:,} to {each.last:,} tokens: {each.num_rows:,} rows")
            height = BOTTOM - y(each.num_rows)
            yield f'<rect fill="{COLORS["weights"]}" {place} height="{height:.1f}"><title>{tip}</title></rect>'

    def marks() -> Iterator[str]:
        named = [(lengths.p50, "p50", "need"), (lengths.p95, "p95", "need")]
        if answer.sequence_length is not None and bins[0].first <= answer.sequence_length <= bins[-1].last:
            named.append((answer.sequence_length, "sequence length", "card"))
        for number, (tokens, name, kind) in enumerate(named):
            at, above = x(tokens), TOP - 6 - 14 * number
            yield f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{above - 8}" y2="{BOTTOM}"/>'
            is_right = at > (LEFT + RIGHT) / 2
            place, anchor = (at - 5, "end") if is_right else (at + 5, "start")
            yield label(place, above, f"{name} {tokens:,}", "halo", anchor=anchor)

    stats = answer.stats
    title = f"{stats.num_rows:,} rows, {stats.num_tokens:,} tokens by the tokenizer of {answer.model}"
    share = f"{100 * stats.supervised_share:.1f} % of the tokens carry loss ({stats.supervision})"
    description = (
        f"A histogram of the tokens in a row: {lengths.shortest:,} to {lengths.longest:,}, half of the rows at most "
        f"{lengths.p50:,}, 95 % at most {lengths.p95:,}. {share}."
    )
    body = "\n".join([*axes(), *bars(), *marks(), label(LEFT, 28, title, "head"), label(LEFT, 48, share, "dim")])
    return framed(body, width=WIDTH, height=HEIGHT, title=title, description=description)
