"""DoRA, modules trained whole, an 8-bit base and dropout: the estimate's events are those of the real program."""

from typing import Any

import pytest
from memory.runs import all_layers, shape_of
from memory.test_traces import canonical
from runtime.test_trace import events_of

from foretune.contract import TrainingConfig, build_config
from foretune.memory.stack import MANUAL_LOOP
from foretune.runtime.trace import trace_memory

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}
QWEN2 = {**LLAMA, "model_type": "qwen2"}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 512, "tie_word_embeddings": False}
DORA, INT8, DROPOUT = "lora.use_dora=true", "quantization.scheme=int8", "lora.dropout=0.1"
KEPT, FP32, FP16 = "gradient_checkpointing=false", "precision.dtype=fp32", "precision.dtype=fp16"
ENDS, HEAD = "lora.modules_to_save=[embed_tokens,lm_head]", "lora.modules_to_save=[lm_head,q_proj,norm]"
EVALUATED, SGD = "evaluation.split=0.1", "optimizer.name=sgd"

CASES = [
    (QWEN2, "lora", (DORA, DROPOUT, EVALUATED)),
    (QWEN2, "qlora", (DORA, DROPOUT, KEPT)),
    (GPT2, "lora", (DORA, DROPOUT, FP32)),
    (LLAMA, "lora", (HEAD, DORA, "loss=chunked")),
    (LLAMA, "qlora", (ENDS, "optimizer.implementation=foreach")),
    (QWEN2, "lora", (ENDS, SGD, "optimizer.momentum=0.9", "optimizer.weight_decay=0.1", KEPT)),
    (QWEN2, "qlora", (INT8,)),
    (LLAMA, "qlora", (INT8, DROPOUT, KEPT, ENDS, EVALUATED)),
]
MORE = [
    (LLAMA, "lora", (DORA,)),
    (LLAMA, "lora", (DORA, KEPT, "precision.adapter_dtype=bf16")),
    (GPT2, "lora", (DORA, FP16)),
    (GPT2, "lora", (DROPOUT, "lora.use_rslora=true", "lora.modules_to_save=[wte,wpe]")),
    (LLAMA, "qlora", (INT8, DORA, FP16)),
]


def asked(method: str, settings: tuple[str, ...]) -> TrainingConfig:
    overrides = ["batch.sequence_length=24", "batch.micro_batch_size=2", *settings]
    return build_config({"model.id": "test/model"}, overrides=overrides, method=method).config


@pytest.mark.parametrize(
    ("raw", "method", "settings"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_the_events_are_those_of_the_real_program(raw: dict[str, Any], method: str, settings: tuple[str, ...]) -> None:
    config, shape = asked(method, settings), shape_of(raw)
    assert canonical(all_layers(config, shape)[0]) == events_of(trace_memory(config, shape, raw))


@pytest.mark.parametrize(
    "settings",
    [(INT8,), *(pytest.param(more, marks=pytest.mark.full) for more in [(INT8, KEPT), (DORA, ENDS)])],
    ids=" ".join,
)
def test_a_graph_that_the_outputs_hold_goes_with_them(settings: tuple[str, ...]) -> None:
    config, shape = asked("qlora", ("optimizer.max_grad_norm=null", *settings)), shape_of(LLAMA)
    recorded, _ = all_layers(config, shape, stack=MANUAL_LOOP)
    assert canonical(recorded) == events_of(trace_memory(config, shape, LLAMA, stack=MANUAL_LOOP))
