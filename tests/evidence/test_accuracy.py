"""Both engines against the project's observations: what docs/accuracy.md is made from, and the bounds it keeps.

That the page is what scripts/docs.py makes of them is checked by `scripts/docs.py --check`.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from foretune import api
from foretune.evidence import (
    OWN_OBSERVATIONS,
    EngineName,
    Observation,
    Prediction,
    ScoreReport,
    Spread,
    read_observations,
    request_of,
    spread_of,
)
from foretune.memory import ESTIMATOR_VERSION, estimate_memory

STORED = Path(__file__).parents[2] / "docs" / "predictions"
ENGINES: tuple[EngineName, ...] = ("estimated", "traced")
SMALL = ("foretune-gpu-truth-1-qlora", "fitcheck-0044-aca21bbb", "fms-accel-0271-7235dd29")
"""Rows that are traced in a second or two: our own step, a plain loop, fms-acceleration's."""


@cache
def report() -> ScoreReport:
    return api.report_of(api.score(), "estimated")


@cache
def lines(engine: EngineName) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(line) for line in (STORED / f"{engine}.jsonl").read_text(encoding="utf-8").splitlines())


def stored(engine: EngineName) -> dict[str, dict[str, Any]]:
    return {line["id"]: line for line in lines(engine)[1:]}


@cache
def observed() -> Mapping[str, Observation]:
    return {row.id: row for row in read_observations()}


def figures(row: Prediction) -> dict[str, Any]:
    names = ("id", "allocated_bytes", "reserved_bytes", "process_bytes", "stack", "foreign", "verdict", "outcome")
    return {name: getattr(row, name) for name in names}


def errors(engine: EngineName, metric: str, applies: Callable[[Observation], bool]) -> dict[str, float]:
    """Absolute errors in percent, by id, of the rows whose stack is known."""
    found = {}
    for id_, line in stored(engine).items():
        row = observed()[id_]
        measured = getattr(row.measured, f"peak_{metric}_bytes")
        if measured is not None and not line["foreign"] and applies(row):
            found[id_] = abs(line[f"{metric}_bytes"] / measured - 1) * 100
    return found


def spread(engine: EngineName, metric: str, applies: Callable[[Observation], bool]) -> Spread:
    return spread_of(errors(engine, metric, applies).values())


def is_16bit_loop(row: Observation) -> bool:
    return row.software.driver == "manual_loop" and row.training.quantization == "none"


def is_nf4_loop(row: Observation) -> bool:
    return row.software.driver == "manual_loop" and row.training.quantization != "none"


def is_best_of_fms(row: Observation) -> bool:
    return row.source.name == "fms-accel" and row.grade == "A"


# -- the stored predictions are the engines'


@pytest.mark.parametrize("engine", ENGINES)
def test_the_stored_predictions_are_of_this_version_and_of_all_rows(engine: EngineName) -> None:
    head = lines(engine)[0]
    assert (head["engine"], head["estimator_version"]) == (engine, ESTIMATOR_VERSION)
    assert head["rows"] == len(observed()) == len(stored(engine)) + sum(head["refused"].values())
    assert (STORED / f"{engine}.jsonl").stat().st_size < 60_000


def test_the_stored_estimates_are_todays() -> None:
    assert {row.id: figures(row) for row in report().predictions} == stored("estimated")
    assert dict(report().reasons) == lines("estimated")[0]["refused"]


def assert_traces_are_todays(ids: set[str], folder: Path) -> None:
    header, *rows = OWN_OBSERVATIONS.read_text(encoding="utf-8").splitlines()
    chosen = [row for row in rows if json.loads(row)["id"] in ids]
    (folder / "rows.jsonl").write_text("\n".join([header, *chosen]), encoding="utf-8")
    made = list(api.score(folder / "rows.jsonl", engine="traced"))
    assert {row.id for row in made} == ids
    for row in made:
        assert isinstance(row, Prediction)
        assert figures(row) == stored("traced")[row.id]


def test_stored_traces_are_todays(tmp_path: Path) -> None:
    assert_traces_are_todays(set(SMALL), tmp_path)


@pytest.mark.full
def test_more_stored_traces_are_todays(tmp_path: Path) -> None:
    known = [id_ for id_, line in stored("traced").items() if not line["foreign"]]
    assert_traces_are_todays(set(known[:: len(known) // 15]), tmp_path)


# -- bounds


@pytest.mark.parametrize("engine", ENGINES)
def test_sixteen_bit_rows_agree_to_the_byte_in_the_middle_and_closely_at_worst(engine: EngineName) -> None:
    allocated, reserved = (spread(engine, metric, is_16bit_loop) for metric in ("allocated", "reserved"))
    assert allocated.n == reserved.n == 18
    assert allocated.median <= 0.005
    assert allocated.worst <= 0.05
    assert reserved.median <= 0.01
    assert reserved.worst <= 0.5


@pytest.mark.parametrize("engine", ENGINES)
def test_nf4_rows_agree_in_allocated_and_within_the_loaders_spread_in_reserved(engine: EngineName) -> None:
    allocated, reserved = (spread(engine, metric, is_nf4_loop) for metric in ("allocated", "reserved"))
    assert allocated.n == reserved.n == 37
    assert allocated.median <= 0.03
    assert allocated.worst <= 0.4
    assert reserved.median <= 2.5
    assert reserved.p90 <= 8
    assert reserved.worst <= 16


@pytest.mark.parametrize("engine", ENGINES)
def test_plain_loops_agree_in_the_middle(engine: EngineName) -> None:
    allocated = spread(engine, "allocated", lambda row: is_16bit_loop(row) or is_nf4_loop(row))
    assert allocated.median <= 0.02
    assert allocated.worst <= 0.6


@pytest.mark.parametrize("engine", ENGINES)
def test_fms_accelerations_rows_agree_closely(engine: EngineName) -> None:
    found = errors(engine, "allocated", is_best_of_fms)
    assert len(found) == 42
    assert spread_of(found.values()).median <= 0.02
    far = {id_ for id_, error in found.items() if error > 0.2}
    assert all('"gpt_bigcode"' in (observed()[id_].model.config or "") for id_ in far)
    assert max(found.values()) <= 1


@pytest.mark.parametrize("engine", ENGINES)
def test_foretunes_own_step_is_predicted_to_a_block(engine: EngineName) -> None:
    allocated, reserved = (
        spread(engine, metric, lambda row: row.software.driver == "foretune") for metric in ("allocated", "reserved")
    )
    assert allocated.n == reserved.n == 11
    assert allocated.worst <= 0.001
    assert reserved.median == 0
    assert reserved.worst <= 0.2


def test_the_blind_trace_was_of_every_configuration_and_close() -> None:
    head, *traced = (json.loads(line) for line in (STORED / "traced_blind.jsonl").read_text().splitlines())
    assert head["rows"] == len(traced) == 13
    for line in traced:
        measured = observed()[line["id"]].measured
        assert measured.peak_allocated_bytes is not None
        assert measured.peak_reserved_bytes is not None
        assert abs(line["allocated_bytes"] - measured.peak_allocated_bytes) <= 1024
        assert abs(line["reserved_bytes"] / measured.peak_reserved_bytes - 1) <= 0.002


def test_litgpts_rows_agree() -> None:
    found = spread("estimated", "allocated", lambda row: row.source.name == "litgpt-resource")
    assert found.n == 9
    assert found.median <= 0.05
    assert found.worst <= 0.5


def is_question_of_the_product(row: Observation) -> bool:
    """A peak of one GPU, full, lora or qlora, grade A or B, a known length, from elsewhere."""
    training = row.training
    is_asked = training.method in ("full", "lora", "qlora") and training.seq_len is not None and row.outcome == "ok"
    is_alone = (row.device.count, training.parallel.world_size, row.kind) == (1, 1, "train_peak")
    return is_asked and is_alone and row.grade in ("A", "B") and row.source.name != "foretune-gpu-truth"


def test_nearly_every_row_that_asks_what_the_product_answers_is_answered() -> None:
    asked = [id_ for id_, row in observed().items() if is_question_of_the_product(row)]
    answered = [id_ for id_ in asked if id_ in stored("estimated")]
    assert len(asked) > 150
    assert len(answered) >= 0.95 * len(asked)


def test_verdicts_are_seldom_wrong() -> None:
    told = [(line["outcome"], line["verdict"]) for line in stored("estimated").values() if line["verdict"]]
    succeeded = [verdict for outcome, verdict in told if outcome == "ok"]
    failed = [verdict for outcome, verdict in told if outcome == "oom"]
    assert len(succeeded) > 200
    assert succeeded.count("does not fit") <= 0.02 * len(succeeded)
    assert len(failed) >= 20
    assert "fits" not in failed


def test_every_row_is_predicted_or_refused_with_a_reason() -> None:
    answer = report()
    assert answer.rows == 714 == len(answer.predictions) + len(answer.refused)
    assert len({row.id for row in (*answer.predictions, *answer.refused)}) == 714
    assert all(refusal.reason.endswith((".", "?")) for refusal in answer.refused)
    assert answer.reasons["It ran on several devices, and one is predicted."] == 220


def test_a_t4s_context_is_the_same_whatever_runs() -> None:
    rows = [row for row in read_observations() if row.measured.process_bytes is not None and "T4" in row.device.name]
    assert len(rows) == 44
    for row in rows[:6]:
        request = request_of(row).request
        answer = estimate_memory(request.config, request.shape, request.device, stack=request.stack)
        assert row.measured.process_bytes is not None
        assert row.measured.peak_reserved_bytes is not None
        assert answer.context.likely_bytes == row.measured.process_bytes - row.measured.peak_reserved_bytes
