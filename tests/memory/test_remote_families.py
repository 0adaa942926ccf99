"""Qwen, Baichuan 2 and ChatGLM 3 on the tape: templates, what their own code adds, and who may not run them."""

from typing import Any

import pytest
from memory.runs import all_layers, shape_of, templated

from foretune.contract import TrainingConfig
from foretune.errors import UnsupportedError
from foretune.memory import FORETUNE, estimate_memory
from foretune.memory.templates import Recording
from foretune.runtime.qualify import require_same_class

H, V, L = 256, 4000, 9
COMMON: dict[str, Any] = {"hidden_size": H, "num_attention_heads": 4, "num_hidden_layers": L, "vocab_size": V}
MODELS: dict[str, dict[str, Any]] = {
    "qwen": {**COMMON, "kv_channels": 64, "intermediate_size": 1024, "no_bias": True},
    "baichuan": {**COMMON, "intermediate_size": 512},
    "chatglm": {
        "hidden_size": H,
        "num_layers": L,
        "num_attention_heads": 4,
        "kv_channels": 64,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "ffn_hidden_size": 512,
        "padded_vocab_size": V,
        "add_qkv_bias": True,
    },
}


def config(method: str, batch: int = 2, *, tokens: int = 128, checkpoints: bool = True) -> TrainingConfig:
    fields: dict[str, Any] = {} if method == "full" else {"lora": {"rank": 8}}
    if method == "qlora":
        fields["quantization"] = {}
    return TrainingConfig.create(
        model={"id": "test/model"},
        precision={"dtype": "bf16"},
        gradient_checkpointing=checkpoints,
        batch={"micro_batch_size": batch, "sequence_length": tokens},
        **fields,
    )


@pytest.mark.parametrize("checkpoints", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_few_layers_stand_for_all(name: str, method: str, batch: int, checkpoints: bool) -> None:
    wanted, shape = config(method, batch, checkpoints=checkpoints), shape_of(MODELS[name], model_type=name)
    tape, every = all_layers(wanted, shape)
    assert templated(wanted, shape).expand() == Recording.of(tape, every).expand()


def births(model: dict[str, Any], model_type: str) -> list[int]:
    tape, _ = all_layers(config("lora", batch=1, tokens=96), shape_of(model, model_type=model_type))
    return [num_bytes for _, num_bytes in tape.events]


def test_alibi_is_a_mask_for_every_head() -> None:
    wide = {**MODELS["baichuan"], "hidden_size": 5120, "num_attention_heads": 40}
    assert shape_of(wide, model_type="baichuan").traits.rotary_dim is None
    assert births(wide, "baichuan").count(2 * 40 * 96 * 96) >= 2


def test_baichuans_head_is_normalized_in_every_forward() -> None:
    """Beside embeddings and head a copy of the head is born in each of two forwards."""
    llama = {**MODELS["baichuan"], "tie_word_embeddings": False}
    assert births(llama, "llama").count(2 * V * H) == 2
    assert births(MODELS["baichuan"], "baichuan").count(2 * V * H) == 4


@pytest.mark.parametrize("name", sorted(MODELS))
def test_they_are_estimated_and_neither_traced_nor_trained(name: str) -> None:
    shape = shape_of(MODELS[name], model_type=name)
    assert estimate_memory(config("lora"), shape).allocated_bytes > 2 * shape.total_params
    with pytest.raises(UnsupportedError, match=f"Transformers has no class for {name}"):
        require_same_class(shape, FORETUNE)
