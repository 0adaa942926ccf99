"""Multi-head latent attention: MiniCPM3, Youtu, DeepSeek V2 and V3, GLM-4 MoE Lite.

Keys and values come from one narrow product; a part of each key is rotated and shared by all heads. Each class follows
transformers 5.24's models/<family>/modeling_<family>.py; local names are theirs.
"""

from typing import Any, ClassVar

from foretune.memory import blocks, ops
from foretune.memory.blocks import RmsNorm, call
from foretune.memory.decoder import Cache, Modules
from foretune.memory.families.dense import GraniteLayer
from foretune.memory.families.gemma import GemmaDecoder
from foretune.memory.families.llama import LlamaDecoder
from foretune.memory.families.moe_shared import SharedExpertsDecoder
from foretune.memory.interleaved import every_other
from foretune.memory.layout import numel
from foretune.memory.ops import (
    add,
    cat_last,
    contiguous,
    expand,
    mul,
    narrow,
    reshape,
    transpose,
    unsqueeze,
    view,
)
from foretune.memory.pointwise import subtract
from foretune.memory.strided import copy_to_last
from foretune.memory.tape import Tensor
from foretune.models import DecoderTraits

__all__ = ["DeepseekV3Decoder", "LatentAttention", "MiniCpm3Decoder", "YoutuDecoder"]


def apply_rotary_interleave(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate pairs of neighbours (modeling_deepseek_v3.py); the heads are dimension `dim`."""
    cos = unsqueeze(narrow(cos, -1, cos.shape[-1] // 2), dim)
    sin = unsqueeze(narrow(sin, -1, sin.shape[-1] // 2), dim)
    q1, q2 = every_other(q), every_other(q)
    k1, k2 = every_other(k), every_other(k)
    q_embed = cat_last([subtract(mul(q1, cos), mul(q2, sin)), add(mul(q2, cos), mul(q1, sin))])
    k_embed = cat_last([subtract(mul(k1, cos), mul(k2, sin)), add(mul(k2, cos), mul(k1, sin))])
    return q_embed, k_embed


class LatentAttention:
    """DeepseekV3Attention, MiniCPM3Attention, YoutuAttention, Glm4MoeLiteAttention."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        t = modules.traits
        assert t.head_dim is not None
        assert t.num_heads is not None
        assert t.num_kv_heads is not None
        assert t.rotary_dim is not None
        assert t.value_head_dim is not None
        self.modules, self.groups, self.flags = modules, t.num_heads // t.num_kv_heads, t.flags
        self.qk_head_dim, self.qk_rope_head_dim, self.v_head_dim = t.head_dim, t.rotary_dim, t.value_head_dim
        self.qk_nope_head_dim = t.head_dim - t.rotary_dim
        self.has_query_rank = modules.has(f"{name}.q_a_proj")
        if self.has_query_rank:
            self.q_a_proj, self.q_b_proj = modules.linear(f"{name}.q_a_proj"), modules.linear(f"{name}.q_b_proj")
            self.q_a_layernorm = RmsNorm(modules.weight(f"{name}.q_a_layernorm.weight"))
        else:
            self.q_proj = modules.linear(f"{name}.q_proj")
        self.kv_a_proj_with_mqa = modules.linear(f"{name}.kv_a_proj_with_mqa")
        norm = modules.weight(f"{name}.kv_a_layernorm.weight")
        self.kv_a_layernorm, self.kv_lora_rank = RmsNorm(norm), norm.shape[0]
        self.kv_b_proj, self.o_proj = modules.linear(f"{name}.kv_b_proj"), modules.linear(f"{name}.o_proj")

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        batch_size, _, seq_length, _ = kv_nope.shape
        nope, rope = self.qk_nope_head_dim, self.qk_rope_head_dim
        key_shape = (batch_size, seq_length, -1, nope + self.v_head_dim)
        kv_nope = transpose(view(call(self.kv_b_proj, kv_nope), *key_shape), 1, 2)
        k_nope, value_states = ops.split_last(kv_nope, [nope, self.v_head_dim])
        k_rot = expand(k_rot, (batch_size, k_nope.shape[1], seq_length, rope))
        key_states = Tensor((*kv_nope.shape[:-1], nope + rope), kv_nope.dtype)
        key_states = copy_to_last(key_states, k_nope)
        key_states = copy_to_last(key_states, k_rot)
        return key_states, value_states

    def rotate(self, q_rot: Tensor, k_rot: Tensor, position_embeddings: Any) -> tuple[Tensor, Tensor]:
        """By pairs of neighbours where the config says so, else by halves."""
        cos, sin = position_embeddings
        if "rope_interleave" in self.flags:
            return apply_rotary_interleave(q_rot, k_rot, cos, sin)
        return blocks.apply_rotary(q_rot, k_rot, cos, sin)

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        batch_size, seq_length = hidden_states.shape[:-1]
        query_shape = (batch_size, seq_length, -1, self.qk_head_dim)
        if self.has_query_rank:
            q_states = call(self.q_b_proj, call(self.q_a_layernorm, call(self.q_a_proj, hidden_states)))
        else:
            q_states = call(self.q_proj, hidden_states)
        q_states = transpose(view(q_states, *query_shape), 1, 2)
        q_pass, q_rot = ops.split_last(q_states, [self.qk_nope_head_dim, self.qk_rope_head_dim])
        compressed_kv = call(self.kv_a_proj_with_mqa, hidden_states)
        kv_nope, k_rot = ops.split_last(compressed_kv, [self.kv_lora_rank, self.qk_rope_head_dim])
        kv_nope = call(self.kv_a_layernorm, kv_nope)
        kv_nope = view(kv_nope, batch_size, 1, seq_length, self.kv_lora_rank)
        k_rot = view(k_rot, batch_size, 1, seq_length, self.qk_rope_head_dim)
        q_rot, k_rot = self.rotate(q_rot, k_rot, position_embeddings)
        if cache is not None:
            kv_nope, k_rot = cache.update(kv_nope, k_rot)
        query_states = cat_last([q_pass, q_rot])
        key_states, value_states = self.expand_kv(kv_nope, k_rot)
        attn_output, attn_weights = self.attend(query_states, key_states, value_states, attention_mask)
        attn_output = contiguous(reshape(attn_output, (batch_size, seq_length, numel(attn_output.shape[2:]))))
        attn_output = call(self.o_proj, attn_output)
        return attn_output, attn_weights

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        """The attention function that the configuration names."""
        if self.modules.attention == "eager":
            return blocks.eager_attention(self.groups, q, k, v, mask)
        return blocks.sdpa_attention(self.modules.kernels, self.groups, q, k, v, mask)


class LatentAttentionV2(LatentAttention):
    """MiniCPM3Attention, DeepseekV2Attention: the normed latent has a name of its own, after the rotated part."""

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        batch_size, seq_length = hidden_states.shape[:-1]
        query_shape = (batch_size, seq_length, -1, self.qk_head_dim)
        if self.has_query_rank:
            q = call(self.q_b_proj, call(self.q_a_layernorm, call(self.q_a_proj, hidden_states)))
        else:
            q = call(self.q_proj, hidden_states)
        q = transpose(view(q, *query_shape), 1, 2)
        q_nope, q_pe = ops.split_last(q, [self.qk_nope_head_dim, self.qk_rope_head_dim])
        compressed_kv = call(self.kv_a_proj_with_mqa, hidden_states)
        kv_nope, k_pe = ops.split_last(compressed_kv, [self.kv_lora_rank, self.qk_rope_head_dim])
        k_nope = view(call(self.kv_a_layernorm, kv_nope), batch_size, 1, seq_length, self.kv_lora_rank)
        k_pe = view(k_pe, batch_size, 1, seq_length, self.qk_rope_head_dim)
        q_pe, k_pe = self.rotate(q_pe, k_pe, position_embeddings)
        if cache is not None:
            k_nope, k_pe = cache.update(k_nope, k_pe)
        query_states = cat_last([q_nope, q_pe])
        key_states, value_states = self.expand_kv(k_nope, k_pe)
        attn_output, attn_weights = self.attend(query_states, key_states, value_states, attention_mask)
        attn_output = contiguous(reshape(attn_output, (batch_size, seq_length, numel(attn_output.shape[2:]))))
        attn_output = call(self.o_proj, attn_output)
        return attn_output, attn_weights


class YoutuDecoder(LlamaDecoder):
    """models/youtu."""

    attention_class: ClassVar[Any] = LatentAttention


class DeepseekV3Decoder(SharedExpertsDecoder):
    """models/deepseek_v3, glm4_moe_lite."""

    attention_class: ClassVar[Any] = LatentAttention
    keyword_order = ("position_embeddings", "attention_mask", "position_ids", "cache")


# ------------------------------------------------------------------ MiniCPM3
class MiniCpm3Decoder(LlamaDecoder):
    """models/minicpm3: scaled embeddings, branches and hidden states before the head."""

    attention_class: ClassVar[Any] = LatentAttentionV2
    layer_class = GraniteLayer
    scales_before_head = True
    embed = GemmaDecoder.embed

    @classmethod
    def buffers(cls, traits: DecoderTraits, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        """The embeddings' scale comes first, in int64 where the config has a whole number."""
        kept = "i64" if "whole_scale_emb" in traits.flags else dtype
        return [("embed_scale", (), kept), *super().buffers(traits, dtype)]
