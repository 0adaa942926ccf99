"""JSON as the standard has it: UTF-8, no NaN, no key twice, and bounded.

Python's own reader takes NaN, infinities, keys that stand twice and halves of surrogate pairs; here each is refused.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

__all__ = ["MAX_DEPTH", "JsonProblem", "decode_json", "read_elements"]

MAX_DEPTH = 64
"""Lists and objects in each other."""
MAX_DIGITS = 100
"""Of a whole number."""


class JsonProblem(ValueError):
    """What is wrong with a text that should be JSON."""

    def __init__(self, message: str, *, key: str | None = None, line: int = 1) -> None:
        super().__init__(message)
        self.key = key
        """The key of an object that is to blame."""
        self.line = line
        """Without a key: the line of the text."""


def decode_json(data: bytes) -> Any:
    """Decode one JSON text of UTF-8. Raises JsonProblem.

    >>> decode_json(b'{"a": 1}')
    {'a': 1}
    """
    text = _text_of(data)
    try:
        found = json.loads(text, **_STRICT)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _not_json(error, 1) from error
    _refuse_depth(found)
    return found


def read_elements(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield line and value of each element of one JSON array; the line is that on which the element begins.

    Raises JsonProblem, whose line is that of the text, or of the element that holds what is wrong.
    """
    text = _text_of(data)
    line, counted = 1, 0
    at = _after_blanks(text, _after_blanks(text, 0) + 1)
    is_open = text[at : at + 1] != "]"
    while is_open:
        line, counted = line + text.count("\n", counted, at), at
        value, at = _decode_next(text, at, line)
        yield line, value
        at = _after_blanks(text, at)
        is_open = text[at : at + 1] == ","
        if is_open:
            at = _after_blanks(text, at + 1)
    if text[at : at + 1] != "]":
        raise _not_json(json.JSONDecodeError("Expecting ',' or ']' after an element", text, at), line)
    at = _after_blanks(text, at + 1)
    if at < len(text):
        raise _not_json(json.JSONDecodeError("Something stands after the array", text, at), line)


def _decode_next(text: str, start: int, line: int) -> tuple[Any, int]:
    """Decode the value that begins at a character of a line; return it, and where it ends."""
    try:
        found, end = _DECODER.raw_decode(text, start)
        _refuse_depth(found)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _not_json(error, line) from error
    except JsonProblem as problem:
        problem.line = line
        raise
    return found, end


def _text_of(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise JsonProblem(f"It is not UTF-8: {error.reason} (byte {error.start + 1}).", line=line) from error


def _not_json(error: json.JSONDecodeError | RecursionError, line: int) -> JsonProblem:
    """Say what is wrong with the text; where only its depth is, `line` says where it begins."""
    if isinstance(error, RecursionError):
        return JsonProblem(f"It is nested more than {MAX_DEPTH} deep.", line=line)
    return JsonProblem(f"It is not JSON: {error.msg} (column {error.colno}).", line=error.lineno)


def _after_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    assert found is not None
    return found.end()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        seen: set[str] = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonProblem(f"Duplicate key {key[:60]!r}: it stands twice.", key=key)
    return data


def _no_constant(name: str) -> Any:
    raise JsonProblem(f"It is not JSON: {name} is no number.")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise JsonProblem(f"{text[:30]} is too large a number.")
    return value


def _bounded(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise JsonProblem(f"A number of {len(text):,} digits is too large.")
    return int(text)


def _refuse_depth(data: Any) -> None:
    """Look at the values that hold others, level by level."""
    level = [data] if isinstance(data, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        level = [
            item
            for holder in level
            for item in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return
    raise JsonProblem(f"It is nested more than {MAX_DEPTH} deep.")


_BLANKS = re.compile(r"[ \t\n\r]*")
_STRICT: dict[str, Any] = {
    "object_pairs_hook": _unique,
    "parse_constant": _no_constant,
    "parse_float": _finite,
    "parse_int": _bounded,
}
_DECODER = json.JSONDecoder(**_STRICT)
