"""SmolLM2-135M-Instruct, a real model: it is trained, its losses are the stock Trainer's, and it reloads bit by bit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs.made_run import configured, copy_model, write_config
from runs.test_train import evaluated, losses_of, run, stock_losses
from safetensors.torch import load_file, save_file

from foretune.api import MergeAnswer, merge

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"optimizer__learning_rate": 1e-3},
    "full": {"lora": None, "optimizer__learning_rate": 1e-5},
}


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_a_real_model_learns_as_by_the_stock_trainer_and_reloads(method: str, smollm2: Path, tmp_path: Path) -> None:
    config = configured(
        tmp_path,
        model=smollm2,
        num_rows=6,
        schedule__epochs=3.0,
        schedule__warmup_updates=1,
        **METHODS[method],
    ).config
    events = run(config)
    losses = losses_of(events)
    assert losses == pytest.approx(stock_losses(config, tmp_path), rel=1e-4)
    assert sum(losses[-3:]) < 0.97 * sum(losses[:3])
    answer = evaluated(tmp_path, prompts=("What is the capital of France?",), max_new_tokens=12)
    assert answer.record.probe is not None
    assert answer.record.probe.is_bitwise_equal
    assert answer.generations[0].text


@pytest.mark.full
def test_a_real_model_s_adapters_are_merged_and_verified(smollm2: Path, tmp_path: Path) -> None:
    """Into its own files in fp32, and into the same in bf16, where rounding shows."""
    in_bf16 = copy_model(tmp_path, smollm2)
    weights = load_file(in_bf16 / "model.safetensors")
    halved = {name: each.bfloat16() for name, each in weights.items()}
    save_file(halved, in_bf16 / "model.safetensors", {"format": "pt"})
    checks = []
    for number, model in enumerate((smollm2, in_bf16)):
        folder = tmp_path / str(number)
        folder.mkdir()
        run(configured(folder, model=model, num_rows=6, schedule__epochs=3.0, **METHODS["lora"]).config)
        *_, answer = merge(str(folder / "run"))
        assert isinstance(answer, MergeAnswer)
        checks.append(answer.check)
    assert [check.verdict for check in checks] == ["verified", "verified"]
    assert [len(check.layers) for check in checks] == [210, 210]
    assert checks[0].max_abs_logit_difference < 1e-3 < checks[1].max_abs_logit_difference


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_the_process_grows_as_predicted(method: str, smollm2: Path, tmp_path: Path) -> None:
    """In a process of its own, on one thread: within 15 % of the prediction that its record holds."""
    changes = {name.replace("__", "."): value for name, value in METHODS[method].items()}
    folder = tmp_path / "run"
    write_config(tmp_path / "run.yaml", tmp_path, model=smollm2, num_rows=6, output=str(folder), **changes)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "foretune", "train", str(tmp_path / "run.yaml"), "--output", str(folder)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    record = json.loads((folder / "record.json").read_text())
    measured = max(reading["peak_process_bytes"] for reading in record["readings"])
    assert measured == pytest.approx(record["prediction"]["process_bytes"], rel=0.15)
