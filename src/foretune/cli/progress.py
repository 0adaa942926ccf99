"""How far a long command is, on stderr."""

from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any

from foretune.cli.terminal import standard_streams

if TYPE_CHECKING:
    from foretune.api import Progress

__all__ = ["watched"]

SECONDS_OF_SILENCE = 30.0
"""After which a command whose stderr is no terminal says how far it is."""


def watched(items: "Iterable[Progress | Any]") -> Any:
    """Show progress on stderr until the last item comes, and return that: on a terminal always, else now and then."""
    from foretune.api import Progress

    stderr = standard_streams()[1]
    is_terminal, last, said = bool(stderr.isatty()), None, monotonic()
    for item in items:
        last = item
        if not isinstance(item, Progress) or not (is_terminal or monotonic() - said > SECONDS_OF_SILENCE):
            continue
        said = monotonic()
        text = f"{item.num_rows:,} rows, {item.num_bytes / max(item.total_bytes, 1):.0%} of the file"
        stderr.write(f"\r{text}" if is_terminal else f"{text}\n")
        stderr.flush()
    if is_terminal:
        stderr.write("\r\x1b[K")
    return last
