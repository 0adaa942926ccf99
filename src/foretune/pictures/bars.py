"""A bar of memory as an SVG inside a page: stacked parts, marked levels, an interval.

It has no text of its own but for who cannot see it, so that it may be as wide as its place; the words stand beside it.
It takes its colour from the page around it, sets no style beyond itself and has no identifiers, which would clash where
a page holds several.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from foretune.pictures.svg import COLORS
from foretune.texts import text_of
from foretune.units import format_bytes

__all__ = ["Mark", "Part", "color_of", "memory_bar"]

WIDTH = 1000.0
BAR_TOP, BAR_HEIGHT, INTERVAL_AT = 4.0, 20.0, 30.0
GREYS = {"allocator slack": "#6e7681", "held by the allocator": "#8f97a3", "context": "#5b6370"}
NEUTRAL = "#8f97a3"
"""Of what is no component; all greys are told from a white page as from a black one."""
FAINT = ("safety margin",)


class Part(NamedTuple):
    """A share of the bar."""

    name: str
    num_bytes: int


class Mark(NamedTuple):
    """A level across the bar."""

    name: str
    num_bytes: int
    is_dashed: bool = False


def color_of(name: str) -> str:
    """Return the colour of a part; components have theirs in every picture."""
    return COLORS.get(name) or GREYS.get(name, NEUTRAL)


def memory_bar(
    parts: Sequence[Part],
    *,
    title: str,
    description: str,
    marks: Sequence[Mark] = (),
    interval: tuple[int, int] | None = None,
    top_bytes: int | None = None,
) -> str:
    """Return a bar as an SVG element: parts from the left, marks across, and below an interval in which a level lies.

    `top_bytes` is the right end; without it the highest of what is drawn. Everything is in bytes.
    """
    ends = [sum(part.num_bytes for part in parts), *(mark.num_bytes for mark in marks), *(interval or ())]
    scale = WIDTH / max(top_bytes or max(ends), 1)
    height = INTERVAL_AT + 6 if interval else BAR_TOP + BAR_HEIGHT + 4
    body = [
        _rect(0, WIDTH, 'fill="currentColor" fill-opacity="0.08"', None),
        *_stack(parts, scale),
        *(_interval(interval, scale) if interval else ()),
        *(_mark(mark, scale) for mark in marks),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" preserveAspectRatio="none" '
        f'role="img" aria-label="{text_of(title)}" style="display:block;width:100%;height:{height:g}px">'
        f"<title>{text_of(title)}</title><desc>{text_of(description)}</desc>{''.join(body)}</svg>"
    )


def _stack(parts: Sequence[Part], scale: float) -> Iterator[str]:
    left = 0.0
    for part in parts:
        width = part.num_bytes * scale
        opacity = ' fill-opacity="0.4"' if part.name in FAINT else ""
        tip = f"{part.name}: {format_bytes(part.num_bytes)}"
        yield _rect(left, width, f'fill="{color_of(part.name)}"{opacity}', tip)
        left += width


def _rect(left: float, width: float, paint: str, tip: str | None) -> str:
    place = f'x="{left:.2f}" y="{BAR_TOP:g}" width="{width:.2f}" height="{BAR_HEIGHT:g}"'
    inside = "" if tip is None else f"<title>{text_of(tip)}</title>"
    return f"<rect {place} {paint}>{inside}</rect>"


def _mark(mark: Mark, scale: float) -> str:
    x = min(mark.num_bytes * scale, WIDTH - 1)
    dashes = ' stroke-dasharray="4 3"' if mark.is_dashed else ""
    tip = text_of(f"{mark.name}: {format_bytes(mark.num_bytes)}")
    return _line(x, x, 0, BAR_TOP + BAR_HEIGHT + 4, 2.5, dashes, tip)


def _interval(interval: tuple[int, int], scale: float) -> Iterator[str]:
    low, high = (min(level * scale, WIDTH - 1) for level in interval)
    tip = text_of(f"interval: {format_bytes(interval[0])} to {format_bytes(interval[1])}")
    yield _line(low, high, INTERVAL_AT, INTERVAL_AT, 2, "", tip)
    for x in (low, high):
        yield _line(x, x, INTERVAL_AT - 4, INTERVAL_AT + 4, 2, "", tip)


def _line(x1: float, x2: float, y1: float, y2: float, width: float, dashes: str, tip: str) -> str:
    place = f'x1="{x1:.2f}" x2="{x2:.2f}" y1="{y1:g}" y2="{y2:g}"'
    stroke = f'stroke="currentColor" stroke-width="{width:g}"{dashes} vector-effect="non-scaling-stroke"'
    return f"<line {place} {stroke}><title>{tip}</title></line>"
