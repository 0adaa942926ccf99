"""Families whose code is remote: Qwen (the first generation), Baichuan and Baichuan 2, ChatGLM 2 and 3.

Transformers 5.24 has no class for them, so nothing here trains or traces them. Names and order are those of the
modelling files that were published with the checkpoints (modeling_qwen.py, modeling_baichuan.py, modeling_chatglm.py).
"""

from collections.abc import Callable

from foretune.models.families.dense import dense_traits, pre_norms, uniform
from foretune.models.families.fields import Fields
from foretune.models.families.parts import (
    Decoder,
    Heads,
    embedding,
    gated_mlp,
    heads,
    linear,
    norm,
    plain,
    stack,
    under,
)
from foretune.models.shape import DecoderTraits

__all__ = ["FAMILIES"]

BAICHUAN_ALIBI_HIDDEN = 5120
"""The 13B of both generations has alibi in the place of rotary embedding; its config does not say so."""


def qwen(c: Fields) -> Decoder:
    """QWenLMHeadModel: fused queries, keys and values with a bias; `intermediate_size` is that of both branches."""
    hidden, count = c.size("hidden_size"), c.size("num_attention_heads")
    width = c.maybe_size("kv_channels") or hidden // count
    h, inner = Heads(count, count, width), c.size("intermediate_size") // 2
    has_bias = c.has("no_bias") and not c.flag("no_bias")
    layer = (
        *norm("ln_1", hidden),
        *linear("attn.c_attn", 3 * h.query_width, hidden, True),
        *linear("attn.c_proj", hidden, h.query_width, has_bias),
        *norm("ln_2", hidden),
        *linear("mlp.w1", inner, hidden, has_bias),
        *linear("mlp.w2", inner, hidden, has_bias),
        *linear("mlp.c_proj", hidden, inner, has_bias),
    )
    vocab = c.size("vocab_size")
    return Decoder(
        vocab_size=vocab,
        num_layers=c.num_layers(),
        max_positions=c.maybe_size("seq_length"),
        tied=False,
        traits=_traits(c, h, inner, int(width * (c.number("rotary_pct") or 1.0))),
        prefix="transformer.h.",
        before=embedding("transformer.wte", vocab, hidden),
        kinds=stack([0] * c.num_layers(), lambda _: layer),
        after=norm("transformer.ln_f", hidden) + plain("lm_head.weight", vocab, hidden, role="head"),
    )


def baichuan(c: Fields) -> Decoder:
    """BaichuanForCausalLM: Llama with a fused W_pack."""
    h, hidden = heads(c), c.size("hidden_size")
    layer = (
        *under(
            "self_attn",
            (*linear("W_pack", 3 * h.query_width, hidden), *linear("o_proj", hidden, h.query_width)),
        ),
        *gated_mlp("mlp", hidden, c.size("intermediate_size")),
        *pre_norms(hidden),
    )
    built = uniform(c, h, layer, rotary=None if hidden == BAICHUAN_ALIBI_HIDDEN else 1.0)
    return built._replace(traits=built.traits.with_(activation=c.text("hidden_act") or "silu"))


def chatglm(c: Fields) -> Decoder:
    """ChatGLMForConditionalGeneration, 2 and 3: grouped queries, half of a head rotated, gate and up in one."""
    hidden, count = c.size("hidden_size"), c.size("num_attention_heads")
    width = c.maybe_size("kv_channels") or hidden // count
    groups = c.size("multi_query_group_num") if c.flag("multi_query_attention") else count
    h, inner = Heads(count, groups, width), c.size("ffn_hidden_size")
    qkv_bias = c.flag("add_qkv_bias") or c.flag("add_bias_linear")
    bias, vocab, layers = c.flag("add_bias_linear"), c.size("padded_vocab_size"), c.num_layers("num_layers")
    layer = (
        *norm("input_layernorm", hidden),
        *linear("self_attention.query_key_value", h.query_width + 2 * h.kv_width, hidden, qkv_bias),
        *linear("self_attention.dense", hidden, h.query_width, bias),
        *norm("post_attention_layernorm", hidden),
        *linear("mlp.dense_h_to_4h", 2 * inner, hidden, bias),
        *linear("mlp.dense_4h_to_h", hidden, inner, bias),
    )
    return Decoder(
        vocab_size=vocab,
        num_layers=layers,
        max_positions=c.maybe_size("seq_length"),
        tied=False,
        traits=_traits(c, h, inner, width // 2),
        prefix="transformer.encoder.layers.",
        before=embedding("transformer.embedding.word_embeddings", vocab, hidden),
        kinds=stack([0] * layers, lambda _: layer),
        after=norm("transformer.encoder.final_layernorm", hidden)
        + plain("transformer.output_layer.weight", vocab, hidden, role="head"),
    )


def _traits(c: Fields, h: Heads, inner: int, rotary: int) -> DecoderTraits:
    dropouts = (None, None, None)
    traits = dense_traits(c, h, rotary=None, intermediate_size=inner, dropouts=dropouts)
    return traits.with_(rotary_dim=rotary, activation="silu")


FAMILIES: dict[str, Callable[[Fields], Decoder]] = {"baichuan": baichuan, "chatglm": chatglm, "qwen": qwen}
