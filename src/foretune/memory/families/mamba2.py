"""The Mamba 2 mixer, which is the same in granitemoehybrid, bamba, nemotron_h, mamba2 and zamba2 (transformers 5.24).

Follows models/granitemoehybrid/modeling_granitemoehybrid.py; local names are its own. What runs is Transformers' own
torch code, all chunks at once, as for someone who has not installed mamba-ssm and causal-conv1d.
"""

from typing import Any

from foretune.memory.blocks import ACTIVATIONS, Module, call
from foretune.memory.decoder import Cache, Modules
from foretune.memory.einsum import einsum
from foretune.memory.ops import (
    add,
    add_scalar,
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
from foretune.memory.pointwise import clamp, exp, masked_fill, softplus, subtract
from foretune.memory.scans import cat, causal_conv1d, cumsum, pad, repeat_interleave, split, squeeze
from foretune.memory.strided import permute, select
from foretune.memory.tape import Tensor

__all__ = ["GroupedGatedNorm", "Mamba2Mixer", "chunk_scan"]


def _into_chunks(input_tensor: Tensor, pad_size: int, chunk_size: int) -> Tensor:
    """reshape_into_chunks."""
    input_tensor = pad(input_tensor, 1, 0, pad_size)
    batch, length, *rest = input_tensor.shape
    return reshape(input_tensor, (batch, length // chunk_size, chunk_size, *rest))


def _lower_triangle(ones: Tensor) -> Tensor:
    return Tensor(ones.shape, "bool")


def segment_sum(input_tensor: Tensor) -> Tensor:
    """Sums over all segments of the last dimension: [..., n] to [..., n, n], masked twice."""
    chunk_size = input_tensor.shape[-1]
    input_tensor = expand(unsqueeze(input_tensor, len(input_tensor.shape)), (*input_tensor.shape, chunk_size))
    mask = _lower_triangle(Tensor((chunk_size, chunk_size), "bool"))
    input_tensor = masked_fill(input_tensor, like(mask))
    tensor_segsum = cumsum(input_tensor)
    mask = _lower_triangle(Tensor((chunk_size, chunk_size), "bool"))
    tensor_segsum = masked_fill(tensor_segsum, like(mask))
    return tensor_segsum  # noqa: RET504


def chunk_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor, dt_bias: Tensor
) -> Tensor:
    """mamba2_chunk_scan: within chunks as attention, between them by their last states, all fp32."""
    batch_size, sequence_length, num_heads, head_dim = hidden_states.shape
    num_groups = B.shape[2]
    dt = add(dt, to(dt_bias, dt.dtype))
    dt = softplus(dt)
    dt = clamp(dt, 2)
    hidden_states = to(hidden_states, "f32")
    B = repeat_interleave(to(B, "f32"), num_heads // num_groups, 2)
    C = repeat_interleave(to(C, "f32"), num_heads // num_groups, 2)
    pad_size = (chunk_size - sequence_length % chunk_size) % chunk_size
    D_residual = mul(unsqueeze(D, 1), pad(hidden_states, 1, 0, pad_size))
    hidden_states = mul(hidden_states, to(unsqueeze(dt, 3), "f32"))
    A = mul(to(A, hidden_states.dtype), to(dt, "f32"))
    hidden_states, A, B, C = [_into_chunks(tensor, pad_size, chunk_size) for tensor in (hidden_states, A, B, C)]
    A = permute(A, 0, 3, 1, 2)
    A_cumsum = cumsum(A)
    L = exp(segment_sum(A))
    G = einsum("bclhn,bcshn->bclsh", C, B)
    M = mul(G, permute(L, 0, 2, 3, 4, 1))
    Y_diag = einsum("bclsh,bcshp->bclhp", M, hidden_states)
    decay_states = exp(subtract(narrow(A_cumsum, 3, 1), A_cumsum))
    B_decay = mul(B, unsqueeze(permute(decay_states, 0, -2, -1, 1), 4))
    states = einsum("bclhn,bclhp->bchpn", B_decay, hidden_states)
    previous_states = like(narrow(states, 1, 1).detach())
    states = cat([previous_states, states], 1)
    decay_chunk = transpose(exp(segment_sum(pad(select(A_cumsum, 3), 2, 1, 0))), 1, 3)
    new_states = einsum("bzch,bzhpn->bchpn", decay_chunk, states)
    states, _final_state = narrow(new_states, 1, new_states.shape[1] - 1), select(new_states, 1)
    state_decay_out = exp(A_cumsum)
    C_times_states = einsum("bclhn,bchpn->bclhp", C, states)
    Y_off = mul(C_times_states, unsqueeze(permute(state_decay_out, 0, 2, 3, 1), 4))
    output = contiguous(add(Y_diag, Y_off))
    output = reshape(output, (batch_size, sequence_length + pad_size, num_heads, head_dim))
    output = add(output, D_residual)
    if pad_size > 0:
        output = narrow(output, 1, sequence_length)
    return output


class GroupedGatedNorm:
    """MambaRMSNormGated: the gate in fp32, then a norm over each group of channels."""

    def __init__(self, weight: Tensor, num_groups: int) -> None:
        self.weight, self.group_size = weight, weight.shape[0] // num_groups

    def __call__(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = to(hidden_states, "f32")
        hidden_states = mul(hidden_states, silu(to(gate, "f32")))
        *prefix_dims, last_dim = hidden_states.shape
        group_count = last_dim // self.group_size
        hidden_states_group = view(hidden_states, *prefix_dims, group_count, self.group_size)
        variance = mean_last(square(hidden_states_group))
        hidden_states_group = mul(hidden_states_group, rsqrt(add_scalar(variance)))
        hidden_states = view(hidden_states_group, *prefix_dims, last_dim)
        return mul(self.weight, to(hidden_states, input_dtype))


class Mamba2Mixer:
    """Mamba2Mixer: one projection, a convolution over hidden states, B and C, the scan, a gated norm, a projection."""

    def __init__(self, modules: Modules, name: str, activation: str = "silu") -> None:
        groups, chunk, width = modules.traits.mixer_groups, modules.traits.mixer_chunk, modules.traits.mixer_width
        assert groups is not None
        assert width is not None
        assert chunk is not None
        self.n_groups, self.chunk_size = groups, chunk
        self.dt_bias, self.A_log, self.D, self.conv1d = (
            modules.weight(f"{name}.{n}") for n in ("dt_bias", "A_log", "D", "conv1d.weight")
        )
        self.conv_bias = modules.optional(f"{name}.conv1d.bias")
        self.in_proj, self.out_proj = modules.linear(f"{name}.in_proj"), modules.linear(f"{name}.out_proj")
        self.activation = ACTIVATIONS[activation]
        self.num_heads, self.conv_dim = self.A_log.shape[0], self.conv1d.shape[0]
        self.intermediate_size = width
        self.groups_width = (self.conv_dim - self.intermediate_size) // 2
        self.norm = self.make_norm(modules, f"{name}.norm.weight")

    def make_norm(self, modules: Modules, name: str) -> Module | None:
        return GroupedGatedNorm(modules.weight(name), self.n_groups)

    def scale_input(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def scale_projection(self, projected_states: Tensor) -> Tensor:
        return projected_states

    def finish(self, scan_output: Tensor, gate: Tensor) -> Any:
        """The gate and the norm."""
        assert self.norm is not None
        return call(self.norm, scan_output, gate)

    def __call__(self, hidden_states: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None) -> Any:
        batch_size, seq_len, _ = hidden_states.shape
        dtype = hidden_states.dtype
        hidden_states = self.scale_input(hidden_states)
        projected_states = call(self.in_proj, hidden_states)
        projected_states = self.scale_projection(projected_states)
        A = scale(exp(to(self.A_log, "f32")))
        widths = [self.intermediate_size, self.conv_dim, self.num_heads]
        gate, hidden_states_B_C, dt = split(projected_states, widths, -1)
        hidden_states_B_C = transpose(hidden_states_B_C, 1, 2)
        hidden_states_B_C = call(
            causal_conv1d, hidden_states_B_C, squeeze(self.conv1d, 1), self.conv_bias, activation=self.activation
        )
        hidden_states_B_C = transpose(hidden_states_B_C, 1, 2)
        widths = [self.intermediate_size, self.groups_width, self.groups_width]
        hidden_states, B, C = split(hidden_states_B_C, widths, -1)
        scan_output: Any = None  # its first place is in the step for one token, and locals die in that order
        scan_result = call(
            chunk_scan,
            view(hidden_states, batch_size, seq_len, self.num_heads, self.intermediate_size // self.num_heads),
            dt,
            A,
            view(B, batch_size, seq_len, self.n_groups, self.groups_width // self.n_groups),
            view(C, batch_size, seq_len, self.n_groups, self.groups_width // self.n_groups),
            chunk_size=self.chunk_size,
            D=self.D,
            dt_bias=self.dt_bias,
        )
        scan_output = scan_result
        scan_output = reshape(scan_output, (batch_size, seq_len, self.intermediate_size))
        scan_output = self.finish(scan_output, gate)
        contextualized_states = call(self.out_proj, to(scan_output, dtype))
        return contextualized_states  # noqa: RET504
