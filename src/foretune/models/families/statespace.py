"""State-space models and their mixtures with attention: Mamba 1 and 2, alone, in turn or side by side.

Each function reads like the class it is named after in transformers/models/<family>/modeling_<family>.py (5.24).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from foretune.models.families.dense import dense_traits, pre_norms
from foretune.models.families.fields import MAX_LAYERS, Fields
from foretune.models.families.moe import expert_traits, router
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
    two_layer_mlp,
    under,
)
from foretune.models.shape import DecoderTraits

__all__ = ["FAMILIES"]

# -- Mamba 1 -----------------------------------------------------------------------------------------------------


class _Mamba1(NamedTuple):
    hidden: int
    inner: int
    state: int
    rank: int
    kernel: int
    bias: bool
    conv_bias: bool


def _time_step_rank(c: Fields, key: str, hidden: int) -> int:
    return -(-hidden // 16) if c.raw(key) == "auto" else c.size(key)


def _mamba1(m: _Mamba1) -> Params:
    """The selective state-space mixer: convolution, input-dependent dt, B and C."""
    return (
        *plain("A_log", m.inner, m.state),
        *plain("D", m.inner),
        *plain("conv1d.weight", m.inner, 1, m.kernel),
        *(plain("conv1d.bias", m.inner) if m.conv_bias else ()),
        *linear("in_proj", 2 * m.inner, m.hidden, m.bias),
        *linear("x_proj", m.rank + 2 * m.state, m.inner),
        *linear("dt_proj", m.inner, m.rank, True),
        *linear("out_proj", m.hidden, m.inner, m.bias),
    )


def mamba(c: Fields) -> Decoder:
    """mamba, falcon_mamba: the inner width is expand * hidden, unless `intermediate_size` is stated."""
    hidden = c.size("hidden_size")
    mixer = _Mamba1(
        hidden,
        _inner(c, "expand", hidden),
        c.size("state_size"),
        _time_step_rank(c, "time_step_rank", hidden),
        c.size("conv_kernel"),
        c.flag("use_bias"),
        c.flag("use_conv_bias"),
    )
    if c.has("intermediate_size"):
        # No field of the class, so it is set last, after expand * hidden (configuration_mamba.py, __post_init__).
        mixer = mixer._replace(inner=c.size("intermediate_size"))
    return _backbone(c, norm("norm", hidden) + under("mixer", _mamba1(mixer)), mixer.inner)


def _inner(c: Fields, key: str, hidden: int) -> int:
    factor = c.number(key)
    if factor is None or factor <= 0:
        raise c.refuse(key, "not a positive number", "Take it from the model's config; it is usually 2.")
    return max(int(factor * hidden), 1)


def _backbone(c: Fields, layer: Params, inner: int, **more: Any) -> Decoder:
    hidden = c.size("hidden_size")
    traits = DecoderTraits(hidden_size=hidden, intermediate_size=inner, activation=c.text("hidden_act"), **more)
    return decoder(
        c,
        stack([0] * c.num_layers(), lambda _: layer),
        traits,
        embed="backbone.embeddings",
        prefix="backbone.layers.",
        final=norm("backbone.norm_f", hidden),
    )


def jamba(c: Fields) -> Decoder:
    """jamba: attention every `attn_layer_period`, experts every `expert_layer_period`, norms inside the mixer."""
    h, hidden, count = heads(c), c.size("hidden_size"), c.num_layers()
    rank, state = _time_step_rank(c, "mamba_dt_rank", hidden), c.size("mamba_d_state")
    inner = c.size("mamba_expand") * hidden
    mixer = _Mamba1(
        hidden, inner, state, rank, c.size("mamba_d_conv"), c.flag("mamba_proj_bias"), c.flag("mamba_conv_bias")
    )
    norms = norm("dt_layernorm", rank) + norm("b_layernorm", state) + norm("c_layernorm", state)
    width, num_experts = c.size("intermediate_size"), c.size("num_experts")
    sparse_mlp = router("feed_forward.router", num_experts, hidden) + experts(
        "feed_forward.experts", num_experts, hidden, width
    )

    def layer(key: tuple[bool, bool]) -> Params:
        attends, is_sparse = key
        mix = attention(c, h) if attends else under("mamba", _mamba1(mixer) + norms)
        mlp = sparse_mlp if is_sparse and num_experts > 1 else gated_mlp("feed_forward", hidden, width)
        return mix + mlp + pre_norms(hidden, ("input_layernorm", "pre_ff_layernorm"))

    keys = [
        (
            i % c.size("attn_layer_period") == c.size("attn_layer_offset", low=0),
            i % c.size("expert_layer_period") == c.size("expert_layer_offset", low=0),
        )
        for i in range(count)
    ]
    traits = dense_traits(c, h, rotary=None, **expert_traits(c, "num_experts", "num_experts_per_tok"))
    return decoder(c, stack(keys, layer), traits, final=norm("model.final_layernorm", hidden))


# -- Mamba 2 -----------------------------------------------------------------------------------------------------


class _Mamba2(NamedTuple):
    hidden: int
    inner: int
    heads: int
    groups: int
    state: int
    kernel: int
    bias: bool
    conv_bias: bool
    has_norm: bool = True
    out_bias: bool | None = None


def _mamba2(m: _Mamba2) -> Params:
    """The state-space duality mixer: one dt, A and D for each head; a gated norm."""
    convolved = m.inner + 2 * m.groups * m.state
    return (
        *plain("dt_bias", m.heads),
        *plain("A_log", m.heads),
        *plain("D", m.heads),
        *plain("conv1d.weight", convolved, 1, m.kernel),
        *(plain("conv1d.bias", convolved) if m.conv_bias else ()),
        *linear("in_proj", m.inner + convolved + m.heads, m.hidden, m.bias),
        *(norm("norm", m.inner) if m.has_norm else ()),
        *linear("out_proj", m.hidden, m.inner, m.bias if m.out_bias is None else m.out_bias),
    )


def mamba2(c: Fields) -> Decoder:
    """mamba2: the gated norm is there whatever `rms_norm` says."""
    hidden = c.size("hidden_size")
    inner = _inner(c, "expand", hidden)
    mixer = _Mamba2(
        hidden,
        inner,
        c.size("num_heads"),
        c.size("n_groups"),
        c.size("state_size"),
        c.size("conv_kernel"),
        c.flag("use_bias"),
        c.flag("use_conv_bias"),
    )
    more: dict[str, Any] = {"mixer_groups": mixer.groups, "mixer_width": inner, "mixer_chunk": c.size("chunk_size")}
    more["residual_in_32bit"] = c.flag("residual_in_fp32")
    return _backbone(c, norm("norm", hidden) + under("mixer", _mamba2(mixer)), inner, **more)


def _prefixed_mamba2(c: Fields, inner: int, **changes: Any) -> _Mamba2:
    """The mixer of the hybrids that name its settings `mamba_*`."""
    mixer = _Mamba2(
        c.size("hidden_size"),
        inner,
        c.size("mamba_n_heads"),
        c.size("mamba_n_groups"),
        c.size("mamba_d_state"),
        c.size("mamba_d_conv"),
        c.flag("mamba_proj_bias"),
        c.flag("mamba_conv_bias"),
    )
    return mixer._replace(**changes)


def _prefixed_traits(c: Fields, inner: int) -> dict[str, Any]:
    groups, chunk = c.size("mamba_n_groups"), c.size("mamba_chunk_size")
    return {"mixer_groups": groups, "mixer_width": inner, "mixer_chunk": chunk}


def granitemoehybrid(c: Fields) -> Decoder:
    """granitemoehybrid: optional experts, a fused shared MLP, then Mamba 2 or attention."""
    h, hidden, count = heads(c), c.size("hidden_size"), c.num_layers()
    types = c.labels("layer_types", count) or ("linear_attention",) * count
    num_experts, shared = c.maybe_size("num_local_experts", low=0) or 0, c.size("shared_intermediate_size")
    moe: Params = ()
    if num_experts:
        moe = router("block_sparse_moe.router", num_experts, hidden) + experts(
            "block_sparse_moe.experts", num_experts, hidden, c.size("intermediate_size")
        )
    common = (
        *pre_norms(hidden),
        *moe,
        *linear("shared_mlp.input_linear", 2 * shared, hidden),
        *linear("shared_mlp.output_linear", hidden, shared),
    )

    def layer(kind: str) -> Params:
        if kind != "linear_attention":
            return common + attention(c, h, bias=c.flag("attention_bias"))
        return common + under("mamba", _mamba2(_prefixed_mamba2(c, c.size("mamba_expand") * hidden)))

    has_rope = c.text("position_embedding_type") == "rope"
    traits = dense_traits(
        c,
        h,
        rotary=1.0 if has_rope else None,
        intermediate_size=shared,
        **_prefixed_traits(c, c.size("mamba_expand") * hidden),
        **expert_traits(c, "num_local_experts", "num_experts_per_tok"),
    )
    return decoder(c, stack(types, layer), traits, final=norm("model.norm", hidden))


def bamba(c: Fields) -> Decoder:
    """bamba: Mamba 2 with attention at `attn_layer_indices`."""
    h, hidden, count = heads(c), c.size("hidden_size"), c.num_layers()
    at = set(c.integers("attn_layer_indices") or ())
    mlp = gated_mlp("feed_forward", hidden, c.size("intermediate_size"), c.flag("mlp_bias"))
    common = mlp + pre_norms(hidden, ("input_layernorm", "pre_ff_layernorm"))

    def layer(attends: bool) -> Params:
        if attends:
            return common + attention(c, h, bias=c.flag("attention_bias"))
        return common + under("mamba", _mamba2(_prefixed_mamba2(c, c.size("mamba_expand") * hidden)))

    kinds = stack([i in at for i in range(count)], layer)
    traits = dense_traits(c, h, rotary=0.5, **_prefixed_traits(c, c.size("mamba_expand") * hidden))
    return decoder(c, kinds, traits, final=norm("model.final_layernorm", hidden))


def falcon_h1(c: Fields) -> Decoder:
    """falcon_h1: Mamba 2 and attention side by side in every layer."""
    h, hidden = heads(c), c.size("hidden_size")
    inner = c.maybe_size("mamba_d_ssm") or c.size("mamba_expand") * hidden
    mixer = _prefixed_mamba2(c, inner, has_norm=c.flag("mamba_rms_norm"), out_bias=c.flag("projectors_bias"))
    layer = (
        *gated_mlp("feed_forward", hidden, c.size("intermediate_size"), c.flag("mlp_bias")),
        *under("mamba", _mamba2(mixer)),
        *attention(c, h, bias=c.flag("attention_bias")),
        *pre_norms(hidden, ("input_layernorm", "pre_ff_layernorm")),
    )
    kinds = stack([0] * c.num_layers(), lambda _: layer)
    projection = 2 * inner + 2 * mixer.groups * mixer.state + mixer.heads
    more: dict[str, Any] = {"mixer_projection": projection, "norms_before_gate": c.flag("mamba_norm_before_gate")}
    traits = dense_traits(c, h, **more, **_prefixed_traits(c, inner))
    return decoder(c, kinds, traits, final=norm("model.final_layernorm", hidden))


_NEMOTRON_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def nemotron_h(c: Fields) -> Decoder:
    """nemotron_h: each layer is one of Mamba 2, attention, MLP or experts, by a pattern that sets the depth."""
    h, hidden = heads(c), c.size("hidden_size")
    kinds = stack(_nemotron_types(c), lambda kind: norm("norm", hidden) + under("mixer", _nemotron_mixer(c, h, kind)))
    experts_here = expert_traits(c, "n_routed_experts", "num_experts_per_tok")
    groups = _renamed_size(c, "mamba_n_groups", "n_groups")
    chunk = _renamed_size(c, "mamba_chunk_size", "chunk_size")
    inner = c.size("mamba_num_heads") * c.size("mamba_head_dim")
    more = {**experts_here, "mixer_groups": groups, "mixer_width": inner, "mixer_chunk": chunk}
    traits = dense_traits(c, h, rotary=None, activation="mlp_hidden_act", **more)
    # `_tied_weights_keys` is empty: the head keeps a weight of its own (modeling_nemotron_h.py, NemotronHForCausalLM).
    return decoder(c, kinds, traits, embed="model.embeddings", final=norm("model.norm_f", hidden), tied=False)


def _nemotron_types(c: Fields) -> tuple[str, ...]:
    types = c.raw("layers_block_type")
    pattern = c.text("hybrid_override_pattern")
    if types is not None:
        count = len(types) if isinstance(types, list) else 0
        stated = c.labels("layers_block_type", count) or ()
    elif pattern is not None:
        if not set(pattern) <= set(_NEMOTRON_LETTERS):
            raise c.refuse("hybrid_override_pattern", "with letters other than M, E, * and -", "Check the config.")
        stated = tuple(_NEMOTRON_LETTERS[letter] for letter in pattern)
    else:
        stated = ("linear_attention", "moe", "full_attention", "mlp")
    if not 1 <= len(stated) <= MAX_LAYERS:
        key = "layers_block_type" if types is not None else "hybrid_override_pattern"
        raise c.refuse(key, f"which makes {len(stated)} layers", f"A model has 1 to {MAX_LAYERS} layers.")
    return stated


def _renamed_size(c: Fields, old: str, name: str) -> int:
    return c.size(old) if c.has(old) else c.size(name)


def _nemotron_mixer(c: Fields, h: Heads, kind: str) -> Params:
    hidden, bias = c.size("hidden_size"), c.flag("mlp_bias")
    if kind == "full_attention":
        return _unnamed_attention(c, h)
    if kind == "mlp":
        return two_layer_mlp("up_proj", "down_proj", hidden, c.size("intermediate_size"), bias)
    if kind == "moe":
        return _nemotron_experts(c, hidden, bias)
    if kind != "linear_attention":
        raise c.refuse("layers_block_type", f"with {kind!r}, unknown to Nemotron-H", "Use mamba, attention, mlp, moe.")
    count = c.size("mamba_num_heads")
    conv_bias = c.flag("mamba_conv_bias") if c.has("mamba_conv_bias") else c.flag("use_conv_bias")
    return _mamba2(
        _Mamba2(
            hidden,
            count * c.size("mamba_head_dim"),
            count,
            _renamed_size(c, "mamba_n_groups", "n_groups"),
            c.size("ssm_state_size"),
            _renamed_size(c, "mamba_d_conv", "conv_kernel"),
            c.flag("use_bias"),
            conv_bias,
        )
    )


def _unnamed_attention(c: Fields, h: Heads) -> Params:
    hidden = c.size("hidden_size")
    return (
        *linear("q_proj", h.query_width, hidden),
        *linear("k_proj", h.kv_width, hidden),
        *linear("v_proj", h.kv_width, hidden),
        *linear("o_proj", hidden, h.query_width),
    )


def _nemotron_experts(c: Fields, hidden: int, bias: bool) -> Params:
    count, width, latent = c.size("n_routed_experts"), c.size("moe_intermediate_size"), c.maybe_size("moe_latent_size")
    inner = latent or hidden
    shared = c.size("moe_shared_expert_intermediate_size")
    latents: Params = ()
    if latent is not None:
        latents = linear("fc1_latent_proj", latent, hidden, bias) + linear("fc2_latent_proj", hidden, latent, bias)
    return (
        *plain("experts.up_proj", count, width, inner, role="experts"),
        *plain("experts.down_proj", count, inner, width, role="experts"),
        *router("gate", count, hidden),
        *two_layer_mlp("shared_experts.up_proj", "shared_experts.down_proj", hidden, shared, bias),
        *latents,
    )


FAMILIES: dict[str, Callable[[Fields], Decoder]] = {
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "falcon_mamba": mamba,
    "granitemoehybrid": granitemoehybrid,
    "jamba": jamba,
    "mamba": mamba,
    "mamba2": mamba2,
    "nemotron_h": nemotron_h,
}
