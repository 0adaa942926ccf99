"""Which rows stand together in which micro batch of which epoch.

All of it is a pure function of the lengths, the settings, the seed and the epoch: a run that goes on after an
interruption computes its order again, and skips the micro batches that were done.
"""

import random
from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from foretune.contract import BatchSettings
from foretune.data.lengths import Lengths, pack_rows
from foretune.errors import ConfigError

__all__ = ["EpochPlan", "MicroBatch", "num_batches", "plan_batches", "shuffled", "split_rows"]

MicroBatch = tuple[tuple[int, ...], ...]
"""What is on the device at once: of each of its rows the data rows that stand in it, by their index. One, or packed."""


# Not a Value: those are hashed and written as JSON, which arrays are not.
@dataclass(frozen=True, slots=True, repr=False)
class EpochPlan:
    """The micro batches of an epoch, in order. Iterate over them, or ask for one by its number from 0."""

    rows: "array[int]"
    """All data rows, in the order of their use."""
    row_starts: Sequence[int]
    """Where in `rows` each row of the device begins, and at last their end."""
    batch_starts: Sequence[int]
    """Where in `row_starts` each micro batch begins, and at last their end."""

    def __len__(self) -> int:
        return len(self.batch_starts) - 1

    def __getitem__(self, index: int) -> MicroBatch:
        """Return one micro batch. Raises IndexError from -1 down, and from the number of micro batches up."""
        if not 0 <= index < len(self):
            raise IndexError(f"There is no micro batch {index}: the epoch has {len(self)}.")
        first, last = self.batch_starts[index], self.batch_starts[index + 1]
        bounds = self.row_starts[first : last + 1]
        return tuple(tuple(self.rows[start:stop]) for start, stop in pairwise(bounds))

    def __iter__(self) -> Iterator[MicroBatch]:
        return map(self.__getitem__, range(len(self)))


def shuffled(num_rows: int, seed: int, epoch: int) -> "array[int]":
    """Return the numbers from 0 to `num_rows` - 1 in the order of an epoch, the same everywhere and for ever.

    A Fisher-Yates shuffle by the Mersenne Twister. Of `random.Random` only `random()` is used: it is the one method
    whose sequence for a seed Python promises to keep (`random`, "Notes on Reproducibility"); `shuffle` and
    `randrange` have changed before. The seed is a text, hashed by SHA-512, not by `hash`.
    Leaves out: the bias of drawing k of n from 2^53 numbers, at most n / 2^53.
    """
    return _permutation(num_rows, f"rows {seed} {epoch}")


def _permutation(count: int, seed: str) -> "array[int]":
    order, draw = array("I", range(count)), random.Random(seed).random
    for last in range(count - 1, 0, -1):
        chosen = int(draw() * (last + 1))
        order[last], order[chosen] = order[chosen], order[last]
    return order


def split_rows(num_rows: int, share: float, seed: int) -> "tuple[array[int], array[int]]":
    """Return the rows to train on and those that are held out, each rising; the seed alone chooses them.

    Held out are the share of the rows (`evaluation.split`, between 0 and 1), to the nearest whole one.
    Raises ConfigError where a side has no row.
    """
    num_held_out = round(num_rows * share)
    if not 0 < num_held_out < num_rows:
        reason = "none is held out" if num_held_out == 0 else "none is left to train on"
        message = f"evaluation.split is {share:g}: of {num_rows:,} row{'s' * (num_rows != 1)} {reason}."
        hint = "Choose another share, add rows, or name a file of its own in evaluation.data."
        raise ConfigError(message, hint=hint, field="evaluation.split")
    is_held_out = bytearray(num_rows)
    for row in _permutation(num_rows, f"split {seed}")[:num_held_out]:
        is_held_out[row] = 1
    train = array("I", (row for row, is_out in enumerate(is_held_out) if not is_out))
    return train, array("I", (row for row, is_out in enumerate(is_held_out) if is_out))


# -- micro batches


def num_batches(lengths: Lengths, settings: BatchSettings) -> int:
    """Count the micro batches of an epoch, which are as many in each; lengths in tokens, after truncation.

    Packed rows are as many as `pack_rows` says: by best fit their number follows from the lengths alone.
    """
    num_rows = pack_rows(lengths, settings.sequence_length).num_rows if settings.packing else lengths.num_rows
    return -(-num_rows // settings.micro_batch_size)


def plan_batches(lengths: Sequence[int], settings: BatchSettings, *, seed: int, epoch: int) -> EpochPlan:
    """Put each row in one micro batch of an epoch; lengths in tokens, after truncation, at least one of them.

    By default micro batches are cut from the shuffled rows, and the last one may be smaller. With `sort_by_length`
    they are neighbours in length, as `pad_rows` has them, in shuffled order. With `packing` they are cut from
    the shuffled packed rows. Rows of one length change places from epoch to epoch; rows of a length that no other
    has meet the same neighbours again.
    """
    assert min(lengths, default=0) >= 1, "there are rows, and each has a token"
    assert not (settings.packing and settings.sort_by_length), "the contract's rules exclude it"
    rows, size = shuffled(len(lengths), seed, epoch), settings.micro_batch_size
    if settings.packing:
        return _plan_packed(rows, lengths, settings, f"batches {seed} {epoch}")
    if settings.sort_by_length:
        return _plan_sorted(_sorted_by(lengths, rows), size, f"batches {seed} {epoch}")
    return EpochPlan(rows, range(len(rows) + 1), _cuts(len(rows), size))


def _cuts(count: int, size: int) -> "array[int]":
    """Return where groups of `size` begin, and at last the end."""
    cuts = array("I", range(0, count, size))
    cuts.append(count)
    return cuts


def _sorted_by(keys: Sequence[int], items: "array[int]") -> "array[int]":
    """Sort items by their keys, ties as they stand: a counting sort, for `sorted` would hold an object per item."""
    counts = Counter(keys)
    distinct = sorted(counts)
    place = dict(zip(distinct, accumulate((counts[key] for key in distinct), initial=0), strict=False))
    result = array("I", [0]) * len(items)
    for item in items:
        key = keys[item]
        result[place[key]] = item
        place[key] += 1
    return result


def _plan_sorted(by_length: "array[int]", size: int, seed: str) -> EpochPlan:
    rows, starts = array("I"), array("I", [0])
    for batch in _permutation(-(-len(by_length) // size), seed):
        rows.extend(by_length[batch * size : (batch + 1) * size])
        starts.append(len(rows))
    return EpochPlan(rows, range(len(rows) + 1), starts)


# -- packed rows


def _plan_packed(rows: "array[int]", lengths: Sequence[int], settings: BatchSettings, seed: str) -> EpochPlan:
    histogram = Lengths.of(Counter(lengths))
    assert histogram.longest <= settings.sequence_length, "rows are cut before they are packed"
    packed, num_packed = _pack(_sorted_by(lengths, rows), histogram, settings.sequence_length)
    places = _permutation(num_packed, seed)
    for row, number in enumerate(packed):
        packed[row] = places[number]
    in_each = Counter(packed)
    starts = array("I", accumulate((in_each[place] for place in range(num_packed)), initial=0))
    return EpochPlan(_sorted_by(packed, rows), starts, _cuts(num_packed, settings.micro_batch_size))


def _pack(by_length: "array[int]", lengths: Lengths, row_tokens: int) -> "tuple[array[int], int]":
    """Return of each row the packed row in which it stands, and how many of these there are.

    Best-fit decreasing, as `pack_rows` counts it: the longest first, each where it leaves least; `by_length` rises.
    """
    packed, open_rows = array("I", [0]) * len(by_length), _OpenRows(row_tokens)
    end = len(by_length)
    for length, count in zip(reversed(lengths.tokens), reversed(lengths.counts), strict=True):
        waiting, end = by_length[end - count : end], end - count
        start = 0
        while start < count:
            number, room = open_rows.take(length)
            # What was just put there leaves least for the next of this length too, until it does not fit.
            group = waiting[start : start + room // length]
            for row in group:
                packed[row] = number
            open_rows.put(number, room - length * len(group))
            start += len(group)
    return packed, open_rows.num_begun


class _OpenRows:
    """Packed rows with room left, by their room in tokens."""

    def __init__(self, row_tokens: int) -> None:
        self.row_tokens = row_tokens
        self.num_begun = 0
        self.rooms: list[int] = []
        """The different rooms, rising."""
        self.numbers: dict[int, list[int]] = {}
        """Which packed rows have each."""

    def take(self, length: int) -> tuple[int, int]:
        """Take out a packed row with the least room that suffices, or begin one; return its number and room."""
        place = bisect_left(self.rooms, length)
        if place == len(self.rooms):
            self.num_begun += 1
            return self.num_begun - 1, self.row_tokens
        room = self.rooms[place]
        numbers = self.numbers[room]
        number = numbers.pop()
        if not numbers:
            del self.rooms[place], self.numbers[room]
        return number, room

    def put(self, number: int, room: int) -> None:
        """Put a packed row back with the room that is left; a full one goes."""
        if room in self.numbers:
            self.numbers[room].append(number)
        elif room:
            insort(self.rooms, room)
            self.numbers[room] = [number]
