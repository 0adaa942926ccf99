"""Plain scalars by the core schema of YAML 1.2, for files and for the command line alike.

`1e-4` is a number, `no` and `12:30:45` are text, `010` is ten. What YAML 1.1 and 1.2 read as different things (a
date) and what no setting can be (NaN, infinity, integers beyond 64 bits) is refused. Chapter 10.3 of the YAML 1.2.2
specification.

Patterns are compiled when first used (`re` keeps them): a start that reads no number pays nothing.
"""

import re
from typing import Self

from foretune.values import Value

__all__ = ["BadScalar", "Scalar", "Unreadable", "echo", "read_plain"]

Scalar = str | int | float | bool | None

LONGEST_ECHO = 80

_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_NOT_FINITE = frozenset(f"{sign}{word}" for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF"))
_NAN = frozenset((".nan", ".NaN", ".NAN"))
_NUMERIC_START = frozenset("+-.0123456789")
_NUMBER = (
    r"(?P<int>[-+]?[0-9]+)|(?P<oct>0o[0-7]+)|(?P<hex>0x[0-9a-fA-F]+)"
    r"|(?P<float>[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?)"
    r"|(?P<date>[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt \t].*)?)"
)


class BadScalar(ValueError):
    """A scalar that no setting can hold: how it is shown, why (`is not a finite number`), and what to write."""

    def __init__(self, shown: str, reason: str, hint: str) -> None:
        super().__init__(f"{shown} {reason}.")
        self.shown, self.reason, self.hint = shown, reason, hint


class Unreadable(Value, frozen=True, kw_only=True):
    """Stands where no value could be read, until a check knows the field and reports it beside all else."""

    shown: str
    reason: str
    """What follows "which", as in `is not a finite number`."""
    hint: str
    place: str | None = None
    """None: that of its node."""

    @classmethod
    def of(cls, error: BadScalar, place: str | None = None) -> Self:
        """Keep what `read_plain` refused."""
        return cls(shown=error.shown, reason=error.reason, hint=error.hint, place=place)


_NUMBER_OR_TEXT = "Write a smaller number, or put text in quotes."


def read_plain(text: str) -> Scalar:
    """Resolve an unquoted scalar. Raises BadScalar for a date, NaN, an infinity and integers beyond 64 bits.

    >>> read_plain("1e-4"), read_plain("no"), read_plain("010")
    (0.0001, 'no', 10)
    """
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in _NUMERIC_START:
        return text
    if text in _NOT_FINITE or text in _NAN:
        raise BadScalar(text, "is not a finite number", "Write a finite number, or put text in quotes.")
    match = re.fullmatch(_NUMBER, text)
    return text if match is None else _number(text, match.lastgroup)


def _number(text: str, kind: str | None) -> int | float:
    if kind == "date":
        raise BadScalar(echo(text), "is a date to some readers of YAML and text to others", "Put it in quotes.")
    if kind == "float":
        value = float(text)
        if value in (float("inf"), float("-inf")):
            raise BadScalar(echo(text)[1:-1], "is too large for a number", _NUMBER_OR_TEXT)
        return value
    if len(text) > 70:
        raise BadScalar(echo(text)[1:-1], "is too large for a whole number (below 2^63)", _NUMBER_OR_TEXT)
    number = int(text, {"oct": 8, "hex": 16}.get(kind or "", 10)) if kind != "oct" else int(text[2:], 8)
    if not -(1 << 63) <= number < 1 << 63:
        raise BadScalar(text, "is too large for a whole number (below 2^63)", _NUMBER_OR_TEXT)
    return number


def echo(value: object) -> str:
    """Show a value in a message: escaped, as YAML spells it, cut to 80 characters.

    >>> echo("bf16"), echo(True), echo(None)
    ("'bf16'", 'true', 'null')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Unreadable):
        return value.shown
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, str):
        shown = repr(value[: LONGEST_ECHO + 1])
    else:
        shown = repr(value)
    return shown if len(shown) <= LONGEST_ECHO else shown[: LONGEST_ECHO - 4] + "..." + shown[-1]
