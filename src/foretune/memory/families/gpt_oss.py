"""gpt_oss: attention with sinks, experts with biases and a clamped gate (models/gpt_oss of transformers 5.24)."""

from typing import Any

from foretune.memory.blocks import Module, call
from foretune.memory.decoder import Modules, RunOptions
from foretune.memory.experts import Experts, max_last, top_k
from foretune.memory.families.llama import LlamaAttention, LlamaLayer, SlidingDecoder
from foretune.memory.interleaved import every_other
from foretune.memory.ops import (
    add,
    add_scalar,
    cat_last,
    contiguous,
    dropout,
    expand,
    like,
    linear,
    matmul4,
    mul,
    narrow,
    repeat_heads,
    reshape,
    scale,
    softmax,
    split_last,
    to,
    transpose,
    unsqueeze,
)
from foretune.memory.pointwise import clamp, sigmoid, subtract
from foretune.memory.routers import Routing
from foretune.memory.tape import Tensor

__all__ = ["GptOssDecoder"]


def _apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = x.shape[-1] // 2
    first_half, second_half = split_last(x, [width, width])
    first_ = subtract(mul(first_half, cos), mul(second_half, sin))
    second_ = add(mul(second_half, cos), mul(first_half, sin))
    return cat_last((first_, second_))


def _apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos = unsqueeze(cos, 1)
    sin = unsqueeze(sin, 1)
    q_embed = _apply_rotary_emb(q, cos, sin)
    k_embed = _apply_rotary_emb(k, cos, sin)
    return q_embed, k_embed


class GptOssAttention(LlamaAttention):
    """GptOssAttention: softmax over the scores and one sink for each head."""

    rotate = staticmethod(_apply_rotary)

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        self.sinks = modules.weight(f"{name}.sinks")

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
        batch, heads, rows, _ = query.shape
        sinks = expand(reshape(self.sinks, (1, heads, 1, 1)), (batch, heads, rows, 1))
        combined_logits = cat_last([attn_weights, sinks])
        combined_logits = subtract(combined_logits, max_last(combined_logits)[0])
        probs = softmax(combined_logits)
        scores = narrow(probs, -1, probs.shape[-1] - 1)
        attn_weights = to(dropout(scores, self.probability), value_states.dtype)
        attn_output = matmul4(attn_weights, value_states)
        attn_output = contiguous(transpose(attn_output, 1, 2))
        return attn_output, attn_weights


def _apply_gate(gate_up: Tensor) -> Tensor:
    """GptOssExperts._apply_gate."""
    gate, up = every_other(gate_up), every_other(gate_up)
    gate = clamp(gate)
    up = clamp(up, 2)
    glu = mul(gate, sigmoid(scale(gate)))
    gated_output = mul(add_scalar(up), glu)
    return gated_output  # noqa: RET504


class GptOssRouter:
    """GptOssTopKRouter: a bias; softmax over the k largest alone."""

    def __init__(self, modules: Modules, name: str) -> None:
        assert modules.traits.experts_per_token is not None
        self.top_k, self.weight = modules.traits.experts_per_token, modules.weight(f"{name}.weight")
        self.bias = modules.weight(f"{name}.bias")

    def __call__(self, hidden_states: Tensor) -> Routing:
        router_logits = linear(hidden_states, self.weight, self.bias)
        router_top_value, router_indices = top_k(router_logits, self.top_k)
        router_scores = softmax(router_top_value)
        return router_logits, router_scores, router_indices


class GptOssMlp:
    """GptOssMLP."""

    def __init__(self, router: Module, experts: Module) -> None:
        self.router, self.experts = router, experts

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        shape = hidden_states.shape
        hidden_states = reshape(hidden_states, (shape[0] * shape[1], shape[2]))
        _, router_scores, router_indices = call(self.router, hidden_states)
        hidden_states = call(self.experts, hidden_states, router_indices, router_scores)
        hidden_states = reshape(hidden_states, shape)
        return hidden_states, router_scores


class GptOssLayer(LlamaLayer):
    """GptOssDecoderLayer: the MLP returns its router's scores too."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        position_embeddings: Any = None,
    ) -> Tensor:
        residual = hidden_states
        hidden_states = call(self.input_layernorm, hidden_states)
        hidden_states, _ = call(
            self.self_attn,
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            position_embeddings=position_embeddings,
        )
        hidden_states = add(residual, hidden_states)
        residual = hidden_states
        hidden_states = call(self.post_attention_layernorm, hidden_states)
        hidden_states, _ = call(self.mlp, hidden_states)
        hidden_states = add(residual, hidden_states)
        return hidden_states  # noqa: RET504


class GptOssDecoder(SlidingDecoder):
    """GptOssModel: both masks are made without a look at the positions; tables of half a head."""

    attention_class = GptOssAttention
    layer_class = GptOssLayer
    norm_spelling = "olmo2"
    mask_kwargs = True
    masks_know_positions = False

    def make_mlp(self, name: str) -> Module:
        weight = self.modules.weight
        experts = Experts(
            weight(f"{name}.experts.gate_up_proj"),
            weight(f"{name}.experts.down_proj"),
            _apply_gate,
            biases=(weight(f"{name}.experts.gate_up_proj_bias"), weight(f"{name}.experts.down_proj_bias")),
            is_transposed=True,
        )
        return GptOssMlp(GptOssRouter(self.modules, f"{name}.router"), experts)

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        return {
            "full": run.causal_mask(inputs_embeds, None, has_positions=False),
            "sliding": run.causal_mask(inputs_embeds, self.traits.sliding_window, has_positions=False),
        }

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        assert self.traits.rotary_dim
        return {"full": _tables(hidden_states.dtype, position_ids, self.traits.rotary_dim // 2)}


def _angles(positions: Tensor, width: int) -> Tensor:
    return Tensor((*positions.shape[:-1], width), "f32")


def _tables(dtype: str, position_ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """GptOssRotaryEmbedding."""
    freqs = _angles(to(unsqueeze(position_ids, 2), "f32"), width)
    cos = scale(like(freqs))
    sin = scale(like(freqs))
    return to(cos, dtype), to(sin, dtype)
