"""Operations that few families use; each docstring is a row of the operations table, as in `ops`."""

from foretune.memory import ops
from foretune.memory.layout import Shape, iterator_strides
from foretune.memory.ops import like, product
from foretune.memory.tape import Grads, Node, Tensor, attach, current, like_iterator, node_for

__all__ = [
    "baddbmm",
    "clamp",
    "clamp_in_place",
    "expm1",
    "logsumexp",
    "masked_fill",
    "maximum",
    "minimum",
    "scale_in_place",
    "select",
    "sigmoid",
    "softplus",
    "sub",
    "where",
]


def _grad(grads: Grads) -> Tensor:
    grad = grads[0]
    assert grad is not None
    return grad


def select(t: Tensor, dim: int) -> Tensor:
    """t[..., i, :]: a view; backward fills a tensor of t's shape with zeros and the gradient."""
    full, dtype = t.shape, t.dtype
    node = node_for(lambda grads, node: (Tensor(full, dtype),), t)
    shape, strides = list(t.shape), list(t.strides)
    del shape[dim], strides[dim]
    return attach(node, t.view_as(tuple(shape), tuple(strides)))


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


def masked_fill(t: Tensor, mask: Tensor) -> Tensor:
    """n*s; saves the mask; backward n*s."""
    node = node_for(lambda grads, node, saved: (like(_grad(grads)),), t)
    if node:
        node.save(mask)
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


def softplus(t: Tensor) -> Tensor:
    """n*s; saves the input; backward n*s."""
    node = node_for(lambda grads, node, saved: (like_iterator(_grad(grads), saved),), t)
    if node:
        node.save(t)
    return attach(node, like(t))


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


def _clamp_grad(grads: Grads, node: Node, saved: Tensor) -> Grads:
    """(self >= min).logical_and_(self <= max), then where: the arguments of C++ are made from the last to the first."""
    zero = Tensor((), saved.dtype)
    inside = like(saved, "bool")
    below = like(saved, "bool")
    out = like(_grad(grads))
    del below, inside, zero
    return [out]


def clamp(t: Tensor) -> Tensor:
    """clamp between two numbers: n*s; saves the input; backward compares twice and chooses."""
    node = node_for(_clamp_grad, t)
    if node:
        node.save(t)
    return attach(node, like(t))


def clamp_in_place(t: Tensor) -> Tensor:
    """clamp_: nothing, or, where a gradient flows, a copy of the input to save."""
    node = node_for(_clamp_grad, t)
    if node is None:
        return t
    node.save(like(t))
    return attach(node, t.detach())


def _sub_grad(grads: Grads, node: Node) -> Grads:
    other = like(grads[0]) if node.edges[1] and grads[0] is not None else None
    return [grads[0], other]


def sub(a: Tensor, b: Tensor) -> Tensor:
    """n*s in the promoted dtype; backward n*s for b (then the engine's sum to a broadcast shape)."""
    return attach(node_for(_sub_grad, a, b), like_iterator(a, b))


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


def sigmoid(t: Tensor) -> Tensor:
    """n*s; saves the result; backward n*s."""
    node = node_for(lambda grads, node, result: (like_iterator(_grad(grads), result),), t)
    out = like(t)
    if node:
        node.save(out.detach())
    return attach(node, out)
