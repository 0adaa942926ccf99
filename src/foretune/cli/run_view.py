"""A run as a person follows it: one line that moves on a terminal, a line now and then elsewhere. On stderr."""

import os
from contextlib import suppress
from time import monotonic
from typing import Any

from foretune.cli.progress import SECONDS_OF_SILENCE
from foretune.cli.terminal import NARROWEST, WIDEST, escape, standard_streams
from foretune.units import format_bytes

__all__ = ["RunView", "bytes_or_unknown"]

BAR = 24
PHASES = {
    "load": "Loading the base model",
    "prepare": "Preparing: adapters, optimizer; verifying",
    "rehearsal": "Rehearsing the widest micro batch",
    "evaluation": "Evaluating",
    "save": "Saving and verifying the artifact",
    "merge.base": "Running the base on the probe's rows",
    "merge.merge": "Merging layer by layer",
    "merge.check": "Running the merged model on the probe's rows",
    "merge.save": "Saving the merged model",
}


class RunView:
    """Writes what happens."""

    def __init__(self) -> None:
        self.stderr = standard_streams()[1]
        self.is_terminal = bool(self.stderr.isatty())
        self._said = 0.0
        self._begun: float | None = None
        self._first = 0

    def say(self, text: str) -> None:
        """Write a line that stays."""
        self._clear()
        self._write(f"{escape(text)}\n")

    def phase(self, name: str) -> None:
        """Say that a phase begins."""
        self._move(f"{PHASES.get(name, name)} ...") if self.is_terminal else self.say(f"{PHASES.get(name, name)} ...")

    def rows(self, progress: Any) -> None:
        """Say how far the encoding is."""
        text = f"Encoding: {progress.num_rows:,} rows, {progress.num_bytes / max(progress.total_bytes, 1):.0%}"
        self._now_and_then(text)

    def update(self, event: Any) -> None:
        """Say what an update gave, and when the last one is to be expected."""
        now = monotonic()
        if self._begun is None:
            self._begun, self._first = now, event.update
        text = (
            f"update {event.update:,}/{event.num_updates:,}  loss {event.loss:.4f}  lr {event.learning_rate:.2e}  "
            f"{event.tokens_per_second:,.0f} tokens/s"
        )
        done = event.update - self._first
        if done:
            left = (now - self._begun) / done * (event.num_updates - event.update)
            text += f"  {_duration(left)} left"
        if self.is_terminal and BAR + 3 + len(text) < self._width():
            full = BAR * event.update // event.num_updates
            text = f"[{'#' * full}{'.' * (BAR - full)}] {text}"
        is_edge = event.update in (1, event.num_updates)
        self._now_and_then(text, is_due=is_edge and not self.is_terminal)

    def end(self) -> None:
        """Take the moving line away."""
        self._clear()

    def _now_and_then(self, text: str, *, is_due: bool = False) -> None:
        if self.is_terminal:
            self._move(text)
        elif is_due or monotonic() - self._said > SECONDS_OF_SILENCE:
            self._said = monotonic()
            self.say(text)

    def _move(self, text: str) -> None:
        """Write over the line before: what is wider than the terminal would leave its beginning behind."""
        self._write(f"\r\x1b[K{escape(text)[: self._width() - 1]}")

    def _clear(self) -> None:
        if self.is_terminal:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        """Write where that is still possible: who closes the terminal stops the run by a signal, not by our writing."""
        with suppress(OSError, ValueError):
            self.stderr.write(text)
            self.stderr.flush()

    def _width(self) -> int:
        with suppress(OSError, ValueError):
            return max(os.get_terminal_size(self.stderr.fileno()).columns or WIDEST, NARROWEST)
        return WIDEST


def _duration(seconds: float) -> str:
    """Write a duration as a person says it.

    >>> _duration(5400)
    '1 h 30 min'
    """
    minutes = int(seconds) // 60
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {int(seconds) % 60} s" if minutes else f"{int(seconds)} s"


def bytes_or_unknown(number: int | None) -> str:
    """Write a size; unknown looks unknown."""
    return "unknown" if number is None else format_bytes(number)
