"""GPT-BigCode, GPT-J, CodeGen and Persimmon (models/gpt_bigcode, gptj, codegen, persimmon of transformers 5.24)."""

from typing import Any, ClassVar

from foretune.memory import blocks, interleaved, ops
from foretune.memory.blocks import Module, PlainMlp, call
from foretune.memory.decoder import Cache, Layer, Modules
from foretune.memory.families.classic import Gpt2Decoder, Gpt2Layer, LayerNormDecoder
from foretune.memory.families.dense import PhiAttention
from foretune.memory.families.llama import LlamaLayer
from foretune.memory.layout import numel
from foretune.memory.ops import add, cat_last, contiguous, dropout, mul, narrow, reshape, to, transpose, unsqueeze, view
from foretune.memory.strided import select
from foretune.memory.tape import Tensor
from foretune.models import DecoderTraits

__all__ = ["CodeGenDecoder", "GptBigCodeDecoder", "GptjDecoder", "PersimmonDecoder"]


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
        return blocks.sdpa_attention(
            self.modules.kernels, groups, query, key, value, mask, probability=self.probability
        )


class GptBigCodeLayer(Gpt2Layer):
    """GPTBigCodeBlock: the mask is a keyword."""

    def checkpointed(self, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        return Layer.checkpointed(self, hidden_states, cache=cache, attention_mask=attention_mask, **kwargs)


class GptBigCodeDecoder(Gpt2Decoder):
    """GPTBigCodeModel: a causal mask as a buffer, which is not read."""

    keyword_order = ("cache", "attention_mask")

    @classmethod
    def buffers(cls, traits: DecoderTraits, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        side = traits.table_positions
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


# ------------------------------------------------------------------ GPT-J and CodeGen
def _rotate_gptj(tensor: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """apply_rotary_pos_emb of modeling_gptj.py, over [B, S, H, D]: tables are repeated for queries and keys apart."""
    sin = interleaved.repeat_pairs(unsqueeze(sin, 2))
    cos = interleaved.repeat_pairs(unsqueeze(cos, 2))
    return add(mul(tensor, cos), mul(interleaved.rotate_every_two(tensor), sin))


class GptjAttention:
    """GPTJAttention: separate projections, part of each head rotated before heads are transposed."""

    def __init__(self, modules: Modules, name: str) -> None:
        t = modules.traits
        assert t.head_dim is not None
        assert t.rotary_dim is not None
        self.modules, self.head_dim, self.rotary_dim = modules, t.head_dim, t.rotary_dim
        self.probability, self.residual = t.attention_dropout, t.residual_dropout
        self._add_projections(modules, name)

    def _add_projections(self, modules: Modules, name: str) -> None:
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (
            modules.linear(f"{name}.{n}") for n in ("k_proj", "v_proj", "q_proj", "out_proj")
        )

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query = view(call(self.q_proj, hidden_states), *hidden_shape)
        key = view(call(self.k_proj, hidden_states), *hidden_shape)
        value = transpose(view(call(self.v_proj, hidden_states), *hidden_shape), 1, 2)
        sin, cos = position_embeddings
        rest = self.head_dim - self.rotary_dim
        k_rot = narrow(key, -1, self.rotary_dim)
        k_pass = narrow(key, -1, rest)
        q_rot = narrow(query, -1, self.rotary_dim)
        q_pass = narrow(query, -1, rest)
        k_rot = _rotate_gptj(k_rot, sin, cos)
        q_rot = _rotate_gptj(q_rot, sin, cos)
        key = cat_last([k_rot, k_pass])
        query = cat_last([q_rot, q_pass])
        query = transpose(query, 1, 2)
        key = transpose(key, 1, 2)
        if cache is not None:
            key, value = cache.update(key, value)
        attn_output, attn_weights = self._attend(query, key, value, attention_mask)
        attn_output = contiguous(reshape(attn_output, (*input_shape, numel(attn_output.shape[2:]))))
        attn_output = call(self.out_proj, attn_output)
        attn_output = call(dropout, attn_output, self.residual)
        return attn_output, attn_weights

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        """Eager scores are computed in fp32."""
        if self.modules.attention == "sdpa":
            return blocks.sdpa_attention(self.modules.kernels, 1, query, key, value, mask, probability=self.probability)
        return self._eager(query, key, value, mask)

    def _eager(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        attn_weights = ops.scale(ops.matmul4(to(query, "f32"), transpose(to(key, "f32"), 2, 3)))
        if mask is not None:
            attn_weights = add(attn_weights, mask)
        attn_weights = to(ops.softmax(attn_weights), value.dtype)
        attn_weights = dropout(attn_weights, self.probability)
        attn_output = ops.matmul4(attn_weights, value)
        attn_output = contiguous(transpose(attn_output, 1, 2))
        return attn_output, attn_weights


class CodeGenAttention(GptjAttention):
    """CodeGenAttention: one projection in four groups of queries, values and keys; rotated in fp32."""

    def _add_projections(self, modules: Modules, name: str) -> None:
        self.out_proj, self.qkv_proj = modules.linear(f"{name}.out_proj"), modules.linear(f"{name}.qkv_proj")

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, hidden_states.shape[-1] // self.head_dim, self.head_dim)
        local_dim = hidden_states.shape[-1] // 4
        qkv = view(call(self.qkv_proj, hidden_states), *input_shape, -1, 3 * local_dim)
        query, value, key = ops.split_last(qkv, [local_dim] * 3)
        query = reshape(query, hidden_shape)
        key = reshape(key, hidden_shape)
        value = transpose(reshape(value, hidden_shape), 1, 2)
        sin, cos = position_embeddings
        rest = self.head_dim - self.rotary_dim
        k_rot = narrow(key, -1, self.rotary_dim)
        k_pass = narrow(key, -1, rest)
        q_rot = narrow(query, -1, self.rotary_dim)
        q_pass = narrow(query, -1, rest)
        k_rot = _rotate_gptj(k_rot, sin, cos)
        q_rot = _rotate_gptj(q_rot, sin, cos)
        key = cat_last([k_rot, k_pass])
        query = cat_last([q_rot, q_pass])
        query = to(transpose(query, 1, 2), value.dtype)
        key = to(transpose(key, 1, 2), value.dtype)
        if cache is not None:
            key, value = cache.update(key, value)
        attn_output, attn_weights = self._attend(query, key, value, attention_mask)
        attn_output = contiguous(reshape(attn_output, (*input_shape, numel(attn_output.shape[2:]))))
        attn_output = call(self.out_proj, attn_output)
        attn_output = call(dropout, attn_output, self.residual)
        return attn_output, attn_weights


class GptjLayer(Layer):
    """GPTJBlock, CodeGenBlock: attention and MLP read the same normed input."""

    def __init__(self, ln_1: Module, attn: Module, mlp: Module) -> None:
        self.ln_1, self.attn, self.mlp = ln_1, attn, mlp

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        position_embeddings: Any = None,
    ) -> Tensor:
        residual = hidden_states
        hidden_states = call(self.ln_1, hidden_states)
        attn_output, _ = call(
            self.attn,
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
        )
        feed_forward_hidden_states = call(self.mlp, hidden_states)
        return add(add(attn_output, feed_forward_hidden_states), residual)


class GptjDecoder(LayerNormDecoder):
    """GPTJModel: sines and cosines are read from a buffer."""

    embedding_name = "transformer.wte.weight"
    final_norm_name = "transformer.ln_f"
    keyword_order = ("attention_mask", "position_ids", "cache", "position_embeddings")
    attention_class: ClassVar[type[GptjAttention]] = GptjAttention

    @classmethod
    def buffers(cls, traits: DecoderTraits, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        assert traits.table_positions is not None
        assert traits.rotary_dim is not None
        return [("embed_positions", (traits.table_positions, traits.rotary_dim), "f32")]

    def make_layer(self, index: int) -> Layer:
        name, linear = f"{self.modules.prefix}{index}", self.modules.linear
        act = blocks.ACTIVATIONS[self.traits.activation or "gelu_new"]
        mlp = PlainMlp(linear(f"{name}.mlp.fc_in"), linear(f"{name}.mlp.fc_out"), act, self.traits.residual_dropout)
        return GptjLayer(self.make_norm(f"{name}.ln_1"), self.attention_class(self.modules, f"{name}.attn"), mlp)

    def after_masks(self, hidden_states: Tensor) -> Tensor:
        return dropout(hidden_states, self.traits.embedding_dropout)

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        return {"full": self._sines(position_ids, hidden_states.dtype)}

    def _sines(self, position_ids: Tensor, dtype: str) -> tuple[Tensor, ...]:
        width = self.traits.rotary_dim
        assert width is not None
        sincos = to(Tensor((*position_ids.shape, width), "f32"), dtype)
        return tuple(ops.split_last(sincos, [width // 2, width // 2]))


class CodeGenDecoder(GptjDecoder):
    """CodeGenModel: tables stay in fp32."""

    attention_class = CodeGenAttention

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        return {"full": self._sines(position_ids, "f32")}


# ------------------------------------------------------------------ Persimmon
class PersimmonAttention(PhiAttention):
    """PersimmonAttention: phi's, from one projection."""

    def __init__(self, modules: Modules, name: str) -> None:
        t = modules.traits
        assert t.head_dim is not None
        assert t.num_heads is not None
        assert t.rotary_dim is not None
        self.head_dim, self.num_heads, self.groups, self.modules = t.head_dim, t.num_heads, 1, modules
        self.softcap, self.probability, self.rotary_ndims = None, t.attention_dropout, t.rotary_dim
        self.query_key_value, self.dense = modules.linear(f"{name}.query_key_value"), modules.linear(f"{name}.dense")
        self.norms = self._norms(modules, name) if t.qk_norm else []

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        bsz, q_len = hidden_states.shape[:2]
        fused_qkv = call(self.query_key_value, hidden_states)
        query_states, key_states, value_states = self._split_heads(fused_qkv)
        if self.norms:
            query_states = call(self.norms[0], query_states)
            key_states = call(self.norms[1], key_states)
        query_states = transpose(query_states, 1, 2)
        value_states = transpose(value_states, 1, 2)
        key_states = transpose(key_states, 1, 2)
        cos, sin = position_embeddings
        rest = self.head_dim - self.rotary_ndims
        query_rot, query_pass = narrow(query_states, -1, self.rotary_ndims), narrow(query_states, -1, rest)
        key_rot, key_pass = narrow(key_states, -1, self.rotary_ndims), narrow(key_states, -1, rest)
        query_rot, key_rot = blocks.apply_rotary(query_rot, key_rot, cos, sin)
        query_states = cat_last([query_rot, query_pass])
        key_states = cat_last([key_rot, key_pass])
        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states)
        attn_output, attn_weights = self.attend(query_states, key_states, value_states, attention_mask)
        attn_output = reshape(attn_output, (bsz, q_len, numel(attn_output.shape[2:])))
        attn_output = call(self.dense, attn_output)
        return attn_output, attn_weights

    def _split_heads(self, fused_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fused_qkv = view(fused_qkv, *fused_qkv.shape[:2], self.num_heads, 3, self.head_dim)
        return select(fused_qkv, 3), select(fused_qkv, 3), select(fused_qkv, 3)


class PersimmonLayer(LlamaLayer):
    """PersimmonDecoderLayer: dropout after the MLP, whose result comes first in the sum."""

    probability = 0.0

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
        hidden_states = call(self.mlp, hidden_states)
        hidden_states = call(dropout, hidden_states, self.probability)
        hidden_states = add(hidden_states, residual)
        return hidden_states  # noqa: RET504


class PersimmonDecoder(LayerNormDecoder):
    """PersimmonModel."""

    final_norm_name = "model.final_layernorm"
    keyword_order = ("attention_mask", "position_ids", "cache", "position_embeddings")

    def make_layer(self, index: int) -> Layer:
        name, linear = f"{self.modules.prefix}{index}", self.modules.linear
        act = blocks.ACTIVATIONS[self.traits.activation or "relu2"]
        layer = PersimmonLayer(
            self.make_norm(f"{name}.input_layernorm"),
            PersimmonAttention(self.modules, f"{name}.self_attn"),
            self.make_norm(f"{name}.post_attention_layernorm"),
            PlainMlp(linear(f"{name}.mlp.dense_h_to_4h"), linear(f"{name}.mlp.dense_4h_to_h"), act),
        )
        layer.probability = self.traits.residual_dropout
        return layer
