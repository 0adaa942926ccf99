"""The estimate against the allocator's own history of real runs on an H200 (scripts/golden_h200.py): every event.

The runs were foretune's step on torch 2.11 and Transformers 5.17, whose rotary tables come from a product.
"""

import base64
import zlib
from array import array
from typing import Any

import pytest
from memory.runs import all_layers, canonical, golden, shape_of

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec
from foretune.memory import FORETUNE, estimate_memory

RUNS = golden("h200.jsonl")
STACK = FORETUNE.with_(torch="2.11", transformers="5.17", rotary_by_product=True)
BLOCK = 512


def device_of(run: dict[str, Any]) -> DeviceSpec:
    return DeviceSpec(**run["device"], total_is="reported", multiprocessors=132)


def measured(run: dict[str, Any]) -> list[int]:
    return array("q", zlib.decompress(base64.b64decode(run["events"]))).tolist()


def estimated(run: dict[str, Any]) -> list[int]:
    """Rounded sizes of births, negative numbers of the births that die."""
    config = TrainingConfig.create(**run["config"])
    events = canonical(all_layers(config, shape_of(run["model"]), device_of(run), STACK)[0])
    return [-slot - 1 if size < 0 else -(-size // BLOCK) * BLOCK for slot, size in events]


def test_the_runs_cover_what_they_are_for() -> None:
    assert len(RUNS) == 12
    assert {run["config"]["attention"] for run in RUNS} == {"sdpa", "eager"}
    assert {run["config"]["precision"]["dtype"] for run in RUNS} == {"bf16", "fp16", "fp32"}
    assert sum(len(measured(run)) for run in RUNS) > 45_000


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_every_allocation_and_free_is_the_gpus(run: dict[str, Any]) -> None:
    ours, theirs = estimated(run), measured(run)
    first = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    assert first is None, f"event {first}: {ours[first]:,} estimated, {theirs[first]:,} measured"
    assert len(ours) == len(theirs)


@pytest.mark.parametrize("run", [r for r in RUNS if not r["is_expandable"]], ids=lambda run: run["name"])
def test_both_peaks_are_the_gpus_to_the_byte(run: dict[str, Any]) -> None:
    config = TrainingConfig.create(**run["config"])
    answer = estimate_memory(config, shape_of(run["model"]), device_of(run), stack=STACK)
    assert answer.allocated_bytes == run["allocated_bytes"]
    assert answer.reserved_bytes == run["reserved_bytes"]
