"""The fused attention kernels: rows of the operations table (`ops` hands them on)."""

from foretune.memory import kernels
from foretune.memory.layout import Shape, iterator_strides
from foretune.memory.tape import ITEM_BYTES, Grads, Node, Tensor, attach, current, like_iterator, node_for

__all__ = ["cudnn_attention", "efficient_attention", "flash_attention"]


class _Layout:
    """What a gradient copies from its tensor without holding it."""

    __slots__ = ("dtype", "shape", "strides")

    def __init__(self, t: Tensor) -> None:
        self.dtype, self.shape, self.strides = t.dtype, t.shape, iterator_strides(t.shape, [t])

    def allocate(self) -> Tensor:
        return Tensor(self.shape, self.dtype, self.strides)


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """out in q's layout, logsumexp 4BHS, 16, 8; saves k, q, v, logsumexp, out, seeds; backward: dq, dk, dv in their
    inputs' layouts, then softmax_d, the fp32 dq accumulator and, under GQA, dk and dv for every query head."""
    b, h, s, d = q.shape
    size, heads = ITEM_BYTES[q.dtype], k.shape[1]
    layouts = [_Layout(t) for t in (q, k, v)]

    def formula(grads: Grads, node: Node, *saved: Tensor) -> Grads:
        out: Grads = [layout.allocate() for layout in layouts]
        current().temporaries(*kernels.flash_backward_workspaces(b, h, heads, s, d, size))
        return out

    node = node_for(formula, q, k, v)
    if node:
        node.save(k, q, v)
    out = like_iterator(q)
    extra = [Tensor((b, h, s), "f32"), Tensor((2,), "i64"), Tensor((1,), "i64")]
    if node:
        node.save(extra[0], out.detach(), extra[1], extra[2])
    while extra:
        extra.pop()
    return attach(node, out)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Two seeds of 8, out in q's layout, logsumexp 4BHS; saves all of them, q, k and v; backward: dq, dk, dv in their
    inputs' layouts, then one workspace."""
    b, h, s, d = q.shape
    size, heads = ITEM_BYTES[q.dtype], k.shape[1]
    layouts = [_Layout(t) for t in (q, k, v)]

    def formula(grads: Grads, node: Node, *saved: Tensor) -> Grads:
        out: Grads = [layout.allocate() for layout in layouts]
        current().temporaries(kernels.cudnn_backward_workspace(b, h, heads, s, d, size))
        return out

    node = node_for(formula, q, k, v)
    if node:
        node.save(mask, k, q, v)
    seeds = [Tensor((), "i64"), Tensor((), "i64")]
    out = like_iterator(q)
    logsumexp = Tensor((b, h, s, 1), "f32")
    current().temporaries(kernels.CUDNN_FORWARD_WORKSPACE)
    if node:
        node.save(logsumexp, out.detach(), *reversed(seeds))
    del logsumexp
    while seeds:
        seeds.pop(0)
    return attach(node, out)


def efficient_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """out as [B, S, H, width of v], logsumexp 4BH*ceil32(S), 8, 8; saves k, q, v, logsumexp, out, seeds (and the mask);
    backward: dq, dk, dv as [B, S, H, D] too, then delta and the fp32 accumulator of kernel_backward.h."""
    b, h, s, d = q.shape
    is_half = q.dtype != "f32"
    shapes, dtype = [t.shape for t in (q, k, v)], q.dtype

    def formula(grads: Grads, node: Node, *saved: Tensor) -> Grads:
        out: Grads = [_by_position(shape, dtype) for shape in shapes]
        current().temporaries(*kernels.efficient_backward_workspaces(b, h, s, d, is_half=is_half))
        return out

    node = node_for(formula, q, k, v)
    if node:
        node.save(mask, k, q, v)
    out = _by_position((b, h, s, v.shape[-1]), q.dtype)
    rows = kernels.efficient_logsumexp_rows(s) if node else 0
    extra = [Tensor((b, h, rows), "f32"), Tensor((), "i64"), Tensor((), "i64")]
    if node:
        node.save(extra[0], out.detach(), extra[2], extra[1])
    while extra:
        extra.pop()
    return attach(node, out)


def _by_position(shape: Shape, dtype: str) -> Tensor:
    """[B, H, S, D] that lies as [B, S, H, D]."""
    _, h, s, d = shape
    return Tensor(shape, dtype, (s * h * d, d, h * d, 1))
