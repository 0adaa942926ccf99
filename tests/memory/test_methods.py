"""Ways to train beside plain LoRA: DoRA, an 8-bit base, modules trained whole. Nothing here imports torch."""

from typing import Any

import pytest
from memory.runs import SMALL, all_layers, shape_of, templated

from foretune.contract import TrainingConfig, build_config
from foretune.errors import ForetuneError, UnsupportedError
from foretune.memory import estimate_memory
from foretune.memory.estimate import record
from foretune.memory.stack import MANUAL_LOOP, MANUAL_LOOP_WINDOWS, StackProfile
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
ENDS, INSIDE = "lora.modules_to_save=[embed_tokens,lm_head]", "lora.modules_to_save=[norm,q_proj]"
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
    (MIXED, "lora", (ENDS, KEPT, "optimizer.implementation=foreach")),
    (MIXED, "lora", (INSIDE, DORA, "optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.weight_decay=0.1")),
    (MIXED, "qlora", (ENDS, "optimizer.name=adamw_8bit", "evaluation.split=0.1")),
]


@pytest.mark.parametrize(
    ("raw", "method", "settings"), CASES, ids=lambda value: " ".join(value) if isinstance(value, tuple) else None
)
def test_templates_emit_what_recording_every_layer_does(
    raw: dict[str, Any], method: str, settings: tuple[str, ...]
) -> None:
    shape, asked = shape_of(raw), config(method, *settings)
    short, whole = templated(asked, shape), Recording.of(*all_layers(asked, shape))
    assert short.expand() == whole.expand()
    assert short.walk() == whole.walk()
    assert len(short.stand_ins.recorded) < shape.num_layers


@pytest.mark.parametrize("stack", [MANUAL_LOOP, MANUAL_LOOP.with_(holds_outputs="into the next forward")])
def test_templates_hold_where_outputs_hold_an_8_bit_graph(stack: StackProfile) -> None:
    asked, shape = config("qlora", INT8, "optimizer.max_grad_norm=null"), shape_of(MIXED)
    short, whole = record(asked, shape, None, stack)[0], Recording.of(*all_layers(asked, shape, stack=stack))
    assert short.expand() == whole.expand()


def test_rank_stabilized_scaling_changes_no_byte() -> None:
    shape = shape_of(SMALL)
    plain, scaled = (templated(config("lora", *more), shape).expand() for more in ((), ("lora.use_rslora=true",)))
    assert plain == scaled


def test_a_module_trained_whole_is_copied_and_counted() -> None:
    shape, without = shape_of(SMALL), estimate_memory(config("lora"), shape_of(SMALL))
    beside = estimate_memory(config("lora", "lora.modules_to_save=[lm_head]"), shape)
    assert beside.trainable_params - without.trainable_params == 512 * 8000
    added = {c.name: c.num_bytes for c in beside.components}["adapters"] - 4 * without.trainable_params
    assert added == 2 * 512 * 8000


def test_magnitudes_are_one_for_each_row() -> None:
    shape = shape_of(SMALL)
    rows = sum(p.out_features * len(p.layers) for p in shape.projections)
    dora, lora = (estimate_memory(config("lora", *more), shape).trainable_params for more in ((DORA,), ()))
    assert dora - lora == rows


REFUSED = [
    (SMALL, "lora", "[mlp]", "no module"),
    (SMALL, "lora", "[proj]", "adapted too"),
    (SMALL, "qlora", "[q_proj]", "quantized"),
    (GPT2, "lora", "[attn]", "made of others"),
    ({**SMALL, "tie_word_embeddings": True}, "lora", "[embed_tokens]", "head too"),
    ({**SMALL, "tie_word_embeddings": True}, "lora", "[lm_head]", "Its head is the embeddings' weight"),
]


@pytest.mark.parametrize(("raw", "method", "names", "reason"), REFUSED, ids=[reason for *_, reason in REFUSED])
def test_what_cannot_be_trained_whole_is_refused_by_name(
    raw: dict[str, Any], method: str, names: str, reason: str
) -> None:
    with pytest.raises(ForetuneError, match=reason) as caught:
        estimate_memory(config(method, f"lora.modules_to_save={names}"), shape_of(raw))
    assert caught.value.problems[0].field == "lora.modules_to_save"


def test_dora_on_a_4_bit_base_is_refused_where_the_library_keeps_other_tables() -> None:
    with pytest.raises(UnsupportedError, match="DoRA on a 4-bit base"):
        estimate_memory(config("qlora", DORA), shape_of(SMALL), stack=MANUAL_LOOP_WINDOWS)
