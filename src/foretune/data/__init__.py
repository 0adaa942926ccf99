"""What is trained on: how long its rows are, padded into micro batches and packed into full rows."""

from foretune.data.length_files import read_lengths
from foretune.data.lengths import (
    Lengths,
    LengthStats,
    LongRows,
    Packing,
    Padding,
    describe_lengths,
    find_long_rows,
    pack_rows,
    pad_rows,
)

__all__ = [
    "LengthStats",
    "Lengths",
    "LongRows",
    "Packing",
    "Padding",
    "describe_lengths",
    "find_long_rows",
    "pack_rows",
    "pad_rows",
    "read_lengths",
]
