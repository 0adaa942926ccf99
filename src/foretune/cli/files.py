"""Files that a command writes: whole or not at all, and never over another."""

# os.path, as in the contract: pathlib costs 3 ms of every start.
# ruff: noqa: PTH104, PTH108, PTH112, PTH118, PTH119, PTH120, PTH123

import os
from collections.abc import Iterable, Mapping
from typing import Any

from foretune.errors import ConfigError, ForetuneError

__all__ = ["require_files", "require_new", "require_svg", "write_new"]


def require_files(given: Mapping[str, Any], *names: str) -> None:
    """Refuse the files of these flags that cannot be written, before anything is answered. Raises ConfigError."""
    files = {f"--{name}": given[name] for name in names if given[name] is not None}
    if files and len(given["configs"]) > 1:
        raise ConfigError(
            f"{' and '.join(files)}: one file, but several configurations.", hint="Give one --config FILE."
        )
    if "--plot" in files:
        require_svg(files["--plot"])
    for file in files.values():
        require_new(file)


def require_svg(file: str) -> None:
    """Raise ConfigError where a plot cannot come to be, as `require_new`, or where it is not called an SVG."""
    if not file.lower().endswith(".svg"):
        raise ConfigError("The plot is an SVG.", hint="Name it FILE.svg.", place=f"--plot {file}")
    require_new(file)


def require_new(file: str) -> None:
    """Raise ConfigError where a file cannot come to be: the name is taken, or there is no such folder."""
    _refuse_taken(file)
    _require_folder(file)


def _refuse_taken(file: str) -> None:
    if os.path.lexists(file):
        raise ConfigError("The file exists already.", hint="Choose another name; nothing is overwritten.", place=file)


def _require_folder(file: str) -> None:
    folder = os.path.dirname(file) or "."
    if not os.path.isdir(folder):
        raise ConfigError(f"The folder {folder} does not exist.", hint="Make it, or choose another place.", place=file)


def write_new(file: str, texts: Iterable[str]) -> None:
    """Write texts to a file that must not exist yet: beside it first, then under its name in one step.

    Raises ConfigError, and whatever the texts raise: then nothing is left behind.
    """
    draft = os.path.join(os.path.dirname(file), f".{os.path.basename(file)}.{os.getpid()}.tmp")
    try:
        require_new(file)
        try:
            with open(draft, "x", encoding="utf-8", newline="\n") as stream:
                stream.writelines(texts)
            _publish(draft, file)
        finally:
            if os.path.lexists(draft):
                os.unlink(draft)
    except FileExistsError:
        _refuse_taken(file)
        raise
    except ForetuneError:  # a ValueError too, of whoever makes the texts
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"The file cannot be written: {reason}.", hint="Choose another place.", place=file) from error


def _publish(draft: str, file: str) -> None:
    """Give a file its name, unless there is one of that name; where there are no hard links, by renaming."""
    try:
        os.link(draft, file)
    except FileExistsError:
        raise
    except (OSError, NotImplementedError):
        _refuse_taken(file)
        os.rename(draft, file)
