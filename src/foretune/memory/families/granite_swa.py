"""Granite SWA (models/granite_swa of transformers 5.24): Granite with windows and attention sinks."""

from typing import Any

from foretune.memory import blocks, ops
from foretune.memory.decoder import Layer, Modules
from foretune.memory.families.dense import GraniteDecoder
from foretune.memory.families.dense_more import MinistralDecoder
from foretune.memory.families.llama import LlamaAttention
from foretune.memory.ops import add, contiguous, dropout, mul, repeat_heads, scale, to, transpose, unsqueeze, view
from foretune.memory.pointwise import sigmoid, subtract
from foretune.memory.rare_ops import logsumexp
from foretune.memory.tape import Tensor
from foretune.models import DecoderTraits

__all__ = ["GraniteSwaDecoder"]


class GraniteSwaAttention(LlamaAttention):
    """GraniteSWAAttention: what attends to a learned sink is taken from each row's result."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        self.sinks = modules.weight(f"{name}.sinks")
        bases = modules.traits.rotary_bases
        self.has_rotary = not bases or bases[index] != 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        return self._eager(q, k, v, mask)

    def _eager(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        """eager_attention_forward of modeling_granite_swa.py."""
        key_states = repeat_heads(key, self.groups)
        value_states = repeat_heads(value, self.groups)
        attn_weights = scale(ops.matmul4(query, transpose(key_states, 2, 3)))
        if mask is not None:
            attn_weights = add(attn_weights, mask)
        lse = logsumexp(attn_weights)
        sink_scale = sigmoid(to(subtract(lse, view(self.sinks, 1, -1, 1)), "f32"))
        attn_weights = to(blocks.softmax_f32(attn_weights), query.dtype)
        attn_weights = dropout(attn_weights, self.probability)
        attn_output = ops.matmul4(attn_weights, value_states)
        attn_output = mul(attn_output, to(unsqueeze(sink_scale, 3), attn_output.dtype))
        attn_output = contiguous(transpose(attn_output, 1, 2))
        return attn_output, attn_weights


class GraniteSwaDecoder(GraniteDecoder):
    """GraniteSWAModel: a rotary table for each base."""

    attention_class = GraniteSwaAttention
    mask_kwargs = True
    masks = MinistralDecoder.masks

    @classmethod
    def buffers(cls, traits: DecoderTraits, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        """The embedding of the parent class, which is not used, and one for each base."""
        num_bases = len({base for base in traits.rotary_bases if base}) if traits.rotary_bases else 1
        pair = super().buffers(traits, dtype)
        return pair + [(f"{i}.{name}", shape, dtype) for i in range(num_bases) for name, shape, dtype in pair]

    def make_layer(self, index: int) -> Layer:
        layer = super().make_layer(index)
        if self.traits.sliding_layers and self.traits.sliding_layers[index]:
            layer.mask_kind = "sliding"
        if self.traits.rotary_bases:
            layer.table_kind = str(self.traits.rotary_bases[index])
        return layer

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        width, bases = self.traits.rotary_dim, sorted({base for base in self.traits.rotary_bases if base})
        assert width
        if not self.traits.rotary_bases:
            return super().position_tables(hidden_states, position_ids)
        tables = {str(base): blocks.rotary_tables(hidden_states.dtype, position_ids, width) for base in bases}
        return {**tables, "0.0": None}
