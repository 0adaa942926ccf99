"""What `foretune train` shows of a run that ended."""

from pathlib import Path

import pytest
from runs.made_run import configured

from foretune.api import trace
from foretune.api.planning import first_record
from foretune.cli.terminal import Terminal
from foretune.cli.train import _draw_phases
from foretune.evidence import PhaseReading


@pytest.mark.parametrize("beyond", [0, 1])
def test_growth_beyond_what_the_plan_said_is_told(tmp_path: Path, beyond: int) -> None:
    config = configured(tmp_path).config
    need = trace(config, offline=True).answer.estimate
    reading = PhaseReading(phase="backward", peak_process_bytes=need.need_bytes + beyond)
    record = first_record(config).with_(prediction=need, readings=(reading,))
    told = " ".join(" ".join(_draw_phases(record, Terminal())).split())
    assert ("must be free: please report both." in told) == bool(beyond)
