"""How a run ends that does not end well: every exception becomes one of our errors, and one outcome of the record."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec
from foretune.errors import (
    ConfigError,
    DataError,
    ForetuneError,
    InterruptedRunError,
    MissingDependencyError,
    ModelAccessError,
    NonFiniteLossError,
    OutOfMemoryError,
    RunError,
    SaveError,
    VerificationError,
)
from foretune.evidence import Failure, Outcome
from foretune.memory import MemoryEstimate, assess_fit
from foretune.models import ModelShape
from foretune.runtime.border import LIBRARIES, foreign_place
from foretune.units import format_bytes, parse_bytes

__all__ = ["explained", "failure_of", "outcome_of", "running"]

_OUTCOMES: tuple[tuple[type[ForetuneError], Outcome], ...] = (
    (InterruptedRunError, "interrupted"),
    (OutOfMemoryError, "oom"),
    (DataError, "data-error"),
    (ModelAccessError, "access-error"),
    (MissingDependencyError, "dependency-error"),
    (ConfigError, "config-error"),
    (NonFiniteLossError, "non-finite"),
    (VerificationError, "verification-error"),
    (SaveError, "save-error"),
)
_CUDA = re.compile(r"Tried to allocate ([\d.]+) ([KMGT]?i?B)")
_CPU = re.compile(r"(?:DefaultCPUAllocator|can't allocate memory).*?you tried to allocate (\d+) bytes", re.DOTALL)
_MEMORY = re.compile(f"{_CPU.pattern}|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.DOTALL)
"""How memory is said to be out by what is not torch's allocator."""
_DEVICE = re.compile(r"CUDA error|CUBLAS_STATUS|CUDNN_STATUS|cuDNN error")
"""What a device reports late, at whatever line waits for it: `.item()` or `.to()` in our own code."""
_LONGEST = 300
NUM_PARTS = 3


def outcome_of(error: ForetuneError) -> Outcome:
    """Return what the record says of an error."""
    return next((outcome for kind, outcome in _OUTCOMES if isinstance(error, kind)), "runtime-error")


def failure_of(error: ForetuneError) -> Failure:
    """Return an error as the record keeps it."""
    is_oom = isinstance(error, OutOfMemoryError)
    return Failure(
        code=error.code,
        message=str(error.message),
        hint=error.hint,
        phase=error.phase if is_oom else None,
        requested_bytes=error.requested_bytes if is_oom else None,
    )


@contextmanager
def running(phase: Callable[[], str]) -> Iterator[None]:
    """Turn what torch and its libraries raise into our errors; `phase` says in which phase it happens.

    Raises OutOfMemoryError with phase and request, RunError for anything else that is foreign. Our own errors and
    our own mistakes pass.
    """
    try:
        yield
    except ForetuneError:
        raise
    except MemoryError as error:
        raise _out_of_memory(error, phase()) from error
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError" or _MEMORY.search(str(error)):
            raise _out_of_memory(error, phase()) from error
        place = foreign_place(error, LIBRARIES)
        if place is None and _DEVICE.search(str(error)):
            place = "the device"
        if place is None:
            raise
        reason = (str(error).strip().splitlines() or [""])[0][:_LONGEST]
        raise RunError(
            f"The run failed in {phase()}: {type(error).__name__}: {reason} ({place}).",
            hint="Nothing was handed over. With --debug the traceback is shown.",
        ) from error


def explained(
    error: OutOfMemoryError,
    prediction: MemoryEstimate | None,
    config: TrainingConfig,
    shape: ModelShape,
    device: DeviceSpec | None,
) -> OutOfMemoryError:
    """Add to an error what the plan says: its largest parts, and the nearest changes that need less, re-estimated."""
    if prediction is None:
        return error
    parts = sorted(prediction.components, key=lambda part: -part.num_bytes)[:NUM_PARTS]
    listed = ", ".join(f"{part.name} {format_bytes(part.num_bytes)}" for part in parts)
    hint = None
    if device is not None:
        # The plan fitted and the run did not, so what helps is what needs less than was planned.
        short = device.with_(free_bytes=max(0, prediction.need_bytes - 1))
        changes = assess_fit(prediction, config, shape, short).changes
        told = [
            f"{each.label} (--set {' --set '.join(each.settings)}): {format_bytes(each.need_bytes)}" for each in changes
        ]
        hint = f"Nearest changes, with what would have to be free: {'; '.join(told)}." if told else None
    made = OutOfMemoryError(
        f"{error.message} The largest parts of the plan ({prediction.kind}): {listed}.",
        hint=hint or "Choose a smaller batch, shorter rows, lora, gradient_checkpointing: true or loss: chunked.",
    )
    made.phase, made.requested_bytes = error.phase, error.requested_bytes
    return made


def _out_of_memory(error: Exception, phase: str) -> OutOfMemoryError:
    text = str(error)
    cuda, cpu = _CUDA.search(text), _CPU.search(text)
    requested = None
    if cuda:
        requested = parse_bytes(f"{cuda.group(1)}{cuda.group(2)}")
    elif cpu:
        requested = int(cpu.group(1))
    asked = f" when {format_bytes(requested)} more were asked for" if requested is not None else ""
    made = OutOfMemoryError(f"Out of memory in {phase}{asked}.")
    made.phase, made.requested_bytes = phase, requested
    return made
