"""Where a path of the configuration points: relative to the file that says it, or to the shell.

A loaded configuration holds absolute paths, so that it means the same wherever it is used. `make_portable` turns
those below a folder into relative ones again, for what is written into that folder.
"""

# os.path, because pathlib costs 3 ms of every start.
# ruff: noqa: PTH100, PTH110, PTH111, PTH117, PTH118

import os

from foretune.contract.config import TrainingConfig
from foretune.contract.fields import PATH_FIELDS

__all__ = ["is_path_like", "make_portable", "resolve_model", "resolve_path"]


def is_path_like(text: str) -> bool:
    """Whether a model id is spelled like a path: it starts with `./`, `../`, `/` or `~`, or is `.` or `..`."""
    return text in (".", "..", "~") or text.startswith(("./", "../", "~/", ".\\", "..\\")) or os.path.isabs(text)


def resolve_path(text: str, folder: str) -> str:
    """Make a path absolute, without following links: `~` is the home folder, the rest is relative to `folder`."""
    return os.path.abspath(os.path.join(folder, os.path.expanduser(text)))


def resolve_model(text: str, folder: str) -> str:
    """Make a model id absolute where it is a path: spelled like one, or the name of something that exists."""
    is_path = is_path_like(text) or os.path.exists(os.path.join(folder, text))
    return resolve_path(text, folder) if is_path else text


def make_portable(config: TrainingConfig, folder: str) -> TrainingConfig:
    """Return the configuration with the paths inside `folder` written relative to it (`./data/train.jsonl`)."""
    data = config.to_dict()
    for field in (*PATH_FIELDS, "model.id"):
        *sections, name = field.split(".")
        part = data
        for section in sections:
            part = part[section]
        if part[name] is not None:
            part[name] = _relative(part[name], os.path.abspath(folder))
    return TrainingConfig.create(**data)


def _relative(text: str, folder: str) -> str:
    if text == folder:
        return "."
    inside = text.startswith(folder.rstrip(os.sep) + os.sep)
    return f"./{os.path.relpath(text, folder)}".replace(os.sep, "/") if inside else text
