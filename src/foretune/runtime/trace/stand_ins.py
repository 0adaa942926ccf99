"""Paths that CUDA takes and the meta device does not: attention kernels, dropout, softmax, foreach, 4-bit layers.

`cuda_paths` patches the few Python entry points concerned and puts them back, after an exception too.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import torch.optim.optimizer as optim
import torch.utils._foreach_utils as foreach_utils
from torch import Tensor

from foretune.memory.kernels import AttentionKernels, flash_width

__all__ = ["cuda_paths", "math_attention"]

aten = torch.ops.aten
_softmax = F.softmax


@contextmanager
def cuda_paths(kernels: AttentionKernels, kernels_run: set[str]) -> Iterator[None]:
    """Run what is inside as CUDA would; the attention kernels that are chosen are put into `kernels_run`."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        return _attention(kernels, kernels_run, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    with ExitStack() as patches:
        patches.enter_context(patch.object(F, "scaled_dot_product_attention", attention))
        patches.enter_context(patch.object(F, "dropout", _dropout))
        patches.enter_context(patch.object(F, "softmax", _cuda_softmax))
        for module in (foreach_utils, optim):
            for name in ("_get_foreach_kernels_supported_devices", "_get_fused_kernels_supported_devices"):
                patches.enter_context(patch.object(module, name, _with_meta(getattr(module, name))))
        yield


def _with_meta(supported_devices: Any) -> Any:
    """CUDA's optimizers and clipping use foreach and fused kernels; torch does not offer them on meta."""
    devices = [*supported_devices(), "meta"]
    return lambda: devices


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if p == 0.0 or not training:
        return input
    return torch.native_dropout(input, p, True)[0]


def _cuda_softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
    """fp16 to fp32 is one kernel without an fp32 copy of the input; bf16 is copied.

    Source: aten/src/ATen/native/cuda/SoftMax.cu. Learnt on: T4 runs with eager attention (fp16), H200 runs (bf16).
    """
    if dtype is torch.float32 and input.dtype is torch.float16 and dim is not None:
        return aten._softmax(input, dim, True)
    if dtype is None and input.dtype in (torch.bfloat16, torch.float16) and torch.is_autocast_enabled("cuda"):
        input = input.float()  # autocast's list has it; a patched function is not seen by the stand-in
    return _softmax(input, dim, _stacklevel, dtype)


def _attention(
    kernels: AttentionKernels,
    kernels_run: set[str],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """scaled_dot_product_attention of torch on CUDA (aten/src/ATen/native/transformers/attention.cpp).

    Autocast lowers its inputs; so does Transformers' wrapper of the flash-attn package
    (modeling_flash_attention_utils.py).
    """
    if torch.is_autocast_enabled("cuda") or (kernels.is_package and query.dtype == torch.float32):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if kernels.is_package:
        mask = None
    if kernels.repeats_heads and query.shape[1] != key.shape[1]:
        n = query.shape[1] // key.shape[1]
        key, value, enable_gqa = key.repeat_interleave(n, dim=-3), value.repeat_interleave(n, dim=-3), False
    width = query.shape[-1]
    kernel = kernels.choose(
        is_half=query.dtype != torch.float32,
        head_width=width,
        is_grouped=query.shape[1] != key.shape[1],
        has_mask=mask is not None,
        has_narrow_values=value.shape[-1] != width,
    )
    kernels_run.add(kernel)
    if kernel == "flash":
        padding = flash_width(width) - width
        if padding:
            query, key, value = (F.pad(t, (0, padding)) for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, False, scale=scale)[0]
        return out[..., :width] if padding else out
    if mask is not None and mask.dtype is torch.bool:
        mask = (_additive if kernels.has_safe_softmax else _additive_2_6)(mask, query.dtype)
    if kernel == "cudnn":
        return _cudnn(query, key, value, mask, dropout, is_causal, scale)
    if kernel == "efficient":
        return _efficient(query, key, value, mask, dropout, is_causal, scale)
    run = math_attention if kernels.has_safe_softmax else _math_2_6
    with torch._C.DisableTorchFunction():  # inside torch's function autocast casts nothing again
        return run(query, key, value, mask, dropout, is_causal, scale, enable_gqa)


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """convert_boolean_attn_mask (aten/.../transformers/attention.cpp): where(mask, 0, -inf), both on the device."""
    zero, least = (torch.empty((), dtype=dtype, device=allowed.device) for _ in range(2))
    mask = torch.empty_like(allowed, dtype=dtype)
    del least, zero
    return mask


def _additive_2_6(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """The same in torch 2.6: zeros, then the negated mask fills them."""
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(allowed.logical_not(), float("-inf"))


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, is_causal: bool, scale: float | None
) -> Tensor:
    """Where nothing is saved, the sums of softmax die first, then the seeds in order."""
    results = list(
        aten._scaled_dot_product_cudnn_attention(query, key, value, mask, True, dropout, is_causal, False, scale=scale)
    )
    del results[1]
    del results[5]  # the first seed, which was the sixth
    return results[0]


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, is_causal: bool, scale: float | None
) -> Tensor:
    needs_logsumexp = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if mask is not None:
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, needs_logsumexp, dropout, is_causal, scale=scale
    )[0]


def math_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    additive: Callable[[Tensor, torch.dtype], Tensor] = _additive,
) -> Tensor:
    """Math attention as it runs on a real device: under a dispatch mode it would add the mask out of place.

    `additive` makes a mask of truth values one that is added.
    Source: aten/src/ATen/native/transformers/attention.cpp. Learnt on: torch's CPU profiler (2.13); H200 runs (2.11).
    """
    dtype = q.dtype
    if dtype in (torch.bfloat16, torch.float16):
        q, k, v = q.float(), k.float(), v.float()
    factor = math.sqrt(scale if scale is not None else q.shape[-1] ** -0.5)
    q = q * factor
    if is_causal:
        mask = additive(torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(), q.dtype)
    if enable_gqa and q.shape[1] != k.shape[1]:
        n, heads = q.shape[1] // k.shape[1], q.shape[1]
        k, v = k.repeat_interleave(n, 1, output_size=heads), v.repeat_interleave(n, 1, output_size=heads)
    attn = torch.matmul(q, k.transpose(-2, -1) * factor)
    if mask is not None:
        attn.add_(mask)
    attn = aten._safe_softmax(attn, -1)
    if dropout:
        attn = F.dropout(attn, dropout)
    out = torch.matmul(attn, v)
    del k, v, q, mask
    return out.to(dtype)


def _math_2_6(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The same in torch 2.6: the mask comes first, and softmax looks for no empty rows.

    Source: aten/src/ATen/native/transformers/attention.cpp. Learnt on: RTX 4080 runs.
    """
    dtype = q.dtype
    if dtype in (torch.bfloat16, torch.float16):
        q, k, v = q.float(), k.float(), v.float()
    if is_causal:
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        mask = torch.zeros_like(allowed, dtype=q.dtype)
        mask.masked_fill_(allowed.logical_not(), float("-inf"))
    if enable_gqa and q.shape[1] != k.shape[1]:
        n = q.shape[1] // k.shape[1]
        heads = q.shape[1]
        k, v = k.repeat_interleave(n, 1, output_size=heads), v.repeat_interleave(n, 1, output_size=heads)
    factor = math.sqrt(scale if scale is not None else q.shape[-1] ** -0.5)
    q = q * factor
    attn = torch.matmul(q, k.transpose(-2, -1) * factor)
    if mask is not None:
        attn.add_(mask)
    attn = torch.softmax(attn, -1)
    if dropout:
        attn = F.dropout(attn, dropout)
    return torch.matmul(attn, v).to(dtype)
