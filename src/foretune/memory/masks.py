"""Attention masks as transformers 5.24 makes them (masking_utils.py): causal, windowed, in chunks, of packed rows."""

from collections.abc import Callable

from foretune.memory import ops
from foretune.memory.layout import numel
from foretune.memory.ops import add_scalar
from foretune.memory.tape import Tensor, current

__all__ = [
    "additive_mask",
    "ask_whether_all",
    "causal_order",
    "chunked_order",
    "find_packed",
    "mask_table",
    "windowed_order",
]


def additive_mask(table: Tensor, dtype: str) -> Tensor:
    """eager_mask: where(table, 0, least), both on the device."""
    zero, least = Tensor((), dtype), Tensor((), dtype)
    out = Tensor(table.shape, dtype)
    del least, zero
    return out


def find_packed(b: int, s: int, *, is_packed: bool) -> Tensor | None:
    """find_packed_sequence_indices: differences of the positions, their sum, and whether any is not 1.

    The sum numbers the examples of a row; it is returned where there are several.
    """
    first = Tensor((b, 1), "i64")
    joined = Tensor((b, s + 1), "i64")
    difference = Tensor((b, s), "i64")
    del joined
    jumps = Tensor((b, s), "bool")
    groups = Tensor((b, s), "i64")
    current().temporaries(8 * b * s)  # CUDA sums truth values as int64, from a copy
    del jumps
    equal = Tensor((b,), "bool")
    answer = Tensor((), "bool")
    del equal, answer, first, difference
    return groups if is_packed else None


def ask_whether_all(padding: Tensor) -> None:
    """fast_all of a padding mask."""
    total = Tensor((), "i64")
    current().temporaries(8 * numel(padding.shape))
    equal = Tensor((), "bool")
    del total, equal


Order = Callable[[int, int, int], Tensor]
"""A mask function on `b` rows of `s` tokens, given the indices of `n` rows: of one, where all rows count alike."""


def mask_table(order: Order, b: int, s: int, padding: Tensor | None, *, is_packed: bool) -> Tensor:
    """sdpa_mask: True where a query may attend; [B, 1, S, S] as an expanded view where all rows are alike."""
    batch, head = Tensor((b,), "i64"), Tensor((1,), "i64")
    q = add_scalar(Tensor((s,), "i64"))
    kv = add_scalar(Tensor((s,), "i64"))
    is_joined = padding is not None or is_packed
    one = Tensor((), "bool") if is_joined else None
    table = _remapped(order, b, s) if is_packed else order(b, 1, s)
    if is_joined:
        ordered = table
        allowed = Tensor(ordered.shape, "bool")
        del table, ordered, one
        of_rows = _same_example(b, s) if is_packed else _taken((b, 1, 1, s), "bool")
        table = Tensor((b, 1, s, s), "bool")
        del of_rows, allowed
    del batch, head, q, kv
    return table.view_as((b, 1, s, s), table.strides if table.shape[0] == b else (0, *table.strides[1:]))


def _remapped(order: Order, b: int, s: int) -> Tensor:
    """remap_positions_for_packed_sequence: tokens are known by their places in their examples."""
    q_idx = _taken((b, 1, s, 1), "i64")
    kv_idx = _taken((b, 1, 1, s), "i64")
    table = order(b, b, s)
    del q_idx, kv_idx
    return table


def _same_example(b: int, s: int) -> Tensor:
    """packed_sequence_mask_function."""
    of_queries = _taken((b, 1, s, 1), "i64")
    of_keys = _taken((b, 1, 1, s), "i64")
    equal = Tensor((b, 1, s, s), "bool")
    del of_queries, of_keys
    return equal


def _taken(shape: tuple[int, ...], dtype: str) -> Tensor:
    """What two index tensors take, of rows and of tokens; those whose strides are not the result's are copied first."""
    num_copied = 2 if shape[0] > 1 else 1
    copies = [Tensor(shape, "i64") for _ in range(num_copied)]
    taken = Tensor(shape, dtype)
    while copies:
        copies.pop(0)
    return taken


def causal_order(b: int, n: int, s: int) -> Tensor:
    """causal_mask_function."""
    return Tensor((n, 1, s, s), "bool")


def windowed_order(b: int, n: int, s: int) -> Tensor:
    """sliding_window_overlay, and the causal order."""

    def overlay() -> Tensor:
        edge = Tensor((n, 1, s, 1), "i64")
        inside = Tensor((n, 1, s, s), "bool")
        del edge
        return inside

    return _and_causal(overlay, n, s)


def chunked_order(b: int, n: int, s: int) -> Tensor:
    """chunked_overlay (True where key and query are in one chunk), and the causal order."""

    def overlay() -> Tensor:
        of_keys = _chunk_numbers(b, (s,))
        of_queries = _chunk_numbers(b, (s, 1))
        inside = Tensor((b, 1, s, s), "bool")
        del of_keys, of_queries
        return inside

    return _and_causal(overlay, n, s)


def _and_causal(overlay: Callable[[], Tensor], n: int, s: int) -> Tensor:
    """and_masks of an overlay and causal_mask_function."""
    result = Tensor((), "bool")
    inside = overlay()
    both = Tensor(inside.shape, "bool")
    del inside
    result = both
    del both
    causal = Tensor((n, 1, s, s), "bool")
    both = Tensor(result.shape, "bool")
    del causal
    result = both
    return result  # noqa: RET504


def _chunk_numbers(b: int, size: tuple[int, ...]) -> Tensor:
    """(idx - left_padding[batch_idx]) // chunk_size."""
    return ops.like(_less_padding(Tensor((b, 1, 1, 1), "i64"), size))


def _less_padding(padding: Tensor, size: tuple[int, ...]) -> Tensor:
    return Tensor((padding.shape[0], 1, *((1,) * (2 - len(size))), *size), "i64")
