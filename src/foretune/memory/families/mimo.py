"""mimo_v2_flash: sinks and twice the key heads in windowed layers, values narrower than keys (transformers 5.24)."""

from typing import Any

from foretune.memory import blocks
from foretune.memory.blocks import Module, call
from foretune.memory.decoder import Layer, Modules
from foretune.memory.experts import max_last
from foretune.memory.families.llama import LlamaAttention, SlidingDecoder
from foretune.memory.families.moe import make_experts
from foretune.memory.families.moe_shared import Dots1Decoder
from foretune.memory.ops import (
    add,
    cat_last,
    contiguous,
    dropout,
    expand,
    matmul4,
    narrow,
    repeat_heads,
    reshape,
    scale,
    softmax,
    to,
    transpose,
    view,
)
from foretune.memory.pointwise import subtract
from foretune.memory.routers import GroupedRouter
from foretune.memory.tape import Tensor
from foretune.models import DecoderTraits

__all__ = ["MimoDecoder"]


class MimoAttention(LlamaAttention):
    """MiMoV2FlashAttention."""

    rotate = staticmethod(blocks.apply_rotary_neox)

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        t = modules.traits
        assert t.num_kv_heads is not None
        is_swa = bool(t.sliding_layers) and t.sliding_layers[index]
        self.num_kv_heads = 2 * t.num_kv_heads if is_swa else t.num_kv_heads
        self.groups = (t.num_heads or 0) // self.num_kv_heads
        self.sinks = modules.optional(f"{name}.sinks")

    def project(self, hidden_states: Tensor, hidden_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        v_hidden_shape = (*hidden_shape[:-2], self.num_kv_heads, -1)
        query_states = transpose(view(call(self.q_proj, hidden_states), *hidden_shape), 1, 2)
        key_states = transpose(view(call(self.k_proj, hidden_states), *hidden_shape), 1, 2)
        value_states = scale(transpose(view(call(self.v_proj, hidden_states), *v_hidden_shape), 1, 2))
        return query_states, key_states, value_states

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        return self._eager_attention(q, k, v, mask)

    def _eager_attention(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None
    ) -> tuple[Tensor, Any]:
        """eager_attention_forward."""
        key_states = repeat_heads(key, self.groups)
        value_states = repeat_heads(value, self.groups)
        attn_weights = scale(matmul4(query, transpose(key_states, 2, 3)))
        if attention_mask is not None:
            attn_weights = add(attn_weights, attention_mask)
        if self.sinks is not None:
            batch, heads, rows, _ = query.shape
            sinks = expand(reshape(self.sinks, (1, heads, 1, 1)), (batch, heads, rows, 1))
            attn_weights = cat_last([attn_weights, sinks])
        attn_weights = subtract(attn_weights, max_last(attn_weights)[0])
        probs = softmax(attn_weights)
        if self.sinks is not None:
            probs = narrow(probs, -1, probs.shape[-1] - 1)
        attn_weights = to(dropout(probs, self.probability), value_states.dtype)
        attn_output = matmul4(attn_weights, value_states)
        attn_output = contiguous(transpose(attn_output, 1, 2))
        return attn_output, attn_weights


class MimoMoE:
    """MiMoV2FlashMoE."""

    def __init__(self, gate: Module, experts: Module) -> None:
        self.gate, self.experts = gate, experts

    def __call__(self, hidden_states: Tensor) -> Tensor:
        orig_shape = hidden_states.shape
        _, topk_weights, topk_indices = call(self.gate, hidden_states)
        hidden_states = view(hidden_states, -1, hidden_states.shape[-1])
        return view(call(self.experts, hidden_states, topk_indices, topk_weights), *orig_shape)


class MimoDecoder(Dots1Decoder):
    """MiMoV2FlashModel: a rotary table for each kind of layer."""

    attention_class = MimoAttention
    keyword_order = ("attention_mask", "position_embeddings", "position_ids", "cache")

    @classmethod
    def buffers(cls, traits: DecoderTraits, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        """A pair of frequencies for each kind of layer."""
        pair = super().buffers(traits, dtype)
        return [(f"{kind}_{name}", shape, dtype) for kind in _kinds(traits) for name, shape, dtype in pair]

    def make_layer(self, index: int) -> Layer:
        layer = super().make_layer(index)
        layer.table_kind = layer.mask_kind
        return layer

    def make_mlp(self, name: str) -> Module:
        if self.modules.optional(f"{name}.gate.weight") is None:
            return SlidingDecoder.make_mlp(self, name)
        return MimoMoE(GroupedRouter(self.modules, f"{name}.gate"), make_experts(self.modules, f"{name}.experts"))

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        width = self.traits.rotary_dim
        assert width
        return {kind: blocks.rotary_tables(hidden_states.dtype, position_ids, width) for kind in _kinds(self.traits)}


def _kinds(traits: DecoderTraits) -> list[str]:
    """The kinds of layers that there are, in the order of their names."""
    return sorted({"sliding" if is_sliding else "full" for is_sliding in traits.sliding_layers or (False,)})
