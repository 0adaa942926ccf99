"""A disk that takes no more ends a run in one clean error: nothing half done is left, and the record says so."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from runs.busy_run import RESUME, RUN, SHORT, Left, assert_sound, left_by, record_of, staged, write_busy_config
from runs.fork_server import Ended, ForkServer

from foretune.durable import STAGED, publish_folder, remove_folder, replace_file
from foretune.errors import SaveError

CHECKPOINT = ["stage", "sync trained.safetensors", "rename", "published"]
SAVE = ["save weights", "write artifact.json", "sync tokenizer.json"]


@pytest.fixture(scope="module")
def undisturbed(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Left, list[str]]:
    """Return what a run leaves whose disk has room, and the points at which it touches it."""
    folder = tmp_path_factory.mktemp("undisturbed") / "it"
    write_busy_config(folder, **SHORT)
    assert server.run(folder, *RUN, log=str(folder / "points")).code == 0
    return left_by(folder / "run"), (folder / "points").read_text().splitlines()


def failed(server: ForkServer, folder: Path, reason: str, **fault: Any) -> Ended:
    """Run until the disk fails: one error that says why and what to do, nothing staged, no part of an artifact."""
    ended = server.run(folder, *RUN, "--json", **fault)
    assert (ended.code, ended.error["code"]) == (SaveError.exit_code, SaveError.code), ended.err
    assert reason in ended.error["message"]
    assert ended.error["hint"]
    assert "Traceback" not in ended.err
    assert "foretune.train/1" not in ended.out
    assert staged(folder) == []
    assert_sound(folder)
    return ended


# -- once: the disk takes the record


def place_of(points: list[str], point: str, *, last: bool = False) -> int:
    """Return the number of the first point of a name, or of the last one."""
    return len(points) - points[::-1].index(point) if last else 1 + points.index(point)


def fails_once(server: ForkServer, folder: Path, number: int, code: int) -> None:
    write_busy_config(folder, **SHORT)
    ended = failed(server, folder, os.strerror(code), number=number, kind="error", error=code)
    record = record_of(folder / "run")
    assert record.outcome == "save-error"
    assert record.failure is not None
    assert record.failure.message == ended.error["message"]
    assert ended.error["record"] == str(folder / "run/record.json")


@pytest.mark.parametrize("point", CHECKPOINT)
def test_a_checkpoint_that_the_disk_does_not_take_is_a_save_error(
    point: str, server: ForkServer, undisturbed: tuple[Left, list[str]], tmp_path: Path
) -> None:
    fails_once(server, tmp_path / "it", place_of(undisturbed[1], point), errno.ENOSPC)
    assert list((tmp_path / "it/run/checkpoints").iterdir()) == []


@pytest.mark.parametrize(("point", "code"), [*((each, errno.ENOSPC) for each in SAVE), ("rename", errno.EROFS)])
def test_an_artifact_that_the_disk_does_not_take_is_a_save_error(
    point: str, code: int, server: ForkServer, undisturbed: tuple[Left, list[str]], tmp_path: Path
) -> None:
    fails_once(server, tmp_path / "it", place_of(undisturbed[1], point, last=True), code)
    assert not (tmp_path / "it/run/adapter").exists()


def test_when_there_is_room_again_it_is_resumed_to_the_bit(
    server: ForkServer, undisturbed: tuple[Left, list[str]], tmp_path: Path
) -> None:
    """The artifact had its name when the disk failed: who was told that it failed does not find it."""
    left, points = undisturbed
    fails_once(server, tmp_path / "it", place_of(points, "published", last=True), errno.EIO)
    assert not (tmp_path / "it/run/adapter").exists()
    assert server.run(tmp_path / "it", *RESUME).code == 0
    assert left_by(tmp_path / "it/run") == left


@pytest.mark.full
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_every_point_of_a_run_fails_cleanly(
    code: int, server: ForkServer, undisturbed: tuple[Left, list[str]], tmp_path: Path
) -> None:
    points = undisturbed[1]
    begun = place_of(points, "write .config.yaml.new")
    first = {point: number for number, point in reversed(list(enumerate(points, 1)))}
    last = {point: number for number, point in enumerate(points, 1)}
    for number in sorted({*first.values(), *last.values()}):
        if number >= begun and not points[number - 1].startswith("remove "):
            fails_once(server, tmp_path / str(number), number, code)


# -- for good: the record cannot be written either


@pytest.mark.parametrize(("point", "last"), [("append", False), ("save weights", True)])
def test_a_disk_that_stays_full_ends_as_cleanly_and_the_record_says_started(
    point: str, last: bool, server: ForkServer, undisturbed: tuple[Left, list[str]], tmp_path: Path
) -> None:
    write_busy_config(tmp_path / "it", **SHORT)
    number = place_of(undisturbed[1], point, last=last)
    fault = {"number": number, "kind": "error", "error": errno.ENOSPC, "lasts": True}
    ended = failed(server, tmp_path / "it", "No space left", **fault)
    assert record_of(tmp_path / "it/run").outcome == "started"
    assert "record" not in ended.error


def test_a_run_whose_first_record_cannot_be_written_has_not_begun(server: ForkServer, tmp_path: Path) -> None:
    write_busy_config(tmp_path / "it", **SHORT)
    fault = {"point": "write .record.json.new", "number": 1, "kind": "error", "error": errno.ENOSPC, "lasts": True}
    failed(server, tmp_path / "it", "No space left", **fault)
    assert {path.name for path in (tmp_path / "it/run").iterdir()} <= {"lock"}
    assert server.run(tmp_path / "it", *RUN).code == 0


# -- what the system itself refuses


@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_a_file_that_may_not_be_so_large_is_a_save_error(
    has_checkpoints: bool, server: ForkServer, undisturbed: tuple[Left, list[str]], tmp_path: Path
) -> None:
    """`ulimit -f`, in a checkpoint's safetensors and in Transformers' own `save_pretrained`."""
    every = {} if has_checkpoints else {"checkpoint__every_updates": ...}
    write_busy_config(tmp_path / "it", **{**SHORT, "lora": None, **every})
    ended = failed(server, tmp_path / "it", "File too large", file_bytes=64 << 10)
    assert "ulimit -f" in ended.error["hint"]
    assert record_of(tmp_path / "it/run").outcome == "save-error"
    assert ("update-00000001" in ended.error["message"]) == has_checkpoints
    assert not (tmp_path / "it/run/model").exists()


@pytest.mark.full
@pytest.mark.parametrize("spare", [0, 4 << 10, 20 << 10, 44 << 10])
@pytest.mark.parametrize(("point", "number"), [("append", 1), ("append", 3), ("stage", 1), ("save weights", 1)])
def test_a_disk_that_is_full_is_a_save_error(
    spare: int, point: str, number: int, server: ForkServer, undisturbed: tuple[Left, list[str]], tmp_path: Path
) -> None:
    """A disk of the run's own, filled while it runs. Needs Linux, and leave to mount in a namespace of one's own."""
    folder = tmp_path / "it"
    write_busy_config(folder, **SHORT)
    disk = tmp_path / "disk"
    disk.mkdir()
    config = (folder / "run.yaml").read_text().replace(f"output: {folder}/run", f"output: {disk}/run")
    (folder / "run.yaml").write_text(config)
    fault = {"own_disk": str(disk), "spare": spare, "point": point, "number": number, "kind": "fill"}
    failed(server, folder, "No space left", **fault)
    assert record_of(folder / "run").outcome in ("save-error", "started")


# -- the parts


def test_a_small_file_that_cannot_be_replaced_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a.json").write_text("old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "a.json", b"new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]


def test_a_name_that_is_taken_is_a_save_error_and_stays(tmp_path: Path) -> None:
    """An empty folder's too, whose place a plain rename would take."""
    (tmp_path / "adapter").mkdir()
    draft = tmp_path / f"{STAGED}1"
    draft.mkdir()
    with pytest.raises(SaveError, match="exists already"):
        publish_folder(draft, tmp_path / "adapter")
    remove_folder(draft)
    assert [path.name for path in tmp_path.rglob("*")] == ["adapter"]
