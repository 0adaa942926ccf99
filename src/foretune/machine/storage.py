"""Room on disks and in memory. Places are named by where they come from, never by their path."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from foretune.data import cache_folder as rows_cache
from foretune.devices import MemoryLimit, memory_limit, system_memory
from foretune.machine.report import Figure, Finding
from foretune.models.hub import cache_folder as hub_cache
from foretune.units import GIB, MIB, format_bytes

__all__ = ["HostMemory", "Place", "host_memory_now", "memory_finding", "places", "storage_findings"]

LITTLE_MEMORY_BYTES = 3 * GIB
"""What interpreter, libraries and driver of a run are taken to need before any model (memory.overhead.host_need)."""


class Place(NamedTuple):
    """A folder that is written to, or will be."""

    check: str
    title: str
    shown: str
    """What a report calls it: `.`, `~/.cache/foretune`, `$HF_HOME/hub`."""
    path: Path
    least_bytes: int
    purpose: str
    change: str
    """The line that chooses another place."""


def places(folder: Path, environment: Mapping[str, str]) -> tuple[Place, ...]:
    """Name the folders that planning and training write to."""
    temporary = Path(tempfile.gettempdir())
    return (
        Place("current", "this folder", ".", folder, GIB, "runs with their checkpoints", "cd /a/larger/disk"),
        Place(
            "hub-cache",
            "hub cache",
            _origin(environment, ("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "/hub"))
            or _below_cache(environment, "huggingface/hub"),
            hub_cache(),
            2 * GIB,
            "downloaded models, 15 GiB for 7B parameters",
            "export HF_HOME=/a/larger/disk",
        ),
        Place(
            "rows-cache",
            "cache of encoded rows",
            _origin(environment, ("FORETUNE_CACHE", "")) or _below_cache(environment, "foretune"),
            rows_cache(),
            256 * MIB,
            "rows as tokens, at most 20 GiB",
            "export FORETUNE_CACHE=/a/larger/disk",
        ),
        Place(
            "temporary",
            "temporary folder",
            _origin(environment, ("TMPDIR", ""), ("TEMP", ""), ("TMP", "")) or _temporary_name(temporary),
            temporary,
            256 * MIB,
            "rows with --no-cache, self-tests",
            "export TMPDIR=/a/larger/disk",
        ),
    )


def _origin(environment: Mapping[str, str], *names: tuple[str, str]) -> str | None:
    return next((f"${name}{tail}" for name, tail in names if environment.get(name)), None)


def _below_cache(environment: Mapping[str, str], tail: str) -> str:
    if os.name == "nt" and tail == "foretune":
        return "%LOCALAPPDATA%\\foretune"
    return f"{'$XDG_CACHE_HOME' if environment.get('XDG_CACHE_HOME') else '~/.cache'}/{tail}"


def _temporary_name(path: Path) -> str:
    """Name the usual ones; where there is none of them Python takes the current folder."""
    usual = ("/tmp", "/var/tmp", "/usr/tmp")
    return path.as_posix() if path.as_posix() in usual else "Python's choice"


def storage_findings(looked_at: tuple[Place, ...]) -> Iterator[Finding]:
    """Say of each place how much is free and whether it can be written."""
    for place in looked_at:
        yield _storage(place)


def _storage(place: Place) -> Finding:
    name, check = f"{place.title} ({place.shown})", f"disk.{place.check}"
    existing = _existing(place.path)
    try:
        free = shutil.disk_usage(existing).free
        is_writable = os.access(existing, os.W_OK | os.X_OK) and existing.is_dir()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        return Finding(
            check=check, group="Memory and disk", state="unknown", found=f"{name} cannot be looked at: {reason}"
        )
    figures = (Figure(name="free_bytes", value=free),)
    purpose = f"for {place.purpose}"
    if not is_writable or free < place.least_bytes:
        lacks = f"has {format_bytes(free)} free" if is_writable else "cannot be written"
        return Finding(
            check=check,
            group="Memory and disk",
            state="problem",
            found=f"{name} {lacks}, and is {purpose}",
            advice=f"{'Free some space, or choose' if is_writable else 'Choose'} another place.",
            run=(place.change,),
            needed_for="training",
            figures=figures,
        )
    found = f"{name}: {format_bytes(free)} free, {purpose}"
    return Finding(check=check, group="Memory and disk", state="ok", found=found, figures=figures)


def _existing(path: Path) -> Path:
    """Return the folder itself, or the nearest above it that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


# -- memory


class HostMemory(NamedTuple):
    """The machine's memory, and what a container leaves of it. None: not told."""

    total_bytes: int | None
    available_bytes: int | None
    limit: MemoryLimit | None


def host_memory_now() -> HostMemory:
    """Ask the system."""
    return HostMemory(*system_memory(), memory_limit())


def memory_finding(memory: HostMemory) -> Finding:
    """Say how much memory there is, and what a limit leaves of it."""
    total, available, limit = memory
    if total is None:
        return Finding(
            check="memory",
            group="Memory and disk",
            state="unknown",
            found="this system does not tell how much memory there is (Linux does)",
        )
    figures = [Figure(name="total_bytes", value=total)]
    found = f"memory: {format_bytes(total)}"
    if available is not None:
        found += f", {format_bytes(available)} available"
        figures.append(Figure(name="available_bytes", value=available))
    left = [available]
    if limit is not None and limit.limit_bytes < total:
        found += f"; a limit of this container or service allows {format_bytes(limit.limit_bytes)}"
        figures.append(Figure(name="limit_bytes", value=limit.limit_bytes))
        left += [limit.limit_bytes, limit.free_bytes]
        if limit.free_bytes is not None:
            found += f", {format_bytes(limit.free_bytes)} of it unused"
    least = min((size for size in left if size is not None), default=None)
    is_little = least is not None and least < LITTLE_MEMORY_BYTES
    return Finding(
        check="memory",
        group="Memory and disk",
        state="problem" if is_little else "ok",
        found=found,
        advice=f"A training needs {format_bytes(LITTLE_MEMORY_BYTES)} before any model." if is_little else None,
        needed_for="some settings" if is_little else None,
        figures=tuple(figures),
    )
