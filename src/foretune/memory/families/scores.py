"""Classes that write out their attention scores: GPT-Neo, Bloom and MPT (models/gpt_neo, bloom, mpt of transformers
5.24). Their layers hand on the attention weights, which live until the next layer has ended."""

from typing import Any

from foretune.memory import alibi, blocks, ops
from foretune.memory.activations import bloom_gelu
from foretune.memory.blocks import Module, PlainMlp, call, softmax_f32
from foretune.memory.decoder import Cache, Layer, Modules, RunOptions
from foretune.memory.families.scoped import ScopedDecoder
from foretune.memory.layout import numel
from foretune.memory.ops import add, contiguous, dropout, reshape, scale, to, transpose, view
from foretune.memory.pointwise import clamp, masked_fill
from foretune.memory.rare_ops import baddbmm, where
from foretune.memory.strided import select
from foretune.memory.tape import Tensor
from foretune.models import DecoderTraits

__all__ = ["BloomDecoder", "GptNeoDecoder", "MptDecoder"]


# ------------------------------------------------------------------ GPT-Neo
class GptNeoSelfAttention:
    """GPTNeoSelfAttention: scores in fp32, masked by a buffer and again by the mask."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        t = modules.traits
        assert t.head_dim is not None
        assert t.num_heads is not None
        self.num_heads, self.head_dim = t.num_heads, t.head_dim
        self.probability, self.residual = t.attention_dropout, t.residual_dropout
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (
            modules.linear(f"{name}.{n}") for n in ("k_proj", "v_proj", "q_proj", "out_proj")
        )
        self.bias = modules.buffer(f"{name}.bias")

    def __call__(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor]:
        query = call(self.q_proj, hidden_states)
        key = call(self.k_proj, hidden_states)
        value = call(self.v_proj, hidden_states)
        query = self._split_heads(query)
        key = self._split_heads(key)
        value = self._split_heads(value)
        if cache is not None:
            key, value = cache.update(key, value)
        attn_output, attn_weights = self._attn(query, key, value, attention_mask)
        attn_output = self._merge_heads(attn_output)
        attn_output = call(self.out_proj, attn_output)
        attn_output = call(dropout, attn_output, self.residual)
        return attn_output, attn_weights

    def _split_heads(self, tensor: Tensor) -> Tensor:
        tensor = view(tensor, *tensor.shape[:-1], self.num_heads, self.head_dim)
        return transpose(tensor, 1, 2)

    def _merge_heads(self, tensor: Tensor) -> Tensor:
        tensor = contiguous(transpose(tensor, 1, 2))
        return view(tensor, *tensor.shape[:-2], self.num_heads * self.head_dim)

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        query = to(query, "f32")
        key = to(key, "f32")
        attn_weights = ops.matmul4(query, transpose(key, 2, 3))
        side = attn_weights.shape[-1]
        causal_mask = self.bias.view_as((1, 1, side, side), self.bias.strides)
        mask_value = Tensor((), "f32")
        attn_weights = where(causal_mask, attn_weights, mask_value)
        if attention_mask is not None:
            attn_weights = add(attn_weights, attention_mask)
        attn_weights = ops.softmax(attn_weights)
        attn_weights = to(attn_weights, value.dtype)
        attn_weights = call(dropout, attn_weights, self.probability)
        attn_output = ops.matmul4(attn_weights, value)
        return attn_output, attn_weights


class GptNeoAttention:
    """GPTNeoAttention: a module around the attention."""

    def __init__(self, attention: Module) -> None:
        self.attention = attention

    def __call__(
        self, hidden_states: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        out: tuple[Tensor, Any] = call(self.attention, hidden_states, attention_mask=attention_mask, cache=cache)
        return out


class GptNeoLayer(Layer):
    """GPTNeoBlock."""

    def __init__(self, ln_1: Module, attn: Module, ln_2: Module, mlp: Module) -> None:
        self.ln_1, self.attn, self.ln_2, self.mlp = ln_1, attn, ln_2, mlp

    def forward(self, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None) -> Any:
        residual = hidden_states
        hidden_states = call(self.ln_1, hidden_states)
        attn_output, attn_weights = call(self.attn, hidden_states, cache=cache, attention_mask=attention_mask)
        hidden_states = add(attn_output, residual)
        residual = hidden_states
        hidden_states = call(self.ln_2, hidden_states)
        feed_forward_hidden_states = call(self.mlp, hidden_states)
        hidden_states = add(residual, feed_forward_hidden_states)
        return hidden_states, attn_weights


class GptNeoDecoder(ScopedDecoder):
    """GPTNeoModel: learned positions, a causal mask as a buffer in each layer."""

    embedding_name = "transformer.wte.weight"
    final_norm_name = "transformer.ln_f"
    keyword_order = ("cache", "attention_mask")
    returns_tuples = True

    @classmethod
    def layer_buffers(
        cls, traits: DecoderTraits, parameters: frozenset[str], dtype: str
    ) -> list[tuple[str, tuple[int, ...], str]]:
        assert traits.table_positions is not None
        side = traits.table_positions
        return [("attn.attention.bias", (1, 1, side, side), "bool")]

    @classmethod
    def buffers(cls, traits: DecoderTraits, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        return []

    def make_layer(self, index: int) -> Layer:
        name, linear = f"{self.modules.prefix}{index}", self.modules.linear
        act = blocks.ACTIVATIONS[self.traits.activation or "gelu_new"]
        return GptNeoLayer(
            self.make_norm(f"{name}.ln_1"),
            GptNeoAttention(GptNeoSelfAttention(self.modules, f"{name}.attn.attention", index)),
            self.make_norm(f"{name}.ln_2"),
            PlainMlp(linear(f"{name}.mlp.c_fc"), linear(f"{name}.mlp.c_proj"), act, self.traits.residual_dropout),
        )

    def prologue(self, input_ids: Tensor, run: RunOptions, cache: Cache | None) -> tuple[Tensor, dict[str, Any]]:
        inputs_embeds = self.embedded(input_ids, run)
        position_ids = self.positions_of(run)
        causal_mask = run.causal_mask(inputs_embeds, None)
        position_embeds = ops.embedding(self.modules.weight("transformer.wpe.weight"), position_ids)
        hidden_states = add(inputs_embeds, position_embeds)
        hidden_states = call(dropout, hidden_states, self.traits.embedding_dropout)
        return hidden_states, {
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "attention_mask": causal_mask,
            "position_embeds": position_embeds,
        }


# ------------------------------------------------------------------ Bloom
def _dropout_add(x: Tensor, residual: Tensor, probability: float) -> Tensor:
    out = dropout(x, probability)
    out = add(residual, out)
    return out  # noqa: RET504


class BloomAttention:
    """BloomAttention: linear biases are the first term of the scores' product."""

    def __init__(self, modules: Modules, name: str) -> None:
        t = modules.traits
        assert t.head_dim is not None
        assert t.num_heads is not None
        self.num_heads, self.head_dim = t.num_heads, t.head_dim
        self.probability, self.hidden_dropout = t.attention_dropout, t.residual_dropout
        self.query_key_value, self.dense = modules.linear(f"{name}.query_key_value"), modules.linear(f"{name}.dense")

    def __call__(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor]:
        batch_size, q_length = hidden_states.shape[:2]
        fused_qkv = call(self.query_key_value, hidden_states)
        query_layer, key_layer, value_layer = self._reshape(fused_qkv)
        if cache is not None:
            key_layer, value_layer = cache.update(key_layer, value_layer)
        folded = (batch_size * self.num_heads, q_length, self.head_dim)
        query_layer = reshape(query_layer, folded)
        key_layer = transpose(reshape(key_layer, folded), 1, 2)
        value_layer = reshape(value_layer, folded)
        attention_scores = baddbmm(alibi, query_layer, key_layer)
        attn_weights = view(attention_scores, batch_size, self.num_heads, q_length, q_length)
        if attention_mask is not None:
            attn_weights = add(attn_weights, attention_mask)
        attention_probs = to(softmax_f32(attn_weights), query_layer.dtype)
        attention_probs = call(dropout, attention_probs, self.probability)
        attention_probs_reshaped = view(attention_probs, batch_size * self.num_heads, q_length, q_length)
        context_layer = ops.bmm(attention_probs_reshaped, value_layer)
        context_layer = self._merge_heads(context_layer)
        output_tensor = call(self.dense, context_layer)
        output_tensor = _dropout_add(output_tensor, residual, self.hidden_dropout)
        return output_tensor, attention_probs

    def _reshape(self, fused_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fused_qkv = view(fused_qkv, *fused_qkv.shape[:2], self.num_heads, 3, self.head_dim)
        query_layer = transpose(select(fused_qkv, 3), 1, 2)
        key_layer = transpose(select(fused_qkv, 3), 1, 2)
        value_layer = transpose(select(fused_qkv, 3), 1, 2)
        return query_layer, key_layer, value_layer

    def _merge_heads(self, x: Tensor) -> Tensor:
        seq_length, batch_size = x.shape[1], x.shape[0] // self.num_heads
        x = view(x, batch_size, self.num_heads, seq_length, self.head_dim)
        x = transpose(x, 1, 2)
        return reshape(x, (batch_size, seq_length, self.num_heads * self.head_dim))


class BloomMlp:
    """BloomMLP: a gelu of its own, the residual added inside."""

    def __init__(self, up: Module, down: Module, hidden_dropout: float) -> None:
        self.dense_h_to_4h, self.dense_4h_to_h, self.hidden_dropout = up, down, hidden_dropout

    def __call__(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        hidden_states = call(bloom_gelu, call(self.dense_h_to_4h, hidden_states))
        intermediate_output = call(self.dense_4h_to_h, hidden_states)
        output = _dropout_add(intermediate_output, residual, self.hidden_dropout)
        return output  # noqa: RET504


class BloomLayer(Layer):
    """BloomBlock; the residual is the block's input, or the norm's output."""

    def __init__(self, input_layernorm: Module, self_attention: Module, post_layernorm: Module, mlp: Module) -> None:
        self.input_layernorm, self.self_attention = input_layernorm, self_attention
        self.post_attention_layernorm, self.mlp = post_layernorm, mlp
        self.keeps_normed = False

    def forward(self, hidden_states: Tensor, alibi: Any = None, attention_mask: Any = None, cache: Any = None) -> Any:
        layernorm_output = call(self.input_layernorm, hidden_states)
        residual = layernorm_output if self.keeps_normed else hidden_states
        attention_output, attn_weights = call(
            self.self_attention, layernorm_output, residual, cache=cache, attention_mask=attention_mask, alibi=alibi
        )
        layernorm_output = call(self.post_attention_layernorm, attention_output)
        residual = layernorm_output if self.keeps_normed else attention_output
        output = call(self.mlp, layernorm_output, residual)
        return output, attn_weights


class BloomDecoder(ScopedDecoder):
    """BloomModel: a norm after the embedding, linear biases instead of positions."""

    embedding_name = "transformer.word_embeddings.weight"
    final_norm_name = "transformer.ln_f"
    keyword_order = ("cache", "attention_mask", "alibi")
    returns_tuples = True

    def __init__(self, modules: Modules) -> None:
        super().__init__(modules)
        self.embedding_norm = self.make_norm("transformer.word_embeddings_layernorm")

    def make_layer(self, index: int) -> Layer:
        name, linear = f"{self.modules.prefix}{index}", self.modules.linear
        up, down = linear(f"{name}.mlp.dense_h_to_4h"), linear(f"{name}.mlp.dense_4h_to_h")
        layer = BloomLayer(
            self.make_norm(f"{name}.input_layernorm"),
            BloomAttention(self.modules, f"{name}.self_attention"),
            self.make_norm(f"{name}.post_attention_layernorm"),
            BloomMlp(up, down, self.traits.residual_dropout),
        )
        layer.keeps_normed = self.traits.keeps_normed_residual
        return layer

    def prologue(self, input_ids: Tensor, run: RunOptions, cache: Cache | None) -> tuple[Tensor, dict[str, Any]]:
        assert self.traits.num_heads is not None
        inputs_embeds = self.embedded(input_ids, run)
        hidden_states = call(self.embedding_norm, inputs_embeds)
        slopes, biases = alibi.bloom_biases(run, self.traits.num_heads, hidden_states.dtype)
        causal_mask = run.causal_mask(inputs_embeds, None, has_positions=False)
        scope = {"inputs_embeds": inputs_embeds, "slopes": slopes, "alibi": biases, "attention_mask": causal_mask}
        return hidden_states, scope


# ------------------------------------------------------------------ MPT
class MptAttention:
    """MptAttention: biases are added to the scores, which makes them fp32; the mask fills."""

    def __init__(self, modules: Modules, name: str) -> None:
        t = modules.traits
        assert t.head_dim is not None
        assert t.num_heads is not None
        self.n_heads, self.head_dim = t.num_heads, t.head_dim
        self.probability, self.clips = t.attention_dropout, t.clips_projections
        self.wqkv, self.out_proj = modules.linear(f"{name}.Wqkv"), modules.linear(f"{name}.out_proj")

    def __call__(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        batch_size, seq_length, width = hidden_states.shape
        mixed_qkv = call(self.wqkv, hidden_states)
        if self.clips:
            mixed_qkv = clamp(mixed_qkv, 2)
        query_states, key_states, value_states = ops.split_last(mixed_qkv, [width] * 3)
        heads = (batch_size, seq_length, self.n_heads, self.head_dim)
        query_states = transpose(reshape(query_states, heads), 1, 2)
        key_states = transpose(reshape(key_states, heads), 1, 2)
        value_states = transpose(reshape(value_states, heads), 1, 2)
        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states)
        attention_scores = scale(ops.matmul4(query_states, transpose(key_states, 2, 3)))
        position_bias = position_bias.view_as((self.n_heads, 1, seq_length), position_bias.strides)
        attention_scores = add(attention_scores, position_bias)
        if attention_mask is not None:
            attention_scores = masked_fill(attention_scores, attention_mask)
        attn_weights = to(ops.softmax(to(attention_scores, "f32")), value_states.dtype)
        attn_weights = dropout(attn_weights, self.probability)
        context_states = ops.matmul4(attn_weights, value_states)
        context_states = contiguous(transpose(context_states, 1, 2))
        context_states = view(context_states, batch_size, seq_length, numel(context_states.shape[2:]))
        attn_output = call(self.out_proj, context_states)
        return attn_output, attn_weights


class MptMlp:
    """MptMLP: the residual is added inside."""

    def __init__(self, up_proj: Module, down_proj: Module, hidden_dropout: float) -> None:
        self.up_proj, self.down_proj, self.hidden_dropout = up_proj, down_proj, hidden_dropout

    def __call__(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        hidden_states = call(ops.gelu, call(self.up_proj, hidden_states))
        intermediate_output = call(self.down_proj, hidden_states)
        output = dropout(intermediate_output, self.hidden_dropout)
        output = add(output, residual)
        return output  # noqa: RET504


class MptLayer(Layer):
    """MptBlock."""

    def __init__(self, norm_1: Module, attn: Module, norm_2: Module, ffn: Module, probability: float) -> None:
        self.norm_1, self.attn, self.norm_2, self.ffn, self.probability = norm_1, attn, norm_2, ffn, probability

    def forward(
        self, hidden_states: Tensor, position_bias: Any = None, attention_mask: Any = None, cache: Any = None
    ) -> Any:
        layernorm_output = call(self.norm_1, hidden_states)
        residual = hidden_states
        attn_outputs, attn_weights = call(
            self.attn, layernorm_output, position_bias=position_bias, attention_mask=attention_mask, cache=cache
        )
        hidden_states = add(call(dropout, attn_outputs, self.probability), residual)
        layernorm_output = call(self.norm_2, hidden_states)
        residual = hidden_states
        output = call(self.ffn, layernorm_output, residual)
        return output, attn_weights


class MptDecoder(ScopedDecoder):
    """MptModel: linear biases for its longest sequence, a mask of truth values."""

    embedding_name = "transformer.wte.weight"
    final_norm_name = "transformer.norm_f"
    keyword_order = ("cache", "attention_mask", "position_bias")
    returns_tuples = True

    def make_layer(self, index: int) -> Layer:
        name, linear = f"{self.modules.prefix}{index}", self.modules.linear
        probability = self.traits.attention_dropout
        return MptLayer(
            self.make_norm(f"{name}.norm_1"),
            MptAttention(self.modules, f"{name}.attn"),
            self.make_norm(f"{name}.norm_2"),
            MptMlp(linear(f"{name}.ffn.up_proj"), linear(f"{name}.ffn.down_proj"), probability),
            probability,
        )

    def prologue(self, input_ids: Tensor, run: RunOptions, cache: Cache | None) -> tuple[Tensor, dict[str, Any]]:
        t = self.traits
        assert t.num_heads is not None
        assert t.table_positions is not None
        inputs_embeds = self.embedded(input_ids, run)
        biases = alibi.mpt_biases(t.num_heads, t.table_positions)
        causal_mask = self._truth(run.causal_mask(inputs_embeds, None, has_positions=False))
        scope = {"inputs_embeds": inputs_embeds, "position_bias": biases, "attention_mask": causal_mask}
        return inputs_embeds, scope

    @staticmethod
    def _truth(mask: Tensor | None) -> Tensor:
        assert mask is not None
        return to(mask, "bool")
