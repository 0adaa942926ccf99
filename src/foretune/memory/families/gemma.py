"""Gemma 1, 2 and 3 (models/gemma, gemma2, gemma3 of transformers 5.24)."""

from typing import Any

from foretune.memory import blocks, ops
from foretune.memory.blocks import Module, RmsNorm, call
from foretune.memory.decoder import Layer, Modules, RunOptions
from foretune.memory.families.llama import LlamaAttention, LlamaDecoder, SlidingDecoder
from foretune.memory.ops import add, mul
from foretune.memory.tape import Tensor
from foretune.models import DecoderTraits

__all__ = ["Gemma2Decoder", "Gemma3Decoder", "GemmaDecoder"]


class Gemma3Attention(LlamaAttention):
    """models/gemma3: heads are normed after they are transposed."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        self.q_norm, self.k_norm = (
            RmsNorm(modules.weight(f"{name}.{n}.weight"), "gemma") for n in ("q_norm", "k_norm")
        )

    def project(self, hidden_states: Tensor, hidden_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        query_states, key_states, value_states = super().project(hidden_states, hidden_shape)
        query_states = call(self.q_norm, query_states)
        key_states = call(self.k_norm, key_states)
        return query_states, key_states, value_states


class GemmaDecoder(LlamaDecoder):
    """models/gemma: scaled embeddings, norms that scale by 1 + weight."""

    norm_spelling = "gemma"
    keyword_order = ("attention_mask", "position_ids", "cache", "position_embeddings")

    @classmethod
    def buffers(cls, traits: DecoderTraits, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        """The embeddings' scale comes first."""
        return [("embed_scale", (), dtype), *super().buffers(traits, dtype)]

    def embed(self, input_ids: Tensor) -> Tensor:
        """The table's rows times a scalar buffer, cast to the table's dtype."""
        dtype = self.embedding.dtype
        return mul(ops.embedding(self.embedding, input_ids), ops.to(self.modules.buffer("embed_scale"), dtype))


class Gemma2Layer(Layer):
    """models/gemma2, gemma3: a norm before and after each half."""

    def __init__(self, norms: list[Module], self_attn: Module, mlp: Module) -> None:
        self.input_layernorm, self.post_attention_layernorm = norms[0], norms[1]
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norms[2], norms[3]
        self.self_attn, self.mlp = self_attn, mlp

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
    ) -> Tensor:
        residual = hidden_states
        hidden_states = call(self.input_layernorm, hidden_states)
        hidden_states, _ = call(
            self.self_attn,
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
        )
        hidden_states = call(self.post_attention_layernorm, hidden_states)
        hidden_states = add(residual, hidden_states)
        residual = hidden_states
        hidden_states = call(self.pre_feedforward_layernorm, hidden_states)
        hidden_states = call(self.mlp, hidden_states)
        hidden_states = call(self.post_feedforward_layernorm, hidden_states)
        hidden_states = add(residual, hidden_states)
        return hidden_states  # noqa: RET504


class Gemma2Decoder(SlidingDecoder, GemmaDecoder):
    """models/gemma2: alternating windows, capped attention scores."""

    keyword_order = ("attention_mask", "position_embeddings", "position_ids", "cache")

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        norms = [
            self.make_norm(f"{name}.{n}")
            for n in (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            )
        ]
        attention = self.attention_class(self.modules, f"{name}.self_attn", index)
        layer = Gemma2Layer(norms, attention, self.make_mlp(f"{name}.mlp"))
        if self.is_sliding(index):
            layer.mask_kind = layer.table_kind = "sliding"
        return layer

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        return {
            "full": run.causal_mask(inputs_embeds, None),
            "sliding": run.causal_mask(inputs_embeds, self.traits.sliding_window),
        }

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        tables = super().position_tables(hidden_states, position_ids)
        return {"full": tables["full"], "sliding": tables["full"]}


class Gemma3Decoder(Gemma2Decoder):
    """models/gemma3: normed heads, a rotary table for each kind of layer."""

    attention_class = Gemma3Attention

    @classmethod
    def buffers(cls, traits: DecoderTraits, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        """A pair of frequencies for each kind of layer."""
        scale, *pair = super().buffers(traits, dtype)
        kinds = sorted({"sliding" if is_sliding else "full" for is_sliding in traits.sliding_layers})
        return [scale, *[(f"{kind}_{name}", shape, dtype) for kind in kinds for name, shape, dtype in pair]]

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        kinds = {layer.table_kind for layer in self.layers}
        assert self.traits.rotary_dim
        return {
            kind: blocks.rotary_tables(hidden_states.dtype, position_ids, self.traits.rotary_dim)
            for kind in sorted(kinds)
        }
