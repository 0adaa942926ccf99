"""The folder of a run: one run, one lock, one record, written from the first moment and replaced whole.

RUN/record.json       what the run is, and how it ended
RUN/config.yaml       the configuration, written out for a person
RUN/updates.jsonl     a line for each update and evaluation
RUN/checkpoints/      what it can be resumed from
RUN/adapter/ or model/  the artifact, there whole or not at all
RUN/evaluations/      a record for each `evaluate`
RUN/merged/           the artifact merged into its base, where `merge` was asked for no other place
RUN/merges/           a record for each `merge`
RUN/lock              held while the run goes on; it tells nothing by itself
RUN/holder.json       which process holds it
"""

import os
import socket
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from msgspec import json

from foretune.contract import TrainingConfig, dump_config
from foretune.devices import DeviceSpec
from foretune.durable import STAGED, at, draft_of, remove_folder, replace_file, told, write_file
from foretune.errors import EvidenceError, ForetuneError, RunDirectoryError
from foretune.evidence import MergeCheck, ProbeCheck, ProcessIdentity, RunRecord, encode_record, read_record
from foretune.runtime.failures import failure_of, outcome_of
from foretune.runtime.identity import code_identity, hardware_of
from foretune.runtime.libraries import all_versions
from foretune.texts import quoted

__all__ = [
    "CHECKPOINTS",
    "RECORD",
    "RunFolder",
    "begin_anew",
    "evaluation_of",
    "failed_start_path",
    "hold_run",
    "is_held",
    "merge_of",
    "note_failed_start",
    "note_later",
    "now",
    "open_run",
    "require_free",
    "this_process",
]

RECORD, CONFIG, UPDATES, CHECKPOINTS = "record.json", "config.yaml", "updates.jsonl", "checkpoints"
LOCK, HOLDER = "lock", "holder.json"
EVALUATIONS, MERGES = "evaluations", "merges"
ARTIFACTS = ("adapter", "model")
BEFORE_A_RUN = {LOCK, HOLDER, draft_of(Path(HOLDER)).name, draft_of(Path(RECORD)).name}
"""What a process leaves that is killed before its run has a record: to another one that is no more than nothing."""
OTHER_OUTPUT = "Choose another output: --output FOLDER."
"""What to do where a folder cannot be that of a new run."""
LOCK_SECONDS = 0.2
"""How long a lock is waited for: by then whoever got it first has said who it is."""


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def this_process() -> ProcessIdentity:
    """Say which process this is."""
    boot = None
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ProcessIdentity(pid=os.getpid(), host=socket.gethostname(), boot_id=boot)


class RunFolder:
    """A run's folder that this process holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record: RunRecord | None = None

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / CHECKPOINTS

    def begin(self, record: RunRecord, config: TrainingConfig) -> None:
        """Write the first record, and the configuration. Raises SaveError.

        The record comes first: a folder that has one can be resumed, and one that has none can be begun in.
        """
        if self.artifact is not None:  # a process was killed after it, before its record could say so
            remove_folder(self.artifact)
        self.write(record)
        with told(self.path):
            replace_file(self.path / CONFIG, dump_config(config).encode())
            self.checkpoints.mkdir(exist_ok=True)

    def write(self, record: RunRecord) -> None:
        """Replace the record. Raises SaveError."""
        with told(self.path / RECORD):
            replace_file(self.path / RECORD, encode_record(record))

    def append(self, entry: Any) -> None:
        """Add a line to the history of updates. Raises SaveError."""
        with told(self.path / UPDATES):
            at("append")
            with (self.path / UPDATES).open("ab") as file:
                file.write(json.encode(entry) + b"\n")

    def forget_after(self, update: int, evaluated: Container[int]) -> None:
        """Leave the history as it was after an update, from which the run goes on, and after some evaluations."""
        with told(self.path / UPDATES):
            try:
                lines = (self.path / UPDATES).read_bytes().splitlines()
            except FileNotFoundError:
                return
            kept = (line for line in lines if _is_before(line, update, evaluated))
            replace_file(self.path / UPDATES, b"".join(line + b"\n" for line in kept))

    def remove_drafts(self) -> None:
        """Remove what a process that was killed left unfinished."""
        for folder in (self.path, self.checkpoints):
            for path in folder.iterdir() if folder.is_dir() else ():
                if path.name.startswith(STAGED) and path.is_dir():
                    remove_folder(path)
        for name in (RECORD, CONFIG, UPDATES):
            with suppress(OSError):
                draft_of(self.path / name).unlink()

    @property
    def artifact(self) -> Path | None:
        """The artifact, where there is one."""
        return next((self.path / name for name in ARTIFACTS if (self.path / name).is_dir()), None)


def _is_before(line: bytes, update: int, evaluated: Container[int]) -> bool:
    """Say whether a line of the history comes before what is done now. An evaluation alone has `is_best`."""
    try:
        entry = json.decode(line)
        return entry["update"] <= update and ("is_best" not in entry or entry["update"] in evaluated)
    except (ValueError, TypeError, KeyError):
        return False  # the end of a line that a killed process did not finish


def failed_start_path(output: Path) -> Path:
    """Return where the record of a run is that failed before its folder existed."""
    return output.with_name(f"{output.name}.failed-start.json")


def note_failed_start(error: ForetuneError, record: RunRecord) -> None:
    """Keep the record of a run that failed before its folder existed, and name it in the error.

    Where nobody said where, or nothing can be written there, there is none.
    """
    config = record.requested
    if config.output is None or isinstance(error, RunDirectoryError):
        return
    path = failed_start_path(Path(config.output))
    ended = record.with_(outcome=outcome_of(error), failure=failure_of(error), finished_at=now())
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, encode_record(ended))
        error.record = str(path)


def evaluation_of(trained: RunRecord, probe: ProbeCheck, device: DeviceSpec | None) -> RunRecord:
    """Return the record of an evaluation of a run."""
    return _record_after(trained, "evaluate", device).with_(probe=probe)


def merge_of(trained: RunRecord, check: MergeCheck, started_at: str) -> RunRecord:
    """Return the record of a merge of a run's adapters into their base."""
    return _record_after(trained, "merge", None).with_(merge_check=check, started_at=started_at, finished_at=now())


def _record_after(trained: RunRecord, kind: Literal["evaluate", "merge"], device: DeviceSpec | None) -> RunRecord:
    """Return the record of what is done with a run's artifact."""
    return RunRecord(
        kind=kind,
        outcome="success",
        started_at=now(),
        requested=trained.requested,
        fingerprint=trained.fingerprint,
        code=code_identity(all_versions()),
        process=this_process(),
        base=trained.base,
        hardware=hardware_of(device),
        pad=trained.pad,
        artifact=trained.artifact,
    )


def note_later(run: Path, record: RunRecord) -> Path:
    """Keep the record of an evaluation or a merge below its run, under the next number. Raises SaveError."""
    folder, data = run / {"evaluate": EVALUATIONS, "merge": MERGES}[record.kind], encode_record(record)
    with told(folder):
        folder.mkdir(exist_ok=True)
        number = 1 + len(list(folder.glob("*.json")))
        while True:
            path = folder / f"{number:04}.json"
            try:
                write_file(path, data)
            except FileExistsError:  # another one was first
                number += 1
                continue
            return path


def begin_anew(config: TrainingConfig) -> None:
    """Forget a start that failed: what begins now has a record of its own."""
    assert config.output is not None
    beside = failed_start_path(Path(config.output))
    for path in (beside, draft_of(beside)):
        with suppress(OSError):
            path.unlink()


def require_free(path: Path) -> None:
    """Refuse a folder that is not empty, without touching it. Raises RunDirectoryError."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise RunDirectoryError(f"{path} cannot be a run's folder: {reason}.", hint=OTHER_OUTPUT) from error
    if path.is_symlink():
        raise RunDirectoryError(f"{path} is a symbolic link.", hint="Name the folder itself: --output FOLDER.")
    if not path.exists():
        return
    if not path.is_dir():
        raise RunDirectoryError(f"{path} is a file, and a run needs a folder.", hint=OTHER_OUTPUT)
    if _is_used(path):
        _require_idle(path)
        raise _not_empty(path)


def _is_used(path: Path) -> bool:
    return any(entry.name not in BEFORE_A_RUN for entry in path.iterdir())


def _not_empty(path: Path) -> RunDirectoryError:
    record = _record_of(path)
    if record is None:
        return RunDirectoryError(f"{path} is not empty, and is never written over.", hint=OTHER_OUTPUT)
    what = f"holds a run ({record.outcome}, begun {record.started_at})"
    then = f"`foretune evaluate {quoted(path)}` reloads it." if record.is_success else "Or go on with it: --resume."
    hint = f"{OTHER_OUTPUT} {then}"
    return RunDirectoryError(f"{path} {what}, and is never written over.", hint=hint)


def _record_of(path: Path) -> RunRecord | None:
    try:
        return read_record(path / RECORD)
    except EvidenceError:
        return None


@contextmanager
def open_run(path: Path, *, resumes: bool) -> Iterator[RunFolder]:
    """Make or reopen a run's folder and hold its lock.

    Raises RunDirectoryError where another process holds it (the message says which), where it is not empty and
    nothing is resumed, and where it cannot be made.
    """
    if not resumes:
        require_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise RunDirectoryError(f"{path} cannot be made: {reason}.", hint=OTHER_OUTPUT) from error
    elif not (path / RECORD).is_file():
        raise RunDirectoryError(f"{path} holds no run to resume.", hint="Check the path, or leave --resume out.")
    with _held(path):
        if not resumes and _is_used(path):  # another process was first, and is done
            raise _not_empty(path)
        folder = RunFolder(path)
        folder.remove_drafts()
        yield folder


@contextmanager
def hold_run(path: Path) -> Iterator[RunFolder]:
    """Hold the folder of a run that ended, and remove what a process that was killed left unfinished in it.

    Raises RunDirectoryError where another process holds it.
    """
    with _held(path):
        folder = RunFolder(path)
        folder.remove_drafts()
        yield folder


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Hold a folder's lock, and say in the folder who does. Raises RunDirectoryError."""
    from filelock import FileLock, Timeout  # of the extra `train`

    lock = FileLock(path / LOCK, timeout=LOCK_SECONDS)
    try:
        lock.acquire()
    except Timeout as error:
        raise _busy(path) from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise RunDirectoryError(f"{path} cannot be locked: {reason}.", hint=OTHER_OUTPUT) from error
    try:
        with suppress(OSError):  # it is for a message alone
            replace_file(path / HOLDER, json.encode(this_process()))
        yield
    finally:
        with suppress(OSError):
            (path / HOLDER).unlink()
        lock.release()


def is_held(path: Path) -> bool | None:
    """Say whether a process holds a run's folder; None: its lock cannot be looked at."""
    if not (path / LOCK).exists():
        return False
    try:
        from filelock import FileLock, Timeout  # of the extra `train`
    except ImportError:
        return None
    try:
        with FileLock(path / LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:
        return None


def _require_idle(path: Path) -> None:
    """Refuse a folder that another process holds. Raises RunDirectoryError."""
    if is_held(path):  # a lock that cannot be looked at does not say that it is held
        raise _busy(path)


def _busy(path: Path) -> RunDirectoryError:
    try:
        process = json.decode((path / HOLDER).read_bytes(), type=ProcessIdentity)
    except (OSError, ValueError):
        holder = "another process"
    else:
        holder = f"process {process.pid} on {process.host}"
    return RunDirectoryError(
        f"{path} is busy: {holder} runs in it.", hint="Wait for it to end, or choose another output: --output FOLDER."
    )
