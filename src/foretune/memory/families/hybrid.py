"""Short convolutions beside attention: lfm2, lfm2_moe (transformers 5.24).

Each class follows models/<family>/modeling_<family>.py; local names are theirs. What runs is Transformers' own torch
code, as for someone who has not installed causal-conv1d.
"""

from typing import Any

from foretune.memory.blocks import GatedMlp, Module, RmsNorm, call
from foretune.memory.decoder import Cache, Layer, Modules, RunOptions
from foretune.memory.experts import divide, gather_last, sum_over, top_k
from foretune.memory.families.llama import LlamaAttention, SlidingDecoder
from foretune.memory.families.moe import make_experts
from foretune.memory.layout import numel
from foretune.memory.ops import add, add_scalar, contiguous, linear, mul, reshape, scale, silu, to, transpose, view
from foretune.memory.pointwise import sigmoid
from foretune.memory.scans import causal_conv1d, split, squeeze
from foretune.memory.tape import Tensor
from foretune.models import DecoderTraits

__all__ = ["Lfm2Decoder", "Lfm2MoeDecoder"]


# ------------------------------------------------------------------ lfm2
class Lfm2Attention(LlamaAttention):
    """models/lfm2: normed heads; the projected output has a name of its own."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        t = modules.traits
        assert t.head_dim is not None
        assert t.num_heads is not None
        assert t.num_kv_heads is not None
        self.head_dim, self.groups, self.modules = t.head_dim, t.num_heads // t.num_kv_heads, modules
        self.softcap, self.probability, self.has_rotary = None, 0.0, True
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

    kernel_packages = "causal-conv1d"
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


# ------------------------------------------------------------------ lfm2_moe
class Lfm2MoeRouter:
    """Lfm2MoeTopKRouter: sigmoid scores, to which a correction is added for the choice alone."""

    def __init__(self, modules: Modules, name: str) -> None:
        t = modules.traits
        assert t.experts_per_token is not None
        self.top_k, self.norm_topk_prob = t.experts_per_token, t.normalizes_experts
        self.weight = modules.weight(f"{name}.weight")

    def __call__(self, hidden_states: Tensor, expert_bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        router_logits = linear(hidden_states, self.weight)
        routing_weights = sigmoid(router_logits)
        if expert_bias is not None:
            scores_for_routing = add(routing_weights, expert_bias)
            _, selected_experts = top_k(scores_for_routing, self.top_k)
            routing_weights = to(gather_last(routing_weights, selected_experts), router_logits.dtype)
        else:
            routing_weights, selected_experts = top_k(routing_weights, self.top_k)
        if self.norm_topk_prob:
            routing_weights = divide(routing_weights, add_scalar(sum_over(routing_weights, -1, keepdim=True)))
        routing_weights = scale(routing_weights)
        return router_logits, routing_weights, selected_experts


class Lfm2MoeBlock:
    """Lfm2MoeSparseMoeBlock."""

    def __init__(self, gate: Module, experts: Module, expert_bias: Tensor | None) -> None:
        self.gate, self.experts, self.expert_bias = gate, experts, expert_bias

    def __call__(self, hidden_states: Tensor) -> Tensor:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states_reshaped = view(hidden_states, -1, hidden_dim)
        _, routing_weights, selected_experts = call(self.gate, hidden_states_reshaped, self.expert_bias)
        final_hidden_states = call(self.experts, hidden_states_reshaped, selected_experts, routing_weights)
        return reshape(final_hidden_states, (batch_size, sequence_length, hidden_dim))


class Lfm2MoeDecoder(Lfm2Decoder):
    """Lfm2MoeModel: experts after the first layers."""

    keyword_order = ("attention_mask", "position_ids", "cache", "position_embeddings")

    @classmethod
    def layer_buffers(
        cls, traits: DecoderTraits, parameters: frozenset[str], dtype: str
    ) -> list[tuple[str, tuple[int, ...], str]]:
        if not traits.has_expert_bias or "feed_forward.gate.weight" not in parameters:
            return []
        assert traits.num_experts is not None
        return [("feed_forward.expert_bias", (traits.num_experts,), "f32")]

    def make_mlp(self, name: str) -> Module:
        if self.modules.optional(f"{name}.gate.weight") is None:
            return super().make_mlp(name)
        bias = self.modules.buffer(f"{name}.expert_bias") if self.traits.has_expert_bias else None
        experts = make_experts(self.modules, f"{name}.experts")
        return Lfm2MoeBlock(Lfm2MoeRouter(self.modules, f"{name}.gate"), experts, bias)
