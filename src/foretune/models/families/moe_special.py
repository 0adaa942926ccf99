"""Mixtures of experts that depart from the common layout: transposed experts, sinks, mixed attention, own routers.

Each function reads like the class it is named after in transformers/models/<family>/modeling_<family>.py (5.24).
"""

from collections.abc import Callable

from foretune.models.families.dense import alternating, dense_traits, every, head_norms, pre_norms, windowed
from foretune.models.families.fields import Fields
from foretune.models.families.moe import by_sparsity, expert_traits, routed_mlp, router, sparse_labels
from foretune.models.families.parts import (
    Decoder,
    Params,
    attention,
    decoder,
    experts,
    frozen,
    gated_mlp,
    heads,
    linear,
    norm,
    plain,
    rotary_type,
    stack,
)

__all__ = ["FAMILIES"]


def minimax(c: Fields) -> Decoder:
    """minimax: lightning attention (fused qkv, an output gate) in turn with full attention; all layers sparse."""
    h, hidden = heads(c), c.size("hidden_size")
    types = c.labels("layer_types", c.num_layers())
    types = types or tuple("full_attention" if (i + 1) % 2 else "linear_attention" for i in range(c.num_layers()))
    lightning = (
        *norm("self_attn.norm", h.query_width),
        *linear("self_attn.qkv_proj", 3 * h.query_width, hidden),
        *linear("self_attn.out_proj", hidden, h.query_width),
        *linear("self_attn.output_gate", h.query_width, hidden),
    )
    mlp = routed_mlp(c, hidden, count_key="num_local_experts", width_key="intermediate_size", gate_first=True)
    kinds = stack(
        types, lambda kind: (attention(c, h) if kind == "full_attention" else lightning) + pre_norms(hidden) + mlp
    )
    traits = expert_traits(c, "num_local_experts", "num_experts_per_tok") | {"mixer_chunk": c.size("block_size")}
    return decoder(c, kinds, dense_traits(c, h, **traits), final=norm("model.norm", hidden))


def phimoe(c: Fields) -> Decoder:
    """phimoe: LayerNorm with bias; the router is a class of its own over `nn.Linear`, which neither LoRA nor 4-bit
    reach."""
    h, hidden, count = heads(c), c.size("hidden_size"), c.size("num_local_experts")
    mlp = router("mlp.router", count, hidden) + experts("mlp.experts", count, hidden, c.size("intermediate_size"))
    layer = attention(c, h, bias=c.flag("attention_bias")) + mlp + pre_norms(hidden, bias=True)
    num_layers = c.num_layers()
    traits = expert_traits(c, "num_local_experts", "num_experts_per_tok")
    traits |= windowed(c, ["sliding_attention"] * num_layers, c.maybe_size("sliding_window"))
    # Its router's jitter is a threshold, no noise.
    noise = tuple(key for key in traits["unwritten"] if key != "router_jitter_noise")
    traits["unwritten"] = noise if rotary_type(c) in ("default", "longrope") else (*noise, "rope_scaling")
    return decoder(
        c,
        stack([0] * num_layers, lambda _: layer),
        dense_traits(c, h, **traits),
        final=norm("model.norm", hidden, bias=True),
        head_bias=c.flag("lm_head_bias"),
    )


def gpt_oss(c: Fields) -> Decoder:
    """gpt_oss: attention sinks, biases everywhere, experts as [E, in, out] with 2-D biases."""
    h, hidden = heads(c), c.size("hidden_size")
    count, width = c.size("num_local_experts"), c.size("intermediate_size")
    mlp = (
        *router("mlp.router", count, hidden),
        *plain("mlp.router.bias", count),
        *plain("mlp.experts.gate_up_proj", count, hidden, 2 * width, role="experts"),
        *plain("mlp.experts.gate_up_proj_bias", count, 2 * width),
        *plain("mlp.experts.down_proj", count, width, hidden, role="experts"),
        *plain("mlp.experts.down_proj_bias", count, hidden),
    )
    attn = plain("self_attn.sinks", h.query) + attention(c, h, bias=c.flag("attention_bias"))
    layer = attn + mlp + pre_norms(hidden)
    traits = expert_traits(c, "num_local_experts", "num_experts_per_tok")
    traits |= windowed(c, alternating(c, every(c, 2)), c.maybe_size("sliding_window"))
    return by_sparsity(c, h, [True] * c.num_layers(), lambda _: layer, traits=traits)


def ernie4_5_moe(c: Fields) -> Decoder:
    """ernie4_5_moe: sparse from `moe_layer_start_index` to `moe_layer_end_index`; a learned score correction."""
    h, hidden, bias = heads(c), c.size("hidden_size"), c.flag("use_bias")
    count, width = c.size("moe_num_experts"), c.size("moe_intermediate_size")
    shared = c.maybe_size("moe_num_shared_experts", low=0) or 0
    sparse_mlp = (
        *router("mlp.gate", count, hidden),
        *frozen(plain("mlp.gate.moe_statics.e_score_correction_bias", 1, count)),
        *experts("mlp.experts", count, hidden, width),
        *(gated_mlp("mlp.shared_experts", hidden, shared * width, bias) if shared else ()),
    )
    dense = gated_mlp("mlp", hidden, c.size("intermediate_size"), bias)
    final = norm("model.norm", hidden)
    kinds = stack(
        _ernie_sparse(c),
        lambda is_sparse: attention(c, h, bias=bias) + (sparse_mlp if is_sparse else dense) + pre_norms(hidden),
    )
    traits = dense_traits(c, h, **expert_traits(c, "moe_num_experts", "moe_k"))
    return decoder(c, kinds, traits, final=final, head_bias=bias)


def _ernie_sparse(c: Fields) -> list[bool]:
    count = c.num_layers()
    first, last = c.size("moe_layer_start_index", low=0), c.size("moe_layer_end_index", low=-1)
    interval = c.size("moe_layer_interval")
    last = count - 1 if last == -1 else last
    return [(i + 1) % interval == 0 and first <= i <= last for i in range(count)]


def mimo_v2_flash(c: Fields) -> Decoder:
    """mimo_v2_flash: values narrower than keys; layers in a window have twice the key/value heads, and sinks."""
    h, hidden, value = heads(c), c.size("hidden_size"), c.size("v_head_dim")
    count = c.num_layers()
    types = alternating(c, lambda i: i == 0 or (i + 1) % 6 == 0)
    labels = sparse_labels(c, 1)
    traits = expert_traits(c, "n_routed_experts", "num_experts_per_tok")
    traits |= windowed(c, types, c.maybe_size("sliding_window"))
    bias = c.flag("attention_bias")

    def layer(key: tuple[bool, bool]) -> Params:
        slides, is_sparse = key
        kv = h.kv * (2 if slides else 1)
        attn = (
            *(plain("self_attn.sinks", h.query) if slides else ()),
            *linear("self_attn.q_proj", h.query_width, hidden, bias),
            *linear("self_attn.k_proj", kv * h.dim, hidden, bias),
            *linear("self_attn.v_proj", kv * value, hidden, bias),
            *linear("self_attn.o_proj", hidden, h.query * value),
        )
        if is_sparse:
            mlp = routed_mlp(
                c, hidden, count_key="n_routed_experts", width_key="moe_intermediate_size", gate_first=False
            )
        else:
            mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"))
        return attn + mlp + pre_norms(hidden)

    keys = [(types[i] == "sliding_attention", labels[i] == "sparse") for i in range(count)]
    traits["rotary"] = 0.334
    return decoder(c, stack(keys, layer), dense_traits(c, h, **traits), final=norm("model.norm", hidden))


def llama4(c: Fields) -> Decoder:
    """llama4_text: experts as [E, in, out], a shared expert, dense layers of another width in between; the router as
    phimoe's."""
    h, hidden, count = heads(c), c.size("hidden_size"), c.num_layers()
    attn = attention(c, h, bias=c.flag("attention_bias"))
    step, num_experts, width = (
        c.size("interleave_moe_layer_step"),
        c.size("num_local_experts"),
        c.size("intermediate_size"),
    )
    stated = c.integers("moe_layers")
    moe_layers = set(range(step - 1, count, step)) if stated is None else set(stated)
    sparse_mlp = (
        *plain("feed_forward.experts.gate_up_proj", num_experts, hidden, 2 * width, role="experts"),
        *plain("feed_forward.experts.down_proj", num_experts, width, hidden, role="experts"),
        *router("feed_forward.router", num_experts, hidden),
        *gated_mlp("feed_forward.shared_expert", hidden, width),
    )
    dense = gated_mlp("feed_forward", hidden, c.size("intermediate_size_mlp"))
    interval = c.size("no_rope_layer_interval")
    rotated = c.integers("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(count)]
    types = c.labels("layer_types", count)
    types = types or tuple("chunked_attention" if is_rotated else "full_attention" for is_rotated in rotated[:count])
    chunk = c.maybe_size("attention_chunk_size")
    traits = expert_traits(c, "num_local_experts", "num_experts_per_tok")
    traits["rotary_layers"] = tuple(bool(is_rotated) for is_rotated in rotated[:count])
    traits["qk_norm"] = "head" if c.flag("use_qk_norm") else None
    traits["tunes_temperature"] = c.flag("attn_temperature_tuning")
    if "chunked_attention" in types:
        traits |= {"sliding_window": chunk, "sliding_layers": tuple(kind == "chunked_attention" for kind in types)}
    return by_sparsity(
        c,
        h,
        [i in moe_layers for i in range(count)],
        lambda is_sparse: attn + (sparse_mlp if is_sparse else dense) + pre_norms(hidden),
        traits=traits,
    )


def step3p7(c: Fields) -> Decoder:
    """step3p5 (text of step3p7): a gate on each head's output; layers in a window may have more heads."""
    h, hidden, count = heads(c), c.size("hidden_size"), c.num_layers()
    types = c.labels("layer_types", count, trim=True) or ("full_attention",) * count
    labels = c.labels("mlp_layer_types", count, trim=True) or _step_labels(c, count)
    other = Fields(
        c.section_of("attention_other_setting"), c.no_defaults(), place=c.place, section="attention_other_setting."
    )
    sliding_heads = c.maybe_size("num_sliding_attention_heads") or other.maybe_size("num_attention_heads") or h.query

    def layer(key: tuple[bool, bool]) -> Params:
        slides, is_sparse = key
        own = h._replace(query=sliding_heads) if slides else h
        attn = (
            *attention(c, own, bias=c.flag("attention_bias")),
            *head_norms(own),
            *linear("self_attn.g_proj", own.query, hidden),
        )
        if is_sparse:
            mlp = routed_mlp(
                c, hidden, count_key="n_routed_experts", width_key="moe_intermediate_size", gate_first=True
            )
            mlp += gated_mlp("mlp.shared_experts", hidden, c.size("share_expert_dim"), c.flag("mlp_bias"))
        else:
            mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"), c.flag("mlp_bias"))
        return attn + mlp + pre_norms(hidden)

    keys = [(types[i] == "sliding_attention", labels[i] == "sparse") for i in range(count)]
    traits = expert_traits(c, "n_routed_experts", "num_experts_per_tok") | {"qk_norm": "head"}
    traits |= windowed(c, types, c.maybe_size("sliding_window"))
    return decoder(c, stack(keys, layer), dense_traits(c, h, **traits), final=norm("model.norm", hidden))


def _step_labels(c: Fields, count: int) -> tuple[str, ...]:
    stated = c.raw("moe_layers_enum")
    if stated is None:
        return tuple("sparse" if i >= 3 else "dense" for i in range(count))
    items = stated.split(",") if isinstance(stated, str) else stated
    try:
        sparse = {int(item) for item in items}
    except (TypeError, ValueError):
        raise c.refuse("moe_layers_enum", "not a list of layers", 'Write "3,4,5,...".') from None
    return tuple("sparse" if i in sparse else "dense" for i in range(count))


FAMILIES: dict[str, Callable[[Fields], Decoder]] = {
    "ernie4_5_moe": ernie4_5_moe,
    "gpt_oss": gpt_oss,
    "llama4_text": llama4,
    "mimo_v2_flash": mimo_v2_flash,
    "minimax": minimax,
    "phimoe": phimoe,
    "step3p5": step3p7,
}
