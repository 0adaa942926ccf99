"""Where answers end: what closes them in the rows, and what the base model stops at."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foretune.data import Trait
from foretune.errors import ConfigError
from foretune.models.resolve import read_config
from foretune.runtime.feed import Rows
from foretune.runtime.tokenizer import ModelTokenizer

__all__ = ["base_stop_ids", "closing_ids", "strange_closings"]

LOOKED_AT = 256
"""Rows, from the first."""


def closing_ids(rows: Rows, tokenizer: ModelTokenizer) -> tuple[int, ...]:
    """Return the control tokens that close the last answers of rows, rising, with EOS for instructions."""
    found: set[int] = set()
    for number in range(min(len(rows), LOOKED_AT)):
        example = rows.example(number)
        last = example.answer.rfind(1)
        if not example.traits & Trait.MESSAGES:
            found.add(example.ids[-1])
        elif last >= 0 and not example.traits & Trait.UNCLOSED and example.ids[last] in tokenizer.facts.special_ids:
            found.add(example.ids[last])
    return tuple(sorted(found))


def base_stop_ids(folder: Path, raw_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens at which the base model's own generation stops."""
    path = folder / "generation_config.json"
    try:
        settings = read_config(path) if path.is_file() else {}
    except ConfigError:
        settings = {}
    return tuple(sorted({*_ids(settings.get("eos_token_id")), *_ids(raw_config.get("eos_token_id"))}))


def _ids(value: Any) -> Iterator[int]:
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, int) and not isinstance(each, bool):
            yield each


def strange_closings(closing: tuple[int, ...], own: tuple[int, ...]) -> Iterator[str]:
    """Say where answers of the rows end with tokens at which the base's own generation goes on."""
    strange = sorted(set(closing) - set(own))
    if strange and own:
        yield (
            f"Answers in the rows end with the tokens {', '.join(map(str, strange))}, at which the base's own "
            f"generation does not stop (it stops at {', '.join(map(str, own))}). The artifact names both."
        )
