"""Record tests/golden/families.jsonl: what the real program allocates for a short model of every family estimated.

    PYTHONHASHSEED=0 python scripts/golden_families.py [TYPE...]

Each model (configs of scripts/compare.py: few layers, real widths) is trained in full, under LoRA and under QLoRA, with
one and two sequences of 128 tokens; with eager attention where sdpa is not to be had. `differs`: the estimate's events
were others when the row was recorded; docs/accuracy.md names such rows. With types only theirs are recorded anew. The
cache of traces is compare.py's.
"""

import hashlib
import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from compare import MADE_FROM, Program, configs, difference, estimated, kept, traced, training

from foretune.contract import fingerprint
from foretune.devices import DeviceSpec
from foretune.errors import ForetuneError
from foretune.memory import PROFILES, estimate_memory
from foretune.memory.families import DECODERS
from foretune.models import REMOTE_CODE_TYPES, shape_from_config

FILE = Path(__file__).parents[1] / "tests/golden/families.jsonl"
OUTER = {"llama4", "mllama", "qwen3_5", "qwen3_5_moe"}
OWN_CONFIGS = {
    "dots1": {
        "model_type": "dots1",
        "vocab_size": 152064,
        "hidden_size": 4608,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 16,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
    }
}
"""Types that are in no other file of ours: the widths are those their class has of itself."""
SETTINGS = Namespace(set=[], keeps_activations=False, tokens=128)
DEVICE = DeviceSpec(
    name="test", total_bytes=1 << 42, total_is="given", compute_capability="8.9", has_bf16=True, platform="linux"
)


def digest_of(program: Program) -> str:
    """First 16 hex digits of the SHA-256 of the events, births numbered in order."""
    events = [[event.number, event.num_bytes] for event in program.events]
    return hashlib.sha256(json.dumps(events, separators=(",", ":")).encode()).hexdigest()[:16]


def record(name: str, raw: dict[str, Any], made_from: str) -> dict[str, Any]:
    """Trace one family's runs; a run that the estimate or the trace refuses is written with the reason."""
    shape, stack = shape_from_config(raw, id="test/model", source="file"), PROFILES["foretune"]
    row: dict[str, Any] = {"model_type": name, "config": raw, "runs": []}
    for method in ("full", "lora", "qlora"):
        for batch in (1, 2):
            run: dict[str, Any] = {"method": method, "B": batch}
            for attention in ("sdpa", "eager"):
                config = training(SETTINGS, method, batch, attention, stack)
                run |= {"attention": attention}
                try:
                    estimate_memory(config, shape, DEVICE, stack=stack)
                except ForetuneError as error:
                    run["refusal"] = str(error).splitlines()[0]
                    continue
                text = json.dumps([raw, stack.to_dict(), made_from, fingerprint(config)], sort_keys=True)
                key = hashlib.sha256(text.encode()).hexdigest()[:24]
                cache = Path(tempfile.gettempdir()) / "foretune-traces"
                found = kept(cache, key, partial(traced, config, shape, raw, DEVICE, stack))
                if found.refusal:
                    run["refusal"] = found.refusal
                    continue
                run.pop("refusal", None)
                run |= {"num_events": len(found.events), "digest": digest_of(found)}
                run |= {"allocated_bytes": found.allocated, "reserved_bytes": found.reserved}
                ours = estimated(config, shape, DEVICE, stack, explain=False)
                if difference(ours.events, found.events, 0) is not None:
                    run |= {"differs": True}
                break
            row["runs"].append(run)
    return row


def models(types: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the models of all families that Transformers has, or of those named; a text decoder as a part of its
    whole."""
    names = types or [name for name in DECODERS if name not in {*REMOTE_CODE_TYPES, *OWN_CONFIGS}] + sorted(OUTER)
    if known := [name for name in names if name not in OWN_CONFIGS]:
        yield from configs(known, [])
    yield from ((name, config) for name, config in OWN_CONFIGS.items() if name in types or not types)


def main() -> None:
    """Write the file."""
    made_from = hashlib.sha256(b"".join(path.read_bytes() for path in MADE_FROM)).hexdigest()[:12]
    rows = {}
    if FILE.exists():
        rows = {row["model_type"]: row for row in map(json.loads, FILE.read_text().splitlines())}
    for name, raw in models(sys.argv[1:]):
        rows[name] = record(name, raw, made_from)
        print(name, *(run.get("refusal", "recorded") for run in rows[name]["runs"]), sep="; ", flush=True)
        FILE.write_text("".join(json.dumps(rows[key], separators=(",", ":")) + "\n" for key in sorted(rows)))


if __name__ == "__main__":
    main()
