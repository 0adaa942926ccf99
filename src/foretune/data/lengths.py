"""How long rows are: a histogram of their tokens, its percentiles, and what padding and packing make of it.

All of it is arithmetic on the histogram, so a data set of a billion rows costs no more than its different lengths.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping
from itertools import accumulate
from math import ceil, log2
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from foretune.values import Value

__all__ = [
    "LengthBin",
    "LengthStats",
    "Lengths",
    "LongRows",
    "Packing",
    "Padding",
    "bin_lengths",
    "describe_lengths",
    "find_long_rows",
    "pack_rows",
    "pad_rows",
]

Count = Annotated[int, Meta(ge=0)]
Tokens = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
NEGLIGIBLE = 1e-18
"""A probability that moves no digit of a mean."""


class Lengths(NamedTuple):
    """A histogram of rows by their tokens."""

    tokens: tuple[int, ...]
    """The different lengths, rising; at least one."""
    counts: tuple[int, ...]
    """How many rows have each."""

    @classmethod
    def of(cls, counted: Mapping[int, int]) -> "Lengths":
        """Sort a mapping of lengths to numbers of rows.

        >>> Lengths.of({512: 1, 64: 3})
        Lengths(tokens=(64, 512), counts=(3, 1))
        """
        tokens = tuple(sorted(counted))
        return cls(tokens, tuple(counted[length] for length in tokens))

    @property
    def num_rows(self) -> int:
        """All rows."""
        return sum(self.counts)

    @property
    def num_tokens(self) -> int:
        """All tokens of all rows."""
        return sum(length * count for length, count in zip(self.tokens, self.counts, strict=True))

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return self.tokens[-1]

    def percentile(self, percent: int) -> int:
        """Return the nearest-rank percentile: the smallest length that `percent` % of the rows do not exceed.

        Of N rows in rising order it is the one with the rank ceil(percent * N / 100), so it is always a row's own.
        """
        rank = max(-(-percent * self.num_rows // 100), 1)
        return self.tokens[bisect_left(tuple(accumulate(self.counts)), rank)]

    def cut(self, limit: int) -> "Lengths":
        """Return the same rows, those that are longer than `limit` tokens cut to it."""
        if self.longest <= limit:
            return self
        place = bisect_left(self.tokens, limit)
        return Lengths((*self.tokens[:place], limit), (*self.counts[:place], sum(self.counts[place:])))


class LengthStats(Value, frozen=True, kw_only=True):
    """Rows and tokens of a data set; percentiles by nearest rank."""

    num_rows: Count
    num_tokens: Count
    mean_tokens: float
    """Of a row."""
    shortest: Tokens
    p50: Tokens
    p95: Tokens
    longest: Tokens


class LengthBin(Value, frozen=True, kw_only=True):
    """Rows of about one length."""

    first: Tokens
    last: Tokens
    """The shortest and the longest that count."""
    num_rows: Count


class LongRows(Value, frozen=True, kw_only=True):
    """Rows that are longer than `batch.sequence_length`."""

    num_rows: Count
    share: Share
    """Of all rows."""
    tokens_beyond: Count
    """What is lost of them where they are cut."""


class Padding(Value, frozen=True, kw_only=True):
    """Rows in micro batches, each padded to the longest row in it."""

    micro_batch_size: Tokens
    order: Literal["random", "sorted by length"]
    """`random`: a micro batch is any of the rows, as in a shuffled epoch. `sorted by length`: it is neighbours."""
    mean_tokens: float
    """Tokens to which a row is padded, in the mean over rows."""
    worst_tokens: Tokens
    """Tokens to which the rows of the worst micro batch are padded: those of the longest row."""
    real_share: Share
    """Share of real tokens among those on the device."""


class Packing(Value, frozen=True, kw_only=True):
    """Rows put together in packed rows, none of them split."""

    row_tokens: Tokens
    """Room of a packed row: `batch.sequence_length`."""
    num_rows: Count
    """Packed rows, by best-fit decreasing."""
    real_share: Share
    """Share of real tokens among those on the device: the efficiency of the packing."""


def describe_lengths(lengths: Lengths) -> LengthStats:
    """Count rows and tokens, and name the lengths by which a data set is known."""
    return LengthStats(
        num_rows=lengths.num_rows,
        num_tokens=lengths.num_tokens,
        mean_tokens=lengths.num_tokens / lengths.num_rows,
        shortest=lengths.tokens[0],
        p50=lengths.percentile(50),
        p95=lengths.percentile(95),
        longest=lengths.longest,
    )


def bin_lengths(lengths: Lengths, bins_per_octave: int = 6) -> tuple[LengthBin, ...]:
    """Gather lengths into bins whose width grows with them, each a constant part of an octave; the last ends at the
    longest row."""
    counted: dict[int, int] = {}
    for tokens, count in zip(lengths.tokens, lengths.counts, strict=True):
        place = int(bins_per_octave * log2(tokens))
        counted[place] = counted.get(place, 0) + count
    found = []
    for place in range(min(counted), max(counted) + 1):
        first, after = (ceil(2 ** ((place + step) / bins_per_octave) - 1e-9) for step in (0, 1))
        if first < after:
            last = min(after - 1, lengths.longest)
            found.append(LengthBin(first=first, last=last, num_rows=counted.get(place, 0)))
    return tuple(found)


def find_long_rows(lengths: Lengths, limit: int) -> LongRows:
    """Count the rows of more than `limit` tokens, and the tokens of them that lie beyond it."""
    rest = lengths.num_tokens - lengths.cut(limit).num_tokens
    is_long = zip(lengths.tokens, lengths.counts, strict=True)
    num_rows = sum(count for length, count in is_long if length > limit)
    return LongRows(num_rows=num_rows, share=num_rows / lengths.num_rows, tokens_beyond=rest)


def pad_rows(lengths: Lengths, micro_batch_size: int, *, is_sorted: bool = False) -> Padding:
    """Pad each micro batch to its longest row. Where there are fewer rows than it takes, all of them are in it."""
    size, mean_row = min(micro_batch_size, lengths.num_rows), lengths.num_tokens / lengths.num_rows
    if size == 1:
        mean = mean_row
    else:
        mean = _mean_of_sorted(lengths, size) if is_sorted else mean_longest(lengths, size)
    return Padding(
        micro_batch_size=micro_batch_size,
        order="sorted by length" if is_sorted else "random",
        mean_tokens=mean,
        worst_tokens=lengths.longest,
        real_share=min(mean_row / mean, 1.0),
    )


def mean_longest(lengths: Lengths, num_drawn: int) -> float:
    """Return the expected length of the longest of `num_drawn` rows, drawn at random without replacement.

    The longest has at most l tokens with probability C(F, B) / C(N, B). N: rows; F: those of at most l tokens;
    B: rows drawn, at most N.
    """
    mean, share, at_most = 0.0, 1.0, lengths.num_rows
    for length, count in zip(reversed(lengths.tokens), reversed(lengths.counts), strict=True):
        shorter = share * _share_without(count, at_most, num_drawn)
        mean += length * (share - shorter)
        share, at_most = shorter, at_most - count
        if share < NEGLIGIBLE:
            break
    return mean


def _share_without(num_left_out: int, num_rows: int, num_drawn: int) -> float:
    """Return C(N - K, B) / C(N, B): how likely none of K rows is among B of N drawn. It is symmetric in K and B."""
    fewer, more = sorted((num_left_out, num_drawn))
    if fewer + more > num_rows:
        return 0.0
    share = 1.0
    for i in range(fewer):
        share *= (num_rows - more - i) / (num_rows - i)
        if share < NEGLIGIBLE:
            return 0.0
    return share


def _mean_of_sorted(lengths: Lengths, size: int) -> float:
    """Return the mean length to which rows are padded where micro batches are neighbours in rising order.

    A micro batch is padded to its last row; the last micro batch may have fewer rows.
    """
    padded = at_most = 0
    for length, count in zip(lengths.tokens, lengths.counts, strict=True):
        num_batches = (at_most + count) // size - at_most // size
        padded += num_batches * size * length
        at_most += count
    return (padded + at_most % size * lengths.longest) / at_most


def pack_rows(lengths: Lengths, row_tokens: int) -> Packing:
    """Pack rows of at most `row_tokens` tokens by best-fit decreasing: the longest first, each where it leaves least.

    Rows of one length are placed together, in as many packed rows with the same room as they fill.
    """
    room: dict[int, int] = {}
    sizes: list[int] = []
    num_packed = 0

    def put(size: int, num_rows: int) -> None:
        if size and num_rows:
            if size not in room:
                insort(sizes, size)
            room[size] = room.get(size, 0) + num_rows

    for length, count in zip(reversed(lengths.tokens), reversed(lengths.counts), strict=True):
        while count:
            place = bisect_left(sizes, length)
            if place < len(sizes):
                size = sizes.pop(place)
                num_open = room.pop(size)
            else:
                size = row_tokens
                num_open = -(-count // (size // length))
                num_packed += num_open
            # The row that was just begun is the tightest for the next one too, until it is full.
            in_each = size // length
            num_full = min(num_open, count // in_each)
            count -= num_full * in_each
            put(size - in_each * length, num_full)
            if count and num_open > num_full:
                put(size - count * length, 1)
                put(size, num_open - num_full - 1)
                count = 0
            else:
                put(size, num_open - num_full)
    real_share = lengths.num_tokens / (num_packed * row_tokens)
    return Packing(row_tokens=row_tokens, num_rows=num_packed, real_share=real_share)
