"""Write tests/golden/h200.jsonl: what the allocator of a real GPU recorded, from a run of benchmarks/gpu_truth.py.

    python scripts/golden_h200.py RESULTS.jsonl

Each line holds a configuration, its model, and the measured allocations and frees of two updates, as `packed` in
benchmarks/gpu_truth_events.py: sizes rounded to the allocator's 512 B, deaths by the negative number of their birth.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import gpu_truth_events
import gpu_truth_run
import msgspec

LEFT_OUT = {"lora-padded": "its mask is not a setting"}


def main() -> None:
    """Convert every configuration that a setting describes."""
    lines = []
    for text in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        row = json.loads(text)
        if "name" in row and row["name"] not in LEFT_OUT:
            lines.append(json.dumps(_golden(row), separators=(",", ":")))
    target = Path(__file__).parents[1] / "tests" / "golden" / "h200.jsonl"
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} runs, {target.stat().st_size:,} bytes")


def _golden(row: dict[str, Any]) -> dict[str, Any]:
    case = next(case for case in gpu_truth_run.CASES if case.name == row["name"])
    numbers: dict[int, int] = {}
    events = []
    for slot, size in gpu_truth_events.measured_side(row["measured"]).events:
        if size > 0:
            numbers[slot] = len(numbers)
        if size >= 0 and slot >= 0:
            events.append(size or -numbers[slot] - 1)
    return {
        "name": case.name,
        "versions": row["machine"]["versions"],
        "device": row["machine"]["device"],
        "model": row["model"],
        "config": msgspec.to_builtins(gpu_truth_run.config_of(case)),
        "allocated_bytes": row["compared"]["measured_allocated_bytes"],
        "reserved_bytes": row["compared"]["measured_reserved_bytes"],
        "is_expandable": case.is_expandable,
        "events": gpu_truth_events.packed(events),
    }


if __name__ == "__main__":
    main()
