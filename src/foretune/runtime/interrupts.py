"""Ctrl-C and SIGTERM: at once while nothing is trained yet, then after the update; the second one at once."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from foretune.errors import InterruptedRunError

__all__ = ["Interrupts", "Stopped"]

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """Ends a run at once. No library catches it by mistake, as it would an Exception."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(f"Stopped by {signal.Signals(number).name}.")
        self.exit_code = 128 + number


class Interrupts:
    """Hears signals for a run."""

    def __init__(self) -> None:
        self.first: int | None = None
        """The first signal that came."""
        self._waits = self._is_due = self._is_outside = self._is_over = False
        self._shields = 0

    @contextmanager
    def listening(self) -> Iterator["Interrupts"]:
        """Hear signals instead of Python, in the main thread; elsewhere nothing is heard.

        What is ignored stays so: `nohup` and the shell's `&` ask for that.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        heard = (number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None))
        before: dict[int, Any] = {number: signal.signal(number, self._heard) for number in heard}
        hook = sys.unraisablehook  # a Stopped that comes while an object dies is dropped by Python, and printed
        sys.unraisablehook = lambda told: None if isinstance(told.exc_value, Stopped) else hook(told)
        try:
            yield self
        finally:
            sys.unraisablehook = hook
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait_for_update(self) -> None:
        """From now on the first signal only asks for the end; the run looks at `is_asked` after each update."""
        self._waits = True

    @property
    def is_asked(self) -> bool:
        """Whether a signal asked for the end."""
        return self.first is not None

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Let a record or an artifact be finished whatever comes; what came is heard afterwards."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        self._stop_if_due()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Let whoever looks at an event do so: the first signal is heard when the run goes on, the second at once."""
        self._is_outside = True
        try:
            yield
        finally:
            self._is_outside = False
        self._stop_if_due()

    def finish(self) -> None:
        """Hear no more: the run has its artifact and its record, and it is too late to stop it."""
        self._is_over, self._is_due = True, False

    def error(self) -> InterruptedRunError:
        """Return the error that a run ends with."""
        number = self.first or signal.SIGINT
        error = InterruptedRunError(f"Stopped by {signal.Signals(number).name}.")
        error.exit_code = 128 + number
        return error

    def _heard(self, number: int, _: FrameType | None) -> None:
        if self._is_over:
            return
        is_second = self.first is not None
        self.first = self.first or number
        if self._waits and not is_second:
            return
        if self._shields or (self._is_outside and not is_second):
            self._is_due = True
            return
        raise Stopped(self.first)

    def _stop_if_due(self) -> None:
        """Stop where that had to wait, and where Python dropped it: a Stopped that comes while an object dies."""
        was_dropped = self.first is not None and not (self._waits or self._is_over)
        if (self._is_due or was_dropped) and not self._shields:
            self._is_due = False
            raise Stopped(self.first or signal.SIGINT)
