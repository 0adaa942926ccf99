"""Latent attention to the tokens that an indexer chooses: DeepSeek V3.2 and GLM-5 (models/deepseek_v32, glm_moe_dsa of
transformers 5.24).
"""

from typing import Any, ClassVar

from foretune.memory import blocks, ops
from foretune.memory.blocks import LayerNorm, call
from foretune.memory.decoder import Cache, Layer, Modules, RunOptions
from foretune.memory.experts import top_k
from foretune.memory.families.latent import DeepseekV3Decoder, LatentAttention, apply_rotary_interleave
from foretune.memory.families.llama import LlamaLayer
from foretune.memory.layout import numel
from foretune.memory.ops import (
    add,
    cat_last,
    contiguous,
    like,
    mul,
    relu,
    reshape,
    scale,
    to,
    transpose,
    unsqueeze,
    view,
)
from foretune.memory.pointwise import masked_fill
from foretune.memory.strided import select
from foretune.memory.tape import Tensor, current, like_iterator
from foretune.models import ModelShape

__all__ = ["DeepseekV32Decoder", "GlmMoeDsaDecoder"]


class _Indexer:
    """DeepseekV32Indexer, which wants no gradients."""

    def __init__(self, modules: Modules, name: str) -> None:
        assert modules.traits.rotary_dim is not None
        assert modules.traits.index_topk is not None
        self.wq_b, self.wk, self.weights_proj = (modules.linear(f"{name}.{n}") for n in ("wq_b", "wk", "weights_proj"))
        proj = modules.optional(f"{name}.weights_proj.weight")
        self.weight_dtype = "u8" if proj is None else proj.dtype
        """A quantized weight is bytes, and what is multiplied by it is cast to them first."""
        weight = modules.weight(f"{name}.k_norm.weight")
        self.k_norm, self.head_dim = LayerNorm(weight, modules.weight(f"{name}.k_norm.bias")), weight.shape[0]
        self.qk_rope_head_dim, self.index_topk = modules.traits.rotary_dim, modules.traits.index_topk

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """torch.no_grad around the forward."""
        tape = current()
        before, tape.is_grad_enabled = tape.is_grad_enabled, False
        out = self.forward(*args, **kwargs)
        tape.is_grad_enabled = before
        return out

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """By halves, of [B, S, heads, width]."""
        cos = unsqueeze(cos, 2)
        sin = unsqueeze(sin, 2)
        q_embed = add(mul(q, cos), mul(blocks.rotate_half(q), sin))
        k_embed = add(mul(k, cos), mul(blocks.rotate_half(k), sin))
        return q_embed, k_embed

    def forward(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor,
        cache: Cache | None = None,
    ) -> Tensor:
        """Score all tokens and return the places of the best."""
        batch_size, seq_len, _ = hidden_states.shape
        widths = [self.qk_rope_head_dim, self.head_dim - self.qk_rope_head_dim]
        cos, sin = position_embeddings
        q = call(self.wq_b, q_resid)
        q = view(q, batch_size, seq_len, -1, self.head_dim)
        q_rot, q_pass = ops.split_last(q, widths)
        k = unsqueeze(call(self.k_norm, call(self.wk, hidden_states)), 2)
        k_rot, k_pass = ops.split_last(k, widths)
        q_rot, k_rot = self.rotate(q_rot, k_rot, cos, sin)
        q = cat_last([q_rot, q_pass])
        k = view(cat_last([k_rot, k_pass]), batch_size, seq_len, self.head_dim)
        if cache is not None:
            k = cache.kept[-1]["indexer"] = ops.cat_copy(k)
        scores = scale(ops.matmul4(to(q, "f32"), unsqueeze(to(transpose(k, -1, -2), "f32"), 1)))
        scores = relu(scores)
        weights = scale(to(call(self.weights_proj, to(hidden_states, self.weight_dtype)), "f32"))
        index_scores = view(ops.matmul4(unsqueeze(weights, 2), scores), batch_size, seq_len, seq_len)
        if attention_mask.dtype == "bool":
            index_scores = masked_fill(index_scores, like(attention_mask))
        else:
            index_scores = add(index_scores, attention_mask)
        topk = min(self.index_topk, seq_len)
        return to(top_k(index_scores, topk)[1], "i32")


class DeepseekV32Attention(LatentAttention):
    """DeepseekV32Attention."""

    indexer_class: ClassVar[type[_Indexer]] = _Indexer

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        has_indexer = modules.optional(f"{name}.indexer.k_norm.weight") is not None
        self.indexer = self.indexer_class(modules, f"{name}.indexer") if has_indexer else None

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        prev_topk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        assert attention_mask is not None
        batch_size, seq_length = hidden_states.shape[:-1]
        query_shape = (batch_size, seq_length, -1, self.qk_head_dim)
        q_resid = call(self.q_a_layernorm, call(self.q_a_proj, hidden_states))
        q_states = transpose(view(call(self.q_b_proj, q_resid), *query_shape), 1, 2)
        q_pass, q_rot = ops.split_last(q_states, [self.qk_nope_head_dim, self.qk_rope_head_dim])
        compressed_kv = call(self.kv_a_proj_with_mqa, hidden_states)
        kv_pass, k_rot = ops.split_last(compressed_kv, [self.kv_lora_rank, self.qk_rope_head_dim])
        k_pass = view(call(self.kv_a_layernorm, kv_pass), batch_size, 1, seq_length, self.kv_lora_rank)
        k_rot = view(k_rot, batch_size, 1, seq_length, self.qk_rope_head_dim)
        cos, sin = position_embeddings
        q_rot, k_rot = apply_rotary_interleave(q_rot, k_rot, cos, sin)
        if cache is not None:
            k_pass, k_rot = cache.update(k_pass, k_rot)
        query_states = cat_last([q_pass, q_rot])
        key_states, value_states = self.expand_kv(k_pass, k_rot)
        if self.indexer is not None:
            topk_indices = call(
                self.indexer, hidden_states, q_resid, position_embeddings, select(attention_mask, 1), cache=cache
            )
        else:
            topk_indices = prev_topk_indices
        index_mask = unsqueeze(self._unchosen(topk_indices, seq_length), 1)
        if attention_mask.dtype == "bool":
            attention_mask = _and(attention_mask, like(index_mask))
        else:
            attention_mask = masked_fill(attention_mask, index_mask)
        attn_output, attn_weights = self.attend(query_states, key_states, value_states, attention_mask)
        attn_output = contiguous(reshape(attn_output, (batch_size, seq_length, numel(attn_output.shape[2:]))))
        attn_output = call(self.o_proj, attn_output)
        return self.results(attn_output, attn_weights, topk_indices)

    @staticmethod
    def results(attn_output: Tensor, attn_weights: Any, topk_indices: Tensor) -> tuple[Any, ...]:
        """What the forward returns."""
        return attn_output, attn_weights

    @staticmethod
    def _unchosen(topk_indices: Tensor, seq_length: int) -> Tensor:
        """new_ones(...).scatter(-1, topk_indices.long(), False)."""
        return _scatter(Tensor((*topk_indices.shape[:-1], seq_length), "bool"), to(topk_indices, "i64"))


def _scatter(t: Tensor, index: Tensor) -> Tensor:
    return like(t)


def _and(a: Tensor, b: Tensor) -> Tensor:
    return like_iterator(a, b)


class DeepseekV32Decoder(DeepseekV3Decoder):
    """models/deepseek_v32: the mask is always a table, which the indexer needs."""

    attention_class: ClassVar[Any] = DeepseekV32Attention
    keyword_order = ("attention_mask", "position_embeddings", "position_ids", "cache")
    mask_kwargs = True

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        return {"full": run.causal_mask(inputs_embeds, None, can_skip=False)}


# ------------------------------------------------------------------ GLM-5
class _InterleavedIndexer(_Indexer):
    """GlmMoeDsaIndexer."""

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """By pairs of neighbours."""
        return apply_rotary_interleave(q, k, cos, sin, dim=2)


class GlmMoeDsaAttention(DeepseekV32Attention):
    """GlmMoeDsaAttention: a layer without an indexer takes the tokens of the last one that has it."""

    indexer_class = _InterleavedIndexer

    @staticmethod
    def results(attn_output: Tensor, attn_weights: Any, topk_indices: Tensor) -> tuple[Any, ...]:
        """With the tokens chosen."""
        return attn_output, attn_weights, topk_indices


class GlmMoeDsaLayer(LlamaLayer):
    """GlmMoeDsaDecoderLayer."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        position_embeddings: Any = None,
        prev_topk_indices: Any = None,
    ) -> tuple[Tensor, Tensor]:
        residual = hidden_states
        hidden_states = call(self.input_layernorm, hidden_states)
        hidden_states, _, topk_indices = call(
            self.self_attn,
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            position_embeddings=position_embeddings,
            prev_topk_indices=prev_topk_indices,
        )
        hidden_states = add(residual, hidden_states)
        residual = hidden_states
        hidden_states = call(self.post_attention_layernorm, hidden_states)
        hidden_states = call(self.mlp, hidden_states)
        hidden_states = add(residual, hidden_states)
        return hidden_states, topk_indices


class GlmMoeDsaDecoder(DeepseekV32Decoder):
    """GlmMoeDsaModel: each layer is handed the tokens that the one before it attended to."""

    attention_class: ClassVar[Any] = GlmMoeDsaAttention

    @classmethod
    def layer_tags(cls, shape: ModelShape) -> list[object]:
        """How far back the layer is whose indexer chose: what it chose dies at the next one."""
        own = {i for kind in shape.kinds for i in kind.layers if any("indexer" in p.name for p in kind.parameters)}
        tags: list[object] = []
        since = 0
        for i in range(shape.num_layers):
            since = 0 if i in own else since + 1
            tags.append(since)
        return tags

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        return GlmMoeDsaLayer(
            self.make_norm(f"{name}.input_layernorm"),
            self.attention_class(self.modules, f"{name}.self_attn", index),
            self.make_norm(f"{name}.post_attention_layernorm"),
            self.make_mlp(f"{name}.mlp"),
        )

    def __call__(  # type: ignore[override]
        self,
        input_ids: Tensor,
        run: RunOptions,
        position_ids: Any = None,
        cache: Any = None,
        inputs_embeds: Any = None,
    ) -> tuple[Tensor, Any]:
        tape = current()
        inputs_embeds = self.embed(input_ids)
        if run.embeddings_want_grad:
            inputs_embeds.needs_grad = True
        cache = Cache() if run.keeps_cache else None
        position_ids = self.positions_of(run)
        masks: dict[str, Tensor | None] = {}
        _mask_kwargs = {"inputs_embeds": inputs_embeds, "position_ids": position_ids}
        masks = self.masks(run, inputs_embeds)
        hidden_states = inputs_embeds
        position_embeddings = self.position_tables(hidden_states, position_ids)["full"]
        topk_indices: Any = None
        for i, layer in enumerate(self.layers):
            step = layer.checkpointed if run.is_checkpointed else layer.forward
            tape.segment("forward", i)
            hidden_states, topk_indices = call(
                step,
                hidden_states,
                attention_mask=masks["full"],
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                cache=cache,
                prev_topk_indices=topk_indices,
            )
            run.end_layer(i)
        tape.segment("head")
        hidden_states = call(self.norm, hidden_states)
        return hidden_states, cache
