"""Where the truth lies with 90 %: intervals around a prediction, from the errors of its class on published rows.

A class is what decides how far a prediction of ours has been off: whether the stack is described or only the nearest,
and how weights are loaded. Its error is learnt in `evidence/intervals.py` with whole groups (source and model) left
out, and stands in `intervals.json` with the ranges it was seen in (scripts/intervals.py makes it). Outside of them, and
where no measurement has touched a path, an interval is twice as wide.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from foretune.contract import TrainingConfig
from foretune.memory.answer import ByteRange
from foretune.memory.stack import StackProfile
from foretune.units import MIB, format_bytes
from foretune.values import Value

__all__ = [
    "LEVEL_PERCENT",
    "ErrorClass",
    "ErrorRange",
    "Intervals",
    "Metric",
    "error_class",
    "error_classes",
    "intervals_around",
    "pad_bytes",
]

Metric = Literal["allocated", "reserved"]
ClassName = Literal["16-bit weights", "nf4", "nf4, quantized on four threads", "foreign stack"]

LEVEL_PERCENT = 90
TABLE = Path(__file__).parent / "intervals.json"
SEGMENTS: Mapping[Metric, int] = {"allocated": 2 * MIB, "reserved": 20 * MIB}
"""One segment of the allocator (c10/cuda/CUDACachingAllocator.cpp): what one request more can cost."""
MOST_OF_A_PAD_PERCENT = 2
WIDER = 2.0
EXTRAPOLATED_PERCENT = 5.0
"""Programs too long to replay whole: reserved was up to 4.1 % low where they were replayed all the same."""
FURTHEST_BELOW_PERCENT = -90.0
"""No range reaches further down: something is always held."""


class ErrorRange(Value, frozen=True, kw_only=True):
    """How far what was measured lay from what was predicted, in percent of the prediction: 90 % of the rows."""

    low_percent: float
    high_percent: float
    num_rows: int
    num_groups: int
    """Groups (source and model) of these rows."""
    scale_below: float
    """Times which the bare quantile is taken, so that groups that are left out are covered; above as well."""
    scale_above: float
    most_tokens: int
    """The most tokens in a batch of these rows."""
    most_params: int


class ErrorClass(Value, frozen=True, kw_only=True):
    """The errors of a class."""

    name: ClassName
    allocated: ErrorRange
    reserved: ErrorRange


class Intervals(NamedTuple):
    """Around one answer."""

    allocated: ByteRange
    reserved: ByteRange
    process: ByteRange


@cache
def error_classes() -> Mapping[str, ErrorClass]:
    """Read the table."""
    return {entry.name: entry for entry in msgspec.json.decode(TABLE.read_bytes(), type=tuple[ErrorClass, ...])}


def error_class(config: TrainingConfig, stack: StackProfile) -> ClassName:
    """Say which errors a prediction is exposed to."""
    if stack.is_nearest:
        return "foreign stack"
    if config.quantization is None:
        return "16-bit weights"
    return "nf4, quantized on four threads" if stack.quantizes_on_threads else "nf4"


def intervals_around(
    config: TrainingConfig,
    stack: StackProfile,
    context: ByteRange,
    *,
    allocated_bytes: int,
    reserved_bytes: int,
    num_params: int,
    is_untested: bool,
    is_extrapolated: bool,
) -> Intervals:
    """Return the 90 % intervals of allocated, reserved and process (reserved and the context's range).

    `is_untested`: a part of the program no measurement has touched. `basis` says what the width rests on.
    """
    entry = error_classes()[error_class(config, stack)]
    tokens = config.batch.micro_batch_size * config.batch.sequence_length
    beyond = [
        text
        for text, is_beyond in (
            (f"{tokens:,} tokens in a batch, more than was seen", tokens > entry.allocated.most_tokens),
            (f"{num_params:,} parameters, more than was seen", num_params > entry.allocated.most_params),
            ("a path that no measurement has touched", is_untested),
        )
        if is_beyond
    ]
    widening = WIDER if beyond else 1.0
    allocated = _around(entry, "allocated", allocated_bytes, widening, beyond)
    reserved = _around(entry, "reserved", reserved_bytes, widening, beyond)
    if is_extrapolated:
        more = int(reserved_bytes * EXTRAPOLATED_PERCENT / 100)
        basis = f"{reserved.basis}; {EXTRAPOLATED_PERCENT:g} % more, since so long a program is extrapolated"
        reserved = reserved.with_(high_bytes=reserved.high_bytes + more, basis=basis)
    process = ByteRange(
        low_bytes=reserved.low_bytes + context.low_bytes,
        likely_bytes=reserved_bytes + context.likely_bytes,
        high_bytes=reserved.high_bytes + context.high_bytes,
        basis=f"{reserved.basis}; context: {context.basis}",
    )
    return Intervals(allocated, reserved, process)


def pad_bytes(metric: Metric, num_bytes: int) -> int:
    """Return what every interval has on both sides: one segment of the allocator, at most 2 % of the figure."""
    return min(SEGMENTS[metric], num_bytes * MOST_OF_A_PAD_PERCENT // 100)


def _around(entry: ErrorClass, metric: Metric, num_bytes: int, widening: float, beyond: list[str]) -> ByteRange:
    found: ErrorRange = getattr(entry, metric)
    low = max(found.low_percent * widening, FURTHEST_BELOW_PERCENT)
    high = found.high_percent * widening
    basis = (
        f"{entry.name}: {LEVEL_PERCENT} % of {found.num_rows} published rows of {found.num_groups} models and sources "
        f"lay within {found.low_percent:+.2f} and {found.high_percent:+.2f} %"
    )
    if beyond:
        basis += f"; twice as wide for {' and '.join(beyond)}"
    pad = pad_bytes(metric, num_bytes)
    return ByteRange(
        low_bytes=max(int(num_bytes * (1 + low / 100)) - pad, 0),
        likely_bytes=num_bytes,
        high_bytes=int(num_bytes * (1 + high / 100)) + pad,
        basis=f"{basis}; and {format_bytes(pad)}, at most a segment of the allocator",
    )
