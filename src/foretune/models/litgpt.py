"""A model in litgpt's modules: one GPT class for all, with fused projections and a head of its own.

Follows litgpt's model.py and config.py (0.2 and 0.5). What differs from Transformers' modules: queries, keys and values
are one linear layer; the head is never tied, and it is a linear layer like the others, so that 4-bit quantization and
adapters reach it; adapters are switched on by part: query, key, value, projection, mlp, head.
"""

from foretune.errors import UnsupportedError
from foretune.models.shape import OUTSIDE, LayerKind, ModelShape, ParameterRole, ParameterSpec, Projection

__all__ = ["LITGPT_TYPES", "litgpt_shape"]

LITGPT_TYPES = ("falcon", "gemma", "gemma2", "gpt_neox", "llama", "mistral", "phi", "phi3")
"""Model types that are described in litgpt's modules."""

_FUSED = ("W_pack", "c_attn", "qkv_proj", "query_key_value")
_MLP = (
    *("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "dense_h_to_4h", "dense_4h_to_h"),
    *("fc", "fc_1", "fc_2", "mlp"),
)
_NAMES = {
    "query": ("q_proj", *_FUSED),
    "key": ("k_proj", *_FUSED),
    "value": ("v_proj", *_FUSED),
    "proj": ("o_proj", "dense", "out_proj", "projection"),
}
"""Transformers' names for a part of attention; `mlp` has no parts, its flag is for all its layers."""


def litgpt_shape(shape: ModelShape) -> ModelShape:
    """Describe a model in litgpt's modules.

    Raises UnsupportedError for a model type that is not described in them.
    """
    if shape.code == "litgpt":
        return shape
    if shape.model_type not in LITGPT_TYPES:
        raise UnsupportedError(
            f"{shape.id}: how litgpt runs {shape.model_type} models is not estimated yet.",
            hint=f"Under the stack litgpt these are: {', '.join(LITGPT_TYPES)}.",
            field="model.id",
        )
    kind = _layer(shape)
    wide, hidden = shape.vocab_size, shape.traits.hidden_size
    has_head_bias = any(p.name == "lm_head.bias" for p in shape.after)
    head = _linear("lm_head", wide, hidden, has_head_bias)
    embedding = (_parameter("transformer.wte.weight", "embedding", wide, hidden),)
    return ModelShape(
        id=shape.id,
        model_type=shape.model_type,
        code="litgpt",
        source=shape.source,
        revision=shape.revision,
        num_layers=shape.num_layers,
        vocab_size=shape.vocab_size,
        max_positions=shape.max_positions,
        tied_embeddings=False,
        traits=shape.traits,
        layer_prefix="transformer.h.",
        before=(*head, *embedding),
        kinds=(kind,),
        after=_norm(shape, "transformer.ln_f"),
        adaptable=(*_adaptable(shape, kind), _outside_head(wide, hidden, has_head_bias)),
        tower_params=shape.tower_params,
        published_only_as=shape.published_only_as,
        notes=shape.notes,
    )


def _parameter(name: str, role: ParameterRole, *size: int) -> ParameterSpec:
    return ParameterSpec(name=name, shape=size, role=role)


def _linear(name: str, out_features: int, in_features: int, has_bias: bool) -> tuple[ParameterSpec, ...]:
    weight = _parameter(f"{name}.weight", "linear", out_features, in_features)
    return (weight, _parameter(f"{name}.bias", "bias", out_features)) if has_bias else (weight,)


def _norm(shape: ModelShape, name: str) -> tuple[ParameterSpec, ...]:
    """A LayerNorm where Transformers' class has one, else an RMSNorm."""
    width = shape.traits.hidden_size
    is_layer_norm = any(p.role == "norm" and p.name.endswith(".bias") for p in shape.after)
    weight = _parameter(f"{name}.weight", "norm", width)
    return (weight, _parameter(f"{name}.bias", "norm", width)) if is_layer_norm else (weight,)


def _layer(shape: ModelShape) -> LayerKind:
    """Block: norm_1, attn, a norm after it (Gemma 2), norm_2 unless one is shared, mlp, a norm after it."""
    t, first = shape.traits, shape.kinds[0].parameters
    assert t.num_heads is not None
    assert t.num_kv_heads is not None
    assert t.head_dim is not None
    assert t.intermediate_size is not None
    num_norms = sum(p.role == "norm" and p.name.endswith(".weight") for p in first)
    has_bias = any(p.role == "bias" for p in first)
    queries, keys = t.num_heads * t.head_dim, t.num_kv_heads * t.head_dim
    hidden, inner, is_sandwich = t.hidden_size, t.intermediate_size, num_norms == 4
    is_gated = any(p.name.endswith(("gate_proj.weight", "gate_up_proj.weight")) for p in first)
    ups = ("fc_1", "fc_2") if is_gated else ("fc",)
    return LayerKind(
        layers=tuple(range(shape.num_layers)),
        parameters=(
            *_norm(shape, "norm_1"),
            *_linear("attn.attn", queries + 2 * keys, hidden, has_bias),
            *_linear("attn.proj", hidden, queries, has_bias),
            *(_norm(shape, "post_attention_norm") if is_sandwich else ()),
            *(_norm(shape, "norm_2") if num_norms > 1 else ()),
            *(parameter for up in ups for parameter in _linear(f"mlp.{up}", inner, hidden, has_bias)),
            *_linear("mlp.proj", hidden, inner, has_bias),
            *(_norm(shape, "post_mlp_norm") if is_sandwich else ()),
        ),
    )


def _adaptable(shape: ModelShape, kind: LayerKind) -> tuple[Projection, ...]:
    """What adapters see of a layer: the parts of its fused projection, and the linear layers."""
    t, has_bias = shape.traits, any(p.role == "bias" for p in kind.parameters)
    assert t.num_heads is not None
    assert t.num_kv_heads is not None
    assert t.head_dim is not None
    heads = {"query": t.num_heads, "key": t.num_kv_heads, "value": t.num_kv_heads}

    def projection(name: str, size: tuple[int, ...], names: tuple[str, ...], part_of: str | None = None) -> Projection:
        return Projection(
            name=name,
            in_features=size[1],
            out_features=size[0],
            has_bias=has_bias,
            is_quantizable=True,
            layers=kind.layers,
            other_names=names,
            part_of=part_of,
        )

    parts = [
        projection(f"attn.{name}", (number * t.head_dim, t.hidden_size), _NAMES[name], "attn.attn")
        for name, number in heads.items()
    ]
    for parameter in kind.parameters:
        name = parameter.name.removesuffix(".weight")
        if parameter.role == "linear" and name != "attn.attn":
            parts.append(projection(name, parameter.shape, _MLP if name.startswith("mlp.") else _NAMES["proj"]))
    return tuple(parts)


def _outside_head(vocab_size: int, hidden: int, has_bias: bool) -> Projection:
    return Projection(
        name="lm_head",
        in_features=hidden,
        out_features=vocab_size,
        has_bias=has_bias,
        is_quantizable=True,
        layers=(OUTSIDE,),
        other_names=("head",),
    )
