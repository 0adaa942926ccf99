"""Dense decoders of the Llama kind: separate projections, two or four norms a layer, rotary positions.

Each function reads like the class it is named after in transformers/models/<family>/modeling_<family>.py (5.24).
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from foretune.models.families.fields import Fields
from foretune.models.families.parts import (
    Decoder,
    Heads,
    Params,
    attention,
    decoder,
    gated_mlp,
    heads,
    linear,
    norm,
    rotary_dim,
    rotary_type,
    stack,
    two_layer_mlp,
)
from foretune.models.shape import DecoderTraits

__all__ = [
    "FAMILIES",
    "alternating",
    "dense_traits",
    "full_width_norms",
    "head_norms",
    "logits_factor",
    "pre_norms",
    "uniform",
    "windowed",
]

_PAIR = ("input_layernorm", "post_attention_layernorm")


def pre_norms(hidden: int, names: Sequence[str] = _PAIR, bias: bool = False) -> Params:
    """The layer's norms over the hidden width."""
    return tuple(parameter for name in names for parameter in norm(name, hidden, bias=bias))


def head_norms(h: Heads, q: str = "q_norm", k: str = "k_norm") -> Params:
    """Norms on queries and keys over the width of one head (Qwen3, Gemma 3, Apertus)."""
    return norm(f"self_attn.{q}", h.dim) + norm(f"self_attn.{k}", h.dim)


def full_width_norms(h: Heads) -> Params:
    """Norms on queries and keys over the whole projection (OLMo2)."""
    return norm("self_attn.q_norm", h.query_width) + norm("self_attn.k_norm", h.kv_width)


def windowed(c: Fields, layer_types: Sequence[str], window: int | None) -> dict[str, Any]:
    """The traits of a model some of whose layers attend within a window only; none do where there is no window."""
    flags = tuple(kind == "sliding_attention" for kind in layer_types)
    if window is None or not any(flags):
        return {}
    return {"sliding_window": window, "sliding_layers": flags}


_ATTENTION_KINDS = ("full_attention", "sliding_attention")


def alternating(c: Fields, full: Callable[[int], bool]) -> tuple[str, ...]:
    """Read `layer_types`; where they are not stated, the layers for which `full(index)` holds attend to everything."""
    count = c.num_layers()
    stated = c.labels("layer_types", count)
    for label in stated or ():
        if label not in _ATTENTION_KINDS:
            why = f"with the entry {label[:40]!r}, which this family does not have"
            raise c.error("layer_types", list(stated or ()), why, f"It has {' and '.join(_ATTENTION_KINDS)}.")
    return stated or tuple("full_attention" if full(i) else "sliding_attention" for i in range(count))


def every(c: Fields, pattern: int) -> Callable[[int], bool]:
    """Every `pattern`-th layer; a pattern of 0 marks none."""
    return lambda index: pattern > 0 and (index + 1) % pattern == 0


ATTENTION_DROPOUT = (None, "attention_dropout", None)
"""The usual keys of the dropouts on embedding, attention probabilities and residual branches."""


def dense_traits(
    c: Fields,
    h: Heads,
    *,
    rotary: float | None = 1.0,
    activation: str = "hidden_act",
    dropouts: Sequence[str | None] = ATTENTION_DROPOUT,
    **more: Any,
) -> DecoderTraits:
    """Fill the traits that all these families share.

    `rotary` is the share of a head that is rotated by default; `dropouts` names the keys for the embedding, the
    attention probabilities and the residual branches, None where the class has none.
    """
    if "intermediate_size" not in more:
        more["intermediate_size"] = c.maybe_size(c.own_name("intermediate_size"))
    embedding, attention_probabilities, residual = (_dropout(c, key) for key in dropouts)
    fields: dict[str, Any] = {
        "hidden_size": c.size(c.own_name("hidden_size")),
        "num_heads": h.query,
        "num_kv_heads": h.kv,
        "head_dim": h.dim,
        "activation": c.text(activation),
        "rotary_dim": None if rotary is None else rotary_dim(c, h.dim, rotary),
        "has_long_rope": rotary_type(c) in ("longrope", "su"),
        "embedding_dropout": embedding,
        "attention_dropout": attention_probabilities,
        "residual_dropout": residual,
    }
    return DecoderTraits(**{**fields, **more})


def _dropout(c: Fields, key: str | None) -> float:
    share = (c.number(key) if key else None) or 0.0
    if key and not 0 <= share < 1:
        raise c.refuse(key, "not a share from 0 to below 1", "Write for example 0.1.")
    return share


def uniform(
    c: Fields, h: Heads, layer: Params, *, final: Params | None = None, head_bias: bool = False, **traits: Any
) -> Decoder:
    """A decoder all of whose layers are alike."""
    last = norm("model.norm", c.size("hidden_size")) if final is None else final
    kinds = stack([0] * c.num_layers(), lambda _: layer)
    return decoder(c, kinds, dense_traits(c, h, **traits), final=last, head_bias=head_bias)


def llama(c: Fields) -> Decoder:
    """llama: also the class behind exaone, internlm3 and the remote-code types that share its shapes."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"), c.flag("mlp_bias"))
    return uniform(c, h, (*attention(c, h, bias=c.flag("attention_bias")), *mlp, *pre_norms(hidden)))


def logits_factor(c: Fields, key: str, default: float) -> dict[str, Any]:
    """The trait of a class that multiplies or divides its logits by a number."""
    stated = c.number(key)
    return {"logits_factor": default if stated is None else stated}


def granite(c: Fields) -> Decoder:
    """granite: llama with scaled embeddings, branches and logits."""
    base = llama(c)
    return base._replace(traits=base.traits.with_(**logits_factor(c, "logits_scaling", 1.0)))


def mistral(c: Fields) -> Decoder:
    """mistral, ministral3: no bias anywhere; every layer slides where `sliding_window` is stated."""
    h, hidden, window = heads(c), c.size("hidden_size"), c.maybe_size("sliding_window")
    layer = (*attention(c, h), *gated_mlp("mlp", hidden, c.size("intermediate_size")), *pre_norms(hidden))
    return uniform(c, h, layer, **windowed(c, ["sliding_attention"] * c.num_layers(), window))


def ministral(c: Fields) -> Decoder:
    """ministral: like mistral, its window by `layer_types`."""
    h, hidden, window = heads(c), c.size("hidden_size"), c.maybe_size("sliding_window")
    layer = (*attention(c, h), *gated_mlp("mlp", hidden, c.size("intermediate_size")), *pre_norms(hidden))
    types = alternating(c, lambda _: window is None)
    return uniform(c, h, layer, **windowed(c, types, window))


def _qwen_window(c: Fields) -> dict[str, Any]:
    """Qwen2 and Qwen3: a window only with `use_sliding_window`, from layer `max_window_layers` on."""
    window = c.maybe_size("sliding_window") if c.flag("use_sliding_window") else None
    first = c.maybe_size("max_window_layers", low=0) or 0
    return windowed(c, alternating(c, lambda index: window is None or index < first), window)


def qwen2(c: Fields) -> Decoder:
    """qwen2: biases on q, k and v only. `head_dim` is no field of the class, but counts where a config states it."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"))
    layer = (*attention(c, h, bias=True, out_bias=False), *mlp, *pre_norms(hidden))
    return uniform(c, h, layer, **_qwen_window(c))


def qwen2_vl_text(c: Fields) -> Decoder:
    """qwen2_vl, qwen2_5_vl (language model): like qwen2, with the head width always hidden / heads."""
    h, hidden = heads(c, stated_dim=False), c.size("hidden_size")
    mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"))
    layer = (*attention(c, h, bias=True, out_bias=False), *mlp, *pre_norms(hidden))
    return uniform(c, h, layer, **_qwen_window(c))


def qwen3(c: Fields) -> Decoder:
    """qwen3: norms on each head's queries and keys."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"))
    layer = (*attention(c, h, bias=c.flag("attention_bias")), *head_norms(h), *mlp, *pre_norms(hidden))
    return uniform(c, h, layer, qk_norm="head", **_qwen_window(c))


def qwen3_vl_text(c: Fields) -> Decoder:
    """qwen3_vl (language model): qwen3 without a window."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"))
    layer = (*attention(c, h, bias=c.flag("attention_bias")), *head_norms(h), *mlp, *pre_norms(hidden))
    return uniform(c, h, layer, qk_norm="head")


def helium(c: Fields) -> Decoder:
    """helium: a square output projection that never has a bias."""
    h, hidden = heads(c), c.size("hidden_size")
    attn = attention(c, h, bias=c.flag("attention_bias"))[: 6 if c.flag("attention_bias") else 3]
    mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"), c.flag("mlp_bias"))
    return uniform(c, h, (*attn, *linear("self_attn.o_proj", hidden, hidden), *mlp, *pre_norms(hidden)))


def smollm3(c: Fields) -> Decoder:
    """smollm3: every fourth layer without rotary embedding (`no_rope_layers` holds 1 where there is one)."""
    h, hidden, count = heads(c), c.size("hidden_size"), c.num_layers()
    mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"), c.flag("mlp_bias"))
    layer = (*attention(c, h, bias=c.flag("attention_bias")), *mlp, *pre_norms(hidden))
    interval = c.size("no_rope_layer_interval")
    stated = c.integers("no_rope_layers")
    has_rope = [bool(x) for x in stated] if stated else [(i + 1) % interval != 0 for i in range(count)]
    if len(has_rope) != count:
        raise c.refuse("no_rope_layers", f"not one entry for each of {count} layers", "Write one entry a layer.")
    window = c.maybe_size("sliding_window") if c.flag("use_sliding_window") else None
    types = alternating(c, lambda index: window is None or has_rope[index])
    return uniform(c, h, layer, rotary_layers=tuple(has_rope), **windowed(c, types, window))


def olmo(c: Fields) -> Decoder:
    """olmo: LayerNorms without parameters."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"))
    layer, is_clipped = (*attention(c, h, bias=c.flag("attention_bias")), *mlp), c.number("clip_qkv") is not None
    return uniform(c, h, layer, final=(), clips_projections=is_clipped)


def olmo2(c: Fields) -> Decoder:
    """olmo2: norms after attention and MLP, none before; q and k normed over the whole projection."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"))
    norms = pre_norms(hidden, ("post_attention_layernorm", "post_feedforward_layernorm"))
    layer = (*attention(c, h, bias=c.flag("attention_bias")), *full_width_norms(h), *mlp, *norms)
    return uniform(c, h, layer, qk_norm="full")


def olmo3(c: Fields) -> Decoder:
    """olmo3: olmo2 with three layers of four in a window."""
    base = olmo2(c)
    window = windowed(c, alternating(c, every(c, 4)), c.maybe_size("sliding_window"))
    return base._replace(traits=base.traits.with_(**window))


def exaone4(c: Fields) -> Decoder:
    """exaone4: norms after attention and MLP, q and k normed by head; a window where a pattern is stated."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"))
    norms = pre_norms(hidden, ("post_attention_layernorm", "post_feedforward_layernorm"))
    layer = (*attention(c, h), *head_norms(h), *mlp, *norms)
    window = c.maybe_size("sliding_window")
    pattern = c.raw("sliding_window_pattern")
    period = len(pattern) if isinstance(pattern, str) else c.maybe_size("sliding_window_pattern", low=0) or 0
    types = alternating(c, lambda index: window is None or (period > 0 and (index + 1) % period == 0))
    is_rotated = () if window is None else tuple(kind == "sliding_attention" for kind in types)
    return uniform(c, h, layer, qk_norm="head", rotary_layers=is_rotated, **windowed(c, types, window))


def seed_oss(c: Fields) -> Decoder:
    """seed_oss: the output projection has a bias flag of its own; attention and residuals drop out by default."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"), c.flag("mlp_bias"))
    attn = attention(c, h, bias=c.flag("attention_bias"), out_bias=c.flag("attention_out_bias"))
    dropouts = (None, "attention_dropout", "residual_dropout")
    return uniform(c, h, (*attn, *mlp, *pre_norms(hidden)), dropouts=dropouts)


def ernie4_5(c: Fields) -> Decoder:
    """ernie4_5: one flag for all biases in the layers."""
    h, hidden, bias = heads(c), c.size("hidden_size"), c.flag("use_bias")
    mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"), bias)
    return uniform(c, h, (*attention(c, h, bias=bias), *mlp, *pre_norms(hidden)))


def hunyuan(c: Fields) -> Decoder:
    """hunyuan_v1_dense: norms on queries and keys, always."""
    h, hidden = heads(c), c.size("hidden_size")
    norms = head_norms(h, "query_layernorm", "key_layernorm")
    mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"))
    layer = (*attention(c, h, bias=c.flag("attention_bias")), *norms, *mlp, *pre_norms(hidden))
    return uniform(c, h, layer, qk_norm="head")


def bitnet(c: Fields) -> Decoder:
    """bitnet: a norm before each output projection."""
    h, hidden, width = heads(c), c.size("hidden_size"), c.size("intermediate_size")
    attn = attention(c, h, bias=c.flag("attention_bias")) + norm("self_attn.attn_sub_norm", hidden)
    mlp = gated_mlp("mlp", hidden, width) + norm("mlp.ffn_sub_norm", width)
    return uniform(c, h, (*attn, *mlp, *pre_norms(hidden)))


def phi3(c: Fields) -> Decoder:
    """phi3: fused q, k and v; fused gate and up; the output projection comes first."""
    h, hidden, width = heads(c), c.size("hidden_size"), c.size("intermediate_size")
    layer = (
        *linear("self_attn.o_proj", hidden, h.query_width),
        *linear("self_attn.qkv_proj", h.query_width + 2 * h.kv_width, hidden),
        *_fused_mlp(hidden, width),
        *pre_norms(hidden),
    )
    window = c.maybe_size("sliding_window")
    dropouts = (None, "attention_dropout", "resid_pdrop")
    slides = windowed(c, ["sliding_attention"] * c.num_layers(), window)
    return uniform(c, h, layer, dropouts=dropouts, **slides)


def _fused_mlp(hidden: int, width: int) -> Params:
    return linear("mlp.gate_up_proj", 2 * width, hidden) + linear("mlp.down_proj", hidden, width)


def glm(c: Fields, sandwich: bool = False) -> Decoder:
    """glm: biases on q, k and v; gate and up fused; half of each head is rotated."""
    h, hidden = heads(c), c.size("hidden_size")
    names = (*_PAIR, "post_self_attn_layernorm", "post_mlp_layernorm") if sandwich else _PAIR
    attn = attention(c, h, bias=c.flag("attention_bias"), out_bias=False)
    layer = (*attn, *_fused_mlp(hidden, c.size("intermediate_size")), *pre_norms(hidden, names))
    return uniform(c, h, layer, rotary=0.5)


def glm4(c: Fields) -> Decoder:
    """glm4: glm with norms after attention and MLP too."""
    return glm(c, sandwich=True)


def nemotron(c: Fields) -> Decoder:
    """nemotron: LayerNorm with bias, MLP without a gate, half of each head rotated."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = two_layer_mlp("mlp.up_proj", "mlp.down_proj", hidden, c.size("intermediate_size"), c.flag("mlp_bias"))
    layer = (*attention(c, h, bias=c.flag("attention_bias")), *mlp, *pre_norms(hidden, bias=True))
    return uniform(c, h, layer, final=norm("model.norm", hidden, bias=True), rotary=0.5)


def arcee(c: Fields) -> Decoder:
    """arcee: llama with an MLP without a gate."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = two_layer_mlp("mlp.up_proj", "mlp.down_proj", hidden, c.size("intermediate_size"), c.flag("mlp_bias"))
    return uniform(c, h, (*attention(c, h, bias=c.flag("attention_bias")), *mlp, *pre_norms(hidden)))


def cohere(c: Fields) -> Decoder:
    """cohere: one norm a layer, attention and MLP in parallel; q and k norms are apart for every head."""
    h, hidden = heads(c), c.size("hidden_size")
    has_norms = c.flag("use_qk_norm")
    norms: Params = ()
    if has_norms:
        norms = norm("self_attn.q_norm", h.query, h.dim) + norm("self_attn.k_norm", h.kv, h.dim)
    attn = attention(c, h, bias=c.flag("attention_bias")) + norms
    layer = (*attn, *gated_mlp("mlp", hidden, c.size("intermediate_size")), *pre_norms(hidden, _PAIR[:1]))
    qk_norm: Literal["head"] | None = "head" if has_norms else None
    factor = logits_factor(c, "logit_scale", 0.0625)
    return uniform(c, h, layer, qk_norm=qk_norm, has_parallel_residual=True, **factor)


def cohere2(c: Fields) -> Decoder:
    """cohere2: parallel; three layers of four slide, and only those are rotated."""
    h, hidden = heads(c), c.size("hidden_size")
    attn = attention(c, h, bias=c.flag("attention_bias"))
    layer = (*attn, *gated_mlp("mlp", hidden, c.size("intermediate_size")), *pre_norms(hidden, _PAIR[:1]))
    types = alternating(c, every(c, c.maybe_size("sliding_window_pattern") or 4))
    window = windowed(c, types, c.maybe_size("sliding_window"))
    is_rotated = tuple(kind == "sliding_attention" for kind in types)
    more = window | logits_factor(c, "logit_scale", 0.0625)
    return uniform(c, h, layer, has_parallel_residual=True, rotary_layers=is_rotated, **more)


FAMILIES: dict[str, Callable[[Fields], Decoder]] = {
    "arcee": arcee,
    "bitnet": bitnet,
    "cohere": cohere,
    "cohere2": cohere2,
    "ernie4_5": ernie4_5,
    "exaone": llama,
    "exaone4": exaone4,
    "glm": glm,
    "glm4": glm4,
    "granite": granite,
    "helium": helium,
    "hunyuan_v1_dense": hunyuan,
    "internlm3": llama,
    "llama": llama,
    "ministral": ministral,
    "ministral3": mistral,
    "mistral": mistral,
    "nemotron": nemotron,
    "olmo": olmo,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_5_vl_text": qwen2_vl_text,
    "qwen2_vl_text": qwen2_vl_text,
    "qwen3": qwen3,
    "qwen3_vl_text": qwen3_vl_text,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
}
