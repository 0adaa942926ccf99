"""Quantized linear layers, loaded and run as bitsandbytes 0.50 does."""

from typing import Any, NamedTuple

from foretune.contract import QuantizationSettings
from foretune.memory import ops
from foretune.memory.layout import Shape, numel
from foretune.memory.ops import clone, contiguous, like, linear, mm, mul, reshape, scale, to, view
from foretune.memory.stack import StackProfile
from foretune.memory.tape import Formula, Grads, Node, Tensor, attach, current, function_node

__all__ = ["Linear4bit", "Linear8bit", "Quantizer4bit", "Quantizer8bit"]


class QuantizedWeight(NamedTuple):
    """A 4-bit weight: the packed tensor and everything its quantization state keeps."""

    packed: Tensor
    state: tuple[Any, ...]
    """absmax, code; with double quantization codes, scales, map, offset, code (of older libraries not all)."""
    shape: tuple[int, ...]
    dtype: str
    """What it was quantized from, and is dequantized to."""


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
        self.keeps_input = False
        """The node keeps its input for as long as the graph lives (bitsandbytes up to 0.42: ctx.tensors = (A, B))."""

    def __call__(self, x: Tensor) -> Tensor:
        dtype, bias = x.dtype, self.bias
        x = to(x, self.compute_dtype)
        if bias is not None:
            _move_bias(bias, x.dtype)
            bias = to(bias, self.compute_dtype)
        return to(self._product(x, bias), dtype)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """MatMul4Bit (bitsandbytes/autograd/_functions.py)."""

        kept = x.detach() if self.keeps_input else None

        def formula(grads: Grads, node: Node, _kept: Tensor | None = kept) -> Grads:
            grad = grads[0]
            assert grad is not None
            weight = to(self.dequantize(), grad.dtype)
            return [ops.frozen_mm(grad, weight)]

        node = function_node(formula, x)
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

    def copied(self) -> "_Copied4bit":
        """copy.deepcopy, as PEFT has it for DoRA (tuners/lora/dora.py, update_layer)."""
        return _Copied4bit(self)


class _CopiedState:
    """A copied QuantState: its parts are made and die in the order of its attributes (functional.py)."""

    def __init__(self, state: tuple[Tensor, ...]) -> None:
        absmax, *nested, code = state
        self.absmax = clone(absmax)
        self.code = clone(code)
        if nested:
            scales, code_map, offset = nested
            self.offset = clone(offset)
            self.nested_absmax = clone(scales)
            self.nested_code = clone(code_map)


class _Copied4bit:
    """A copied Linear4bit. The parameter and the layer both know the weight's state, and it is copied for each
    (nn/modules.py, Params4bit.__deepcopy__)."""

    def __init__(self, layer: Linear4bit) -> None:
        self.weight_state = _CopiedState(layer.weight.state)
        self.data = clone(layer.weight.packed)
        self.bias = None if layer.bias is None else clone(layer.bias)
        self.quant_state = _CopiedState(layer.weight.state)
        self.dequantize = layer.dequantize


class Weight8bit(NamedTuple):
    """An 8-bit weight: a byte for each number, a scale for each row."""

    codes: Tensor
    scales: Tensor


class Linear8bit:
    """bitsandbytes' Linear8bitLt (LLM.int8) without outliers, which depend on the data: multiplies in int8, keeps its
    input as an attribute, which checkpointing does not see, and dequantizes the weight in backward."""

    def __init__(self, weight: Weight8bit, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            _move_bias(self.bias, x.dtype)
        a = x.detach()  # the node's own input, without its history
        node = function_node(self._formula(a, x.shape), x)
        tape = current()
        before, tape.is_grad_enabled = tape.is_grad_enabled, False
        out = self._matmul(a)
        tape.is_grad_enabled = before
        return attach(node, view(out, *x.shape[:-1], out.shape[-1]))

    def _formula(self, a: Tensor, shape: Shape) -> Formula:
        """MatMul8bitLt.backward (autograd/_functions.py)."""
        codes, scales = self.weight

        def formula(grads: Grads, node: Node) -> Grads:
            grad = grads[0]
            assert grad is not None
            grad = contiguous(reshape(grad, (numel(shape[:-1]), grad.shape[-1])))
            weight = like(codes, a.dtype)
            current().temporaries(numel(scales.shape) * 4)
            return [view(mm(grad, weight), *shape)]

        return formula

    def _matmul(self, a: Tensor) -> Tensor:
        """MatMul8bitLt.forward."""
        a = reshape(a, (numel(a.shape[:-1]), a.shape[-1]))
        row_codes, row_scales = self._vectorwise_quant(to(a, "f16"))
        output = self._scaled_mm(a)
        del row_codes, row_scales
        return output

    def _vectorwise_quant(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """int8_vectorwise_quant (backends/cuda/ops.py), which asks where magnitudes pass the threshold."""
        row_stats = Tensor(a.shape[:1], "f32")
        out_row = Tensor(a.shape, "u8")
        magnitudes = like(a)
        outliers = like(a, "bool")
        del magnitudes
        Tensor((), "bool")
        del outliers
        return out_row, row_stats

    def _scaled_mm(self, a: Tensor) -> Tensor:
        """int8_scaled_mm: sums in 32 bits, then 16-bit numbers, then a's dtype."""
        out_i32 = Tensor((a.shape[0], self.weight.codes.shape[0]), "i32")
        out = Tensor(out_i32.shape, "f16")
        out = to(out, a.dtype)
        return out  # noqa: RET504

    def dequantize(self) -> Tensor:
        """int8_vectorwise_dequant (bitsandbytes/_ops.py)."""
        codes, scales = self.weight
        return scale(mul(codes, view(scales, -1, 1)))


def _move_bias(bias: Tensor, dtype: str) -> None:
    """bias.data = bias.data.to(x.dtype): for good, in the first forward (nn/modules.py)."""
    if bias.dtype != dtype:
        moved = Tensor(bias.shape, dtype)
        bias.storage, bias.dtype = moved.storage, dtype
        del moved


class Quantizer4bit:
    """Quantizes weights to 4 bits while they are loaded, and makes layers of them."""

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


class Quantizer8bit:
    """Quantizes weights to 8 bits while they are loaded, and makes layers of them."""

    def linear(self, weight: Weight8bit, bias: Tensor | None) -> Linear8bit:
        """Make a layer of a weight."""
        return Linear8bit(weight, bias)

    def load(self, shape: tuple[int, ...], dtype: str) -> Weight8bit:
        """Int8Params._quantize (nn/modules.py): 16 bits, cast to fp16, then scales and codes."""
        loaded = Tensor(shape, dtype)
        half = to(loaded, "f16")
        scales = Tensor(shape[:1], "f32")
        codes = Tensor(shape, "u8")
        del half, loaded
        return Weight8bit(codes, scales)
