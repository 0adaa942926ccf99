"""How much memory this process may use where a container or a service has a limit (Linux control groups)."""

from pathlib import Path
from typing import NamedTuple

__all__ = ["MemoryLimit", "memory_limit"]

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes a number near 2^63 where there is no limit."""


class MemoryLimit(NamedTuple):
    """The tightest limit that holds for this process."""

    limit_bytes: int
    free_bytes: int | None
    """The limit less what is used and cannot be given back; None: not told."""


def memory_limit() -> MemoryLimit | None:
    """Read the limit of this process' control group and of those around it; None: there is none, or it is not told."""
    found = [limit for folder in _folders() if (limit := _limit_of(folder)) is not None]
    return min(found, key=lambda limit: limit.limit_bytes, default=None)


def _folders() -> list[Path]:
    """Return the groups of this process, innermost first, up to the root that it sees."""
    folders = []
    for line in _text(MEMBERSHIP).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            root = GROUPS
        elif "memory" in controllers.split(","):
            root = GROUPS / "memory"
        else:
            continue
        inner = root / path.strip("/")
        folders += [inner, *(parent for parent in inner.parents if parent == root or root in parent.parents)]
    return folders or [GROUPS, GROUPS / "memory"]


def _limit_of(folder: Path) -> MemoryLimit | None:
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _number(_text(folder / limit_name))
        if limit is None or limit >= NO_LIMIT_BYTES:
            continue
        used = _number(_text(folder / used_name))
        if used is None:
            return MemoryLimit(limit, None)
        statistics = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
        cache = _number(statistics.get(cache_name, "")) or 0
        return MemoryLimit(limit, max(limit - max(used - cache, 0), 0))
    return None


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() and len(text) < 20 else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
