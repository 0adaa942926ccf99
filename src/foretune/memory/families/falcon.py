"""Falcon (models/falcon of transformers 5.24): rotary embedding or linear biases, three layouts of its projection."""

from typing import Any

from foretune.memory import alibi, blocks, ops
from foretune.memory.blocks import MatmulLinear, Module, PlainMlp, call
from foretune.memory.decoder import Cache, Layer, Modules, RunOptions
from foretune.memory.families.scoped import ScopedDecoder
from foretune.memory.ops import add, dropout, reshape, to, transpose, view
from foretune.memory.rare_ops import scale_in_place
from foretune.memory.strided import select
from foretune.memory.tape import Tensor
from foretune.models import DecoderTraits

__all__ = ["FalconDecoder"]


class FalconAttention:
    """FalconAttention: a fused projection whose keys and values are gathered by index."""

    def __init__(self, modules: Modules, name: str) -> None:
        t = modules.traits
        assert t.head_dim is not None
        assert t.num_heads is not None
        assert t.num_kv_heads is not None
        self.modules, self.num_heads, self.head_dim, self.num_kv_heads = (
            modules,
            t.num_heads,
            t.head_dim,
            t.num_kv_heads,
        )
        self.is_grouped, self.probability = t.has_grouped_projection, t.attention_dropout
        self.query_key_value = modules.linear(f"{name}.query_key_value", MatmulLinear)
        self.dense = modules.linear(f"{name}.dense", MatmulLinear)

    rotate = staticmethod(blocks.apply_rotary)

    def _split_heads(self, fused_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, seq_len, _ = fused_qkv.shape
        if self.is_grouped:
            per_group = self.num_heads // self.num_kv_heads
            qkv = view(fused_qkv, batch, seq_len, -1, per_group + 2, self.head_dim)
            query = ops.narrow(qkv, 3, per_group)
            key = ops.gather_one(qkv, 3)
            value = ops.gather_one(qkv, 3)
            key = ops.expand(key, query.shape)
            value = ops.expand(value, query.shape)
            flat = (batch, seq_len, self.num_heads, self.head_dim)
            query, key, value = (reshape(x, flat) for x in (query, key, value))
            return query, key, value
        if self.num_kv_heads != 1:
            fused_qkv = view(fused_qkv, batch, seq_len, self.num_heads, 3, self.head_dim)
            return select(fused_qkv, 3), select(fused_qkv, 3), select(fused_qkv, 3)
        fused_qkv = view(fused_qkv, batch, seq_len, self.num_heads + 2, self.head_dim)
        return ops.narrow(fused_qkv, 2, self.num_heads), ops.gather_one(fused_qkv, 2), ops.gather_one(fused_qkv, 2)

    def __call__(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        fused_qkv = call(self.query_key_value, hidden_states)
        query_layer, key_layer, value_layer = self._split_heads(fused_qkv)
        b, s = hidden_states.shape[:2]
        kv_heads = key_layer.shape[2]
        query_layer = reshape(transpose(query_layer, 1, 2), (b, self.num_heads, s, self.head_dim))
        key_layer = reshape(transpose(key_layer, 1, 2), (b, kv_heads, s, self.head_dim))
        value_layer = reshape(transpose(value_layer, 1, 2), (b, kv_heads, s, self.head_dim))
        if alibi is None:
            cos, sin = position_embeddings
            query_layer, key_layer = self.rotate(query_layer, key_layer, cos, sin)
        if cache is not None:
            key_layer, value_layer = cache.update(key_layer, value_layer)
        four = (b, self.num_heads, s, self.head_dim)
        if self.modules.attention == "sdpa":
            attn_output = blocks.scaled_dot_product_attention(
                self.modules.kernels,
                query_layer,
                key_layer,
                value_layer,
                attention_mask,
                probability=0.0 if alibi is None else self.probability,
            )
            attention_scores = None
            if alibi is None:
                attn_output = view(attn_output, *four)
            attn_output = transpose(attn_output, 1, 2)
            attn_output = reshape(attn_output, (b, s, self.num_heads * self.head_dim))
        elif alibi is None:
            attention_scores = ops.matmul4(query_layer, transpose(key_layer, 2, 3))
            attention_scores = scale_in_place(attention_scores)
            attention_scores = self._softmax(attention_scores, attention_mask, hidden_states.dtype)
            attn_output = ops.matmul4(attention_scores, value_layer)
            attn_output = view(attn_output, *four)
            attn_output = transpose(attn_output, 1, 2)
            attn_output = reshape(attn_output, (b, s, self.num_heads * self.head_dim))
        else:
            matmul_result = ops.matmul4(query_layer, transpose(key_layer, 2, 3))
            attention_scores = to(view(matmul_result, b, self.num_heads, s, s), "f32")
            attention_logits = add(attention_scores, view(alibi, b, self.num_heads, 1, s))
            attention_logits = scale_in_place(attention_logits)
            attention_probs = self._softmax(attention_logits, attention_mask, hidden_states.dtype)
            attention_probs = call(dropout, attention_probs, self.probability)
            attention_probs_reshaped = view(attention_probs, b, self.num_heads, s, s)
            attn_output = ops.matmul4(attention_probs_reshaped, value_layer)
            attn_output = view(attn_output, b * self.num_heads, s, self.head_dim)
            attn_output = self._merge_heads(attn_output)
            attn_output = call(self.dense, attn_output)
            return attn_output, attention_probs
        attn_output = call(self.dense, attn_output)
        return attn_output, attention_scores

    def _merge_heads(self, x: Tensor) -> Tensor:
        seq_length, batch_size = x.shape[1], x.shape[0] // self.num_heads
        x = view(x, batch_size, self.num_heads, seq_length, self.head_dim)
        x = transpose(x, 1, 2)
        return reshape(x, (batch_size, seq_length, self.num_heads * self.head_dim))

    @staticmethod
    def _softmax(scores: Tensor, mask: Tensor | None, dtype: str) -> Tensor:
        """F.softmax(scores + mask, dtype=dtype)."""
        if mask is not None:
            scores = add(scores, mask)
        return ops.softmax(to(scores, dtype))


def _dropout_add(x: Tensor, residual: Tensor, probability: float) -> Tensor:
    out = dropout(x, probability)
    out = add(residual, out)
    return out  # noqa: RET504


class FalconLayer(Layer):
    """FalconDecoderLayer: parallel attention and MLP, one or two norms; or in sequence."""

    def __init__(self, norms: list[Module], attention: Module, mlp: Module, traits: DecoderTraits) -> None:
        self.norms, self.self_attention, self.mlp = norms, attention, mlp
        self.is_parallel = traits.has_parallel_residual
        self.hidden_dropout, self.attention_dropout = traits.residual_dropout, traits.attention_dropout

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        position_embeddings: Any = None,
    ) -> Any:
        residual = hidden_states
        attention_layernorm_out = call(self.norms[0], hidden_states)
        has_two_inputs = self.is_parallel and len(self.norms) == 2
        mlp_layernorm_out = call(self.norms[1], hidden_states) if has_two_inputs else None
        attention_output, attn_weights = call(
            self.self_attention,
            attention_layernorm_out,
            cache=cache,
            attention_mask=attention_mask,
            position_ids=position_ids,
            alibi=alibi,
            position_embeddings=position_embeddings,
        )
        if not self.is_parallel:
            residual = _dropout_add(attention_output, residual, self.attention_dropout)
            mlp_layernorm_out = call(self.norms[1], residual)
        elif len(self.norms) == 1:
            mlp_layernorm_out = attention_layernorm_out
        mlp_output = call(self.mlp, mlp_layernorm_out)
        if self.is_parallel:
            mlp_output = ops.add_in_place(mlp_output, attention_output)
        output = _dropout_add(mlp_output, residual, self.hidden_dropout)
        return output, attn_weights


class FalconDecoder(ScopedDecoder):
    """FalconModel; its mask is always a table, into which linear biases are merged."""

    embedding_name = "transformer.word_embeddings.weight"
    final_norm_name = "transformer.ln_f"
    keyword_order = ("cache", "attention_mask", "position_ids", "alibi", "position_embeddings")
    returns_tuples = True

    @classmethod
    def buffers(cls, traits: DecoderTraits, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        """The rotary frequencies are there also where linear biases are used."""
        assert traits.head_dim is not None
        return [(name, (traits.head_dim // 2,), "f32") for name in ("inv_freq", "original_inv_freq")]

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        names = [
            n
            for n in ("ln_attn", "ln_mlp", "input_layernorm", "post_attention_layernorm")
            if self.modules.optional(f"{name}.{n}.weight") is not None
        ]
        mlp = PlainMlp(
            self.modules.linear(f"{name}.mlp.dense_h_to_4h", MatmulLinear),
            self.modules.linear(f"{name}.mlp.dense_4h_to_h", MatmulLinear),
            blocks.ACTIVATIONS[self.traits.activation or "gelu"],
        )
        attention = FalconAttention(self.modules, f"{name}.self_attention")
        return FalconLayer([self.make_norm(f"{name}.{n}") for n in names], attention, mlp, self.traits)

    def prologue(self, input_ids: Tensor, run: RunOptions, cache: Cache | None) -> tuple[Tensor, dict[str, Any]]:
        t = self.traits
        assert t.num_heads is not None
        assert t.head_dim is not None
        inputs_embeds = self.embedded(input_ids, run)
        biases = mask = None
        if t.rotary_dim is None:
            mask = run.padding
            if mask is None:
                mask = Tensor((run.micro_batch_size, run.sequence_length), "i64")
            biases = alibi.falcon_biases(mask, t.num_heads, inputs_embeds.dtype)
        position_ids = self.positions_of(run)
        causal_mask = run.causal_mask(inputs_embeds, None, can_skip=False)
        if biases is not None and causal_mask is not None:
            if causal_mask.dtype == "bool":
                causal_mask = alibi.as_numbers(causal_mask, inputs_embeds.dtype)
            biases = view(biases, run.micro_batch_size, t.num_heads, 1, run.sequence_length)
            causal_mask = alibi.merged(biases, causal_mask)
        hidden_states = inputs_embeds
        position_embeddings = blocks.rotary_tables(hidden_states.dtype, position_ids, t.head_dim)
        return hidden_states, {
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "alibi": biases,
            "mask": mask,
            "attention_mask": causal_mask,
            "position_embeddings": position_embeddings,
        }
