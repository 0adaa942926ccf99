"""GPT-2 and GPT-NeoX, which is Pythia's (models/gpt2, gpt_neox of transformers 5.24)."""

from typing import Any, ClassVar

from foretune.memory import blocks, ops
from foretune.memory.blocks import Conv1d, LayerNorm, Module, PlainMlp, call
from foretune.memory.decoder import Cache, Decoder, Layer, Modules
from foretune.memory.layout import numel
from foretune.memory.ops import add, contiguous, dropout, reshape, transpose, view
from foretune.memory.tape import Tensor, checkpoint

__all__ = ["Gpt2Decoder", "Gpt2Layer", "GptNeoxDecoder", "LayerNormDecoder"]


class LayerNormDecoder(Decoder):
    """Norms with weight and bias."""

    def make_norm(self, name: str) -> Module:
        return LayerNorm(self.modules.weight(f"{name}.weight"), self.modules.optional(f"{name}.bias"))


# ------------------------------------------------------------------ GPT-2
class Gpt2Attention:
    """GPT2Attention: one Conv1D for queries, keys and values, split."""

    def __init__(self, modules: Modules, name: str) -> None:
        t = modules.traits
        assert t.num_heads
        self.modules, self.num_heads = modules, t.num_heads
        self.c_attn, self.c_proj = modules.linear(f"{name}.c_attn", Conv1d), modules.linear(f"{name}.c_proj", Conv1d)
        self.probability, self.residual = t.attention_dropout, t.residual_dropout

    def __call__(self, hidden_states: Tensor, cache: Cache | None, attention_mask: Tensor | None) -> tuple[Tensor, Any]:
        width = hidden_states.shape[-1]
        query_states, key_states, value_states = ops.split_last(call(self.c_attn, hidden_states), [width] * 3)
        shape = (*query_states.shape[:-1], -1, width // self.num_heads)
        key_states = transpose(view(key_states, *shape), 1, 2)
        value_states = transpose(view(value_states, *shape), 1, 2)
        query_states = transpose(view(query_states, *shape), 1, 2)
        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states)
        attn_output, attn_weights = self._attend(query_states, key_states, value_states, attention_mask)
        attn_output = contiguous(reshape(attn_output, (*attn_output.shape[:-2], numel(attn_output.shape[-2:]))))
        attn_output = call(self.c_proj, attn_output)
        attn_output = dropout(attn_output, self.residual)
        return attn_output, attn_weights

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        if self.modules.attention == "sdpa":
            return blocks.sdpa_attention(self.modules.kernels, 1, query, key, value, mask, probability=self.probability)
        attn_weights = ops.scale(ops.matmul4(query, transpose(key, 2, 3)))
        if mask is not None:
            attn_weights = add(attn_weights, mask)
        attn_weights = ops.softmax(attn_weights)
        attn_weights = ops.to(attn_weights, value.dtype)
        attn_weights = dropout(attn_weights, self.probability)
        attn_output = ops.matmul4(attn_weights, value)
        attn_output = transpose(attn_output, 1, 2)
        return attn_output, attn_weights


class Gpt2Layer(Layer):
    """GPT2Block."""

    def __init__(self, ln_1: Module, attn: Module, ln_2: Module, mlp: Module) -> None:
        self.ln_1, self.attn, self.ln_2, self.mlp = ln_1, attn, ln_2, mlp

    def forward(self, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None, **kwargs: Any) -> Tensor:
        residual = hidden_states
        hidden_states = call(self.ln_1, hidden_states)
        attn_output, _ = call(self.attn, hidden_states, cache=cache, attention_mask=attention_mask)
        hidden_states = add(attn_output, residual)
        residual = hidden_states
        hidden_states = call(self.ln_2, hidden_states)
        feed_forward_hidden_states = call(self.mlp, hidden_states)
        hidden_states = add(residual, feed_forward_hidden_states)
        return hidden_states  # noqa: RET504

    def checkpointed(self, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        """The mask is passed by position, so it is one of the inputs that checkpointing keeps."""

        def run(hidden_states: Tensor, attention_mask: Any) -> Tensor:
            return self.forward(hidden_states, cache, attention_mask, **kwargs)

        return checkpoint(run, hidden_states, attention_mask)


class Gpt2Decoder(LayerNormDecoder):
    """GPT2Model: learned positions."""

    has_causal_name = False
    embedding_name = "transformer.wte.weight"
    final_norm_name = "transformer.ln_f"
    keyword_order: ClassVar[tuple[str, ...]] = ("cache", "attention_mask", "position_ids")

    def make_layer(self, index: int) -> Layer:
        name, linear = f"{self.modules.prefix}{index}", self.modules.linear
        mlp = PlainMlp(
            linear(f"{name}.mlp.c_fc", Conv1d),
            linear(f"{name}.mlp.c_proj", Conv1d),
            blocks.ACTIVATIONS[self.traits.activation or "gelu_new"],
            self.traits.residual_dropout,
        )
        attention = Gpt2Attention(self.modules, f"{name}.attn")
        return Gpt2Layer(self.make_norm(f"{name}.ln_1"), attention, self.make_norm(f"{name}.ln_2"), mlp)

    def begin(self, inputs_embeds: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        position_embeds = ops.embedding(self.modules.weight("transformer.wpe.weight"), position_ids)
        return add(inputs_embeds, position_embeds), position_embeds

    def after_masks(self, hidden_states: Tensor) -> Tensor:
        return dropout(hidden_states, self.traits.embedding_dropout)


# ------------------------------------------------------------------ GPT-NeoX
class GptNeoxAttention:
    """GPTNeoXAttention: one projection, chunked within each head; part of a head is rotated."""

    def __init__(self, modules: Modules, name: str) -> None:
        t = modules.traits
        assert t.head_dim
        self.modules, self.head_size, self.probability = modules, t.head_dim, t.attention_dropout
        self.query_key_value, self.dense = modules.linear(f"{name}.query_key_value"), modules.linear(f"{name}.dense")

    rotate = staticmethod(blocks.apply_rotary_neox)

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, 3 * self.head_size)
        qkv = transpose(view(call(self.query_key_value, hidden_states), *hidden_shape), 1, 2)
        query_states, key_states, value_states = ops.split_last(qkv, [self.head_size] * 3)
        cos, sin = position_embeddings
        query_states, key_states = self.rotate(query_states, key_states, cos, sin)
        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states)
        attn_output, attn_weights = self._attend(query_states, key_states, value_states, attention_mask)
        attn_output = contiguous(reshape(attn_output, (*input_shape, numel(attn_output.shape[2:]))))
        attn_output = call(self.dense, attn_output)
        return attn_output, attn_weights

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        if self.modules.attention == "eager":
            return blocks.eager_attention(1, query, key, value, mask, probability=self.probability)
        return blocks.sdpa_attention(self.modules.kernels, 1, query, key, value, mask, probability=self.probability)


class GptNeoxLayer(Layer):
    """GPTNeoXLayer, parallel or in sequence."""

    def __init__(
        self, input_layernorm: Module, attention: Module, post_layernorm: Module, mlp: Module, *, is_parallel: bool
    ) -> None:
        self.input_layernorm, self.attention = input_layernorm, attention
        self.post_attention_layernorm, self.mlp, self.is_parallel = post_layernorm, mlp, is_parallel

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        position_embeddings: Any = None,
    ) -> Tensor:
        attn_output, _ = call(
            self.attention,
            call(self.input_layernorm, hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            position_embeddings=position_embeddings,
        )
        if self.is_parallel:
            mlp_output = call(self.mlp, call(self.post_attention_layernorm, hidden_states))
            hidden_states = add(add(mlp_output, attn_output), hidden_states)
        else:
            attn_output = add(attn_output, hidden_states)
            mlp_output = call(self.mlp, call(self.post_attention_layernorm, attn_output))
            hidden_states = add(mlp_output, attn_output)
        return hidden_states


class GptNeoxDecoder(LayerNormDecoder):
    """GPTNeoXModel."""

    embedding_name = "gpt_neox.embed_in.weight"
    final_norm_name = "gpt_neox.final_layer_norm"
    keyword_order = ("attention_mask", "position_ids", "cache", "position_embeddings")

    def make_layer(self, index: int) -> Layer:
        name, linear = f"{self.modules.prefix}{index}", self.modules.linear
        mlp = PlainMlp(
            linear(f"{name}.mlp.dense_h_to_4h"),
            linear(f"{name}.mlp.dense_4h_to_h"),
            blocks.ACTIVATIONS[self.traits.activation or "gelu"],
        )
        return GptNeoxLayer(
            self.make_norm(f"{name}.input_layernorm"),
            GptNeoxAttention(self.modules, f"{name}.attention"),
            self.make_norm(f"{name}.post_attention_layernorm"),
            mlp,
            is_parallel=self.traits.has_parallel_residual,
        )
