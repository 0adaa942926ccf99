"""The base of the values that travel between the rooms: frozen, keyword-only, strict.

A constructor of a msgspec Struct does not validate. Build a value from outside data with `create` and change one
with `with_`: both go through `convert` and check types, bounds and unknown fields. msgspec does not inherit
`kw_only`, so each class states it (a house test checks that).
"""

import math
from typing import Any, Self

import msgspec

__all__ = ["Value", "encode_json"]


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Frozen fields, compared by content, hashable, with JSON in and out."""

    @classmethod
    def create(cls, **fields: Any) -> Self:
        """Build a checked value from builtins. Raises msgspec.ValidationError."""
        return msgspec.convert(fields, cls)

    def with_(self, **changes: Any) -> Self:
        """Return a checked copy with some fields changed. Raises msgspec.ValidationError."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return msgspec.convert(msgspec.to_builtins({**fields, **changes}), type(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the value as dicts, lists, text and numbers."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data


def encode_json(value: Any) -> str:
    """Encode to JSON with two-space indentation; a NaN or an infinity is our mistake and raises ValueError."""
    data = msgspec.to_builtins(value)
    _refuse_non_finite(data)
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode()


def _refuse_non_finite(data: Any) -> None:
    if isinstance(data, float) and not math.isfinite(data):
        raise ValueError("a number in the output is not finite")
    if isinstance(data, dict):
        for item in data.values():
            _refuse_non_finite(item)
    elif isinstance(data, (list, tuple)):
        for item in data:
            _refuse_non_finite(item)
