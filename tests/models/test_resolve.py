"""Ids find their model in a stated order; the cache and the Hub answer as files and statuses (shared/cases 108)."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from models.configs import LLAMA

from foretune.errors import ConfigError, ModelAccessError
from foretune.models import hub, list_models, resolve_model
from foretune.models.catalogue import find_catalogue, near_matches

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secretsecretsecret"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return cache


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> hub.Answer:
        raise AssertionError(f"the network was asked for {path}")

    monkeypatch.setattr(hub, "_get", refuse)


def put_in_cache(cache: Path, id: str, config: dict[str, object], revision: str = "main") -> None:
    folder = cache / f"models--{id.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(COMMIT)
    (folder / "snapshots" / COMMIT).mkdir(parents=True, exist_ok=True)
    (folder / "snapshots" / COMMIT / "config.json").write_text(json.dumps(config))


# -- catalogue ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "id", ["Qwen/Qwen2.5-0.5B", "qwen/qwen2.5-0.5b", "QWEN2.5-0.5B", "qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct"]
)
def test_a_model_is_found_in_any_case_with_or_without_its_organisation(id: str) -> None:
    assert resolve_model(id, offline=True).total_params == 494_032_768


def test_an_alias_keeps_its_id_and_does_not_claim_its_twin_s_context() -> None:
    shape = resolve_model("01-ai/yi-9b-200k", offline=True)
    assert (shape.id, shape.max_positions) == ("01-ai/Yi-9B-200K", None)
    assert any("01-ai/Yi-1.5-9B" in note for note in shape.notes)


def test_a_name_that_means_several_models_lists_them() -> None:
    with pytest.raises(ConfigError, match=r"CohereForAI/aya-23-8B, CohereLabs/aya-23-8B"):
        find_catalogue("aya-23-8b")


def test_near_matches_are_named() -> None:
    assert "Qwen/Qwen2.5-0.5B" in near_matches("qwen2.5-0.5")
    assert "openai-community/gpt2" in near_matches("gpt-2")


def test_the_list_holds_every_model_once() -> None:
    entries = list_models()
    ids = [id.lower() for entry in entries for id in (entry.id, *entry.aliases)]
    assert len(ids) == len(set(ids)) > 500
    assert [entry.id for entry in entries] == sorted((entry.id for entry in entries), key=str.lower)


def test_the_catalogue_comes_before_the_cache(empty_cache: Path) -> None:
    put_in_cache(empty_cache, "Qwen/Qwen2.5-0.5B", LLAMA)
    assert resolve_model("Qwen/Qwen2.5-0.5B").source == "catalogue"


# -- order -------------------------------------------------------------------------------------------------------


def test_a_path_comes_before_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    assert resolve_model("gpt2").source == "file"


def test_a_folder_without_a_config_does_not_hide_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("gpt2").source == "catalogue"


def test_the_cache_answers_without_network_and_without_its_library(empty_cache: Path) -> None:
    put_in_cache(empty_cache, "me/tiny", LLAMA)
    already = "huggingface_hub" in sys.modules
    shape = resolve_model("me/tiny", offline=True)
    assert (shape.source, shape.revision, shape.id) == ("cache", COMMIT, "me/tiny")
    assert already or "huggingface_hub" not in sys.modules


@pytest.mark.parametrize("revision", ["v1.0", COMMIT])
def test_a_revision_is_taken_from_the_cache(empty_cache: Path, revision: str) -> None:
    put_in_cache(empty_cache, "me/tiny", LLAMA, "v1.0")
    assert resolve_model("me/tiny", revision=revision, offline=True).revision == COMMIT


def test_offline_a_revision_of_a_catalogue_model_is_answered_with_a_note() -> None:
    shape = resolve_model("gpt2", revision="abc", offline=True)
    assert shape.revision is None
    assert any("revision abc was not consulted" in note for note in shape.notes)


@pytest.mark.parametrize("content", ["", "not a commit", "../../../etc", "\x00"])
def test_a_broken_cache_is_no_cache(empty_cache: Path, content: str) -> None:
    put_in_cache(empty_cache, "me/tiny", LLAMA)
    (empty_cache / "models--me--tiny" / "refs" / "main").write_text(content)
    with pytest.raises(hub.ModelOfflineError):
        resolve_model("me/tiny", offline=True)


def test_a_broken_config_in_the_cache_is_named(empty_cache: Path) -> None:
    put_in_cache(empty_cache, "me/tiny", LLAMA)
    path = empty_cache / "models--me--tiny" / "snapshots" / COMMIT / "config.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json:1:2: This is not JSON"):
        resolve_model("me/tiny", offline=True)


def test_an_unknown_id_offline_says_so_with_near_matches() -> None:
    with pytest.raises(hub.ModelOfflineError) as caught:
        resolve_model("qwen/qwen2.5-0.5", offline=True)
    text = str(caught.value)
    assert "offline" in text
    assert "Qwen/Qwen2.5-0.5B" in text
    assert "config.json" in text
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    "id",
    [
        "",
        "  ",
        "a\nb",
        "a\x00b",
        "https://huggingface.co/gpt2",
        "../../etc/passwd",
        "..",
        "me/..",
        "a--b",
        "me/a/b",
        "no such/model",
        "me/%2e%2e",
        "me/model?x=1",
        "-rf",
        "C:\\models",
        "~nobody-here/x",
        "x" * 5000,
        "missing.json",
        "é/model",
    ],
)
def test_what_is_no_id_is_refused_before_anything_is_asked(id: str) -> None:
    with pytest.raises(ConfigError):
        resolve_model(id)


@pytest.mark.parametrize("revision", ["", "../x", "a b", "a\nb", "-x", "x" * 300])
def test_what_is_no_revision_is_refused(revision: str) -> None:
    with pytest.raises(ConfigError, match="revision"):
        resolve_model("me/tiny", revision=revision)


# -- hub ---------------------------------------------------------------------------------------------------------


def answering(status: int, error_code: str | None = None, *, had_token: bool = True) -> Callable[[str], hub.Answer]:
    body = json.dumps(LLAMA).encode() if status == 200 else b"no"
    return lambda path: hub.Answer(status, error_code, COMMIT, body, had_token)


def unreachable(path: str) -> hub.Answer:
    raise ConnectionError(f"Authorization: Bearer {TOKEN}")


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (answering(401, had_token=False), "model-access-token", "without a token"),
        (answering(401, "GatedRepo", had_token=False), "model-access-token", "without a token"),
        (answering(403, "GatedRepo"), "model-access-gated", "not granted access"),
        (answering(404, "RepoNotFound"), "model-access-not-found", "no model"),
        (answering(401, "RepoNotFound"), "model-access-not-found", "no model"),
        (answering(404, "RevisionNotFound"), "model-access-not-found", "no revision"),
        (answering(404, "EntryNotFound"), "model-access-not-found", "no config.json"),
        (answering(503), "model-access-offline", "did not answer"),
        (unreachable, "model-access-offline", "cannot be reached"),
    ],
)
def test_the_hub_s_answers_are_four_messages(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], hub.Answer], code: str, words: str
) -> None:
    monkeypatch.setattr(hub, "_get", answer)
    with pytest.raises(ModelAccessError) as caught:
        resolve_model("me/tiny")
    assert caught.value.code == code
    assert words in str(caught.value)
    assert caught.value.exit_code == 4
    assert caught.value.__cause__ is None
    assert "hf_" not in str(caught.value) + json.dumps(caught.value.as_json())


@pytest.mark.parametrize(("published", "words"), [(86_848, "the same"), (86_940, "+92"), (None, None)])
def test_a_download_is_checked_against_the_safetensors_headers(
    monkeypatch: pytest.MonkeyPatch, published: int | None, words: str | None
) -> None:
    asked: list[str] = []
    counts = json.dumps({"safetensors": {"total": published} if published else None}).encode()

    def answer(path: str) -> hub.Answer:
        asked.append(path)
        body = counts if path.startswith("api/") else json.dumps(LLAMA).encode()
        return hub.Answer(200, None, COMMIT, body, False)

    monkeypatch.setattr(hub, "_get", answer)
    shape = resolve_model("me/tiny")
    assert (shape.source, shape.revision) == ("hub", COMMIT)
    assert asked == ["me/tiny/resolve/main/config.json", f"api/models/me/tiny/revision/{COMMIT}?expand[]=safetensors"]
    assert [words in note for note in shape.notes if words] == ([True] if words else [])


def test_with_hf_hub_offline_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(hub.ModelOfflineError, match="HF_HUB_OFFLINE is set"):
        hub.fetch_config("me/tiny")
