"""Pointwise operations that routers, gates and scans share; a docstring is the operation's row, as in ops.py."""

from foretune.memory.layout import iterator_strides
from foretune.memory.ops import like
from foretune.memory.tape import Formula, Grads, Node, Tensor, attach, like_iterator, node_for

__all__ = ["clamp", "clamp_in_place", "exp", "masked_fill", "sigmoid", "softplus", "subtract"]


def _only(grads: Grads) -> Tensor:
    grad = grads[0]
    assert grad is not None
    return grad


def _saves_result(t: Tensor) -> Tensor:
    node = node_for(lambda grads, node, result: (like_iterator(_only(grads), result),), t)
    out = like(t)
    if node:
        node.save(out.detach())
    return attach(node, out)


def exp(t: Tensor) -> Tensor:
    """n*s; saves the result; backward n*s."""
    return _saves_result(t)


def sigmoid(t: Tensor) -> Tensor:
    """n*s; saves the result; backward n*s."""
    return _saves_result(t)


def softplus(t: Tensor) -> Tensor:
    """n*s; saves the input; backward n*s."""
    node = node_for(lambda grads, node, x: (like_iterator(_only(grads), x),), t)
    if node:
        node.save(t)
    return attach(node, like(t))


def subtract(a: Tensor, b: Tensor) -> Tensor:
    """a - b: n*s; backward passes the gradient on to a, and negated to b (n*s; then the sums to a broadcast shape)."""

    def formula(grads: Grads, node: Node) -> Grads:
        grad, (first, second) = _only(grads), node.edges
        second_grad = like(grad) if second else None
        return [grad if first else None, second_grad]

    return attach(node_for(formula, a, b), like_iterator(a, b))


def masked_fill(t: Tensor, mask: Tensor) -> Tensor:
    """n*s, contiguous; saves the mask; backward n*s, contiguous."""
    node = node_for(lambda grads, node, mask: (Tensor(_only(grads).shape, _only(grads).dtype),), t)
    if node:
        node.save(mask)
    return attach(node, Tensor(t.shape, t.dtype))


def _clamp_grad(num_bounds: int) -> Formula:
    def formula(grads: Grads, node: Node, t: Tensor) -> Grads:
        grad = _only(grads)
        zero = Tensor((), grad.dtype)
        masks = [like(t, "bool") for _ in range(num_bounds)]  # the second is joined to the first in place
        out = Tensor(t.shape, grad.dtype, iterator_strides(t.shape, [masks[0], grad]))
        while masks:
            masks.pop()
        del zero
        return [out]

    return formula


def clamp(t: Tensor, num_bounds: int = 1) -> Tensor:
    """clamp by one bound or two: n*s; saves the input; backward n*s, beside a zero and which values were within (n
    bytes for each bound)."""
    node = node_for(_clamp_grad(num_bounds), t)
    if node:
        node.save(t)
    return attach(node, like(t))


def clamp_in_place(t: Tensor, num_bounds: int = 2) -> Tensor:
    """t keeps its storage; saves a copy of what it was (n*s); backward as clamp."""
    node = node_for(_clamp_grad(num_bounds), t)
    if node is None:
        return t
    node.save(like(t))
    return attach(node, t.detach())
