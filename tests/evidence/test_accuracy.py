"""The estimate against the project's observations: what docs/accuracy.md says of them, and the bounds they keep."""

from functools import cache
from pathlib import Path
from statistics import median

import pytest

from foretune import api
from foretune.evidence import Prediction, ScoreReport, read_observations, request_of
from foretune.evidence.score import Metric
from foretune.memory import estimate_memory


@cache
def report() -> ScoreReport:
    return api.report_of(api.score(), "estimated")


@cache
def plain_loop() -> dict[bool, list[Prediction]]:
    """Predictions of the plain loops' rows, by whether the base is quantized."""
    quantized = {row.id: row.training.quantization != "none" for row in read_observations()}
    found: dict[bool, list[Prediction]] = {False: [], True: []}
    for prediction in report().predictions:
        if prediction.stack.startswith("manual-loop") and not prediction.foreign:
            found[quantized[prediction.id]].append(prediction)
    return found


def errors(quantized: bool, metric: Metric) -> list[float]:
    return [abs(row.error_percent(metric) or 0.0) for row in plain_loop()[quantized]]


@pytest.mark.parametrize("quantized", [False, True])
def test_the_accuracy_page_gives_these_figures(quantized: bool) -> None:
    allocated, reserved = errors(quantized, "allocated"), errors(quantized, "reserved")
    figures = [median(allocated), max(allocated), median(reserved), max(reserved)]
    row = f"| {len(allocated)} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |"
    assert row in (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text()


def test_the_margin_covers_what_it_says() -> None:
    assert max(errors(False, "reserved")) <= 1
    reserved = sorted(errors(True, "reserved"))
    assert reserved[len(reserved) * 9 // 10 - 1] <= 10


def test_sixteen_bit_rows_agree_to_the_byte_in_the_middle_and_closely_at_worst() -> None:
    allocated, reserved = errors(False, "allocated"), errors(False, "reserved")
    assert len(allocated) == 18
    assert median(allocated) <= 0.005
    assert max(allocated) <= 0.05
    assert median(reserved) <= 0.01
    assert max(reserved) <= 0.5


def test_nf4_rows_agree_in_allocated_and_within_the_loaders_spread_in_reserved() -> None:
    allocated, reserved = errors(True, "allocated"), errors(True, "reserved")
    assert len(allocated) == 37
    assert median(allocated) <= 0.03
    assert max(allocated) <= 0.4
    assert median(reserved) <= 2.5
    assert max(reserved) <= 16


def test_every_row_is_predicted_or_refused_with_a_reason() -> None:
    answer = report()
    assert answer.rows == 701 == len(answer.predictions) + len(answer.refused)
    assert len({row.id for row in (*answer.predictions, *answer.refused)}) == 701
    assert all(refusal.reason.endswith((".", "?")) for refusal in answer.refused)
    assert answer.reasons["The run failed (outcome: oom)."] == 76
    assert answer.reasons["It ran on several devices, and one is predicted."] == 173


def test_a_t4s_context_is_the_same_whatever_runs() -> None:
    rows = [row for row in read_observations() if row.measured.process_bytes is not None]
    assert len(rows) == 44
    for row in rows[:6]:
        request = request_of(row).request
        answer = estimate_memory(request.config, request.shape, request.device, stack=request.stack)
        assert row.measured.process_bytes is not None
        assert row.measured.peak_reserved_bytes is not None
        assert answer.context.likely_bytes == row.measured.process_bytes - row.measured.peak_reserved_bytes
