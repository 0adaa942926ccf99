"""The Gemma family: wide heads, sandwich norms, windows, per-layer embeddings and layers that share keys and values.

Each function reads like the class it is named after in transformers/models/<family>/modeling_<family>.py (5.24).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from foretune.models.families.dense import alternating, dense_traits, every, head_norms, pre_norms, windowed
from foretune.models.families.fields import Fields
from foretune.models.families.parts import (
    Decoder,
    Heads,
    Params,
    attention,
    decoder,
    embedding,
    experts,
    gated_mlp,
    heads,
    linear,
    norm,
    outside,
    plain,
    stack,
    under,
)

__all__ = ["FAMILIES"]

_SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _softcaps(c: Fields) -> dict[str, Any]:
    return {
        "attention_softcap": c.number("attn_logit_softcapping"),
        "final_softcap": c.number("final_logit_softcapping"),
    }


def _alike(c: Fields, h: Heads, layer: Params, **traits: Any) -> Decoder:
    kinds = stack([0] * c.num_layers(), lambda _: layer)
    final = norm("model.norm", c.size("hidden_size"))
    return decoder(c, kinds, dense_traits(c, h, activation="hidden_activation", **traits), final=final)


def _attention_and_mlp(c: Fields, h: Heads, qk_norm: Params = ()) -> Params:
    mlp = gated_mlp("mlp", c.size("hidden_size"), c.size("intermediate_size"))
    return attention(c, h, bias=c.flag("attention_bias")) + qk_norm + mlp


def gemma(c: Fields) -> Decoder:
    """gemma: llama with a head width of its own and a tied head by default."""
    h = heads(c)
    built = _alike(c, h, _attention_and_mlp(c, h) + pre_norms(c.size("hidden_size")))
    # The class replaces the legacy `gelu` by its tanh approximation (configuration_gemma.py, __post_init__).
    stated = c.text("hidden_activation") or c.text("hidden_act") or "gelu_pytorch_tanh"
    activation = "gelu_pytorch_tanh" if stated == "gelu" else stated
    return built._replace(traits=built.traits.with_(activation=activation))


def gemma2(c: Fields) -> Decoder:
    """gemma2: four norms a layer, soft caps, every other layer in a window."""
    h = heads(c)
    layer = _attention_and_mlp(c, h) + pre_norms(c.size("hidden_size"), _SANDWICH)
    window = windowed(c, alternating(c, every(c, 2)), c.maybe_size("sliding_window"))
    return _alike(c, h, layer, **_softcaps(c), **window)


def vaultgemma(c: Fields) -> Decoder:
    """vaultgemma: gemma2 without the norms after attention and MLP."""
    h = heads(c)
    layer = _attention_and_mlp(c, h) + pre_norms(c.size("hidden_size"), (_SANDWICH[0], _SANDWICH[2]))
    window = windowed(c, alternating(c, every(c, 2)), c.maybe_size("sliding_window"))
    return _alike(c, h, layer, **_softcaps(c), **window)


def gemma3(c: Fields) -> Decoder:
    """gemma3_text: gemma2 with q and k norms; five layers of six in a window."""
    h = heads(c)
    layer = _attention_and_mlp(c, h, head_norms(h)) + pre_norms(c.size("hidden_size"), _SANDWICH)
    window = c.maybe_size("sliding_window")
    if window and c.flag("use_bidirectional_attention"):
        window = window // 2 + 1
    types = alternating(c, every(c, c.maybe_size("sliding_window_pattern") or 6))
    return _alike(c, h, layer, qk_norm="head", **_softcaps(c), **windowed(c, types, window))


# -- Gemma 3n ----------------------------------------------------------------------------------------------------


def gemma3n(c: Fields) -> Decoder:
    """gemma3n_text: AltUp, LAuReL, per-layer embeddings; the last layers take keys and values from earlier ones."""
    h, hidden, count = heads(c), c.size("hidden_size"), c.num_layers()
    widths = _widths(c, count)
    shared = _num_shared(c, count)
    types = alternating(c, every(c, 5))
    keys = [(index >= count - shared, widths[index]) for index in range(count)]
    kinds = stack(keys, lambda key: _gemma3n_layer(c, h, key[0], key[1]))
    traits = dense_traits(
        c,
        h,
        activation="hidden_activation",
        intermediate_size=widths[0],
        qk_norm="head",
        final_softcap=c.number("final_logit_softcapping"),
        sparse_layers=_sparse_layers(c, count),
        flags=_altup_flags(c),
        **windowed(c, types, c.maybe_size("sliding_window")),
    )
    inputs = c.size("altup_num_inputs")
    if inputs > 64:
        raise c.refuse("altup_num_inputs", "more parallel streams than any model has", "Check the config; it is 4.")
    streams = [
        linear(f"model.{name}.{i}", hidden, hidden)
        for name in ("altup_projections", "altup_unembed_projections")
        for i in range(inputs - 1)
    ]
    after = _per_layer_inputs(c, hidden, count) + tuple(
        parameter for stream in streams for parameter in outside(stream)
    )
    return decoder(c, kinds, traits, final=norm("model.norm", hidden), after=after)


def _num_shared(c: Fields, count: int) -> int:
    shared = c.maybe_size("num_kv_shared_layers", low=0) or 0
    if shared > count:
        raise c.refuse("num_kv_shared_layers", f"more than the {count} layers there are", "Check the config.")
    return shared


def _sparse_layers(c: Fields, count: int) -> tuple[bool, ...]:
    """Read `activation_sparsity_pattern`; by default the first ten layers of a model with more are sparse."""
    stated = c.raw("activation_sparsity_pattern")
    if stated is None:
        return tuple(count > 10 and i < 10 for i in range(count))
    is_right = isinstance(stated, (list, tuple)) and len(stated) == count
    if not is_right or not all(type(share) in (int, float) for share in stated):
        raise c.refuse(
            "activation_sparsity_pattern", f"not one number for each of {count} layers", "Write one a layer."
        )
    return tuple(share > 0 for share in stated)


def _altup_flags(c: Fields) -> tuple[str, ...]:
    """Coefficients are clipped in training, and the first prediction is scaled, unless the config says otherwise."""
    clips = not c.states("altup_coef_clip") or c.number("altup_coef_clip") is not None
    scales = not c.states("altup_correct_scale") or c.flag("altup_correct_scale")
    return (("altup_coef_clip",) if clips else ()) + (("altup_correct_scale",) if scales else ())


def _widths(c: Fields, count: int) -> tuple[int, ...]:
    """Read `intermediate_size`, which may be one number or one for each layer."""
    if not isinstance(c.raw("intermediate_size"), (list, tuple)):
        return (c.size("intermediate_size"),) * count
    widths = c.integers("intermediate_size", low=1) or ()
    if len(widths) != count:
        raise c.refuse("intermediate_size", f"with {len(widths)} entries for {count} layers", "Write one a layer.")
    return widths


def _per_layer_inputs(c: Fields, hidden: int, count: int) -> Params:
    """The embedding that feeds every layer, its projection and its norm."""
    width = c.maybe_size("hidden_size_per_layer_input", low=0)
    if not width:
        return ()
    return (
        *embedding("model.embed_tokens_per_layer", c.size("vocab_size_per_layer_input"), count * width),
        *outside(linear("model.per_layer_model_projection", count * width, hidden)),
        *norm("model.per_layer_projection_norm", width),
    )


def _per_layer_gate(c: Fields, hidden: int) -> Params:
    width = c.maybe_size("hidden_size_per_layer_input", low=0)
    if not width:
        return ()
    return (
        *linear("per_layer_input_gate", width, hidden),
        *linear("per_layer_projection", hidden, width),
        *norm("post_per_layer_input_norm", hidden),
    )


def _gemma3n_layer(c: Fields, h: Heads, is_shared: bool, width: int) -> Params:
    hidden, bias = c.size("hidden_size"), c.flag("attention_bias")
    inputs, rank = c.size("altup_num_inputs"), c.size("laurel_rank")
    own_kv: Params = ()
    if not is_shared:
        own_kv = (
            *linear("k_proj", h.kv_width, hidden, bias),
            *linear("v_proj", h.kv_width, hidden, bias),
            *norm("k_norm", h.dim),
        )
    attn = (
        *linear("q_proj", h.query_width, hidden, bias),
        *norm("q_norm", h.dim),
        *own_kv,
        *linear("o_proj", hidden, h.query_width, bias),
    )
    altup = (
        *plain("correct_output_scale", hidden),
        *linear("correction_coefs", inputs, inputs),
        *linear("prediction_coefs", inputs * inputs, inputs),
        *linear("modality_router", inputs, hidden),
        *norm("router_norm", hidden),
    )
    laurel = (
        *linear("linear_left", rank, hidden),
        *linear("linear_right", hidden, rank),
        *norm("post_laurel_norm", hidden),
    )
    return (
        *under("self_attn", attn),
        *gated_mlp("mlp", hidden, width),
        *pre_norms(hidden, _SANDWICH),
        *under("altup", altup),
        *under("laurel", laurel),
        *_per_layer_gate(c, hidden),
    )


# -- Gemma 4 -----------------------------------------------------------------------------------------------------


class _Gemma4Layer(NamedTuple):
    is_full: bool
    is_shared: bool


def gemma4(c: Fields) -> Decoder:
    """gemma4_text: full layers have wider heads (and, by flag, keys that serve as values); the last share k and v."""
    h, hidden, count = heads(c), c.size("hidden_size"), c.num_layers()
    if c.has("per_layer_config"):
        raise c.refuse("per_layer_config", "which foretune does not read", "Use global_head_dim and layer_types.")
    types = list(alternating(c, every(c, 6)))
    types[-1] = "full_attention"
    shared = _num_shared(c, count)
    keys = [_Gemma4Layer(types[i] == "full_attention", i >= count - shared) for i in range(count)]
    is_moe = c.flag("enable_moe_block")
    traits = dense_traits(
        c,
        h,
        activation="hidden_activation",
        qk_norm="head",
        final_softcap=c.number("final_logit_softcapping"),
        num_experts=c.maybe_size("num_experts") if is_moe else None,
        experts_per_token=c.maybe_size("top_k_experts") if is_moe else None,
        global_rotary_dim=c.maybe_size("global_head_dim") or 512,
        flags=_gemma4_flags(c),
        **windowed(c, types, c.maybe_size("sliding_window")),
    )
    kinds = stack(keys, lambda key: _gemma4_layer(c, h, key))
    return decoder(c, kinds, traits, final=norm("model.norm", hidden), after=_per_layer_inputs(c, hidden, count))


def _gemma4_flags(c: Fields) -> tuple[str, ...]:
    has_inputs = bool(c.maybe_size("hidden_size_per_layer_input", low=0))
    named = {"hidden_size_per_layer_input": has_inputs}
    named |= {name: c.flag(name) for name in ("attention_k_eq_v", "enable_moe_block")}
    return tuple(name for name, is_on in named.items() if is_on)


def _gemma4_layer(c: Fields, h: Heads, key: _Gemma4Layer) -> Params:
    hidden = c.size("hidden_size")
    width = c.size("intermediate_size") * (2 if c.flag("use_double_wide_mlp") and key.is_shared else 1)
    return (
        *under("self_attn", _gemma4_attention(c, h, key)),
        *gated_mlp("mlp", hidden, width),
        *pre_norms(hidden, _SANDWICH),
        *_per_layer_gate(c, hidden),
        *(_gemma4_experts(c, hidden) if c.flag("enable_moe_block") else ()),
    )


def _gemma4_attention(c: Fields, h: Heads, key: _Gemma4Layer) -> Params:
    hidden, bias, keys_are_values = c.size("hidden_size"), c.flag("attention_bias"), c.flag("attention_k_eq_v")
    if key.is_full:
        wide_kv = c.maybe_size("num_global_key_value_heads") if keys_are_values else None
        h = Heads(h.query, wide_kv or h.kv, c.maybe_size("global_head_dim") or 512)
    own_kv: Params = ()
    if not key.is_shared:
        own_kv = norm("k_norm", h.dim) + linear("k_proj", h.kv_width, hidden, bias)
        if not (keys_are_values and key.is_full):
            own_kv += linear("v_proj", h.kv_width, hidden, bias)
    return (
        *linear("q_proj", h.query_width, hidden, bias),
        *norm("q_norm", h.dim),
        *own_kv,
        *linear("o_proj", hidden, h.query_width, bias),
    )


def _gemma4_experts(c: Fields, hidden: int) -> Params:
    count = c.size("num_experts")
    return (
        *plain("router.scale", hidden),
        *plain("router.per_expert_scale", count),
        *linear("router.proj", count, hidden),
        *experts("experts", count, hidden, c.size("moe_intermediate_size")),
        *pre_norms(
            hidden, ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
        ),
    )


FAMILIES: dict[str, Callable[[Fields], Decoder]] = {
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma3n_text": gemma3n,
    "gemma4_text": gemma4,
    "vaultgemma": vaultgemma,
}
