"""Weights are found without being read, and a checkpoint that is not whole or not plain is refused by name."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from foretune.errors import ConfigError, UnsupportedError
from foretune.models import fetch_weights, find_weights, hub, read_safetensors_header

COMMIT = "c" * 40


def stored(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


ONE = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
GOOD = stored(ONE, bytes(16))


def write(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def refuse(path: str) -> hub.Answer:
        raise AssertionError(f"the hub is asked for {path}")

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "_get", refuse)
    return tmp_path / "hub"


def test_a_folder_with_one_file_or_with_shards_is_found(tmp_path: Path) -> None:
    one = find_weights(str(write(tmp_path / "one", model__safetensors=GOOD, config__json=b"{}")))
    assert (one.files, one.revision) == (("model.safetensors",), None)
    assert one.tensors()["a"][:3] == ("F32", (2, 2), 16)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = json.dumps({"weight_map": {"a": first, "b": second}})
    many = write(tmp_path / "many", **{"model.safetensors.index.json": index.encode(), "config.json": b"{}"})
    with pytest.raises(ConfigError):
        find_weights(str(many))
    write(many, **{first: GOOD})
    with pytest.raises(ConfigError, match="model-00002-of-00002"):
        find_weights(str(many))
    write(many, **{second: stored({"b": ONE["a"]}, bytes(16))})
    assert set(find_weights(str(many)).tensors()) == {"a", "b"}


def test_the_fingerprint_goes_by_config_and_weights(tmp_path: Path) -> None:
    folder = write(tmp_path, model__safetensors=GOOD, config__json=b"{}")
    before = find_weights(str(folder)).fingerprint()
    write(folder, notes__txt=b"x")
    assert find_weights(str(folder)).fingerprint() == before
    write(folder, model__safetensors=stored(ONE, b"\1" * 16))
    changed = find_weights(str(folder)).fingerprint()
    write(folder, config__json=b"{ }")
    assert len({before, changed, find_weights(str(folder)).fingerprint()}) == 3


def test_a_cached_file_is_known_by_the_hash_in_its_name(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("a" * 64)
    write(blob.parent, **{blob.name: GOOD})
    folder = write(tmp_path / "snapshot", config__json=b"{}")
    (folder / "model.safetensors").symlink_to(blob)
    before = find_weights(str(folder)).fingerprint()
    blob.write_bytes(GOOD + b"x")
    assert find_weights(str(folder)).fingerprint() == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt"])
def test_pickles_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="pickles only"):
        find_weights(str(write(tmp_path, **{name: b"", "config.json": b"{}"})))


BAD = {
    "longer than it may be": (1 << 40).to_bytes(8, "little") + b"{}",
    "its header is longer": b"\1",
    "stands in it twice": stored(
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        b' "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        bytes(4),
    ),
    "does not lie in the file": stored({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}, bytes(8)),
    "does not lie": stored({"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 16]}}, bytes(16)),
    "a size that is none": stored({"a": {"dtype": "F32", "shape": [-2, 2], "data_offsets": [0, 16]}}, bytes(16)),
    "Q99": stored({"a": {"dtype": "Q99", "shape": [2, 2], "data_offsets": [0, 16]}}, bytes(16)),
    "no whole safetensors": stored(b"[" * 100_000, b""),
    "whole safetensors checkpoint": stored(b"\xff\xfe", b""),
}


@pytest.mark.parametrize("words", BAD)
def test_a_header_that_is_none_is_refused(words: str, tmp_path: Path) -> None:
    folder = write(tmp_path, model__safetensors=BAD[words], config__json=b"{}")
    with pytest.raises(ConfigError, match=words) as caught:
        find_weights(str(folder)).tensors()
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", ".hidden.safetensors"])
def test_an_index_names_plain_files_only(name: str, tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": name}}).encode()
    files = {"model.safetensors.index.json": index, "config.json": b"{}", "model-1-of-1.safetensors": GOOD}
    with pytest.raises(ConfigError, match="no plain file name"):
        find_weights(str(write(tmp_path, **files)))


@hypothesis_settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4))
def test_what_is_accepted_lies_where_the_library_reads_it(tmp_path_factory: pytest.TempPathFactory, flips: Any) -> None:
    """A damaged header is refused here, or by the library, or holds the same for both."""
    data = bytearray(GOOD)
    for place, value in flips:
        data[place] = value
    path = tmp_path_factory.mktemp("flip") / "model.safetensors"
    path.write_bytes(data)
    try:
        ours = read_safetensors_header(path)
    except ConfigError:
        return
    try:
        with safe_open(path, "pt") as file:
            theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError:
        return
    assert {name: tensor.shape for name, tensor in ours.items()} == theirs


# -- the hub


def answered(body: Any, status: int = 200) -> Callable[[str], hub.Answer]:
    return lambda path: hub.Answer(status, None, COMMIT, json.dumps(body).encode(), False)


def files_of(*names: str) -> dict[str, Any]:
    return {"sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}


def test_the_hub_is_asked_which_files_there_are_before_any_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, Sequence[str]]] = []

    def download(id: str, revision: str, names: Sequence[str]) -> str:
        asked.append((id, revision, names))
        return str(write(tmp_path / COMMIT, model__safetensors=GOOD, config__json=b"{}"))

    monkeypatch.setattr(hub, "_get", answered(files_of("config.json", "model.safetensors", "pytorch_model.bin")))
    monkeypatch.setattr(hub, "_download", download)
    found = find_weights("a/b", revision="main")
    assert (found.folder, found.revision, asked) == (None, COMMIT, [])
    fetched = fetch_weights(found)
    assert (fetched.folder, fetched.revision) == (tmp_path / COMMIT, COMMIT)
    ((id, revision, names),) = asked
    assert (id, revision) == ("a/b", COMMIT)
    assert "model.safetensors" in names
    assert not [name for name in names if name.endswith((".bin", ".py"))]


def test_a_repository_of_pickles_is_refused_before_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_get", answered(files_of("config.json", "pytorch_model.bin")))
    with pytest.raises(UnsupportedError, match="pickles only"):
        find_weights("a/b")


def test_offline_nothing_is_asked() -> None:
    with pytest.raises(hub.ModelOfflineError, match="weights of a/b"):
        find_weights("a/b", offline=True)


@pytest.mark.parametrize("body", [[], {}, {"sha": "x", "siblings": []}, {"sha": COMMIT, "siblings": [1]}])
def test_an_answer_that_is_none_is_told(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_get", answered(body))
    with pytest.raises(hub.ModelOfflineError, match="cannot be read"):
        find_weights("a/b")


def test_a_whole_snapshot_is_used_without_the_hub(empty_cache: Path) -> None:
    snapshot = empty_cache / "models--a--b" / "snapshots" / COMMIT
    write(snapshot, model__safetensors=GOOD, config__json=b"{}")
    assert find_weights("a/b", revision=COMMIT).folder == snapshot
