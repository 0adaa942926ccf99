"""What a key of a foreign tool may mean: the words in which each tool's table is written."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from foretune.foreign.values import Changes, ToolName
from foretune.memory import StackProfile

if TYPE_CHECKING:
    from foretune.foreign.reading import Reading

__all__ = ["Key", "Reads", "Tool", "blocks", "ignored", "maps", "part"]

Reads = Literal["any", "count", "number", "switch", "text", "names", "listed"]
"""`names`: a list, or a text with commas. `listed`: a list, or one text, which may be a pattern."""


class Key(NamedTuple):
    """A row of a tool's table."""

    kind: Literal["maps", "part", "ignored", "blocks"]
    about: str
    """What the docs say of it, and the note beside it in an answer."""
    reads: Reads = "any"
    fields: tuple[str, ...] = ()
    default: Any = None
    """What the tool takes where the file is silent."""
    changes: Changes = "nothing"
    off: tuple[Any, ...] = ()
    """Values with which it does nothing."""
    takes_null: bool = False
    """Whether null says something else than silence."""


def maps(field: str, reads: Reads, about: str = "", *, default: Any = None) -> Key:
    """Name the field that means the same; `about` says where it nearly does."""
    return Key("maps", about, reads, (field,), default)


def part(reads: Reads, *fields: str, about: str = "", default: Any = None, takes_null: bool = False) -> Key:
    """Name the fields that this key decides together with others; a function of the tool does it."""
    return Key("part", about, reads, fields, default, takes_null=takes_null)


def ignored(about: str, *, default: Any = None) -> Key:
    """Name a key without counterpart that changes neither what is trained nor the memory."""
    return Key("ignored", about, default=default)


def blocks(changes: Changes, about: str, *, off: tuple[Any, ...] = (), field: str | None = None) -> Key:
    """Name a key without counterpart that matters, unless it is off (null, false, empty, or one of `off`).

    `field` is the setting by which the user may decide instead of leaving the key out.
    """
    return Key("blocks", about, fields=() if field is None else (field,), changes=changes, off=(False, *off))


class Tool(NamedTuple):
    """A tool: its keys, what they mean together, and what its run allocates."""

    name: ToolName
    title: str
    version: str
    """The release whose keys and defaults stand here."""
    keys: Mapping[str, Key]
    """By key; `a.b` stands in a mapping, `a[].b` in a list of them, and `a.*` for all keys of a mapping."""
    meaning: Callable[["Reading"], None]
    """Decides the keys that mean something together."""
    stack: StackProfile
    stack_notes: tuple[str, ...]
    paths: Literal["shell", "file"] = "shell"
    """What relative paths are relative to."""
