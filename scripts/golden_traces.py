"""Record tests/golden/traces.jsonl anew from the real program, after a library or a rule has moved.

    PYTHONHASHSEED=0 python scripts/golden_traces.py

The configurations stay; their events are those of the runtime on tensors without data.
"""

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from memory.runs import GOLDEN, config_of, device_for, golden, shape_of
from runtime.test_trace import events_of

from foretune.runtime.trace import trace_memory


def main() -> None:
    """Write the file and name the rows that moved."""
    rows = golden("traces.jsonl")
    for row in rows:
        trace = trace_memory(config_of(row["run"]), shape_of(row["config"]), row["config"], device_for(row["run"]))
        events = events_of(trace)
        digest = hashlib.sha256(json.dumps(events, separators=(",", ":")).encode()).hexdigest()[:16]
        if digest != row["digest"]:
            print(f"{row['name']}: {row['num_events']} events before, {len(events)} now")
        row |= {"num_events": len(events), "digest": digest}
        row |= {
            "allocated_bytes": trace.estimate.allocated_bytes,
            "reserved_bytes": trace.estimate.reserved_bytes,
        }
        row.pop("order_varies", None)
        if row["config"]["model_type"] == "gemma3_text":
            row["order_varies"] = True
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    (GOLDEN / "traces.jsonl").write_text(text)


if __name__ == "__main__":
    main()
