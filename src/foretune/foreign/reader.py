"""A foreign file as keys with their values and places: YAML, JSON, or a command line in a text file."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from foretune.contract.document import Node, read_document, read_text, show_path
from foretune.contract.scalars import echo, read_plain
from foretune.errors import ConfigError
from foretune.foreign.rules import Key
from foretune.foreign.yaml11 import read_yaml11

__all__ = ["ForeignFile", "Given", "flatten", "read_foreign"]


class Given(NamedTuple):
    """A value and where its key stands."""

    value: Any
    place: str


class ForeignFile(NamedTuple):
    """A file as its tool is given it."""

    name: str
    folder: str
    keys: dict[str, Node]
    command: str | None = None
    """The program of a command line: `trl sft`, `llamafactory-cli train`."""


def read_foreign(path: str | os.PathLike[str]) -> ForeignFile:
    """Read a file. Raises ConfigError where it cannot be read, or is neither keys and values nor a command."""
    file = os.fsdecode(path)
    text, name = read_text(file), show_path(file)
    folder = os.path.dirname(os.path.abspath(file))  # noqa: PTH100, PTH120 (pathlib costs 3 ms of every start)
    if _is_command(text):
        from foretune.foreign.command_line import read_command

        command, keys = read_command(text, name)
        return ForeignFile(name, folder, keys, command)
    is_json = file.lower().endswith(".json")
    document = read_document(
        text.replace("\t", " ") if is_json else text, name, plain=read_plain if is_json else read_yaml11
    )
    root = document.root
    if root is None:
        raise ConfigError("the file is empty.", hint="Give the configuration of a fine-tune.", place=name)
    problems = list(document.problems)
    if problems:
        raise ConfigError.of(problems)
    if not isinstance(root.value, dict):
        hint = "It holds `key: value` lines, a JSON object, or a command such as `trl sft --model_name_or_path ...`."
        raise ConfigError(f"the top level is {echo(root.value)}, not a mapping.", hint=hint, place=root.place)
    _refuse_unreadable(root)
    return ForeignFile(name, folder, root.value)


def _is_command(text: str) -> bool:
    """Whether the first line that says something is a command: a program, then its flags."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return (
        re.match(r"(?:[A-Z_]+=\S* +)*(?:trl|accelerate|llamafactory-cli|torchrun|python3?|deepspeed)\s", first)
        is not None
    )


def _refuse_unreadable(root: Node) -> None:
    from foretune.errors import Problem

    problems = [
        Problem(f"{echo(part)[1:-1]} is {value.shown}, which {value.reason}.", value.hint, place)
        for part, place, value in root.unreadable("")
    ]
    if problems:
        raise ConfigError.of(problems)


def flatten(nodes: Mapping[str, Node], keys: Mapping[str, Key]) -> Iterator[tuple[str, Given, Key | None]]:
    """Yield every key with its row, into mappings and lists of them where the table knows what is inside."""
    for name, node in nodes.items():
        yield from _flatten(name, name, node, keys)


def _flatten(path: str, pattern: str, node: Node, keys: Mapping[str, Key]) -> Iterator[tuple[str, Given, Key | None]]:
    if isinstance(node.value, dict) and node.value and _has_inside(f"{pattern}.", keys):
        for name, inner in node.value.items():
            yield from _flatten(f"{path}.{name}", f"{pattern}.{name}", inner, keys)
    elif isinstance(node.value, list) and node.value and _has_inside(f"{pattern}[].", keys):
        for index, item in enumerate(node.value):
            if isinstance(item.value, dict):
                for name, inner in item.value.items():
                    yield from _flatten(f"{path}[{index}].{name}", f"{pattern}[].{name}", inner, keys)
            else:
                yield f"{path}[{index}]", Given(item.plain(), item.place), None
    else:
        yield path, Given(node.plain(), node.place), _row(pattern, keys)


def _has_inside(start: str, keys: Mapping[str, Key]) -> bool:
    return any(key.startswith(start) for key in keys)


def _row(pattern: str, keys: Mapping[str, Key]) -> Key | None:
    if pattern in keys:
        return keys[pattern]
    outer = pattern
    while "." in outer:
        outer = outer.rpartition(".")[0]
        if f"{outer}.*" in keys:
            return keys[f"{outer}.*"]
    return None
