"""Gemma 3n and 4, latent attention and models with towers: templates, and what is loaded beside the language model."""

from typing import Any

import pytest
from memory.runs import all_layers, shape_of, templated

from foretune.contract import TrainingConfig, build_config
from foretune.errors import UnsupportedError
from foretune.memory import estimate_memory
from foretune.memory.templates import Recording
from foretune.models import ModelShape

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "num_hidden_layers": 14,
}
GEMMA: dict[str, Any] = {**SMALL, "sliding_window": 8, "vocab_size_per_layer_input": 512}
GEMMA4: dict[str, Any] = {**GEMMA, "global_head_dim": 32, "hidden_size_per_layer_input": 8}
LATENT: dict[str, Any] = {
    **{key: value for key, value in SMALL.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "num_hidden_layers": 7,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
EXPERTS: dict[str, Any] = {
    **LATENT,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 2,
    "n_group": 2,
    "topk_group": 1,
}
INDEXED: dict[str, Any] = {
    **EXPERTS,
    "num_hidden_layers": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "pad_token_id": 0,
}
SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**EXPERTS, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**EXPERTS, "model_type": "deepseek_v3"},
    "deepseek_v32": {**INDEXED, "model_type": "deepseek_v32"},
    "gemma3": {
        "model_type": "gemma3",
        "text_config": {**GEMMA, "model_type": "gemma3_text"},
        "vision_config": SIGLIP,
    },
    "gemma3n_text": {
        **GEMMA,
        "model_type": "gemma3n_text",
        "num_hidden_layers": 30,
        "num_kv_shared_layers": 15,
        "laurel_rank": 4,
        "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": [0.95] * 3 + [0.0] * 27,
    },
    "gemma4": {
        "model_type": "gemma4",
        "text_config": {**GEMMA4, "model_type": "gemma4_text", "num_hidden_layers": 26, "num_kv_shared_layers": 13},
        "vision_config": {"model_type": "gemma4_vision", "num_hidden_layers": 1},
    },
    "gemma4_text": {
        **GEMMA4,
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "glm_moe_dsa": {
        **INDEXED,
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 24,
        "indexer_types": ["full"] * 3 + ["full", "shared", "shared", "shared"] * 5 + ["full"],
    },
    "glm4_moe_lite": {**EXPERTS, "model_type": "glm4_moe_lite", "n_group": 1},
    "minicpm3": {**LATENT, "model_type": "minicpm3"},
    "mllama": {
        "model_type": "mllama",
        "text_config": {**SMALL, "model_type": "mllama_text_model", "cross_attention_layers": [3, 8]},
    },
    "vaultgemma": {**GEMMA, "model_type": "vaultgemma"},
    "youtu": {**LATENT, "model_type": "youtu"},
}


def config(method: str, *overrides: str) -> TrainingConfig:
    changes = ["batch.accumulation_steps=3", "batch.sequence_length=32", "attention=eager", *overrides]
    return build_config({"model.id": "a/model"}, overrides=changes, method=method).config


def model(name: str, **changes: Any) -> ModelShape:
    return shape_of(MODELS[name], **changes)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("name", MODELS)
def test_templates_emit_what_recording_every_layer_does(name: str, method: str) -> None:
    chosen = config(method, f"gradient_checkpointing={str(method == 'full').lower()}")
    short, whole = templated(chosen, model(name)), Recording.of(*all_layers(chosen, model(name)))
    assert short.expand() == whole.expand()
    assert short.walk() == whole.walk()
    assert len(short.stand_ins.recorded) < model(name).num_layers


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_towers_are_listed_to_the_last_parameter(name: str) -> None:
    shape = model(name)
    listed = sum(parameter.num_elements for tower in shape.towers for parameter in tower.parameters)
    assert listed == shape.tower_params > 0


def test_a_tower_is_weights_and_nothing_more() -> None:
    small, deep = model("gemma3"), model("gemma3", vision_config={**SIGLIP, "num_hidden_layers": 6})
    answers = [estimate_memory(config("full"), shape) for shape in (small, deep)]
    sums = [{part.name: part.num_bytes for part in answer.components} for answer in answers]
    assert answers[0].trainable_params == answers[1].trainable_params == small.text_params
    assert sums[1]["weights"] > sums[0]["weights"]
    assert all(sums[0][name] == sums[1][name] for name in ("gradients", "optimizer states", "activations"))


def test_a_tower_that_the_causal_class_leaves_out_takes_nothing() -> None:
    vision = {"model_type": "mllama_vision_model", "hidden_size": 32}
    small, wide = model("mllama"), model("mllama", vision_config=vision)
    assert small.tower_params != wide.tower_params
    assert (
        estimate_memory(config("lora"), small).allocated_bytes == estimate_memory(config("lora"), wide).allocated_bytes
    )


def test_towers_whose_class_is_not_causal_are_refused() -> None:
    shape = shape_of(
        {"model_type": "paligemma", "text_config": {**SMALL, "model_type": "gemma"}, "vision_config": SIGLIP}
    )
    with pytest.raises(UnsupportedError, match="parts beside the language model"):
        estimate_memory(config("lora"), shape)


def test_gemma_3n_is_not_quantized_since_its_class_clips_weights_in_place() -> None:
    with pytest.raises(UnsupportedError, match="clips the weights"):
        estimate_memory(config("qlora"), model("gemma3n_text"))
