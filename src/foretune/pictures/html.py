"""Pieces of HTML for a notebook: no script, no style beyond themselves, nothing from elsewhere, light or dark as the
page around them.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from foretune.pictures.bars import FAINT, Part, color_of
from foretune.texts import text_of
from foretune.units import format_bytes

__all__ = ["Html", "card", "figures_table", "folded", "legend", "paragraph"]

_CELL = (
    "text-align:{side};padding:2px 8px 2px 0;border:0;background:none;color:inherit;"
    "white-space:{wrap};overflow-wrap:break-word"
)


class Html(NamedTuple):
    """A cell that is HTML already; all other text is escaped."""

    html: str


def card(title: str, *pieces: str) -> str:
    """Put pieces below a title. The pieces are HTML, the title is text."""
    style = "max-width:760px;font:13px/1.5 system-ui,sans-serif;color:inherit;overflow-wrap:anywhere"
    return f'<div style="{style}"><div style="font-weight:600">{text_of(title)}</div>{"".join(pieces)}</div>'


def paragraph(text: str) -> str:
    """Write a text as a paragraph."""
    return f'<div style="margin:2px 0">{text_of(text)}</div>'


def legend(parts: Sequence[Part]) -> str:
    """Name the parts of a bar in their order, each with its colour and its size."""
    items = "".join(
        f'<li style="display:inline-block;margin:0 14px 0 0;padding:0;white-space:nowrap">{_swatch(part.name)}'
        f"{text_of(part.name)}&nbsp;{text_of(format_bytes(part.num_bytes))}</li>"
        for part in parts
        if part.num_bytes
    )
    return f'<ul style="list-style:none;margin:4px 0;padding:0">{items}</ul>'


def _swatch(name: str) -> str:
    opacity = ";opacity:0.4" if name in FAINT else ""
    size = "display:inline-block;width:10px;height:10px;margin-right:5px"
    return f'<span aria-hidden="true" style="{size};background:{color_of(name)}{opacity}"></span>'


def figures_table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[str | Html]]) -> str:
    """Write a table whose first column names its rows."""
    heads = "".join(_cell("th", text_of(text), index, ' scope="col"') for index, text in enumerate(headings))
    body = "".join(f"<tr>{_row(row)}</tr>" for row in rows)
    style = "border-collapse:collapse;margin:4px 0;width:100%;font:inherit;color:inherit"
    return (
        f'<div style="overflow-x:auto"><table style="{style}">'
        f'<caption style="text-align:left;padding:0;color:inherit">{text_of(caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(row: Sequence[str | Html]) -> str:
    cells = []
    for index, cell in enumerate(row):
        shown = cell.html if isinstance(cell, Html) else text_of(cell)
        cells.append(_cell("th", shown, index, ' scope="row"') if index == 0 else _cell("td", shown, index))
    return "".join(cells)


def _cell(tag: str, inside: str, index: int, more: str = "") -> str:
    is_figure = tag == "td" and index > 0
    style = _CELL.format(side="left" if index == 0 else "right", wrap="nowrap" if is_figure else "normal")
    return f'<{tag}{more} style="{style};font-weight:{"normal" if tag == "td" else "inherit"}">{inside}</{tag}>'


def folded(summary: str, *pieces: str) -> str:
    """Put pieces below a line that opens them."""
    return f'<details style="margin:2px 0"><summary>{text_of(summary)}</summary>{"".join(pieces)}</details>'
