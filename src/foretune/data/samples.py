"""A few rows in both forms: what a recipe starts with, and what the quickstart trains on."""

import json
from collections.abc import Iterable
from typing import Any

__all__ = ["sample_instructions", "sample_messages", "write_jsonl"]

FACTS = (
    ("How many days has a week?", "A week has seven days."),
    ("How many hours has a day?", "A day has 24 hours."),
    ("How many minutes has an hour?", "An hour has 60 minutes."),
    ("How many seconds has a minute?", "A minute has 60 seconds."),
    ("How many months has a year?", "A year has twelve months."),
    ("Which month has 28 or 29 days?", "February has 28 days, and 29 in a leap year."),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("What is the capital of Kenya?", "The capital of Kenya is Nairobi."),
    ("What is the capital of Peru?", "The capital of Peru is Lima."),
    ("What is the capital of Norway?", "The capital of Norway is Oslo."),
    ("How many metres has a kilometre?", "A kilometre has 1,000 metres."),
    ("How many grams has a kilogram?", "A kilogram has 1,000 grams."),
    ("How many bytes has a kibibyte?", "A kibibyte has 1,024 bytes."),
    ("At what temperature does water boil?", "At sea level water boils at 100 degrees Celsius."),
    ("At what temperature does water freeze?", "Water freezes at 0 degrees Celsius."),
    ("Which planet is the largest?", "Jupiter is the largest planet."),
    ("Which planet is closest to the sun?", "Mercury is the planet closest to the sun."),
    ("What do bees make?", "Bees make honey and wax."),
    ("What colour is a ripe lemon?", "A ripe lemon is yellow."),
    ("How many sides has a hexagon?", "A hexagon has six sides."),
    ("What is 7 times 8?", "7 times 8 is 56."),
    ("What is the opposite of north?", "The opposite of north is south."),
)


def sample_instructions() -> list[dict[str, Any]]:
    """Return rows of the form `{"instruction": ..., "input": ..., "output": ...}`."""
    return [{"instruction": "Answer in one sentence.", "input": asked, "output": said} for asked, said in FACTS]


def sample_messages() -> list[dict[str, Any]]:
    """Return rows of the form `{"messages": [...]}`: each fact alone, and each pair of neighbours as two turns."""
    alone = [{"messages": _turns(fact)} for fact in FACTS]
    pairs = [
        {"messages": [*_turns(first), *_turns(second)]} for first, second in zip(FACTS[::2], FACTS[1::2], strict=True)
    ]
    return [*alone, *pairs]


def _turns(fact: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": fact[0]}, {"role": "assistant", "content": fact[1]}]


def write_jsonl(rows: Iterable[dict[str, Any]]) -> str:
    """Write rows as JSONL, one a line."""
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
