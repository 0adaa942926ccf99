"""How figures are drawn: SVG for files, bars and tables for notebooks. Knows names and bytes, not what they are of."""

from foretune.pictures.bars import Mark, Part, memory_bar
from foretune.pictures.html import Html, card, figures_table, folded, legend, paragraph
from foretune.pictures.svg import COLORS, STACKED, STYLE, framed, label

__all__ = [
    "COLORS",
    "STACKED",
    "STYLE",
    "Html",
    "Mark",
    "Part",
    "card",
    "figures_table",
    "folded",
    "framed",
    "label",
    "legend",
    "memory_bar",
    "paragraph",
]
