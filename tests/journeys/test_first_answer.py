"""The first thing that a person does: from nothing to an answer, by command line and by Python."""

from pathlib import Path

import pytest

from foretune import api


def test_from_an_empty_folder_to_a_verdict(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("config", "init", "run.yaml", "--model", "qwen2.5-0.5b").code == 0
    assert call("config", "validate", "run.yaml").code == 0
    called = call("estimate", "--config", "run.yaml", "--gpu", "RTX 3090", "--offline", "--check")
    assert called.code == 0
    assert "Fits: needs " in called.out


def test_python_and_command_line_give_one_answer(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call("config", "init", "run.yaml", "--model", "gpt2")
    config = api.load_config("run.yaml").config
    answer = api.estimate(config, device=api.find_device("rtx 3090"), offline=True)
    document = call("estimate", "--config", "run.yaml", "--gpu", "3090", "--offline", "--json").document
    assert answer.fit is not None
    assert answer.fit.verdict == document["verdict"]
    assert answer.estimate.need_bytes == document["need_bytes"]


def test_a_proposed_change_needs_what_it_says(call) -> None:
    words = ("estimate", "--model", "qwen2.5-0.5b", "--vram", "2", "--offline", "--json")
    document = call(*words).document
    assert document["verdict"] == "does not fit"
    assert document["fit"]["changes"]
    for change in document["fit"]["changes"]:
        flags = [word for setting in change["settings"] for word in ("--set", setting)]
        assert call(*words, *flags).document["need_bytes"] == change["need_bytes"]


def test_need_never_depends_on_the_cards_size(call) -> None:
    needs = {
        call("estimate", "--model", "gpt2", "--vram", size, "--offline", "--json").document["need_bytes"]
        for size in ("1", "8", "80")
    }
    assert len(needs) == 1
