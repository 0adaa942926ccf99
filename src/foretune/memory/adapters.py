"""Adapters, written as PEFT 0.21 writes them.

Local names are kept where their lifetime matters: a name rebound, an argument held by `call`.
"""

from foretune.memory.blocks import Linear, Module, call
from foretune.memory.ops import add, clone, dropout, scale, to
from foretune.memory.quantized import Linear4bit
from foretune.memory.tape import Tensor

__all__ = ["LoraLinear"]


class LoraLinear:
    """PEFT's lora.Linear (tuners/lora/layer.py), and lora.Linear4bit (bnb.py) where the base is 4-bit."""

    def __init__(self, base: Module, a: Tensor, b: Tensor, probability: float) -> None:
        self.base, self.lora_a, self.lora_b, self.probability = base, Linear(a), Linear(b), probability
        # A function, not a bound method: nothing on the tape may be part of a cycle.
        self.forward = LoraLinear._forward_4bit if isinstance(base, Linear4bit) else LoraLinear._forward_plain

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(self, x)

    def _forward_plain(self, x: Tensor) -> Tensor:
        result = call(self.base, x)
        dtype = result.dtype
        x = to(x, self.lora_a.weight.dtype)
        result = add(result, scale(call(self.lora_b, call(self.lora_a, call(dropout, x, self.probability)))))
        result = to(result, dtype)
        return result  # noqa: RET504

    def _forward_4bit(self, x: Tensor) -> Tensor:
        result = call(self.base, x)
        result = clone(result)
        expected = result.dtype
        x = to(x, self.lora_a.weight.dtype)
        output = scale(call(self.lora_b, call(self.lora_a, call(dropout, x, self.probability))))
        output = to(output, expected)
        result = add(result, output)
        return result  # noqa: RET504
