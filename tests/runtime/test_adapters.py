"""Adapters go to the linear layers that are named, and to nothing that PEFT makes of their names."""

from typing import Any

import pytest
import torch

from foretune.contract import LoraSettings
from foretune.models import lora_parameters, resolve_targets, shape_from_config
from foretune.runtime.adapters import attach_adapters
from foretune.runtime.load import build_model, decoder_linears, model_config

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "num_hidden_layers": 3,
    "num_experts_per_tok": 2,
}
FAMILIES: list[dict[str, Any]] = [
    {"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [1]},
    {"model_type": "qwen2_moe", "num_experts": 4, "shared_expert_intermediate_size": 48},
    {"model_type": "glm4_moe", "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    {"model_type": "phimoe", "num_local_experts": 4},
    {
        "model_type": "llama4_text",
        "num_local_experts": 4,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1,
    },
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family["model_type"])
def test_all_linear_trains_what_is_counted_and_no_stacked_expert(family: dict[str, Any]) -> None:
    raw = {**SMALL, **family}
    shape = shape_from_config(raw, id="a/model", source="file")
    projections = resolve_targets(shape, "all-linear")
    base = build_model(model_config(raw, attention="sdpa"), dtype=torch.bfloat16, device="meta", attention="sdpa")
    names = [f"{shape.layer_prefix}{layer}.{p.name}" for p in projections for layer in p.layers]
    assert set(decoder_linears(base)) == set(names)
    with torch.device("meta"):
        model = attach_adapters(base, LoraSettings(rank=4), names, base_dtype=torch.bfloat16)
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert sum(trained.values()) == lora_parameters(projections, 4)
    assert not [name for name in trained if ".experts." in name]
