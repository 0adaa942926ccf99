"""What CUDA allocates and the meta device does not, by operator. The sizes are memory/kernels.py's."""

from collections.abc import Callable
from typing import Any

import torch
from torch._meta_registrations import _create_grouped_mm_output_tensor

from foretune.memory import kernels

__all__ = [
    "BLAS",
    "IN_PLACE_IN_BACKWARD",
    "IN_PLACE_SUMS",
    "ON_META",
    "WORKSPACES_AFTER",
    "WORKSPACES_BEFORE",
    "is_bias_product",
]

aten = torch.ops.aten

BLAS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})
"""Products that need cuBLAS."""


def is_bias_product(func: Any, args: tuple[Any, ...]) -> bool:
    """Say whether a product goes through cublasLt: a linear with a bias (aten/src/ATen/native/cuda/Blas.cpp)."""
    return func is aten.addmm.default and args[0].dim() == 1


def _flash_backward(args: tuple[Any, ...]) -> list[int]:
    q, k = args[1], args[2]
    b, h, s, d = q.shape
    return kernels.flash_backward_workspaces(b, h, k.shape[1], s, d, q.element_size())


def _efficient_backward(args: tuple[Any, ...]) -> list[int]:
    b, h, s, d = args[1].shape
    return kernels.efficient_backward_workspaces(b, h, s, d, is_half=args[1].dtype != torch.float32)


def _embedding_backward(args: tuple[Any, ...]) -> list[int]:
    return kernels.embedding_backward_workspaces(args[1].numel())


def _softmax_backward(args: tuple[Any, ...]) -> list[int]:
    """grad * output comes first (aten/src/ATen/native/cuda/SoftMax.cu). Learnt on T4 eager runs."""
    return [args[1].numel() * args[1].element_size()]


def _norm_of_many(args: tuple[Any, ...]) -> list[int]:
    sizes = [tensor.numel() for tensor in args[0]]
    return [kernels.foreach_norm_workspace(len(sizes), max(sizes))] if sizes else []


WORKSPACES_AFTER: dict[Any, Callable[[tuple[Any, ...]], list[int]]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._softmax_backward_data.default: _softmax_backward,
}
"""Temporaries that a kernel allocates after its results."""

WORKSPACES_BEFORE: dict[Any, Callable[[tuple[Any, ...]], list[int]]] = {
    aten._foreach_norm.Scalar: _norm_of_many,
}
"""Temporaries that a kernel allocates before its results and frees after them."""


def _add_in_place(a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
    a.add_(b)
    return a


IN_PLACE_SUMS: dict[Any, Callable[..., torch.Tensor]] = {aten.add.Tensor: _add_in_place}
"""Sums of gradients that the engine makes in place on a real device."""


def _first(a: torch.Tensor, *_: Any) -> torch.Tensor:
    return a


IN_PLACE_IN_BACKWARD: dict[Any, Callable[..., torch.Tensor]] = {
    aten.index_put.default: _first,
    aten._index_put_impl.default: _first,
    aten.scatter.src: _first,
    aten.scatter_add.default: _first,
}
"""index_backward fills its zeros in place; out of place only under a mode (torch/csrc/autograd/FunctionsManual.cpp)."""


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offsets: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    return _create_grouped_mm_output_tensor(a, b, offsets, out_dtype)


ON_META: dict[Any, Callable[..., Any]] = {aten._grouped_mm.default: _grouped_mm}
"""Operators whose meta kernel refuses what devices run: experts in fp16 and fp32 (ATen/native/GroupedMMUtils.h)."""
