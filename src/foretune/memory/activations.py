"""Activations of several kernels (transformers/activations.py, and Bloom's own)."""

from foretune.memory.ops import add, add_scalar, like, mul, relu, scale, square, tanh
from foretune.memory.pointwise import softplus, subtract
from foretune.memory.rare_ops import expm1, minimum, where
from foretune.memory.tape import Grads, Node, Tensor, attach, current, node_for

__all__ = ["Xielu", "bloom_gelu", "relu_squared"]


def relu_squared(input: Tensor) -> Tensor:
    """ReLUSquaredActivation."""
    relu_applied = relu(input)
    squared = square(relu_applied)
    return squared  # noqa: RET504


def _bloom_gelu_forward(x: Tensor) -> Tensor:
    return mul(scale(x), add_scalar(tanh(mul(scale(x), add_scalar(mul(scale(x), x))))))


def _bloom_gelu_back(g: Tensor, x: Tensor) -> Tensor:
    tanh_out = tanh(mul(scale(x), add_scalar(mul(scale(x), x))))
    ff = add(
        mul(scale(x), mul(add_scalar(mul(tanh_out, tanh_out)), add_scalar(mul(scale(x), x)))),
        scale(add_scalar(tanh_out)),
    )
    return mul(ff, g)


def bloom_gelu(input: Tensor) -> Tensor:
    """GeLUFunction (modeling_bloom.py): saves its input; backward computes everything again."""

    def formula(grads: Grads, node: Node, x: Tensor) -> Grads:
        grad = grads[0]
        assert grad is not None
        return [_bloom_gelu_back(grad, x)]

    node = node_for(formula, input)
    if node:
        node.save(input)
    tape = current()
    before, tape.is_grad_enabled = tape.is_grad_enabled, False
    out = _bloom_gelu_forward(input)
    tape.is_grad_enabled = before
    return attach(node, out)


class Xielu:
    """XIELUActivation in torch's operators: two learned numbers, and two in buffers."""

    def __init__(self, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> None:
        self.alpha_p, self.alpha_n, self.beta, self.eps = alpha_p, alpha_n, beta, eps

    def __call__(self, input: Tensor) -> Tensor:
        return self._xielu_python(input)

    def _xielu_python(self, x: Tensor) -> Tensor:
        alpha_p = softplus(self.alpha_p)
        alpha_n = add(self.beta, softplus(self.alpha_n))
        return where(
            like(x, "bool"),
            add(mul(mul(alpha_p, x), x), mul(self.beta, x)),
            add(mul(subtract(expm1(minimum(x, self.eps)), x), alpha_n), mul(self.beta, x)),
        )
