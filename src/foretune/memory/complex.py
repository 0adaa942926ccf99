"""Complex numbers, of which a model may make its rotary embedding (Llama 4, DeepSeek V2)."""

from foretune.memory.ops import contiguous
from foretune.memory.tape import Grads, Node, Tensor, attach, like_iterator, node_for

__all__ = ["as_complex", "as_real", "rotate"]


def as_complex(t: Tensor) -> Tensor:
    """view_as_complex, of pairs on the last dimension: nothing; backward copies a gradient that is not contiguous."""
    node = node_for(lambda grads, node: (as_real(contiguous(_only(grads))),), t)
    strides = tuple(stride // 2 for stride in t.strides[:-1])
    return attach(node, Tensor(t.shape[:-1], "c64", strides, t.storage))


def as_real(t: Tensor) -> Tensor:
    """view_as_real: nothing; backward copies a gradient that is not contiguous."""
    node = node_for(lambda grads, node: (as_complex(contiguous(_only(grads))),), t)
    strides = (*(stride * 2 for stride in t.strides), 1)
    return attach(node, Tensor((*t.shape, 2), "f32", strides, t.storage))


def rotate(t: Tensor, table: Tensor) -> Tensor:
    """t * table, complex: 8n; saves the table; backward its conjugate in a copy, and 8n."""

    def formula(grads: Grads, node: Node, table: Tensor) -> Grads:
        conjugate = Tensor(table.shape, table.dtype)
        out = like_iterator(_only(grads), conjugate)
        del conjugate
        return [out]

    node = node_for(formula, t)
    if node:
        node.save(table)
    return attach(node, like_iterator(t, table))


def _only(grads: Grads) -> Tensor:
    grad = grads[0]
    assert grad is not None
    return grad
