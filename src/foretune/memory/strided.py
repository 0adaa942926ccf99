"""Operations on slices and streams: permutations, selections, stacks, powers, and writes into a view.

A docstring is the operation's row, as in ops.py.
"""

from collections.abc import Sequence

from foretune.memory.layout import iterator_strides, numel
from foretune.memory.ops import like
from foretune.memory.tape import (
    ITEM_BYTES,
    Formula,
    Grads,
    Node,
    Tensor,
    attach,
    current,
    like_iterator,
    node_for,
)

__all__ = [
    "add_to_rows",
    "add_to_view",
    "copy_to_last",
    "mean_first",
    "mul_in_place",
    "permute",
    "power",
    "repeat_first",
    "select",
    "sqrt",
    "stack",
    "std_last",
    "where",
]


def _only(grads: Grads) -> Tensor:
    grad = grads[0]
    assert grad is not None
    return grad


# ------------------------------------------------------------------ views
def permuted(t: Tensor, dims: Sequence[int]) -> Tensor:
    """The same data with its dimensions in another order, outside the graph."""
    return t.view_as(tuple(t.shape[d] for d in dims), tuple(t.strides[d] for d in dims))


def permute(t: Tensor, *dims: int) -> Tensor:
    """Allocates nothing, in backward neither."""
    order = [dim % len(t.shape) for dim in dims]
    inverse = tuple(order.index(dim) for dim in range(len(order)))
    return attach(node_for(lambda grads, node: (permute(_only(grads), *inverse),), t), permuted(t, order))


def select(t: Tensor, dim: int) -> Tensor:
    """t[..., i, ...]: a view; backward fills a tensor of t's shape with zeros and the gradient."""
    full, dtype, dim = t.shape, t.dtype, dim % len(t.shape)
    node = node_for(lambda grads, node: (Tensor(full, dtype),), t)
    return attach(node, t.view_as(full[:dim] + full[dim + 1 :], t.strides[:dim] + t.strides[dim + 1 :]))


def stack(parts: Sequence[Tensor]) -> Tensor:
    """stack(dim=0): n*s, contiguous; gradients are views."""

    def formula(grads: Grads, node: Node) -> Grads:
        grad = _only(grads)
        return [grad.view_as(grad.shape[1:], grad.strides[1:]) for _ in range(grad.shape[0])]

    node = node_for(formula, *parts)
    return attach(node, Tensor((len(parts), *parts[0].shape), parts[0].dtype))


# ------------------------------------------------------------------ elementwise
def _power_grad(grads: Grads, node: Node, t: Tensor) -> Grads:
    power = like(t)
    scaled = like(power)
    out = like_iterator(_only(grads), scaled)
    del scaled, power
    return [out]


def power(t: Tensor) -> Tensor:
    """pow(number): n*s; saves the input; backward makes power, scaled, product (three n*s, two die at once)."""
    node = node_for(_power_grad, t)
    if node:
        node.save(t)
    return attach(node, like(t))


def _sqrt_grad(grads: Grads, node: Node, result: Tensor) -> Grads:
    doubled = like(result)
    out = like_iterator(_only(grads), doubled)
    del doubled
    return [out]


def sqrt(t: Tensor) -> Tensor:
    """n*s; saves the result; backward makes its double and the quotient."""
    node = node_for(_sqrt_grad, t)
    out = like(t)
    if node:
        node.save(out.detach())
    return attach(node, out)


def where(condition: Tensor, a: Tensor | None, b: Tensor) -> Tensor:
    """where, None being a number, which is made a tensor first: n*s; saves the condition; backward makes a zero and the
    gradient of each (n*s)."""

    def formula(grads: Grads, node: Node, condition: Tensor) -> Grads:
        return [like(_only(grads)) if edge else None for edge in node.edges]

    node = node_for(formula, a, b)
    number = Tensor((), b.dtype) if a is None else None
    if node:
        node.save(condition)
    out = like_iterator(b, condition) if a is None else like_iterator(a, b)
    del number
    out.dtype = b.dtype
    return attach(node, out)


def mul_in_place(a: Tensor, b: Tensor) -> Tensor:
    """Nothing; saves b, which wants no gradient; backward n*s."""
    node = node_for(lambda grads, node, other: (like_iterator(_only(grads), other),), a)
    if node:
        node.save(b)
    return attach(node, a.detach()) if node else a


# ------------------------------------------------------------------ reductions and repetition
def mean_first(t: Tensor) -> Tensor:
    """mean(0): n*s; backward the size of t (an expanded gradient divided)."""
    shape = t.shape

    def formula(grads: Grads, node: Node) -> Grads:
        grad = _only(grads)
        expanded = grad.view_as(shape, (0, *grad.strides))
        return [like(expanded)]

    return attach(node_for(formula, t), Tensor(shape[1:], t.dtype))


def repeat_first(t: Tensor, n: int) -> Tensor:
    """repeat(n, 1, ...): n copies; backward sums them."""
    shape = t.shape
    node = node_for(lambda grads, node: (Tensor(shape, _only(grads).dtype),), t)
    return attach(node, Tensor((n, *shape), t.dtype))


def std_last(t: Tensor) -> Tensor:
    """std(-1, keepdim): rows*s; saves input and result."""

    def formula(grads: Grads, node: Node, t: Tensor, result: Tensor) -> Grads:
        grad = _only(grads)
        doubled = like(result)
        ratio = like_iterator(grad, doubled)
        is_zero = like(result, "bool")
        del is_zero, doubled
        mean = Tensor((*t.shape[:-1], 1), t.dtype)
        centred = like_iterator(t, mean)
        scaled = like(ratio)
        out = like_iterator(scaled, centred)
        del scaled, centred, mean, ratio
        return [out]

    node = node_for(formula, t)
    out = Tensor((*t.shape[:-1], 1), t.dtype)
    if node:
        node.save(t, out.detach())
    return attach(node, out)


# ------------------------------------------------------------------ writes into a view
def _slice_grad(base: Tensor, part: Tensor, *, is_copy: bool) -> Formula:
    """CopySlices (torch/csrc/autograd/functions/tensor.cpp): the gradient in the base's layout, a copy of its slice,
    and for a copy (CopyBackwards) the zeros that take the slice's place."""
    shape, strides, dtype = base.shape, base.strides, base.dtype
    small, small_strides = part.shape, iterator_strides(part.shape, [part])

    def formula(grads: Grads, node: Node) -> Grads:
        first, second = node.edges
        result = Tensor(shape, dtype, strides)
        grad_slice = Tensor(small, dtype, small_strides)
        if is_copy and first:
            current().temporaries(numel(small) * ITEM_BYTES[dtype])
        return [result if first else None, grad_slice if second else None]

    return formula


def _as_strided_grad(base: Tensor) -> Formula:
    """as_strided_backward (torch/csrc/autograd/FunctionsManual.cpp): the base's storage, filled, and a view of it."""
    shape, strides, dtype = base.shape, base.strides, base.dtype

    def formula(grads: Grads, node: Node) -> Grads:
        return [Tensor(shape, dtype, strides).view_as(shape, strides)]

    return formula


def _write(base: Tensor, part: Tensor, b: Tensor, *, is_copy: bool = False) -> tuple[Tensor, Tensor]:
    """Write b into a view of the base: return the base and the view as they stand in the graph afterwards."""
    node = node_for(_slice_grad(base, part, is_copy=is_copy), base, b)
    if node is None:
        return base, part
    written = attach(node, base.detach())
    return written, attach(node_for(_as_strided_grad(base), written), part.detach())


def add_to_view(base: Tensor, part: Tensor, b: Tensor) -> Tensor:
    """part += b where part views base: nothing; backward makes the gradient in the base's layout twice (as_strided,
    then CopySlices), and a copy of its part."""
    return _write(base, part, b)[1]


def copy_to_last(t: Tensor, b: Tensor) -> Tensor:
    """t[..., i:j].copy_(b) for a slice of b's width: nothing; backward makes the gradient in t's layout, a copy of its
    slice and, where t wants a gradient, the slice's zeros."""
    return _write(t, t.view_as(b.shape, t.strides), b, is_copy=True)[0]


def add_to_rows(t: Tensor, b: Tensor) -> Tensor:
    """t[1:] += b: an addition and, as Python spells it, a copy onto itself; nothing; backward as two writes."""
    rows = (t.shape[0] - 1, *t.shape[1:])
    part = t.view_as(rows, t.strides)
    written, part = _write(t, part, b)
    return _write(written, t.view_as(rows, t.strides), part, is_copy=True)[0]
