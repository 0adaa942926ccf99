"""The Hub: a token's presence, offline or not, and its answer only where it was asked for."""

from collections.abc import Callable
from pathlib import Path

import pytest

from foretune.errors import MissingDependencyError
from foretune.machine import environment_findings, hub_findings
from foretune.machine.report import Finding
from foretune.models import hub
from foretune.models.hub import HubState

SECRET = "hf_" + "Zx9" * 12


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def found(asks: Callable[[], HubState] | None = None) -> dict[str, Finding]:
    return {finding.check: finding for finding in hub_findings(asks=asks)}


def test_no_token_is_missing_and_prevents_nothing() -> None:
    token = found()["hub.token"]
    assert (token.state, token.run, token.needed_for) == ("missing", ("hf auth login",), None)


def test_a_token_in_the_environment_or_in_a_file_is_said_to_be_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(SECRET)
    in_file = found()["hub.token"]
    (tmp_path / "token").unlink()
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "other"))
    (tmp_path / "other").write_text(SECRET)
    elsewhere = found()["hub.token"]
    (tmp_path / "other").write_text("")
    empty = found()["hub.token"]
    monkeypatch.setenv("HF_TOKEN", SECRET)
    in_environment = found()["hub.token"]
    assert [each.state for each in (in_file, elsewhere, empty, in_environment)] == ["ok", "ok", "missing", "ok"]
    assert "HF_TOKEN" in in_environment.found
    assert not any(str(len(SECRET)) in each.found or SECRET[:6] in each.found for each in (in_file, in_environment))


def test_the_hub_is_not_asked_unless_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_get", lambda *_, **__: pytest.fail("the network was used"))
    assert "hub.answer" not in found()


@pytest.mark.parametrize(
    ("status", "had_token", "state", "words"),
    [
        (200, False, "ok", "answers"),
        (200, True, "ok", "takes the token"),
        (401, True, "problem", "does not take the token"),
        (503, False, "problem", "HTTP 503"),
    ],
)
def test_the_answer_of_the_hub_is_told(status: int, had_token: bool, state: str, words: str) -> None:
    answer = found(lambda: HubState(status, had_token))["hub.answer"]
    assert (answer.state, words in answer.found) == (state, True)


def test_a_hub_that_does_not_answer_is_a_problem_without_the_request() -> None:
    def fails() -> HubState:
        raise ConnectionError(f"https://user:{SECRET}@hub timed out")

    answer = found(fails)["hub.answer"]
    assert (answer.state, answer.found) == ("problem", "it does not answer (ConnectionError)")


def test_offline_and_without_its_library_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks() -> HubState:
        raise MissingDependencyError("no library")

    assert found(lacks)["hub.answer"].state == "unknown"
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
        findings = found(lambda: pytest.fail("the network was used"))
        assert findings["hub.answer"].state == "unknown"
        assert "offline" in findings["hub.offline"].found
        monkeypatch.delenv(name)


def test_the_one_question_has_a_short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def get(path: str, *, timeout: float) -> hub.Answer:
        asked.append(timeout)
        return hub.Answer(200, None, None, b"{}", had_token=True)

    monkeypatch.setattr(hub, "_get", get)
    assert (hub.ask_hub(), asked[0] <= 5) == (HubState(200, True), True)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"HF_HOME": "$BASE/hf"},
        {"HF_HOME": "~/hf"},
        {"XDG_CACHE_HOME": "$BASE/cache"},
        {"HF_HUB_CACHE": "$BASE/hub", "HF_HOME": "/x"},
        {"HUGGINGFACE_HUB_CACHE": "/old"},
    ],
)
def test_the_cache_is_the_one_that_huggingface_hub_chooses(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    import importlib

    from huggingface_hub import constants

    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as patch:
        for name, value in {"BASE": "/base", **environment}.items():
            patch.setenv(name, value)
        theirs = importlib.reload(constants).HF_HUB_CACHE
        assert hub.cache_folder() == Path(theirs)
    importlib.reload(constants)


# -- variables


def variables(**environment: str) -> dict[str, Finding]:
    return {finding.check: finding for finding in environment_findings(environment)}


def test_known_variables_are_told_and_others_are_not() -> None:
    text = variables(CUDA_VISIBLE_DEVICES="0,1", HF_HUB_OFFLINE="1", AWS_SECRET_ACCESS_KEY="x", SHELL="/bin/sh")
    assert text["environment"].found == "CUDA_VISIBLE_DEVICES=0,1; HF_HUB_OFFLINE=1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_VISIBLE_DEVICES", "GPU-8f1c9b1e-0000-1111-2222-333344445555"),
        ("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:True,{SECRET}"),
        ("HF_HUB_OFFLINE", SECRET),
        ("OMP_NUM_THREADS", "4; cat /etc/passwd"),
        ("HF_HOME", "/home/alice/hf"),
        ("HF_ENDPOINT", "https://user:pw@mirror.example"),
    ],
)
def test_a_value_that_is_not_of_the_known_form_is_not_shown(name: str, value: str) -> None:
    assert variables(**{name: value})["environment"].found == f"{name} is set (not shown)"


def test_the_allocators_settings_are_shown_and_another_backend_is_a_problem() -> None:
    value = "expandable_segments:True,max_split_size_mb:512"
    assert variables(PYTORCH_CUDA_ALLOC_CONF=value)["environment"].found == f"PYTORCH_CUDA_ALLOC_CONF={value}"
    found = variables(PYTORCH_ALLOC_CONF="backend:cudaMallocAsync")["environment.PYTORCH_ALLOC_CONF"]
    assert (found.state, "caching allocator" in (found.advice or "")) == ("problem", True)


def test_a_switch_that_is_off_is_nothing_to_be_known() -> None:
    assert "environment.CUDA_LAUNCH_BLOCKING" not in variables(CUDA_LAUNCH_BLOCKING="0")
    assert variables(CUDA_LAUNCH_BLOCKING="1")["environment.CUDA_LAUNCH_BLOCKING"].state == "problem"
