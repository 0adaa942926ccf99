"""Hybrids without a state-space mixer: lfm2's short convolutions, Qwen's gated delta rule (transformers 5.24).

Each class follows models/<family>/modeling_<family>.py; local names are theirs. What runs is Transformers' own torch
code, as for someone who has not installed causal-conv1d or fla.
"""

from typing import Any

from foretune.memory.blocks import GatedMlp, Module, RmsNorm, call
from foretune.memory.decoder import Cache, Layer, Modules, RunOptions
from foretune.memory.families.llama import LlamaAttention, SlidingDecoder
from foretune.memory.layout import numel
from foretune.memory.ops import add, contiguous, mul, reshape, silu, transpose, view
from foretune.memory.scans import causal_conv1d, split, squeeze
from foretune.memory.tape import Tensor

__all__ = ["Lfm2Decoder"]


# ------------------------------------------------------------------ lfm2
class Lfm2Attention(LlamaAttention):
    """models/lfm2: normed heads; the projected output has a name of its own."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        t = modules.traits
        assert t.head_dim is not None
        assert t.num_heads is not None
        assert t.num_kv_heads is not None
        self.head_dim, self.groups, self.modules = t.head_dim, t.num_heads // t.num_kv_heads, modules
        self.softcap, self.has_rotary = None, True
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            modules.linear(f"{name}.{n}") for n in ("q_proj", "k_proj", "v_proj", "out_proj")
        )
        self.q_layernorm, self.k_layernorm = (
            RmsNorm(modules.weight(f"{name}.{n}.weight")) for n in ("q_layernorm", "k_layernorm")
        )

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query_states = transpose(call(self.q_layernorm, view(call(self.q_proj, hidden_states), *hidden_shape)), 1, 2)
        key_states = transpose(call(self.k_layernorm, view(call(self.k_proj, hidden_states), *hidden_shape)), 1, 2)
        value_states = transpose(view(call(self.v_proj, hidden_states), *hidden_shape), 1, 2)
        cos, sin = position_embeddings
        query_states, key_states = self.rotate(query_states, key_states, cos, sin)
        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states)
        attn_output, attn_weights = self.attend(query_states, key_states, value_states, attention_mask)
        attn_output = contiguous(reshape(attn_output, (*input_shape, numel(attn_output.shape[2:]))))
        output = call(self.out_proj, attn_output)
        return output, attn_weights


class Lfm2ShortConv:
    """Lfm2ShortConv: a gate, a depthwise convolution over a few tokens, a second gate."""

    def __init__(self, modules: Modules, name: str) -> None:
        self.weight, self.bias = modules.weight(f"{name}.conv.weight"), modules.optional(f"{name}.conv.bias")
        self.in_proj, self.out_proj = modules.linear(f"{name}.in_proj"), modules.linear(f"{name}.out_proj")

    def __call__(
        self, hidden_states: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        BCx = transpose(call(self.in_proj, hidden_states), -1, -2)
        B, C, x = split(BCx, [BCx.shape[-2] // 3] * 3, -2)
        hidden_states = mul(B, x)
        hidden_states = call(causal_conv1d, hidden_states, squeeze(self.weight, 1), self.bias)
        y = mul(C, hidden_states)
        y = contiguous(transpose(y, -1, -2))
        y = call(self.out_proj, y)
        return y  # noqa: RET504


class Lfm2Layer(Layer):
    """Lfm2DecoderLayer."""

    def __init__(self, operator: Module, feed_forward: Module, operator_norm: Module, ffn_norm: Module) -> None:
        self.operator, self.feed_forward = operator, feed_forward
        self.operator_norm, self.ffn_norm = operator_norm, ffn_norm

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
    ) -> Tensor:
        residual = hidden_states
        if self.mask_kind == "full":
            hidden_states, _ = call(
                self.operator,
                hidden_states=call(self.operator_norm, hidden_states),
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
            )
        else:
            hidden_states = call(
                self.operator,
                hidden_states=call(self.operator_norm, hidden_states),
                cache=cache,
                attention_mask=attention_mask,
            )
        hidden_states = add(hidden_states, residual)
        hidden_states = add(hidden_states, call(self.feed_forward, call(self.ffn_norm, hidden_states)))
        return hidden_states  # noqa: RET504


class Lfm2Decoder(SlidingDecoder):
    """Lfm2Model: short convolutions, attention in some layers."""

    final_norm_name = "model.embedding_norm"

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        is_conv = self.modules.optional(f"{name}.conv.conv.weight") is not None
        operator: Module
        if is_conv:
            operator = Lfm2ShortConv(self.modules, f"{name}.conv")
        else:
            operator = Lfm2Attention(self.modules, f"{name}.self_attn", index)
        layer = Lfm2Layer(
            operator,
            self.make_mlp(f"{name}.feed_forward"),
            self.make_norm(f"{name}.operator_norm"),
            self.make_norm(f"{name}.ffn_norm"),
        )
        if is_conv:
            layer.mask_kind = "conv"
        return layer

    def make_mlp(self, name: str) -> Module:
        linear = self.modules.linear
        return GatedMlp(linear(f"{name}.w1"), linear(f"{name}.w3"), linear(f"{name}.w2"), silu)

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        masks = {"full": run.causal_mask(inputs_embeds, None), "conv": None}
        run.ask_whether_padded()
        return masks
