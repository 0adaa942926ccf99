"""Read the values of a config.json: types, bounds and the class's own defaults, with an error that names the key.

A `bool` is no int, a float is no int, a NaN is nothing. What a config leaves out takes the default that Transformers'
configuration class gives it (`defaults.json`, made by scripts/catalogue_defaults.py from Transformers 5.24).
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from foretune.errors import ConfigError, Problem

__all__ = ["MAX_LAYERS", "MAX_SIZE", "Fields", "class_defaults", "fields_of"]

MAX_SIZE = 1 << 40
"""Largest integer that a config may hold: wider than any tensor dimension there is."""
MAX_LAYERS = 512
_CORE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# transformers/configuration_utils.py, _LEGACY_LAYER_TYPE_REMAP
_LEGACY_LAYER_TYPES = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
}


class ClassDefaults(NamedTuple):
    """What Transformers' configuration class says about its fields."""

    values: Mapping[str, Any]
    aliases: Mapping[str, str]


@cache
def _all_defaults() -> dict[str, Any]:
    text = (Path(__file__).parent.parent / "defaults.json").read_bytes()
    table: dict[str, Any] = msgspec.json.decode(text)
    return table


def class_defaults(model_type: str) -> ClassDefaults:
    """Return the defaults and key aliases of the configuration class for this `model_type`."""
    entry = _all_defaults().get(model_type, {})
    return ClassDefaults(entry.get("d", {}), entry.get("a", {}))


class Fields:
    """The values of one config, or of one section nested in it."""

    def __init__(self, config: Mapping[str, Any], defaults: ClassDefaults, *, place: str, section: str = "") -> None:
        self.place = place
        self.section = section
        self._defaults = defaults.values
        self._aliases = defaults.aliases
        self._values = self._without_aliases(config)

    def _without_aliases(self, config: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in config.items():
            name = self._aliases.get(key, key)
            if name in values and values[name] != value:
                other = next(alias for alias in config if self._aliases.get(alias, alias) == name)
                raise self.error(key, value, f"contradicts {other}: {values[name]!r}", "Keep one of the two.")
            values[name] = value
        return values

    # -- what is there -------------------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Say whether the config itself states this key, other than as null."""
        return self._values.get(key) is not None

    def states(self, key: str) -> bool:
        """Say whether the config itself has this key, be it null."""
        return key in self._values

    def raw(self, key: str) -> Any:
        """Return the value as it stands, else the class's default, else None."""
        return self._values[key] if key in self._values else self._defaults.get(key)

    def own_name(self, name: str) -> str:
        """Return the class's own name for a common key (`n_embd` for `hidden_size` in GPT-2)."""
        return self._aliases.get(name, name)

    def missing_core(self) -> list[str]:
        """List the sizes without which nothing can be counted, as far as this class has them."""
        names = (self._aliases.get(name, name) for name in _CORE)
        return [name for name in names if self._defaults.get(name) is not None and name not in self._values]

    def error(self, key: str, value: Any, why: str, remedy: str) -> ConfigError:
        """Build the error for one value: place, key, value, cause, remedy."""
        return ConfigError(
            f"{self.section}{key} is {_shown(value)}, {why}.", hint=remedy, place=self.place, field=self.section + key
        )

    # -- typed reading -------------------------------------------------------------------------------------------

    def size(self, key: str, *, low: int = 1) -> int:
        """Return an integer from `low` to 2^40. Raises ConfigError."""
        value = self.raw(key)
        if value is None:
            raise self.error(key, value, "but this model needs a number here", "Take the key from the model's config.")
        return self._integer(key, value, low)

    def maybe_size(self, key: str, *, low: int = 1) -> int | None:
        """Return an integer, or None where the key is null or unknown to the class."""
        value = self.raw(key)
        return None if value is None else self._integer(key, value, low)

    def _integer(self, key: str, value: Any, low: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, value, "not an integer", f"Write a whole number, at least {low}.")
        if not low <= value <= MAX_SIZE:
            raise self.error(key, value, f"outside {low} to 2^40", "No model has such a size: check the config.")
        return value

    def num_layers(self, key: str = "num_hidden_layers") -> int:
        """Return the number of layers, 1 to 512. Raises ConfigError."""
        count = self.size(key)
        if count > MAX_LAYERS:
            raise self.error(key, count, f"more than {MAX_LAYERS} layers", "Check the config: no model is that deep.")
        return count

    def flag(self, key: str) -> bool:
        """Return a boolean; null reads as false, as it does in Transformers. Raises ConfigError."""
        value = self.raw(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(key, value, "not a boolean", "Write true or false.")
        return value

    def number(self, key: str) -> float | None:
        """Return a finite number, or None. Raises ConfigError."""
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.error(key, value, "not a finite number", "Write a number.")
        if abs(value) > MAX_SIZE:
            raise self.error(key, value, "beyond 2^40", "Check the config.")
        return float(value)

    def text(self, key: str) -> str | None:
        """Return text, or None. Raises ConfigError."""
        value = self.raw(key)
        if value is None or isinstance(value, str):
            return value
        raise self.error(key, value, "not text", "Write a name.")

    def section_of(self, key: str) -> Mapping[str, Any]:
        """Return a nested object; null and absent are empty. Raises ConfigError."""
        value = self.raw(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(key, value, "not an object", "Write a JSON object here.")
        return value

    # -- lists ---------------------------------------------------------------------------------------------------

    def _list(self, key: str) -> Sequence[Any] | None:
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise self.error(key, value, "not a list", "Write a list.")
        if len(value) > 4 * MAX_LAYERS:
            raise self.error(key, value, f"a list of {len(value)} entries", "Check the config.")
        return value

    def labels(self, key: str, count: int, *, trim: bool = False) -> tuple[str, ...] | None:
        """Return one word for each layer, or None where the key is null; legacy names are renamed.

        `trim` drops entries beyond the last layer, where the class does (MTP layers). Raises ConfigError.
        """
        value = self._list(key)
        if value is None:
            return None
        if not all(isinstance(item, str) for item in value):
            raise self.error(key, value, "with entries that are not text", "Write one word for each layer.")
        if len(value) != count and not (trim and len(value) > count):
            why = f"with {len(value)} entries for {count} layers"
            raise self.error(key, value, why, "Write one entry for each layer.")
        return tuple(_LEGACY_LAYER_TYPES.get(item, item) for item in value[:count])

    def integers(self, key: str, *, low: int = 0) -> tuple[int, ...] | None:
        """Return a list of integers, or None. Raises ConfigError."""
        value = self._list(key)
        return None if value is None else tuple(self._integer(f"{key}[{i}]", item, low) for i, item in enumerate(value))

    def refuse(self, key: str, why: str, remedy: str) -> ConfigError:
        """Build the error for a value that is well-formed but that the class itself would refuse."""
        return self.error(key, self.raw(key), why, remedy)

    def no_defaults(self) -> ClassDefaults:
        """Return the defaults of a section that has no class of its own."""
        return ClassDefaults({}, {})

    def nested(self, key: str, model_type: str) -> "Fields":
        """Read a section with the defaults of its own configuration class."""
        section = self.section_of(key)
        return Fields(section, class_defaults(model_type), place=self.place, section=f"{self.section}{key}.")


def fields_of(config: Mapping[str, Any], model_type: str, *, place: str, section: str = "") -> Fields:
    """Read a config with the defaults of its class; every needed size that is missing is reported at once."""
    fields = Fields(config, class_defaults(model_type), place=place, section=section)
    missing = fields.missing_core()
    # Transformers leaves out of a nested config what equals the class's default (`to_diff_dict`), so there one
    # stated size is enough; at the top level it writes every size, and a gap is a mistake.
    if missing and (not section or len(missing) == len(_CORE)):
        problems = [
            Problem(
                f"{section}{key} is missing, and a {model_type} model cannot be counted without it.",
                "Use the complete config.json of the model.",
                place,
                section + key,
            )
            for key in missing
        ]
        raise ConfigError.of(problems)
    return fields


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number with a fraction", str: "text", list: "list", dict: "object"}
    return names.get(type(value), type(value).__name__)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 400:
        return f"a number of {value.bit_length()} bits"
    text = repr(value) if not isinstance(value, (list, dict)) else f"a {_kind(value)}"
    return text if len(text) <= 60 else text[:57] + "..."
