"""The settings as a tree of sections and leaves, with what each leaf may hold and how that is said in words."""

import math
from collections.abc import Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from foretune.contract.config import TrainingConfig
from foretune.contract.document import Node
from foretune.contract.scalars import Unreadable, echo
from foretune.errors import ConfigError, Problem
from foretune.values import Value

__all__ = [
    "PATH_FIELDS",
    "Leaf",
    "Section",
    "check_leaf",
    "choices",
    "describe_type",
    "field_tree",
    "find_field",
    "leaves",
    "unreadable_problems",
]

PATH_FIELDS = ("data.train", "evaluation.data", "output")
"""Fields that are always paths; `model.id` is one where it looks like one."""


class Leaf(NamedTuple):
    """A setting that holds a value. `default` is `msgspec.NODEFAULT` where it must be given."""

    path: str
    type: Any
    default: Any

    @property
    def is_required(self) -> bool:
        """Whether a file must give it."""
        return self.default is msgspec.NODEFAULT


class Section(NamedTuple):
    """A group of settings. An optional one is None unless something in it is given."""

    path: str
    cls: type[Value]
    is_optional: bool
    parts: "dict[str, Leaf | Section]"


@cache
def field_tree() -> Section:
    """Return the root of the settings, built from the types in `config.py`."""
    return _section("", TrainingConfig, is_optional=False)


def _section(path: str, cls: type[Value], *, is_optional: bool) -> Section:
    from msgspec.structs import fields

    parts: dict[str, Leaf | Section] = {}
    for field in fields(cls):
        inner_path = f"{path}.{field.name}" if path else field.name
        inner, optional = _section_class(field.type)
        if inner is None:
            parts[field.name] = Leaf(inner_path, field.type, field.default)
        else:
            parts[field.name] = _section(inner_path, inner, is_optional=optional)
    return Section(path, cls, is_optional, parts)


def _section_class(annotation: Any) -> tuple[type[Value] | None, bool]:
    if isinstance(annotation, type) and issubclass(annotation, Value):
        return annotation, False
    options = get_args(annotation) if get_origin(annotation) in (UnionType, Union) else ()
    for option in options:
        if isinstance(option, type) and issubclass(option, Value):
            return option, NoneType in options
    return None, False


def leaves(section: Section | None = None) -> Iterator[Leaf]:
    """Yield every setting, in the order in which they are written."""
    for part in (section or field_tree()).parts.values():
        if isinstance(part, Leaf):
            yield part
        else:
            yield from leaves(part)


def find_field(path: str) -> Leaf | Section | None:
    """Return the setting or section with this dotted path, or None."""
    part: Leaf | Section | None = field_tree()
    for name in path.split("."):
        part = part.parts.get(name) if isinstance(part, Section) else None
    return part


def check_leaf(leaf: Leaf, node: Node) -> Any:
    """Return the value in the field's own type. Raises ConfigError that says where it is wrong and what it may be.

    Strict: a bool is no number, `2.0` is no whole number, a number is no text; a whole number may stand for a float.
    """
    problems = [*unreadable_problems(node, leaf.path, leaf), *_wrong_items(leaf, node)]
    value = node.plain()
    if isinstance(value, dict) or (isinstance(value, list) and _item_type(leaf.type) is None):
        problems.append(_type_problem(leaf, value, node.place))
    if problems:
        raise ConfigError.of(problems)
    try:
        checked = _convert(value, leaf.type)
    except msgspec.ValidationError as error:
        raise ConfigError.of([_type_problem(leaf, value, node.place)]) from error
    # -0.0 equals 0.0 but is written differently, which would give equal configurations two fingerprints.
    return checked + 0.0 if isinstance(checked, float) else checked


def unreadable_problems(node: Node, path: str, leaf: Leaf | None = None) -> Iterator[Problem]:
    """Say what is unreadable in what stands at a path, and what to write; `leaf` is the setting there, if there is."""
    for part, place, value in node.unreadable(path):
        hint = value.hint
        if leaf is not None and part == path and "text" not in describe_type(leaf.type):
            hint = f"Write {describe_type(leaf.type)}."
        message = f"{echo(part)[1:-1]} is {value.shown}, which {value.reason}."
        yield Problem(message, hint, place, path if leaf is not None else part.partition("[")[0])


def _wrong_items(leaf: Leaf, node: Node) -> Iterator[Problem]:
    item_type = _item_type(leaf.type)
    if item_type is None or not isinstance(node.value, list):
        return
    for index, item in enumerate(node.value):
        value = item.plain()
        try:
            if not isinstance(value, Unreadable):
                _convert(value, item_type)
        except msgspec.ValidationError:
            from foretune.contract.hints import name_hint

            message = f"{leaf.path}[{index}] is {echo(value)}, but it must be a name."
            yield Problem(message, name_hint(value), item.place, leaf.path)


def _item_type(annotation: Any) -> Any:
    """Return what a field's list holds; None where the field holds no list."""
    for option in _options(annotation):
        base = get_args(option)[0] if get_origin(option) is Annotated else option
        if get_origin(base) is tuple:
            return get_args(base)[0]
    return None


def _convert(value: Any, annotation: Any) -> Any:
    _refuse_bad_text(value)
    return msgspec.convert(value, annotation, strict=True)


def _refuse_bad_text(value: Any) -> None:
    if isinstance(value, (list, tuple)):
        for item in value:
            _refuse_bad_text(item)
    elif isinstance(value, str) and (not value.strip() or any(is_control(character) for character in value)):
        raise msgspec.ValidationError("blank, or with control characters")
    elif isinstance(value, float) and not math.isfinite(value):
        raise msgspec.ValidationError("not finite")


def is_control(character: str) -> bool:
    """Whether it is a control character (C0, C1) or half a surrogate pair: no name or path may hold one."""
    code = ord(character)
    return code < 0x20 or 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000


def _type_problem(leaf: Leaf, value: Any, place: str) -> Problem:
    from foretune.contract.hints import value_hint

    shown = "an empty list" if value == [] else echo(value)
    message = f"{leaf.path} is {shown}, but it must be {describe_type(leaf.type)}."
    return Problem(message, value_hint(leaf, value), place, leaf.path)


def describe_type(annotation: Any) -> str:
    """Say in words what a field may hold.

    >>> describe_type(Literal["a", "b"] | None)
    'a, b or null'
    """
    options = [option for option in _options(annotation) if option is not NoneType]
    texts: list[str] = []
    for option in options:
        texts += _describe_option(option)
    if NoneType in _options(annotation):
        texts.append("null")
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def choices(annotation: Any) -> tuple[str, ...]:
    """Return the words among which a field chooses; empty where it holds free text or numbers."""
    found: list[str] = []
    for option in _options(annotation):
        if get_origin(option) is Literal:
            found += get_args(option)
    return tuple(found)


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (UnionType, Union) else (annotation,)


def _describe_option(option: Any) -> list[str]:
    if get_origin(option) is Literal:
        return [str(word) for word in get_args(option)]
    base, meta = option, msgspec.Meta()
    if get_origin(option) is Annotated:
        base, meta = get_args(option)[:2]
    if get_origin(base) is tuple:
        return ["a list of names"]
    name = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[base]
    return [name + _describe_bounds(meta)]


def _describe_bounds(meta: msgspec.Meta) -> str:
    if meta.max_length is not None:
        return f" of 1 to {meta.max_length} characters, without control characters"
    low, high = meta.ge if meta.ge is not None else meta.gt, meta.le if meta.le is not None else meta.lt
    if low is None or high is None:
        return ""
    head = f"from {low:g}" if isinstance(low, float) else f"from {low}"
    head = head if meta.ge is not None else f"above {low:g}"
    tail = f" to {high:g}" if isinstance(high, float) else f" to {high}"
    tail = tail if meta.le is not None else f" to below {high:g}"
    return f" {head}{tail}"
