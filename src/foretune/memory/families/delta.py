"""The gated delta rule beside gated attention: qwen3_next, qwen3_5 (transformers 5.24).

Each class follows models/<family>/modeling_<family>.py; local names are theirs. What runs is Transformers' own torch
code, chunk by chunk, as for someone who has not installed flash-linear-attention and causal-conv1d.
"""

from typing import Any, ClassVar

from foretune.memory import blocks
from foretune.memory.blocks import Module, RmsNorm, call
from foretune.memory.decoder import Cache, Layer, Modules, RunOptions
from foretune.memory.families.llama import LlamaAttention, SlidingDecoder
from foretune.memory.families.moe import Qwen2MoeSparseMoeBlock, make_experts
from foretune.memory.layout import numel
from foretune.memory.ops import (
    add,
    add_scalar,
    cat_last,
    contiguous,
    expand,
    like,
    mean_last,
    mul,
    narrow,
    reshape,
    rsqrt,
    scale,
    silu,
    square,
    to,
    transpose,
    unsqueeze,
    view,
)
from foretune.memory.pointwise import exp, masked_fill, sigmoid, softplus, subtract
from foretune.memory.routers import TopKRouter
from foretune.memory.scans import (
    causal_conv1d,
    cumsum,
    matmul,
    pad,
    repeat_interleave,
    set_select,
    solve_triangular,
    split,
    squeeze,
    sum_last,
    to_contiguous,
)
from foretune.memory.strided import select
from foretune.memory.tape import Tensor

__all__ = ["DeltaNet", "Qwen3NextDecoder", "Qwen35Decoder"]

CHUNK = 64
"""Tokens of one chunk (chunk_size of torch_chunk_gated_delta_rule)."""


def l2norm(x: Tensor) -> Tensor:
    """Each vector over its length."""
    inv_norm = rsqrt(add_scalar(sum_last(mul(x, x))))
    return mul(x, inv_norm)


def chunk_gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, None]:
    """torch_chunk_gated_delta_rule: products within all chunks at once, then a scan from chunk to chunk, all fp32."""
    initial_dtype = query.dtype
    batch_size, sequence_length, num_k_heads, k_head_dim = key.shape
    num_v_heads, v_head_dim = value.shape[-2:]
    decay = g
    if num_k_heads != num_v_heads:
        query = repeat_interleave(query, num_v_heads // num_k_heads, 2)
        key = repeat_interleave(key, num_v_heads // num_k_heads, 2)
    query, key, value, beta, decay = [
        to_contiguous(transpose(x, 1, 2), "f32") for x in (query, key, value, beta, decay)
    ]
    query = l2norm(query)
    key = l2norm(key)
    query = scale(query)
    pad_size = (CHUNK - sequence_length % CHUNK) % CHUNK
    query, key, value = (pad(x, 2, 0, pad_size) for x in (query, key, value))
    beta, decay = (pad(x, 2, 0, pad_size) for x in (beta, decay))
    num_chunks = (sequence_length + pad_size) // CHUNK
    v_beta = mul(value, unsqueeze(beta, 3))
    k_beta = mul(key, unsqueeze(beta, 3))
    query, key, k_beta, v_beta = [
        reshape(x, (*x.shape[:2], num_chunks, CHUNK, x.shape[-1])) for x in (query, key, k_beta, v_beta)
    ]
    decay = reshape(decay, (*decay.shape[:2], num_chunks, CHUNK))
    strictly_upper_mask = _upper_triangle(Tensor((CHUNK, CHUNK), "bool"))
    cum_decay = cumsum(decay)
    pairwise_decay = subtract(unsqueeze(cum_decay, 4), unsqueeze(cum_decay, 3))
    pairwise_decay = masked_fill(pairwise_decay, strictly_upper_mask)
    pairwise_decay = exp(pairwise_decay)
    ut_system = mul(matmul(k_beta, transpose(key, -1, -2)), pairwise_decay)
    intra_chunk_attn = mul(matmul(query, transpose(key, -1, -2)), pairwise_decay)
    decayed_k_beta = mul(k_beta, unsqueeze(exp(cum_decay), 4))
    new_values = solve_triangular(ut_system, v_beta)
    k_cumdecay = solve_triangular(ut_system, decayed_k_beta)
    last_recurrent_state = Tensor((batch_size, num_v_heads, k_head_dim, v_head_dim), "f32")
    core_attn_out = like(new_values)
    query = mul(query, unsqueeze(exp(cum_decay), 4))
    key = mul(key, unsqueeze(exp(subtract(narrow(cum_decay, -1, 1), cum_decay)), 4))
    chunk_decay = unsqueeze(unsqueeze(exp(select(cum_decay, -1)), 3), 4)
    for _ in range(num_chunks):
        v_new = subtract(select(new_values, 2), matmul(select(k_cumdecay, 2), last_recurrent_state))
        inter_chunk_attn = matmul(select(query, 2), last_recurrent_state)
        set_select(core_attn_out, 2, add(inter_chunk_attn, matmul(select(intra_chunk_attn, 2), v_new)))
        last_recurrent_state = add(
            mul(last_recurrent_state, select(chunk_decay, 2)), matmul(transpose(select(key, 2), -1, -2), v_new)
        )
    del last_recurrent_state
    core_attn_out = reshape(core_attn_out, (batch_size, num_v_heads, num_chunks * CHUNK, v_head_dim))
    core_attn_out = narrow(core_attn_out, 2, sequence_length)
    core_attn_out = to_contiguous(transpose(core_attn_out, 1, 2), initial_dtype)
    return core_attn_out, None


def _upper_triangle(ones: Tensor) -> Tensor:
    return Tensor(ones.shape, "bool")


class GatedNorm:
    """Qwen3_5RMSNormGated: a norm, then the gate in fp32."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = to(hidden_states, "f32")
        variance = mean_last(square(hidden_states))
        hidden_states = mul(hidden_states, rsqrt(add_scalar(variance)))
        hidden_states = mul(self.weight, to(hidden_states, input_dtype))
        hidden_states = mul(hidden_states, silu(to(gate, "f32")))
        return to(hidden_states, input_dtype)


class DeltaNet:
    """Qwen3_5GatedDeltaNet: projections, a convolution over queries, keys and values, the delta rule, a gated norm."""

    def __init__(self, modules: Modules, name: str) -> None:
        self.A_log, self.dt_bias = modules.weight(f"{name}.A_log"), modules.weight(f"{name}.dt_bias")
        self.conv1d = modules.weight(f"{name}.conv1d.weight")
        norm = modules.weight(f"{name}.norm.weight")
        assert modules.traits.mixer_groups is not None
        self.num_v_heads, self.num_k_heads = self.A_log.shape[0], modules.traits.mixer_groups
        self.head_v_dim = norm.shape[0]
        self.value_dim = self.num_v_heads * self.head_v_dim
        self.key_dim = (self.conv1d.shape[0] - self.value_dim) // 2
        self.head_k_dim = self.key_dim // self.num_k_heads
        self.norm, self.out_proj = GatedNorm(norm), modules.linear(f"{name}.out_proj")
        self.add_projections(modules, name)

    def add_projections(self, modules: Modules, name: str) -> None:
        """One projection each for queries, keys and values together, z, b and a."""
        self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a = (
            modules.linear(f"{name}.{n}") for n in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        )

    def __call__(self, hidden_states: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None) -> Any:
        batch_size, seq_len, _ = hidden_states.shape
        mixed_qkv = call(self.in_proj_qkv, hidden_states)
        mixed_qkv = transpose(mixed_qkv, 1, 2)
        z = call(self.in_proj_z, hidden_states)
        z = reshape(z, (batch_size, seq_len, self.num_v_heads, self.head_v_dim))
        b = call(self.in_proj_b, hidden_states)
        a = call(self.in_proj_a, hidden_states)
        mixed_qkv = call(causal_conv1d, mixed_qkv, squeeze(self.conv1d, 1), None, activation=silu)
        mixed_qkv = transpose(mixed_qkv, 1, 2)
        query, key, value = split(mixed_qkv, [self.key_dim, self.key_dim, self.value_dim], -1)
        query = reshape(query, (batch_size, seq_len, self.num_k_heads, self.head_k_dim))
        key = reshape(key, (batch_size, seq_len, self.num_k_heads, self.head_k_dim))
        value = reshape(value, (batch_size, seq_len, self.num_v_heads, self.head_v_dim))
        beta = sigmoid(b)
        g = mul(scale(exp(to(self.A_log, "f32"))), softplus(add(to(a, "f32"), self.dt_bias)))
        core_attn_out, _last_recurrent_state = call(chunk_gated_delta_rule, query, key, value, g=g, beta=beta)
        core_attn_out = reshape(core_attn_out, (batch_size * seq_len * self.num_v_heads, self.head_v_dim))
        z = reshape(z, (batch_size * seq_len * self.num_v_heads, self.head_v_dim))
        core_attn_out = call(self.norm, core_attn_out, z)
        core_attn_out = reshape(core_attn_out, (batch_size, seq_len, self.value_dim))
        output = call(self.out_proj, core_attn_out)
        return output  # noqa: RET504


class Qwen3NextDeltaNet(DeltaNet):
    """Qwen3NextGatedDeltaNet: queries, keys, values and z in one projection, head by head; so are b and a."""

    def add_projections(self, modules: Modules, name: str) -> None:
        self.in_proj_qkvz, self.in_proj_ba = (modules.linear(f"{name}.{n}") for n in ("in_proj_qkvz", "in_proj_ba"))

    def fix_query_key_value_ordering(self, mixed_qkvz: Tensor, mixed_ba: Tensor) -> tuple[Tensor, ...]:
        """Views of the two projections, and what strides make copies."""
        shape, shared = mixed_qkvz.shape[:2], self.num_v_heads // self.num_k_heads
        mixed_qkvz = view(mixed_qkvz, *shape, self.num_k_heads, 2 * self.head_k_dim + 2 * self.head_v_dim * shared)
        mixed_ba = view(mixed_ba, *shape, self.num_k_heads, 2 * shared)
        widths = [self.head_k_dim, self.head_k_dim, shared * self.head_v_dim, shared * self.head_v_dim]
        query, key, value, z = split(mixed_qkvz, widths, 3)
        b, a = split(mixed_ba, [shared, shared], 3)
        value = reshape(value, (*shape, self.num_v_heads, self.head_v_dim))
        z = reshape(z, (*shape, self.num_v_heads, self.head_v_dim))
        b = reshape(b, (*shape, self.num_v_heads))
        a = reshape(a, (*shape, self.num_v_heads))
        return query, key, value, z, b, a

    def __call__(self, hidden_states: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None) -> Any:
        shape = hidden_states.shape[:2]
        projected_states_qkvz = call(self.in_proj_qkvz, hidden_states)
        projected_states_ba = call(self.in_proj_ba, hidden_states)
        query, key, value, z, b, a = self.fix_query_key_value_ordering(projected_states_qkvz, projected_states_ba)
        query, key, value = (reshape(x, (*shape, numel(x.shape[2:]))) for x in (query, key, value))
        mixed_qkv = cat_last([query, key, value])
        mixed_qkv = transpose(mixed_qkv, 1, 2)
        mixed_qkv = call(causal_conv1d, mixed_qkv, squeeze(self.conv1d, 1), None, activation=silu)
        mixed_qkv = transpose(mixed_qkv, 1, 2)
        query, key, value = split(mixed_qkv, [self.key_dim, self.key_dim, self.value_dim], -1)
        query = reshape(query, (*shape, self.num_k_heads, self.head_k_dim))
        key = reshape(key, (*shape, self.num_k_heads, self.head_k_dim))
        value = reshape(value, (*shape, self.num_v_heads, self.head_v_dim))
        beta = sigmoid(b)
        g = mul(scale(exp(to(self.A_log, "f32"))), softplus(add(to(a, "f32"), self.dt_bias)))
        core_attn_out, _last_recurrent_state = call(chunk_gated_delta_rule, query, key, value, g=g, beta=beta)
        z_shape_og = z.shape
        core_attn_out = reshape(core_attn_out, (numel(z_shape_og[:3]), self.head_v_dim))
        z = reshape(z, (numel(z_shape_og[:3]), self.head_v_dim))
        core_attn_out = call(self.norm, core_attn_out, z)
        core_attn_out = reshape(core_attn_out, z_shape_og)
        core_attn_out = reshape(core_attn_out, (*shape, self.value_dim))
        output = call(self.out_proj, core_attn_out)
        return output  # noqa: RET504


class GatedAttention(LlamaAttention):
    """Qwen3_5Attention: a gate from the query's projection, normed heads, part of a head rotated."""

    rotate = staticmethod(blocks.apply_rotary_neox)

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        self.q_norm, self.k_norm = (
            RmsNorm(modules.weight(f"{name}.{n}.weight"), "gemma") for n in ("q_norm", "k_norm")
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
        query_states, gate = split(
            view(call(self.q_proj, hidden_states), *input_shape, -1, 2 * self.head_dim), [self.head_dim] * 2, -1
        )
        gate = reshape(gate, (*input_shape, numel(gate.shape[2:])))
        query_states = transpose(call(self.q_norm, view(query_states, *hidden_shape)), 1, 2)
        key_states = transpose(call(self.k_norm, view(call(self.k_proj, hidden_states), *hidden_shape)), 1, 2)
        value_states = transpose(view(call(self.v_proj, hidden_states), *hidden_shape), 1, 2)
        cos, sin = position_embeddings
        query_states, key_states = self.rotate(query_states, key_states, cos, sin)
        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states)
        attn_output, attn_weights = self.attend(query_states, key_states, value_states, attention_mask)
        attn_output = contiguous(reshape(attn_output, (*input_shape, numel(attn_output.shape[2:]))))
        attn_output = mul(attn_output, sigmoid(gate))
        attn_output = call(self.o_proj, attn_output)
        return attn_output, attn_weights


class DeltaLayer(Layer):
    """Qwen3_5DecoderLayer: a delta net or attention, then the MLP."""

    def __init__(self, input_layernorm: Module, mixer: Module, post_attention_layernorm: Module, mlp: Module) -> None:
        self.input_layernorm, self.mixer = input_layernorm, mixer
        self.post_attention_layernorm, self.mlp = post_attention_layernorm, mlp

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
    ) -> Tensor:
        residual = hidden_states
        hidden_states = call(self.input_layernorm, hidden_states)
        if self.mask_kind == "linear":
            hidden_states = call(self.mixer, hidden_states=hidden_states, cache=cache, attention_mask=attention_mask)
        else:
            hidden_states, _ = call(
                self.mixer,
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
        hidden_states = add(residual, hidden_states)
        return hidden_states  # noqa: RET504


class Qwen3NextDecoder(SlidingDecoder):
    """Qwen3NextModel."""

    kernel_packages = "flash-linear-attention and causal-conv1d"
    norm_spelling = "gemma"
    keyword_order = ("position_embeddings", "attention_mask", "position_ids", "cache")
    delta_class: ClassVar[type[DeltaNet]] = Qwen3NextDeltaNet

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        is_linear = self.modules.optional(f"{name}.linear_attn.A_log") is not None
        mixer: Module
        if is_linear:
            mixer = self.delta_class(self.modules, f"{name}.linear_attn")
        else:
            mixer = GatedAttention(self.modules, f"{name}.self_attn", index)
        layer = DeltaLayer(
            self.make_norm(f"{name}.input_layernorm"),
            mixer,
            self.make_norm(f"{name}.post_attention_layernorm"),
            self.make_mlp(f"{name}.mlp"),
        )
        if is_linear:
            layer.mask_kind = "linear"
        return layer

    def make_mlp(self, name: str) -> Module:
        """Experts as qwen2_moe's in a layer with a router."""
        if self.modules.optional(f"{name}.gate.weight") is None:
            return super().make_mlp(name)
        return Qwen2MoeSparseMoeBlock(
            TopKRouter(self.modules, f"{name}.gate"),
            make_experts(self.modules, f"{name}.experts"),
            super().make_mlp(f"{name}.shared_expert"),
            self.modules.linear(f"{name}.shared_expert_gate"),
        )

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        masks = {"full": run.causal_mask(inputs_embeds, None), "linear": None}
        run.ask_whether_padded()
        return masks


class Qwen35Decoder(Qwen3NextDecoder):
    """Qwen3_5TextModel, and Qwen3_5MoeTextModel: positions in three grids (time, height, width), one for text."""

    delta_class = DeltaNet

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        assert self.traits.rotary_dim
        tables = grid_tables(hidden_states, position_ids, self.traits.rotary_dim)
        return {"full": tables}


def grid_tables(x: Tensor, position_ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Qwen3_5TextRotaryEmbedding: angles in three grids, put together in place."""
    position_ids = expand(unsqueeze(position_ids, 0), (3, x.shape[0], position_ids.shape[-1]))
    positions = to(unsqueeze(position_ids, 3), "f32")
    freqs = Tensor((*position_ids.shape, width // 2), "f32")
    del positions
    cos = scale(like(freqs))
    sin = scale(like(freqs))
    sin = _joined_grids(sin)
    cos = _joined_grids(cos)
    return to(cos, x.dtype), to(sin, x.dtype)


def _joined_grids(freq: Tensor) -> Tensor:
    freqs_thw = select(freq, 0)
    return cat_last([freqs_thw, freqs_thw])
