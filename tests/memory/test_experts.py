"""Stacked experts and routers on the tape: what their sizes depend on, and that templates hold for mixed stacks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory.runs import all_layers, shape_of, templated

from foretune.contract import TrainingConfig, build_config
from foretune.errors import UnsupportedError
from foretune.memory import estimate_memory
from foretune.memory.experts import Experts, divide, divide_in_place, gated, gather_rows, sum_over, top_k
from foretune.memory.ops import silu
from foretune.memory.pointwise import clamp
from foretune.memory.tape import DeviceRules, Tensor, recording
from foretune.memory.templates import Recording

RULES = DeviceRules(cublas_bytes=0)
SIZES = st.integers(1, 40)


def births(tokens: int, top: int, experts: int, hidden: int, width: int) -> list[int]:
    """Sizes of what the experts' forward makes, for bf16 rows that want a gradient."""
    with recording(RULES) as tape:
        stacks = Tensor((experts, 2 * width, hidden), "bf16"), Tensor((experts, hidden, width), "bf16")
        module = Experts(*stacks, gated(silu))
        rows = Tensor((tokens, hidden), "bf16", needs_grad=True)
        index, weights = Tensor((tokens, top), "i64"), Tensor((tokens, top), "bf16", needs_grad=True)
        start = len(tape.events)
        out = module(rows, index, weights)
        made = [num_bytes for _, num_bytes in tape.events[start:] if num_bytes > 0]
        assert (out.shape, out.dtype) == ((tokens, hidden), "bf16")
    return made


@given(SIZES, st.integers(1, 8), st.integers(1, 64), SIZES, SIZES)
def test_the_number_of_experts_counts_for_nothing_but_their_histogram(
    tokens: int, top: int, experts: int, hidden: int, width: int
) -> None:
    few, many = births(tokens, top, experts, hidden, width), births(tokens, top, experts + 1, hidden, width)
    added = [b - a for a, b in zip(few, many, strict=True) if b != a]
    assert added == [4, 4, 8]  # counts, offsets and the copy that they are summed from


@given(SIZES, st.integers(1, 8), SIZES, SIZES)
def test_every_token_has_a_row_for_each_of_its_experts(tokens: int, top: int, hidden: int, width: int) -> None:
    made = births(tokens, top, 4, hidden, width)
    rows = tokens * top
    assert made.count(2 * rows * hidden) >= 4  # gathered, projected down, weighted, put back in order
    assert 2 * rows * 2 * width in made
    assert made[-1] == 2 * tokens * hidden


def test_weights_in_fp32_make_the_weighted_rows_fp32() -> None:
    with recording(RULES) as tape:
        stacks = Tensor((4, 12, 8), "bf16"), Tensor((4, 8, 6), "bf16")
        rows, index = Tensor((5, 8), "bf16", needs_grad=True), Tensor((5, 2), "i64")
        out = Experts(*stacks, gated(silu))(rows, index, Tensor((5, 2), "f32", needs_grad=True))
        assert out.dtype == "bf16"
        assert [num_bytes for _, num_bytes in tape.events].count(4 * 10 * 8) == 2


@given(SIZES, st.integers(1, 8), st.integers(8, 64))
def test_choosing_the_largest_keeps_values_and_indices(tokens: int, top: int, experts: int) -> None:
    with recording(RULES):
        values, indices = top_k(Tensor((tokens, experts), "f32", needs_grad=True), top)
        assert (values.shape, values.dtype) == ((tokens, top), "f32")
        assert (indices.shape, indices.dtype) == ((tokens, top), "i64")
        assert values.needs_grad
        assert not indices.needs_grad
        total = sum_over(values, -1, keepdim=True)
        assert total.shape == (tokens, 1)
        assert divide(values, total).shape == divide_in_place(values, total).shape == values.shape


def test_dividing_in_place_copies_only_what_backward_asks_for() -> None:
    with recording(RULES) as tape:
        values, other = Tensor((4, 2), "f32", needs_grad=True), Tensor((4, 1), "f32")
        start = len(tape.events)
        quotient = divide_in_place(values, other)
        assert len(tape.events) == start
        assert quotient.storage is values.storage
        divide_in_place(values, Tensor((4, 1), "f32", needs_grad=True))
        assert (32) in [num_bytes for _, num_bytes in tape.events[start:]]


def test_what_wants_no_gradient_saves_nothing() -> None:
    with recording(RULES) as tape:
        rows, index = Tensor((6, 4), "bf16"), Tensor((9,), "i64")
        gathered, clamped = gather_rows(rows, index), clamp(rows, 2)
        assert gathered.edge is clamped.edge is None
        assert gathered.shape == (9, 4)
        assert len([size for _, size in tape.events if size > 0]) == 4


# ------------------------------------------------------------------ whole models
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "num_hidden_layers": 9,
    "tie_word_embeddings": False,
}
MIXED: list[dict[str, Any]] = [
    {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0, 4]},
    {
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 5,
    },
    {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": 8.0},
    {"model_type": "flex_olmo", "num_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "minimax_m2", "num_local_experts": 8, "num_experts_per_tok": 2},
    {"model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2},
    {
        "model_type": "granitemoeshared",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    {
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 3,
        "use_qk_norm": True,
    },
    {
        "model_type": "dots1",
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "sliding_window": None,
    },
    {"model_type": "solar_open", "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    {
        "model_type": "exaone_moe",
        "num_experts": 8,
        "num_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "sliding_window": 8,
        "sliding_window_pattern": 4,
    },
    {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 7,
        "moe_layer_interval": 1,
    },
    {"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": 2},
    {"model_type": "phimoe", "num_local_experts": 4, "lm_head_bias": True},
    {
        "model_type": "llama4_text",
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 16,
    },
    {
        "model_type": "mimo_v2_flash",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "v_head_dim": 8,
        "partial_rotary_factor": 0.5,
        "sliding_window": 8,
    },
    {"model_type": "minimax", "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 24},
    {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8},
]


def training(model_type: str, method: str, *more: str) -> TrainingConfig:
    attention = "eager" if model_type in ("gpt_oss", "mimo_v2_flash") else "sdpa"
    overrides = ["batch.accumulation_steps=2", "batch.sequence_length=64", f"attention={attention}", *more]
    return build_config({"model.id": "a/model"}, overrides=overrides, method=method).config


@pytest.mark.parametrize("method", ["full", "qlora"])
@pytest.mark.parametrize("model", MIXED, ids=lambda model: model["model_type"])
def test_dense_and_sparse_layers_stand_for_their_like(model: dict[str, Any], method: str) -> None:
    shape, config = shape_of({**TINY, **model}), training(model["model_type"], method)
    short, whole = templated(config, shape), Recording.of(*all_layers(config, shape))
    assert short.expand() == whole.expand()
    assert short.walk() == whole.walk()


@pytest.mark.parametrize("model", MIXED, ids=lambda model: model["model_type"])
def test_stacked_experts_stay_in_16_bits(model: dict[str, Any]) -> None:
    shape = shape_of({**TINY, **model})
    needed = {}
    for method in ("lora", "qlora"):
        estimate = estimate_memory(training(model["model_type"], method), shape)
        needed[method] = {component.name: component.num_bytes for component in estimate.components}["weights"]
    assert 2 * shape.count("experts") < needed["qlora"] < needed["lora"]


@pytest.mark.parametrize("top", [1, 2, 5])
def test_more_experts_of_a_token_need_more_memory(top: int) -> None:
    needed = [
        estimate_memory(
            training("qwen3_moe", "lora", "gradient_checkpointing=false"),
            shape_of({**TINY, **MIXED[0], "num_experts_per_tok": count}),
        ).allocated_bytes
        for count in (top, top + 1)
    ]
    assert needed[0] < needed[1]


@pytest.mark.parametrize(("model_type", "key"), [("mixtral", "router_jitter_noise")])
def test_what_a_router_has_no_program_for_is_refused(model_type: str, key: str) -> None:
    model = next(model for model in MIXED if model["model_type"] == model_type)
    with pytest.raises(UnsupportedError, match=key):
        estimate_memory(training(model_type, "lora"), shape_of({**TINY, **model, key: 0.1}))
