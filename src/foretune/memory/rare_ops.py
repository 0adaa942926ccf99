"""Operations that few families use; each docstring is a row of the operations table, as in `ops`."""

from foretune.memory import ops
from foretune.memory.layout import Shape, iterator_strides
from foretune.memory.ops import like, product
from foretune.memory.tape import Grads, Node, Tensor, attach, current, like_iterator, node_for

__all__ = [
    "baddbmm",
    "expm1",
    "logsumexp",
    "maximum",
    "minimum",
    "scale_in_place",
    "where",
]


def _grad(grads: Grads) -> Tensor:
    grad = grads[0]
    assert grad is not None
    return grad


def _where_numbers(condition: Tensor, grad: Tensor) -> Tensor:
    """where(condition, grad, 0): the number is moved to the device first."""
    zero = Tensor((), grad.dtype)
    out = like_iterator_of(condition.shape, grad)
    del zero
    return out


def like_iterator_of(shape: Shape, t: Tensor) -> Tensor:
    """Allocate a result of `shape` in t's dtype and layout."""
    return Tensor(shape, t.dtype, iterator_strides(shape, [t]))


def where(condition: Tensor, t: Tensor, other: Tensor) -> Tensor:
    """n*s; saves the condition; backward n*s for each that wants a gradient, and a zero on the device."""

    def formula(grads: Grads, node: Node, saved: Tensor) -> Grads:
        first, second = node.edges
        grad = _grad(grads)
        other_grad = _where_numbers(grad, grad) if second else None
        return [_where_numbers(grad, grad) if first else None, other_grad]

    node = node_for(formula, t, other)
    if node:
        node.save(condition)
    return attach(node, like(t))


def maximum(t: Tensor, other: Tensor) -> Tensor:
    """max(t, other), other a number on the device: n*s; saves both; backward compares, halves, chooses and fills."""

    def formula(grads: Grads, node: Node, number: Tensor, saved: Tensor) -> Grads:
        grad = _grad(grads)
        half = like(grad)  # C++ evaluates the arguments of where from the last to the first
        equal = like(saved, "bool")
        out = like_iterator(half, grad)
        less = like(saved, "bool")
        del less, equal, half
        return [out]

    node = node_for(formula, t)
    if node:
        node.save(other, t)
    return attach(node, like(t))


def minimum(t: Tensor, other: Tensor) -> Tensor:
    """As maximum."""
    return maximum(t, other)


def expm1(t: Tensor) -> Tensor:
    """n*s; saves the result; backward adds one and multiplies (two n*s, one dies at once)."""

    def formula(grads: Grads, node: Node, result: Tensor) -> Grads:
        return [like_iterator(_grad(grads), like(result))]

    node = node_for(formula, t)
    out = like(t)
    if node:
        node.save(out.detach())
    return attach(node, out)


def scale_in_place(t: Tensor) -> Tensor:
    """t *= number, t /= number: nothing; backward n*s."""
    node = node_for(lambda grads, node: (like(_grad(grads)),), t)
    return attach(node, t.detach()) if node else t


def baddbmm(t: Tensor, batch1: Tensor, batch2: Tensor) -> Tensor:
    """t + number * batch1 @ batch2, t without a gradient: n*s; saves and computes as bmm does, each gradient scaled."""

    def formula(grads: Grads, node: Node, *saved: Tensor) -> Grads:
        grad, held, (_, first, second) = _grad(grads), list(saved), node.edges
        mat1 = held.pop(0) if second else None
        first_grad = second_grad = None
        if first:
            first_grad = ops.scale(product((*grad.shape[:2], held[0].shape[1]), grad.dtype))
        if mat1 is not None:
            second_grad = ops.scale(product((grad.shape[0], mat1.shape[2], grad.shape[2]), grad.dtype))
        return [None, first_grad, second_grad]

    node = node_for(formula, t, batch1, batch2)
    if node:
        node.save(batch1 if batch2.needs_grad else None, batch2 if batch1.needs_grad else None)
    out = Tensor((*batch1.shape[:2], batch2.shape[2]), batch1.dtype)
    current().workspace("cublas", current().rules.cublas_bytes)
    return attach(node, out)


def logsumexp(t: Tensor) -> Tensor:
    """logsumexp(-1): rows*s, after the rows' maxima and n*s for what lies below them; saves input and result; backward
    n*s twice beside the gradient (aten/src/ATen/native/ReduceOps.cpp, logsumexp_out_impl)."""

    def formula(grads: Grads, node: Node, saved: Tensor, result: Tensor) -> Grads:
        difference = like(saved)
        exponential = like(difference)
        out = like(exponential)
        del exponential, difference
        return [out]

    node = node_for(formula, t)
    rows = t.shape[:-1]
    maxima = Tensor(rows, t.dtype)
    magnitudes = Tensor(rows, t.dtype)
    are_infinite = Tensor(rows, "bool")
    del are_infinite, magnitudes
    below = like(t)
    out = Tensor(rows, t.dtype)
    del below, maxima
    if node:
        node.save(t, out.detach())
    return attach(node, out)
