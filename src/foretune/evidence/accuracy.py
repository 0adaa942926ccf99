"""How far predictions are from what was measured: by source and in all, foreign stacks apart."""

from collections.abc import Iterable, Mapping
from statistics import mean, median
from typing import NamedTuple

from foretune.evidence.score import METRICS, Metric, Prediction, Refusal
from foretune.evidence.stacks import EngineName
from foretune.memory import ESTIMATOR_VERSION
from foretune.values import Value

__all__ = ["ALL_SOURCES", "EngineName", "ScoreReport", "Spread", "SummaryLine", "report_of", "spread_of", "summarize"]

ALL_SOURCES = "ALL"


class Spread(NamedTuple):
    """How errors are spread."""

    n: int
    median: float
    mean: float
    p90: float
    """Nine in ten are at most so large: the value of rank 0.9 n, rounded up."""
    worst: float


def spread_of(errors: Iterable[float]) -> Spread:
    """Sum up errors without their sign; there must be one."""
    found = sorted(abs(error) for error in errors)
    return Spread(len(found), median(found), mean(found), found[-(-9 * len(found) // 10) - 1], found[-1])


class SummaryLine(Value, frozen=True, kw_only=True):
    """Absolute errors in percent of what was measured."""

    source: str
    """`ALL`: all sources together."""
    metric: Metric
    foreign: bool
    """Of rows whose stack no profile describes."""
    n: int
    """Rows that are predicted and measured it."""
    median_abs_pct: float
    mean_abs_pct: float
    p90_abs_pct: float
    """Nine in ten rows are at most so far off: the value of rank 0.9 n, rounded up."""
    max_abs_pct: float
    covered_pct: float
    """Share of the rows that lie in the prediction's interval."""


class ScoreReport(Value, frozen=True, kw_only=True):
    """Every row of a file, predicted or refused, and the errors."""

    engine: EngineName
    estimator_version: str
    rows: int
    refused: tuple[Refusal, ...]
    summary: tuple[SummaryLine, ...]
    predictions: tuple[Prediction, ...]

    @property
    def verdicts(self) -> Mapping[str, Mapping[str, int]]:
        """How often which verdict was given to runs that succeeded (`ok`) and to those that ran out of memory (`oom`),
        where the memory of the device is known."""
        counts: dict[str, dict[str, int]] = {}
        for prediction in self.predictions:
            if prediction.verdict is not None:
                of = counts.setdefault(prediction.outcome, {})
                of[prediction.verdict] = of.get(prediction.verdict, 0) + 1
        return counts

    @property
    def reasons(self) -> Mapping[str, int]:
        """How many rows were refused for each reason, the most frequent first."""
        counts: dict[str, int] = {}
        for refusal in self.refused:
            counts[refusal.reason] = counts.get(refusal.reason, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def report_of(scored: Iterable[Prediction | Refusal], engine: EngineName) -> ScoreReport:
    """Put the scored rows together.

    report_of(score(), "estimated").summary
    """
    predictions: list[Prediction] = []
    refused: list[Refusal] = []
    for row in scored:
        if isinstance(row, Refusal):
            refused.append(row)
        else:
            predictions.append(row)
    return ScoreReport(
        engine=engine,
        estimator_version=ESTIMATOR_VERSION,
        rows=len(predictions) + len(refused),
        refused=tuple(refused),
        summary=summarize(predictions),
        predictions=tuple(predictions),
    )


def summarize(predictions: Iterable[Prediction]) -> tuple[SummaryLine, ...]:
    """Sum up by source, foreign or not, and metric; the whole stands last."""
    groups: dict[tuple[bool, str, bool, int], list[Prediction]] = {}
    for prediction in predictions:
        for position, metric in enumerate(METRICS):
            if prediction.error_percent(metric) is not None:
                for source in (prediction.source, ALL_SOURCES):
                    key = source == ALL_SOURCES, source, prediction.foreign, position
                    groups.setdefault(key, []).append(prediction)
    return tuple(_line(key[1], METRICS[key[3]], key[2], group) for key, group in sorted(groups.items()))


def _line(source: str, metric: Metric, foreign: bool, group: list[Prediction]) -> SummaryLine:
    spread = spread_of(error for each in group if (error := each.error_percent(metric)) is not None)
    return SummaryLine(
        source=source,
        metric=metric,
        foreign=foreign,
        n=spread.n,
        median_abs_pct=spread.median,
        mean_abs_pct=spread.mean,
        p90_abs_pct=spread.p90,
        max_abs_pct=spread.worst,
        covered_pct=100 * sum(each.covers(metric) is True for each in group) / len(group),
    )
