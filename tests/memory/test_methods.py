"""Ways to train beside plain LoRA: DoRA, an 8-bit base, modules trained whole. Nothing here imports torch."""

from typing import Any

import pytest
from memory.runs import SMALL, all_layers, shape_of, templated

from foretune.contract import TrainingConfig, build_config
from foretune.memory.templates import Recording

MIXED: dict[str, Any] = {
    **SMALL,
    "model_type": "qwen2",
    "num_hidden_layers": 9,
    "use_sliding_window": True,
    "sliding_window": 16,
    "max_window_layers": 4,
}
GPT2 = {"model_type": "gpt2", "n_embd": 128, "n_head": 4, "n_layer": 9, "vocab_size": 500, "n_positions": 256}
DORA, INT8, DROPOUT = "lora.use_dora=true", "quantization.scheme=int8", "lora.dropout=0.1"
KEPT = "gradient_checkpointing=false"


def config(method: str, *settings: str) -> TrainingConfig:
    overrides = ["batch.sequence_length=64", "batch.accumulation_steps=3", *settings]
    return build_config({"model.id": "test/model"}, overrides=overrides, method=method).config


CASES = [
    (MIXED, "lora", (DORA,)),
    (MIXED, "lora", (DORA, DROPOUT, KEPT)),
    (MIXED, "qlora", (DORA, DROPOUT)),
    (MIXED, "qlora", (INT8,)),
    (MIXED, "qlora", (INT8, KEPT, "batch.micro_batch_size=2")),
    (MIXED, "qlora", (INT8, DORA, "precision.dtype=fp16")),
    (GPT2, "lora", (DROPOUT,)),
    (GPT2, "lora", (DORA, DROPOUT, "precision.dtype=fp32")),
]


@pytest.mark.parametrize(("raw", "method", "settings"), CASES, ids=lambda value: " ".join(value) if value else None)
def test_templates_emit_what_recording_every_layer_does(
    raw: dict[str, Any], method: str, settings: tuple[str, ...]
) -> None:
    shape, asked = shape_of(raw), config(method, *settings)
    short, whole = templated(asked, shape), Recording.of(*all_layers(asked, shape))
    assert short.expand() == whole.expand()
    assert short.walk() == whole.walk()
    assert len(short.stand_ins.recorded) < shape.num_layers
