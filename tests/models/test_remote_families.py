"""Qwen, Baichuan 2 and ChatGLM 3: counts as published with measurements (shared/observations, `total_params`)."""

from typing import Any

import pytest

from foretune.models import ModelShape, resolve_targets, shape_from_config

QWEN: dict[str, Any] = {"model_type": "qwen", "kv_channels": 128, "no_bias": True, "tie_word_embeddings": False}
BAICHUAN: dict[str, Any] = {"model_type": "baichuan", "vocab_size": 125696, "tie_word_embeddings": False}
CHATGLM: dict[str, Any] = {
    "model_type": "chatglm",
    "hidden_size": 4096,
    "num_layers": 28,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "ffn_hidden_size": 13696,
    "padded_vocab_size": 65024,
    "add_qkv_bias": True,
    "add_bias_linear": False,
}


def sizes(hidden: int, layers: int, heads: int, inner: int, vocab: int | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**found, "intermediate_size": inner, **({"vocab_size": vocab} if vocab else {})}


COUNTS: list[tuple[str, dict[str, Any], int]] = [
    ("Qwen-1_8B", {**QWEN, **sizes(2048, 24, 16, 11008, 151936)}, 1_836_828_672),
    ("Qwen-7B", {**QWEN, **sizes(4096, 32, 32, 22016, 151936)}, 7_721_324_544),
    ("Qwen-14B", {**QWEN, **sizes(5120, 40, 40, 27392, 152064)}, 14_167_290_880),
    ("Qwen-72B", {**QWEN, **sizes(8192, 80, 64, 49152, 152064)}, 72_287_920_128),
    ("Baichuan2-7B", {**BAICHUAN, **sizes(4096, 32, 32, 11008)}, 7_505_973_248),
    ("Baichuan2-13B", {**BAICHUAN, **sizes(5120, 40, 40, 13696)}, 13_896_668_160),
    ("chatglm3-6b", CHATGLM, 6_243_584_000),
]


def shape(config: dict[str, Any]) -> ModelShape:
    return shape_from_config(config, id="model", source="file")


@pytest.mark.parametrize(("name", "config", "total_params"), COUNTS, ids=[name for name, _, _ in COUNTS])
def test_counts_are_the_published_ones(name: str, config: dict[str, Any], total_params: int) -> None:
    assert shape(config).total_params == total_params


def test_adapters_of_qwens_own_script() -> None:
    """finetune.py of the Qwen repository: rank 64 on c_attn, c_proj (of attention and MLP), w1, w2."""
    built = shape(COUNTS[0][1])
    found = resolve_targets(built, ("c_attn", "c_proj", "w1", "w2"))
    assert [p.name for p in found] == ["attn.c_attn", "attn.c_proj", "mlp.w1", "mlp.w2", "mlp.c_proj"]
    assert sum(64 * (p.in_features + p.out_features) * len(p.layers) for p in found) == 53_673_984


@pytest.mark.parametrize("config", [COUNTS[0][1], COUNTS[4][1], CHATGLM], ids=["qwen", "baichuan", "chatglm"])
def test_remote_code_is_named_in_a_note_and_never_asked_for(config: dict[str, Any]) -> None:
    built = shape({**config, "auto_map": {"AutoModel": "modeling.Model"}})
    assert f"Transformers has no class for {built.model_type}" in built.notes[0]
