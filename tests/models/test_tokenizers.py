"""Where a tokenizer is found: a folder, the hub cache, the Hub; and what its fingerprint goes by."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from foretune.errors import ConfigError, ModelAccessError
from foretune.models import TokenizerFiles, hub, resolve_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def refuse(path: str) -> hub.Answer:
        raise AssertionError(f"asked the hub for {path}")

    monkeypatch.setattr(hub, "_get", refuse)
    return cache


def with_tokenizer(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return folder


def test_a_folder_or_a_file_in_it_is_enough(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "model")
    for path in (folder, folder / "tokenizer.json"):
        found = resolve_tokenizer(str(path))
        assert (found.folder, found.revision) == (folder, None)


def test_a_folder_without_a_fast_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json, which a fast tokenizer is read from"):
        resolve_tokenizer(str(tmp_path / "model"))


def test_the_hub_cache_comes_before_the_hub(empty_cache: Path) -> None:
    model = empty_cache / "models--Qwen--Qwen2.5-0.5B"
    snapshot = with_tokenizer(model / "snapshots" / COMMIT)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    for name in ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B"):
        assert resolve_tokenizer(name) == TokenizerFiles(snapshot, "Qwen/Qwen2.5-0.5B", COMMIT)


def test_offline_what_is_not_there_is_said(empty_cache: Path) -> None:
    with pytest.raises(hub.ModelOfflineError, match=r"The tokenizer of Qwen/Qwen2\.5-0\.5B is not in the hub cache"):
        resolve_tokenizer("qwen2.5-0.5b", offline=True)
    (empty_cache / "models--a--b" / "snapshots" / COMMIT).mkdir(parents=True)
    with pytest.raises(hub.ModelOfflineError):
        resolve_tokenizer("a/b", revision=COMMIT, offline=True)


def answered(status: int, code: str | None = None) -> Callable[[str], hub.Answer]:
    return lambda path: hub.Answer(status, code, COMMIT, b"{}", False)


def test_the_hub_is_asked_for_small_files_of_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, Sequence[str]]] = []

    def download(id: str, revision: str, names: Sequence[str]) -> str:
        asked.append((id, revision, names))
        return str(with_tokenizer(tmp_path / COMMIT))

    monkeypatch.setattr(hub, "_get", answered(200))
    monkeypatch.setattr(hub, "_download", download)
    assert resolve_tokenizer("a/b", revision="v1").revision == COMMIT
    ((id, revision, names),) = asked
    assert (id, revision) == ("a/b", COMMIT)
    assert not [name for name in names if name.endswith((".safetensors", ".bin", ".model"))]


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(401, None, "without a token"), (403, None, "not granted"), (404, "EntryNotFound", "no tokenizer.json in a/b")],
)
def test_the_hubs_refusals_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str | None, words: str
) -> None:
    monkeypatch.setattr(hub, "_get", answered(status, code))
    with pytest.raises(ModelAccessError) as caught:
        resolve_tokenizer("a/b")
    assert words in caught.value.message
    assert "tokenizer.json" in (caught.value.hint or "")


def test_a_download_that_fails_names_no_cause_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise ConnectionError("Authorization: Bearer hf_secret")

    monkeypatch.setattr(hub, "_get", answered(200))
    monkeypatch.setattr(hub, "_download", fail)
    with pytest.raises(hub.ModelOfflineError) as caught:
        resolve_tokenizer("a/b")
    assert caught.value.__cause__ is None
    assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "https://huggingface.co/a/b", "a\nb", "../none", "a--b/c"])
def test_what_is_neither_a_folder_nor_an_id_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        resolve_tokenizer(name)


def test_the_fingerprint_goes_by_the_files_that_decide(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "model")
    files = resolve_tokenizer(str(folder))
    before = files.fingerprint()
    (folder / "model.safetensors").write_bytes(b"weights")
    assert files.fingerprint() == before
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}")
    found = {before, files.fingerprint()}
    (folder / "tokenizer.5.0.0.json").write_text("{}")
    found.add(files.fingerprint())
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "default.jinja").write_text("x")
    found.add(files.fingerprint())
    assert len(found) == 4


def test_half_a_snapshot_is_fetched_whole(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = empty_cache / "models--a--b" / "snapshots" / COMMIT
    with_tokenizer(snapshot)
    (snapshot / "tokenizer_config.json").unlink()
    monkeypatch.setattr(hub, "_get", answered(200))
    monkeypatch.setattr(hub, "_download", lambda *_: str(with_tokenizer(tmp_path / "whole" / COMMIT)))
    assert resolve_tokenizer("a/b", revision=COMMIT).folder == tmp_path / "whole" / COMMIT


def test_a_file_that_is_too_large_for_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "model")
    with (folder / "added_tokens.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ConfigError, match="larger than 536,870,912 bytes"):
        resolve_tokenizer(str(folder)).fingerprint()
