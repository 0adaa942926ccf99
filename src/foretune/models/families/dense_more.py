"""More dense decoders of the Llama kind, each one step away from a family of `dense`.

Each function reads like the class it is named after in transformers/models/<family>/modeling_<family>.py (5.24).
"""

from collections.abc import Callable
from typing import Any

from foretune.models.families.dense import alternating, head_norms, logits_factor, pre_norms, uniform, windowed
from foretune.models.families.fields import Fields
from foretune.models.families.parts import (
    Decoder,
    Heads,
    Params,
    attention,
    gated_mlp,
    heads,
    norm,
    plain,
    two_layer_mlp,
)

__all__ = ["FAMILIES"]

_PAIR = ("input_layernorm", "post_attention_layernorm")


def cwm(c: Fields) -> Decoder:
    """cwm: llama without attention biases; every fourth layer from the first attends to everything."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"), c.flag("mlp_bias"))
    layer = (*attention(c, h), *mlp, *pre_norms(hidden))
    types = alternating(c, lambda index: index % 4 == 0)
    return uniform(c, h, layer, **windowed(c, types, c.maybe_size("sliding_window")))


def granite_swa(c: Fields) -> Decoder:
    """granite_swa: granite with attention sinks; every fourth layer from the first attends to everything."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"), c.flag("mlp_bias"))
    attn = plain("self_attn.sinks", h.query) + attention(c, h, bias=c.flag("attention_bias"))
    types = alternating(c, lambda index: index % 4 == 0)
    window = windowed(c, types, c.maybe_size("sliding_window"))
    more = window | logits_factor(c, "logits_scaling", 1.0)
    return uniform(c, h, (*attn, *mlp, *pre_norms(hidden)), rotary_bases=_rotary_bases(c), **more)


def _rotary_bases(c: Fields) -> tuple[float, ...]:
    """Read `layer_rope_theta`; where it is not stated, one base serves all layers."""
    stated = c.raw("layer_rope_theta")
    if stated is None:
        return ()
    is_list = isinstance(stated, list) and all(type(base) in (int, float) for base in stated)
    if not is_list or len(stated) != c.num_layers():
        raise c.refuse("layer_rope_theta", "not one number for each layer", "Write one number a layer, or null.")
    return tuple(float(base) for base in stated)


def hyperclovax(c: Fields) -> Decoder:
    """hyperclovax: llama with norms after attention and MLP, by flag."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"), c.flag("mlp_bias"))
    post = pre_norms(hidden, ("post_norm1", "post_norm2")) if c.flag("use_post_norm") else ()
    layer = (*attention(c, h, bias=c.flag("attention_bias")), *mlp, *pre_norms(hidden), *post)
    return uniform(c, h, layer, **logits_factor(c, "logits_scaling", 1.0))


def jais2(c: Fields) -> Decoder:
    """jais2: LayerNorm with bias and an MLP without a gate."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = two_layer_mlp("mlp.up_proj", "mlp.down_proj", hidden, c.size("intermediate_size"), c.flag("mlp_bias"))
    layer = (*attention(c, h, bias=c.flag("attention_bias")), *mlp, *pre_norms(hidden, bias=True))
    return uniform(c, h, layer, final=norm("model.norm", hidden, bias=True))


def nanochat(c: Fields) -> Decoder:
    """nanochat: norms without parameters, an MLP without a gate."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = two_layer_mlp("mlp.fc1", "mlp.fc2", hidden, c.size("intermediate_size"))
    layer = (*attention(c, h, bias=c.flag("attention_bias")), *mlp)
    return uniform(c, h, layer, final=(), qk_norm="head", final_softcap=c.number("final_logit_softcapping"))


def apertus(c: Fields) -> Decoder:
    """apertus: MLP without a gate; the xIELU activation has two learned numbers."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = two_layer_mlp("mlp.up_proj", "mlp.down_proj", hidden, c.size("intermediate_size"))
    xielu: Params = ()
    if c.text("hidden_act") == "xielu":
        xielu = plain("mlp.act_fn.alpha_p", 1) + plain("mlp.act_fn.alpha_n", 1)
    norms = pre_norms(hidden, ("attention_layernorm", "feedforward_layernorm"))
    layer = (*attention(c, h, bias=c.flag("attention_bias")), *head_norms(h), *mlp, *xielu, *norms)
    return uniform(c, h, layer, qk_norm="head")


def starcoder2(c: Fields) -> Decoder:
    """starcoder2: LayerNorm with bias, MLP without a gate."""
    h, hidden, bias = heads(c), c.size("hidden_size"), c.flag("use_bias")
    mlp = two_layer_mlp("mlp.c_fc", "mlp.c_proj", hidden, c.size("intermediate_size"), bias)
    layer = (*attention(c, h, bias=bias), *mlp, *pre_norms(hidden, bias=True))
    window = windowed(c, ["sliding_attention"] * c.num_layers(), c.maybe_size("sliding_window"))
    dropouts = ("embedding_dropout", "attention_dropout", "residual_dropout")
    return uniform(c, h, layer, final=norm("model.norm", hidden, bias=True), dropouts=dropouts, **window)


def stablelm(c: Fields) -> Decoder:
    """stablelm: LayerNorm with bias; norms apart for every head where `qk_layernorm`; parallel residual by flag."""
    h, hidden, is_parallel = heads(c, stated_dim=False), c.size("hidden_size"), c.flag("use_parallel_residual")
    per_head: Params = ()
    if c.flag("qk_layernorm"):
        _refuse_many_heads(c, h)
        queries = [norm(f"self_attn.q_layernorm.norms.{i}", h.dim) for i in range(h.query)]
        keys = [norm(f"self_attn.k_layernorm.norms.{i}", h.dim) for i in range(h.kv)]
        per_head = tuple(parameter for one in (*queries, *keys) for parameter in one)
    attn = attention(c, h, bias=c.flag("use_qkv_bias"), out_bias=False) + per_head
    norms = pre_norms(hidden, _PAIR[:1] if is_parallel else _PAIR, bias=True)
    layer = (*attn, *gated_mlp("mlp", hidden, c.size("intermediate_size")), *norms)
    more: dict[str, Any] = {"qk_norm": "head" if per_head else None, "has_parallel_residual": is_parallel}
    more["dropouts"] = (None, "attention_dropout", "hidden_dropout")
    return uniform(c, h, layer, final=norm("model.norm", hidden, bias=True), rotary=0.25, **more)


def _refuse_many_heads(c: Fields, h: Heads) -> None:
    if max(h.query, h.kv) > 4096:
        raise c.refuse("num_attention_heads", "more heads than any model has", "Check the config.")


FAMILIES: dict[str, Callable[[Fields], Decoder]] = {
    "apertus": apertus,
    "cwm": cwm,
    "granite_swa": granite_swa,
    "hyperclovax": hyperclovax,
    "jais2": jais2,
    "nanochat": nanochat,
    "stablelm": stablelm,
    "starcoder2": starcoder2,
}
