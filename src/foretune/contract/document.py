"""A YAML or JSON text as plain values that remember where they stand.

ruamel.yaml (imported only here, when a text is read) gives events; the values are built here, so that aliases, tags,
dates, duplicate keys and deep nesting are refused where they appear and nothing is ever expanded.
"""

# os.path: pathlib costs 3 ms of every start.
# ruff: noqa: PTH118, PTH208

import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from foretune.contract.scalars import BadScalar, Scalar, Unreadable, echo, read_plain
from foretune.errors import ConfigError, Problem

__all__ = ["Document", "Node", "join_path", "plain_node", "read_document", "read_text", "show_path"]

LARGEST_FILE_BYTES = 1 << 20
DEEPEST = 32
MOST_VALUES = 10_000
LONGEST_NAME = 80

# Control characters, and the line ends that editors and YAML count differently (U+0085, U+2028, U+2029).
_FORBIDDEN = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufffe\uffff]"


class Node(NamedTuple):
    """A value, the place of its key (of itself, where it has none), and for mappings and lists its parts."""

    value: "Scalar | Unreadable | dict[str, Node] | list[Node]"
    place: str
    is_blank: bool = False
    """Whether it is null because nothing is written: in the place of a section that is no answer."""

    def plain(self) -> Any:
        """Return the value without places."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def unreadable(self, path: str) -> Iterator[tuple[str, str, Unreadable]]:
        """Yield each part that could not be read, with its path (`lora.targets[1]`) and its place."""
        if isinstance(self.value, Unreadable):
            yield path, self.value.place or self.place, self.value
        elif isinstance(self.value, dict):
            for key, node in self.value.items():
                yield from node.unreadable(join_path(path, key))
        elif isinstance(self.value, list):
            for index, node in enumerate(self.value):
                yield from node.unreadable(f"{path}[{index}]")


class Document(NamedTuple):
    """What a text holds (None: nothing), and what is wrong with it as YAML, which hides none of its values."""

    root: Node | None
    problems: list[Problem]


def join_path(path: str, name: str) -> str:
    """Write the dotted path of a name in a section; a long name is cut, so that problems stay small."""
    return f"{path}.{name[:LONGEST_NAME]}" if path else name[:LONGEST_NAME]


def plain_node(value: Any, place: str) -> Node:
    """Wrap a Python value, every part of it with the same place."""
    if isinstance(value, dict):
        return Node({str(key): plain_node(item, place) for key, item in value.items()}, place)
    if isinstance(value, (list, tuple)):
        return Node([plain_node(item, place) for item in value], place)
    return Node(value, place)


_STARTS = "`foretune config init FILE` writes one to start from."


def read_text(path: str) -> str:
    """Read a UTF-8 file of at most 1 MiB. Raises ConfigError; a byte order mark is skipped."""
    shown = show_path(path)
    try:
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):  # noqa: PTH110, PTH112, PTH113
            raise ConfigError(f"{shown} is not a regular file.", hint="Give a YAML file.")  # a pipe would wait for ever
        with open(path, "rb") as file:  # noqa: PTH123 (pathlib costs 3 ms of every start)
            data = file.read(LARGEST_FILE_BYTES + 1)
    except IsADirectoryError as error:
        raise ConfigError(f"{shown} is a folder, and a configuration is a file.", hint=_in_folder(path)) from error
    except FileNotFoundError as error:
        raise ConfigError(f"{shown} does not exist.", hint=_instead_of(path)) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{shown} cannot be read: {reason}.", hint="Give a file that you may read.") from error
    if len(data) > LARGEST_FILE_BYTES:
        raise ConfigError(f"{shown} is larger than 1 MiB.", hint="A configuration is a few kilobytes; is this it?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"byte 0x{data[error.start]:02x} is not UTF-8.", hint="Save the file as UTF-8.", place=f"{shown}:{line}"
        ) from error


def _in_folder(folder: str) -> str:
    """Say which file of a folder may have been meant."""
    names = sorted(name for name in _listed(folder) if name.endswith((".yaml", ".yml")))
    if names:
        name = "config.yaml" if "config.yaml" in names else names[0]
        return f"Give the file in it: {show_path(os.path.join(folder, name))}."
    if "config.json" in _listed(folder):
        return f"It holds a model: name it in a configuration as model.id. {_STARTS}"
    return _STARTS


def _instead_of(file: str) -> str:
    """Say which file may have been meant by a name that does not exist."""
    from foretune.contract.hints import nearest

    folder, name = os.path.split(file)
    near = nearest(name, [each for each in _listed(folder or ".") if each.endswith((".yaml", ".yml", ".json"))])
    return f"Did you mean {show_path(os.path.join(folder, near))}? {_STARTS}" if near else _STARTS


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (OSError, ValueError):
        return []


def show_path(text: str) -> str:
    """Write a path for a message, without characters that a terminal would obey."""
    return text if text.isprintable() else repr(text)[1:-1]


def read_document(text: str, name: str, *, plain: Callable[[str], Scalar] = read_plain) -> Document:
    """Read one YAML document (or JSON, which YAML 1.2 contains).

    `name` stands before line and column in every place; `plain` resolves what is not quoted. What a configuration may
    not hold but can be read past is a problem of the document, or an `Unreadable` value in it. Raises ConfigError where
    the rest cannot be read.
    """
    _refuse_characters(text, name)
    return _Reader(text, name, plain).read()


def _refuse_characters(text: str, name: str) -> None:
    match = re.search(_FORBIDDEN, text)
    if match is None:
        return
    before = text[: match.start()]
    place = f"{name}:{before.count(chr(10)) + 1}:{match.start() - before.rfind(chr(10))}"
    raise ConfigError(
        f"the character U+{ord(match[0]):04X} may not stand in a configuration.",
        hint='Remove it, or write it as an escape in "double quotes".',
        place=place,
    )


class _Reader:
    """Builds nodes from ruamel's events, collecting problems; stops only where the rest cannot be read."""

    def __init__(self, text: str, name: str, plain: Callable[[str], Scalar]) -> None:
        self.name = name
        self.text = text
        self.plain = plain
        self.num_values = 0
        self.problems: list[Problem] = []
        self.events: Iterator[Any] = self._parse()

    def read(self) -> Document:
        root = None
        try:
            for event in self.events:
                if type(event).__name__ != "DocumentStartEvent":
                    continue
                if root is not None:
                    self._problem("a second document starts here.", "Keep one document in the file.", event)
                    break
                if event.tags or (event.version and tuple(event.version) != (1, 2)):
                    self._problem("directives are not allowed here.", "Remove the line.", event)
                root = self._node(next(self.events), self._place(event), "", depth=1)
        except ConfigError as error:
            raise ConfigError.of([*self.problems, *error.problems]) from error
        return Document(root, self.problems)

    def _parse(self) -> Iterator[Any]:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError, YAMLError

        try:
            yield from YAML(typ="safe", pure=True, plug_ins=[]).parse(self.text)
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = self.name if mark is None else f"{self.name}:{mark.line + 1}:{mark.column + 1}"
            what = _first_line(error.problem or error.context or "it cannot be read")
            raise ConfigError(f"this is not valid YAML: {what}.", hint=_yaml_hint(what), place=place) from error
        except (YAMLError, ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
            # ruamel's scanner leaks these on a few malformed escapes and directives.
            what = _first_line(str(error)) or "it cannot be read"
            raise ConfigError(
                f"this is not valid YAML: {what}.", hint="Check the escapes in quotes.", place=self.name
            ) from error

    def _place(self, event: Any) -> str:
        mark = event.start_mark
        return f"{self.name}:{mark.line + 1}:{mark.column + 1}"

    def _problem(self, message: str, hint: str, event: Any, path: str = "") -> None:
        self.problems.append(Problem(message, hint, self._place(event), path.partition("[")[0] or None))

    def _node(self, event: Any, place: str, path: str, *, depth: int) -> Node:
        self._count(event)
        kind = type(event).__name__
        if kind == "AliasEvent":
            reason = "is an alias; anchors and aliases are not allowed"
            return Node(self._unreadable(event, echo(f"*{event.anchor}"), reason, "Write the value out."), place)
        self._refuse_anchor(event, path)
        if kind == "ScalarEvent":
            return Node(self._scalar(event), place, is_blank=event.style is None and event.value == "")
        if event.tag:
            self._problem(f"the tag {echo(str(event.tag))} is not allowed.", "Remove it.", event, path)
        if depth >= DEEPEST:
            hint = "Settings stand two levels deep, such as lora.rank; check the brackets and the indentation."
            message = f"the text is nested deeper than {DEEPEST} levels."
            raise ConfigError(message, hint=hint, place=self._place(event))
        if kind == "SequenceStartEvent":
            return Node(list(self._items(path, depth)), place)
        return Node(self._mapping(path, depth), place)

    def _count(self, event: Any) -> None:
        self.num_values += 1
        if self.num_values > MOST_VALUES:
            hint = "A configuration holds about fifty; is this the file?"
            raise ConfigError("the text holds more than 10 000 values.", hint=hint, place=self._place(event))

    def _refuse_anchor(self, event: Any, path: str) -> None:
        if event.anchor:
            self._problem("anchors and aliases are not allowed.", "Remove the anchor.", event, path)

    def _items(self, path: str, depth: int) -> Iterator[Node]:
        for index, event in enumerate(self.events):
            if type(event).__name__ == "SequenceEndEvent":
                return
            yield self._node(event, self._place(event), f"{path}[{index}]", depth=depth + 1)

    def _mapping(self, path: str, depth: int) -> dict[str, Node]:
        found: dict[str, Node] = {}
        for event in self.events:
            if type(event).__name__ == "MappingEndEvent":
                break
            key, place = self._key(event, path, depth), self._place(event)
            inner = join_path(path, "?" if key is None else key)
            node = self._node(next(self.events), place, inner, depth=depth + 1)
            if key is None:
                continue
            if key in found:
                message = f"the key {echo(key)} stands twice; the first is at {found[key].place}."
                self.problems.append(Problem(message, "Keep one of them.", place, inner))
                node = _both(found[key], node)
            found[key] = node
        return found

    def _key(self, event: Any, path: str, depth: int) -> str | None:
        """Return a key, or None where it is none; its value is read past."""
        kind = type(event).__name__
        if kind != "ScalarEvent":
            self._node(event, self._place(event), path, depth=depth + 1)
            shown = "an alias (anchors and aliases are not allowed)" if kind == "AliasEvent" else "a list or mapping"
            self._problem(f"a key must be text, not {shown}.", _KEY_HINT, event, join_path(path, "?"))
            return None
        self._count(event)
        self._refuse_anchor(event, path)
        key = self._scalar(event)
        if not isinstance(key, str):
            because = f", which {key.reason}" if isinstance(key, Unreadable) else ""
            message = f"a key must be text, not {echo(key)}{because}."
            self._problem(message, _KEY_HINT, event, join_path(path, echo(event.value)[1:-1]))
            return None
        if key == "<<" and event.style is None:
            self._problem("merge keys are not allowed.", "Write the values out.", event, join_path(path, key))
            return None
        return key

    def _scalar(self, event: Any) -> Scalar | Unreadable:
        text: str = event.value
        if event.tag:
            reason = f"has the tag {echo(str(event.tag))}; tags are not allowed"
            return self._unreadable(event, echo(text), reason, "Remove it; text goes in quotes.")
        try:
            return self.plain(text) if event.style is None else join_surrogates(text)
        except BadScalar as error:
            return Unreadable.of(error, self._place(event))

    def _unreadable(self, event: Any, shown: str, reason: str, hint: str) -> Unreadable:
        return Unreadable(shown=shown, reason=reason, hint=hint, place=self._place(event))


_KEY_HINT = "Write the name of a setting, such as lora."


def _both(first: Node, second: Node) -> Node:
    """Join what stands under a key that is given twice, so that nothing in either is hidden or said to be missing."""
    if isinstance(first.value, dict) and isinstance(second.value, dict):
        return Node({**first.value, **second.value}, second.place)
    return second


def join_surrogates(text: str) -> str:
    r"""Make one character of each pair such as \ud83d\ude00 (JSON's spelling). Raises BadScalar for half a pair."""
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError as error:
        raise BadScalar(
            echo(text), "holds half a surrogate pair", "Write both halves, or the character itself."
        ) from error


def _first_line(text: str) -> str:
    line = text.strip().split("\n", 1)[0].rstrip(".")[:200]
    return line if line.isprintable() else repr(line)[1:-1]


def _yaml_hint(what: str) -> str:
    if "'\\t'" in what or "\\t" in what:
        return "Indent with spaces, not with tabs."
    if "mapping values are not allowed" in what:
        return "Put text that holds `: ` in quotes, and check the indentation."
    return "Check the quotes, the brackets and the indentation here and above."
