"""Quantized linear layers, loaded and run as bitsandbytes 0.50 does."""

from typing import Any, NamedTuple

from foretune.contract import QuantizationSettings
from foretune.memory import ops
from foretune.memory.blocks import Module
from foretune.memory.layout import numel
from foretune.memory.ops import like, linear, to
from foretune.memory.stack import StackProfile
from foretune.memory.tape import Grads, Node, Tensor, attach, current, node_for

__all__ = ["Linear4bit", "QuantizedWeight", "Quantizer", "copy_for_magnitude", "dequantize_module_weight"]


class QuantizedWeight(NamedTuple):
    """A 4-bit weight: the packed tensor and everything its quantization state keeps."""

    packed: Tensor
    state: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: str
    """What it was quantized from, and is dequantized to."""


def _matmul(x: Tensor, w: Tensor) -> Tensor:
    """x @ w outside the graph: leading dimensions are folded only where strides allow, else bmm copies nothing
    (aten/src/ATen/native/LinearAlgebra.cpp, should_fold)."""
    is_folded = all(x.strides[i] == x.strides[i + 1] * x.shape[i + 1] for i in range(len(x.shape) - 2))
    return ops.fold_mm(x, w, x.shape[:-1]) if is_folded else ops.product((*x.shape[:-1], w.shape[1]), x.dtype)


class Linear4bit:
    """bitsandbytes' Linear4bit: dequantizes in forward and again in backward, saves nothing but the packed weight."""

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        *,
        compute_dtype: str,
        is_nested: bool,
        has_gemm_4bit: bool,
    ) -> None:
        self.weight, self.bias = weight, bias
        self.compute_dtype, self.is_nested = compute_dtype, is_nested
        self.has_gemm_4bit = has_gemm_4bit

    def __call__(self, x: Tensor) -> Tensor:
        dtype, bias = x.dtype, self.bias
        x = to(x, self.compute_dtype)
        if bias is not None:
            if bias.dtype != x.dtype:  # bias.data = bias.data.to(x.dtype): for good, in the first forward
                moved = Tensor(bias.shape, x.dtype)
                bias.storage, bias.dtype = moved.storage, x.dtype
                del moved
            bias = to(bias, self.compute_dtype)
        return to(self._product(x, bias), dtype)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """MatMul4Bit (bitsandbytes/autograd/_functions.py)."""

        def formula(grads: Grads, node: Node) -> Grads:
            grad = grads[0]
            assert grad is not None
            weight = to(self.dequantize(), grad.dtype)
            return [_matmul(grad, weight)]

        node = node_for(formula, x)
        tape = current()
        before, tape.is_grad_enabled = tape.is_grad_enabled, False
        out = self._gemm_4bit(x, bias) if self.has_gemm_4bit else self._dequantized_linear(x, bias)
        tape.is_grad_enabled = before
        return attach(node, out)

    def _dequantized_linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """bitsandbytes up to 0.49: dequantize_4bit, then F.linear."""
        weight = to(self.dequantize(), x.dtype)
        return linear(x, weight, bias)

    def _gemm_4bit(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """bitsandbytes 0.50 (backends/cuda/ops.py, _dequant_linear_fallback): the scales' offset is added apart, and
        both live until the product is there (learnt on an H200)."""
        scales = self._scales() if self.is_nested else None
        shifted = like(scales) if scales is not None else None
        weight = Tensor(self.weight.shape, x.dtype)
        out = linear(x, weight, bias)
        del shifted, scales, weight
        return out

    def _scales(self) -> Tensor:
        return Tensor((-(-numel(self.weight.shape) // 64),), "f32")

    def dequantize(self) -> Tensor:
        """dequantize_4bit (functional.py): nested scales first, in a temporary."""
        absmax = self._scales() if self.is_nested else None
        out = Tensor(self.weight.shape, self.weight.dtype)
        del absmax
        return out


def dequantize_module_weight(module: Module) -> Tensor:
    """Return a layer's weight, dequantized if need be (peft/utils/integrations.py)."""
    if isinstance(module, Linear4bit):
        return module.dequantize()
    weight = module.weight  # type: ignore[attr-defined]
    assert isinstance(weight, Tensor)
    return weight


def copy_for_magnitude(base_layer: Module) -> Module:
    """Return the layer that PEFT measures: a deep copy of a 4-bit one (peft/tuners/lora/dora.py, update_layer)."""
    return base_layer


class Quantizer:
    """What quantizes weights while they are loaded, and makes layers of them."""

    def __init__(self, settings: QuantizationSettings, stack: StackProfile, compute_dtype: str) -> None:
        self.is_nested, self.stack = settings.uses_double_quant, stack
        self.compute_dtype = compute_dtype
        self.code_map: Tensor | None = None

    def linear(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear4bit:
        """Make a layer of a weight."""
        return Linear4bit(
            weight,
            bias,
            compute_dtype=self.compute_dtype,
            is_nested=self.is_nested,
            has_gemm_4bit=self.stack.has_gemm_4bit,
        )

    def load(self, shape: tuple[int, ...], dtype: str) -> QuantizedWeight:
        """bitsandbytes' quantize_4bit (functional.py): packed bytes and scales stay, the rest goes."""
        n = numel(shape)
        num_blocks = -(-n // 64)
        is_nested, keeps_tables = self.is_nested, self.stack.copies_code_tables
        weight = Tensor((n,), dtype)
        absmax = Tensor((num_blocks,), "f32")
        packed = Tensor(((n + 1) // 2, 1), "u8")
        code = self._code_table() if keeps_tables else None
        if not is_nested:
            state: tuple[Any, ...] = (Tensor((num_blocks,), "f32"),) if not keeps_tables else (absmax, code)
            del absmax, weight
            return QuantizedWeight(packed, state, shape, dtype)
        offset = Tensor((1,), "f32")
        if not keeps_tables:
            codes = Tensor((num_blocks,), "u8"), Tensor((-(-num_blocks // 256),), "f32")
            state = (*codes, Tensor((1,), "f32"))
            del offset, absmax, weight
            return QuantizedWeight(packed, state, shape, dtype)
        current().reduction(1, num_blocks, is_inner=True)
        centred = Tensor((num_blocks,), "f32")
        if self.code_map is None:  # kept by the library from the first weight on (functional.py, name2qmap)
            self.code_map = Tensor((256,), "f32")
        scales = Tensor((-(-num_blocks // 256),), "f32")
        codes = Tensor((num_blocks,), "u8"), scales
        state = (*codes, Tensor((256,), "f32"), offset, code)
        del centred, offset, absmax, weight
        return QuantizedWeight(packed, state, shape, dtype)

    def _code_table(self) -> Tensor:
        """get_4bit_type: a table of 16 numbers, normed by its largest magnitude."""
        table, magnitudes, largest = Tensor((16,), "f32"), Tensor((16,), "f32"), Tensor((), "f32")
        del magnitudes, largest
        return table
