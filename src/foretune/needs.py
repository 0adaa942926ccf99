"""What rows of given lengths need: at percentiles, in the worst micro batch, packed into full rows."""

from collections.abc import Callable
from functools import cache
from typing import Annotated, Literal

from msgspec import Meta

from foretune.contract import BatchSettings, TrainingConfig
from foretune.data import (
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
from foretune.errors import ForetuneError
from foretune.memory import MemoryEstimate, Verdict
from foretune.values import Value

__all__ = ["Engine", "LengthNeed", "LengthsAnswer", "answer_lengths"]

Bytes = Annotated[int, Meta(ge=0)]
Engine = Callable[[BatchSettings], tuple[MemoryEstimate, Verdict | None]]
"""Answers for micro batches of full rows; raises ForetuneError where that is refused."""
Rows = Literal["p50", "p95", "longest", "worst micro batch", "packed"]


class LengthNeed(Value, frozen=True, kw_only=True):
    """What micro batches of rows of one length need."""

    rows: Rows
    tokens: Annotated[int, Meta(ge=1)]
    """Of each row of the micro batch."""
    is_beyond: bool
    """Longer than `batch.sequence_length`: a run has no such rows, it cuts or refuses them."""
    allocated_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None
    need_bytes: Bytes | None = None
    """None: such rows are refused."""
    verdict: Verdict | None = None
    """None: no device was given, or such rows are refused."""
    refused_because: str | None = None


class LengthsAnswer(Value, frozen=True, kw_only=True):
    """What a fine-tune needs on rows of given lengths, padded and packed. Rows that are too long count as cut."""

    kind: Literal["estimated", "traced", "calibrated"]
    data: LengthStats
    """Of the rows as they are."""
    long_rows: LongRows
    padding: Padding
    packing: Packing
    needs: tuple[LengthNeed, ...]
    assumptions: tuple[str, ...]
    """What the figures rest on, in words."""


def answer_lengths(config: TrainingConfig, lengths: Lengths, engine: Engine) -> LengthsAnswer:
    """Say what a configuration needs on rows of these lengths.

    Raises what the engine raises for rows of `batch.sequence_length`; longer ones that it refuses are part of the
    answer.
    """
    engine = cache(engine)
    limit, batch = config.batch.sequence_length, config.batch
    padded = batch.with_(packing=False)
    kind = engine(padded)[0].kind
    data, cut = describe_lengths(lengths), lengths.cut(limit)
    padding = pad_rows(cut, batch.micro_batch_size, is_sorted=batch.sort_by_length)
    packing = pack_rows(cut, limit)
    long_rows = find_long_rows(lengths, limit)
    tokens: dict[Rows, int] = {
        "p50": data.p50,
        "p95": data.p95,
        "longest": data.longest,
        "worst micro batch": padding.worst_tokens,
        "packed": packing.row_tokens,
    }
    return LengthsAnswer(
        kind=kind,
        data=data,
        long_rows=long_rows,
        padding=padding,
        packing=packing,
        needs=tuple(_need(rows, count, padded, engine) for rows, count in tokens.items()),
        assumptions=tuple(_assumptions(config, data, long_rows)),
    )


def _need(rows: Rows, tokens: int, batch: BatchSettings, engine: Engine) -> LengthNeed:
    is_beyond, full = tokens > batch.sequence_length, batch.with_(sequence_length=tokens)
    if rows == "packed":
        full = full.with_(packing=True, sort_by_length=False)
    try:
        needed, verdict = engine(full)
    except ForetuneError as error:
        if not (is_beyond or full.packing):
            raise
        return LengthNeed(rows=rows, tokens=tokens, is_beyond=is_beyond, refused_because=error.message)
    return LengthNeed(
        rows=rows,
        tokens=tokens,
        is_beyond=is_beyond,
        allocated_bytes=needed.allocated_bytes,
        reserved_bytes=needed.reserved_bytes,
        need_bytes=needed.need_bytes,
        verdict=verdict,
    )


def _assumptions(config: TrainingConfig, data: LengthStats, long_rows: LongRows) -> list[str]:
    batch = config.batch
    size, limit = batch.micro_batch_size, batch.sequence_length
    texts = ["Percentiles are by nearest rank: a row of the data has each of them."]
    if size == 1:
        texts.append("A micro batch is one row, which needs no padding.")
    elif batch.sort_by_length:
        texts.append(f"A micro batch is {size:,} neighbours of the rows sorted by length, padded to the longest.")
    else:
        drawn = "drawn at random without replacement (a shuffled epoch)"
        texts.append(f"A micro batch is {size:,} of the rows, {drawn}, padded to the longest of them.")
    if data.num_rows < size:
        texts.append(f"There are fewer rows than a micro batch takes; the needs are those of {size:,} rows.")
    if long_rows.num_rows:
        verb = "refuses" if config.data.truncation == "error" else "cuts"
        text = f"data.truncation is {config.data.truncation}: a run {verb} rows of more than {limit:,} tokens."
        texts.append(f"{text} Padding and packing count them as cut.")
    texts.append(
        "Packed rows are filled by best-fit decreasing, and no row is split; the mask that keeps their examples apart "
        "is counted."
    )
    texts.append(
        "Each need is that of a run whose micro batches all have this length; where lengths vary from one to the next "
        "the allocator may hold more."
    )
    return texts
