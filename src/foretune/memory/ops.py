"""The operations: what each allocates, what it saves for backward, what its backward allocates.

The docstring of each function is its row in the operations table of the documentation. n is the number of elements
of the result, s its item size. Saved tensors stand in autograd's order (by argument name, inputs before results),
and so do the gradients that one node computes (`mat2` before `self`, `other` before `self`).
"""

from collections.abc import Callable, Sequence

from foretune.memory import kernels
from foretune.memory.attention import cudnn_attention, efficient_attention, flash_attention
from foretune.memory.layout import Shape, broadcast_shape, is_contiguous, iterator_strides, numel, view_strides
from foretune.memory.tape import (
    FLOATS,
    ITEM_BYTES,
    Formula,
    Grads,
    Node,
    Tensor,
    attach,
    current,
    like_iterator,
    node_for,
    promote,
)

__all__ = [
    "add",
    "add_in_place",
    "add_scalar",
    "addmm",
    "bmm",
    "cat_copy",
    "cat_last",
    "clone",
    "contiguous",
    "count_all",
    "cross_entropy",
    "cudnn_attention",
    "dropout",
    "efficient_attention",
    "embedding",
    "expand",
    "flash_attention",
    "fold_mm",
    "frozen_mm",
    "gather_one",
    "gelu",
    "layer_norm",
    "like",
    "linear",
    "lowered",
    "matmul4",
    "mean_last",
    "mm",
    "mul",
    "narrow",
    "pad_last",
    "product",
    "product_into",
    "relu",
    "repeat_heads",
    "repeat_interleave",
    "reshape",
    "rsqrt",
    "scale",
    "scale_in_place",
    "silu",
    "softmax",
    "split_last",
    "split_rows",
    "square",
    "sum_all",
    "tanh",
    "to",
    "transpose",
    "transposed",
    "unsqueeze",
    "view",
    "widened",
]


def like(t: Tensor, dtype: str | None = None) -> Tensor:
    """Allocate a result with t's shape in the layout an elementwise kernel gives it."""
    return Tensor(t.shape, dtype or t.dtype, iterator_strides(t.shape, [t]))


# ------------------------------------------------------------------ views
def _identity_grad(grads: Grads, node: Node) -> Grads:
    return [grads[0]]


def _reshape_grad(shape: Shape) -> Formula:
    return lambda grads, node: (reshape(grads[0], shape),)


def _view(t: Tensor, shape: Shape, strides: Shape, formula: Formula | None = None) -> Tensor:
    if current().is_grad_enabled and t.needs_grad:
        return attach(node_for(formula or _reshape_grad(t.shape), t), t.view_as(shape, strides))
    return t.view_as(shape, strides)


def view(t: Tensor, *shape: int) -> Tensor:
    """Allocates nothing; backward reshapes the gradient: a copy if its strides forbid a view."""
    if -1 in shape:
        known = -numel(shape)
        shape = tuple(numel(t.shape) // known if s == -1 else s for s in shape)
    strides = t.strides if shape == t.shape else view_strides(t.shape, t.strides, shape)
    assert strides is not None, f"no view of {t.shape} {t.strides} as {shape}"
    return _view(t, shape, strides)


def reshape(t: Tensor, shape: Shape) -> Tensor:
    """A view where strides allow, otherwise a contiguous copy (n*s) and its view."""
    strides = view_strides(t.shape, t.strides, shape)
    if strides is not None:
        return _view(t, shape, strides)
    out = view(clone(t), *shape)
    out.is_view = False  # _unsafe_view: it does not hold a base, so the engine may add to it in place
    return out


def transpose(t: Tensor, a: int, b: int) -> Tensor:
    """Allocates nothing, in backward neither."""

    def swap(x: Shape) -> Shape:
        y = list(x)
        y[a], y[b] = y[b], y[a]
        return tuple(y)

    return _view(t, swap(t.shape), swap(t.strides), lambda grads, node: (transpose(grads[0], a, b),))


def transposed(weight: Tensor) -> Tensor:
    """weight.t(): allocates nothing."""
    return transpose(weight, 0, 1)


def unsqueeze(t: Tensor, dim: int) -> Tensor:
    """Allocates nothing."""
    stride = t.shape[dim] * t.strides[dim] if dim < len(t.shape) else 1
    return _view(t, (*t.shape[:dim], 1, *t.shape[dim:]), (*t.strides[:dim], stride, *t.strides[dim:]))


def expand(t: Tensor, shape: Shape) -> Tensor:
    """Allocates nothing; backward sums over the expanded dimensions into a tensor of t's shape."""
    gap = len(shape) - len(t.shape)
    inner = (
        0 if size == 1 and new != 1 else stride
        for size, new, stride in zip(t.shape, shape[gap:], t.strides, strict=True)
    )
    strides = (0,) * gap + tuple(inner)
    if shape == t.shape:
        return _view(t, shape, strides, _identity_grad)
    small, dtype = t.shape, t.dtype
    return _view(t, shape, strides, lambda grads, node: (Tensor(small, dtype),))


def narrow(t: Tensor, dim: int, length: int) -> Tensor:
    """A slice of one dimension: a view; backward fills a tensor of t's shape with zeros and the gradient. A slice of
    everything is an alias, and nothing in backward."""
    if length == t.shape[dim]:
        return _view(t, t.shape, t.strides, _identity_grad)
    full, dtype = t.shape, t.dtype
    return _view(t, _resized(t.shape, dim, length), t.strides, lambda grads, node: (Tensor(full, dtype),))


def split_last(t: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """split or chunk of the last dimension: views of one node; backward concatenates the gradients (n*s)."""
    full, dtype = t.shape, t.dtype
    node = node_for(lambda grads, node: (Tensor(full, dtype),), t)
    out = [t.view_as(_resized(t.shape, -1, width), t.strides) for width in widths]
    if node:
        node.num_outputs = len(out)
    return [attach(node, part, number) for number, part in enumerate(out)]


def split_rows(t: Tensor, rows: int) -> list[Tensor]:
    """split of the first dimension: views of one node; backward concatenates the gradients (n*s)."""
    full, dtype = t.shape, t.dtype
    node = node_for(lambda grads, node: (Tensor(full, dtype),), t)
    sizes = [min(rows, full[0] - start) for start in range(0, full[0], rows)]
    parts = [t.view_as((size, *full[1:]), t.strides) for size in sizes]
    if node:
        node.num_outputs = len(parts)
    return [attach(node, part, number) for number, part in enumerate(parts)]


def gather_one(t: Tensor, dim: int) -> Tensor:
    """t[..., [i], :], an index on the host: a copy (n*s); backward fills a tensor of t's shape."""
    full, dtype = t.shape, t.dtype
    node = node_for(lambda grads, node: (Tensor(full, dtype),), t)
    return attach(node, Tensor(_resized(full, dim, 1), dtype))


def _resized(shape: Shape, dim: int, length: int) -> Shape:
    resized = list(shape)
    resized[dim] = length
    return tuple(resized)


def clone(t: Tensor) -> Tensor:
    """n*s, contiguous."""
    return attach(node_for(_identity_grad, t), Tensor(t.shape, t.dtype))


def pad_last(t: Tensor, width: int) -> Tensor:
    """Zeros appended to the last dimension: n*s, contiguous; backward copies a slice of the gradient."""

    def formula(grads: Grads, node: Node) -> Grads:
        grad = _only(grads)
        return [like(grad.view_as(_resized(grad.shape, -1, own), grad.strides))]

    own = t.shape[-1]
    return attach(node_for(formula, t), Tensor(_resized(t.shape, -1, width), t.dtype))


def contiguous(t: Tensor) -> Tensor:
    """Itself, or a copy (n*s)."""
    return t if is_contiguous(t.shape, t.strides) else clone(t)


def repeat_heads(t: Tensor, n: int) -> Tensor:
    """[B, K, S, D] to [B, K*n, S, D] by expand and reshape: a copy (n*s), unless n is 1."""
    if n == 1:
        return t
    b, k, s, d = t.shape
    five = unsqueeze(t, 2)
    return reshape(expand(five, (b, k, n, s, d)), (b, k * n, s, d))


def repeat_interleave(t: Tensor, n: int) -> Tensor:
    """[B, K, S, D] to [B, K*n, S, D]: always a copy (n*s)."""
    b, k, s, d = t.shape
    five = unsqueeze(t, 2)
    return view(clone(expand(five, (b, k, n, s, d))), b, k * n, s, d)


# ------------------------------------------------------------------ elementwise
def to(t: Tensor, dtype: str) -> Tensor:
    """n*s in t's layout, or itself; backward casts the gradient back (n * old item size)."""
    if t.dtype == dtype:
        return t
    back = t.dtype
    return attach(node_for(lambda grads, node: (like(grads[0], back),), t), like(t, dtype))


def lowered(t: Tensor) -> Tensor:
    """A product's operand in autocast's precision (cached_cast): n*s unless it has it; a trained fp32 leaf is cast once
    for the whole block."""
    autocast = current().autocast
    if autocast is None or t.dtype == autocast.dtype or t.dtype not in FLOATS:
        return t
    if t.dtype == "f32" and t.needs_grad and type(t.edge) is not tuple:
        return autocast.kept(t, to)
    return to(t, autocast.dtype)


def widened(t: Tensor) -> Tensor:
    """An operand in fp32 where autocast asks for range (norms, powers, losses): n*4, or itself."""
    return t if current().autocast is None else to(t, "f32")


def _in_lower_precision(operation: "Op", *operands: Tensor | None) -> Tensor:
    """Cast the operands from the last to the first, and run with autocast out of the way."""
    tape = current()
    autocast, casts = tape.autocast, [None if t is None else lowered(t) for t in operands[::-1]][::-1]
    tape.autocast = None
    try:
        return operation(*casts)
    finally:
        tape.autocast = autocast


def add(a: Tensor, b: Tensor) -> Tensor:
    """n*s in the promoted dtype; backward passes the gradient on (the engine sums over broadcast dimensions)."""
    return attach(node_for(lambda grads, node: (grads[0], grads[0]), a, b), like_iterator(a, b))


def add_in_place(a: Tensor, b: Tensor) -> Tensor:
    """Nothing; a keeps its storage."""
    node = node_for(lambda grads, node: (grads[0], grads[0]), a, b)
    return attach(node, a.detach()) if node else a


def add_scalar(t: Tensor) -> Tensor:
    """t + number: n*s; backward passes the gradient on."""
    return attach(node_for(_identity_grad, t), like(t))


def scale(t: Tensor) -> Tensor:
    """t * number, t / number, -t: n*s; backward n*s."""
    return attach(node_for(lambda grads, node: (like(grads[0]),), t), like(t))


def scale_in_place(t: Tensor) -> Tensor:
    """t *= number: nothing; backward n*s."""
    return attach(node_for(lambda grads, node: (like(grads[0]),), t), t.detach())


def _mul_grad(grads: Grads, node: Node, *saved: Tensor) -> Grads:
    grad, held, (first, second) = _only(grads), list(saved), node.edges
    other = held.pop(0) if first else None  # saved because `self` wants a gradient
    other_grad = like_iterator(grad, held[0]) if second else None
    self_grad = like_iterator(grad, other) if other is not None else None
    return [self_grad, other_grad]


def mul(a: Tensor, b: Tensor) -> Tensor:
    """n*s; saves b if a wants a gradient, a if b does; backward n*s for each (then the sum to a broadcast shape)."""
    node = node_for(_mul_grad, a, b)
    if node:
        node.save(b if a.needs_grad else None, a if b.needs_grad else None)
    return attach(node, like_iterator(a, b))


def _square_grad(grads: Grads, node: Node, t: Tensor) -> Grads:
    power = like(t)
    scaled = like(power)
    out = like_iterator(_only(grads), scaled)
    del scaled, power
    return [out]


def square(t: Tensor) -> Tensor:
    """pow(2): n*s; saves the input; backward makes power, scaled, product (three n*s, two die at once)."""
    t = widened(t)
    node = node_for(_square_grad, t)
    if node:
        node.save(t)
    return attach(node, like(t))


def _rsqrt_grad(grads: Grads, node: Node, result: Tensor) -> Grads:
    power = like(result)
    scaled = like(_only(grads))
    out = like_iterator(scaled, power)
    del scaled, power
    return [out]


def rsqrt(t: Tensor) -> Tensor:
    """n*s; saves the result; backward makes power, scaled, product."""
    t = widened(t)
    node = node_for(_rsqrt_grad, t)
    out = like(t)
    if node:
        node.save(out.detach())
    return attach(node, out)


def mean_last(t: Tensor) -> Tensor:
    """mean(-1, keepdim): rows*s; backward n*s (an expanded gradient divided)."""
    shape = t.shape
    node = node_for(lambda grads, node: (Tensor(shape, _only(grads).dtype),), t)
    return attach(node, Tensor((*t.shape[:-1], 1), t.dtype))


def sum_all(t: Tensor) -> Tensor:
    """sum(): a scalar, and partial sums of a long one; backward passes an expanded gradient on."""
    t = widened(t)
    shape = t.shape
    node = node_for(lambda grads, node: (expand(_only(grads), shape),), t)
    out = Tensor((), t.dtype)
    current().reduction(1, numel(shape), is_inner=True)
    return attach(node, out)


def count_all(t: Tensor) -> Tensor:
    """sum() of truth values: 8 bytes, from a copy as int64 (8n, and partial sums of a long one)."""
    out = Tensor((), "i64")
    device = current().rules.multiprocessors
    partial = kernels.reduction_workspaces(1, numel(t.shape), is_inner=True, device=device)
    current().temporaries(numel(t.shape) * ITEM_BYTES["i64"], *partial)
    return out


def cat_last(parts: Sequence[Tensor]) -> Tensor:
    """Concatenation on the last dimension: n*s, contiguous; gradients are views."""
    widths = [t.shape[-1] for t in parts]

    def formula(grads: Grads, node: Node) -> Grads:
        grad = _only(grads)
        return [grad.view_as((*grad.shape[:-1], width), grad.strides) for width in widths]

    node = node_for(formula, *parts)
    return attach(node, Tensor((*parts[0].shape[:-1], sum(widths)), promote(*[t.dtype for t in parts])))


def cat_copy(t: Tensor) -> Tensor:
    """cat of an empty cache with t: n*s, contiguous."""
    return attach(node_for(_identity_grad, t), Tensor(t.shape, t.dtype))


def _saves_input(t: Tensor) -> Tensor:
    node = node_for(lambda grads, node, x: (like_iterator(grads[0], x),), t)
    if node:
        node.save(t)
    return attach(node, like(t))


def silu(t: Tensor) -> Tensor:
    """n*s; saves the input; backward n*s."""
    return _saves_input(t)


def gelu(t: Tensor) -> Tensor:
    """gelu, exact or tanh, as one kernel: n*s; saves the input; backward n*s."""
    return _saves_input(t)


def _saves_result(t: Tensor) -> Tensor:
    node = node_for(lambda grads, node, result: (like_iterator(grads[0], result),), t)
    out = like(t)
    if node:
        node.save(out.detach())
    return attach(node, out)


def tanh(t: Tensor) -> Tensor:
    """n*s; saves the result; backward n*s."""
    return _saves_result(t)


def relu(t: Tensor) -> Tensor:
    """n*s; saves the result; backward n*s."""
    return _saves_result(t)


def dropout(t: Tensor, probability: float) -> Tensor:
    """native_dropout on CUDA: n*s and a mask of n bytes, which is saved; backward n*s. Nothing at probability 0, nor in
    evaluation."""
    if not probability or not current().is_training:
        return t
    node = node_for(lambda grads, node, mask: (like_iterator(grads[0]),), t)
    mask = like(t, "bool")
    out = like(t)
    if node:
        node.save(mask)
    return attach(node, out)


def softmax(t: Tensor, dtype: str | None = None, *, is_one_kernel: bool = False) -> Tensor:
    """n*s, contiguous; saves the result; backward n*s and, on CUDA, first n*s for grad * output."""
    t = t if dtype else widened(t)
    back = t.dtype if is_one_kernel else None

    def formula(grads: Grads, node: Node, result: Tensor) -> Grads:
        out = Tensor(result.shape, back or result.dtype)
        if current().rules.softmax_backward_temporary:
            current().temporaries(numel(result.shape) * ITEM_BYTES[result.dtype])
        return [out]

    node = node_for(formula, t)
    out = Tensor(t.shape, dtype or t.dtype)
    if node:
        node.save(out.detach())
    return attach(node, out)


# ------------------------------------------------------------------ norms
def _layer_norm_grad(grads: Grads, node: Node, *saved: Tensor) -> Grads:
    grad, (first, second, third) = _only(grads), node.edges
    t = saved[max(len(saved) - 4, 0)]
    x = contiguous(t)
    out: Grads = [None, None, None]
    if first:
        out[0] = Tensor(t.shape, t.dtype)
    for position, is_wanted in ((1, second), (2, third)):
        if is_wanted:
            out[position] = Tensor(t.shape[-1:], grad.dtype)
    if not is_contiguous(grad.shape, grad.strides):
        current().temporaries(numel(grad.shape) * ITEM_BYTES[grad.dtype])
    del x
    return out


def layer_norm(t: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """native_layer_norm: n*s, and mean and rstd (fp32, one a row); saves input, weight, mean, rstd; backward n*s.

    An input or a gradient that is not contiguous is copied for the kernel (ATen/native/cuda/layer_norm_kernel.cu).
    """
    t = widened(t)
    weight, bias = (None if p is None else widened(p) for p in (weight, bias))
    node = node_for(_layer_norm_grad, t, weight, bias)
    x = contiguous(t.detach())
    out = Tensor(x.shape, x.dtype)
    mean, rstd = Tensor((*t.shape[:-1], 1), "f32"), Tensor((*t.shape[:-1], 1), "f32")
    del x
    if node:
        node.save(bias, t, weight, mean, rstd)
    del mean, rstd
    return attach(node, out)


# ------------------------------------------------------------------ matrix products
def product(shape: Shape, dtype: str) -> Tensor:
    """The result of a matrix product; the first one on a thread brings cuBLAS's workspace."""
    out = Tensor(shape, dtype)
    current().workspace("cublas", current().rules.cublas_bytes)
    return out


def product_into(out: Tensor) -> Tensor:
    """A matrix product written over a tensor: nothing but the workspace."""
    current().workspace("cublas", current().rules.cublas_bytes)
    return out


def _transposed_product(shape: Shape, dtype: str) -> Tensor:
    """The gradient of a transposed weight, laid out as the weight is."""
    out = product(shape[::-1], dtype)
    return out.view_as(shape, out.strides[::-1])


def _weight_gradient(shape: Shape, dtype: str, weight_strides: Shape) -> Tensor:
    """mm_mat2_backward: column-major if mat2 is, else row-major."""
    if weight_strides[0] == 1 and weight_strides[1] == shape[0]:
        return _transposed_product(shape, dtype)
    return product(shape, dtype)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """rows*out*s (+ workspace); saves b if a wants a gradient, a if b does; backward: b's gradient first, in b's
    layout, then a's."""
    if current().autocast is not None:
        return _in_lower_precision(mm, a, b)
    layout = b.strides

    def formula(grads: Grads, node: Node, *saved: Tensor) -> Grads:
        grad, held, (first, second) = _only(grads), list(saved), node.edges
        mat2 = held.pop(0) if first else None
        shape = (held[0].shape[1], grad.shape[1]) if second else ()
        second_grad = _weight_gradient(shape, grad.dtype, layout) if second else None
        first_grad = product((grad.shape[0], mat2.shape[0]), grad.dtype) if mat2 is not None else None
        return [first_grad, second_grad]

    node = node_for(formula, a, b)
    if node:
        node.save(b if a.needs_grad else None, a if b.needs_grad else None)
    return attach(node, product((a.shape[0], b.shape[1]), a.dtype))


def addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """As mm, and cublasLt's workspace once a thread; backward: mat1's, mat2's, then the bias' (the engine's sum)."""
    if current().autocast is not None:
        return _in_lower_precision(addmm, bias, a, b)
    layout = b.strides

    def formula(grads: Grads, node: Node, *saved: Tensor) -> Grads:
        grad, held, (for_bias, first, second) = _only(grads), list(saved), node.edges
        mat1 = held.pop(0) if second else None
        first_grad = product((grad.shape[0], held[0].shape[0]), grad.dtype) if first else None
        second_grad = None
        if mat1 is not None:
            second_grad = _weight_gradient((mat1.shape[1], grad.shape[1]), grad.dtype, layout)
        return [grad if for_bias else None, first_grad, second_grad]

    node = node_for(formula, bias, a, b)
    if node:
        node.save(a if b.needs_grad else None, b if a.needs_grad else None)
    out = Tensor((a.shape[0], b.shape[1]), a.dtype)
    current().workspace("cublaslt", current().rules.cublaslt_bytes)
    current().workspace("cublas", current().rules.cublas_bytes)
    return attach(node, out)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T (+ bias); leading dimensions are folded by reshape: a copy where x is not contiguous. By a frozen
    weight what cannot be folded is a batch of products, without a copy (LinearAlgebra.cpp, should_fold)."""
    if current().autocast is not None:
        return _in_lower_precision(linear, x, weight, bias)
    rows = x.shape[:-1]
    folded = (numel(rows), x.shape[-1])
    if len(rows) == 2 and not weight.needs_grad and view_strides(x.shape, x.strides, folded) is None:
        w = transposed(weight)
        out = bmm(x, expand(unsqueeze(w, 0), (rows[0], *w.shape)))
        return out if bias is None else add_in_place(out, bias)
    if bias is not None:
        flat = reshape(x, (numel(rows), x.shape[-1]))
        out = addmm(bias, flat, transposed(weight))
        del flat
        return view(out, *rows, weight.shape[0])
    if len(rows) == 1:
        return mm(x, transposed(weight))
    return fold_mm(x, transposed(weight), rows)


def fold_mm(x: Tensor, w: Tensor, rows: Shape) -> Tensor:
    """x @ w with x's leading dimensions folded."""
    if current().autocast is not None:
        return _in_lower_precision(lambda a, b: fold_mm(a, b, rows), x, w)
    flat = reshape(x, (numel(rows), x.shape[-1]))
    out = mm(flat, w)
    del flat
    out = view(out, *rows, w.shape[1])
    out.is_view = False  # _unsafe_view: it does not hold a base, so the engine may add to it in place
    return out


def frozen_mm(x: Tensor, w: Tensor) -> Tensor:
    """x @ w where nothing wants a gradient: what cannot be folded without a copy becomes a batched product
    (should_fold in aten/src/ATen/native/LinearAlgebra.cpp)."""
    rows = x.shape[:-1]
    if view_strides(x.shape, x.strides, (numel(rows), x.shape[-1])) is None:
        return product((*rows, w.shape[1]), x.dtype)
    return fold_mm(x, w, rows)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """[N, M, K] @ [N, K, P]: n*s; saves and computes as mm does."""
    if current().autocast is not None:
        return _in_lower_precision(bmm, a, b)

    def formula(grads: Grads, node: Node, *saved: Tensor) -> Grads:
        grad, held, (first, second) = _only(grads), list(saved), node.edges
        mat2 = held.pop(0) if first else None
        second_grad = product((grad.shape[0], held[0].shape[2], grad.shape[2]), grad.dtype) if second else None
        first_grad = None
        if mat2 is not None:
            first_grad = product((grad.shape[0], grad.shape[1], mat2.shape[1]), grad.dtype)
        return [first_grad, second_grad]

    node = node_for(formula, a, b)
    if node:
        node.save(b if a.needs_grad else None, a if b.needs_grad else None)
    return attach(node, product((a.shape[0], a.shape[1], b.shape[2]), a.dtype))


def matmul4(a: Tensor, b: Tensor) -> Tensor:
    """[B, H, M, K] @ [B, H, K, N]: both are reshaped to three dimensions, which copies what strides do not allow."""
    if current().autocast is not None:
        return _in_lower_precision(matmul4, a, b)
    batch = broadcast_shape(a.shape[:2], b.shape[:2])
    first = reshape(expand(a, (*batch, *a.shape[2:])), (numel(batch), *a.shape[2:]))
    second = reshape(expand(b, (*batch, *b.shape[2:])), (numel(batch), *b.shape[2:]))
    out = bmm(first, second)
    out = view(out, *batch, a.shape[2], b.shape[3])
    del second, first
    return out


# ------------------------------------------------------------------ ends
def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """T*h*s; saves the ids; backward V*h*s and, for many ids, what sorting them takes."""
    n, table = numel(ids.shape), weight.shape

    def formula(grads: Grads, node: Node, *saved: Tensor) -> Grads:
        out = Tensor(table, _only(grads).dtype)
        current().temporaries(*kernels.embedding_backward_workspaces(n))
        return [out]

    node = node_for(formula, weight)
    if node:
        node.save(ids)
    return attach(node, Tensor((*ids.shape, weight.shape[1]), weight.dtype))


def _log_softmax(t: Tensor) -> Tensor:
    node = node_for(lambda grads, node, result: (Tensor(result.shape, result.dtype),), t)
    out = Tensor(t.shape, t.dtype)
    if node:
        node.save(out.detach())
    return attach(node, out)


def _nll_loss(t: Tensor, target: Tensor) -> Tensor:
    node = node_for(lambda grads, node, logs, labels, total: (Tensor(logs.shape, logs.dtype),), t)
    if node:
        node.save(t, target)
    out, total = Tensor((), t.dtype), Tensor((), t.dtype)
    if node:
        node.save(total)
    del total
    return attach(node, out)


def cross_entropy(source: Tensor, target: Tensor) -> Tensor:
    """log_softmax (n*s, saved) and nll_loss (two scalars); backward n*s for each, so 3 n*s at its peak."""
    source = widened(source)
    loss = _nll_loss(_log_softmax(source), target)
    return loss  # noqa: RET504 - the local outlives the call's temporaries, as in torch


def _only(grads: Grads) -> Tensor:
    grad = grads[0]
    assert grad is not None
    return grad


Op = Callable[..., Tensor]
