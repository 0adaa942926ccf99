"""What killed processes left in a folder: drafts that nobody will finish, and runs that began and never ended."""

import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any, NamedTuple

from msgspec import DecodeError, ValidationError, json

from foretune.durable import STAGED
from foretune.machine.privacy import Private
from foretune.machine.report import Finding

__all__ = ["Leftover", "folder_findings", "leftovers", "unfinished_runs"]

DEEPEST, MOST_ENTRIES, MOST_SHOWN = 4, 20_000, 20
YOUNG_SECONDS = 60.0
"""A draft outside a run's folder that was touched later may still be written; a run's own lock says it better."""
_DRAFT = re.compile(r"\.(?:record\.json|config\.yaml|updates\.jsonl|holder\.json|.+\.failed-start\.json)\.new")
_PARTIAL = re.compile(r"\..+\.(?:svg|jsonl?|ya?ml|csv|html|md)\.(\d{1,9})\.tmp")
"""What the command line leaves of a file that it was writing; the number is the process'."""
_STAGED_BY = re.compile(re.escape(STAGED) + r".+-(\d{1,9})-[^-]+")
_SKIPPED = {"node_modules", "site-packages", "__pycache__"}
RECORD, CONFIG, LOCK = "record.json", "config.yaml", "lock"


class Leftover(NamedTuple):
    """A file or folder that can be removed."""

    path: Path
    """Below the folder that was looked at."""
    is_folder: bool


class _Started(NamedTuple):
    """A run whose record says that it began, and not how it ended."""

    path: Path
    begun: str
    is_elsewhere: bool
    """Whether another machine began it: from here nobody sees whether it goes on."""


def folder_findings(folder: Path, private: Private) -> Iterator[Finding]:
    """Tell what killed processes left below a folder, each with the line that removes it or goes on with it."""
    left, runs = leftovers(folder), unfinished_runs(folder)
    for run in runs[:MOST_SHOWN]:
        yield _run(run, private)
    for number, each in enumerate(left[:MOST_SHOWN]):
        yield _leftover(number, each, private)
    more = max(len(left) - MOST_SHOWN, 0) + max(len(runs) - MOST_SHOWN, 0)
    if more:
        found = f"{more:,} more of these"
        yield Finding(check="leftover.more", group="This folder", state="problem", found=found)
    if not left and not runs:
        found = "no leftovers of killed runs"
        yield Finding(check="leftover", group="This folder", state="ok", found=found)


def _run(run: _Started, private: Private) -> Finding:
    name = private.foreign(run.path.as_posix())
    found = f"run {name}: started, not finished (begun {private.foreign(run.begun)})"
    if run.is_elsewhere:
        found = f"run {name}: started on another machine, where it may still be going"
        return Finding(check=f"run.{name}", group="This folder", state="unknown", found=found)
    line = f"foretune train {_quoted(run.path / CONFIG)} --resume"
    return Finding(
        check=f"run.{name}",
        group="This folder",
        state="problem",
        found=found,
        advice="Its process ended without a word. Go on from its newest checkpoint, or anew where it has none:",
        run=(line,) if private.foreign(line) == line else (),
    )


def _leftover(number: int, left: Leftover, private: Private) -> Finding:
    name = left.path.as_posix()
    shown = private.foreign(name)
    line = _removal(left)
    return Finding(
        check=f"leftover.{number}",
        group="This folder",
        state="problem",
        found=f"{'draft folder' if left.is_folder else 'draft'} {shown} of a process that was killed",
        advice="Nothing reads it; it may be removed." if shown == name else "Nothing reads it: remove it by hand.",
        run=(line,) if private.foreign(line) == line else (),
    )


def _removal(left: Leftover) -> str:
    if sys.platform == "win32":
        name = str(left.path).replace("'", "''")
        return f"Remove-Item {'-Recurse ' * left.is_folder}-LiteralPath '{name}'"
    return f"rm {'-r ' * left.is_folder}-- {_quoted(left.path)}"


def _quoted(path: Path) -> str:
    return shlex.quote(path.as_posix())


# -- looking


def leftovers(folder: Path) -> list[Leftover]:
    """List the drafts below a folder that no living process writes, sorted by path."""
    found: list[Leftover] = []
    held: dict[Path, bool] = {}
    for entry in _entries(folder):
        is_folder = entry.is_dir(follow_symlinks=False)
        if not _is_draft(entry.name, is_folder=is_folder):
            continue
        path = Path(entry.path)
        runs = [each for each in (path.parent, path.parent.parent) if (each / LOCK).exists()]
        if any(held.setdefault(each, _is_held(each)) for each in runs):
            continue
        if not runs and (_is_young(entry) or _is_written(entry.name)):  # a run's own lock says it better
            continue
        found.append(Leftover(path.relative_to(folder), is_folder))
    return sorted(found)


def _is_draft(name: str, *, is_folder: bool) -> bool:
    if is_folder:
        return name.startswith(STAGED)
    partial = _PARTIAL.fullmatch(name)
    return _DRAFT.fullmatch(name) is not None or (partial is not None and not _is_alive(int(partial[1])))


def _is_written(name: str) -> bool:
    """Whether the process that a staged folder is named after is alive."""
    staged = _STAGED_BY.fullmatch(name)
    return staged is not None and _is_alive(int(staged[1]))


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()  # elsewhere its age decides


def _is_young(entry: "os.DirEntry[str]") -> bool:
    try:
        return time() - entry.stat(follow_symlinks=False).st_mtime < YOUNG_SECONDS
    except OSError:
        return True  # it is just going


def unfinished_runs(folder: Path) -> list[_Started]:
    """List the runs below a folder that began, never ended, and are not going on here."""
    found = []
    for entry in _entries(folder):
        if entry.name != RECORD or not entry.is_file(follow_symlinks=False):
            continue
        record, path = _outcome(Path(entry.path)), Path(entry.path).parent
        if record is None or _is_held(path):
            continue
        begun, host = record
        found.append(_Started(path.relative_to(folder), begun, is_elsewhere=host != socket.gethostname()))
    return sorted(found)


def _outcome(path: Path) -> tuple[str, str] | None:
    """Return when and where a run began whose record says `started`; None for every other file."""
    try:
        record: dict[str, Any] = json.decode(path.read_bytes(), type=dict[str, Any])
        if record["schema"] != "foretune.record/1" or record["outcome"] != "started":
            return None
        return str(record["started_at"]), str(record["process"]["host"])
    except (OSError, DecodeError, ValidationError, RecursionError, KeyError, TypeError):
        return None


def _is_held(path: Path) -> bool:
    """Say whether a process holds a run's folder; one whose lock cannot be looked at is taken to be held."""
    if not (path / LOCK).exists():
        return False
    from foretune.runtime.run_folder import is_held

    return is_held(path) is not False


def _entries(folder: Path) -> Iterator["os.DirEntry[str]"]:
    """Yield what is below a folder, not too deep and not too much of it, without following links."""
    waiting, count = [(str(folder), 0)], 0
    while waiting:
        path, depth = waiting.pop()
        with suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                count += 1
                if count > MOST_ENTRIES:
                    return
                yield entry
                is_folder = entry.is_dir(follow_symlinks=False)
                if is_folder and depth < DEEPEST and not entry.name.startswith(".") and entry.name not in _SKIPPED:
                    waiting.append((entry.path, depth + 1))
