"""The modules that decoders are built from, written as transformers 5.24 writes them.

Local names are kept where their lifetime matters: a name rebound, an argument held by `call`, a tuple of keywords.
"""

from collections.abc import Callable
from typing import Any, Literal

from foretune.memory import ops
from foretune.memory.activations import relu_squared
from foretune.memory.kernels import FLASH_MAX_WIDTH, AttentionKernels, flash_width
from foretune.memory.layout import numel
from foretune.memory.ops import (
    add,
    add_scalar,
    cat_last,
    contiguous,
    dropout,
    gelu,
    like,
    linear,
    matmul4,
    mean_last,
    mul,
    narrow,
    product,
    relu,
    repeat_heads,
    rsqrt,
    scale,
    silu,
    softmax,
    square,
    tanh,
    to,
    transpose,
    transposed,
    unsqueeze,
    view,
)
from foretune.memory.tape import Tensor, current

__all__ = [
    "ACTIVATIONS",
    "Conv1d",
    "GatedMlp",
    "LayerNorm",
    "Linear",
    "Module",
    "PlainMlp",
    "RmsNorm",
    "apply_rotary",
    "apply_rotary_neox",
    "apply_rotary_olmo2",
    "apply_rotary_phi3",
    "call",
    "eager_attention",
    "rotary_tables",
    "rotated",
    "sdpa_attention",
    "softmax_f32",
]

Module = Callable[..., Any]


def call(module: Module, *args: Any, **kwargs: Any) -> Any:
    """nn.Module.__call__: holds its arguments until the module returns."""
    return module(*args, **kwargs)


# ------------------------------------------------------------------ linear layers
class Linear:
    """nn.Linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Conv1d:
    """transformers' Conv1D (pytorch_utils.py): a linear layer whose weight is (in, out)."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[:-1]
        x = ops.addmm(self.bias, view(x, -1, x.shape[-1]), self.weight)
        x = view(x, *rows, self.weight.shape[1])
        return x  # noqa: RET504


class MatmulLinear:
    """Falcon's linear layer: `input @ weight.T`, then the bias is added (models/falcon/modeling_falcon.py)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, input: Tensor) -> Tensor:
        hidden_states = ops.fold_mm(input, transposed(self.weight), input.shape[:-1])
        if self.bias is None:
            return hidden_states
        return add(hidden_states, self.bias)


# ------------------------------------------------------------------ norms
class RmsNorm:
    """RMSNorm in its three spellings, all computed in fp32.

    `llama` scales the result after the cast, `olmo2` before it; `gemma` scales by 1 + weight in fp32
    (modeling_llama.py, modeling_olmo2.py, modeling_gemma.py).
    """

    def __init__(self, weight: Tensor, spelling: Literal["llama", "olmo2", "gemma"] = "llama") -> None:
        self.weight = weight
        self.forward: Callable[[RmsNorm, Tensor], Tensor] = {
            "llama": RmsNorm._llama,
            "olmo2": RmsNorm._olmo2,
            "gemma": RmsNorm._gemma,
        }[spelling]

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return self.forward(self, hidden_states)

    def _llama(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = to(hidden_states, "f32")
        variance = mean_last(square(hidden_states))
        hidden_states = mul(hidden_states, rsqrt(add_scalar(variance)))
        return mul(self.weight, to(hidden_states, input_dtype))

    def _olmo2(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = to(hidden_states, "f32")
        variance = mean_last(square(hidden_states))
        hidden_states = mul(hidden_states, rsqrt(add_scalar(variance)))
        return to(mul(self.weight, hidden_states), input_dtype)

    def _gemma(self, x: Tensor) -> Tensor:
        output = call(self.normalize, to(x, "f32"))
        output = mul(output, add_scalar(to(self.weight, "f32")))
        return to(output, x.dtype)

    @staticmethod
    def normalize(x: Tensor) -> Tensor:
        return mul(x, rsqrt(add_scalar(mean_last(square(x)))))


class LayerNorm:
    """nn.LayerNorm."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias)


# ------------------------------------------------------------------ rotary embedding
def rotary_tables(dtype: str, position_ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the positions, [1, S, width], computed in fp32."""
    if current().rules.rotary_by_product:
        positions = to(unsqueeze(position_ids, 1), "f32")
        freqs = transpose(product((positions.shape[0], width // 2, positions.shape[2]), "f32"), 1, 2)
    else:
        positions = None
        freqs = _frequencies(to(unsqueeze(position_ids, 2), "f32"), width // 2)
    emb = cat_last([freqs, freqs])
    cos = scale(like(emb))
    sin = scale(like(emb))
    return to(cos, dtype), to(sin, dtype)


def _frequencies(positions: Tensor, width: int) -> Tensor:
    return Tensor((*positions.shape[:-1], width), "f32")


def rotate_half(x: Tensor) -> Tensor:
    width = x.shape[-1]
    x1 = narrow(x, -1, width // 2)
    x2 = narrow(x, -1, width - width // 2)
    return cat_last([scale(x2), x1])


def rotated(x: Tensor, cos: Tensor, sin: Tensor, rotate: Callable[[Tensor], Tensor] = rotate_half) -> Tensor:
    """x * cos + rotate_half(x) * sin."""
    return add(mul(x, cos), mul(rotate(x), sin))


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate whole heads (modeling_llama.py)."""
    cos = unsqueeze(cos, 1)
    sin = unsqueeze(sin, 1)
    q_embed = add(mul(q, cos), mul(rotate_half(q), sin))
    k_embed = add(mul(k, cos), mul(rotate_half(k), sin))
    return q_embed, k_embed


def apply_rotary_olmo2(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate whole heads by fp32 tables and cast back (modeling_olmo2.py)."""
    q_type, k_type = q.dtype, k.dtype
    cos = unsqueeze(cos, 1)
    sin = unsqueeze(sin, 1)
    q_embed = add(mul(q, cos), mul(rotate_half(q), sin))
    k_embed = add(mul(k, cos), mul(rotate_half(k), sin))
    return to(q_embed, q_type), to(k_embed, k_type)


def apply_rotary_phi3(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first part of each head and append the rest, also where there is none (modeling_phi3.py)."""
    cos = unsqueeze(cos, 1)
    sin = unsqueeze(sin, 1)
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = narrow(q, -1, rotary_dim), narrow(q, -1, q.shape[-1] - rotary_dim)
    k_rot, k_pass = narrow(k, -1, rotary_dim), narrow(k, -1, k.shape[-1] - rotary_dim)
    q_embed = cat_last([add(mul(q_rot, cos), mul(rotate_half(q_rot), sin)), q_pass])
    k_embed = cat_last([add(mul(k_rot, cos), mul(rotate_half(k_rot), sin)), k_pass])
    return q_embed, k_embed


def apply_rotary_neox(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As phi3's, but both rotations come before both concatenations (modeling_gpt_neox.py)."""
    cos = unsqueeze(cos, 1)
    sin = unsqueeze(sin, 1)
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = narrow(q, -1, rotary_dim), narrow(q, -1, q.shape[-1] - rotary_dim)
    k_rot, k_pass = narrow(k, -1, rotary_dim), narrow(k, -1, k.shape[-1] - rotary_dim)
    q_embed = add(mul(q_rot, cos), mul(rotate_half(q_rot), sin))
    k_embed = add(mul(k_rot, cos), mul(rotate_half(k_rot), sin))
    q_embed = cat_last([q_embed, q_pass])
    k_embed = cat_last([k_embed, k_pass])
    return q_embed, k_embed


# ------------------------------------------------------------------ attention
def eager_attention(
    groups: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    probability: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """eager_attention_forward of the Llama and Gemma 2 families."""
    key_states = repeat_heads(key, groups)
    value_states = repeat_heads(value, groups)
    attn_weights = scale(matmul4(query, transpose(key_states, 2, 3)))
    if softcap is not None:
        attn_weights = scale(attn_weights)
        attn_weights = tanh(attn_weights)
        attn_weights = scale(attn_weights)
    if mask is not None:
        attn_weights = add(attn_weights, mask)
    attn_weights = to(softmax_f32(attn_weights), query.dtype)
    attn_weights = dropout(attn_weights, probability)
    attn_output = matmul4(attn_weights, value_states)
    attn_output = contiguous(transpose(attn_output, 1, 2))
    return attn_output, attn_weights


def softmax_f32(x: Tensor) -> Tensor:
    """softmax(x, dtype=float32): bf16 is copied first; CUDA takes fp16 in one kernel."""
    if current().rules.half_softmax_is_one_kernel and x.dtype == "f16":
        return softmax(x, "f32", is_one_kernel=True)
    return softmax(to(x, "f32"))


def _math_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_grouped: bool, probability: float
) -> Tensor:
    """_scaled_dot_product_attention_math; the names and their order decide what dies when."""
    dt = q.dtype
    if dt != "f32":
        q, k, v = to(q, "f32"), to(k, "f32"), to(v, "f32")
    q = scale(q)
    if mask is None:
        mask = _additive_mask(_lower_triangle(Tensor((q.shape[-2], k.shape[-2]), "bool")), q.dtype)
    if is_grouped:
        n = q.shape[1] // k.shape[1]
        k, v = ops.repeat_interleave(k, n), ops.repeat_interleave(v, n)
    attn = matmul4(q, scale(transpose(k, 2, 3)))
    attn = _safe_softmax(attn)
    attn = dropout(attn, probability)
    out = matmul4(attn, v)
    del k, v, q, mask
    return to(out, dt)


def _safe_softmax(x: Tensor) -> Tensor:
    """softmax; then which scores are -inf (a byte each), in which rows all are, and a zero for those."""
    out = softmax(x)
    current().temporaries(numel(x.shape), numel(x.shape[:-1]), 4)
    return out


def _math_attention_2_6(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_grouped: bool, probability: float
) -> Tensor:
    """The same in torch 2.6."""
    dt = q.dtype
    if dt != "f32":
        q, k, v = to(q, "f32"), to(k, "f32"), to(v, "f32")
    rows, cols = q.shape[-2], k.shape[-2]
    if mask is None:
        _m = _lower_triangle(Tensor((rows, cols), "bool"))
        mask = Tensor((rows, cols), q.dtype)
        Tensor((rows, cols), "bool")
    if is_grouped:
        n = q.shape[1] // k.shape[1]
        k, v = ops.repeat_interleave(k, n), ops.repeat_interleave(v, n)
    q = scale(q)
    attn = matmul4(q, scale(transpose(k, 2, 3)))
    attn = softmax(attn)
    attn = dropout(attn, probability)
    return to(matmul4(attn, v), dt)


def _lower_triangle(x: Tensor) -> Tensor:
    return Tensor(x.shape, "bool")


def sdpa_attention(
    kernels: AttentionKernels,
    groups: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    probability: float = 0.0,
) -> tuple[Tensor, None]:
    """sdpa_attention_forward (integrations/sdpa_attention.py): keys and values are repeated first with a mask, and for
    heads that are too wide for the flash kernel."""
    is_repeated = mask is not None or key.shape[-1] > FLASH_MAX_WIDTH
    if is_repeated:
        key = repeat_heads(key, groups)
        value = repeat_heads(value, groups)
    is_grouped = groups > 1 and not is_repeated
    attn_output = scaled_dot_product_attention(
        kernels, query, key, value, mask, is_grouped=is_grouped, probability=probability
    )
    attn_output = contiguous(transpose(attn_output, 1, 2))
    return attn_output, None


def scaled_dot_product_attention(
    kernels: AttentionKernels,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_grouped: bool = False,
    probability: float = 0.0,
) -> Tensor:
    """torch's function of that name; `is_grouped` is its enable_gqa, `probability` its dropout_p, which only the math
    kernel spends memory on.

    Autocast lowers its operands; so does Transformers' wrapper of the flash-attn package
    (modeling_flash_attention_utils.py).
    """
    tape = current()
    autocast = tape.autocast
    if autocast is not None or (kernels.is_package and query.dtype == "f32"):
        dtype = autocast.dtype if autocast is not None else "f16"
        query, key, value = to(query, dtype), to(key, dtype), to(value, dtype)
    if kernels.is_package:
        mask = None
    if kernels.repeats_heads and query.shape[1] != key.shape[1]:
        n, is_grouped = query.shape[1] // key.shape[1], False
        key, value = ops.repeat_interleave(key, n), ops.repeat_interleave(value, n)
    kernel = kernels.choose(
        is_half=query.dtype != "f32",
        head_width=query.shape[-1],
        is_grouped=query.shape[1] != key.shape[1],
        has_mask=mask is not None,
        has_narrow_values=value.shape[-1] != query.shape[-1],
    )
    tape.kernels_run.add(kernel)
    if kernel == "flash":
        return _flash(query, key, value)
    if mask is not None and mask.dtype == "bool":
        mask = (_additive_mask if kernels.has_safe_softmax else _additive_mask_2_6)(mask, query.dtype)
    if kernel == "cudnn":
        return ops.cudnn_attention(query, key, value, mask)
    if kernel == "efficient":
        return ops.efficient_attention(query, key, value, mask)
    math = _math_attention if kernels.has_safe_softmax else _math_attention_2_6
    tape.autocast = None  # inside torch's function nothing is cast again
    try:
        return math(query, key, value, mask, is_grouped, probability)
    finally:
        tape.autocast = autocast


def _flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Head widths are padded to a multiple of 8 (pad_last_dim in aten/.../transformers/attention.cpp)."""
    width = query.shape[-1]
    padded = flash_width(width)
    if padded == width:
        return ops.flash_attention(query, key, value)
    q, k, v = (ops.pad_last(t, padded) for t in (query, key, value))
    return narrow(ops.flash_attention(q, k, v), -1, width)


def _additive_mask(mask: Tensor, dtype: str) -> Tensor:
    """convert_boolean_attn_mask (aten/.../transformers/attention.cpp): where(mask, 0, -inf), both on the device."""
    zero, least = Tensor((), dtype), Tensor((), dtype)
    out = Tensor(mask.shape, dtype)
    del least, zero
    return out


def _additive_mask_2_6(mask: Tensor, dtype: str) -> Tensor:
    """The same in torch 2.6: zeros, then the negated mask fills them."""
    out = Tensor(mask.shape, dtype)
    current().temporaries(numel(mask.shape))
    return out


# ------------------------------------------------------------------ MLP
def _gelu_new(input: Tensor) -> Tensor:
    """NewGELUActivation in separate kernels (transformers/activations.py)."""
    return mul(scale(input), add_scalar(tanh(scale(add(input, scale(_cube(input)))))))


def _cube(t: Tensor) -> Tensor:
    """pow(3): as pow(2)."""
    return square(t)


ACTIVATIONS: dict[str, Module] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu,
    "gelu_new": _gelu_new,
    "relu": relu,
    "relu2": relu_squared,
}
"""Activations whose kernels are known, by the names of transformers/activations.py."""


class GatedMlp:
    """down(act(gate(x)) * up(x)) (modeling_llama.py)."""

    def __init__(self, gate_proj: Module, up_proj: Module, down_proj: Module, act: Module) -> None:
        self.gate_proj, self.up_proj, self.down_proj, self.act = gate_proj, up_proj, down_proj, act

    def __call__(self, x: Tensor) -> Any:
        return call(self.down_proj, mul(call(self.act, call(self.gate_proj, x)), call(self.up_proj, x)))


class PlainMlp:
    """down(act(up(x)))."""

    def __init__(self, up: Module, down: Module, act: Module, probability: float = 0.0) -> None:
        self.up, self.down, self.act, self.probability = up, down, act, probability

    def __call__(self, hidden_states: Tensor) -> Any:
        hidden_states = call(self.up, hidden_states)
        hidden_states = call(self.act, hidden_states)
        hidden_states = call(self.down, hidden_states)
        hidden_states = dropout(hidden_states, self.probability)
        return hidden_states  # noqa: RET504
