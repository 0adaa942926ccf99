"""Rotary frequencies that depend on the length of the sequence (longrope, modeling_rope_utils.py of transformers 5.24).

Every forward looks up the largest position and chooses between two sets of frequencies; the long set is made in the
first forward and kept.
"""

from foretune.memory.ops import add_scalar, like
from foretune.memory.tape import Tensor

__all__ = ["LongFrequencies", "largest_position"]


def largest_position(position_ids: Tensor) -> Tensor:
    """torch.max(position_ids) + 1."""
    return add_scalar(_largest(position_ids))


def _largest(position_ids: Tensor) -> Tensor:
    return Tensor((), position_ids.dtype)


def _long_set(width: int) -> Tensor:
    """_compute_longrope_parameters, on the device; the factors are not among what the trace sees."""
    inv_freq_shape = like(like(Tensor((width,), "i64"), "f32"))
    return _inverse(_scaled(like(inv_freq_shape)))


def _scaled(power: Tensor) -> Tensor:
    return like(power)


def _inverse(t: Tensor) -> Tensor:
    """1.0 / t: the reciprocal, times a number."""
    return like(like(t))


class LongFrequencies:
    """longrope_frequency_update of one model."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.long_inv_freq: Tensor | None = None

    def update(self, position_ids: Tensor) -> None:
        """Choose the set for these positions, in place of the last."""
        _seq_len = largest_position(position_ids)
        if self.long_inv_freq is None:
            self.long_inv_freq = _long_set(self.width)
        _inv_freq = _chosen(Tensor((), "bool"), self.long_inv_freq)


def _chosen(is_long: Tensor, long_inv_freq: Tensor) -> Tensor:
    return like(long_inv_freq)
