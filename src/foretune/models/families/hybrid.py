"""Hybrids without a state-space mixer: short convolutions, RG-LRU and the gated delta rule beside attention.

Each function reads like the class it is named after in transformers/models/<family>/modeling_<family>.py (5.24).
"""

from collections.abc import Callable
from typing import Any

from foretune.models.families.dense import dense_traits, head_norms, pre_norms
from foretune.models.families.fields import Fields
from foretune.models.families.moe import expert_traits, router, shared_expert_mlp, sparse_by_step
from foretune.models.families.parts import (
    Decoder,
    Heads,
    Params,
    attention,
    decoder,
    experts,
    gated_mlp,
    heads,
    linear,
    norm,
    plain,
    stack,
    under,
)

__all__ = ["FAMILIES"]

# -- short convolutions ------------------------------------------------------------------------------------------


def lfm2(c: Fields) -> Decoder:
    """lfm2: gated short convolutions, attention in some layers; the MLP's width is adjusted."""
    return _lfm2(c, [False] * c.num_layers(), adjusted=True)


def lfm2_moe(c: Fields) -> Decoder:
    """lfm2_moe: lfm2 with experts after the first `num_dense_layers`."""
    first = c.size("num_dense_layers", low=0)
    sparse = [index >= first for index in range(c.num_layers())]
    traits = expert_traits(c, "num_experts", "num_experts_per_tok")
    return _lfm2(c, sparse, adjusted=False, has_expert_bias=c.flag("use_expert_bias"), **traits)


def _lfm2(c: Fields, sparse: list[bool], *, adjusted: bool, **more: Any) -> Decoder:
    h, hidden, count = heads(c), c.size("hidden_size"), c.num_layers()
    types = c.labels("layer_types", count) or _lfm2_types(c, count)
    bias = c.flag("conv_bias")
    convolution = (
        *plain("conv.conv.weight", hidden, 1, c.size("conv_L_cache")),
        *(plain("conv.conv.bias", hidden) if bias else ()),
        *linear("conv.in_proj", 3 * hidden, hidden, bias),
        *linear("conv.out_proj", hidden, hidden, bias),
    )
    attn = attention(c, h, out="out_proj") + head_norms(h, "q_layernorm", "k_layernorm")

    def layer(key: tuple[bool, bool]) -> Params:
        convolves, is_sparse = key
        mlp = _lfm2_experts(c, hidden) if is_sparse else _lfm2_mlp(c, hidden, adjusted)
        return (convolution if convolves else attn) + mlp + pre_norms(hidden, ("operator_norm", "ffn_norm"))

    keys = [(types[i] == "conv", sparse[i]) for i in range(count)]
    traits = dense_traits(c, h, activation="no_such_key", qk_norm="head", **more)
    is_tied = c.flag("tie_embedding") if c.has("tie_embedding") else None
    return decoder(c, stack(keys, layer), traits, final=norm("model.embedding_norm", hidden), tied=is_tied)


def _lfm2_types(c: Fields, count: int) -> tuple[str, ...]:
    full = c.integers("full_attn_idxs")
    return tuple("full_attention" if full is None or i in full else "conv" for i in range(count))


def _lfm2_mlp(c: Fields, hidden: int, adjusted: bool) -> Params:
    width = c.size("block_ff_dim") if adjusted and c.has("block_ff_dim") else c.size("intermediate_size")
    if adjusted and c.flag("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        factor = c.number("block_ffn_dim_multiplier")
        if factor is not None:
            step = c.size("block_multiple_of")
            width = step * -(-int(factor * width) // step)
    return (
        *linear("feed_forward.w1", width, hidden),
        *linear("feed_forward.w3", width, hidden),
        *linear("feed_forward.w2", hidden, width),
    )


def _lfm2_experts(c: Fields, hidden: int) -> Params:
    count = c.size("num_experts")
    stacked = experts("feed_forward.experts", count, hidden, c.size("moe_intermediate_size"))
    return stacked + router("feed_forward.gate", count, hidden)


# -- RG-LRU ------------------------------------------------------------------------------------------------------


def recurrent_gemma(c: Fields) -> Decoder:
    """recurrent_gemma: two RG-LRU blocks, one of local attention; the MLP is half of `intermediate_size`."""
    h, hidden, count = heads(c), c.size("hidden_size"), c.num_layers()
    pattern = c.raw("block_types")
    if not isinstance(pattern, (list, tuple)) or not pattern or not all(isinstance(item, str) for item in pattern):
        raise c.refuse("block_types", "not a list of recurrent and attention", "Check the config.")
    mlp = gated_mlp("mlp_block", hidden, c.size("intermediate_size") // 2, True)

    def layer(is_recurrent: bool) -> Params:
        block = _recurrent_block(c, h) if is_recurrent else _local_attention(c, h)
        mixer = under("temporal_block", block)
        return norm("temporal_pre_norm", hidden) + mixer + norm("channel_pre_norm", hidden) + mlp

    keys = [pattern[i % len(pattern)] == "recurrent" for i in range(count)]
    window = c.maybe_size("attention_window_size")
    traits = dense_traits(
        c,
        h,
        activation="hidden_activation",
        rotary=0.5,
        final_softcap=c.number("logits_soft_cap"),
        sliding_window=window,
        sliding_layers=tuple(not key for key in keys) if window else (),
    )
    return decoder(c, stack(keys, layer), traits, final=norm("model.final_norm", hidden))


def _recurrent_block(c: Fields, h: Heads) -> Params:
    hidden = c.size("hidden_size")
    lru = c.maybe_size("lru_width") or hidden
    block, kernel = lru // h.query, c.size("conv1d_width")
    gates = [
        parameter
        for name in ("input_gate", "recurrent_gate")
        for parameter in (
            *plain(f"rg_lru.{name}_weight", h.query, block, block),
            *plain(f"rg_lru.{name}_bias", h.query, block),
        )
    ]
    return (
        *linear("linear_y", lru, hidden, True),
        *linear("linear_x", lru, hidden, True),
        *linear("linear_out", hidden, lru, True),
        *plain("conv_1d.weight", lru, 1, kernel),
        *plain("conv_1d.bias", lru),
        *plain("rg_lru.recurrent_param", lru),
        *gates,
    )


def _local_attention(c: Fields, h: Heads) -> Params:
    hidden, bias = c.size("hidden_size"), c.flag("attention_bias")
    return (
        *linear("q_proj", h.query_width, hidden, bias),
        *linear("k_proj", h.kv_width, hidden, bias),
        *linear("v_proj", h.kv_width, hidden, bias),
        *linear("o_proj", hidden, h.query_width, True),
    )


# -- gated delta rule --------------------------------------------------------------------------------------------


def _delta_widths(c: Fields) -> tuple[int, int]:
    keys = c.size("linear_num_key_heads") * c.size("linear_key_head_dim")
    return keys, c.size("linear_num_value_heads") * c.size("linear_value_head_dim")


def _delta_state(c: Fields) -> Params:
    """What all delta nets begin with: a dt and an A for each value head, and the convolution over q, k and v."""
    keys, values = _delta_widths(c)
    count = c.size("linear_num_value_heads")
    return (
        *plain("dt_bias", count),
        *plain("A_log", count),
        *plain("conv1d.weight", 2 * keys + values, 1, c.size("linear_conv_kernel_dim")),
    )


def _delta_qwen3_next(c: Fields) -> Params:
    hidden, (keys, values) = c.size("hidden_size"), _delta_widths(c)
    return (
        *_delta_state(c),
        *linear("in_proj_qkvz", 2 * keys + 2 * values, hidden),
        *linear("in_proj_ba", 2 * c.size("linear_num_value_heads"), hidden),
        *norm("norm", c.size("linear_value_head_dim")),
        *linear("out_proj", hidden, values),
    )


def _delta_qwen3_5(c: Fields) -> Params:
    hidden, (keys, values) = c.size("hidden_size"), _delta_widths(c)
    count = c.size("linear_num_value_heads")
    return (
        *_delta_state(c),
        *norm("norm", c.size("linear_value_head_dim")),
        *linear("out_proj", hidden, values),
        *linear("in_proj_qkv", 2 * keys + values, hidden),
        *linear("in_proj_z", values, hidden),
        *linear("in_proj_b", count, hidden),
        *linear("in_proj_a", count, hidden),
    )


def _gated_attention(c: Fields, h: Heads) -> Params:
    """Queries carry an output gate: twice as wide."""
    hidden, bias = c.size("hidden_size"), c.flag("attention_bias")
    return (
        *linear("self_attn.q_proj", 2 * h.query_width, hidden, bias),
        *linear("self_attn.k_proj", h.kv_width, hidden, bias),
        *linear("self_attn.v_proj", h.kv_width, hidden, bias),
        *linear("self_attn.o_proj", hidden, h.query_width, bias),
        *head_norms(h),
    )


def _delta_hybrid(
    c: Fields, delta: Params, mlp: Callable[[bool], Params], sparse: list[bool], traits: dict[str, Any]
) -> Decoder:
    h, hidden, count = heads(c), c.size("hidden_size"), c.num_layers()
    interval = c.maybe_size("full_attention_interval") or 4
    types = c.labels("layer_types", count)
    types = types or tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(count))

    def layer(key: tuple[bool, bool]) -> Params:
        is_linear, is_sparse = key
        mixer = under("linear_attn", delta) if is_linear else _gated_attention(c, h)
        return mixer + mlp(is_sparse) + pre_norms(hidden)

    keys = [(types[i] == "linear_attention", sparse[i]) for i in range(count)]
    groups = c.size("linear_num_key_heads")
    all_traits = dense_traits(c, h, rotary=0.25, qk_norm="head", mixer_groups=groups, **traits)
    return decoder(c, stack(keys, layer), all_traits, final=norm("model.norm", hidden))


def qwen3_next(c: Fields) -> Decoder:
    """qwen3_next: three delta nets to one gated attention; experts as in qwen2_moe."""
    hidden = c.size("hidden_size")
    sparse = sparse_by_step(c)

    def mlp(is_sparse: bool) -> Params:
        return shared_expert_mlp(c, hidden) if is_sparse else gated_mlp("mlp", hidden, c.size("intermediate_size"))

    return _delta_hybrid(c, _delta_qwen3_next(c), mlp, sparse, expert_traits(c, "num_experts", "num_experts_per_tok"))


def qwen3_5(c: Fields) -> Decoder:
    """qwen3_5_text: qwen3_next's layers with separate delta projections and a dense MLP."""
    mlp = gated_mlp("mlp", c.size("hidden_size"), c.size("intermediate_size"))
    return _delta_hybrid(c, _delta_qwen3_5(c), lambda _: mlp, [False] * c.num_layers(), {})


def qwen3_5_moe(c: Fields) -> Decoder:
    """qwen3_5_moe_text: every layer sparse."""
    mlp = shared_expert_mlp(c, c.size("hidden_size"))
    traits = expert_traits(c, "num_experts", "num_experts_per_tok") | {
        "intermediate_size": None,
        "normalizes_experts": True,
    }
    return _delta_hybrid(c, _delta_qwen3_5(c), lambda _: mlp, [True] * c.num_layers(), traits)


FAMILIES: dict[str, Callable[[Fields], Decoder]] = {
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_5_text": qwen3_5,
    "qwen3_next": qwen3_next,
    "recurrent_gemma": recurrent_gemma,
}
