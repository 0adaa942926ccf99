"""Runs of these tests keep their tokens in a folder of their own and never ask the hub."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from runs.fork_server import ForkServer, fork_server


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORETUNE_CACHE", str(tmp_path / "kept"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-cache"))


@pytest.fixture
def prediction() -> None:
    """Asked for by tests whose runs are to have a prediction."""


@pytest.fixture(autouse=True)
def without_prediction(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the prediction, which takes longer than a tiny run, where no test looks at it."""
    if "prediction" not in request.fixturenames:
        from foretune.api.prediction import Predicted

        monkeypatch.setattr("foretune.api.planning.predict", lambda *_: Predicted(None))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with fork_server(tmp_path_factory.mktemp("kept")) as server:
        yield server
