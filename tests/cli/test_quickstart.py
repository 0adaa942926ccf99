"""The whole journey, by the commands that it shows."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from foretune.cli import quickstart

STEPS = ["plan", "data", "estimate", "trace", "train", "evaluate"]
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def take_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a model that trains in a second."""
    monkeypatch.setattr(quickstart, "MODEL_SIZES", TINY)
    monkeypatch.setattr(quickstart, "SETTINGS", {**quickstart.SETTINGS, "schedule.epochs": 1})


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    take_tiny_model(monkeypatch)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_step_is_told_and_what_was_estimated_is_traced(call, tiny: None, tmp_path: Path) -> None:
    called = call("quickstart", str(tmp_path / "first steps"), "--json")
    assert called.code == 0, called.out[-2000:]
    *told, summary = lines(called.out)
    assert [each["step"] for each in told] == [name for name in STEPS for _ in range(2)]
    assert [each["schema"].split("/")[0].split(".")[-1] for each in told] == ["begun", "done"] * 6
    answers = {each["step"]: each["answer"] for each in told[1::2]}
    assert answers["plan"]["verdict"] == "fits"
    assert 0 < answers["data"]["stats"]["num_supervised_tokens"] < answers["data"]["stats"]["num_tokens"]
    assert answers["evaluate"]["record"]["probe"]["is_bitwise_equal"] is True
    *on_a_card, process = summary["peaks"]
    for peak in on_a_card:
        assert peak["predicted_bytes"] == peak["found_bytes"] > 0
        assert (peak["predicted_kind"], peak["found_kind"]) == ("estimated", "traced")
    assert (process["predicted_kind"], process["found_kind"]) == ("traced", "measured")


@pytest.mark.full
def test_it_learns_and_grows_as_predicted(call, tmp_path: Path) -> None:
    *told, summary = lines(call("quickstart", str(tmp_path / "q"), "--json").out)
    answers = {each["step"]: each["answer"] for each in told[1::2]}
    scope = answers["train"]["record"]["scope"]
    assert scope["last_loss"] < 0.25 * scope["first_loss"]
    assert answers["evaluate"]["generations"][0]["text"] == "A week has seven days."
    process = summary["peaks"][-1]
    assert process["predicted_bytes"] == pytest.approx(process["found_bytes"], rel=0.2)


@pytest.mark.full
def test_a_shown_command_gives_what_the_step_gave(call, tiny: None, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = lines(call("quickstart", "here", "--json").out)
    begun, done = (
        [each for each in told if each["schema"].startswith(f"foretune.quickstart.{name}")]
        for name in ("begun", "done")
    )
    for step, answer in zip(begun[:4], done, strict=False):
        again = call(*shlex.split(step["command"])[1:], "--json").document
        kept = {name: value for name, value in again.items() if name != "was_cached"}
        assert kept.items() <= answer["answer"].items()


@pytest.mark.full
def test_text_shows_commands_and_the_comparison(call, tiny: None, tmp_path: Path) -> None:
    out = call("quickstart", str(tmp_path / "q"), env={"COLUMNS": "60"}).out
    assert max(map(len, out.splitlines())) <= 80
    flat = " ".join(out.split())
    for number, name in enumerate(("estimate", "data check", "estimate", "trace", "train", "evaluate"), 1):
        assert f"{number}/6" in flat
        assert f"$ foretune {name}" in flat
    assert "none" in flat
    assert "foretune recipe my-recipe --model MODEL" in flat


@pytest.mark.parametrize("taken", ["file", "folder"])
def test_nothing_is_written_into_what_is_there(call, tmp_path: Path, taken: str) -> None:
    place = tmp_path / "mine"
    if taken == "folder":
        place.mkdir()
        (place / "mine").touch()
    else:
        place.touch()
    called = call("quickstart", str(place))
    assert (called.code, called.out) == (8, "")
    assert "Choose another folder" in called.err


def test_a_step_that_fails_ends_it_with_that_steps_code(call, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(quickstart, "PLAN", (*quickstart.PLAN[:-1], "--gpu", "none such"))
    called = call("quickstart", str(tmp_path / "q"))
    assert called.code == 2
    assert "error:" in called.err
    assert "2/6" not in called.out


def test_a_step_that_dies_is_told(call, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    called = call("quickstart", str(tmp_path / "q"))
    assert called.code == 1
    assert "ended with exit code 1 and said nothing" in called.err


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.full), (signal.SIGTERM, 143)]
)
def test_a_signal_ends_the_command_that_runs_too(tmp_path: Path, number: int, code: int) -> None:
    command = [sys.executable, "-m", "foretune", "quickstart", str(tmp_path / "q"), "--json"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "FORETUNE_CACHE": str(tmp_path / "kept")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line).get("step") == "train":
                break
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        last = json.loads(process.stdout.read().splitlines()[-1])
    assert (process.returncode, last["error"]["exit_code"]) == (code, code)
    assert is_gone(process.pid)


def is_gone(group: int) -> bool:
    """Whether no process of a group is left: helpers of a command end a moment after it."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
