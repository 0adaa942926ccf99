"""What a run uses, phase by phase: the allocator's counters on CUDA, the process' resident memory on a CPU."""

import ctypes
import gc
import sys
from pathlib import Path

import torch

from foretune.evidence import PhaseReading

__all__ = ["Meter"]

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Meter:
    """Reads the peak of each phase when the next one begins.

    Every phase of a run is entered here, so a test that wants something to happen in one overrides `enter`.
    """

    def __init__(self, device: str) -> None:
        self.is_cuda = device == "cuda"
        self.phase = "start"
        self.base_bytes: int | None = None
        """Resident before anything was loaded; None where the system does not say."""
        self._peaks: dict[str, PhaseReading] = {}

    def begin(self) -> None:
        """Begin to measure: what is resident now, libraries among it, is not the run's.

        What planning has freed is handed back first, or the run would fill it again and seem to grow by less.
        """
        gc.collect()
        _hand_back()
        self.base_bytes = _resident("VmRSS")
        self._reset()

    def enter(self, phase: str) -> None:
        """End one phase and begin another. Phases are named as in a prediction."""
        if phase == self.phase:
            return
        self._read()
        self.phase = phase
        self._reset()

    def readings(self) -> tuple[PhaseReading, ...]:
        """Return the peak of each phase so far, in the order in which they first came."""
        self._read()
        return tuple(reading for phase, reading in self._peaks.items() if phase != "start")

    def _reset(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            try:
                CLEAR.write_text("5")  # the high-water mark begins anew (proc(5))
            except OSError:
                self.base_bytes = None  # without it no phase could be told from the one before

    def _read(self) -> None:
        now = PhaseReading(phase=self.phase)
        if self.is_cuda:
            now = now.with_(
                peak_allocated_bytes=torch.cuda.max_memory_allocated(),
                peak_reserved_bytes=torch.cuda.max_memory_reserved(),
            )
        elif self.base_bytes is not None:
            peak = _resident("VmHWM")
            now = now.with_(peak_process_bytes=None if peak is None else max(0, peak - self.base_bytes))
        before = self._peaks.get(self.phase)
        self._peaks[self.phase] = now if before is None else before.larger(now)


def _hand_back() -> None:
    """Return the free pages of the heap to the system, where the C library can (glibc)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _resident(field: str) -> int | None:
    try:
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
