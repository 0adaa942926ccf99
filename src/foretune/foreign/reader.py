"""A foreign file as keys with their values and places: YAML, JSON, or a command line in a text file."""

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from foretune.contract.document import Node, plain_node, read_document, read_text, show_path
from foretune.contract.elsewhere import is_command
from foretune.contract.scalars import echo, read_plain
from foretune.errors import ConfigError
from foretune.foreign.rules import Key, ignored
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
    name = show_path(file)
    if not os.path.exists(file):  # noqa: PTH110 - as in the contract
        raise ConfigError(f"{name} does not exist.", hint="Check the path.")
    text = read_text(file)
    folder = os.path.dirname(os.path.abspath(file))  # noqa: PTH100, PTH120 (pathlib costs 3 ms of every start)
    if is_command(text):
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
    node = _opened(node) if _has_inside(f"{pattern}.", keys) else node
    if node.value in (None, {}, []) and (_has_inside(f"{pattern}.", keys) or _has_inside(f"{pattern}[].", keys)):
        yield path, Given(None, node.place), _row(pattern, keys) or ignored("Empty: as if it were not there.")
    elif isinstance(node.value, dict) and _has_inside(f"{pattern}.", keys):
        for name, inner in node.value.items():
            yield from _flatten(f"{path}.{name}", f"{pattern}.{name}", inner, keys)
    elif isinstance(node.value, list) and _has_inside(f"{pattern}[].", keys):
        for index, item in enumerate(node.value):
            if isinstance(item.value, dict):
                for name, inner in item.value.items():
                    yield from _flatten(f"{path}[{index}].{name}", f"{pattern}[].{name}", inner, keys)
            else:
                yield f"{path}[{index}]", Given(item.plain(), item.place), None
    else:
        yield path, Given(node.plain(), node.place), _row(pattern, keys)


def _opened(node: Node) -> Node:
    """Read a mapping that is written as JSON text, as a command line has it."""
    if not (isinstance(node.value, str) and node.value.lstrip().startswith("{")):
        return node
    try:
        return plain_node(msgspec.json.decode(node.value), node.place)
    except msgspec.DecodeError:
        return node


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
