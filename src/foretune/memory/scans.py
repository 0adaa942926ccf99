"""Operations of state-space layers, short convolutions and the delta rule, as `ops.py` has those of attention.

The docstring of each function says what it allocates, what it saves for backward, what its backward allocates. n is
the number of elements of the result, s its item size.
"""

from collections.abc import Callable, Sequence

from foretune.memory.layout import Shape, broadcast_shape, numel
from foretune.memory.ops import bmm, clone, expand, like, lowered, narrow, reshape, to, unsqueeze, view
from foretune.memory.tape import Grads, Node, Tensor, attach, current, node_for, promote

__all__ = [
    "cat",
    "causal_conv1d",
    "conv1d",
    "cumsum",
    "matmul",
    "pad",
    "repeat_interleave",
    "set_select",
    "solve_triangular",
    "split",
    "squeeze",
    "sum_last",
    "to_contiguous",
]


# ------------------------------------------------------------------ views
def split(t: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """split or chunk of any dimension: views of one node; backward concatenates the gradients (n*s, contiguous, or
    channels last if all are)."""
    full = t.shape
    node = node_for(lambda grads, node: (_joined(full, grads),), t)
    out = [t.view_as(_with(full, dim, size), t.strides) for size in sizes]
    if node:
        node.num_outputs = len(out)
    return [attach(node, one, number) for number, one in enumerate(out)]


def _joined(shape: Shape, grads: Grads) -> Tensor:
    """cat (aten/src/ATen/native/TensorShape.cpp, compute_output_memory_format); what has no gradient is zeros."""
    is_channels_last = all(grad is not None and _is_channels_last(grad) for grad in grads)
    dtype = next(grad.dtype for grad in grads if grad is not None)
    return Tensor(shape, dtype, _channels_last(shape) if is_channels_last else None)


def squeeze(t: Tensor, dim: int) -> Tensor:
    """Allocates nothing."""
    return view(t, *_without(t.shape, dim))


def set_select(base: Tensor, dim: int, src: Tensor) -> None:
    """base[..., i, ...] = src: nothing; base takes its place in the graph. Backward copies the gradient of all of base
    (n*s), then the part that was written, and zeros in its place where base had a gradient before (CopySlices)."""
    full, strides, dtype = base.shape, base.strides, base.dtype
    shape = _without(full, dim)

    def formula(grads: Grads, node: Node) -> Grads:
        result = Tensor(full, dtype, strides)
        part = Tensor(shape, dtype)
        if not node.edges[0]:
            return [None, part]
        _zeros = Tensor(shape, dtype)
        return [result, part]

    node = node_for(formula, base, src)
    if node:
        base.needs_grad, base.edge = True, (node, 0)


def repeat_interleave(t: Tensor, n: int, dim: int) -> Tensor:
    """Each entry of a dimension n times: always a copy (n*s); backward sums over the copies."""
    wide = unsqueeze(t, dim + 1)
    wide = clone(expand(wide, _with(wide.shape, dim + 1, n)))
    return view(wide, *_with(t.shape, dim, n * t.shape[dim]))


def _with(shape: Shape, dim: int, size: int) -> Shape:
    changed = list(shape)
    changed[dim] = size
    return tuple(changed)


def _without(shape: Shape, dim: int) -> Shape:
    dim %= len(shape)
    return (*shape[:dim], *shape[dim + 1 :])


# ------------------------------------------------------------------ copies
def to_contiguous(t: Tensor, dtype: str) -> Tensor:
    """to(dtype, memory_format=contiguous_format): n*s, contiguous, or itself where the dtype is the same."""
    if t.dtype == dtype:
        return t
    back = t.dtype
    return attach(node_for(lambda grads, node: (like(_only(grads), back),), t), Tensor(t.shape, dtype))


def pad(t: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Zeros around one dimension: n*s, contiguous (channels last if t is so), or in t's layout where there is nothing
    to add; backward copies a slice of the gradient."""
    own = t.shape[dim]

    def formula(grads: Grads, node: Node) -> Grads:
        grad = _only(grads)
        return [like(grad.view_as(_with(grad.shape, dim, own), grad.strides))]

    node = node_for(formula, t)
    if not before and not after:
        return attach(node, like(t))
    shape = _with(t.shape, dim, before + own + after)
    return attach(node, Tensor(shape, t.dtype, _channels_last(shape) if _is_channels_last(t) else None))


def _is_channels_last(t: Tensor) -> bool:
    """is_channels_last_strides_2d (c10/core/MemoryFormat.h): of four dimensions, is the second the innermost?"""
    if len(t.shape) != 4 or not t.strides[1]:
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        if t.strides[dim] < least or (dim == 0 and least == t.strides[1]):
            return False
        least = t.strides[dim] * t.shape[dim]
    return True


def _channels_last(shape: Shape) -> Shape:
    _, c, h, w = shape
    return (h * w * c, 1, w * c, c)


def cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenation on any dimension: n*s, contiguous; gradients are views."""
    sizes = [t.shape[dim] for t in parts]

    def formula(grads: Grads, node: Node) -> Grads:
        grad = _only(grads)
        return [grad.view_as(_with(grad.shape, dim, size), grad.strides) for size in sizes]

    node = node_for(formula, *parts)
    return attach(node, Tensor(_with(parts[0].shape, dim, sum(sizes)), promote(*[t.dtype for t in parts])))


# ------------------------------------------------------------------ elementwise
def sum_last(t: Tensor) -> Tensor:
    """sum(-1, keepdim): rows*s and what a long sum is divided into; backward a view of the gradient."""
    shape = t.shape

    def formula(grads: Grads, node: Node) -> Grads:
        grad = _only(grads)
        return [grad.view_as(shape, (*grad.strides[:-1], 0))]

    node = node_for(formula, t)
    out = Tensor((*shape[:-1], 1), t.dtype)
    current().reduction(numel(out.shape), shape[-1], is_inner=True)
    return attach(node, out)


def cumsum(t: Tensor) -> Tensor:
    """Running sums along the last dimension: n*s, contiguous; backward the gradient flipped, its running sums, and
    those flipped (three n*s, two die at once)."""

    def formula(grads: Grads, node: Node) -> Grads:
        flipped = like(_only(grads))
        sums = Tensor(flipped.shape, flipped.dtype)
        out = like(sums)
        del sums, flipped
        return [out]

    return attach(node_for(formula, t), Tensor(t.shape, t.dtype))


# ------------------------------------------------------------------ products
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """[..., M, K] @ [..., K, N] of three and more dimensions: both are reshaped to three, which copies what strides do
    not allow; then as bmm."""
    batch = broadcast_shape(a.shape[:-2], b.shape[:-2])
    first = reshape(expand(a, (*batch, *a.shape[-2:])), (numel(batch), *a.shape[-2:]))
    second = reshape(expand(b, (*batch, *b.shape[-2:])), (numel(batch), *b.shape[-2:]))
    out = bmm(first, second)
    out = view(out, *batch, a.shape[-2], b.shape[-1])
    out.is_view = False  # _unsafe_view: it does not hold a base, so the engine may add to it in place
    del second, first
    return out


def _column_major(shape: Shape, dtype: str) -> Tensor:
    """What a linear solver returns."""
    out = Tensor((*shape[:-2], shape[-1], shape[-2]), dtype)
    strides = (*out.strides[:-2], out.strides[-1], out.strides[-2])
    return Tensor(shape, dtype, strides, out.storage)


def solve_triangular(a: Tensor, b: Tensor) -> Tensor:
    """n*s, column-major; saves a and the result; backward: b's gradient (n*s), and for a's their product, negated, and
    its triangle (two die at once). What the solver takes as a workspace is not counted."""

    def formula(grads: Grads, node: Node, a: Tensor, result: Tensor) -> Grads:
        b_grad = _column_major(result.shape, result.dtype)
        if not node.edges[0]:
            return [None, b_grad]
        swapped = result.view_as(*_swapped(result))
        a_grad = like(matmul(b_grad, swapped))
        a_grad = like(a_grad)
        return [a_grad, b_grad if node.edges[1] else None]

    node = node_for(formula, a, b)
    if node:
        node.save(a)
    out = _column_major(b.shape, b.dtype)
    if node:
        node.save(out.detach())
    return attach(node, out)


def _swapped(t: Tensor) -> tuple[Shape, Shape]:
    """Shape and strides with the last two dimensions swapped."""
    return (*t.shape[:-2], t.shape[-1], t.shape[-2]), (*t.strides[:-2], t.strides[-1], t.strides[-2])


# ------------------------------------------------------------------ convolution
def conv1d(t: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """Depthwise convolution of [B, C, S]: n*s, contiguous; saves input and weight; backward: the input's gradient, the
    weight's, the bias', each contiguous. What a convolution library takes as a workspace is not counted."""
    tape = current()
    if tape.autocast is not None:
        weight, bias = lowered(weight), None if bias is None else lowered(bias)
        t = lowered(t)
        autocast, tape.autocast = tape.autocast, None
        out = conv1d(t, weight, bias, padding)
        tape.autocast = autocast
        return out
    kernel = weight.shape[-1]

    def formula(grads: Grads, node: Node, *saved: Tensor) -> Grads:
        (t, weight), wanted = saved, node.edges
        out: Grads = [None, None, None]
        if wanted[0]:
            out[0] = Tensor(t.shape, t.dtype)
        if wanted[1]:
            out[1] = Tensor(weight.shape, weight.dtype)
        if wanted[2]:
            out[2] = Tensor((weight.shape[0],), weight.dtype)
        return out

    node = node_for(formula, t, weight, bias)
    if node:
        node.save(t, weight)
    b, c, s = t.shape
    return attach(node, Tensor((b, c, s + 2 * padding - kernel + 1), t.dtype))


def causal_conv1d(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, activation: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """causal_conv1d_fn in torch: padded on both sides, the surplus sliced off (n*s twice with an activation)."""
    seq_len = hidden_states.shape[-1]
    padding = weight.shape[-1] - 1
    out = conv1d(to(hidden_states, weight.dtype), unsqueeze(weight, 1), bias, padding)
    out = narrow(out, 2, seq_len)
    if activation is not None:
        out = activation(out)
    return to(out, hidden_states.dtype)


def _only(grads: Grads) -> Tensor:
    grad = grads[0]
    assert grad is not None
    return grad
