"""JSON as the standard has it: UTF-8, no NaN, no key twice, and bounded.

Python's own reader takes NaN, infinities, keys that stand twice and halves of surrogate pairs; here each is refused.
"""

import json
import math
from typing import Any

__all__ = ["MAX_DEPTH", "JsonProblem", "decode_json"]

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
    try:
        found = json.loads(
            data.decode(),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_bounded,
        )
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise JsonProblem(f"It is not UTF-8: {error.reason} (byte {error.start + 1}).", line=line) from error
    except json.JSONDecodeError as error:
        where = f" (column {error.colno})" if error.colno else ""
        raise JsonProblem(f"It is not JSON: {error.msg}{where}.", line=error.lineno) from error
    except RecursionError as error:
        raise JsonProblem(f"It is nested more than {MAX_DEPTH} deep.") from error
    _refuse_depth(found)
    return found


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
