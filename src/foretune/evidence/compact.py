"""The project's own form of observations: parts that many rows share stand once, in tables on the first line.

A row of it is a row of the public form in which a part of `TABLES` may be a number: its position in the table of that
name. Of `training`, all but what varies from row to row stands under `setup`. Texts and figures that no prediction
needs are left out.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from foretune.errors import EvidenceError

__all__ = ["FORM", "Tables", "compact_lines", "is_header"]

FORM = "foretune.observations/1"
TABLES = ("source", "model", "setup", "lora", "parallel", "software", "device", "assumed")
"""Parts that are interned: of a row, of its training, of that one's setup."""
VARYING = ("seq_len", "seq_len_max", "micro_batch_size", "gradient_accumulation_steps")
"""Keys of `training` that stand in the row itself."""

_DROPPED: Mapping[str, frozenset[str]] = {
    "": frozenset({"notes"}),
    "model": frozenset({"normalized", "config_source", "framework_ties_embeddings", "framework_total_params"}),
    "training": frozenset({"trainable_params", "trainable_params_source", "sdpa_backend"}),
    "software": frozenset({"cuda", "accelerate", "other"}),
    "measured": frozenset(
        {
            "step_seconds",
            "tokens_per_second",
            "throughput_scope",
            "peer_role",
            "reserved_after_step_mean_bytes",
            "reserved_after_step_p99_bytes",
        }
    ),
}
"""Keys of the public form that the compact one leaves out, by part."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "": {"kind": "train_peak", "outcome": "ok", "repeat_of": None},
    "measured": {"per_device": True},
}
"""Values that a row has where it does not say otherwise, by part; they are left out too."""


def is_header(data: Mapping[str, Any]) -> bool:
    """Say whether a line is the first one of the compact form."""
    return "form" in data and "id" not in data


class Tables(NamedTuple):
    """What the rows of a compact file refer to."""

    parts: Mapping[str, list[Any]]

    @classmethod
    def of(cls, header: Mapping[str, Any], place: str) -> "Tables":
        """Read the first line of a compact file. Raises EvidenceError for another form."""
        tables = header.get("tables")
        if header["form"] == FORM and isinstance(tables, Mapping):
            parts = {name: tables.get(name, []) for name in TABLES}
            if all(isinstance(part, list) for part in parts.values()):
                return cls(parts)
        message = f"The form {str(header['form'])[:60]!r} of the observations is not known."
        raise EvidenceError(message, hint=f"Known are {FORM} and rows without a first line.", place=place)

    def expand(self, row: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Put the parts of a row in the place of their numbers. Raises EvidenceError for a number without a part."""
        whole = self._parts(row, place)
        training = whole.get("training")
        if isinstance(training, Mapping):
            training = self._parts(training, place)
            setup = training.pop("setup", {})
            whole["training"] = {**self._parts(setup, place), **training} if isinstance(setup, Mapping) else setup
        return whole

    def _parts(self, whole: Mapping[str, Any], place: str) -> dict[str, Any]:
        return {name: self._part(name, value, place) for name, value in whole.items()}

    def _part(self, name: str, value: Any, place: str) -> Any:
        table = self.parts.get(name)
        if table is None or not isinstance(value, int) or isinstance(value, bool):
            return value
        if not 0 <= value < len(table):
            message = f"{name}: {value} is none of the {len(table)} in the first line's table."
            raise EvidenceError(message, hint="Make the file anew.", place=place)
        return table[value]


def compact_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yield the lines of a compact file from rows of the public form, in their order."""
    tables: dict[str, dict[bytes, int]] = {name: {} for name in TABLES}
    lines = []
    for row in rows:
        short = {key: _short(key, value) for key, value in _short("", row).items()}
        training = short["training"]
        setup = {key: value for key, value in training.items() if key not in VARYING}
        _intern(setup, tables)
        short["training"] = {"setup": setup, **{key: training[key] for key in VARYING if key in training}}
        _intern(short["training"], tables)
        _intern(short, tables)
        lines.append(msgspec.json.encode(short))
    parts = {name: [msgspec.Raw(text) for text in table] for name, table in tables.items()}
    yield msgspec.json.encode({"form": FORM, "tables": parts}) + b"\n"
    yield from (line + b"\n" for line in lines)


def _intern(whole: dict[str, Any], tables: Mapping[str, dict[bytes, int]]) -> None:
    """Replace parts by their positions in the tables; what is none (null) stays."""
    for name, value in whole.items():
        if name in tables and value is not None:
            text, table = msgspec.json.encode(value, order="sorted"), tables[name]
            whole[name] = table.setdefault(text, len(table))


def _short(part: str, value: Any) -> Any:
    """Leave out what is dropped from a part, and what it has anyway."""
    if not isinstance(value, Mapping):
        return value
    dropped, defaults = _DROPPED.get(part, frozenset()), _DEFAULTS.get(part, {})
    return {
        key: item
        for key, item in value.items()
        if key not in dropped and not (key in defaults and item == defaults[key])
    }
