"""torch.einsum of two operands: permutations, one batched product, and the copies that strides force."""

from foretune.memory.layout import numel
from foretune.memory.ops import bmm, reshape, unsqueeze, view
from foretune.memory.strided import permute
from foretune.memory.tape import Tensor

__all__ = ["einsum"]


def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """Sum products over the labels that the result lacks (aten/src/ATen/native/Linear.cpp, einsum).

    Both operands are permuted to one order of labels. What is not a view as [batch, rows, columns] is copied; then as
    bmm. The result is a permuted view of the product.
    """
    inputs, kept = equation.split("->")
    first, second = inputs.split(",")
    labels = kept + "".join(sorted(set(first + second) - set(kept)))
    result = _sumproduct_pair(_aligned(a, first, labels), _aligned(b, second, labels), len(kept))
    return view(result, *result.shape[: len(kept)])


def _aligned(t: Tensor, own: str, labels: str) -> Tensor:
    """Permute to the order of all labels; those that t lacks have size 1."""
    places = []
    for label in labels:
        if label in own:
            places.append(own.index(label))
        else:
            places.append(len(t.shape))
            t = unsqueeze(t, len(t.shape))
    return permute(t, *places)


def _sumproduct_pair(left: Tensor, right: Tensor, num_kept: int) -> Tensor:
    """As torch's function of that name: which operand stands left is decided by the order of the result."""
    rank = len(left.shape)
    summed = list(range(num_kept, rank))
    both = [i for i in range(num_kept) if left.shape[i] != 1 and right.shape[i] != 1]
    rows = [i for i in range(num_kept) if left.shape[i] != 1 and right.shape[i] == 1]
    columns = [i for i in range(num_kept) if left.shape[i] == 1]
    if rows and columns and columns[-1] < rows[0]:
        left, right, rows, columns = right, left, columns, rows
    num_both, num_rows, num_columns, num_summed = (
        numel(tuple(max(left.shape[i], right.shape[i]) for i in dims)) for dims in (both, rows, columns, summed)
    )
    order = both + rows + summed + columns
    size = (
        *(left.shape[i] for i in both + rows),
        *(1 for _ in summed),
        *(right.shape[i] for i in columns),
    )
    left = reshape(permute(left, *both, *rows, *summed, *columns), (num_both, num_rows, num_summed))
    right = reshape(permute(right, *both, *summed, *columns, *rows), (num_both, num_summed, num_columns))
    result = bmm(left, right)
    del right, left
    return permute(view(result, *size), *(order.index(i) for i in range(rank)))
