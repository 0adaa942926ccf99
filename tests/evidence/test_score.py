"""Scoring: errors against hand-computed values, refusals, what is asked once, order with several processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evidence.rows import observation, public_row, write_rows

from foretune import api
from foretune.errors import ConfigError
from foretune.evidence import Observation, Prediction, Refusal, Request, report_of, request_of, score_rows, summarize
from foretune.evidence.score import Interval, Readings
from foretune.memory import MemoryEstimate, estimate_memory
from foretune.memory.answer import PhaseMemory


def estimated(request: Request) -> tuple[MemoryEstimate, None]:
    return estimate_memory(request.config, request.shape, request.device, stack=request.stack), None


def prediction(number: int, percent: float, *, source: str = "a", foreign: bool = False) -> Prediction:
    """A prediction of allocated that is so many percent above 1,000 bytes."""
    bytes_ = round(10 * (100 + percent))
    return Prediction(
        id=str(number),
        source=source,
        stack="s",
        foreign=foreign,
        outcome="ok",
        foreign_because=(),
        allocated_bytes=bytes_,
        reserved_bytes=0,
        process_bytes=0,
        interval=Interval(allocated=(bytes_ - 50, bytes_ + 50), reserved=(0, 0), process=(0, 0)),
        verdict=None,
        measured=Readings(allocated=1000),
    )


def test_errors_are_summed_up_as_by_hand() -> None:
    percents = [1, -2, 3, -4, 5, -6, 7, -8, 9, -10, 100]
    (line, whole) = summarize(prediction(number, percent) for number, percent in enumerate(percents))
    assert (line.source, line.metric, line.foreign, line.n) == ("a", "allocated", False, 11)
    assert line.median_abs_pct == pytest.approx(6)
    assert line.mean_abs_pct == pytest.approx(155 / 11)
    assert line.p90_abs_pct == pytest.approx(10)  # rank 9.9, rounded up: the tenth of eleven
    assert line.max_abs_pct == pytest.approx(100)
    assert line.covered_pct == pytest.approx(100 * 5 / 11)  # up to 5 % is 50 of 1,000 bytes
    assert whole == line.with_(source="ALL")


@pytest.mark.parametrize(("n", "rank"), [(1, 1), (2, 2), (9, 9), (10, 9), (11, 10), (20, 18)])
def test_nine_in_ten_is_a_rank(n: int, rank: int) -> None:
    line = summarize(prediction(number, number + 1) for number in range(n))[0]
    assert line.p90_abs_pct == pytest.approx(rank)


def test_sources_and_foreign_rows_stand_apart_and_the_whole_last() -> None:
    rows = [prediction(1, 1, source="b"), prediction(2, 2), prediction(3, 3, foreign=True)]
    lines = [(line.source, line.foreign, line.n) for line in summarize(rows)]
    assert lines == [("a", False, 1), ("a", True, 1), ("b", False, 1), ("ALL", False, 2), ("ALL", True, 1)]


def test_what_is_not_measured_is_predicted_and_in_no_sum() -> None:
    row = observation(measured={"peak_active_bytes": 5})
    report = report_of(score_rows([row], estimated), "estimated")
    assert len(report.predictions) == 1
    assert report.summary == ()


def test_figures_are_the_answers_and_so_are_the_margins() -> None:
    (row,) = [row for row in score_rows([observation()], estimated) if isinstance(row, Prediction)]
    answer, _ = estimated(request_of(observation()).request)
    assert (row.allocated_bytes, row.reserved_bytes) == (answer.allocated_bytes, answer.reserved_bytes)
    assert row.process_bytes == answer.process_bytes
    for metric in ("allocated", "reserved", "process"):
        bounds = getattr(answer, f"{metric}_interval")
        assert getattr(row.interval, metric) == (bounds.low_bytes, bounds.high_bytes)
    assert row.error_percent("allocated") == pytest.approx((answer.allocated_bytes / 20_000_000 - 1) * 100)


def test_a_peak_after_warm_up_is_that_of_later_updates() -> None:
    peaks = {"load": 900, "forward": 700, "forward (later)": 500, "optimizer (later)": 600}
    phases = tuple(PhaseMemory(phase=name, allocated_bytes=n, reserved_bytes=1000) for name, n in peaks.items())

    def loading(request: Request) -> tuple[MemoryEstimate, None]:
        return estimated(request)[0].with_(phases=phases, allocated_bytes=900, reserved_bytes=1000), None

    rows = [observation(), observation(measured__scope="train_steps_after_warmup")]
    found = [row for row in score_rows(rows, loading) if isinstance(row, Prediction)]
    assert [row.allocated_bytes for row in found] == [900, 600]
    assert [row.reserved_bytes for row in found] == [1000, 1000]


def test_a_run_that_ran_out_of_memory_has_a_verdict_and_no_reading(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [public_row(outcome="oom", measured={"peak_allocated_bytes": 5})])
    (row,) = api.score(file)
    assert isinstance(row, Prediction)
    assert (row.outcome, row.verdict) == ("oom", "fits")
    assert row.measured == Readings()


def test_an_error_of_ours_is_a_refusal_with_its_first_sentence() -> None:
    def refusing(request: Request) -> tuple[MemoryEstimate, None]:
        raise ConfigError("It cannot be. There is more to say.")

    rows = list(score_rows([observation(), observation(outcome="failed")], refusing))
    assert [row.reason for row in rows if isinstance(row, Refusal)] == [
        "It cannot be.",
        "The run failed (outcome: failed).",
    ]


def test_any_other_error_is_raised() -> None:
    def broken(request: Request) -> tuple[MemoryEstimate, None]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(score_rows([observation()], broken))


def test_rows_that_ask_the_same_are_answered_once() -> None:
    asked: list[Request] = []

    def counting(request: Request) -> tuple[MemoryEstimate, None]:
        asked.append(request)
        return estimated(request)

    rows = [observation(id=str(number), measured__peak_allocated_bytes=number + 1) for number in range(5)]
    rows.append(observation(id="5", training__seq_len=32))
    assert len(list(score_rows(rows, counting))) == 6
    assert len(asked) == 2


def test_rows_are_answered_as_they_come() -> None:
    def endless() -> Iterator[Observation]:
        yield observation()
        raise AssertionError("read ahead")

    assert next(score_rows(endless(), estimated)).id == "made-up-1"


def test_several_processes_give_the_same_in_the_same_order(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{"training__seq_len": 8 * (1 + number % 7)} for number in range(20)]
    changes[3] = {"outcome": "failed"}
    rows = [public_row(id=str(number), **change) for number, change in enumerate(changes)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert list(api.score(path, workers=2)) == list(api.score(path))


def test_traced_and_estimated_agree_on_our_own_loop(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [public_row(software__driver="torchtune")])
    (traced,) = api.score(path, engine="traced")
    (estimate,) = api.score(path)
    assert traced == estimate
    assert isinstance(traced, Prediction)
    assert (traced.stack, traced.foreign, traced.verdict) == ("foretune", True, "fits")
