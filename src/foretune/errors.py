"""The exceptions of foretune and the exit code of each.

    ForetuneError                            exit
    +-- ConfigError(ValueError)                2   unknown field, bad value, contradiction
    |     +-- UnsupportedError                 2   valid, but not qualified (says what is)
    +-- ModelAccessError                       4   missing token, not granted, not found, offline
    +-- DataError(ValueError)                  5   file and line of the row
    +-- OutOfMemoryError                       6   phase and request, and what would need less
    +-- MissingDependencyError(ImportError)    7   names the extra to install
    +-- RunDirectoryError                      8   the run's folder is busy or not empty
    +-- EvidenceError(ValueError)              9   unreadable observations or records; file, line and cause
    +-- RunError(RuntimeError)                10   a run failed; `record` is the path of its record
          +-- VerificationError               11   what runs differs from what was asked for
          +-- NonFiniteLossError              12   a loss or a gradient that is no number
          +-- SaveError                       13   disk full, read-only, or what was written is not whole
          +-- InterruptedRunError            130   Ctrl-C; 143 where it was SIGTERM

An error says where, what was got, why it cannot work and what to do. A command that finds several problems
reports them all at once: `problems` holds one entry for each.
"""

from typing import Any, NamedTuple

__all__ = [
    "ConfigError",
    "DataError",
    "EvidenceError",
    "ForetuneError",
    "InterruptedRunError",
    "MissingDependencyError",
    "ModelAccessError",
    "NonFiniteLossError",
    "OutOfMemoryError",
    "Problem",
    "RunDirectoryError",
    "RunError",
    "SaveError",
    "UnsupportedError",
    "VerificationError",
]


class Problem(NamedTuple):
    """One thing that is wrong: where it stands, what it is, and what to do about it."""

    message: str
    hint: str | None = None
    place: str | None = None
    """`run.yaml:14:3`, `--set`, `config.json`; None where the message says it."""
    field: str | None = None
    """The dotted path of the field, for example `precision.dtype`."""

    def __str__(self) -> str:
        head = f"{self.place}: " if self.place else ""
        tail = f" {self.hint}" if self.hint else ""
        return f"{head}{self.message}{tail}"


class ForetuneError(Exception):
    """Base of every error that a person can act on. `code` is stable, `exit_code` is documented."""

    code = "error"
    exit_code = 1
    record: str | None = None
    """The path of the run's record, where the error ended a run."""

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        place: str | None = None,
        field: str | None = None,
        problems: tuple[Problem, ...] = (),
    ) -> None:
        self.problems = problems or (Problem(message, hint, place, field),)
        self.message = message
        self.hint = hint
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @classmethod
    def of(cls, problems: list[Problem]) -> "ForetuneError":
        """Build one error from everything that was found wrong (at least one problem)."""
        first = problems[0]
        return cls(first.message, hint=first.hint, place=first.place, field=first.field, problems=tuple(problems))

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints under `error`."""
        told = {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "exit_code": self.exit_code,
            "problems": [problem._asdict() for problem in self.problems],
        }
        return told if self.record is None else {**told, "record": self.record}


class ConfigError(ForetuneError, ValueError):
    """The request is wrong: an unknown field, a bad value, a contradiction, an unreadable file."""

    code = "config"
    exit_code = 2


class UnsupportedError(ConfigError):
    """The request makes sense, but foretune is not qualified for it; the message says what it is qualified for."""

    code = "unsupported"


class ModelAccessError(ForetuneError):
    """The model's metadata cannot be had: missing token, access not granted, not found, or offline."""

    code = "model-access"
    exit_code = 4


class DataError(ForetuneError, ValueError):
    """The data cannot be read: no such file, nothing in it, or a line that is wrong."""

    code = "data"
    exit_code = 5


class MissingDependencyError(ForetuneError, ImportError):
    """A library is missing; the message has the exact install line."""

    code = "dependency"
    exit_code = 7


class EvidenceError(ForetuneError, ValueError):
    """Observations cannot be read: no such file, no row in it, or a line that is none."""

    code = "evidence"
    exit_code = 9


class OutOfMemoryError(ForetuneError):
    """The device, or the machine, has no more memory."""

    code = "oom"
    exit_code = 6
    phase: str | None = None
    requested_bytes: int | None = None
    """What was asked for last; None: not told. No peak is known: the request that failed is in none."""


class RunDirectoryError(ForetuneError):
    """The folder of a run is busy or not empty, or there is no run in it."""

    code = "run-folder"
    exit_code = 8


class RunError(ForetuneError, RuntimeError):
    """A run failed, through no fault of the request."""

    code = "runtime"
    exit_code = 10


class VerificationError(RunError):
    """What runs differs from what was asked for."""

    code = "verification"
    exit_code = 11


class NonFiniteLossError(RunError):
    """A loss, or the norm of the gradients, is no finite number."""

    code = "non-finite"
    exit_code = 12


class SaveError(RunError):
    """An artifact or a checkpoint could not be written whole."""

    code = "save"
    exit_code = 13


class InterruptedRunError(RunError):
    """A run was stopped from outside."""

    code = "interrupted"
    exit_code = 130
