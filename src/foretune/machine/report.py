"""What was found on a machine, as values that are safe to show to anybody.

A report is built from a list of known fields; foreign text (names of processes, of cards, of files) enters through
`foreign` alone. No user name, host name, home, token, serial number or command line stands in it.
"""

from collections.abc import Iterable
from typing import Literal

from foretune.values import Value

__all__ = ["Figure", "Finding", "MachineReport", "Need", "Readiness", "State"]

State = Literal["ok", "missing", "problem", "unknown"]
"""`missing`: it is not there. `problem`: it is there and will not do. `unknown`: the machine does not tell."""
Need = Literal["planning", "training", "training on a GPU", "some settings"]
Group = Literal["Python", "Libraries", "GPU", "Environment", "Memory and disk", "Hub", "This folder", "Self-test"]


class Figure(Value, frozen=True, kw_only=True):
    """A number behind a finding; its name carries the unit."""

    name: str
    value: int


class Finding(Value, frozen=True, kw_only=True):
    """One thing that was looked at: what state it is in, what was found, and what to run next."""

    check: str
    """Stable, for a program: `python.version`, `library.train`, `gpu.0`."""
    group: Group
    state: State
    found: str
    advice: str | None = None
    run: tuple[str, ...] = ()
    """Lines for a shell, each as it stands."""
    needed_for: Need | None = None
    """What a state that is `missing` or `problem` prevents; None: nothing."""
    figures: tuple[Figure, ...] = ()

    @property
    def is_wrong(self) -> bool:
        """Whether something is to be done."""
        return self.state in ("missing", "problem")


class Readiness(Value, frozen=True, kw_only=True):
    """What this machine can do as it is."""

    planning: bool
    training_on_cpu: bool
    """In fp32."""
    training_on_gpu: bool
    self_test: bool | None = None
    """None: it was not asked for."""


class MachineReport(Value, frozen=True, kw_only=True):
    """Everything that was looked at, and what follows."""

    findings: tuple[Finding, ...]
    ready: Readiness
    has_gpu: bool
    """Whether an NVIDIA GPU answers."""

    @property
    def is_ready(self) -> bool:
        """Whether a run can begin: on the GPU where there is one, else on the CPU; and no self-test failed."""
        can_train = self.ready.training_on_gpu if self.has_gpu else self.ready.training_on_cpu
        return can_train and self.ready.self_test is not False

    @classmethod
    def of(cls, findings: Iterable[Finding], *, has_gpu: bool) -> "MachineReport":
        """Draw the conclusions."""
        found = tuple(findings)
        wrong = {finding.needed_for for finding in found if finding.is_wrong}
        tested = [finding for finding in found if finding.group == "Self-test"]
        can_train = not wrong & {"planning", "training"}
        ready = Readiness(
            planning="planning" not in wrong,
            training_on_cpu=can_train,
            training_on_gpu=can_train and has_gpu and "training on a GPU" not in wrong,
            self_test=all(not finding.is_wrong for finding in tested) if tested else None,
        )
        return cls(findings=found, ready=ready, has_gpu=has_gpu)
