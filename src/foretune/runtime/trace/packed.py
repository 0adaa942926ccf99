"""Packed rows on tensors without data: what Transformers reads off their positions.

Source: transformers/masking_utils.py (find_packed_sequence_indices).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor
from transformers import masking_utils

from foretune.runtime.trace.recorder import Recorder

__all__ = ["packed_rows"]


@contextmanager
def packed_rows(recorder: Recorder) -> Iterator[None]:
    """Answer the one question that Transformers asks of positions: no, not every row is a single sequence."""
    find = masking_utils.find_packed_sequence_indices

    def found(position_ids: Tensor) -> Tensor | None:
        recorder.truth = False
        try:
            return find(position_ids)
        finally:
            recorder.truth = True

    with patch.object(masking_utils, "find_packed_sequence_indices", found):
        yield
