"""Settings from the command line: `key=value` texts and flags, laid over what a file says."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from foretune.contract.document import Node, plain_node, read_document
from foretune.contract.scalars import BadScalar, Scalar, Unreadable, echo, read_plain
from foretune.errors import ConfigError, Problem

__all__ = ["Method", "Override", "apply_method", "apply_overrides", "parse_override", "read_value"]

Method = Literal["full", "lora", "qlora"]

_ITEM = r"""(?:[A-Za-z0-9_.+/-]+|'[^'\\"]*'|"[^"\\]*")"""
_SIMPLE_LIST = rf"\[\s*(?:{_ITEM}(?:\s*,\s*{_ITEM})*\s*,?\s*)?\]"
_SIMPLE_QUOTED = r"""'[^']*'|"[^"\\]*\""""
_STRUCTURED = frozenset("[{\"'&*!|>%@`")


class Override(NamedTuple):
    """One setting given on the command line: dotted key, value, and the flag that gave it."""

    key: str
    value: Any
    place: str = "--set"


def parse_override(text: str, *, place: str = "--set") -> Override:
    """Read `lora.rank=8`. Raises ConfigError for a missing `=`, an empty value and a value that is not YAML.

    A value that no setting can hold (`.nan`) is refused with the others when the settings are checked.

    >>> parse_override("optimizer.learning_rate=1e-4").value
    0.0001
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(
            f"{echo(text)} is not key=value.", hint="Write for example lora.rank=8.", place=place, field=key or None
        )
    if not value.strip():
        hint = f"Write {key}=null for none." if key.isprintable() else None
        raise ConfigError(f"{echo(key)} has no value.", hint=hint, place=place, field=key)
    try:
        return Override(key, read_value(value.strip(), place=f"{place} {_shown(key)}"), place)
    except ConfigError as error:
        raise ConfigError.of([problem._replace(field=key) for problem in error.problems]) from error


def _shown(key: str) -> str:
    return key if key.isprintable() and len(key) <= 80 else echo(key)


def read_value(text: str, *, place: str = "--set") -> Any:
    """Read one YAML value from the command line. Text that starts like no YAML structure is taken as it stands.

    What no setting can hold comes back as `Unreadable`. Raises ConfigError for text that is not YAML.
    """
    if text[:1] not in _STRUCTURED:
        return _plain(text)
    if re.fullmatch(_SIMPLE_QUOTED, text):
        return text[1:-1]
    if re.fullmatch(_SIMPLE_LIST, text):
        return [_item(item) for item in re.findall(_ITEM, text[1:-1])]
    document = read_document(text, place)
    if document.problems:
        raise ConfigError.of(document.problems)
    return None if document.root is None else document.root.plain()


def _item(text: str) -> Scalar | Unreadable:
    return text[1:-1] if text[0] in "'\"" else _plain(text)


def _plain(text: str) -> Scalar | Unreadable:
    try:
        return read_plain(text)
    except BadScalar as error:
        return Unreadable.of(error)


def apply_overrides(root: Node, overrides: Iterable[str | Override]) -> tuple[Node, list[Problem]]:
    """Lay settings over the tree; later than the file, never over each other.

    Returns the new tree and what is wrong: unparsable texts, and settings that contradict each other.
    """
    problems: list[Problem] = []
    accepted: dict[str, Override] = {}
    for given in overrides:
        try:
            override = parse_override(given) if isinstance(given, str) else given
        except ConfigError as error:
            problems += error.problems
            continue
        clash = _clash(accepted, override)
        if clash is not None:
            problems.append(clash)
            continue
        accepted[override.key] = override
        root = _set(root, override.key.split("."), plain_node(override.value, _place(override)))
    return root, problems


def _place(override: Override) -> str:
    return f"{override.place} {_shown(override.key)}" if override.place == "--set" else override.place


def _clash(accepted: dict[str, Override], new: Override) -> Problem | None:
    for old in accepted.values():
        is_same = old.key == new.key
        if is_same and (type(old.value), old.value) == (type(new.value), new.value):
            continue
        outer = old if new.key.startswith(f"{old.key}.") else new if old.key.startswith(f"{new.key}.") else None
        if is_same or (outer is not None and not isinstance(outer.value, dict)):
            message = f"{_shown(new.key)} = {echo(new.value)} contradicts {_shown(old.key)} = {echo(old.value)}"
            return Problem(f"{message} ({_place(old)}).", "Give one of them.", _place(new), new.key)
    return None


def _set(node: Node, names: Sequence[str], new: Node) -> Node:
    if not names:
        both = isinstance(node.value, dict) and isinstance(new.value, dict)
        return Node({**node.value, **new.value}, new.place) if both else new  # type: ignore[dict-item]
    parts = dict(node.value) if isinstance(node.value, dict) else {}
    inner = parts.get(names[0], Node({}, new.place))
    parts[names[0]] = _set(inner, names[1:], new)
    return Node(parts, node.place)


def apply_method(root: Node, method: str, *, place: str = "--method") -> tuple[Node, list[Problem]]:
    """Make the tree mean `full`, `lora` or `qlora`: add what is missing, contradict what is there, drop nothing.

    `qlora` brings `quantization: {scheme: nf4}` and `lora: {}` where the tree leaves them open.
    """
    if method not in get_args(Method):
        from foretune.contract.hints import nearest

        near = nearest(method, get_args(Method))
        message = f"method is {echo(method)}, but it must be full, lora or qlora."
        return root, [Problem(message, f"Did you mean {near}?" if near else None, place)]
    problems = []
    for name, wanted in (("lora", method != "full"), ("quantization", method == "qlora")):
        given = _given(root, name)
        if given is not None and given.is_blank:
            continue  # What it means is asked where the settings are checked.
        is_on = given is not None and given.value is not None
        if given is not None and is_on != wanted:
            problems.append(_contradiction(method, name, given, place, wanted=wanted))
        elif given is None and wanted:
            brought = {"scheme": "nf4"} if name == "quantization" else {}
            root = _set(root, [name], plain_node(brought, place))
    return root, problems


def _given(root: Node, name: str) -> Node | None:
    return root.value.get(name) if isinstance(root.value, dict) else None


def _contradiction(method: str, name: str, given: Node, place: str, *, wanted: bool) -> Problem:
    need = f"needs the section {name}" if wanted else f"takes no section {name}"
    found = f"{given.place} sets it{' to null' if given.value is None else ''}"
    is_flag = given.place.startswith("--")
    remove = f"Remove {given.place}" if is_flag else f"Remove {name} (or --set {name}=null)"
    if wanted:
        hint = f"{f'Remove {given.place}' if is_flag else f'Remove {name}: null'}, or choose another --method."
    else:
        hint = f"{remove}, or choose --method {'qlora' if method == 'lora' else 'lora or qlora'}."
    return Problem(f"{method} {need}, but {found}.", hint, place, name)
