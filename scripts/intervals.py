"""Learn the intervals' widths from the stored predictions and the project's observations.

    python scripts/intervals.py [--check]

Writes src/foretune/memory/intervals.json; with --check says whether it is what the predictions give, and exits 1 if
not. Rows of a class that are predicted by the estimate come from docs/predictions/estimated.jsonl.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import msgspec

from foretune.evidence import read_observations
from foretune.evidence.intervals import Residual, learn_class
from foretune.evidence.requests import request_of
from foretune.memory.interval import TABLE, ErrorClass, Metric, error_class

METRICS: tuple[Metric, ...] = ("allocated", "reserved")
STORED = Path(__file__).resolve().parents[1] / "docs" / "predictions" / "estimated.jsonl"
CLASSES = ("16-bit weights", "nf4", "nf4, quantized on four threads", "foreign stack")


def residuals() -> dict[str, dict[str, list[Residual]]]:
    """The rows of each class and measure."""
    stored = {row["id"]: row for row in map(json.loads, STORED.read_text().splitlines()[1:])}
    found: dict[str, dict[str, list[Residual]]] = {name: defaultdict(list) for name in CLASSES}
    for row in read_observations():
        prediction = stored.get(row.id)
        if prediction is None:
            continue
        request = request_of(row).request
        name = error_class(request.config, request.stack)
        batch = request.config.batch
        for metric in METRICS:
            measured = getattr(row.measured, f"peak_{metric}_bytes")
            if measured is not None:
                found[name][metric].append(
                    Residual.of(
                        row.source.name,
                        row.model.id,
                        metric,
                        measured=measured,
                        predicted=prediction[f"{metric}_bytes"],
                        tokens=batch.micro_batch_size * batch.sequence_length,
                        params=request.shape.total_params,
                    )
                )
    return found


def table() -> tuple[ErrorClass, ...]:
    """Learn every class."""
    return tuple(learn_class(name, rows) for name, rows in residuals().items())


def main() -> int:
    """Write the table, or hold it against what there is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    text = msgspec.json.format(msgspec.json.encode(table()), indent=2) + b"\n"
    if arguments.check:
        is_same = TABLE.exists() and TABLE.read_bytes() == text
        print("the same" if is_same else "stale: run scripts/intervals.py")
        return 0 if is_same else 1
    TABLE.write_bytes(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
