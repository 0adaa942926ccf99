"""Relatives of Llama that differ by norms, biases or the MLP: seed_oss, hunyuan, exaone4, ministral, olmo and others.

Each class follows models/<family>/modeling_<family>.py of transformers 5.24; local names are theirs.
"""

from typing import Any

from foretune.memory import blocks
from foretune.memory.activations import Xielu
from foretune.memory.blocks import GatedMlp, LayerNorm, Module, PlainMlp, RmsNorm, call
from foretune.memory.decoder import Layer, Modules, RunOptions
from foretune.memory.families.classic import LayerNormDecoder
from foretune.memory.families.gemma import Gemma2Decoder
from foretune.memory.families.llama import (
    LlamaAttention,
    LlamaDecoder,
    MistralDecoder,
    Olmo2Decoder,
    Olmo2Layer,
    SlidingDecoder,
)
from foretune.memory.norms import BareLayerNorm, BareRmsNorm, LayerNormPlusOne
from foretune.memory.ops import add_scalar, cat_last, dropout, like, mul, narrow, scale, to, transpose, unsqueeze, view
from foretune.memory.pointwise import clamp_in_place
from foretune.memory.tape import Tensor
from foretune.models import DecoderTraits

__all__ = [
    "ApertusDecoder",
    "ArceeDecoder",
    "BitNetDecoder",
    "CwmDecoder",
    "Exaone4Decoder",
    "HunYuanDecoder",
    "Jais2Decoder",
    "Ministral3Decoder",
    "MinistralDecoder",
    "NanoChatDecoder",
    "NemotronDecoder",
    "Olmo3Decoder",
    "OlmoDecoder",
    "SeedOssDecoder",
]


# ------------------------------------------------------------------ attention
class HeadNormAttention(LlamaAttention):
    """models/exaone4, apertus: heads are normed after they are transposed."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        self.q_norm, self.k_norm = (RmsNorm(modules.weight(f"{name}.{n}.weight")) for n in ("q_norm", "k_norm"))

    def project(self, hidden_states: Tensor, hidden_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        query_states, key_states, value_states = super().project(hidden_states, hidden_shape)
        query_states = call(self.q_norm, query_states)
        key_states = call(self.k_norm, key_states)
        return query_states, key_states, value_states


class HunYuanAttention(LlamaAttention):
    """models/hunyuan_v1_dense: heads are normed after the rotation."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        self.late_norms = tuple(
            RmsNorm(modules.weight(f"{name}.{n}.weight")) for n in ("query_layernorm", "key_layernorm")
        )


class SeedOssAttention(LlamaAttention):
    """models/seed_oss: dropout after the output projection."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        self.residual_dropout = modules.traits.residual_dropout


class BitNetAttention(LlamaAttention):
    """models/bitnet: a norm before the output projection."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        self.attn_sub_norm = RmsNorm(modules.weight(f"{name}.attn_sub_norm.weight"))

    def before_output(self, attn_output: Tensor) -> Tensor:
        normed: Tensor = call(self.attn_sub_norm, attn_output)
        return normed


class Ministral3Attention(LlamaAttention):
    """models/ministral3: queries are scaled by their position."""

    def scaled_queries(self, query_states: Tensor, kwargs: dict[str, Any]) -> Tensor:
        return mul(query_states, to(self._attn_scale(kwargs["position_ids"]), query_states.dtype))

    @staticmethod
    def _attn_scale(position_ids: Tensor) -> Tensor:
        """get_llama_4_attn_scale: divide, floor, add, log, multiply, add."""
        scaling = add_scalar(scale(like(add_scalar(like(like(position_ids, "f32"))))))
        return unsqueeze(unsqueeze(scaling, 1), 3)


class OlmoAttention(LlamaAttention):
    """models/olmo: all projections stand before the first view."""

    rotate = staticmethod(blocks.apply_rotary_olmo2)

    def project(self, hidden_states: Tensor, hidden_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        query_states = call(self.q_proj, hidden_states)
        key_states = call(self.k_proj, hidden_states)
        value_states = call(self.v_proj, hidden_states)
        if self.modules.traits.clips_projections:
            query_states = clamp_in_place(query_states)
            key_states = clamp_in_place(key_states)
            value_states = clamp_in_place(value_states)
        query_states = transpose(view(query_states, *hidden_shape), 1, 2)
        key_states = transpose(view(key_states, *hidden_shape), 1, 2)
        value_states = transpose(view(value_states, *hidden_shape), 1, 2)
        return query_states, key_states, value_states


def _rotate_nemotron(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first part of each head; both rotations live until both results are there (modeling_nemotron.py)."""
    cos = unsqueeze(cos, 1)
    sin = unsqueeze(sin, 1)
    rot_dim = cos.shape[-1]
    q, q_pass = narrow(q, -1, rot_dim), narrow(q, -1, q.shape[-1] - rot_dim)
    k, k_pass = narrow(k, -1, rot_dim), narrow(k, -1, k.shape[-1] - rot_dim)
    q_embed = blocks.rotated(q, cos, sin)
    k_embed = blocks.rotated(k, cos, sin)
    return cat_last([q_embed, q_pass]), cat_last([k_embed, k_pass])


class NemotronAttention(LlamaAttention):
    """models/nemotron."""

    rotate = staticmethod(_rotate_nemotron)


def _rotate_nanochat(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the other way round (modeling_nanochat.py)."""
    cos = unsqueeze(cos, 1)
    sin = unsqueeze(sin, 1)
    q_embed = blocks.rotated(q, cos, sin, _rotate_half_back)
    k_embed = blocks.rotated(k, cos, sin, _rotate_half_back)
    return q_embed, k_embed


def _rotate_half_back(x: Tensor) -> Tensor:
    width = x.shape[-1]
    x1 = narrow(x, -1, width // 2)
    x2 = narrow(x, -1, width - width // 2)
    return cat_last([x2, scale(x1)])


class NanoChatAttention(LlamaAttention):
    """models/nanochat: heads are normed after the rotation, without weights."""

    rotate = staticmethod(_rotate_nanochat)
    late_norms = (BareRmsNorm(), BareRmsNorm())


# ------------------------------------------------------------------ MLP
class SeedOssMlp(GatedMlp):
    """models/seed_oss: dropout after the MLP."""

    probability = 0.0

    def __call__(self, x: Tensor) -> Any:
        down_proj = call(self.down_proj, mul(call(self.act, call(self.gate_proj, x)), call(self.up_proj, x)))
        down_proj = dropout(down_proj, self.probability)
        return down_proj  # noqa: RET504


class BitNetMlp(GatedMlp):
    """models/bitnet: a norm before the last projection."""

    ffn_sub_norm: Module

    def __call__(self, x: Tensor) -> Any:
        down_proj = call(
            self.down_proj,
            call(self.ffn_sub_norm, mul(call(self.act, call(self.gate_proj, x)), call(self.up_proj, x))),
        )
        return down_proj  # noqa: RET504


# ------------------------------------------------------------------ decoders
class ArceeDecoder(LlamaDecoder):
    """models/arcee: an MLP without a gate."""

    mlp_names = ("up_proj", "down_proj")

    def make_mlp(self, name: str) -> Module:
        up, down = (self.modules.linear(f"{name}.{n}") for n in self.mlp_names)
        return PlainMlp(up, down, blocks.ACTIVATIONS[self.traits.activation or "relu2"])


class Jais2Decoder(LayerNormDecoder, ArceeDecoder):
    """models/jais2: norms with bias, an MLP without a gate."""


class NemotronDecoder(Jais2Decoder):
    """models/nemotron: norms whose weight is one less, part of each head rotated."""

    keyword_order = MistralDecoder.keyword_order
    attention_class = NemotronAttention

    def make_norm(self, name: str) -> LayerNorm:
        return LayerNormPlusOne(self.modules.weight(f"{name}.weight"), self.modules.optional(f"{name}.bias"))


class NanoChatDecoder(ArceeDecoder):
    """models/nanochat: norms without weights, one of them before the first layer."""

    keyword_order = ("attention_mask", "position_embeddings", "position_ids", "cache")
    attention_class = NanoChatAttention
    mlp_names = ("fc1", "fc2")

    def make_norm(self, name: str) -> Module:
        return BareRmsNorm()

    def before_layers(self, hidden_states: Tensor) -> Tensor:
        normed: Tensor = call(self.norm, hidden_states)
        return normed


class ApertusDecoder(ArceeDecoder):
    """models/apertus: normed heads, an MLP without a gate."""

    attention_class = HeadNormAttention
    norm_names = ("attention_layernorm", "feedforward_layernorm")
    own_activations = frozenset({"xielu"})

    @classmethod
    def layer_buffers(
        cls, traits: DecoderTraits, parameters: frozenset[str], dtype: str
    ) -> list[tuple[str, tuple[int, ...], str]]:
        if traits.activation != "xielu":
            return []
        return [(f"mlp.act_fn.{name}", (), dtype) for name in ("beta", "eps")]

    def make_mlp(self, name: str) -> Module:
        if self.traits.activation != "xielu":
            return super().make_mlp(name)
        linear, weight, buffer = self.modules.linear, self.modules.weight, self.modules.buffer
        numbers = weight(f"{name}.act_fn.alpha_p"), weight(f"{name}.act_fn.alpha_n")
        act = Xielu(*numbers, buffer(f"{name}.act_fn.beta"), buffer(f"{name}.act_fn.eps"))
        return PlainMlp(linear(f"{name}.up_proj"), linear(f"{name}.down_proj"), act)


class HunYuanDecoder(LlamaDecoder):
    """models/hunyuan_v1_dense."""

    attention_class = HunYuanAttention


class SeedOssDecoder(LlamaDecoder):
    """models/seed_oss."""

    attention_class = SeedOssAttention

    def make_mlp(self, name: str) -> Module:
        act, linear = blocks.ACTIVATIONS[self.traits.activation or "silu"], self.modules.linear
        mlp = SeedOssMlp(linear(f"{name}.gate_proj"), linear(f"{name}.up_proj"), linear(f"{name}.down_proj"), act)
        mlp.probability = self.traits.residual_dropout
        return mlp


class BitNetDecoder(LlamaDecoder):
    """models/bitnet, with unpacked weights."""

    attention_class = BitNetAttention

    def make_mlp(self, name: str) -> Module:
        act, linear = blocks.ACTIVATIONS[self.traits.activation or "relu2"], self.modules.linear
        mlp = BitNetMlp(linear(f"{name}.gate_proj"), linear(f"{name}.up_proj"), linear(f"{name}.down_proj"), act)
        mlp.ffn_sub_norm = self.make_norm(f"{name}.ffn_sub_norm")
        return mlp


class MinistralDecoder(SlidingDecoder):
    """models/ministral: both masks are always made."""

    keyword_order = MistralDecoder.keyword_order

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        return Gemma2Decoder.masks(self, run, inputs_embeds)  # type: ignore[arg-type]


class CwmDecoder(MinistralDecoder):
    """models/cwm."""


class Ministral3Decoder(MistralDecoder):
    """models/ministral3."""

    attention_class = Ministral3Attention


class OlmoDecoder(LlamaDecoder):
    """models/olmo: norms without parameters, fp32 tables."""

    attention_class = OlmoAttention

    def make_norm(self, name: str) -> Module:
        return BareLayerNorm()

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        assert self.traits.rotary_dim
        return {"full": blocks.rotary_tables("f32", position_ids, self.traits.rotary_dim)}


class Olmo3Decoder(Olmo2Decoder, MinistralDecoder):
    """models/olmo3: olmo2 with windows, and a rotary table for each kind of layer."""

    @classmethod
    def buffers(cls, traits: DecoderTraits, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        """A pair of frequencies for each kind of layer."""
        kinds = sorted({"sliding" if is_sliding else "full" for is_sliding in traits.sliding_layers} or {"full"})
        pair = super().buffers(traits, dtype)
        return [(f"{kind}_{name}", shape, dtype) for kind in kinds for name, shape, dtype in pair]

    def make_layer(self, index: int) -> Layer:
        layer = super().make_layer(index)
        if self.is_sliding(index):
            layer.mask_kind = layer.table_kind = "sliding"
        return layer

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        kinds = sorted({layer.table_kind for layer in self.layers})
        assert self.traits.rotary_dim
        return {kind: blocks.rotary_tables("f32", position_ids, self.traits.rotary_dim) for kind in kinds}


class Exaone4Decoder(SlidingDecoder):
    """models/exaone4: olmo2's layer with normed heads; with a window only the windowed layers are rotated."""

    keyword_order = MistralDecoder.keyword_order

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        layer = Olmo2Layer(
            HeadNormAttention(self.modules, f"{name}.self_attn", index),
            self.make_norm(f"{name}.post_attention_layernorm"),
            self.make_norm(f"{name}.post_feedforward_layernorm"),
            self.make_mlp(f"{name}.mlp"),
        )
        if self.is_sliding(index):
            layer.mask_kind = "sliding"
        return layer
