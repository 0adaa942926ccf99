"""Mixtures of experts: stacked 3-D expert weights, a router, sometimes shared experts and dense leading layers.

Transformers 5 holds all experts of a layer in two parameters; neither LoRA nor 4-bit quantization reaches them.
Each function reads like the class it is named after in transformers/models/<family>/modeling_<family>.py (5.24).
"""

from collections.abc import Callable, Sequence
from typing import Any

from foretune.models.families.dense import (
    alternating,
    dense_traits,
    full_width_norms,
    head_norms,
    pre_norms,
    windowed,
)
from foretune.models.families.fields import Fields
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
)

__all__ = [
    "FAMILIES",
    "by_sparsity",
    "expert_traits",
    "routed_mlp",
    "router",
    "shared_expert_mlp",
    "sparse_by_step",
    "sparse_labels",
]


def router(name: str, count: int, hidden: int) -> Params:
    """A router held as a bare (E, H) weight: not an `nn.Linear`, so LoRA does not find it."""
    return plain(f"{name}.weight", count, hidden)


def expert_traits(c: Fields, count_key: str, top_key: str) -> dict[str, Any]:
    """The traits of a mixture."""
    return {
        "num_experts": c.maybe_size(count_key, low=0),
        "experts_per_token": c.maybe_size(top_key, low=0),
        "normalizes_experts": c.flag("norm_topk_prob"),
        "expert_groups": c.maybe_size("n_group"),
        "expert_groups_per_token": c.maybe_size("topk_group"),
        "unwritten": tuple(key for key in ("router_jitter_noise", "input_jitter_noise") if c.number(key)),
    }


def sparse_labels(c: Fields, first_dense: int) -> tuple[str, ...]:
    """Read `mlp_layer_types`; where not stated, the first layers are dense and the others sparse."""
    count = c.num_layers()
    stated = c.labels("mlp_layer_types", count)
    return stated or tuple("dense" if i < first_dense else "sparse" for i in range(count))


def sparse_by_step(c: Fields, count_key: str = "num_experts") -> list[bool]:
    """Qwen2-MoE's rule for each layer: not in `mlp_only_layers`, and on the `decoder_sparse_step`."""
    only_dense, step = set(c.integers("mlp_only_layers") or ()), c.size("decoder_sparse_step")
    has_experts = c.size(count_key, low=0) > 0
    return [has_experts and i not in only_dense and (i + 1) % step == 0 for i in range(c.num_layers())]


def routed_mlp(c: Fields, hidden: int, *, count_key: str, width_key: str, gate_first: bool) -> Params:
    """Experts and their router under `mlp`, in either order."""
    count = c.size(count_key)
    gate, stacked = router("mlp.gate", count, hidden), experts("mlp.experts", count, hidden, c.size(width_key))
    return gate + stacked if gate_first else stacked + gate


def shared_expert_mlp(c: Fields, hidden: int, count_key: str = "num_experts") -> Params:
    """Qwen2-MoE's block: router, experts, one shared expert and the gate on it."""
    return (
        *routed_mlp(c, hidden, count_key=count_key, width_key="moe_intermediate_size", gate_first=True),
        *gated_mlp("mlp.shared_expert", hidden, c.size("shared_expert_intermediate_size")),
        *linear("mlp.shared_expert_gate", 1, hidden),
    )


def by_sparsity(
    c: Fields, h: Heads, layers: Sequence[bool], layer: Callable[[bool], Params], *, traits: dict[str, Any]
) -> Decoder:
    """A decoder whose layers are sparse (True) or dense (False)."""
    final = norm("model.norm", c.size("hidden_size"))
    return decoder(c, stack(list(layers), layer), dense_traits(c, h, **traits), final=final)


def mixtral(c: Fields) -> Decoder:
    """mixtral: every layer sparse; a window where `sliding_window` is stated."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = routed_mlp(c, hidden, count_key="num_local_experts", width_key="intermediate_size", gate_first=True)
    layer = attention(c, h) + mlp + pre_norms(hidden)
    count = c.num_layers()
    traits = expert_traits(c, "num_local_experts", "num_experts_per_tok")
    traits |= windowed(c, ["sliding_attention"] * count, c.maybe_size("sliding_window"))
    return by_sparsity(c, h, [True] * count, lambda _: layer, traits=traits)


def minimax_m2(c: Fields) -> Decoder:
    """minimax_m2: mixtral with q and k normed over the whole projection."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = routed_mlp(c, hidden, count_key="num_local_experts", width_key="intermediate_size", gate_first=True)
    layer = attention(c, h) + full_width_norms(h) + mlp + pre_norms(hidden)
    traits = expert_traits(c, "num_local_experts", "num_experts_per_tok") | {"qk_norm": "full"}
    return by_sparsity(c, h, [True] * c.num_layers(), lambda _: layer, traits=traits)


def olmoe(c: Fields) -> Decoder:
    """olmoe: q and k normed over hidden and over all keys."""
    h, hidden = heads(c), c.size("hidden_size")
    norms = norm("self_attn.q_norm", hidden) + norm("self_attn.k_norm", (hidden // h.query) * h.kv)
    mlp = routed_mlp(c, hidden, count_key="num_experts", width_key="intermediate_size", gate_first=True)
    layer = attention(c, h, bias=c.flag("attention_bias")) + norms + mlp + pre_norms(hidden)
    traits = expert_traits(c, "num_experts", "num_experts_per_tok") | {"qk_norm": "full"}
    traits["clips_projections"] = c.number("clip_qkv") is not None
    return by_sparsity(c, h, [True] * c.num_layers(), lambda _: layer, traits=traits)


def flex_olmo(c: Fields) -> Decoder:
    """flex_olmo: olmoe's experts between olmo2's norms."""
    h, hidden = heads(c), c.size("hidden_size")
    mlp = routed_mlp(c, hidden, count_key="num_experts", width_key="intermediate_size", gate_first=True)
    norms = pre_norms(hidden, ("post_attention_layernorm", "post_feedforward_layernorm"))
    layer = attention(c, h, bias=c.flag("attention_bias")) + full_width_norms(h) + mlp + norms
    traits = expert_traits(c, "num_experts", "num_experts_per_tok") | {"qk_norm": "full"}
    return by_sparsity(c, h, [True] * c.num_layers(), lambda _: layer, traits=traits)


def qwen2_moe(c: Fields) -> Decoder:
    """qwen2_moe: a shared expert with a gate; dense layers by step and by list."""
    h, hidden = heads(c), c.size("hidden_size")
    attn = attention(c, h, bias=c.flag("qkv_bias"), out_bias=False)
    dense = gated_mlp("mlp", hidden, c.size("intermediate_size"))
    sparse = sparse_by_step(c)
    window = c.maybe_size("sliding_window") if c.flag("use_sliding_window") else None
    first = c.maybe_size("max_window_layers", low=0) or 0
    types = alternating(c, lambda i: window is None or not ((i + 1) % 2 and i < first))
    traits = expert_traits(c, "num_experts", "num_experts_per_tok") | windowed(c, types, window)

    def layer(is_sparse: bool) -> Params:
        return attn + (shared_expert_mlp(c, hidden) if is_sparse else dense) + pre_norms(hidden)

    return by_sparsity(c, h, sparse, layer, traits=traits)


def qwen3_moe(c: Fields) -> Decoder:
    """qwen3_moe, qwen3_vl_moe_text: norms by head; experts before the router."""
    h, hidden = heads(c), c.size("hidden_size")
    attn = attention(c, h, bias=c.flag("attention_bias")) + head_norms(h)
    count_key = c.own_name("num_experts")
    sparse = sparse_by_step(c, count_key)
    window = c.maybe_size("sliding_window") if c.flag("use_sliding_window") else None
    traits = expert_traits(c, count_key, "num_experts_per_tok") | {"qk_norm": "head"}
    traits |= windowed(c, ["sliding_attention"] * c.num_layers(), window)

    def layer(is_sparse: bool) -> Params:
        if is_sparse:
            mlp = routed_mlp(c, hidden, count_key=count_key, width_key="moe_intermediate_size", gate_first=False)
        else:
            mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"))
        return attn + mlp + pre_norms(hidden)

    return by_sparsity(c, h, sparse, layer, traits=traits)


def granitemoe(c: Fields) -> Decoder:
    """granitemoe, granitemoeshared: norms before the experts; a fused shared MLP where it has a width."""
    h, hidden, count = heads(c), c.size("hidden_size"), c.size("num_local_experts")
    shared = c.maybe_size("shared_intermediate_size", low=0) or 0
    layer = (
        *attention(c, h, bias=c.flag("attention_bias")),
        *pre_norms(hidden),
        *router("block_sparse_moe.router", count, hidden),
        *experts("block_sparse_moe.experts", count, hidden, c.size("intermediate_size")),
        *(_fused_shared(hidden, shared) if shared else ()),
    )
    traits = expert_traits(c, "num_local_experts", "num_experts_per_tok")
    return by_sparsity(c, h, [True] * c.num_layers(), lambda _: layer, traits=traits)


def _fused_shared(hidden: int, width: int) -> Params:
    return linear("shared_mlp.input_linear", 2 * width, hidden) + linear("shared_mlp.output_linear", hidden, width)


def _deepseek_mlp(c: Fields, hidden: int, count_key: str, shared_width: int) -> Params:
    """Experts, router, shared experts: the order of DeepSeek, GLM and dots."""
    sparse = routed_mlp(c, hidden, count_key=count_key, width_key="moe_intermediate_size", gate_first=False)
    return sparse + gated_mlp("mlp.shared_experts", hidden, shared_width)


def glm4_moe(c: Fields) -> Decoder:
    """glm4_moe, solar_open: dense leading layers, no bias on the output, q and k norms by flag."""
    h, hidden = heads(c), c.size("hidden_size")
    has_norms = c.flag("use_qk_norm")
    attn = attention(c, h, bias=c.flag("attention_bias"), out_bias=False) + (head_norms(h) if has_norms else ())
    dense_layers = c.maybe_size("first_k_dense_replace", low=0) or 0
    shared = c.size("n_shared_experts") * c.size("moe_intermediate_size")
    traits = expert_traits(c, "n_routed_experts", "num_experts_per_tok")
    traits |= {"qk_norm": "head" if has_norms else None, "rotary": 0.5}

    def layer(is_sparse: bool) -> Params:
        sparse = _deepseek_mlp(c, hidden, "n_routed_experts", shared) if is_sparse else None
        return attn + (sparse or gated_mlp("mlp", hidden, c.size("intermediate_size"))) + pre_norms(hidden)

    return by_sparsity(c, h, [i >= dense_layers for i in range(c.num_layers())], layer, traits=traits)


def dots1(c: Fields) -> Decoder:
    """dots1: glm4_moe with biases also on the output and norms always."""
    h, hidden = heads(c), c.size("hidden_size")
    attn = attention(c, h, bias=c.flag("attention_bias")) + head_norms(h)
    dense_layers = c.maybe_size("first_k_dense_replace", low=0) or 0
    window, first = c.maybe_size("sliding_window"), c.maybe_size("max_window_layers", low=0) or 0
    types = alternating(c, lambda i: window is None or i < first)
    traits = expert_traits(c, "n_routed_experts", "num_experts_per_tok") | {"qk_norm": "head"}
    traits |= windowed(c, types, window)

    def layer(is_sparse: bool) -> Params:
        dense = () if is_sparse else gated_mlp("mlp", hidden, c.size("intermediate_size"))
        shared = c.size("n_shared_experts") * c.size("moe_intermediate_size") if is_sparse else 0
        return attn + (_deepseek_mlp(c, hidden, "n_routed_experts", shared) if is_sparse else dense) + pre_norms(hidden)

    return by_sparsity(c, h, [i >= dense_layers for i in range(c.num_layers())], layer, traits=traits)


def exaone_moe(c: Fields) -> Decoder:
    """exaone_moe: norms before, q and k norms by head, dense leading layers."""
    h, hidden = heads(c), c.size("hidden_size")
    attn = attention(c, h) + head_norms(h)
    labels = sparse_labels(c, c.maybe_size("first_k_dense_replace", low=0) or 0)
    shared = c.size("num_shared_experts") * c.size("moe_intermediate_size")
    window = c.maybe_size("sliding_window")
    pattern = c.raw("sliding_window_pattern")
    period = len(pattern) if isinstance(pattern, str) else c.maybe_size("sliding_window_pattern", low=0) or 0
    types = alternating(c, lambda i: window is None or (period > 0 and (i + 1) % period == 0))
    traits = expert_traits(c, "num_experts", "num_experts_per_tok") | {"qk_norm": "head"}
    traits |= windowed(c, types, window)
    if window is not None:
        traits["rotary_layers"] = tuple(kind == "sliding_attention" for kind in types)

    def layer(is_sparse: bool) -> Params:
        dense = () if is_sparse else gated_mlp("mlp", hidden, c.size("intermediate_size"))
        return attn + (_deepseek_mlp(c, hidden, "num_experts", shared) if is_sparse else dense) + pre_norms(hidden)

    return by_sparsity(c, h, [label == "sparse" for label in labels], layer, traits=traits)


def solar_open(c: Fields) -> Decoder:
    """solar_open: every layer sparse, a shared expert, no bias on the output."""
    h, hidden = heads(c), c.size("hidden_size")
    attn = attention(c, h, bias=c.flag("attention_bias"), out_bias=False)
    shared = c.size("n_shared_experts") * c.size("moe_intermediate_size")
    layer = attn + _deepseek_mlp(c, hidden, "n_routed_experts", shared) + pre_norms(hidden)
    traits = expert_traits(c, "n_routed_experts", "num_experts_per_tok")
    return by_sparsity(c, h, [True] * c.num_layers(), lambda _: layer, traits=traits)


def hunyuan_v1_moe(c: Fields) -> Decoder:
    """hunyuan_v1_moe: a linear router `gate.wg`, experts, a shared MLP of the same width; q and k norms."""
    h, hidden = heads(c), c.size("hidden_size")
    count, width = c.size(c.own_name("num_local_experts")), c.size("intermediate_size")
    mlp = (
        *linear("mlp.gate.wg", count, hidden),
        *experts("mlp.experts", count, hidden, width),
        *gated_mlp("mlp.shared_mlp", hidden, width),
    )
    attn = attention(c, h, bias=c.flag("attention_bias")) + head_norms(h, "query_layernorm", "key_layernorm")
    traits = expert_traits(c, c.own_name("num_local_experts"), c.own_name("num_experts_per_tok")) | {"qk_norm": "head"}
    return by_sparsity(c, h, [True] * c.num_layers(), lambda _: attn + mlp + pre_norms(hidden), traits=traits)


FAMILIES: dict[str, Callable[[Fields], Decoder]] = {
    "dots1": dots1,
    "exaone_moe": exaone_moe,
    "flex_olmo": flex_olmo,
    "glm4_moe": glm4_moe,
    "granitemoe": granitemoe,
    "granitemoeshared": granitemoe,
    "minimax_m2": minimax_m2,
    "hunyuan_v1_moe": hunyuan_v1_moe,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "qwen2_moe": qwen2_moe,
    "solar_open": solar_open,
    "qwen3_moe": qwen3_moe,
    "qwen3_vl_moe_text": qwen3_moe,
}
