"""Predict the rows of a file of observations, one after the other, and hold each against what was measured."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Literal, NamedTuple

from foretune.errors import ForetuneError
from foretune.evidence.observations import Measured, Observation
from foretune.evidence.requests import Asked, Request, request_of
from foretune.memory import ByteRange, MemoryEstimate, Verdict
from foretune.values import Value

__all__ = ["METRICS", "Engine", "Interval", "Metric", "Prediction", "Readings", "Refusal", "score_rows"]

Metric = Literal["allocated", "reserved", "process"]
METRICS: tuple[Metric, ...] = ("allocated", "reserved", "process")
LATER = "(later)"
"""What marks the phases after the first update."""
AHEAD = 4
"""Rows asked for each worker before the first of them is waited for."""

Engine = Callable[[Request], tuple[MemoryEstimate, Verdict | None]]
"""Answers a request, with the verdict on its device. Raises ForetuneError. Workers need one of a module's own."""


class Readings(Value, frozen=True, kw_only=True):
    """Bytes of each measure. None: not measured."""

    allocated: int | None = None
    reserved: int | None = None
    process: int | None = None


class Interval(Value, frozen=True, kw_only=True):
    """For each measure the ends of the answer's 90 % interval, in bytes."""

    allocated: tuple[int, ...]
    reserved: tuple[int, ...]
    process: tuple[int, ...]


class Prediction(Value, frozen=True, kw_only=True):
    """What is predicted of a row, beside what was measured."""

    id: str
    source: str
    stack: str
    """The name of the profile."""
    foreign: bool
    """The profile, or a setting, is only the nearest."""
    outcome: Literal["ok", "oom"]
    """What became of the run; one that ran out of memory has a verdict to be held against, and no reading."""
    foreign_because: tuple[str, ...]
    allocated_bytes: int
    """Peak over the phases that the row's peak was taken over."""
    reserved_bytes: int
    process_bytes: int
    interval: Interval
    verdict: Verdict | None
    """On the row's device; None: its memory is not known."""
    measured: Readings

    def error_percent(self, metric: Metric) -> float | None:
        """How far the prediction is from what was measured, above it positive. None: not measured."""
        measured: int | None = getattr(self.measured, metric)
        if measured is None:
            return None
        predicted: int = getattr(self, f"{metric}_bytes")
        return (predicted / measured - 1) * 100

    def covers(self, metric: Metric) -> bool | None:
        """Whether what was measured lies in the interval. None: not measured."""
        measured: int | None = getattr(self.measured, metric)
        low, high = getattr(self.interval, metric)
        return None if measured is None else low <= measured <= high


class Refusal(Value, frozen=True, kw_only=True):
    """A row that is not predicted, and why."""

    id: str
    source: str
    reason: str


class _Figures(NamedTuple):
    """What is kept of an answer: little, since it is kept for every request."""

    allocated: int
    later_allocated: int
    first_allocated: int
    reserved: int
    process: int
    interval: Interval
    verdict: Verdict | None


_Answer = _Figures | str
"""Figures, or the reason of a refusal."""


def score_rows(rows: Iterable[Observation], engine: Engine, *, workers: int = 1) -> Iterator[Prediction | Refusal]:
    """Yield for each row, in order, its prediction or the reason why there is none.

    What several rows ask is answered once. An error of ours is a reason; anything else is raised. With more than one
    worker, requests are answered by so many processes.
    """
    asked = ((row, _asked(row)) for row in rows)
    for row, question, answer in _answered(asked, engine) if workers < 2 else _shared(asked, engine, workers):
        if isinstance(question, str) or isinstance(answer, str):
            reason = question if isinstance(question, str) else str(answer)
            yield Refusal(id=row.id, source=row.source.name, reason=reason)
        else:
            assert answer is not None
            yield _prediction(row, question, answer)


_Question = tuple[Observation, Asked | str]
_Answered = tuple[Observation, Asked | str, _Answer | None]


def _asked(row: Observation) -> Asked | str:
    try:
        return request_of(row)
    except ForetuneError as error:
        return _first_sentence(error)


def _answered(asked: Iterable[_Question], engine: Engine) -> Iterator[_Answered]:
    """Answer in this process."""
    answers: dict[Request, _Answer] = {}
    for row, question in asked:
        if isinstance(question, str):
            yield row, question, None
            continue
        if question.request not in answers:
            answers[question.request] = _answer(engine, question.request)
        yield row, question, answers[question.request]


def _shared(asked: Iterable[_Question], engine: Engine, workers: int) -> Iterator[_Answered]:
    """Answer in several processes, a few rows ahead; fresh ones, so that no thread of this one is cut in two."""
    futures: dict[Request, Future[_Answer]] = {}
    waiting: deque[_Question] = deque()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            for row, question in asked:
                if not isinstance(question, str) and question.request not in futures:
                    futures[question.request] = pool.submit(_answer, engine, question.request)
                waiting.append((row, question))
                if len(waiting) > AHEAD * workers:
                    yield _finished(waiting.popleft(), futures)
            while waiting:
                yield _finished(waiting.popleft(), futures)
        finally:
            pool.shutdown(cancel_futures=True)


def _finished(question: _Question, futures: dict[Request, "Future[_Answer]"]) -> _Answered:
    row, asked = question
    return row, asked, None if isinstance(asked, str) else futures[asked.request].result()


def _answer(engine: Engine, request: Request) -> _Answer:
    try:
        estimate, verdict = engine(request)
    except ForetuneError as error:
        return _first_sentence(error)
    later = [phase.allocated_bytes for phase in estimate.phases if phase.phase.endswith(LATER)]
    first = [phase.allocated_bytes for phase in estimate.phases if not phase.phase.endswith(LATER)]
    return _Figures(
        allocated=estimate.allocated_bytes,
        later_allocated=max(later, default=estimate.allocated_bytes),
        first_allocated=max(first, default=estimate.allocated_bytes),
        reserved=estimate.reserved_bytes,
        process=estimate.process_bytes,
        interval=Interval(
            allocated=_ends(estimate.allocated_interval),
            reserved=_ends(estimate.reserved_interval),
            process=_ends(estimate.process_interval),
        ),
        verdict=verdict,
    )


def _ends(found: ByteRange) -> tuple[int, int]:
    return found.low_bytes, found.high_bytes


def _first_sentence(error: ForetuneError) -> str:
    sentence, period, _ = error.problems[0].message.partition(". ")
    return f"{sentence}." if period else sentence


def _prediction(row: Observation, asked: Asked, figures: _Figures) -> Prediction:
    allocated = figures.later_allocated if asked.leaves_out_first else figures.allocated
    if asked.is_first_batch:
        allocated = figures.first_allocated
    return Prediction(
        id=row.id,
        source=row.source.name,
        stack=asked.request.stack.name,
        foreign=bool(asked.foreign_because),
        outcome="oom" if row.outcome == "oom" else "ok",
        foreign_because=asked.foreign_because,
        allocated_bytes=allocated,
        reserved_bytes=figures.reserved,
        process_bytes=figures.process,
        interval=_interval(allocated, figures),
        verdict=figures.verdict,
        measured=_readings(row.measured) if row.outcome == "ok" else Readings(),
    )


def _interval(allocated: int, figures: _Figures) -> Interval:
    """The answer's own; around the later updates' peak where the row's is theirs."""
    moved = allocated - figures.allocated
    low, high = figures.interval.allocated
    return figures.interval.with_(allocated=(max(low + moved, 0), high + moved))


def _readings(measured: Measured) -> Readings:
    return Readings(
        allocated=measured.peak_allocated_bytes,
        reserved=measured.peak_reserved_bytes,
        process=measured.process_bytes,
    )
