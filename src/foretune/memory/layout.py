"""Shapes and strides as ATen computes them: contiguity, views, and the layout of elementwise results.

Whether `contiguous` and `reshape` copy or view decides what is allocated, and it differs between a batch of one and
a larger one, so the tape carries strides.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

__all__ = [
    "Shape",
    "broadcast_shape",
    "contiguous_strides",
    "is_contiguous",
    "iterator_strides",
    "numel",
    "view_strides",
]

Shape = tuple[int, ...]
_cached = lru_cache(maxsize=1 << 12)  # a program asks for few distinct shapes, each thousands of times


class Strided(Protocol):
    """What has a shape and strides."""

    shape: Shape
    strides: Shape


@_cached
def numel(shape: Shape) -> int:
    """Count the elements of a shape."""
    n = 1
    for size in shape:
        n *= size
    return n


@_cached
def contiguous_strides(shape: Shape) -> Shape:
    """Return row-major strides, in elements."""
    out, step = [], 1
    for size in reversed(shape):
        out.append(step)
        step *= size or 1
    return tuple(out[::-1])


@_cached
def is_contiguous(shape: Shape, strides: Shape) -> bool:
    """Say whether the elements lie row-major without gaps (dimensions of size 1 do not matter)."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


@_cached
def view_strides(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Return the strides of a view with shape `new`, or None where only a copy will do.

    ATen's computeStride (aten/src/ATen/TensorUtils.cpp): walk both shapes from the end and match runs of dimensions
    that lie without gaps.
    """
    if not shape:
        return (1,) * len(new)
    out = [0] * len(new)
    view_dim = len(new) - 1
    base, run, covered = strides[-1], 1, 1
    for dim in range(len(shape) - 1, -1, -1):
        run *= shape[dim]
        if dim == 0 or (shape[dim - 1] != 1 and strides[dim - 1] != run * base):
            while view_dim >= 0 and (covered < run or new[view_dim] == 1):
                out[view_dim] = covered * base
                covered *= new[view_dim]
                view_dim -= 1
            if covered != run:
                return None
            if dim > 0:
                base, run, covered = strides[dim - 1], 1, 1
    return tuple(out) if view_dim == -1 else None


def broadcast_shape(a: Shape, b: Shape) -> Shape:
    """Return the shape two operands broadcast to."""
    if a == b:
        return a
    n = max(len(a), len(b))
    a, b = (1,) * (n - len(a)) + a, (1,) * (n - len(b)) + b
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


def iterator_strides(shape: Shape, operands: Sequence[Strided]) -> Shape:
    """Return the layout of an elementwise result over `operands`.

    TensorIterator (aten/src/ATen/TensorIterator.cpp, reorder_dimensions): dimensions are ordered by the operands'
    strides; the first operand that can tell two dimensions apart decides, broadcast dimensions cannot.
    """
    if all(t.shape == shape and is_contiguous(t.shape, t.strides) for t in operands):
        return contiguous_strides(shape)
    n = len(shape)
    padded = [_padded_strides(shape, t) for t in operands]
    order = list(range(n))[::-1]
    for i in range(1, n):
        upper = i
        for lower in range(i - 1, -1, -1):
            verdict = _compare(shape, padded, order[lower], order[upper])
            if verdict > 0:
                order[lower], order[upper] = order[upper], order[lower]
                upper = lower
            elif verdict < 0:
                break
    out, step = [0] * n, 1
    for dim in order:
        out[dim] = step
        step *= shape[dim]
    return tuple(out)


def _padded_strides(shape: Shape, t: Strided) -> list[int]:
    gap = len(shape) - len(t.shape)
    own = [0 if size == 1 and shape[gap + i] != 1 else t.strides[i] for i, size in enumerate(t.shape)]
    return [0] * gap + own


def _compare(shape: Shape, padded: list[list[int]], x: int, y: int) -> int:
    """Say which of two dimensions lies inside the other: -1 for x, 1 for y, 0 where no operand can tell."""
    for strides in padded:
        if strides[x] and strides[y]:
            if strides[x] != strides[y]:
                return -1 if strides[x] < strides[y] else 1
            if shape[x] > shape[y]:
                return 1
    return 0
