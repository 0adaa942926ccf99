"""A YAML or JSON text as plain values that remember where they stand.

ruamel.yaml (imported only here, when a text is read) gives events; the values are built here, so that aliases, tags,
dates, duplicate keys and deep nesting are refused where they appear and nothing is ever expanded.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from foretune.contract.scalars import BadScalar, Scalar, echo, read_plain
from foretune.errors import ConfigError, Problem

__all__ = ["Node", "plain_node", "read_document", "read_text", "show_path"]

LARGEST_FILE_BYTES = 1 << 20
DEEPEST = 32
MOST_VALUES = 10_000

# Control characters, and the line ends that editors and YAML count differently (U+0085, U+2028, U+2029).
_FORBIDDEN = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufffe\uffff]"


class Node(NamedTuple):
    """A value, the place of its key (of itself, where it has none), and for mappings and lists its parts."""

    value: "Scalar | dict[str, Node] | list[Node]"
    place: str

    def plain(self) -> Any:
        """Return the value without places."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


def plain_node(value: Any, place: str) -> Node:
    """Wrap a Python value, every part of it with the same place."""
    if isinstance(value, dict):
        return Node({str(key): plain_node(item, place) for key, item in value.items()}, place)
    if isinstance(value, (list, tuple)):
        return Node([plain_node(item, place) for item in value], place)
    return Node(value, place)


def read_text(path: str) -> str:
    """Read a UTF-8 file of at most 1 MiB. Raises ConfigError; a byte order mark is skipped."""
    shown = show_path(path)
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (pathlib costs 3 ms of every start)
            data = file.read(LARGEST_FILE_BYTES + 1)
    except IsADirectoryError as error:
        raise ConfigError(f"{shown} is a folder.", hint="Give the YAML file in it.") from error
    except FileNotFoundError as error:
        raise ConfigError(
            f"{shown} does not exist.", hint="`foretune config init` writes one to start from."
        ) from error
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


def show_path(text: str) -> str:
    """Write a path for a message, without characters that a terminal would obey."""
    return text if text.isprintable() else repr(text)[1:-1]


def read_document(text: str, name: str) -> Node | None:
    """Read one YAML document (or JSON, which YAML 1.2 contains). None where it is empty.

    `name` stands before line and column in every place. Raises ConfigError for what a configuration may not hold.
    """
    _refuse_characters(text, name)
    return _Reader(text, name).read()


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
    """Builds nodes from ruamel's events; stops at the first thing that makes the text unreadable."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.text = text
        self.num_values = 0
        self.duplicates: list[Problem] = []
        self.events: Iterator[Any] = self._parse()

    def read(self) -> Node | None:
        node = None
        for event in self.events:
            if type(event).__name__ == "DocumentStartEvent":
                self._check_document(event, node)
                node = self._node(next(self.events), self._place(event), depth=1)
        if self.duplicates:
            raise ConfigError.of(self.duplicates)
        return node

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
            raise ConfigError(f"this is not valid YAML: {what}.", place=self.name) from error

    def _place(self, event: Any) -> str:
        mark = event.start_mark
        return f"{self.name}:{mark.line + 1}:{mark.column + 1}"

    def _check_document(self, event: Any, before: Node | None) -> None:
        if before is not None:
            raise ConfigError(
                "a second document starts here.", hint="Keep one document in the file.", place=self._place(event)
            )
        if event.tags or (event.version and tuple(event.version) != (1, 2)):
            raise ConfigError("directives are not allowed here.", hint="Remove the line.", place=self._place(event))

    def _node(self, event: Any, place: str, *, depth: int) -> Node:
        self._check_event(event)
        self.num_values += 1
        if self.num_values > MOST_VALUES:
            raise ConfigError("the text holds more than 10 000 values.", place=self._place(event))
        kind = type(event).__name__
        if kind == "ScalarEvent":
            return Node(self._scalar(event), place)
        if depth >= DEEPEST:
            raise ConfigError(f"the text is nested deeper than {DEEPEST} levels.", place=self._place(event))
        if kind == "SequenceStartEvent":
            return Node(list(self._items(depth)), place)
        return Node(self._mapping(depth), place)

    def _check_event(self, event: Any) -> None:
        if type(event).__name__ == "AliasEvent" or getattr(event, "anchor", None):
            raise ConfigError(
                "anchors and aliases are not allowed.", hint="Write the value out.", place=self._place(event)
            )
        if getattr(event, "tag", None):
            raise ConfigError(
                f"the tag {echo(str(event.tag))} is not allowed.",
                hint="Remove it; text goes in quotes.",
                place=self._place(event),
            )

    def _items(self, depth: int) -> Iterator[Node]:
        for event in self.events:
            if type(event).__name__ == "SequenceEndEvent":
                return
            yield self._node(event, self._place(event), depth=depth + 1)

    def _mapping(self, depth: int) -> dict[str, Node]:
        found: dict[str, Node] = {}
        for event in self.events:
            if type(event).__name__ == "MappingEndEvent":
                break
            key, place = self._key(event), self._place(event)
            node = self._node(next(self.events), place, depth=depth + 1)
            if key in found:
                message = f"the key {echo(key)} stands twice; the first is at {found[key].place}."
                self.duplicates.append(Problem(message, "Keep one of them.", place, key))
            found[key] = node
        return found

    def _key(self, event: Any) -> str:
        self._check_event(event)
        self.num_values += 1
        key = self._scalar(event) if type(event).__name__ == "ScalarEvent" else [event]
        if not isinstance(key, str):
            shown = "a list or mapping" if isinstance(key, list) else echo(key)
            raise ConfigError(f"a key must be text, not {shown}.", place=self._place(event))
        if key == "<<" and event.style is None:
            raise ConfigError("merge keys are not allowed.", hint="Write the values out.", place=self._place(event))
        return key

    def _scalar(self, event: Any) -> Scalar:
        text: str = event.value
        try:
            if event.style is None:
                return read_plain(text)
            return join_surrogates(text)
        except BadScalar as error:
            raise ConfigError(str(error), place=self._place(event)) from error


def join_surrogates(text: str) -> str:
    r"""Make one character of each pair such as \ud83d\ude00 (JSON's spelling). Raises BadScalar for half a pair."""
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError as error:
        raise BadScalar("half a surrogate pair is not text.") from error


def _first_line(text: str) -> str:
    line = text.strip().split("\n", 1)[0].rstrip(".")[:200]
    return line if line.isprintable() else repr(line)[1:-1]


def _yaml_hint(what: str) -> str | None:
    if "'\\t'" in what or "\\t" in what:
        return "Indent with spaces, not with tabs."
    if "mapping values are not allowed" in what:
        return "Put text that holds `: ` in quotes, and check the indentation."
    return None
