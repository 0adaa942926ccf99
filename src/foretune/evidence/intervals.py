"""Learn how far predictions are off, by class: quantiles of errors, widened until groups that are left out are covered.

The unit is a group: one source's rows of one model, which share what is wrong about them. Each group weighs the same
however many rows it has.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import mean
from typing import NamedTuple

from foretune.memory.interval import LEVEL_PERCENT, PADS, ErrorClass, ErrorRange, Metric

__all__ = [
    "Residual",
    "coverage",
    "interval_score",
    "learn_class",
    "learn_range",
    "left_out_ranges",
    "residual_percent",
]

INFLATIONS = (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
LEAST_COVERAGE = 0.88
LEAST_PERCENT = 0.05
"""Half-widths are at least this: rows that are exact to the byte do not promise the next one is."""
TAIL = (100 - LEVEL_PERCENT) / 200


class Residual(NamedTuple):
    """A row that is predicted and measured."""

    source: str
    model: str
    error_percent: float
    """What was measured, above what was predicted, in percent of the prediction; what a segment of the allocator
    accounts for is taken off, since every interval has it on both sides."""
    tokens: int
    params: int

    @property
    def group(self) -> tuple[str, str]:
        """The unit that is left out."""
        return self.source, self.model


def residual_percent(measured_bytes: int, predicted_bytes: int, metric: Metric) -> float:
    """Return a row's error beyond the pad that every interval has."""
    beyond = measured_bytes - predicted_bytes
    beyond = max(abs(beyond) - PADS[metric], 0) * (1 if beyond > 0 else -1)
    return 100 * beyond / predicted_bytes


def learn_class(name: str, residuals: Mapping[str, Sequence[Residual]]) -> ErrorClass:
    """Learn a class from its rows of each measure."""
    ranges = {metric: learn_range(residuals[metric]) for metric in ("allocated", "reserved")}
    return ErrorClass.create(name=name, **{metric: found.to_dict() for metric, found in ranges.items()})


def learn_range(residuals: Sequence[Residual]) -> ErrorRange:
    """Learn the range that holds 90 % of the rows: quantiles, each side times an inflation.

    Of the inflations with which 88 % of the rows of groups that are left out lie within what the others give, those
    with the best interval score on them.
    """
    low, high = _quantiles(residuals)
    pairs = [(below, above) for below in INFLATIONS for above in INFLATIONS]
    tried = [(_left_out(residuals, pair), pair) for pair in pairs]
    covering = [(score, each) for (share, score), each in tried if share >= LEAST_COVERAGE]
    _, (below, above) = min(covering) if covering else (0.0, (INFLATIONS[-1], INFLATIONS[-1]))
    return ErrorRange(
        low_percent=round(low * below, 3),
        high_percent=round(high * above, 3),
        num_rows=len(residuals),
        num_groups=len({each.group for each in residuals}),
        inflation_below=below,
        inflation_above=above,
        most_tokens=max(each.tokens for each in residuals),
        most_params=max(each.params for each in residuals),
    )


def left_out_ranges(
    residuals: Sequence[Residual], inflations: tuple[float, float]
) -> Iterator[tuple[list[Residual], float, float]]:
    """Yield each group's rows with the range that the other groups give."""
    by_group: dict[tuple[str, str], list[Residual]] = defaultdict(list)
    for each in residuals:
        by_group[each.group].append(each)
    for group, rows in by_group.items():
        others = [each for each in residuals if each.group != group]
        if others:
            low, high = _quantiles(others)
            yield rows, low * inflations[0], high * inflations[1]


def _left_out(residuals: Sequence[Residual], inflations: tuple[float, float]) -> tuple[float, float]:
    """Return coverage and mean interval score over the rows of groups that are left out."""
    inside, scores = [], []
    for rows, low, high in left_out_ranges(residuals, inflations):
        inside += [low <= each.error_percent <= high for each in rows]
        scores += [interval_score(low, high, each.error_percent) for each in rows]
    return (mean(inside), mean(scores)) if inside else (0.0, 0.0)


def coverage(residuals: Iterable[Residual], low_percent: float, high_percent: float) -> float:
    """Return the share of rows within a range."""
    inside = [low_percent <= each.error_percent <= high_percent for each in residuals]
    return sum(inside) / len(inside)


def _quantiles(residuals: Sequence[Residual]) -> tuple[float, float]:
    """The 5 % and 95 % quantiles with every group weighing the same; with fewer than twenty groups the extremes. Zero
    lies within, and both sides are at least the least half-width."""
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for each in residuals:
        sizes[each.group] += 1
    tail = max(TAIL - (1 - TAIL) / len(sizes), 0.0)
    ordered = sorted((each.error_percent, 1 / sizes[each.group] / len(sizes)) for each in residuals)
    low, high = _at(ordered, tail), -_at([(-error, weight) for error, weight in reversed(ordered)], tail)
    return min(low, -LEAST_PERCENT), max(high, LEAST_PERCENT)


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
