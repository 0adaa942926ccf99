"""Values as foreign tools convert them, and as a message shows them."""

import re
from collections.abc import Callable
from typing import Any

from foretune.contract.scalars import echo
from foretune.foreign.rules import Reads

__all__ = ["BadValue", "convert", "shown"]

_YES = frozenset({"true", "t", "yes", "y", "on", "1"})
_NO = frozenset({"false", "f", "no", "n", "off", "0"})
_SECRETS = ("token", "api_key", "secret", "password", "webhook_url")
_NOT_SECRET = ("eos_token", "pad_token", "bos_token", "unk_token", "split_special_tokens", "add_tokens")
_PASSWORD = re.compile(r"://[^/\s@]+@")
"""Who opens a URL, and with what."""
LONGEST = 60


class BadValue(ValueError):
    """A value that the tool does not take; the text says what it takes."""


def convert(value: Any, reads: Reads) -> Any:
    """Return a value in the type of its key. Text becomes a number or a switch, as the tools themselves do it.

    >>> convert("1e-4", "number"), convert("yes", "switch"), convert("q_proj, v_proj", "names")
    (0.0001, True, ['q_proj', 'v_proj'])
    """
    if value is None or reads == "any":
        return value
    return _CONVERTERS[reads](value)


def _count(value: Any) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError as error:
            raise BadValue("a whole number") from error
    number = _number(value, "a whole number")
    if not float(number).is_integer():
        raise BadValue("a whole number")
    return int(number)


def _number(value: Any, what: str = "a number") -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise BadValue(what)
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError as error:
            raise BadValue(what) from error
        if number - number != 0:
            raise BadValue(f"{what} that is finite")
        return int(number) if number.is_integer() and "." not in value and "e" not in value.lower() else number
    return value


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if isinstance(value, (str, int)) and word in _YES | _NO:
        return word in _YES
    raise BadValue("true or false")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return echo(value)
    if isinstance(value, (str, int, float)):
        return str(value)
    raise BadValue("text")


def _names(value: Any) -> list[str]:
    items = value if isinstance(value, list) else [part.strip() for part in _text(value).split(",")]
    if not all(isinstance(item, (str, int)) and not isinstance(item, bool) for item in items):
        raise BadValue("names")
    return [str(item) for item in items if str(item)]


def _listed(value: Any) -> list[str]:
    return _names(value if isinstance(value, list) else [value])


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "count": _count,
    "number": _number,
    "switch": _switch,
    "text": _text,
    "names": _names,
    "listed": _listed,
}


def shown(key: str, value: Any) -> str:
    """Show a value as a file would write it, short. A secret is not shown, nor any variable of the environment.

    >>> shown("lr", 1e-4), shown("hub_token", "hf_abc"), shown("env", {"WANDB_API_KEY": "abc"}), shown("tf32", None)
    ('0.0001', '(not shown)', '{WANDB_API_KEY: (not shown)}', 'null')
    """
    if value and not isinstance(value, (dict, list, tuple)) and _is_private(key):
        return "(not shown)"
    text = _PASSWORD.sub("://(not shown)@", _written(value))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _is_private(key: str) -> bool:
    """Whether what a key holds is nobody else's business: by its name, or as a variable (`HF_TOKEN`, `env.X`)."""
    name = key.rpartition(".")[2]
    if key.startswith("env.") or (name.isupper() and len(name) > 1):
        return True
    return name.lower().endswith(_SECRETS) and name not in _NOT_SECRET


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(str(key), item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_written(item) for item in value) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return echo(value)[1:-1]
    return echo(value)
