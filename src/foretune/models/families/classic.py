"""Dense decoders from before Llama: fused projections, learned positions, ALiBi, LayerNorm with bias.

Each function reads like the class it is named after in transformers/models/<family>/modeling_<family>.py (5.24).
"""

from collections.abc import Callable

from foretune.errors import UnsupportedError
from foretune.models.families.dense import dense_traits
from foretune.models.families.fields import Fields
from foretune.models.families.parts import (
    Decoder,
    Heads,
    Params,
    attention,
    conv1d,
    decoder,
    embedding,
    heads,
    linear,
    norm,
    stack,
    two_layer_mlp,
)
from foretune.models.shape import DecoderTraits

__all__ = ["FAMILIES", "refuse_cross_attention"]

_PDROPS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
_HIDDEN_DROPOUT = (None, "attention_dropout", "hidden_dropout")


def refuse_cross_attention(c: Fields) -> None:
    """Refuse the decoder half of an encoder-decoder."""
    if c.flag("add_cross_attention"):
        raise UnsupportedError(
            "add_cross_attention makes this the decoder of an encoder-decoder; foretune counts decoder-only models.",
            hint="Take the plain model's config, without add_cross_attention.",
            place=c.place,
            field="add_cross_attention",
        )


def gpt2(c: Fields) -> Decoder:
    """gpt2: Conv1D everywhere, learned positions, a tied head."""
    refuse_cross_attention(c)
    h, hidden = heads(c, stated_dim=False), c.size("n_embd")
    width = c.maybe_size("n_inner") or 4 * hidden
    layer = (
        *norm("ln_1", hidden, bias=True),
        *conv1d("attn.c_attn", hidden, 3 * hidden),
        *conv1d("attn.c_proj", hidden, hidden),
        *norm("ln_2", hidden, bias=True),
        *conv1d("mlp.c_fc", hidden, width),
        *conv1d("mlp.c_proj", width, hidden),
    )
    traits = dense_traits(
        c, h, rotary=None, activation="activation_function", intermediate_size=width, dropouts=_PDROPS
    )
    return _with_wte(c, layer, traits_of=traits, learned_positions=True)


def _with_wte(
    c: Fields, layer: Params, *, traits_of: DecoderTraits, learned_positions: bool, head_bias: bool = False
) -> Decoder:
    """The GPT-2 kind of skeleton: transformer.wte, (wpe,) h, ln_f."""
    hidden = c.size(c.own_name("hidden_size"))
    positions = c.size(c.own_name("max_position_embeddings")) if learned_positions else 0
    return decoder(
        c,
        stack([0] * c.num_layers(c.own_name("num_hidden_layers")), lambda _: layer),
        traits_of,
        embed="transformer.wte",
        before=embedding("transformer.wpe", positions, hidden) if learned_positions else (),
        prefix="transformer.h.",
        final=norm("transformer.ln_f", hidden, bias=True),
        head_bias=head_bias,
    )


def gpt_bigcode(c: Fields) -> Decoder:
    """gpt_bigcode: gpt2 with real linears and, with `multi_query`, one key/value head."""
    refuse_cross_attention(c)
    h, hidden = heads(c, stated_dim=False), c.size("n_embd")
    h = h._replace(kv=1 if c.flag("multi_query") else h.query)
    width = c.maybe_size("n_inner") or 4 * hidden
    layer = (
        *norm("ln_1", hidden, bias=True),
        *linear("attn.c_attn", hidden + 2 * h.kv_width, hidden, True),
        *linear("attn.c_proj", hidden, hidden, True),
        *norm("ln_2", hidden, bias=True),
        *two_layer_mlp("mlp.c_fc", "mlp.c_proj", hidden, width, True),
    )
    traits = dense_traits(
        c,
        h,
        rotary=None,
        activation="activation_function",
        intermediate_size=width,
        dropouts=_PDROPS,
        table_positions=c.size(c.own_name("max_position_embeddings")),
    )
    return _with_wte(c, layer, traits_of=traits, learned_positions=True)


def gpt_neo(c: Fields) -> Decoder:
    """gpt_neo: attention.attention; k and v before q; no bias on them; global and local layers in turn."""
    h, hidden, count = heads(c, stated_dim=False), c.size("hidden_size"), c.num_layers("num_layers")
    width = c.maybe_size("intermediate_size") or 4 * hidden
    attn = [linear(f"attn.attention.{name}_proj", hidden, hidden) for name in ("k", "v", "q")]
    layer = (
        *norm("ln_1", hidden, bias=True),
        *(parameter for projection in attn for parameter in projection),
        *linear("attn.attention.out_proj", hidden, hidden, True),
        *norm("ln_2", hidden, bias=True),
        *two_layer_mlp("mlp.c_fc", "mlp.c_proj", hidden, width, True),
    )
    local = _gpt_neo_local(c, count)
    traits = dense_traits(
        c,
        h,
        rotary=None,
        activation="activation_function",
        intermediate_size=width,
        sliding_window=c.maybe_size("window_size") if any(local) else None,
        sliding_layers=local if any(local) else (),
        table_positions=c.size("max_position_embeddings"),
        dropouts=("embed_dropout", "attention_dropout", "resid_dropout"),
    )
    return _with_wte(c, layer, traits_of=traits, learned_positions=True)


def _gpt_neo_local(c: Fields, count: int) -> tuple[bool, ...]:
    """Expand `attention_types`, [[["global", "local"], 12]], into one flag for each layer."""
    stated = c.raw("attention_types") or [[["global", "local"], 12]]
    flags: list[bool] = []
    try:
        for kinds, repeats in stated:
            flags.extend([kind == "local" for kind in kinds] * min(int(repeats), count))
    except (TypeError, ValueError):
        flags = []
    if len(flags) != count:
        raise c.refuse(
            "attention_types", f"which does not describe {count} layers", 'Write [[["global", "local"], N]].'
        )
    return tuple(flags)


def gptj(c: Fields) -> Decoder:
    """gptj: one norm, attention and MLP in parallel, a bias on the head; `rotary_dim` in the config."""
    h, hidden = heads(c, stated_dim=False), c.size("n_embd")
    projections = [linear(f"attn.{name}_proj", hidden, hidden) for name in ("k", "v", "q", "out")]
    attn = tuple(parameter for projection in projections for parameter in projection)
    return _gptj_like(c, h, attn)


def codegen(c: Fields) -> Decoder:
    """codegen: gptj with q, k and v fused after the output projection."""
    h, hidden = heads(c, stated_dim=False), c.size("n_embd")
    return _gptj_like(c, h, linear("attn.out_proj", hidden, hidden) + linear("attn.qkv_proj", 3 * hidden, hidden))


def _gptj_like(c: Fields, h: Heads, attn: Params) -> Decoder:
    hidden = c.size("n_embd")
    width = c.maybe_size("n_inner") or 4 * hidden
    layer = (
        *norm("ln_1", hidden, bias=True),
        *attn,
        *two_layer_mlp("mlp.fc_in", "mlp.fc_out", hidden, width, True),
    )
    traits = dense_traits(
        c,
        h,
        rotary=None,
        activation="activation_function",
        intermediate_size=width,
        has_parallel_residual=True,
        rotary_dim=c.maybe_size("rotary_dim") or h.dim,
        table_positions=c.size(c.own_name("max_position_embeddings")),
        dropouts=_PDROPS,
    )
    return _with_wte(c, layer, traits_of=traits, learned_positions=False, head_bias=True)


def gpt_neox(c: Fields) -> Decoder:
    """gpt_neox: fused query_key_value, two norms that stand before the attention, parallel by flag."""
    h, hidden, bias = heads(c, stated_dim=False), c.size("hidden_size"), c.flag("attention_bias")
    layer = (
        *norm("input_layernorm", hidden, bias=True),
        *norm("post_attention_layernorm", hidden, bias=True),
        *linear("attention.query_key_value", 3 * hidden, hidden, bias),
        *linear("attention.dense", hidden, hidden, bias),
        *two_layer_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", hidden, c.size("intermediate_size"), True),
    )
    share = c.number("rotary_pct")
    if share is not None and not 0 <= share <= 1:
        raise c.refuse("rotary_pct", "not a share from 0 to 1", "Write for example 0.25.")
    traits = dense_traits(
        c,
        h,
        rotary=0.25 if share is None else share,
        has_parallel_residual=c.flag("use_parallel_residual"),
        dropouts=("hidden_dropout", "attention_dropout", "hidden_dropout"),
    )
    return decoder(
        c,
        stack([0] * c.num_layers(), lambda _: layer),
        traits,
        embed="gpt_neox.embed_in",
        prefix="gpt_neox.layers.",
        final=norm("gpt_neox.final_layer_norm", hidden, bias=True),
    )


def falcon(c: Fields) -> Decoder:
    """falcon: fused query_key_value in three layouts; norms by `parallel_attn` and `new_decoder_architecture`."""
    h, hidden, bias = heads(c, stated_dim=False, kv_key="num_kv_heads"), c.size("hidden_size"), c.flag("bias")
    is_new, is_parallel = c.flag("new_decoder_architecture"), c.flag("parallel_attn")
    if not is_new:
        h = h._replace(kv=1 if c.flag("multi_query") else h.query)
    width = c.maybe_size("ffn_hidden_size") or 4 * hidden
    # The three layouts count differently where hidden is no multiple of the heads (modeling_falcon.py, 229-235).
    fused = h.query_width + 2 * h.kv_width if is_new else hidden + 2 * h.dim if h.kv == 1 else 3 * hidden
    layer = (
        *linear("self_attention.query_key_value", fused, hidden, bias),
        *linear("self_attention.dense", hidden, hidden, bias),
        *two_layer_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", hidden, width, bias),
        *_falcon_norms(c, hidden),
    )
    traits = dense_traits(
        c,
        h,
        rotary=None if c.flag("alibi") else 1.0,
        activation="activation",
        intermediate_size=width,
        has_parallel_residual=is_new or is_parallel,
        has_grouped_projection=is_new,
        dropouts=_HIDDEN_DROPOUT,
    )
    return decoder(
        c,
        stack([0] * c.num_layers(), lambda _: layer),
        traits,
        embed="transformer.word_embeddings",
        prefix="transformer.h.",
        final=norm("transformer.ln_f", hidden, bias=True),
    )


def _falcon_norms(c: Fields, hidden: int) -> Params:
    count = c.maybe_size("num_ln_in_parallel_attn")
    if count is None and c.flag("new_decoder_architecture"):
        count = 2
    if not c.flag("parallel_attn"):
        names: tuple[str, ...] = ("post_attention_layernorm", "input_layernorm")
    elif count == 2:
        names = ("ln_attn", "ln_mlp")
    else:
        names = ("input_layernorm",)
    return tuple(parameter for name in names for parameter in norm(name, hidden, bias=True))


def bloom(c: Fields) -> Decoder:
    """bloom: a norm after the embedding, fused query_key_value, ALiBi; the old key `n_embed` wins."""
    h, hidden = heads(c, stated_dim=False), c.size("hidden_size")
    layer = (
        *norm("input_layernorm", hidden, bias=True),
        *linear("self_attention.query_key_value", 3 * hidden, hidden, True),
        *linear("self_attention.dense", hidden, hidden, True),
        *norm("post_attention_layernorm", hidden, bias=True),
        *two_layer_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", hidden, 4 * hidden, True),
    )
    built = decoder(
        c,
        stack([0] * c.num_layers("n_layer"), lambda _: layer),
        dense_traits(
            c,
            h,
            rotary=None,
            intermediate_size=4 * hidden,
            activation="no_such_key",
            keeps_normed_residual=c.flag("apply_residual_connection_post_layernorm"),
            dropouts=_HIDDEN_DROPOUT,
        ),
        embed="transformer.word_embeddings",
        before=norm("transformer.word_embeddings_layernorm", hidden, bias=True),
        prefix="transformer.h.",
        final=norm("transformer.ln_f", hidden, bias=True),
        positions="seq_length",
    )
    return built._replace(traits=built.traits.with_(activation="gelu_pytorch_tanh"))


def mpt(c: Fields) -> Decoder:
    """mpt: no bias and no positions; the MLP is four times as wide whatever `expansion_ratio` says."""
    h, hidden = heads(c, stated_dim=False), c.size("d_model")
    layer = (
        *norm("norm_1", hidden),
        *linear("attn.Wqkv", 3 * hidden, hidden),
        *linear("attn.out_proj", hidden, hidden),
        *norm("norm_2", hidden),
        *two_layer_mlp("ffn.up_proj", "ffn.down_proj", hidden, 4 * hidden),
    )
    built = decoder(
        c,
        stack([0] * c.num_layers("n_layers"), lambda _: layer),
        dense_traits(
            c,
            h,
            rotary=None,
            intermediate_size=4 * hidden,
            activation="no_such_key",
            table_positions=c.size("max_seq_len"),
            dropouts=("emb_pdrop", None, "resid_pdrop"),
        ),
        embed="transformer.wte",
        prefix="transformer.blocks.",
        final=norm("transformer.norm_f", hidden),
        positions="max_seq_len",
    )
    probabilities = Fields(c.section_of("attn_config"), c.no_defaults(), place=c.place, section="attn_config.")
    dropout, is_clipped = probabilities.number("attn_pdrop") or 0.0, bool(probabilities.number("clip_qkv"))
    traits = built.traits.with_(activation="gelu", attention_dropout=dropout, clips_projections=is_clipped)
    return built._replace(traits=traits)


def phi(c: Fields) -> Decoder:
    """phi: one norm, attention and MLP in parallel, biases everywhere, also on the head."""
    h, hidden = heads(c), c.size("hidden_size")
    layer = (
        *attention(c, h, bias=True, out="dense"),
        *_phi_norms(c, h),
        *two_layer_mlp("mlp.fc1", "mlp.fc2", hidden, c.size("intermediate_size"), True),
        *norm("input_layernorm", hidden, bias=True),
    )
    qk_norm = "head" if c.flag("qk_layernorm") else None
    return decoder(
        c,
        stack([0] * c.num_layers(), lambda _: layer),
        dense_traits(
            c,
            h,
            rotary=0.5,
            qk_norm=qk_norm,
            has_parallel_residual=True,
            dropouts=("embd_pdrop", "attention_dropout", "resid_pdrop"),
        ),
        final=norm("model.final_layernorm", hidden, bias=True),
        head_bias=True,
    )


def _phi_norms(c: Fields, h: Heads) -> Params:
    if not c.flag("qk_layernorm"):
        return ()
    width = c.size("hidden_size") // h.query
    return norm("self_attn.q_layernorm", width, bias=True) + norm("self_attn.k_layernorm", width, bias=True)


def persimmon(c: Fields) -> Decoder:
    """persimmon: fused query_key_value, norms on queries and keys, half of each head rotated."""
    h, hidden = heads(c, stated_dim=False), c.size("hidden_size")
    layer = (
        *linear("self_attn.query_key_value", 3 * hidden, hidden, True),
        *linear("self_attn.dense", hidden, h.query_width, True),
        *_phi_norms(c, h),
        *two_layer_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", hidden, c.size("intermediate_size"), True),
        *norm("input_layernorm", hidden, bias=True),
        *norm("post_attention_layernorm", hidden, bias=True),
    )
    qk_norm = "head" if c.flag("qk_layernorm") else None
    return decoder(
        c,
        stack([0] * c.num_layers(), lambda _: layer),
        dense_traits(c, h, rotary=0.5, qk_norm=qk_norm, dropouts=_HIDDEN_DROPOUT),
        final=norm("model.final_layernorm", hidden, bias=True),
    )


FAMILIES: dict[str, Callable[[Fields], Decoder]] = {
    "bloom": bloom,
    "codegen": codegen,
    "falcon": falcon,
    "gpt2": gpt2,
    "gpt_bigcode": gpt_bigcode,
    "gpt_neo": gpt_neo,
    "gpt_neox": gpt_neox,
    "gptj": gptj,
    "mpt": mpt,
    "persimmon": persimmon,
    "phi": phi,
}
