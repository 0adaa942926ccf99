"""Activations of several kernels (transformers/activations.py)."""

from foretune.memory.ops import relu, square
from foretune.memory.tape import Tensor

__all__ = ["relu_squared"]


def relu_squared(input: Tensor) -> Tensor:
    """ReLUSquaredActivation."""
    relu_applied = relu(input)
    squared = square(relu_applied)
    return squared  # noqa: RET504
