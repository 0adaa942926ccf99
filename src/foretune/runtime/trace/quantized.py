"""bitsandbytes on tensors without data: 4-bit layers and 8-bit optimizers, allocation by allocation.

Follows bitsandbytes 0.50: functional.py (quantize_4bit, dequantize_4bit), autograd/_functions.py (MatMul4Bit),
backends/cuda/ops.py (_dequant_linear_fallback), optim/optimizer.py (init_state).
"""

import copy
from typing import Any, NamedTuple, Protocol

import bitsandbytes as bnb
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretune.contract import OptimizerSettings, QuantizationSettings
from foretune.memory.stack import StackProfile

__all__ = ["Traced8bitOptimizer", "TracedLinear4bit", "quantize_on_meta"]

BLOCK, NESTED_BLOCK = 64, 256
PAGED_FROM_ELEMENTS, MIN_8BIT_ELEMENTS = 100_000, 4096


class Loader(Protocol):
    """What a weight's quantization leaves with whoever loads it."""

    def mean_of_scales(self, count: int) -> None:
        """Take a mean over so many scales."""

    def keep_code_map(self) -> None:
        """Make the map of nested scales, if it is not there yet."""


class _State(NamedTuple):
    """What a 4-bit weight keeps beside its packed bytes."""

    shape: torch.Size
    dtype: torch.dtype
    is_nested: bool
    tensors: tuple[Tensor, ...]
    """absmax, code; with double quantization codes, scales, map, offset, code."""
    has_gemm_4bit: bool

    def scales(self, device: torch.device) -> Tensor:
        """fp32 scales, one for each block."""
        return torch.empty(-(-self.shape.numel() // BLOCK), dtype=torch.float32, device=device)

    def dequantized(self, packed: Tensor) -> Tensor:
        """dequantize_4bit: nested scales first, in a temporary."""
        scales = self.scales(packed.device) if self.is_nested else None
        out = torch.empty(self.shape, dtype=self.dtype, device=packed.device)
        del scales
        return out


def _gemm_4bit(a: Tensor, bias: Tensor | None, state: _State) -> Tensor:
    """A 4-bit product: the scales' offset is added out of place; both live until the product is there.

    Source: bitsandbytes/backends/cuda/ops.py (_dequant_linear_fallback). Learnt on: H200 runs.
    """
    scales = state.scales(a.device) if state.is_nested else None
    shifted = scales + 0.0 if scales is not None else None
    weight = torch.empty(state.shape, dtype=a.dtype, device=a.device)
    out = F.linear(a, weight, bias)
    del shifted, scales, weight
    return out


class _MatMul4Bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, packed: Tensor, bias: Tensor | None, state: _State) -> Tensor:
        ctx.state, ctx.packed = state, packed
        if state.has_gemm_4bit:
            return _gemm_4bit(a, bias, state)
        return F.linear(a, state.dequantized(packed).to(a.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return torch.matmul(grad, ctx.state.dequantized(ctx.packed).to(grad.dtype)), None, None, None


class TracedLinear4bit(bnb.nn.Linear4bit):
    """A Linear4bit whose kernels are replaced by their allocations."""

    def __init__(
        self, linear: nn.Linear, packed: Tensor, state: _State, settings: QuantizationSettings, compute: torch.dtype
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype, self.compute_type_is_set, self.quant_storage = compute, True, torch.uint8
        weight: Any = nn.Parameter(packed, requires_grad=False)
        weight.compress_statistics, weight.quant_type = settings.uses_double_quant, settings.scheme
        self.weight, self.bias, self.state = weight, linear.bias, state

    def dequantized(self) -> Tensor:
        """dequantize_4bit."""
        return self.state.dequantized(self.weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TracedLinear4bit":
        """PEFT copies the layer to measure its weight for DoRA. The parameter and the layer both know the weight's
        state, and it is copied for each (Params4bit.__deepcopy__)."""
        kept = _CopiedState(self.state.tensors)
        weight: Any = nn.Parameter(self.weight.data.clone(), requires_grad=False)
        weight.quant_state = kept
        del kept
        copied = TracedLinear4bit.__new__(TracedLinear4bit)
        nn.Module.__init__(copied)
        copied.weight, copied.state = weight, self.state
        copied.bias = None if self.bias is None else copy.deepcopy(self.bias)
        copied.quant_state = _CopiedState(self.state.tensors)
        return copied

    def forward(self, x: Tensor) -> Tensor:
        """As bitsandbytes' (nn/modules.py)."""
        dtype = x.dtype
        x = x.to(self.compute_dtype)
        bias = self.bias
        if bias is not None:
            if bias.dtype != x.dtype:
                bias.data = bias.data.to(x.dtype)
            bias = bias.to(self.compute_dtype)
        return _MatMul4Bit.apply(x, self.weight, bias, self.state).to(dtype)


TracedLinear4bit.__name__ = "Linear4bit"  # PEFT asks for it by this name


class _CopiedState:
    """A copied QuantState: its parts are made and die in the order of its attributes (functional.py)."""

    def __init__(self, state: tuple[Tensor, ...]) -> None:
        absmax, *nested, code = state
        self.absmax, self.code = absmax.clone(), code.clone()
        if nested:
            scales, code_map, offset = nested
            self.offset = offset.clone()
            self.nested_absmax, self.nested_code = scales.clone(), code_map.clone()


def quantize_on_meta(
    linear: nn.Linear,
    settings: QuantizationSettings,
    compute: torch.dtype,
    stack: StackProfile,
    loader: Loader,
) -> TracedLinear4bit:
    """Quantize one weight that is being loaded; what is not kept is freed.

    Source: bitsandbytes/functional.py (quantize_4bit). Learnt on: T4 runs (plain), RTX 4080 and H200 runs (nested).
    """
    dtype, n, is_nested = linear.weight.dtype, linear.weight.numel(), settings.uses_double_quant
    keeps, blocks = stack.copies_code_tables, -(-linear.weight.numel() // BLOCK)

    def made(size: int, kind: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=kind, device="meta")

    loaded = made(n, dtype)
    absmax = made(blocks, torch.float32)
    packed = torch.empty((n + 1) // 2, 1, dtype=torch.uint8, device="meta")
    code = _code_table() if keeps else None
    if not is_nested:
        kept: tuple[Tensor | None, ...] = (absmax, code) if keeps else (made(blocks, torch.float32),)
    else:
        offset = made(1, torch.float32)
        if keeps:
            loader.mean_of_scales(blocks)
            centred = made(blocks, torch.float32)
            loader.keep_code_map()
            scales = made(-(-blocks // NESTED_BLOCK), torch.float32)
            kept = (made(blocks, torch.uint8), scales, made(256, torch.float32), offset, code)
            del centred, scales
        else:
            codes = made(blocks, torch.uint8), made(-(-blocks // NESTED_BLOCK), torch.float32)
            kept = (*codes, made(1, torch.float32))
            del codes
        del offset
    del absmax, loaded
    tensors = tuple(tensor for tensor in kept if tensor is not None)
    state = _State(linear.weight.shape, dtype, is_nested, tensors, stack.has_gemm_4bit)
    return TracedLinear4bit(linear, packed, state, settings, compute)


def _code_table() -> Tensor:
    """get_4bit_type: sixteen numbers, normed by the largest magnitude."""
    table, magnitudes = (torch.empty(16, dtype=torch.float32, device="meta") for _ in range(2))
    largest = torch.empty((), dtype=torch.float32, device="meta")
    del magnitudes, largest
    return table


class Traced8bitOptimizer:
    """AdamW8bit and PagedAdamW8bit: states as init_state makes them, updates in place."""

    def __init__(
        self, settings: OptimizerSettings, parameters: list[nn.Parameter], in_32bit: list[nn.Parameter] | None = None
    ) -> None:
        """Keep fp32 states for the parameters in `in_32bit` (GlobalOptimManager.register_module_override)."""
        self.parameters, self.is_paged = parameters, settings.name == "paged_adamw_8bit"
        self.in_32bit = {id(parameter) for parameter in in_32bit or []}
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.maps: list[Tensor] = []

    def step(self) -> None:
        """Make the states of parameters that have none."""
        for parameter in self.parameters:
            if parameter.grad is not None and parameter not in self.state:
                self.state[parameter] = self._states(parameter)

    def _states(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        n, device = parameter.numel(), parameter.device
        is_on_device = not self.is_paged or n < PAGED_FROM_ELEMENTS
        if n < MIN_8BIT_ELEMENTS or id(parameter) in self.in_32bit:
            names = ("state1", "state2") if is_on_device else ()
            return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in names}
        if not self.maps:
            self.maps = [torch.empty(256, dtype=torch.float32, device=device) for _ in range(2)]
        states = {}
        if is_on_device:
            states = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in ("state1", "state2")}
        scales = {
            name: torch.zeros(-(-n // NESTED_BLOCK), dtype=torch.float32, device=device)
            for name in ("absmax1", "absmax2")
        }
        return states | scales

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of all gradients."""
        for parameter in self.parameters:
            parameter.grad = None
