"""llama4_text: every expert computes every token; attention in chunks; complex rotation (models/llama4 of 5.24)."""

from typing import Any

from foretune.memory import blocks
from foretune.memory.blocks import Module, RmsNorm, call
from foretune.memory.complex import as_complex, as_real, rotate
from foretune.memory.decoder import Cache, Layer, Modules, RunOptions
from foretune.memory.experts import repeat_rows, scatter_in_place, sum_over, top_k
from foretune.memory.families.llama import LlamaAttention, LlamaDecoder, LlamaLayer
from foretune.memory.layout import numel
from foretune.memory.ops import (
    add,
    add_in_place,
    add_scalar,
    bmm,
    contiguous,
    dropout,
    expand,
    like,
    linear,
    matmul4,
    mul,
    repeat_heads,
    reshape,
    scale,
    softmax,
    split_last,
    to,
    transpose,
    unsqueeze,
    view,
    widened,
)
from foretune.memory.pointwise import sigmoid
from foretune.memory.tape import Tensor

__all__ = ["Llama4Decoder"]


class Llama4L2Norm:
    """Llama4TextL2Norm: a norm without weight."""

    def __call__(self, x: Tensor) -> Tensor:
        return to(call(RmsNorm.normalize, to(x, "f32")), x.dtype)


class Llama4RmsNorm:
    """Llama4TextRMSNorm: the weight comes last."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        output = to(call(RmsNorm.normalize, to(x, "f32")), x.dtype)
        return mul(output, self.weight)


def _rotary_table(position_ids: Tensor, width: int) -> Tensor:
    """Llama4TextRotaryEmbedding: complex numbers of length one."""
    freqs = _angles(to(unsqueeze(position_ids, 2), "f32"), width)
    freqs_cis = _polar(like(freqs), freqs)
    freqs_cis = scale(freqs_cis)
    return freqs_cis  # noqa: RET504


def _angles(positions: Tensor, width: int) -> Tensor:
    return Tensor((*positions.shape[:-1], width), "f32")


def _polar(length: Tensor, angle: Tensor) -> Tensor:
    return like(length, "c64")


def _apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    xq_ = as_complex(reshape(to(xq, "f32"), (*xq.shape[:-1], xq.shape[-1] // 2, 2)))
    xk_ = as_complex(reshape(to(xk, "f32"), (*xk.shape[:-1], xk.shape[-1] // 2, 2)))
    xq_out = reshape(as_real(rotate(xq_, unsqueeze(freqs_cis, 2))), xq.shape)
    xk_out = reshape(as_real(rotate(xk_, unsqueeze(freqs_cis, 2))), xk.shape)
    return to(xq_out, xq.dtype), to(xk_out, xk.dtype)


class Llama4Attention(LlamaAttention):
    """Llama4TextAttention: rotated layers have a norm on queries and keys, the others a scale by position."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        t = modules.traits
        self.qk_norm = Llama4L2Norm() if t.qk_norm and self.has_rotary else None
        self.is_tuned = t.tunes_temperature and not self.has_rotary

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
        query_states = view(call(self.q_proj, hidden_states), *hidden_shape)
        key_states = view(call(self.k_proj, hidden_states), *hidden_shape)
        value_states = transpose(view(call(self.v_proj, hidden_states), *hidden_shape), 1, 2)
        if self.has_rotary:
            query_states, key_states = _apply_rotary_emb(query_states, key_states, position_embeddings)
        if self.qk_norm is not None:
            query_states = call(self.qk_norm, query_states)
            key_states = call(self.qk_norm, key_states)
        if self.is_tuned:
            positions = add_scalar(Tensor((input_shape[1],), "i64"))
            attn_scales = add_scalar(scale(like(like(scale(add_scalar(to(positions, "f32")))))))
            attn_scales = expand(view(attn_scales, 1, input_shape[1], 1, 1), (*input_shape, 1, 1))
            query_states = to(mul(query_states, attn_scales), query_states.dtype)
        query_states = transpose(query_states, 1, 2)
        key_states = transpose(key_states, 1, 2)
        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states)
        attn_output, attn_weights = self.attend(query_states, key_states, value_states, attention_mask)
        attn_output = contiguous(reshape(attn_output, (*input_shape, numel(attn_output.shape[2:]))))
        attn_output = call(self.o_proj, attn_output)
        return attn_output, attn_weights

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        if self.modules.attention == "eager":
            return self._eager_attention(q, k, v, mask)
        return super().attend(q, k, v, mask)

    def _eager_attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        """eager_attention_forward: softmax in the scores' dtype."""
        key_states = repeat_heads(key, self.groups)
        value_states = repeat_heads(value, self.groups)
        attn_weights = scale(matmul4(query, transpose(key_states, 2, 3)))
        if mask is not None:
            attn_weights = add(attn_weights, mask)
        attn_weights = softmax(widened(attn_weights))
        attn_weights = dropout(attn_weights, self.probability)
        attn_output = matmul4(attn_weights, value_states)
        attn_output = contiguous(transpose(attn_output, 1, 2))
        return attn_output, attn_weights


class Llama4Mlp:
    """Llama4TextMLP: the product is a local until the last projection is done."""

    def __init__(self, gate_proj: Module, up_proj: Module, down_proj: Module, activation_fn: Module) -> None:
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self.activation_fn = activation_fn

    def __call__(self, x: Tensor) -> Any:
        down_proj = mul(call(self.activation_fn, call(self.gate_proj, x)), call(self.up_proj, x))
        return call(self.down_proj, down_proj)


class Llama4Experts:
    """Llama4TextExperts: a product of all tokens with each expert's matrices."""

    def __init__(self, gate_up_proj: Tensor, down_proj: Tensor, act_fn: Module) -> None:
        self.gate_up_proj, self.down_proj, self.act_fn = gate_up_proj, down_proj, act_fn

    def __call__(self, hidden_states: Tensor) -> Tensor:
        num_experts, hidden_size, width = self.gate_up_proj.shape
        hidden_states = view(hidden_states, num_experts, -1, hidden_size)
        gate_up = bmm(hidden_states, self.gate_up_proj)
        gate, up = split_last(gate_up, [width // 2, width // 2])
        next_states = bmm(mul(up, call(self.act_fn, gate)), self.down_proj)
        next_states = view(next_states, -1, hidden_size)
        return next_states  # noqa: RET504


class Llama4Router:
    """Llama4Router: a score for each expert, nought for all but the k largest."""

    def __init__(self, modules: Modules, name: str) -> None:
        assert modules.traits.experts_per_token is not None
        self.top_k, self.weight = modules.traits.experts_per_token, modules.weight(f"{name}.weight")

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        router_logits = linear(hidden_states, self.weight)
        router_top_value, router_indices = top_k(router_logits, self.top_k)
        router_scores = scatter_in_place(like(router_logits), router_indices, router_top_value)
        router_scores = to(sigmoid(to(router_scores, "f32")), router_scores.dtype)
        return router_scores, router_logits


class Llama4Moe:
    """Llama4TextMoe."""

    def __init__(self, router: Module, experts: Module, shared_expert: Module) -> None:
        self.router, self.experts, self.shared_expert = router, experts, shared_expert

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        hidden_states = view(hidden_states, -1, hidden_states.shape[-1])
        router_scores, router_logits = call(self.router, hidden_states)
        num_tokens, num_experts = router_scores.shape
        routed_in = repeat_rows(hidden_states, num_experts)
        routed_in = mul(routed_in, reshape(transpose(router_scores, 0, 1), (num_experts * num_tokens, 1)))
        routed_out = call(self.experts, routed_in)
        out = call(self.shared_expert, hidden_states)
        out = add_in_place(out, sum_over(view(routed_out, num_experts, -1, routed_out.shape[-1]), 0))
        return out, router_logits


class Llama4Layer(LlamaLayer):
    """Llama4TextDecoderLayer."""

    def forward(
        self,
        hidden_states: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        position_embeddings: Any = None,
    ) -> Any:
        residual = hidden_states
        hidden_states = call(self.input_layernorm, hidden_states)
        attention_states, _ = call(
            self.self_attn,
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            cache=cache,
        )
        hidden_states = add(residual, attention_states)
        residual = hidden_states
        hidden_states = call(self.post_attention_layernorm, hidden_states)
        hidden_states = call(self.mlp, hidden_states)
        if isinstance(self.mlp, Llama4Moe):
            hidden_states, _ = hidden_states
        hidden_states = add(residual, view(hidden_states, *residual.shape))
        return hidden_states  # noqa: RET504


class Llama4Decoder(LlamaDecoder):
    """Llama4TextModel: only the masks that its layers need are made."""

    attention_class = Llama4Attention
    layer_class = Llama4Layer
    masks_are_lazy = True
    keyword_order = ("attention_mask", "position_ids", "cache", "position_embeddings")

    def make_norm(self, name: str) -> Module:
        return Llama4RmsNorm(self.modules.weight(f"{name}.weight"))

    def make_layer(self, index: int) -> Layer:
        layer = super().make_layer(index)
        if self.traits.sliding_layers and self.traits.sliding_layers[index]:
            layer.mask_kind = "chunked"
        return layer

    def make_mlp(self, name: str) -> Module:
        name = f"{name.removesuffix('mlp')}feed_forward"
        if self.modules.optional(f"{name}.router.weight") is None:
            return self._plain_mlp(name)
        weight, act = self.modules.weight, blocks.ACTIVATIONS[self.traits.activation or "silu"]
        experts = Llama4Experts(weight(f"{name}.experts.gate_up_proj"), weight(f"{name}.experts.down_proj"), act)
        return Llama4Moe(
            Llama4Router(self.modules, f"{name}.router"), experts, self._plain_mlp(f"{name}.shared_expert")
        )

    def _plain_mlp(self, name: str) -> Llama4Mlp:
        linear, act = self.modules.linear, blocks.ACTIVATIONS[self.traits.activation or "silu"]
        return Llama4Mlp(linear(f"{name}.gate_proj"), linear(f"{name}.up_proj"), linear(f"{name}.down_proj"), act)

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        masks: dict[str, Tensor | None] = {}
        chunked = self.traits.sliding_layers
        if not chunked or not all(chunked):
            masks["full"] = run.causal_mask(inputs_embeds, None)
        if any(chunked):
            assert self.traits.sliding_window is not None
            masks["chunked"] = run.chunked_mask(inputs_embeds, self.traits.sliding_window)
        return masks

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        assert self.traits.rotary_dim
        return {"full": _rotary_table(position_ids, self.traits.rotary_dim // 2)}
