"""Learn how far predictions are off, by class: quantiles of errors, scaled so that what is left out is covered.

The unit is a group: one source's rows of one model, which share what is wrong about them. Each group weighs the same
however many rows it has.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import copysign
from statistics import mean
from typing import NamedTuple

from foretune.memory.interval import LEVEL_PERCENT, ErrorClass, ErrorRange, Metric, pad_bytes

__all__ = [
    "Residual",
    "interval_score",
    "learn_class",
    "learn_range",
    "left_out_ranges",
]

SCALES = (0.5, 0.6, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
LEAST_COVERAGE = 0.88
"""Of the rows of every source that are left out: 90 % within what so few rows can tell."""
ROWS_OF_A_SOURCE = 5
"""A source with fewer is not asked for a share of its own."""
LEAST_PERCENT = 0.05
"""Half-widths are at least this: rows that are exact to the byte do not promise the next one is."""
TAIL = (100 - LEVEL_PERCENT) / 200


class Residual(NamedTuple):
    """A row that is predicted and measured."""

    source: str
    model: str
    error_percent: float
    """What was measured, above what was predicted, in percent of the prediction."""
    pad_percent: float
    """The segment of the allocator that every interval has on both sides, in percent of the prediction."""
    tokens: int
    params: int

    @classmethod
    def of(
        cls, source: str, model: str, metric: Metric, *, measured: int, predicted: int, tokens: int, params: int
    ) -> "Residual":
        """Make one from bytes."""
        error, pad = 100 * (measured / predicted - 1), 100 * pad_bytes(metric, predicted) / predicted
        return cls(source, model, error, pad, tokens, params)

    @property
    def group(self) -> tuple[str, str]:
        """The unit that is left out."""
        return self.source, self.model

    @property
    def beyond_percent(self) -> float:
        """What of the error the pad does not account for."""
        return copysign(max(abs(self.error_percent) - self.pad_percent, 0.0), self.error_percent)

    def is_within(self, low_percent: float, high_percent: float) -> bool:
        """Whether the measurement lies in the interval that a range gives."""
        return low_percent - self.pad_percent <= self.error_percent <= high_percent + self.pad_percent

    def score(self, low_percent: float, high_percent: float) -> float:
        """Return that interval's score, in percent of the prediction."""
        return interval_score(low_percent - self.pad_percent, high_percent + self.pad_percent, self.error_percent)


def learn_class(name: str, residuals: Mapping[str, Sequence[Residual]]) -> ErrorClass:
    """Learn a class from its rows of each measure."""
    ranges = {metric: learn_range(residuals[metric]) for metric in ("allocated", "reserved")}
    return ErrorClass.create(name=name, **{metric: found.to_dict() for metric, found in ranges.items()})


def learn_range(residuals: Sequence[Residual]) -> ErrorRange:
    """Learn the range that holds 90 % of the rows: quantiles, each side times a scale.

    Of the scales with which groups that are left out lie within what the others give, in 88 % of the rows of all and
    of every source, those with the best interval score on them.
    """
    low, high = _quantiles(residuals)
    pairs = [(below, above) for below in SCALES for above in SCALES]
    tried = [(_left_out(residuals, pair), pair) for pair in pairs]
    covering = [(score, each) for (share, score), each in tried if share >= LEAST_COVERAGE]
    _, (below, above) = min(covering) if covering else (0.0, (SCALES[-1], SCALES[-1]))
    return ErrorRange(
        low_percent=round(min(low * below, -LEAST_PERCENT), 3),
        high_percent=round(max(high * above, LEAST_PERCENT), 3),
        num_rows=len(residuals),
        num_groups=len({each.group for each in residuals}),
        scale_below=below,
        scale_above=above,
        most_tokens=max(each.tokens for each in residuals),
        most_params=max(each.params for each in residuals),
    )


def left_out_ranges(
    residuals: Sequence[Residual], scales: tuple[float, float]
) -> Iterator[tuple[list[Residual], float, float]]:
    """Yield each group's rows with the range that the other groups give, scaled."""
    by_group: dict[tuple[str, str], list[Residual]] = defaultdict(list)
    for each in residuals:
        by_group[each.group].append(each)
    for group, rows in by_group.items():
        others = [each for each in residuals if each.group != group]
        if others:
            low, high = _quantiles(others)
            yield rows, min(low * scales[0], -LEAST_PERCENT), max(high * scales[1], LEAST_PERCENT)


def _left_out(residuals: Sequence[Residual], scales: tuple[float, float]) -> tuple[float, float]:
    """Return the coverage of groups that are left out (the least of all rows' and each source's) and the mean score."""
    inside: dict[str, list[bool]] = defaultdict(list)
    scores: list[float] = []
    for rows, low, high in left_out_ranges(residuals, scales):
        for each in rows:
            inside[each.source].append(each.is_within(low, high))
            scores.append(each.score(low, high))
    if not scores:
        return 0.0, 0.0
    shares = [mean(found) for found in inside.values() if len(found) >= ROWS_OF_A_SOURCE]
    return min([*shares, mean(one for found in inside.values() for one in found)]), mean(scores)


def _quantiles(residuals: Sequence[Residual]) -> tuple[float, float]:
    """The 5 % and 95 % quantiles with every group weighing the same; with fewer than twenty groups the extremes. Zero
    lies within."""
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for each in residuals:
        sizes[each.group] += 1
    tail = max(TAIL - (1 - TAIL) / len(sizes), 0.0)
    ordered = sorted((each.beyond_percent, 1 / sizes[each.group] / len(sizes)) for each in residuals)
    low, high = _at(ordered, tail), -_at([(-error, weight) for error, weight in reversed(ordered)], tail)
    return min(low, 0.0), max(high, 0.0)


def _at(ordered: Sequence[tuple[float, float]], share: float) -> float:
    """Return the error below which `share` of the weight lies."""
    total = 0.0
    for error, weight in ordered:
        total += weight
        if total > share + 1e-12:
            return error
    return ordered[-1][0]


def interval_score(low: float, high: float, truth: float) -> float:
    """Return Gneiting and Raftery's score (2007, equation 43): the width, and 2/alpha for each unit of a miss."""
    alpha = 1 - LEVEL_PERCENT / 100
    return high - low + 2 / alpha * (max(low - truth, 0.0) + max(truth - high, 0.0))
