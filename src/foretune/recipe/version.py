"""Which version of foretune a recipe is of. Its plan, its settings and its scripts are that version's."""

# os.path, as in the contract: pathlib costs 3 ms of every start.
# ruff: noqa: PTH113, PTH118, PTH120, PTH123

import os

from msgspec import DecodeError, json

from foretune import __version__
from foretune.errors import ConfigError, UnsupportedError
from foretune.texts import quoted

__all__ = ["RECIPE_FILE", "require_same_version"]

RECIPE_FILE = "recipe.json"
"""Stands beside the recipe's configuration, and says of which version it is."""


def require_same_version(config_file: str) -> None:
    """Refuse a configuration that stands in a recipe of another version; any other file passes.

    Raises UnsupportedError with the line that installs the recipe's version, ConfigError where `recipe.json` is none.
    """
    folder = os.path.dirname(config_file)
    file = os.path.join(folder, RECIPE_FILE)
    if not os.path.isfile(file):
        return
    version = _version_of(file)
    if version == __version__:
        return
    requirements = os.path.join(folder, "requirements.txt")
    raise UnsupportedError(
        f"this recipe is of foretune {version}, and {__version__} is installed: its plan and the meaning of its "
        "settings are that version's.",
        hint=f"`pip install -r {quoted(requirements)}` installs that version; `foretune recipe NEW --config "
        f"{quoted(config_file)}` writes the recipe anew.",
        place=file,
    )


def _version_of(file: str) -> str:
    try:
        with open(file, "rb") as stream:
            found = json.decode(stream.read(1 << 24))
        version = found["foretune"]
    except OSError as error:
        raise ConfigError(f"The file cannot be read: {error.strerror}.", place=file) from error
    except (DecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ConfigError(
            "this is no recipe's file: it does not say of which foretune it is.",
            hint="Write the recipe anew, or use its configuration in a folder without this file.",
            place=file,
        ) from error
    return str(version)[:40]
