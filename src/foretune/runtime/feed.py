"""From rows at their place to micro batches on the device, each a function of its number alone."""

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foretune.contract import BatchSettings, TrainingConfig
from foretune.data import (
    IGNORED,
    EpochPlan,
    Example,
    Lengths,
    MicroBatch,
    TokenStore,
    make_batch,
    num_batches,
    plan_batches,
    truncate,
)
from foretune.data import Batch as HostBatch
from foretune.runtime.update import Batch

__all__ = ["Feed", "Rows", "Widest", "on_device"]


class Rows(NamedTuple):
    """Encoded rows, or some of them."""

    store: TokenStore | None
    """None: only the lengths are known, for a plan."""
    lengths: "array[int]"
    """Tokens of each row after truncation."""
    indices: "array[int] | None" = None
    """Which rows of the store; None: all."""

    def __len__(self) -> int:
        return len(self.lengths)

    def subset(self, indices: "array[int]") -> "Rows":
        """Return some of the rows."""
        return Rows(self.store, array("I", (self.lengths[index] for index in indices)), indices)

    def example(self, number: int) -> Example:
        """Return a row as it is stored, whole."""
        assert self.store is not None
        return self.store.example(number if self.indices is None else self.indices[number])


class Widest(NamedTuple):
    """The shape of the micro batch that needs most."""

    rows: int
    tokens: int


class Feed:
    """The micro batches of a run."""

    def __init__(self, rows: Rows, config: TrainingConfig, padding_id: int) -> None:
        self.rows, self.config, self.padding_id = rows, config, padding_id
        self._epoch: tuple[int, EpochPlan] | None = None

    @property
    def batches_per_epoch(self) -> int:
        """Micro batches of each epoch."""
        return num_batches(Lengths.of(Counter(self.rows.lengths)), self.config.batch)

    def plan(self, epoch: int) -> EpochPlan:
        """Return the order of an epoch; the last one that was asked for is kept."""
        if self._epoch is None or self._epoch[0] != epoch:
            made = plan_batches(self.rows.lengths, self.config.batch, seed=self.config.seed, epoch=epoch)
            self._epoch = epoch, made
        return self._epoch[1]

    def batch(self, rows: MicroBatch) -> HostBatch:
        """Lay out one micro batch, padded to its longest row."""
        data, limit = self.config.data, self.config.batch.sequence_length
        examples = [
            [truncate(self.rows.example(number), limit, data.truncation).example for number in row] for row in rows
        ]
        return make_batch(examples, supervision=data.supervision, padding_id=self.padding_id, width=None)

    def widest(self) -> MicroBatch:
        """Return rows that need at least as much memory as any micro batch of any epoch.

        Packed: the first epoch's widest. Else as many of the longest rows as stand in a micro batch: whatever the
        order, none is wider.
        """
        batch, lengths = self.config.batch, self.rows.lengths
        if batch.packing:
            return max(self.plan(0), key=lambda rows: len(rows) * _width(rows, lengths))
        longest = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        return tuple((number,) for number in longest[: batch.micro_batch_size])

    def widest_shape(self) -> Widest:
        """Return how many rows of how many tokens that is."""
        rows = self.widest()
        return Widest(len(rows), _width(rows, self.rows.lengths))

    def evaluation_batches(self) -> list[MicroBatch]:
        """Return all rows once, neighbours in length together, one example a row: no order and no seed decides."""
        size = self.config.batch.micro_batch_size
        by_length = sorted(range(len(self.rows)), key=lambda number: (-self.rows.lengths[number], number))
        return [
            tuple((number,) for number in by_length[start : start + size]) for start in range(0, len(by_length), size)
        ]


def _width(rows: MicroBatch, lengths: Sequence[int]) -> int:
    return max(sum(lengths[number] for number in row) for row in rows)


def on_device(batch: HostBatch, device: torch.device, settings: BatchSettings) -> Batch:
    """Make tensors of a micro batch: targets are labels shifted by one, positions go with packed rows alone."""
    labels_BS = _tensor(batch.labels)
    targets_BS = torch.full_like(labels_BS, IGNORED)
    targets_BS[:, :-1] = labels_BS[:, 1:]
    positions_BS = _tensor(batch.position_ids).to(device) if settings.packing else None
    return Batch(_tensor(batch.input_ids).to(device), targets_BS.to(device), positions_BS)


def _tensor(rows: "tuple[array[int], ...]") -> Tensor:
    """Copy rows of 8-byte numbers into one [B, S] int64 tensor."""
    return torch.stack([torch.frombuffer(row, dtype=torch.int64) for row in rows])
