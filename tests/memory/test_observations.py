"""The estimate against published measurements of a plain loop, on the stack each row states."""

from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from memory.runs import golden, shape_of

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec
from foretune.memory import MANUAL_LOOP, PROFILES, MemoryEstimate, StackProfile, estimate_memory

ROWS = golden("observations.jsonl")


def stack_of(row: dict[str, Any]) -> StackProfile:
    """The profile of a row's platform and versions."""
    if row["software"]["os"] == "windows":
        return PROFILES["manual-loop-windows"]
    return PROFILES["manual-loop-5.0"] if row["software"]["transformers"].startswith("5.0.") else MANUAL_LOOP


def config_of(row: dict[str, Any]) -> TrainingConfig:
    is_torch = row["optimizer"] == "adamw_torch"
    fields: dict[str, Any] = {
        "model": {"id": row["model"]},
        "precision": {"dtype": row["base_dtype"], "adapter_dtype": row["adapter_dtype"]},
        "lora": {"rank": row["rank"], "targets": row["targets"]},
        "batch": {"micro_batch_size": row["micro_batch_size"], "sequence_length": row["seq_len"]},
        "attention": row["attention"],
        "gradient_checkpointing": row["gradient_checkpointing"],
        "optimizer": {
            "name": "adamw" if is_torch else row["optimizer"],
            "implementation": "foreach" if is_torch else None,
            "max_grad_norm": None,
        },
    }
    if row["quantization"] != "none":
        double = row["quantization"] == "nf4_double_quant"
        fields["quantization"] = {"double_quant": double, "compute_dtype": row["compute_dtype"]}
    return TrainingConfig.create(**fields)


def estimate(row: dict[str, Any]) -> MemoryEstimate:
    device = DeviceSpec(
        name=row["device"],
        total_bytes=row["memory_bytes"],
        total_is="reported",
        compute_capability=row["compute_capability"],
    )
    return estimate_memory(config_of(row), shape_of(row["model_config"]), device, stack=stack_of(row))


@cache
def errors(quantized: bool) -> tuple[list[float], list[float]]:
    """Absolute errors in percent of allocated and of reserved."""
    allocated, reserved = [], []
    for row in ROWS:
        if (row["quantization"] != "none") == quantized:
            answer = estimate(row)
            phases = [p for p in answer.phases if not row["after_warmup"] or p.phase.endswith("(later)")]
            peak = max(phase.allocated_bytes for phase in phases)
            allocated.append(abs(peak / row["allocated_bytes"] - 1) * 100)
            reserved.append(abs(answer.reserved_bytes / row["reserved_bytes"] - 1) * 100)
    return allocated, reserved


@pytest.mark.parametrize("quantized", [False, True])
def test_the_accuracy_page_gives_these_figures(quantized: bool) -> None:
    allocated, reserved = errors(quantized)
    figures = [median(allocated), max(allocated), median(reserved), max(reserved)]
    row = f"| {len(allocated)} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |"
    assert row in (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text()


def test_the_margin_covers_what_it_says() -> None:
    assert max(errors(quantized=False)[1]) <= 1
    reserved = sorted(errors(quantized=True)[1])
    assert reserved[len(reserved) * 9 // 10 - 1] <= 10


def test_sixteen_bit_rows_agree_to_the_byte_in_the_middle_and_closely_at_worst() -> None:
    allocated, reserved = errors(quantized=False)
    assert len(allocated) == 18
    assert median(allocated) <= 0.01
    assert max(allocated) <= 0.3
    assert median(reserved) <= 0.1
    assert max(reserved) <= 1.0


def test_nf4_rows_agree_in_allocated_and_within_the_loaders_spread_in_reserved() -> None:
    allocated, reserved = errors(quantized=True)
    assert len(allocated) == 37
    assert median(allocated) <= 0.15
    assert max(allocated) <= 1.5
    assert median(reserved) <= 4.0


@pytest.mark.parametrize("row", [row for row in ROWS if "process_bytes" in row][:6], ids=lambda row: row["id"])
def test_a_t4s_context_is_the_same_whatever_runs(row: dict[str, Any]) -> None:
    assert estimate(row).context.likely_bytes == row["process_bytes"] - row["reserved_bytes"]
