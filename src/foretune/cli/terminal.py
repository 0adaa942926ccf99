"""What the place an answer goes to can show: width, colour, characters. And the few shapes text is drawn in.

Colour: `--color` beats NO_COLOR beats FORCE_COLOR beats whether it is a terminal (and TERM is not `dumb`). Colour
only repeats what a word says.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TextIO

from foretune.texts import escape

__all__ = ["WIDEST", "Heading", "Terminal", "escape", "table", "terminal_for", "wants_color", "wrapped"]

WIDEST = 80
NARROWEST = 20

Paint = Literal["bold", "red", "green", "yellow", "cyan", "dim"]
_CODES: Mapping[Paint, str] = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "cyan": "36", "dim": "2"}


class Terminal(NamedTuple):
    """What a stream can show."""

    width: int = WIDEST
    has_color: bool = False
    has_unicode: bool = True
    is_known: bool = False
    """Whether somebody looks at lines of this width: a terminal, or COLUMNS says so. What goes into a file or a pipe
    need not be broken."""

    def paint(self, text: str, *paints: Paint) -> str:
        """Colour a text, where colours are shown."""
        if not self.has_color or not text:
            return text
        return f"\x1b[{';'.join(_CODES[paint] for paint in paints)}m{text}\x1b[0m"

    def bar(self, share: float, width: int) -> str:
        """Draw a share between 0 and 1 as a bar of at most `width` characters; anything above 0 shows."""
        eighths = max(round(share * width * 8), 1 if share > 0 else 0)
        if not self.has_unicode:
            return "#" * max(round(share * width), 1 if share > 0 else 0)
        full, rest = divmod(eighths, 8)
        return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")

    def fitted(self, text: str) -> str:
        """Replace what the stream's encoding may not have."""
        if self.has_unicode:
            return text
        return "".join(c if c.isascii() else _ascii(c) for c in text)


_PLAIN = {"–": "-", "—": "-", "×": "x", "…": "...", "→": "->", "±": "+/-", "≤": "<=", "≥": ">=", "█": "#"}


def _ascii(character: str) -> str:
    return _PLAIN.get(character) or character.encode("ascii", "backslashreplace").decode()


def wants_color(choice: str | None, environment: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Decide by `--color`, then NO_COLOR, then FORCE_COLOR (each counts when it is not empty), then the stream."""
    if choice in ("always", "never"):
        return choice == "always"
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return True
    return is_terminal and environment.get("TERM") != "dumb"


def terminal_for(stream: TextIO | Any, color: str | None, environment: Mapping[str, str] | None = None) -> Terminal:
    """Look at a stream once, at the edge."""
    environment = os.environ if environment is None else environment
    is_terminal = _is_terminal(stream)
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "").replace("_", "")
    return Terminal(
        width=_width(stream, environment, is_terminal=is_terminal),
        has_color=wants_color(color, environment, is_terminal=is_terminal),
        has_unicode=encoding in ("utf8", "utf8sig", "utf16", "utf32"),
        is_known=is_terminal or bool(environment.get("COLUMNS", "").strip("0")),
    )


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError, OSError):
        return False


def _width(stream: Any, environment: Mapping[str, str], *, is_terminal: bool) -> int:
    columns = environment.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and int(columns[:6]) > 0:
        return max(int(columns[:6]), NARROWEST)
    if not is_terminal:
        return WIDEST
    try:
        return max(os.get_terminal_size(stream.fileno()).columns or WIDEST, NARROWEST)
    except (OSError, ValueError, AttributeError):
        return WIDEST


class Heading(NamedTuple):
    """A column: its name, and on which side its cells stand."""

    name: str
    is_number: bool = False


def table(headings: Sequence[Heading], rows: Iterable[Sequence[str]], terminal: Terminal) -> list[str]:
    """Draw aligned columns; where they are wider than the terminal, one block of `name: value` lines a row."""
    cells = [tuple(row) for row in rows]
    widths = [max(len(row[i]) for row in [[h.name for h in headings], *cells]) for i in range(len(headings))]
    if sum(widths) + 2 * (len(widths) - 1) > max(terminal.width, NARROWEST):
        return [line for row in cells for line in _block(headings, row, terminal)]
    head = _aligned([h.name for h in headings], headings, widths)
    return [terminal.paint(head, "bold"), *(_aligned(row, headings, widths) for row in cells)]


def _aligned(cells: Sequence[str], headings: Sequence[Heading], widths: Sequence[int]) -> str:
    placed = [
        cell.rjust(width) if heading.is_number else cell.ljust(width)
        for cell, heading, width in zip(cells, headings, widths, strict=True)
    ]
    return "  ".join(placed).rstrip()


def _block(headings: Sequence[Heading], row: Sequence[str], terminal: Terminal) -> list[str]:
    lines = [terminal.paint(row[0], "bold")]
    for heading, cell in zip(headings[1:], row[1:], strict=True):
        if cell:
            lines += wrapped(f"{heading.name}: {cell}", terminal, indent="  ")
    return lines


def wrapped(text: str, terminal: Terminal, *, indent: str = "", bullet: str = "") -> list[str]:
    """Break a text into lines of at most the terminal's width (and at most 100), the first with a bullet."""
    from textwrap import wrap

    width = min(max(terminal.width, NARROWEST), 100)
    first, later = indent + bullet, indent + " " * len(bullet)
    return wrap(text, width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False) or [first.rstrip()]


_UNBROKEN = re.compile(r"(?:\S*`[^`]*`|Run: .*$|\S)\S*")


def wrapped_message(text: str, terminal: Terminal, *, first: str, later: str) -> list[str]:
    """Break a message for a person where lines have a width; what is to be copied (`...`, Run: ...) stays whole.

    `first` begins the first line and `later` the others; colours in them do not count.
    """
    if not terminal.is_known:
        return [first + text]
    lines, room = [first], max(terminal.width, NARROWEST) - len(re.sub(r"\x1b\[[\d;]*m", "", first))
    for number, word in enumerate(_UNBROKEN.findall(text)):
        space = 1 if number else 0
        if space and len(word) + space > room:
            lines.append(later)
            space, room = 0, max(terminal.width, NARROWEST) - len(later)
        lines[-1] += " " * space + word
        room -= len(word) + space
    return lines


def make_tolerant(*streams: Any) -> None:
    """Let streams escape what their encoding lacks, instead of failing on it."""
    for stream in streams:
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def standard_streams() -> tuple[Any, Any]:
    """Return stdout and stderr as they are now (tests and shells replace them); a closed one is a sink."""
    return sys.stdout or _Sink(), sys.stderr or _Sink()


class _Sink:
    """Takes and forgets text: stands for a stream that the shell has closed."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """Do nothing."""

    def isatty(self) -> bool:
        return False
