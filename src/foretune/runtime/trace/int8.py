"""bitsandbytes' 8-bit base (LLM.int8) on tensors without data, allocation by allocation; no outliers.

Follows bitsandbytes 0.50: nn/modules.py (Int8Params, Linear8bitLt), autograd/_functions.py (MatMul8bitLt),
backends/default/ops.py (int8_mixed_scaled_mm), backends/cuda/ops.py. Which columns have outliers depends on the data;
none is assumed. Learnt on: the library's text; no measurement has touched it.
"""

from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

__all__ = ["TracedLinear8bit", "quantize_int8_on_meta"]

THRESHOLD = 6.0
"""Transformers' default of llm_int8_threshold."""


def _vectorwise(rows_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int8_vectorwise_quant: scales and codes of rows, then where magnitudes pass the threshold."""
    scales = torch.empty(rows_TH.shape[0], dtype=torch.float32, device=rows_TH.device)
    codes = torch.empty(rows_TH.shape, dtype=torch.int8, device=rows_TH.device)
    outliers = rows_TH.abs() >= THRESHOLD
    outliers.any()
    del outliers  # the rows are held by the library's function around the kernel
    columns = torch.empty(0, dtype=torch.int64, device=rows_TH.device)
    return codes, scales, columns


class _MatMul8bit(torch.autograd.Function):
    """Keeps its input, as an attribute, until the graph goes."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        shape = a.shape
        a = a.reshape(-1, shape[-1])
        of_a, row_scales, _columns = _vectorwise(a.to(torch.float16))
        sums = torch.empty((a.shape[0], codes.shape[0]), dtype=torch.int32, device=a.device)
        out = torch.empty_like(sums, dtype=torch.float16)
        if bias is not None and bias.dtype != torch.float16:
            out.add_(bias)
        out = out.to(a.dtype)
        del sums  # int8_scaled_mm holds it until it returns
        del of_a, row_scales
        ctx.a, ctx.codes, ctx.scales, ctx.shape = a, codes, scales, shape
        return out.reshape(*shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].reshape(-1, grads[0].shape[-1]).contiguous()
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        weight = ctx.codes.to(ctx.a.dtype, copy=True).mul_(ctx.scales.unsqueeze(1).mul(1.0 / 127.0))
        return torch.matmul(grad.to(ctx.a.dtype), weight).view(ctx.shape), None, None, None


class TracedLinear8bit(bnb.nn.Linear8bitLt):
    """A Linear8bitLt whose kernels are replaced by their allocations."""

    def __init__(self, linear: nn.Linear, codes: Tensor, scales: Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias, self.scales = nn.Parameter(codes, requires_grad=False), linear.bias, scales
        self.state, self.index = bnb.MatmulLtState(), None
        self.state.has_fp16_weights, self.state.threshold = False, THRESHOLD

    def dequantized(self) -> Tensor:
        """int8_vectorwise_dequant (bitsandbytes/_ops.py)."""
        return self.weight.data * self.scales.view(-1, 1) * 1.0

    def forward(self, x: Tensor) -> Tensor:
        """As bitsandbytes' (nn/modules.py)."""
        if self.bias is not None and self.bias.dtype != x.dtype:
            self.bias.data = self.bias.data.to(x.dtype)
        return _MatMul8bit.apply(x, self.weight, self.scales, self.bias)


def quantize_int8_on_meta(linear: nn.Linear) -> TracedLinear8bit:
    """Quantize one weight that is being loaded: 16 bits, cast to fp16, then a byte a weight and an fp32 scale a row."""
    loaded = torch.empty(linear.weight.shape, dtype=linear.weight.dtype, device="meta")
    half = loaded.to(torch.float16)
    scales = torch.empty(half.shape[0], dtype=torch.float32, device="meta")
    codes = torch.empty(half.shape, dtype=torch.int8, device="meta")
    del half, loaded
    return TracedLinear8bit(linear, codes, scales)
