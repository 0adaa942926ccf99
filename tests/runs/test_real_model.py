"""SmolLM2-135M-Instruct, a real model: it is trained, its losses are the stock Trainer's, and it reloads bit by bit."""

from pathlib import Path
from typing import Any

import pytest
from runs.made_run import configured
from runs.test_train import evaluated, losses_of, run, stock_losses

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
