"""Operations that litgpt's own model code needs beside the common ones: the padding of adapters' products,
convolutions that stand for matrix products, losses that are not reduced.
"""

from collections.abc import Sequence

from foretune.memory.layout import numel
from foretune.memory.ops import clone, contiguous, reshape
from foretune.memory.scans import cat
from foretune.memory.tape import Grads, Node, Tensor, attach, current, node_for

__all__ = [
    "convolve",
    "cross_entropies",
    "flat",
    "index_copy",
    "index_copy_in_place",
    "mean_of",
]


def _only(grads: Grads) -> Tensor:
    grad = grads[0]
    assert grad is not None
    return grad


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """conv1d of width 1, [B, C, T] by [out, r, 1]: a contiguous copy of x where it is not, and the result; saves x and
    weight; backward makes gradient and x contiguous again, then x's gradient and the weight's. Leaves out: what cuDNN
    takes for itself while it runs (aten/src/ATen/native/Convolution.cpp)."""

    def formula(grads: Grads, node: Node, *saved: Tensor) -> Grads:
        x, weight = saved
        grad = contiguous(_only(grads))
        copy = contiguous(x)
        first, second = node.edges
        out: Grads = [None, None]
        out[0] = Tensor(x.shape, grad.dtype) if first else None
        out[1] = Tensor(weight.shape, grad.dtype) if second else None
        del copy, grad
        return out

    node = node_for(formula, x, weight)
    if node:
        node.save(x, weight)
    copy = contiguous(x)
    out = Tensor((x.shape[0], weight.shape[0], x.shape[2]), x.dtype)
    del copy
    return attach(node, out)


def _selected(grads: Grads, node: Node, index: Tensor, source: Tensor) -> Grads:
    """grad.index_select(dim, index).expand_as(source), for which the source is saved (derivatives.yaml)."""
    return [Tensor(source.shape, _only(grads).dtype)]


def index_copy(result: Tensor, index: Tensor, source: Tensor) -> Tensor:
    """result.index_copy(-1, index, source): a copy of the result; saves index and source; backward selects (source's
    n*s)."""
    node = node_for(_selected, source)
    if node:
        node.save(index, source)
    return attach(node, clone(result.detach()))


def index_copy_in_place(result: Tensor, index: Tensor, source: Tensor) -> Tensor:
    """result.index_copy_(-1, index, source): nothing; saves index and source; backward selects (source's n*s)."""
    node = node_for(_selected, source)
    if node:
        node.save(index, source)
    return attach(node, result.detach())


def cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """cross_entropy(reduction="none"): log_softmax (n*s, saved) and one loss a row; backward n*s for each."""
    logs = Tensor(logits.shape, logits.dtype)
    node = node_for(lambda grads, node, result: (Tensor(result.shape, result.dtype),), logits)
    if node:
        node.save(logs.detach())
    logs = attach(node, logs)
    node = node_for(lambda grads, node, logs, targets, total: (Tensor(logs.shape, logs.dtype),), logs)
    if node:
        node.save(logs, targets)
    out, total = Tensor(logits.shape[:1], logits.dtype), Tensor((), logits.dtype)
    if node:
        node.save(total)
    del total, logs
    return attach(node, out)


def mean_of(losses: Sequence[Tensor], targets: Tensor) -> Tensor:
    """torch.cat(losses).sum() / the number of targets that count."""
    counted = _count(Tensor(targets.shape, "bool"))
    joined = cat(losses, 0)
    shape, dtype = joined.shape, joined.dtype

    def expanded(grads: Grads, node: Node) -> Grads:
        grad = _only(grads)
        return [grad.view_as(shape, (0,) * len(shape))]

    total = attach(node_for(expanded, joined), Tensor((), dtype))
    del joined
    one = Tensor((), "i64")
    divisor = Tensor((), "i64")
    del one, counted
    node = node_for(lambda grads, node, divisor: (Tensor((), dtype),), total)
    if node:
        node.save(divisor)
    return attach(node, Tensor((), dtype))


def _count(is_counted: Tensor) -> Tensor:
    """sum of truth values, as int64 from a copy."""
    out = Tensor((), "i64")
    current().temporaries(8 * numel(is_counted.shape))
    return out


def flat(t: Tensor) -> Tensor:
    """t.reshape(-1, t.shape[-1])."""
    return reshape(t, (numel(t.shape[:-1]), t.shape[-1]))
