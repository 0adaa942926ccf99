"""Convolutions, scans, the delta rule on the tape: what their sizes depend on; templates of hybrids."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory.runs import all_layers, shape_of, templated

from foretune.contract import TrainingConfig
from foretune.errors import UnsupportedError
from foretune.memory import PROFILES, estimate_memory
from foretune.memory.einsum import einsum
from foretune.memory.layout import contiguous_strides
from foretune.memory.ops import transpose
from foretune.memory.pointwise import softplus
from foretune.memory.scans import conv1d, pad, set_select, solve_triangular, split
from foretune.memory.stack import FORETUNE
from foretune.memory.tape import DeviceRules, Tensor, backward, recording
from foretune.memory.templates import Recording
from foretune.models import ModelShape

RULES = DeviceRules(cublas_bytes=0)
SIZES = st.integers(2, 9)

MAMBA: dict[str, Any] = {
    "hidden_size": 64,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
DELTA: dict[str, Any] = {
    "hidden_size": 64,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
NEMOTRON = {"M": "linear_attention", "-": "mlp", "*": "full_attention", "E": "moe"}


def hybrid(model_type: str, kinds: str) -> ModelShape:
    """A small model of a family: m has its mixer, a attention; Nemotron-H's letters are its own."""
    count = len(kinds)
    if model_type == "lfm2":
        words = {"m": "conv", "a": "full_attention"}
        return shape_of({"model_type": model_type, **MAMBA, "conv_L_cache": 3}, **layers(kinds, words))
    if model_type == "granitemoehybrid":
        fields = {"shared_intermediate_size": 96, "num_local_experts": 0, "num_experts_per_tok": 0}
        words = {"m": "mamba", "a": "attention"}
        return shape_of({"model_type": model_type, **MAMBA, **fields}, **layers(kinds, words))
    if model_type == "bamba":
        at = [i for i, kind in enumerate(kinds) if kind == "a"]
        return shape_of({"model_type": model_type, **MAMBA}, num_hidden_layers=count, attn_layer_indices=at)
    if model_type == "falcon_h1":
        return shape_of({"model_type": model_type, **MAMBA, "mamba_d_ssm": 64}, num_hidden_layers=count)
    if model_type == "mamba2":
        fields = {"num_heads": 4, "head_dim": 32, "state_size": 8, "n_groups": 1, "chunk_size": 16}
        return shape_of({"model_type": model_type, **MAMBA, **fields}, num_hidden_layers=count)
    if model_type == "nemotron_h":
        fields = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16}
        few = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        shared = {"moe_shared_expert_intermediate_size": 32, "hybrid_override_pattern": kinds}
        return shape_of({"model_type": model_type, **MAMBA, **fields, **few, **shared}, **layers(kinds, NEMOTRON))
    words = {"m": "linear_attention", "a": "full_attention"}
    more = {**EXPERTS, "shared_expert_intermediate_size": 32} if model_type == "qwen3_next" else {}
    return shape_of({"model_type": model_type, **DELTA, **more}, **layers(kinds, words))


def layers(kinds: str, words: dict[str, str]) -> dict[str, Any]:
    return {"num_hidden_layers": len(kinds), "layer_types": [words[kind] for kind in kinds]}


def config_of(method: str = "lora", **changes: Any) -> TrainingConfig:
    fields: dict[str, Any] = {"model": {"id": "test/model"}, "precision": {"dtype": "bf16"}, **changes}
    if method != "full":
        fields["lora"] = {"rank": 4}
    if method == "qlora":
        fields["quantization"] = {}
    fields.setdefault("batch", {"micro_batch_size": 1, "sequence_length": 24})
    return TrainingConfig.create(**fields)


STACKS = [
    ("lfm2", "mmammammamamam"),
    ("granitemoehybrid", "mmmmammmmamm"),
    ("bamba", "mmammmammmamm"),
    ("falcon_h1", "mmmmmm"),
    ("mamba2", "mmmmmm"),
    ("nemotron_h", "M-M-M*-MEMEM*EME"),
    ("qwen3_5_text", "mmmammmammma"),
    ("qwen3_next", "mmmammmammma"),
]


@pytest.mark.parametrize("method", ["full", "qlora"])
@pytest.mark.parametrize(("model_type", "kinds"), STACKS)
def test_a_layer_of_a_hybrid_stands_only_for_layers_between_the_same_neighbours(
    model_type: str, kinds: str, method: str
) -> None:
    shape, config = hybrid(model_type, kinds), config_of(method, attention="eager")
    short, whole = templated(config, shape), Recording.of(*all_layers(config, shape))
    assert short.expand() == whole.expand()
    assert short.walk() == whole.walk()


def test_a_state_space_scan_has_as_many_events_for_any_number_of_full_chunks() -> None:
    shape = hybrid("mamba2", "mm")
    counts = {number_of_events(shape, 16 * chunks) for chunks in (2, 3, 7)}
    assert len(counts) == 1


def test_the_delta_rule_has_as_many_events_more_for_each_chunk() -> None:
    shape = hybrid("qwen3_5_text", "mm")
    counts = [number_of_events(shape, 64 * chunks) for chunks in (2, 3, 4, 5)]
    assert counts[1] - counts[0] == counts[2] - counts[1] == counts[3] - counts[2] > 0


def number_of_events(shape: ModelShape, tokens: int) -> int:
    config = config_of(attention="eager", batch={"micro_batch_size": 2, "sequence_length": tokens})
    return templated(config, shape).num_events


# ------------------------------------------------------------------ operations
@given(SIZES, SIZES, SIZES, SIZES, st.booleans())
def test_an_einsum_is_one_product_whose_result_is_a_view(b: int, l: int, s: int, n: int, is_transposed: bool) -> None:  # noqa: E741
    with recording(RULES) as tape:
        left, right = Tensor((b, l, n), "f32"), Tensor((b, n, s) if is_transposed else (b, s, n), "f32")
        right = transpose(right, 1, 2) if is_transposed else right
        start = len(tape.events)
        out = einsum("bln,bsn->bls", left, right)
        made = [num_bytes for _, num_bytes in tape.events[start:] if num_bytes > 0]
    assert out.shape == (b, l, s)
    assert made == [4 * b * l * s]


@given(SIZES, SIZES, SIZES)
def test_what_an_einsum_cannot_view_is_copied(b: int, h: int, n: int) -> None:
    with recording(RULES) as tape:
        left, right = Tensor((b, 3, h, n), "f32"), Tensor((b, 5, h, n), "f32")
        start = len(tape.events)
        out = einsum("blhn,bshn->blsh", left, right)
        made = [num_bytes for _, num_bytes in tape.events[start:] if num_bytes > 0]
    assert out.shape == (b, 3, 5, h)
    assert made == [4 * b * 3 * h * n, 4 * b * 5 * h * n, 4 * b * h * 3 * 5]


@given(SIZES, SIZES, SIZES)
def test_a_convolution_of_k_taps_padded_on_both_sides_is_k_minus_1_longer(b: int, c: int, s: int) -> None:
    with recording(RULES):
        out = conv1d(Tensor((b, c, s), "bf16"), Tensor((c, 1, 4), "bf16"), None, 3)
    assert out.shape == (b, c, s + 3)


def test_a_padded_tensor_keeps_its_channels_last() -> None:
    with recording(RULES):
        channels_last = Tensor((2, 3, 5, 4), "f32", (60, 1, 12, 3))
        assert pad(channels_last, 1, 0, 2).strides == (100, 1, 20, 5)
        assert pad(Tensor((2, 3, 5, 4), "f32"), 1, 0, 2).strides == contiguous_strides((2, 5, 5, 4))
        assert pad(channels_last, 1, 0, 0).strides == channels_last.strides


def test_a_linear_solver_answers_column_major() -> None:
    with recording(RULES):
        assert solve_triangular(Tensor((2, 4, 4), "f32"), Tensor((2, 4, 3), "f32")).strides == (12, 1, 4)


def test_a_gradient_of_softplus_is_laid_out_as_the_gradient_that_came() -> None:
    with recording(RULES):
        leaf = Tensor((2, 3, 4), "f32", needs_grad=True)
        node = softplus(leaf).edge[0]
        came = Tensor((2, 3, 4), "f32", (12, 1, 3))
        (out,) = node.run([came])
        assert out is not None
        assert out.strides == came.strides


def test_parts_of_channels_last_gradients_are_put_together_channels_last() -> None:
    with recording(RULES):
        whole = Tensor((2, 3, 5, 4), "f32", needs_grad=True)
        node = split(whole, [2, 2], 3)[0].edge[0]
        parts = [Tensor((2, 3, 5, 2), "f32", (30, 1, 6, 3)) for _ in range(2)]
        (out,) = node.run([*parts])
        assert out is not None
        assert out.strides == (60, 1, 12, 3)


def test_writing_a_slice_makes_its_target_part_of_the_graph() -> None:
    with recording(RULES):
        base, source = Tensor((2, 3), "f32"), Tensor((2,), "f32", needs_grad=True)
        set_select(base, 1, source)
        assert base.needs_grad
        assert base.edge[0].edges[0] is None
        loss = Tensor((2, 3), "f32", needs_grad=True)
        loss.edge = base.edge
        backward(loss)
        assert source.grad is not None


# ------------------------------------------------------------------ what is said and refused
def test_an_answer_says_which_kernels_are_taken_to_be_missing() -> None:
    answers = {kinds: estimate_memory(config_of(), hybrid("granitemoehybrid", kinds)) for kinds in ("mama", "aaaa")}
    said = {kinds: " ".join(answer.assumptions + answer.untested_paths) for kinds, answer in answers.items()}
    assert "mamba-ssm and causal-conv1d are not installed" in said["mama"]
    assert "scans in torch" in said["mama"]
    assert "installed" not in said["aaaa"]
    assert "scans" not in said["aaaa"]


@pytest.mark.parametrize("model_type", ["falcon_mamba", "mamba"])
def test_a_loop_over_tokens_is_refused_by_name(model_type: str) -> None:
    fields = {"hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 2, "state_size": 8}
    shape = shape_of({"model_type": model_type, "intermediate_size": 128, **fields})
    with pytest.raises(UnsupportedError, match="loops over tokens"):
        estimate_memory(config_of(attention="eager"), shape)


def test_scans_under_autocast_and_cached_states_are_refused() -> None:
    shape = hybrid("qwen3_5_text", "mmma")
    with pytest.raises(UnsupportedError, match="autocast"):
        estimate_memory(config_of(), shape, stack=FORETUNE.with_(name="test", autocast="bf16"))
    keeps_cache = next(stack for stack in PROFILES.values() if stack.keeps_cache and stack.autocast == "none")
    with pytest.raises(UnsupportedError, match="keeps a cache"):
        estimate_memory(config_of(gradient_checkpointing=False), shape, stack=keeps_cache)
    estimate_memory(config_of(), hybrid("lfm2", "mama"), stack=FORETUNE.with_(name="test", autocast="bf16"))
