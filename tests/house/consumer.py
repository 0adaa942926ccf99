"""A program of somebody else who type-checks strictly: mypy reads it in `make lint`; nothing runs it."""

from pathlib import Path
from typing import assert_type

from foretune import api
from foretune.errors import ForetuneError
from foretune.memory import Verdict
from foretune.memory.answer import MemoryEstimate


def plan(model: str) -> str:
    config = api.build_config({"model.id": model, "lora.rank": 16}).config
    assert_type(config, api.TrainingConfig)
    answer = api.estimate(config, device=api.find_device("rtx 3090"))
    assert_type(answer.verdict, Verdict | None)
    assert_type(answer.estimate, MemoryEstimate | None)
    assert_type(api.trace(config).answer.estimate, MemoryEstimate)
    found = api.recommend(config, device=api.device_from_memory(24 << 30))
    assert_type(found.plans, tuple[api.Plan, ...])
    return found.plans[0].why[0]


def run(file: Path) -> float | None:
    loss: float | None = None
    try:
        for event in api.train(api.load_config(file).config):
            if isinstance(event, api.UpdateDone):
                loss = event.loss
            elif isinstance(event, api.RunFinished):
                assert_type(event.record, api.RunRecord)
    except ForetuneError as error:
        assert_type(error.exit_code, int)
    return loss


def lines() -> list[str]:
    report = api.examine_machine(online=False)
    assert_type(report, api.MachineReport)
    return [line for finding in report.findings if finding.is_wrong for line in finding.run]


def rows() -> int:
    assert_type(api.make_sample_model("model"), Path)
    return sum(len(row) for row in api.sample_rows())
