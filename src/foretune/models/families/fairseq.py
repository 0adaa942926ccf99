"""Decoders that came from fairseq: OPT and XGLM.

Each function reads like the class it is named after in transformers/models/<family>/modeling_<family>.py (5.24).
"""

from collections.abc import Callable

from foretune.models.families.classic import refuse_cross_attention
from foretune.models.families.dense import dense_traits
from foretune.models.families.fields import Fields
from foretune.models.families.parts import (
    Decoder,
    Heads,
    Params,
    decoder,
    embedding,
    heads,
    linear,
    norm,
    outside,
    stack,
    two_layer_mlp,
)

__all__ = ["FAMILIES"]


def opt(c: Fields) -> Decoder:
    """opt: learned positions with an offset of 2; the embedding may be narrower than the model (350m)."""
    h, hidden, bias = heads(c, stated_dim=False), c.size("hidden_size"), c.flag("enable_bias")
    affine = c.flag("layer_norm_elementwise_affine")
    narrow = c.maybe_size("word_embed_proj_dim") or hidden
    projections = [linear(f"self_attn.{name}_proj", hidden, hidden, bias) for name in ("k", "v", "q", "out")]
    layer = (
        *(parameter for projection in projections for parameter in projection),
        *(norm("self_attn_layer_norm", hidden, bias=True) if affine else ()),
        *two_layer_mlp("fc1", "fc2", hidden, c.size("ffn_dim"), bias),
        *(norm("final_layer_norm", hidden, bias=True) if affine else ()),
    )
    before = embedding("model.decoder.embed_positions", c.size("max_position_embeddings") + 2, hidden)
    if narrow != hidden:
        before += outside(linear("model.decoder.project_out", narrow, hidden))
        before += outside(linear("model.decoder.project_in", hidden, narrow))
    if c.flag("do_layer_norm_before") and not c.flag("_remove_final_layer_norm") and affine:
        # Registered before the layers (modeling_opt.py, OPTDecoder.__init__).
        before += norm("model.decoder.final_layer_norm", hidden, bias=True)
    return decoder(
        c,
        stack([0] * c.num_layers(), lambda _: layer),
        dense_traits(
            c,
            h,
            rotary=None,
            activation="activation_function",
            intermediate_size=c.size("ffn_dim"),
            norms_last=not c.flag("do_layer_norm_before"),
            has_final_norm=c.flag("do_layer_norm_before") and not c.flag("_remove_final_layer_norm"),
            dropouts=(None, "attention_dropout", "dropout"),
        ),
        embed="model.decoder.embed_tokens",
        embed_width=narrow,
        before=before,
        prefix="model.decoder.layers.",
        final=(),
    )


def xglm(c: Fields) -> Decoder:
    """xglm: sinusoidal positions without parameters."""
    refuse_cross_attention(c)
    h, hidden, width = heads(c, stated_dim=False), c.size("d_model"), c.size("ffn_dim")
    return _fairseq(c, h, hidden, width, before=(), layers=c.num_layers("num_layers"), final="model.layer_norm")


def _fairseq(c: Fields, h: Heads, hidden: int, width: int, *, before: Params, layers: int, final: str) -> Decoder:
    projections = [linear(f"self_attn.{name}_proj", hidden, hidden, True) for name in ("k", "v", "q", "out")]
    layer = (
        *(parameter for projection in projections for parameter in projection),
        *norm("self_attn_layer_norm", hidden, bias=True),
        *two_layer_mlp("fc1", "fc2", hidden, width, True),
        *norm("final_layer_norm", hidden, bias=True),
    )
    return decoder(
        c,
        stack([0] * layers, lambda _: layer),
        dense_traits(
            c,
            h,
            rotary=None,
            activation="activation_function",
            intermediate_size=width,
            table_positions=c.size("max_position_embeddings"),
            activation_dropout=c.number("activation_dropout") or 0.0,
            dropouts=("dropout", "attention_dropout", "dropout"),
        ),
        before=before,
        final=norm(final, hidden, bias=True),
    )


FAMILIES: dict[str, Callable[[Fields], Decoder]] = {"opt": opt, "xglm": xglm}
