"""Store what an engine predicts of the project's observations; docs/accuracy.md is made from it.

    python scripts/predictions.py [--engine estimated | traced] [--workers N]

Writes docs/predictions/ENGINE.jsonl; without a name both. The first line says of which version, with which libraries,
and how many rows were refused for which reason; each further line is a row that was predicted. The trace needs the
libraries (`foretune[train]`) and takes minutes.
"""

import argparse
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from foretune import api
from foretune.evidence import EngineName, Prediction, ScoreReport

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "predictions"
ENGINES: tuple[EngineName, ...] = ("estimated", "traced")
LIBRARIES = {"estimated": (), "traced": ("torch", "transformers", "peft", "bitsandbytes")}
STORED = ("id", "allocated_bytes", "reserved_bytes", "process_bytes", "stack", "foreign", "verdict", "outcome")


def stored(prediction: Prediction) -> dict[str, Any]:
    """Return what is kept of a prediction."""
    return {name: getattr(prediction, name) for name in STORED}


def lines(report: ScoreReport) -> Iterator[dict[str, Any]]:
    """Yield the first line, then one a predicted row."""
    yield {
        "engine": report.engine,
        "estimator_version": report.estimator_version,
        "libraries": {name: version(name).split("+")[0] for name in LIBRARIES[report.engine]},
        "rows": report.rows,
        "refused": dict(report.reasons),
    }
    yield from map(stored, report.predictions)


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", action="append", choices=ENGINES, help="both where none is named")
    parser.add_argument("--workers", type=int, default=1)
    asked = parser.parse_args()
    for engine in asked.engine or ENGINES:
        report = api.report_of(api.score(engine=engine, workers=asked.workers), engine)
        path = FOLDER / f"{engine}.jsonl"
        text = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines(report))
        path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {len(report.predictions)} of {report.rows} rows, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
