"""Every family that is estimated, at its real width with few layers, against the events of the real program."""

import hashlib
import json
from typing import Any

import pytest
from memory.runs import all_layers, canonical, golden, shape_of

from foretune.contract import TrainingConfig, build_config
from foretune.devices import DeviceSpec
from foretune.errors import UnsupportedError
from foretune.memory import estimate_memory
from foretune.memory.families import DECODERS
from foretune.models import REMOTE_CODE_TYPES

ROWS = golden("families.jsonl")
CASES = [(row, run) for row in ROWS for run in row["runs"]]
KNOWN = [(row, run) for row, run in CASES if "digest" in run]
REFUSED = [(row, run) for row, run in CASES if "digest" not in run]
WITHOUT_PROGRAM = {"qwen", "baichuan", "chatglm"}
"""Their code is published with the checkpoints: nothing to hold the estimate against."""
PARTS = {
    "gemma4_text": "gemma4",
    "llama4_text": "llama4",
    "mllama_text_model": "mllama",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5",
}
"""Language models whose rows are those of the whole."""
DEVICE = DeviceSpec(
    name="test", total_bytes=1 << 42, total_is="given", compute_capability="8.9", has_bf16=True, platform="linux"
)


def named(case: Any) -> str:
    return case["model_type"] if "model_type" in case else f"{case['method']}-{case['B']}"


def config_of(run: dict[str, Any]) -> TrainingConfig:
    overrides = [
        "gradient_checkpointing=true",
        f"attention={run['attention']}",
        f"batch.micro_batch_size={run['B']}",
        "batch.sequence_length=128",
    ]
    return build_config({"model.id": "test/model"}, overrides=overrides, method=run["method"]).config


def check(row: dict[str, Any], run: dict[str, Any]) -> None:
    config, shape = config_of(run), shape_of(row["config"])
    events = canonical(all_layers(config, shape, DEVICE)[0])
    digest = hashlib.sha256(json.dumps(events, separators=(",", ":")).encode()).hexdigest()[:16]
    estimate = estimate_memory(config, shape, DEVICE)
    peaks = (estimate.allocated_bytes, estimate.reserved_bytes)
    if run.get("differs"):
        assert digest != run["digest"], "equal now: record it anew"
        assert peaks == pytest.approx((run["allocated_bytes"], run["reserved_bytes"]), rel=0.005)
    else:
        assert len(events) == run["num_events"]
        assert digest == run["digest"]
        assert peaks == (run["allocated_bytes"], run["reserved_bytes"])


@pytest.mark.parametrize(("row", "run"), KNOWN[2::6], ids=named)
def test_a_run_of_every_family_has_the_events_of_the_real_program(row: dict[str, Any], run: dict[str, Any]) -> None:
    check(row, run)


@pytest.mark.full
@pytest.mark.parametrize(("row", "run"), KNOWN, ids=named)
def test_every_run_of_every_family_has_the_events_of_the_real_program(row: dict[str, Any], run: dict[str, Any]) -> None:
    check(row, run)


@pytest.mark.parametrize(("row", "run"), REFUSED, ids=named)
def test_what_is_not_estimated_is_refused_with_its_reason(row: dict[str, Any], run: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        estimate_memory(config_of(run), shape_of(row["config"]), DEVICE)


UNKNOWN = [row for row in golden("fingerprints.jsonl")[1:] if row["model_type"] not in {*DECODERS, *PARTS.values()}]


@pytest.mark.parametrize("row", UNKNOWN, ids=named)
def test_nobody_is_sent_to_a_trace_that_would_refuse(row: dict[str, Any]) -> None:
    config = config_of({"attention": row.get("attention", "eager"), "B": 1, "method": "full"})
    with pytest.raises(UnsupportedError) as caught:
        estimate_memory(config, shape_of(row["config"]), DEVICE)
    hints = [problem.hint or "" for problem in caught.value.problems]
    assert all(hints)
    assert not ("refusal" in row and any("foretune trace" in hint for hint in hints))


def test_every_family_that_transformers_has_is_here() -> None:
    types = {row["model_type"] for row in ROWS}
    assert set(DECODERS) - types == set(REMOTE_CODE_TYPES) | WITHOUT_PROGRAM | set(PARTS)
    assert types.issuperset(PARTS.values())


def test_nine_in_ten_programs_are_equal() -> None:
    assert len(KNOWN) > 500
    assert sum(run.get("differs", False) for _, run in KNOWN) <= 0.1 * len(KNOWN)
