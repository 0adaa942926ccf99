"""Llama and its relatives: llama, mistral, qwen2, qwen3, smollm3, phi3, olmo2.

Each class follows transformers 5.24's models/<family>/modeling_<family>.py; local names are theirs.
"""

from typing import Any, ClassVar, Literal

from foretune.memory import blocks, ops
from foretune.memory.blocks import GatedMlp, Module, RmsNorm, call
from foretune.memory.decoder import Cache, Decoder, Layer, Modules, RunOptions
from foretune.memory.layout import numel
from foretune.memory.ops import add, contiguous, dropout, mul, narrow, reshape, transpose, view
from foretune.memory.tape import Tensor

__all__ = [
    "LlamaAttention",
    "LlamaDecoder",
    "LlamaLayer",
    "MistralDecoder",
    "Olmo2Attention",
    "Olmo2Decoder",
    "Olmo2Layer",
    "Phi3Decoder",
    "Phi3Mlp",
    "Qwen2Decoder",
    "Qwen3Attention",
    "Qwen3Decoder",
    "SlidingDecoder",
]


class LlamaAttention:
    """models/llama, qwen2, mistral, smollm3: separate projections, rotary, kernels."""

    residual_dropout = 0.0
    """Dropout after the output projection (starcoder2, seed_oss)."""
    late_norms: tuple[Module, ...] = ()
    """Norms on queries and keys that stand after the rotation (hunyuan, nanochat)."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        t = modules.traits
        assert t.head_dim is not None
        assert t.num_heads is not None
        assert t.num_kv_heads is not None
        self.head_dim, self.groups, self.modules = t.head_dim, t.num_heads // t.num_kv_heads, modules
        self.softcap, self.probability = t.attention_softcap, t.attention_dropout
        self.has_rotary = not t.rotary_layers or t.rotary_layers[index]
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            modules.linear(f"{name}.{n}") for n in ("q_proj", "k_proj", "v_proj", "o_proj")
        )

    def project(self, hidden_states: Tensor, hidden_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as [B, heads, S, head_dim]."""
        query_states = transpose(view(call(self.q_proj, hidden_states), *hidden_shape), 1, 2)
        key_states = transpose(view(call(self.k_proj, hidden_states), *hidden_shape), 1, 2)
        value_states = transpose(view(call(self.v_proj, hidden_states), *hidden_shape), 1, 2)
        return query_states, key_states, value_states

    rotate = staticmethod(blocks.apply_rotary)

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
        query_states, key_states, value_states = self.project(hidden_states, hidden_shape)
        if self.has_rotary:
            cos, sin = position_embeddings
            query_states, key_states = self.rotate(query_states, key_states, cos, sin)
        query_states = self.scaled_queries(query_states, kwargs)
        if self.late_norms:
            query_states = call(self.late_norms[0], query_states)
            key_states = call(self.late_norms[1], key_states)
        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states)
        attn_output, attn_weights = self.attend(query_states, key_states, value_states, attention_mask)
        attn_output = contiguous(reshape(attn_output, (*input_shape, numel(attn_output.shape[2:]))))
        attn_output = self.before_output(attn_output)
        attn_output = call(self.o_proj, attn_output)
        attn_output = dropout(attn_output, self.residual_dropout)
        return attn_output, attn_weights

    def scaled_queries(self, query_states: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """What happens to rotated queries (ministral3: a scale by position)."""
        return query_states

    def before_output(self, attn_output: Tensor) -> Tensor:
        """What stands before the output projection (bitnet: a norm)."""
        return attn_output

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        """The attention function that the configuration names."""
        if self.modules.attention == "eager":
            return blocks.eager_attention(
                self.groups, q, k, v, mask, probability=self.probability, softcap=self.softcap
            )
        return blocks.sdpa_attention(self.modules.kernels, self.groups, q, k, v, mask, probability=self.probability)


class Qwen3Attention(LlamaAttention):
    """models/qwen3: each head of queries and keys is normed before it is transposed."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        self.q_norm, self.k_norm = (RmsNorm(modules.weight(f"{name}.{n}.weight")) for n in ("q_norm", "k_norm"))

    def project(self, hidden_states: Tensor, hidden_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        query_states = transpose(call(self.q_norm, view(call(self.q_proj, hidden_states), *hidden_shape)), 1, 2)
        key_states = transpose(call(self.k_norm, view(call(self.k_proj, hidden_states), *hidden_shape)), 1, 2)
        value_states = transpose(view(call(self.v_proj, hidden_states), *hidden_shape), 1, 2)
        return query_states, key_states, value_states


class Olmo2Attention(LlamaAttention):
    """models/olmo2: whole projections are normed."""

    rotate = staticmethod(blocks.apply_rotary_olmo2)
    norm_spelling: ClassVar[Literal["llama", "olmo2"]] = "olmo2"

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        self.q_norm, self.k_norm = (
            RmsNorm(modules.weight(f"{name}.{n}.weight"), self.norm_spelling) for n in ("q_norm", "k_norm")
        )

    def project(self, hidden_states: Tensor, hidden_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        query_states = call(self.q_norm, call(self.q_proj, hidden_states))
        key_states = call(self.k_norm, call(self.k_proj, hidden_states))
        value_states = call(self.v_proj, hidden_states)
        query_states = transpose(view(query_states, *hidden_shape), 1, 2)
        key_states = transpose(view(key_states, *hidden_shape), 1, 2)
        value_states = transpose(view(value_states, *hidden_shape), 1, 2)
        return query_states, key_states, value_states


class Phi3Attention(LlamaAttention):
    """models/phi3: one projection, sliced; part of a head is rotated."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        t = modules.traits
        assert t.head_dim is not None
        assert t.num_heads is not None
        assert t.num_kv_heads is not None
        self.head_dim, self.groups, self.modules = t.head_dim, t.num_heads // t.num_kv_heads, modules
        self.softcap, self.probability, self.has_rotary = None, t.attention_dropout, True
        self.query_width, self.key_width = t.num_heads * t.head_dim, t.num_kv_heads * t.head_dim
        self.qkv_proj, self.o_proj = modules.linear(f"{name}.qkv_proj"), modules.linear(f"{name}.o_proj")

    rotate = staticmethod(blocks.apply_rotary_phi3)

    def project(self, hidden_states: Tensor, hidden_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        qkv = call(self.qkv_proj, hidden_states)
        query_states = narrow(qkv, -1, self.query_width)
        key_states = narrow(qkv, -1, self.key_width)
        value_states = narrow(qkv, -1, self.key_width)
        query_states = transpose(view(query_states, *hidden_shape), 1, 2)
        key_states = transpose(view(key_states, *hidden_shape), 1, 2)
        value_states = transpose(view(value_states, *hidden_shape), 1, 2)
        return query_states, key_states, value_states


class LlamaLayer(Layer):
    """Norm, attention, residual, norm, MLP, residual."""

    def __init__(
        self, input_layernorm: Module, self_attn: Module, post_attention_layernorm: Module, mlp: Module
    ) -> None:
        self.input_layernorm, self.self_attn = input_layernorm, self_attn
        self.post_attention_layernorm, self.mlp = post_attention_layernorm, mlp

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
        hidden_states = add(residual, self.scaled(hidden_states))
        residual = hidden_states
        hidden_states = call(self.post_attention_layernorm, hidden_states)
        hidden_states = call(self.mlp, hidden_states)
        hidden_states = add(residual, self.scaled(hidden_states))
        return hidden_states  # noqa: RET504

    def scaled(self, hidden_states: Tensor) -> Tensor:
        """What enters the residual stream (granite, minicpm3: times a number)."""
        return hidden_states


class LlamaDecoder(Decoder):
    """models/llama."""

    attention_class: ClassVar[type[LlamaAttention]] = LlamaAttention
    layer_class: ClassVar[type[LlamaLayer]] = LlamaLayer
    norm_names: ClassVar[tuple[str, str]] = ("input_layernorm", "post_attention_layernorm")
    """Names of the norms before attention and before the MLP."""

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        first, second = self.norm_names
        return self.layer_class(
            self.make_norm(f"{name}.{first}"),
            self.attention_class(self.modules, f"{name}.self_attn", index),
            self.make_norm(f"{name}.{second}"),
            self.make_mlp(f"{name}.mlp"),
        )

    def make_mlp(self, name: str) -> Module:
        act = blocks.ACTIVATIONS[self.traits.activation or "silu"]
        linear = self.modules.linear
        return GatedMlp(linear(f"{name}.gate_proj"), linear(f"{name}.up_proj"), linear(f"{name}.down_proj"), act)


class SlidingDecoder(LlamaDecoder):
    """A decoder some of whose layers attend within a window: two masks, each layer takes its own."""

    mask_kwargs = True

    def make_layer(self, index: int) -> Layer:
        layer = super().make_layer(index)
        if self.is_sliding(index):
            layer.mask_kind = "sliding"
        return layer

    def is_sliding(self, index: int) -> bool:
        return bool(self.traits.sliding_layers) and self.traits.sliding_layers[index]

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        masks = {"full": run.causal_mask(inputs_embeds, None)}
        if any(self.traits.sliding_layers):
            masks["sliding"] = run.causal_mask(inputs_embeds, self.traits.sliding_window)
        return masks


class Qwen2Decoder(SlidingDecoder):
    """models/qwen2, smollm3."""


class Qwen3Decoder(SlidingDecoder):
    """models/qwen3."""

    attention_class = Qwen3Attention


class MistralDecoder(LlamaDecoder):
    """models/mistral: one mask, windowed for all layers or for none."""

    keyword_order = ("attention_mask", "position_ids", "cache", "position_embeddings")

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        window = self.traits.sliding_window if any(self.traits.sliding_layers) else None
        return {"full": run.causal_mask(inputs_embeds, window)}


class Phi3Mlp:
    """models/phi3: gate and up in one projection."""

    def __init__(self, gate_up_proj: Module, down_proj: Module, act: Module) -> None:
        self.gate_up_proj, self.down_proj, self.act = gate_up_proj, down_proj, act

    def __call__(self, hidden_states: Tensor) -> Any:
        up_states = call(self.gate_up_proj, hidden_states)
        width = up_states.shape[-1] // 2
        gate, up_states = ops.split_last(up_states, [width, width])
        up_states = mul(up_states, call(self.act, gate))
        return call(self.down_proj, up_states)


class Phi3Decoder(LlamaDecoder):
    """models/phi3 (Phi-4 too)."""

    attention_class = Phi3Attention
    keyword_order = MistralDecoder.keyword_order
    masks = MistralDecoder.masks

    def make_mlp(self, name: str) -> Module:
        linear = self.modules.linear
        act = blocks.ACTIVATIONS[self.traits.activation or "silu"]
        return Phi3Mlp(linear(f"{name}.gate_up_proj"), linear(f"{name}.down_proj"), act)


class Olmo2Layer(Layer):
    """models/olmo2: norms after attention and MLP."""

    def __init__(self, self_attn: Module, post_attention: Module, post_feedforward: Module, mlp: Module) -> None:
        self.self_attn, self.mlp = self_attn, mlp
        self.post_attention_layernorm, self.post_feedforward_layernorm = post_attention, post_feedforward

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        position_embeddings: Any = None,
    ) -> Tensor:
        residual = hidden_states
        hidden_states, _ = call(
            self.self_attn,
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            position_embeddings=position_embeddings,
        )
        hidden_states = call(self.post_attention_layernorm, hidden_states)
        hidden_states = add(residual, hidden_states)
        residual = hidden_states
        hidden_states = call(self.mlp, hidden_states)
        hidden_states = call(self.post_feedforward_layernorm, hidden_states)
        hidden_states = add(residual, hidden_states)
        return hidden_states  # noqa: RET504


class Olmo2Decoder(LlamaDecoder):
    """models/olmo2."""

    norm_spelling = "olmo2"
    attention_class = Olmo2Attention

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        return Olmo2Layer(
            Olmo2Attention(self.modules, f"{name}.self_attn", index),
            self.make_norm(f"{name}.post_attention_layernorm"),
            self.make_norm(f"{name}.post_feedforward_layernorm"),
            self.make_mlp(f"{name}.mlp"),
        )

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        assert self.traits.rotary_dim
        return {"full": blocks.rotary_tables("f32", position_ids, self.traits.rotary_dim)}
