"""QLoRA from end to end on a CPU, past the contract's rule that it is for CUDA: bitsandbytes has kernels for both."""

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import has_avx512bf16
from runs.made_live import BF16, NF4, alive, batch, made_config, update
from runs.made_run import configured, model_folder
from runs.planted import FOUR
from transformers import BitsAndBytesConfig

import foretune.runtime.load
from foretune.api import EvaluationAnswer, evaluate, train
from foretune.contract import TrainingConfig
from foretune.errors import VerificationError
from foretune.evidence import read_record
from foretune.runtime.border import quietly
from foretune.runtime.live import Live
from foretune.runtime.load import four_bit_layers
from foretune.runtime.run_events import RunFinished, UpdateDone
from foretune.runtime.verify import observe, require_verified


def qlora(folder: Path, **changes: Any) -> TrainingConfig:
    config = configured(folder, **{"schedule__updates": 12, "schedule__epochs": ..., **changes}).config
    return config.with_(precision=BF16, quantization=NF4)


def test_a_qlora_run_learns_is_verified_and_reloads_bit_by_bit(tmp_path: Path) -> None:
    """With evaluations in between; the loss of the last one is that of the reloaded artifact."""
    config = qlora(tmp_path, evaluation__split=0.25, evaluation__every_updates=4, optimizer__learning_rate=0.03)
    *events, finished = train(config)
    assert isinstance(finished, RunFinished)
    losses = [event.loss for event in events if isinstance(event, UpdateDone)]
    assert sum(losses[-3:]) < 0.98 * sum(losses[:3])
    record = finished.record
    assert [each.update for each in record.evaluations] == [4, 8, 12]
    assert all(check.holds for check in record.checks)
    wanted = {"quantization.scheme", "quantization.double_quant", "quantization.compute_dtype"}
    assert {(field, moment) for field in wanted for moment in ("before", "after")} <= {
        (check.field, check.moment) for check in record.checks
    }
    *_, answer = evaluate(str(tmp_path / "run"))
    assert isinstance(answer, EvaluationAnswer)
    assert answer.record.probe is not None
    assert answer.record.probe.is_bitwise_equal


# -- an evaluation in between (bitsandbytes repacks weights for CPUs that have AVX512-BF16)


def wide() -> Live:
    """Return a run whose weights can be repacked: they have whole blocks of 64."""
    return alive(made_config(model_folder(hidden_size=64, intermediate_size=128), **FOUR))


def gradients(live: Live) -> list[torch.Tensor]:
    with quietly():  # torch warns where gradients go through a kernel that has none
        live.step(*batch()).backward()
    found = [each.grad for each in live.trained.values() if each.grad is not None]
    live.optimizer.zero_grad(set_to_none=True)
    return found


def evaluated(live: Live) -> None:
    live.step.eval()
    with torch.no_grad():
        live.step(*batch())
    live.step.train()


def test_an_evaluation_leaves_gradients_as_they_are() -> None:
    live = wide()
    assert not any(layer.support_avx512bf16_for_cpu for _, layer in four_bit_layers(live.model))
    update(live)
    before = gradients(live)
    evaluated(live)
    after = gradients(live)
    assert len(before) == 28
    assert all(map(torch.equal, before, after))


def test_without_the_guard_an_evaluation_would_spoil_them_and_the_run_would_end() -> None:
    """On a CPU that has AVX512-BF16; on another one there is nothing to guard against, and nothing happens."""
    live = wide()
    for _, layer in four_bit_layers(live.model):
        layer.support_avx512bf16_for_cpu = has_avx512bf16()
    update(live)
    before = gradients(live)
    evaluated(live)
    differ = {check.field for check in observe(live, "after", None) if not check.holds}
    assert ("base weights that are not trained" in differ) == has_avx512bf16()
    spoilt = sum(
        float((one - other).norm() / one.norm()) > 0.1 for one, other in zip(before, gradients(live), strict=True)
    )
    assert (spoilt > 0) == has_avx512bf16()


# -- loaders that do otherwise


def test_a_loader_that_does_not_quantize_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foretune.runtime.load, "_quantization", lambda *_: None)
    with pytest.raises(VerificationError) as caught:
        list(train(qlora(tmp_path)))
    assert "0 of 14 layers quantized, 0 weights (0.0% of the model) in nf4" in str(caught.value)
    assert read_record(tmp_path / "run/record.json").outcome == "verification-error"
    assert not (tmp_path / "run/adapter").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"llm_int8_skip_modules": ["q_proj", "lm_head"]}, "12 of 14 layers quantized"),
        ({"llm_int8_skip_modules": []}, "15 of 15 layers quantized"),
        ({"bnb_4bit_use_double_quant": False}, "quantization.double_quant is off"),
        ({"bnb_4bit_quant_type": "fp4"}, "quantization (kind) is fp4"),
    ],
)
def test_a_loader_that_quantizes_otherwise_is_found(
    options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    other = BitsAndBytesConfig(load_in_4bit=True, **{**usual, **options})
    monkeypatch.setattr(foretune.runtime.load, "_quantization", lambda *_: other)
    with pytest.raises(VerificationError) as caught:
        require_verified(alive(made_config(**FOUR)), "before", None)
    assert said in str(caught.value)
