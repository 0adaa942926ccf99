"""Adapters, written as PEFT 0.21 writes them: LoRA and DoRA.

Local names are kept where their lifetime matters: a name rebound, an argument held by `call`.
"""

from collections.abc import Iterator
from typing import Any

from foretune.memory.blocks import Conv1d, Linear, Module, call
from foretune.memory.layout import iterator_strides
from foretune.memory.ops import add, add_scalar, clone, dropout, linear, mm, mul, scale, to, transpose, view
from foretune.memory.quantized import Linear4bit, Linear8bit
from foretune.memory.tape import Grads, Node, Tensor, attach, current, like_iterator, node_for

__all__ = ["Adapter", "DoraLinear", "LoraLinear"]


class Adapter:
    """What PEFT adds to one layer and trains (tuners/lora/layer.py, update_layer)."""

    def __init__(self, in_features: int, out_features: int, rank: int, dtype: str) -> None:
        self.lora_a = Tensor((rank, in_features), dtype, needs_grad=True)
        self.lora_b = Tensor((out_features, rank), dtype, needs_grad=True)
        self.magnitude: Tensor | None = None

    def parameters(self) -> Iterator[Tensor]:
        """Yield what is trained, in order."""
        yield self.lora_a
        yield self.lora_b
        if self.magnitude is not None:
            yield self.magnitude

    def cast(self, dtype: str) -> None:
        """Give the parameters another dtype, one by one (cast_adapter_dtype)."""
        for parameter in self.parameters():
            if parameter.dtype != dtype:
                wide = Tensor(parameter.shape, dtype)
                parameter.storage, parameter.dtype = wide.storage, dtype
                del wide

    def measure(self, base_layer: Module) -> None:
        """Make DoRA's magnitudes, the norms of the weight's rows (tuners/lora/dora.py, update_layer)."""
        self.magnitude = _magnitude(base_layer, self.lora_a, self.lora_b)


def _magnitude(base_layer: Any, lora_a: Tensor, lora_b: Tensor) -> Tensor:
    is_half = lora_a.dtype == "f16"
    if is_half:
        lora_a = to(lora_a, "f32")
        lora_b = to(lora_b, "f32")
    if isinstance(base_layer, Linear4bit):
        base_layer = base_layer.copied()
    weight = _dequantized(base_layer)
    lora_weight = mm(lora_b, lora_a)
    if is_half:
        lora_weight = to(lora_weight, "f16")
    weight_norm = _weight_norm(weight, lora_weight, base_layer)
    return Tensor(weight_norm.shape, weight_norm.dtype, storage=weight_norm.storage, needs_grad=True)


def _dequantized(module: Any) -> Tensor:
    """dequantize_module_weight (utils/integrations.py)."""
    weight: Tensor = module.dequantize() if hasattr(module, "dequantize") else module.weight
    return weight


def _weight_norm(weight: Tensor, lora_weight: Tensor, base_layer: Module) -> Tensor:
    """DoraLinearLayer.get_weight_norm."""
    weight = _turned(weight, base_layer)
    weight = add(weight, scale(lora_weight))
    weight_norm = to(_norm_of_rows(weight), weight.dtype)
    return weight_norm  # noqa: RET504


def _turned(weight: Tensor, base_layer: Module) -> Tensor:
    """utils/other.py, transpose: a Conv1D's weight is turned; of a parameter that makes a new one, which wants a
    gradient though the base is frozen."""
    if not isinstance(base_layer, Conv1d):
        return weight
    turned = transpose(weight, 0, 1)
    turned.needs_grad = weight is base_layer.weight
    return turned


def _norm_of_rows(t: Tensor) -> Tensor:
    """linalg.norm(dim=1): a number a row; saves the input and the result."""
    node = node_for(lambda grads, node, *saved: (like_iterator(*saved),), t)
    if node:
        node.save(t)
    out = Tensor(t.shape[:1], t.dtype)
    current().reduction(*t.shape, is_inner=t.strides[1] == 1)
    if node:
        node.save(out.detach())
    return attach(node, out)


class LoraLinear:
    """PEFT's lora.Linear (tuners/lora/layer.py), and lora.Linear4bit and Linear8bitLt (bnb.py)."""

    def __init__(self, base: Module, adapter: Adapter, probability: float) -> None:
        self.base, self.probability = base, probability
        self.lora_a, self.lora_b = Linear(adapter.lora_a), Linear(adapter.lora_b)
        # A function, not a bound method: nothing on the tape may be part of a cycle.
        is_quantized = isinstance(base, (Linear4bit, Linear8bit))
        self.forward = LoraLinear._forward_quantized if is_quantized else LoraLinear._forward_plain

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(self, x)

    def _forward_plain(self, x: Tensor) -> Tensor:
        result = call(self.base, x)
        dtype = result.dtype
        x = to(x, self.lora_a.weight.dtype)
        result = add(result, scale(call(self.lora_b, call(self.lora_a, call(dropout, x, self.probability)))))
        result = to(result, dtype)
        return result  # noqa: RET504

    def _forward_quantized(self, x: Tensor) -> Tensor:
        result = call(self.base, x)
        if isinstance(self.base, Linear4bit):
            result = clone(result)
        converts = current().autocast is None
        expected = result.dtype
        if converts:
            x = to(x, self.lora_a.weight.dtype)
        output = scale(call(self.lora_b, call(self.lora_a, call(dropout, x, self.probability))))
        if converts:
            output = to(output, expected)
        result = add(result, output)
        return result  # noqa: RET504


class DoraLinear(LoraLinear):
    """The same layers with DoRA (tuners/lora/variants.py, DoraLinearVariant; dora.py, DoraLinearLayer)."""

    def __init__(self, base: Module, adapter: Adapter, probability: float) -> None:
        super().__init__(base, adapter, probability)
        assert adapter.magnitude is not None
        self.magnitude = adapter.magnitude

    def __call__(self, x: Tensor) -> Tensor:
        result = call(self.base, x)
        if isinstance(self.base, Linear4bit):
            result = clone(result)
        dtype = result.dtype
        x = to(x, self.lora_a.weight.dtype)
        result = self._variant(x, result)
        result = to(result, dtype)
        return result  # noqa: RET504

    def _variant(self, x: Tensor, result: Tensor) -> Tensor:
        if self.probability and current().is_training:
            x = call(dropout, x, self.probability)
            base_result = None
        else:
            base_result = result
        result = add(result, call(self._dora, x, base_result))
        return result  # noqa: RET504

    def _lora_weight(self) -> Tensor:
        """get_lora_weight: the identity sent through both matrices."""
        width, dtype = self.lora_a.weight.shape[1], self.lora_a.weight.dtype
        x_eye = Tensor((width, width), dtype)
        lora_weight = transpose(call(self.lora_b, call(self.lora_a, x_eye)), 0, 1)
        return lora_weight  # noqa: RET504

    def _dora(self, x: Tensor, base_result: Tensor | None) -> Tensor:
        lora_weight = self._lora_weight()
        lora_weight = to(lora_weight, x.dtype)
        weight = _dequantized(self.base)
        weight = to(weight, x.dtype)
        weight_norm = _weight_norm(weight, lora_weight.detach(), self.base)
        weight_norm = weight_norm.detach()
        mag_norm_scale = view(_divide(self.magnitude, weight_norm), 1, -1)
        lora_result = call(self.lora_b, call(self.lora_a, x))
        if base_result is not None:
            bias = self.base.bias  # type: ignore[attr-defined]
            if bias is not None:
                base_result = add(base_result, bias)
        else:
            base_result = linear(x, _turned(weight, self.base))
        result_dora = add(
            mul(add_scalar(mag_norm_scale), base_result),
            scale(mul(mag_norm_scale, lora_result)),
        )
        return result_dora  # noqa: RET504


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b for a b without gradient: n*s; saves b; backward n*s."""

    def formula(grads: Grads, node: Node, other: Tensor) -> Grads:
        grad = grads[0]
        assert grad is not None
        return [like_iterator(grad, other)]

    node = node_for(formula, a)
    if node:
        node.save(b)
    return attach(node, Tensor(a.shape, a.dtype, iterator_strides(a.shape, [a, b])))
