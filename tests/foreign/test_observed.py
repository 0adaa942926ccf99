"""Files of the runs that were measured: imported, they ask what the score asks of their rows."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from foreign.observed import file_of

from foretune.contract import TrainingConfig
from foretune.errors import UnsupportedError
from foretune.evidence import Observation, read_observations, request_of
from foretune.foreign import ImportedConfig, build_imported, import_config
from foretune.memory import StackProfile, estimate_memory
from foretune.models import ModelShape

ABOUT_MEMORY = (
    "model.id", "precision.dtype", "precision.adapter_dtype", "lora", "optimizer.name", "optimizer.implementation",
    "optimizer.max_grad_norm", "batch", "attention", "gradient_checkpointing", "loss",
)  # fmt: skip


@cache
def rows() -> tuple[Observation, ...]:
    """Rows of other tools that the score asks about."""
    found = []
    for row in read_observations():
        if file_of(row) is not None:
            try:
                request_of(row)
            except UnsupportedError:
                continue
            found.append(row)
    return tuple(found)


def imported(row: Observation, folder: Path) -> tuple[ImportedConfig, TrainingConfig]:
    made = file_of(row)
    assert made is not None
    file = folder / made.name
    file.write_text(made.text)
    answer = import_config(file)
    return answer, build_imported(answer, "estimate").config


def about_memory(config: TrainingConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in ABOUT_MEMORY:
        value: Any = config
        for name in field.split("."):
            value = getattr(value, name)
        found[field] = value
    quantization = config.quantization
    if quantization is not None:
        compute = None if quantization.scheme == "int8" else quantization.compute_dtype_for(config.precision)
        found["quantization"] = (quantization.scheme, quantization.uses_double_quant, compute)
    return found


def peaks(config: TrainingConfig, shape: ModelShape, stack: StackProfile) -> tuple[int, int]:
    answer = estimate_memory(config, shape, None, stack=stack)
    return answer.allocated_bytes, answer.reserved_bytes


def test_there_are_rows_of_four_tools() -> None:
    names = [row.source.name for row in rows()]
    assert {name: names.count(name) for name in sorted(set(names))} == {
        "axolotl-examples": 5, "canifinetune": 11, "fms-accel": 18, "ms-swift": 37, "qwen-v1": 23, "qwen-v1-recipes": 4,
    }  # fmt: skip


def test_file_of_a_row_asks_what_the_score_asks(tmp_path: Path) -> None:
    for row in rows():
        made = file_of(row)
        assert made is not None
        _, config = imported(row, tmp_path)
        ours, theirs = about_memory(config), about_memory(request_of(row).request.config)
        assert {field for field in theirs if ours[field] != theirs[field]} <= set(made.other), row.id


def test_recipe_on_the_stack_of_its_row_needs_what_was_measured(tmp_path: Path) -> None:
    """On the loop and the libraries of the measurements an imported recipe is priced within 1 %, as its rows are."""
    errors = []
    for row in rows():
        if row.source.name == "canifinetune":
            request = request_of(row).request
            _, config = imported(row, tmp_path)
            config = config.with_(optimizer=config.optimizer.with_(max_grad_norm=None))
            found = peaks(config, request.shape, request.stack)
            assert found == peaks(request.config, request.shape, request.stack)
            assert row.measured.peak_allocated_bytes is not None
            errors.append(found[0] / row.measured.peak_allocated_bytes - 1)
    assert len(errors) == 11
    assert max(map(abs, errors)) < 0.01


def test_axolotl_is_priced_as_its_rows_are_scored(tmp_path: Path) -> None:
    for row in rows():
        if row.software.driver == "axolotl":
            request = request_of(row).request
            answer, config = imported(row, tmp_path)
            assert peaks(config, request.shape, answer.stack) == peaks(request.config, request.shape, request.stack)


@pytest.mark.parametrize("number", [0, 13], ids=["7B", "3B"])
def test_full_fine_tune_of_trls_trainer_needs_what_was_measured(tmp_path: Path, number: int) -> None:
    """fms-hf-tuning's own TRL is another release; where gradients, not logits, make the peak, that does not show."""
    full = [row for row in rows() if row.source.name == "fms-accel"][number]
    answer, config = imported(full, tmp_path)
    allocated, _ = peaks(config, request_of(full).request.shape, answer.stack)
    assert full.measured.peak_allocated_bytes is not None
    assert allocated == pytest.approx(full.measured.peak_allocated_bytes, rel=0.001)
