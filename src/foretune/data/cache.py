"""Where encoded rows are kept between commands: by content, so that nothing is ever out of date.

The key of a store is a hash of the rows, the tokenizer's files, the template and the settings that decide about ids
and answers. The folder is `$FORETUNE_CACHE`, else `foretune` in the user's cache folder; it may be deleted at any time.
"""

import os
import shutil
import sys
from collections.abc import Iterable
from hashlib import file_digest, sha256
from pathlib import Path
from time import time
from typing import Any

import msgspec

from foretune.data.rows import unreadable
from foretune.errors import DataError

__all__ = ["cache_folder", "digest_file", "prune_stores", "store_place"]

MAX_BYTES = 20 << 30
"""What stores may take in all; the ones that were used longest ago go first."""
DRAFT_SECONDS = 86400.0
"""After which a draft was left by a process that ended."""


def cache_folder() -> Path:
    """Return the folder in which foretune keeps what it can make again."""
    stated = os.environ.get("FORETUNE_CACHE")
    if stated:
        return Path(stated).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base).expanduser() / "foretune"


def digest_file(file: str) -> str:
    """Return the SHA-256 of a file. Raises DataError where it cannot be read."""
    try:
        if Path(file).is_fifo() or Path(file).is_char_device():
            message = "It is no regular file, and the rows are read more than once."
            raise DataError(message, hint="Write them to a file first.", place=file)
        with open(file, "rb") as stream:  # noqa: PTH123 - the path may be any text
            return file_digest(stream, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise unreadable(file, error) from error


def store_place(folder: Path, identity: Any) -> Path:
    """Return where the store of an identity (what msgspec encodes) is, or would be."""
    return folder / "tokens" / sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()[:32]


def prune_stores(folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
    """Remove the stores that were used longest ago, until the rest takes no more than `max_bytes`; and old drafts."""
    total = 0
    for _, store in sorted(_used(folder / "tokens"), reverse=True):
        total += sum(_sizes(store.iterdir()))
        if total > max_bytes:
            shutil.rmtree(store, ignore_errors=True)


def _used(folder: Path) -> list[tuple[float, Path]]:
    """Return when each store was used last; a draft counts as used while it may still be written."""
    found = []
    for store in folder.iterdir() if folder.is_dir() else ():
        try:
            if store.name.startswith("."):
                if time() - store.stat().st_mtime > DRAFT_SECONDS:
                    shutil.rmtree(store, ignore_errors=True)
                continue
            found.append(((store / "meta.json").stat().st_mtime, store))
        except OSError:
            continue  # it is just being removed
    return found


def _sizes(files: Iterable[Path]) -> Iterable[int]:
    for file in files:
        try:
            yield file.stat().st_size
        except OSError:
            continue
