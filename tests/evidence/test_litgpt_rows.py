"""litgpt's published peaks against its program, which was written from its code and fitted to none of them."""

import pytest

from foretune.evidence import Observation, read_observations, request_of
from foretune.memory import estimate_memory

ROWS = [
    row
    for row in read_observations()
    if row.software.driver == "litgpt"
    and row.outcome == "ok"
    and row.device.count == 1
    and row.grade in ("A", "B")
    and row.training.method in ("lora", "qlora")
]


def error_percent(row: Observation) -> float:
    asked = request_of(row)
    request = asked.request
    answer = estimate_memory(request.config, request.shape, request.device, stack=request.stack)
    peaks = [p.allocated_bytes for p in answer.phases if not (asked.is_first_batch and p.phase.endswith("(later)"))]
    assert row.measured.peak_allocated_bytes is not None
    return abs(max(peaks) / row.measured.peak_allocated_bytes - 1) * 100


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_published_peak_is_met(row: Observation) -> None:
    assert error_percent(row) < 1
