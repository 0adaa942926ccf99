"""What tests of several rooms use: one call of the command line, a real small model, and no silent skips."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from smollm2 import kept_folder

from foretune.cli.app import run

ROOT = Path(__file__).parents[1]


class Called(NamedTuple):
    """What one call of the command line gave."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


class Stream(io.TextIOWrapper):
    """A text stream over bytes, as sys.stdout is one; `terminal` says what isatty answers."""

    def __init__(self, *, encoding: str = "utf-8", terminal: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, newline="\n", write_through=True)
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Called]:
    """Run the command line in this process, without network, as `call("models", "list", env={...})`."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("FORETUNE_CACHE", str(tmp_path / "kept"))

    def invoke(
        *arguments: str, env: dict[str, str] | None = None, encoding: str = "utf-8", terminal: bool = False
    ) -> Called:
        out, err = Stream(encoding=encoding, terminal=terminal), Stream(encoding=encoding, terminal=terminal)
        with monkeypatch.context() as patch:
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            patch.setattr("sys.stdout", out)
            patch.setattr("sys.stderr", err)
            code = run(arguments)
        return Called(code, out.text(), err.text())

    return invoke


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the folder of a real small model (tests/smollm2.py), to be read only; for tests marked `full`."""
    return kept_folder()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test that `make test` would run, where nothing makes the small model."""
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()) and item.get_closest_marker("full") is None:
            raise pytest.UsageError(f"{item.nodeid} takes smollm2, which is made for `make full`: mark it `full`.")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Make a skip a failure: a test that does not run proves nothing. Deselect it with a marker instead."""
    report: Any = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and skips are failures here: {report.longrepr}"
    return report
