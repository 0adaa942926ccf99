"""Every field of the contract against `estimate`: it changes bytes, it is only recorded, or it is refused by name."""

from typing import Any

import pytest

from foretune.api import build_config, estimate, fingerprint
from foretune.contract.fields import leaves
from foretune.errors import UnsupportedError

BASE = {"model.id": "Qwen/Qwen2.5-0.5B", "lora.rank": 16, "batch.sequence_length": 1024}

# Field: its new value, and what else both sides of the comparison have.
CHANGES_BYTES: dict[str, tuple[Any, dict[str, Any]]] = {
    "model.id": ("gpt2", {}),
    "precision.dtype": ("fp32", {}),
    "precision.adapter_dtype": ("bf16", {}),
    "quantization.scheme": ("int8", {}),
    "quantization.double_quant": (False, {"quantization.scheme": "nf4"}),
    "quantization.compute_dtype": ("fp32", {"quantization.scheme": "nf4"}),
    "lora.rank": (64, {}),
    "lora.dropout": (0.1, {}),
    "lora.targets": ("attention", {}),
    "lora.modules_to_save": (["norm"], {}),
    "lora.use_dora": (True, {}),
    "optimizer.name": ("sgd", {}),
    "optimizer.implementation": ("foreach", {}),
    "optimizer.momentum": (0.9, {"optimizer.name": "sgd"}),
    "optimizer.max_grad_norm": (None, {}),
    "batch.micro_batch_size": (2, {}),
    "batch.accumulation_steps": (2, {}),
    "batch.sequence_length": (2048, {}),
    "batch.packing": (True, {}),
    "attention": ("eager", {}),
    "gradient_checkpointing": (False, {}),
    "loss": ("chunked", {}),
    "evaluation.data": ("held-out.jsonl", {}),
    "evaluation.split": (0.1, {}),
}

# Field: its new value, and what else both sides have. The need stays, the record's fingerprint does not.
RECORDED_ONLY: dict[str, tuple[Any, dict[str, Any]]] = {
    "model.revision": ("main", {}),
    "lora.alpha": (8.0, {}),
    "lora.use_rslora": (True, {}),
    "optimizer.learning_rate": (1e-3, {}),
    "optimizer.weight_decay": (0.1, {}),
    "optimizer.beta1": (0.8, {}),
    "optimizer.beta2": (0.99, {}),
    "optimizer.epsilon": (1e-6, {}),
    "schedule.updates": (100, {}),
    "schedule.epochs": (2.0, {}),
    "schedule.shape": ("linear", {}),
    "schedule.warmup_updates": (10, {}),
    "batch.sort_by_length": (True, {}),
    "data.train": ("train.jsonl", {}),
    "data.supervision": ("assistant_only", {}),
    "data.spans": ("template", {"data.supervision": "assistant_only"}),
    "data.truncation": ("right", {}),
    "data.allow_template_rewrite": (True, {}),
    "data.template_date": ("2026-01-31", {}),
    "evaluation.every_updates": (10, {"evaluation.split": 0.1}),
    "checkpoint.every_updates": (10, {}),
    "checkpoint.every_minutes": (5.0, {}),
    "checkpoint.keep": (2, {"checkpoint.every_updates": 10}),
    "output": ("run", {}),
    "seed": (1, {}),
}

# Field: a value that the contract or the estimator refuses by the field's name, and what else is needed.
REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "device": ("cpu", {"precision.dtype": "fp32"}),
    "parallelism": ("ddp", {}),
}


def settings(extra: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {**BASE, **extra, **changed}


def figures(data: dict[str, Any]) -> tuple[Any, ...]:
    answer = estimate(build_config(data).config, offline=True).estimate
    phases = tuple((phase.allocated_bytes, phase.reserved_bytes) for phase in answer.phases)
    return answer.need_bytes, answer.allocated_bytes, answer.requested_bytes, phases


def test_every_field_is_in_exactly_one_table() -> None:
    tables = [*CHANGES_BYTES, *RECORDED_ONLY, *REFUSED]
    assert sorted(tables) == sorted(leaf.path for leaf in leaves())


@pytest.mark.parametrize("field", CHANGES_BYTES)
def test_field_changes_what_is_needed(field: str) -> None:
    value, extra = CHANGES_BYTES[field]
    assert figures(settings(extra)) != figures(settings(extra, **{field: value}))


@pytest.mark.parametrize("field", RECORDED_ONLY)
def test_field_is_recorded_and_changes_no_byte(field: str) -> None:
    value, extra = RECORDED_ONLY[field]
    before, after = settings(extra), settings(extra, **{field: value})
    assert figures(before) == figures(after)
    assert fingerprint(build_config(before).config) != fingerprint(build_config(after).config)


@pytest.mark.parametrize(("field", "case"), [*REFUSED.items()])
def test_field_is_refused_by_name(field: str, case: tuple[Any, dict[str, Any]]) -> None:
    value, extra = case
    with pytest.raises(UnsupportedError) as caught:
        estimate(build_config(settings(extra, **{field: value})).config, offline=True)
    assert field in {problem.field for problem in caught.value.problems}
