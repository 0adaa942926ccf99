"""Multi-head latent attention: low-rank queries and key/values (DeepSeek, GLM-5, MiniCPM3, Kimi-Linear).

Each function reads like the class it is named after in transformers/models/<family>/modeling_<family>.py (5.24).
"""

from collections.abc import Callable
from typing import Any

from foretune.models.families.dense import dense_traits, pre_norms
from foretune.models.families.fields import Fields
from foretune.models.families.moe import expert_traits, routed_mlp, sparse_labels
from foretune.models.families.parts import (
    Decoder,
    Heads,
    Params,
    decoder,
    gated_mlp,
    linear,
    norm,
    outside,
    plain,
    stack,
    under,
)
from foretune.models.shape import DecoderTraits

__all__ = ["FAMILIES"]


def latent_attention(c: Fields) -> Params:
    """Queries (through a bottleneck where `q_lora_rank` is stated) and keys/values through a shared latent."""
    hidden, num_heads, bias = c.size("hidden_size"), c.size("num_attention_heads"), c.flag("attention_bias")
    nope, rope, value = c.size("qk_nope_head_dim", low=0), c.size("qk_rope_head_dim", low=0), _value_width(c)
    query_rank, rank = c.maybe_size("q_lora_rank"), c.size("kv_lora_rank")
    queries = num_heads * (nope + rope)
    if query_rank is None:
        q = linear("self_attn.q_proj", queries, hidden)
    else:
        q = (
            *linear("self_attn.q_a_proj", query_rank, hidden, bias),
            *norm("self_attn.q_a_layernorm", query_rank),
            *linear("self_attn.q_b_proj", queries, query_rank),
        )
    return (
        *q,
        *linear("self_attn.kv_a_proj_with_mqa", rank + rope, hidden, bias),
        *norm("self_attn.kv_a_layernorm", rank),
        *linear("self_attn.kv_b_proj", num_heads * (nope + value), rank),
        *linear("self_attn.o_proj", hidden, num_heads * value, bias),
    )


def _value_width(c: Fields) -> int:
    width = c.maybe_size("v_head_dim")
    return width or max(c.size("hidden_size") // c.size("num_attention_heads"), 1)


def _traits(c: Fields, **more: Any) -> DecoderTraits:
    nope, rope = c.size("qk_nope_head_dim", low=0), c.size("qk_rope_head_dim", low=0)
    num_heads = c.size("num_attention_heads")
    h = Heads(num_heads, c.maybe_size("num_key_value_heads") or num_heads, nope + rope)
    return dense_traits(c, h, rotary=None, rotary_dim=rope, value_head_dim=_value_width(c), **more)


def _interleaving(build: Callable[[Fields], Decoder]) -> Callable[[Fields], Decoder]:
    """Of classes that rotate pairs of neighbours, unless the config says otherwise."""

    def built(c: Fields) -> Decoder:
        whole = build(c)
        interleaves = not c.has("rope_interleave") or c.flag("rope_interleave")
        return whole._replace(traits=whole.traits.with_(flags=("rope_interleave",) if interleaves else ()))

    return built


def deepseek_v2(c: Fields) -> Decoder:
    """deepseek_v2: experts may be chosen from the best groups only."""
    whole = deepseek(c)
    method = c.text("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise c.refuse("topk_method", "which the class does not know", "It is greedy or group_limited_greedy.")
    return whole._replace(traits=whole.traits.with_(flags=(method,)))


def _sparse_mlp(c: Fields, count_key: str, shared_key: str) -> Params:
    hidden = c.size("hidden_size")
    shared = c.size(shared_key) * c.size("moe_intermediate_size")
    sparse = routed_mlp(c, hidden, count_key=count_key, width_key="moe_intermediate_size", gate_first=False)
    return sparse + gated_mlp("mlp.shared_experts", hidden, shared)


def minicpm3(c: Fields) -> Decoder:
    """minicpm3, youtu: latent attention and a dense MLP; a scale of embeddings that is a whole number stays one."""
    hidden = c.size("hidden_size")
    mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"), c.flag("mlp_bias"))
    layer = latent_attention(c) + mlp + pre_norms(hidden)
    is_whole = not isinstance(c.raw("scale_emb"), float)
    traits = _traits(c, flags=("whole_scale_emb",) if is_whole else ())
    return decoder(c, stack([0] * c.num_layers(), lambda _: layer), traits, final=norm("model.norm", hidden))


def deepseek(c: Fields) -> Decoder:
    """deepseek_v2, deepseek_v3: the first `first_k_dense_replace` layers are dense."""
    hidden = c.size("hidden_size")
    attn, first = latent_attention(c), c.maybe_size("first_k_dense_replace", low=0) or 0
    bias = c.flag("mlp_bias")

    def layer(is_sparse: bool) -> Params:
        if not is_sparse:
            return attn + gated_mlp("mlp", hidden, c.size("intermediate_size"), bias) + pre_norms(hidden)
        shared = c.size("n_shared_experts") * c.size("moe_intermediate_size")
        sparse = routed_mlp(
            c, hidden, count_key="n_routed_experts", width_key="moe_intermediate_size", gate_first=False
        )
        return attn + sparse + gated_mlp("mlp.shared_experts", hidden, shared, bias) + pre_norms(hidden)

    kinds = stack([i >= first for i in range(c.num_layers())], layer)
    traits = _traits(c, **expert_traits(c, "n_routed_experts", "num_experts_per_tok"))
    return decoder(c, kinds, traits, final=norm("model.norm", hidden))


def glm4_moe_lite(c: Fields) -> Decoder:
    """glm4_moe_lite: deepseek_v3 with `mlp_layer_types` (default: the first layer dense)."""
    return _labelled(c, sparse_labels(c, 1), lambda _index: ())


def _labelled(c: Fields, labels: tuple[str, ...], indexer: Callable[[int], Params]) -> Decoder:
    hidden, attn = c.size("hidden_size"), latent_attention(c)

    def layer(key: tuple[bool, Params]) -> Params:
        is_sparse, extra = key
        dense = () if is_sparse else gated_mlp("mlp", hidden, c.size("intermediate_size"))
        mlp = _sparse_mlp(c, "n_routed_experts", "n_shared_experts") if is_sparse else dense
        return attn + extra + mlp + pre_norms(hidden)

    kinds = stack([(label == "sparse", indexer(index)) for index, label in enumerate(labels)], layer)
    index_topk = c.maybe_size("index_topk") if c.states("index_topk") else 2048
    traits = _traits(c, index_topk=index_topk, **expert_traits(c, "n_routed_experts", "num_experts_per_tok"))
    return decoder(c, kinds, traits, final=norm("model.norm", hidden))


def deepseek_v32(c: Fields) -> Decoder:
    """deepseek_v32: an indexer beside the attention of every layer; `num_experts` overrides."""
    _refuse_second_count(c)
    extra = _indexer(c)
    first = c.maybe_size("first_k_dense_replace", low=0) or 0
    return _labelled(c, sparse_labels(c, first), lambda _index: extra)


def glm_moe_dsa(c: Fields) -> Decoder:
    """glm_moe_dsa: deepseek_v32 whose layers may share an indexer (`indexer_types`)."""
    _refuse_second_count(c)
    extra, types = _indexer(c), _indexer_types(c)
    first = c.maybe_size("first_k_dense_replace", low=0) or 0
    return _labelled(c, sparse_labels(c, first), lambda index: extra if types[index] == "full" else ())


def _refuse_second_count(c: Fields) -> None:
    if c.has("num_experts") and c.size("num_experts") != c.size("n_routed_experts"):
        raise c.refuse("num_experts", "but n_routed_experts says otherwise", "Keep one of the two.")


def _indexer(c: Fields) -> Params:
    hidden, count, width = c.size("hidden_size"), c.size("index_n_heads"), c.size("index_head_dim")
    return (
        *linear("self_attn.indexer.wq_b", count * width, c.size("q_lora_rank")),
        *linear("self_attn.indexer.wk", width, hidden),
        *norm("self_attn.indexer.k_norm", width, bias=True),
        *linear("self_attn.indexer.weights_proj", count, hidden),
    )


def _indexer_types(c: Fields) -> tuple[str, ...]:
    count = c.num_layers()
    stated = c.labels("indexer_types", count)
    if stated:
        return stated
    pattern = c.raw("index_topk_pattern")
    if isinstance(pattern, str) and len(pattern) == count and set(pattern) <= set("FS"):
        return tuple("full" if letter == "F" else "shared" for letter in pattern)
    if pattern is not None:
        raise c.refuse("index_topk_pattern", f"not one F or S for each of {count} layers", "Write for example FFSS.")
    frequency = max(c.maybe_size("index_topk_freq", low=0) or 1, 1)
    offset = c.maybe_size("index_skip_topk_offset", low=0)
    offset = 2 if offset is None else offset
    return tuple("full" if max(i - offset + 1, 0) % frequency == 0 else "shared" for i in range(count))


# -- DeepSeek V4 -------------------------------------------------------------------------------------------------

_COMPRESS_RATIOS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def deepseek_v4(c: Fields) -> Decoder:
    """deepseek_v4: one shared key/value head, grouped output, compressors by layer type, hyper-connections."""
    hidden, count, streams = c.size("hidden_size"), c.num_layers(), c.size("hc_mult")
    width, bias = c.size("moe_intermediate_size"), c.flag("mlp_bias")
    mlp = (
        *routed_mlp(c, hidden, count_key="n_routed_experts", width_key="moe_intermediate_size", gate_first=True),
        *gated_mlp("mlp.shared_experts", hidden, width, bias),
    )

    def layer(kind: str) -> Params:
        attn = under("self_attn", _v4_attention(c) + _v4_compressor(c, kind))
        connections = _hyper_connection("attn_hc", hidden, streams) + _hyper_connection("ffn_hc", hidden, streams)
        return attn + mlp + pre_norms(hidden) + connections

    head = (
        *plain("model.hc_head.hc_fn", streams, streams * hidden),
        *plain("model.hc_head.hc_base", streams),
        *plain("model.hc_head.hc_scale", 1),
    )
    num_heads, dim = c.size("num_attention_heads"), c.size("head_dim")
    h = Heads(num_heads, c.maybe_size("num_key_value_heads") or 1, dim)
    traits = dense_traits(
        c,
        h,
        rotary=None,
        intermediate_size=width,
        **expert_traits(c, "n_routed_experts", "num_experts_per_tok"),
    )
    kinds = stack(_v4_types(c, count), layer)
    return decoder(c, kinds, traits, final=norm("model.norm", hidden), after=head)


def _v4_types(c: Fields, count: int) -> tuple[str, ...]:
    stated = c.labels("layer_types", count, trim=True)
    if stated:
        return stated
    ratios = c.integers("compress_ratios")
    if ratios is not None:
        if len(ratios) < count or not set(ratios) <= set(_COMPRESS_RATIOS):
            raise c.refuse("compress_ratios", f"not one of 0, 4, 128 for each of {count} layers", "Check the config.")
        return tuple(_COMPRESS_RATIOS[ratio] for ratio in ratios[:count])
    heavy, sparse = "heavily_compressed_attention", "compressed_sparse_attention"
    return (heavy,) * min(count, 2) + tuple(sparse if i % 2 else heavy for i in range(max(count - 2, 0)))


def _v4_attention(c: Fields) -> Params:
    hidden, num_heads, dim = c.size("hidden_size"), c.size("num_attention_heads"), c.size("head_dim")
    rank, groups, out_rank = c.size("q_lora_rank"), c.size("o_groups"), c.size("o_lora_rank")
    return (
        *plain("sinks", num_heads),
        *linear("q_a_proj", rank, hidden),
        *norm("q_a_norm", rank),
        *linear("q_b_proj", num_heads * dim, rank),
        *linear("kv_proj", dim, hidden),
        *norm("kv_norm", dim),
        *outside(linear("o_a_proj", groups * out_rank, num_heads * dim // groups)),  # by groups, no plain product
        *linear("o_b_proj", hidden, groups * out_rank),
    )


def _v4_compressor(c: Fields, kind: str) -> Params:
    hidden, dim = c.size("hidden_size"), c.size("head_dim")
    if kind == "sliding_attention":
        return ()
    is_sparse = kind == "compressed_sparse_attention"
    if not is_sparse and kind != "heavily_compressed_attention":
        raise c.refuse("layer_types", f"with {kind!r}, unknown to DeepSeek-V4", "Use Transformers' names.")
    rate = _v4_rate(c, kind)
    wide = dim * (2 if is_sparse else 1)
    compressor = _v4_projections(hidden, rate, wide, dim)
    if is_sparse:
        index_heads, index_dim = c.size("index_n_heads"), c.size("index_head_dim")
        compressor += under(
            "indexer",
            _v4_projections(hidden, rate, 2 * index_dim, index_dim)
            + linear("q_b_proj", index_heads * index_dim, c.size("q_lora_rank"))
            + linear("scorer.weights_proj", index_heads, hidden),
        )
    return under("compressor", compressor)


def _v4_projections(hidden: int, rate: int, wide: int, dim: int) -> Params:
    return (
        *plain("position_bias", rate, wide),
        *linear("kv_proj", wide, hidden),
        *linear("gate_proj", wide, hidden),
        *norm("kv_norm", dim),
    )


def _v4_rate(c: Fields, kind: str) -> int:
    legacy = {"compressed_sparse_attention": "compress_rate_csa", "heavily_compressed_attention": "compress_rate_hca"}
    stated = c.maybe_size(legacy[kind])
    if stated:
        return stated
    rates = c.section_of("compress_rates")
    value = rates.get(kind, 4 if kind == "compressed_sparse_attention" else 128)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 40:
        raise c.error(f"compress_rates.{kind}", value, "not a whole number", "Write for example 4.")
    return value


def _hyper_connection(name: str, hidden: int, streams: int) -> Params:
    mixes = (2 + streams) * streams
    return (
        *plain(f"{name}.fn", mixes, streams * hidden),
        *plain(f"{name}.base", mixes),
        *plain(f"{name}.scale", 3),
    )


# -- Kimi-Linear -------------------------------------------------------------------------------------------------


def kimi_linear(c: Fields) -> Decoder:
    """kimi_linear: delta attention with a short convolution in three layers of four, latent attention in the rest."""
    hidden, count = c.size("hidden_size"), c.num_layers()
    linear_settings = c.section_of("linear_attn_config")
    types = c.labels("layer_types", count) or _kimi_types(c, linear_settings, count)
    labels = sparse_labels(c, 1 if c.raw("first_k_dense_replace") is None else c.size("first_k_dense_replace", low=0))

    def layer(key: tuple[str, bool]) -> Params:
        kind, is_sparse = key
        attn = latent_attention(c) if kind == "full_attention" else under("self_attn", _delta(c, linear_settings))
        dense = () if is_sparse else gated_mlp("mlp", hidden, c.size("intermediate_size"))
        mlp = _sparse_mlp(c, "num_experts", "num_shared_experts") if is_sparse else dense
        return attn + mlp + pre_norms(hidden)

    keys = [(types[i], labels[i] == "sparse") for i in range(count)]
    traits = _traits(c, **expert_traits(c, "num_experts", "num_experts_per_token"))
    # The class names no tied weights, so the head keeps a weight of its own (modeling_kimi_linear.py).
    final = norm("model.norm", hidden)
    return decoder(c, stack(keys, layer), traits, final=final, tied=False, positions="model_max_length")


def _kimi_types(c: Fields, settings: object, count: int) -> tuple[str, ...]:
    """The checkpoint numbers layers from 1 (configuration_kimi_linear.py, __post_init__)."""
    full = settings.get("full_attn_layers") if isinstance(settings, dict) else None
    if full is None:
        return tuple("full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(count))
    if not isinstance(full, list) or not all(type(i) is int for i in full):
        raise c.refuse("linear_attn_config", "whose full_attn_layers are no list of layers", "Check the config.")
    return tuple("full_attention" if i + 1 in full else "linear_attention" for i in range(count))


def _delta(c: Fields, settings: object) -> Params:
    own = Fields(
        settings if isinstance(settings, dict) else {},
        defaults=c.no_defaults(),
        place=c.place,
        section="linear_attn_config.",
    )
    hidden = c.size("hidden_size")
    dim = own.maybe_size("head_dim") or c.size("linear_head_dim")
    count = own.maybe_size("num_heads") or c.size("linear_num_heads")
    kernel = own.maybe_size("short_conv_kernel_size") or c.size("linear_conv_kernel_dim")
    width = dim * count
    return (
        *linear("q_proj", width, hidden),
        *linear("k_proj", width, hidden),
        *linear("v_proj", width, hidden),
        *plain("conv1d.weight", 3 * width, 1, kernel),
        *plain("forget_gate.dt_bias", width),
        *plain("forget_gate.A_log", 1, 1, count, 1),
        *linear("forget_gate.f_a_proj", dim, hidden),
        *linear("forget_gate.f_b_proj", width, dim),
        *linear("b_proj", count, hidden),
        *linear("g_a_proj", dim, hidden),
        *linear("g_b_proj", width, dim),
        *norm("o_norm", dim),
        *linear("o_proj", hidden, width),
    )


FAMILIES: dict[str, Callable[[Fields], Decoder]] = {
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": _interleaving(deepseek),
    "deepseek_v32": deepseek_v32,
    "deepseek_v4": deepseek_v4,
    "glm4_moe_lite": _interleaving(glm4_moe_lite),
    "glm_moe_dsa": glm_moe_dsa,
    "kimi_linear": kimi_linear,
    "minicpm3": minicpm3,
    "youtu": _interleaving(minicpm3),
}
