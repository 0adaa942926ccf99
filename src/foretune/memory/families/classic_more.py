"""GPT-BigCode (models/gpt_bigcode of transformers 5.24)."""

from typing import Any

from foretune.memory import blocks, ops
from foretune.memory.blocks import PlainMlp, call
from foretune.memory.decoder import Cache, Layer, Modules
from foretune.memory.families.classic import Gpt2Decoder, Gpt2Layer
from foretune.memory.layout import numel
from foretune.memory.ops import contiguous, dropout, reshape, transpose, unsqueeze, view
from foretune.memory.tape import Tensor
from foretune.models import DecoderTraits

__all__ = ["GptBigCodeDecoder"]


class GptBigCodeAttention:
    """GPTBigCodeAttention: one projection; with `multi_query` one head of keys and values for all queries."""

    def __init__(self, modules: Modules, name: str) -> None:
        t = modules.traits
        assert t.head_dim is not None
        assert t.num_heads is not None
        assert t.num_kv_heads is not None
        self.modules, self.head_dim, self.num_heads, self.kv_heads = modules, t.head_dim, t.num_heads, t.num_kv_heads
        self.c_attn, self.c_proj = modules.linear(f"{name}.c_attn"), modules.linear(f"{name}.c_proj")
        self.probability, self.residual = t.attention_dropout, t.residual_dropout

    def __call__(
        self, hidden_states: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        input_shape = hidden_states.shape[:-1]
        if self.kv_heads == 1:
            widths = [self.num_heads * self.head_dim, self.head_dim, self.head_dim]
            query, key, value = ops.split_last(unsqueeze(call(self.c_attn, hidden_states), 1), widths)
            query = transpose(view(query, *input_shape, -1, self.head_dim), 1, 2)
        else:
            heads = view(call(self.c_attn, hidden_states), *input_shape, self.num_heads, 3 * self.head_dim)
            query, key, value = ops.split_last(transpose(heads, 1, 2), [self.head_dim] * 3)
            del heads
        if cache is not None:
            key, value = cache.update(key, value)
        attn_output, attn_weights = self._attend(query, key, value, attention_mask)
        attn_output = contiguous(reshape(attn_output, (*input_shape, numel(attn_output.shape[2:]))))
        attn_output = call(self.c_proj, attn_output)
        attn_output = call(dropout, attn_output, self.residual)
        return attn_output, attn_weights

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        groups = self.num_heads // self.kv_heads
        if self.modules.attention == "eager":
            return blocks.eager_attention(groups, query, key, value, mask, probability=self.probability)
        return blocks.sdpa_attention(self.modules.kernels, groups, query, key, value, mask)


class GptBigCodeLayer(Gpt2Layer):
    """GPTBigCodeBlock: the mask is a keyword."""

    def checkpointed(self, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        return Layer.checkpointed(self, hidden_states, cache=cache, attention_mask=attention_mask, **kwargs)


class GptBigCodeDecoder(Gpt2Decoder):
    """GPTBigCodeModel: a causal mask as a buffer, which is not read."""

    keyword_order = ("cache", "attention_mask")

    @classmethod
    def buffers(cls, traits: DecoderTraits, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        side = traits.causal_buffer
        return [("bias", (side, side), "bool")] if side else []

    def begin(self, inputs_embeds: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        return inputs_embeds, None

    def begin_after_masks(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Any]:
        return super().begin(hidden_states, position_ids)

    def make_layer(self, index: int) -> Layer:
        name, linear = f"{self.modules.prefix}{index}", self.modules.linear
        act = blocks.ACTIVATIONS[self.traits.activation or "gelu_pytorch_tanh"]
        mlp = PlainMlp(linear(f"{name}.mlp.c_fc"), linear(f"{name}.mlp.c_proj"), act, self.traits.residual_dropout)
        attention = GptBigCodeAttention(self.modules, f"{name}.attn")
        return GptBigCodeLayer(self.make_norm(f"{name}.ln_1"), attention, self.make_norm(f"{name}.ln_2"), mlp)
