"""What CUDA allocates and the meta device does not, by operator. The sizes are memory/kernels.py's."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._meta_registrations import _create_grouped_mm_output_tensor

from foretune.memory import kernels
from foretune.memory.stack import StackProfile

__all__ = [
    "BIRTHS",
    "BLAS",
    "IN_PLACE_IN_BACKWARD",
    "IN_PLACE_SUMS",
    "ON_META",
    "WORKSPACES_AFTER",
    "WORKSPACES_BEFORE",
    "Arguments",
    "Rule",
    "is_bias_product",
    "whole_numbers",
]

aten = torch.ops.aten

BLAS = frozenset({aten.mm.default, aten.mm.out, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})
"""Products that need cuBLAS."""


def is_bias_product(func: Any, args: tuple[Any, ...]) -> bool:
    """Say whether a product goes through cublasLt: a linear with a bias (aten/src/ATen/native/cuda/Blas.cpp)."""
    return func is aten.addmm.default and args[0].dim() == 1


Arguments = tuple[Any, ...]
Rule = Callable[[Arguments, StackProfile], list[int]]
"""From an operator's arguments to the bytes of its workspaces."""


def _flash_backward(args: Arguments, _: StackProfile) -> list[int]:
    q, k = args[1], args[2]
    b, h, s, d = q.shape
    return kernels.flash_backward_workspaces(b, h, k.shape[1], s, d, q.element_size())


def _cudnn_forward(_args: Arguments, _: StackProfile) -> list[int]:
    """A small block beside the results, whose seeds are made first.

    Source: aten/src/ATen/native/cudnn/MHA.cpp. Learnt on: H200 runs.
    """
    return [kernels.CUDNN_FORWARD_WORKSPACE]


def _cudnn_backward(args: Arguments, _: StackProfile) -> list[int]:
    q, k = args[1], args[2]
    b, h, s, d = q.shape
    return [kernels.cudnn_backward_workspace(b, h, k.shape[1], s, d, q.element_size())]


def _efficient_backward(args: Arguments, _: StackProfile) -> list[int]:
    b, h, s, d = args[1].shape
    return kernels.efficient_backward_workspaces(b, h, s, d, is_half=args[1].dtype != torch.float32)


def _embedding_backward(args: Arguments, _: StackProfile) -> list[int]:
    return kernels.embedding_backward_workspaces(args[1].numel())


def _softmax_backward(args: Arguments, _: StackProfile) -> list[int]:
    """Softmax backward first multiplies gradient and output.

    Source: aten/src/ATen/native/cuda/SoftMax.cu. Learnt on: T4 and H200 runs with eager attention.
    """
    return [args[1].numel() * args[1].element_size()]


def _norm_of_many(args: Arguments, _: StackProfile) -> list[int]:
    sizes = [tensor.numel() for tensor in args[0]]
    return [kernels.foreach_norm_workspace(len(sizes), max(sizes))] if sizes else []


def whole_numbers(args: Arguments, _: StackProfile) -> list[int]:
    """Whole numbers and truth values are summed as int64, from a copy.

    Source: aten/src/ATen/native/ReduceOps.cpp. Learnt on: torch's CPU profiler; H200 runs.
    """
    x = args[0]
    return [] if x.dtype.is_floating_point or x.dtype is torch.int64 else [x.numel() * 8]


def _sum(args: Arguments, stack: StackProfile) -> list[int]:
    """A long sum is divided among blocks (reduction_workspaces).

    Source: aten/src/ATen/native/cuda/Reduce.cuh. Learnt on: H200 runs.
    """
    x = args[0]
    dims = args[1] if len(args) > 1 and args[1] else range(x.dim())
    reduced = {dim % x.dim() for dim in dims} if x.dim() else set()
    inputs = math.prod(x.shape[dim] for dim in reduced)
    is_inner = x.dim() - 1 in reduced
    outputs = x.numel() // max(inputs, 1)
    if not outputs:
        return []
    partial = kernels.reduction_workspaces(outputs, inputs, is_inner=is_inner, device=stack.multiprocessors)
    return [*whole_numbers(args, stack), *partial]


def _vector_norm(args: Arguments, stack: StackProfile) -> list[int]:
    """A long norm is divided among blocks, as a sum is (reduction_workspaces).

    Source: aten/src/ATen/native/cuda/ReduceNormKernel.cu. Learnt on: its text.
    """
    x, dim = args[0], (args[2] if len(args) > 2 else None) or []
    if len(dim) != 1:
        return []
    inputs = x.shape[dim[0]]
    is_inner = x.stride(dim[0]) == 1
    return kernels.reduction_workspaces(x.numel() // inputs, inputs, is_inner=is_inner, device=stack.multiprocessors)


def _index(args: Arguments, _: StackProfile) -> list[int]:
    """Several index tensors are made contiguous unless their strides agree.

    Source: aten/src/ATen/native/TensorAdvancedIndexing.cpp. Learnt on: H200 runs (a padded batch's mask).
    """
    indices = [index for index in args[1] if index is not None and index.dtype is not torch.bool]
    if len(indices) < 2:
        return []
    expanded = torch.broadcast_tensors(*indices)
    if all(index.stride() == expanded[0].stride() for index in expanded):
        return []
    return [index.numel() * index.element_size() for index in expanded if not index.is_contiguous()]


def _where(args: Arguments, _: StackProfile) -> list[int]:
    """Numbers are moved to the device.

    Source: aten/src/ATen/native/TensorCompare.cpp. Learnt on: H200 runs.
    """
    numbers = [x for x in args[1:3] if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
    return [x.element_size() for x in numbers]


def _layer_norm(args: Arguments, _: StackProfile) -> list[int]:
    """An input that is not contiguous is copied.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu (layer_norm_cuda).
    """
    return _copy_of(args[0])


def _layer_norm_backward_input(args: Arguments, _: StackProfile) -> list[int]:
    """So it is again in backward, before the results.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu (layer_norm_backward_cuda).
    """
    return _copy_of(args[1])


def _layer_norm_backward_gradient(args: Arguments, _: StackProfile) -> list[int]:
    """And so is the gradient, after them.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu (LayerNormBackwardKernelImpl).
    """
    return _copy_of(args[0])


def _copy_of(x: torch.Tensor) -> list[int]:
    return [] if x.is_contiguous() else [x.numel() * x.element_size()]


WORKSPACES_AFTER: dict[Any, Rule] = {
    aten.native_layer_norm_backward.default: _layer_norm_backward_gradient,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn_forward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten.cumsum.default: whole_numbers,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._softmax_backward_data.default: _softmax_backward,
}
"""Temporaries that a kernel allocates after its results."""

WORKSPACES_BEFORE: dict[Any, Rule] = {
    aten._foreach_norm.Scalar: _norm_of_many,
    aten.index.Tensor: _index,
    aten.where.self: _where,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward_input,
}
"""Temporaries that a kernel allocates before its results and frees after them."""


BIRTHS: dict[Any, tuple[int, ...]] = {
    aten._scaled_dot_product_cudnn_attention.default: (6, 7, 0, 1),
    aten.native_dropout.default: (1, 0),
}
"""The order in which CUDA makes an operator's results, where it is not that of its signature: cuDNN's seeds come
first, and so does dropout's mask. Learnt on H200 runs."""


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


def _like_both(grad: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return grad * x


ON_META: dict[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm,
    aten.softplus_backward.default: _like_both,
}
"""Operators whose meta kernel refuses what devices run: experts in fp16 and fp32 (ATen/native/GroupedMMUtils.h); or
that lays its result out otherwise: softplus_backward, whose gradient comes first on devices (Activation.cpp;
learnt on torch's CPU kernel)."""
