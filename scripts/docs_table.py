"""What several generated pages draw with."""

import textwrap
from collections.abc import Iterable, Sequence

__all__ = ["markdown_table", "paragraph"]


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Draw a Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def paragraph(text: str) -> str:
    """Wrap a paragraph's lines anew."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)
