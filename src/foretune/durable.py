"""Files that are there whole or not at all: staged, synced, and renamed without replacing.

Every step that touches the disk goes through `at`, which does nothing: tests stop a process there.
"""

import ctypes
import errno
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import file_digest
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from foretune.errors import RunDirectoryError, SaveError

__all__ = [
    "MANIFEST",
    "STAGED",
    "at",
    "draft_of",
    "publish_draft",
    "publish_folder",
    "remove_folder",
    "replace_file",
    "staged",
    "told",
    "verify_folder",
    "write_file",
]

STAGED = ".staged-"
"""How a folder that is not finished begins its name; then what it will be, and the process that writes it."""
MANIFEST = "manifest.json"
_RENAME_NOREPLACE = 1
_AT_FDCWD = -100


def at(point: str) -> None:
    """Say that the disk is about to be touched."""


@contextmanager
def staged(final: Path) -> Iterator[Path]:
    """Give a new folder beside `final`; what is still there at the end is removed.

    Raises SaveError where the disk does not take it.
    """
    with told(final):
        at("stage")
        folder = Path(mkdtemp(prefix=f"{STAGED}{final.name}-{os.getpid()}-", dir=final.parent))
    try:
        with told(final):
            yield folder
    finally:
        if folder.exists():
            remove_folder(folder)


@contextmanager
def told(final: Path) -> Iterator[None]:
    """Turn what the disk says about a file or folder into a SaveError."""
    try:
        yield
    except OSError as error:
        raise _save_error(final, error) from error
    except Exception as error:  # safetensors wraps what the disk says in a type of its own
        if type(error).__name__ != "SafetensorError":
            raise
        raise _save_error(final, error) from error


def _save_error(final: Path, error: Exception) -> SaveError:
    number = getattr(error, "errno", None)
    hints = {
        errno.ENOSPC: "Free some space there, or choose another place.",
        errno.EDQUOT: "The quota is used up: free some space, or choose another place.",
        errno.EFBIG: "The largest file that may be written is too small (ulimit -f).",
        errno.EROFS: "Choose another place.",
    }
    text = str(error)
    for candidate in hints:
        if number is None and (f"code: {candidate}," in text or f"os error {candidate}" in text):
            number = candidate
    reason = os.strerror(number) if number is not None else text.splitlines()[0][:200]
    hint = hints.get(number or 0, "Check the disk, or choose another place.")
    return SaveError(f"{final} could not be written: {reason}.", hint=hint)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and see it through to the disk. Raises OSError."""
    at(f"write {path.name}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(path, flags, 0o644), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file anew: whoever reads it sees the old or the new one. Raises OSError."""
    draft = draft_of(path)
    with suppress(FileNotFoundError):
        draft.unlink()
    try:
        write_file(draft, data)
        at(f"replace {path.name}")
        draft.replace(path)
    except BaseException:  # a signal's too
        with suppress(OSError):
            draft.unlink()
        raise
    sync_folder(path.parent)


def draft_of(path: Path) -> Path:
    """Return where a small file is written before it takes the place of the old one."""
    return path.with_name(f".{path.name}.new")


def publish_folder(folder: Path, final: Path) -> None:
    """Finish a staged folder that nobody may change: write its manifest, and give it its name (see `publish_draft`)."""
    listed = _sync_files(folder, final)
    write_file(folder / MANIFEST, json.dumps(listed, indent=1).encode())
    _name_draft(folder, final)


def publish_draft(folder: Path, final: Path) -> None:
    """Finish a staged folder that a person will change: see all of it through to the disk, and give it its name.

    Raises SaveError where the name is taken, OSError where the disk does not take it.
    """
    _sync_files(folder, final)
    _name_draft(folder, final)


def _sync_files(folder: Path, final: Path) -> dict[str, dict[str, Any]]:
    """See every file through to the disk. Returns size and SHA-256 of each."""
    mask = _umask()
    folder.chmod((folder.stat().st_mode & stat.S_ISGID) | (0o777 & ~mask))  # a draft is private; what it becomes is not
    listed = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            at(f"sync {path.name}")
            path.chmod(0o666 & ~mask)
            with path.open("r+b") as file:  # Windows syncs only what may be written
                os.fsync(file.fileno())
                digest = file_digest(file, "sha256").hexdigest()
            listed[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": digest}
    return listed


def _umask() -> int:
    """Return what the user takes from the permissions of new files. It can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _name_draft(folder: Path, final: Path) -> None:
    sync_folder(folder)
    at("rename")
    _rename_new(folder, final)
    try:
        at("published")
        sync_folder(final.parent)
    except OSError:  # who is told that it could not be written must not find it
        remove_folder(final)
        raise


def verify_folder(folder: Path) -> None:
    """Compare a published folder with its manifest. Raises SaveError with the file that differs.

    A file that is there and cannot be read says nothing about the folder: RunDirectoryError.
    """
    try:
        listed = json.loads((folder / MANIFEST).read_bytes())
        for name, entry in listed.items():
            with (folder / name).open("rb") as file:
                if file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    raise SaveError(
                        f"{folder / name} differs from its manifest.",
                        hint="It was changed or damaged: restore it from a copy, or make it anew.",
                    )
    except SaveError:
        raise
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise SaveError(
                f"{folder} is not whole: a file is missing.",
                hint="It was changed or damaged: restore it from a copy, or make it anew.",
            ) from error
        reason = error.strerror or type(error).__name__
        raise RunDirectoryError(f"{folder} cannot be read: {reason}.", hint="Check the disk, and try again.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SaveError(
            f"{folder} is not whole: {error}.",
            hint="It was changed or damaged: restore it from a copy, or make it anew.",
        ) from error


def remove_folder(folder: Path) -> None:
    """Remove a folder that we made. It loses its name first, so that nobody takes what is left for a whole one."""
    at(f"remove {folder.name}")
    if not folder.name.startswith(STAGED):
        gone = folder.with_name(f"{STAGED}gone-{folder.name}")
        shutil.rmtree(gone, ignore_errors=True)
        with suppress(OSError):
            folder.rename(gone)
            folder = gone
    at(f"remove what is in {folder.name}")
    shutil.rmtree(folder, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """See a folder's entries through to the disk, where that can be asked for."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):  # some file systems know no such thing
            raise
    finally:
        os.close(descriptor)


def _rename_new(source: Path, target: Path) -> None:
    """Rename to a name that is free. `os.rename` would take the place of an empty folder."""
    call: Any = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if call is not None:
        if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) == 0:
            return
        number = ctypes.get_errno()
        if number == errno.EEXIST:
            raise SaveError(f"{target} exists already.", hint="Choose another place; nothing is overwritten.")
        if number not in (errno.EINVAL, errno.ENOSYS):  # some file systems have no such rename
            raise OSError(number, os.strerror(number), str(target))
    if os.path.lexists(target):
        raise SaveError(f"{target} exists already.", hint="Choose another place; nothing is overwritten.")
    source.rename(target)
