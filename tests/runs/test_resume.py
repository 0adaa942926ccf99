"""A run that was killed or stopped and is resumed by a fresh process is, to the bit, the run that went through."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs.busy_run import (
    NUM_UPDATES,
    RESUME,
    RUN,
    Left,
    assert_sound,
    flip_byte,
    history,
    left_by,
    record_of,
    staged,
    write_busy_config,
)
from runs.fork_server import Ended, ForkServer
from runs.made_run import conversation, copy_model, write_rows
from safetensors.torch import load_file, save_file

from foretune.runtime.checkpoint import checkpoints

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora, packed": {"batch__packing": True},
    "full": {"lora": None},
    "full, packed": {"lora": None, "batch__packing": True},
}
Undisturbed = Callable[[str], Left]
Killed = Callable[..., Path]
KILLED_AT_5 = {"point": "append", "number": 7, "kind": "kill"}
"""Before update 5, the second of the second epoch, is noted: four updates and two evaluations were."""


@pytest.fixture(scope="module")
def undisturbed(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return what a kind of run leaves that nothing stops; each is run once."""
    found: dict[str, Left] = {}

    def left(kind: str) -> Left:
        if kind not in found:
            folder = tmp_path_factory.mktemp("undisturbed") / "it"
            write_busy_config(folder, **KINDS[kind])
            assert server.run(folder, *RUN).code == 0
            found[kind] = left_by(folder / "run")
        return found[kind]

    return left


@pytest.fixture(scope="module")
def killed(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """Return a copy, in a folder, of a run that was killed; of each kind one is run."""
    found: dict[str, Path] = {}

    def copied(folder: Path, kind: str = "lora") -> Path:
        if kind not in found:
            found[kind] = tmp_path_factory.mktemp("killed") / "it"
            write_busy_config(found[kind], **KINDS[kind])
            kill(server, found[kind], KILLED_AT_5)
        shutil.copytree(found[kind], folder)
        config = (folder / "run.yaml").read_text()
        (folder / "run.yaml").write_text(config.replace(str(found[kind]), str(folder)))
        return folder / "run"

    return copied


def kill(server: ForkServer, folder: Path, fault: dict[str, Any]) -> None:
    """Run until the process is killed."""
    assert server.run(folder, *RUN, **fault).code == 128 + signal.SIGKILL
    assert record_of(folder / "run").outcome == "started"


def resumed(server: ForkServer, folder: Path, *more: str) -> Left:
    ended = server.run(folder, *RESUME, *more)
    assert ended.code == 0, ended.err
    assert staged(folder) == []
    return left_by(folder / "run")


# -- to the bit


@pytest.mark.parametrize(
    "kind", ["lora", "full, packed", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("lora, packed", "full"))]
)
def test_a_killed_run_is_resumed_to_the_bit(
    kind: str, server: ForkServer, undisturbed: Undisturbed, killed: Killed, tmp_path: Path
) -> None:
    """Losses, evaluations, weights, optimizer's and random states: those of the run that went through."""
    run = killed(tmp_path / "it", kind)
    assert resumed(server, tmp_path / "it") == undisturbed(kind)
    assert record_of(run).resumed_at == (4,)


def test_without_a_checkpoint_it_begins_anew_in_the_same_folder(
    server: ForkServer, undisturbed: Undisturbed, killed: Killed, tmp_path: Path
) -> None:
    write_busy_config(tmp_path / "it")
    kill(server, tmp_path / "it", {"point": "append", "number": 2, "kind": "kill"})
    run = tmp_path / "it/run"
    assert len(history(run)) == 1
    assert resumed(server, tmp_path / "it") == undisturbed("lora")
    assert record_of(run).resumed_at == (0,)


def test_it_may_be_killed_again_and_resumed_again(
    server: ForkServer, undisturbed: Undisturbed, killed: Killed, tmp_path: Path
) -> None:
    run = killed(tmp_path / "it")
    again = server.run(tmp_path / "it", *RESUME, point="append", number=6, kind="kill")
    assert again.code == 128 + signal.SIGKILL
    assert resumed(server, tmp_path / "it") == undisturbed("lora")
    assert record_of(run).resumed_at == (4, 6)


def test_an_evaluation_that_a_checkpoint_does_not_know_is_made_once(
    server: ForkServer, undisturbed: Undisturbed, killed: Killed, tmp_path: Path
) -> None:
    """Killed after the last evaluation, which comes after the last checkpoint of the same update."""
    write_busy_config(tmp_path / "it")
    kill(server, tmp_path / "it", {"point": "save weights", "number": 1, "kind": "kill"})
    run = tmp_path / "it/run"
    assert [path.name for _, path in checkpoints(run / "checkpoints")][-1] == f"update-{NUM_UPDATES:08}"
    assert resumed(server, tmp_path / "it") == undisturbed("lora")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_was_stopped_is_resumed_to_the_bit(
    number: int, server: ForkServer, undisturbed: Undisturbed, killed: Killed, tmp_path: Path
) -> None:
    write_busy_config(tmp_path / "it")
    stopped = server.run(tmp_path / "it", *RUN, point="append", number=7, kind="signal", signal=number)
    assert stopped.code == 128 + number
    record = record_of(tmp_path / "it/run")
    assert record.outcome == "interrupted"
    assert record.scope is not None
    assert record.scope.updates_done == 5
    assert resumed(server, tmp_path / "it") == undisturbed("lora")
    assert record_of(tmp_path / "it/run").resumed_at == (5,)


def test_the_end_of_a_line_that_was_not_written_is_forgotten(
    server: ForkServer, undisturbed: Undisturbed, killed: Killed, tmp_path: Path
) -> None:
    run = killed(tmp_path / "it")
    lines = (run / "updates.jsonl").read_bytes()
    (run / "updates.jsonl").write_bytes(lines + b'5\n\0\0\0\n{"update": 5, "lo')
    ended = server.run(tmp_path / "it", *RESUME, point="append", number=1, kind="kill")
    assert ended.code == 128 + signal.SIGKILL
    assert (run / "updates.jsonl").read_bytes() == lines
    (run / "updates.jsonl").write_bytes(lines.removesuffix(b"\n"))
    assert resumed(server, tmp_path / "it") == undisturbed("lora")


@pytest.mark.full
def test_two_processes_of_python_do_the_same(
    server: ForkServer, undisturbed: Undisturbed, killed: Killed, tmp_path: Path
) -> None:
    """Nothing of this is owed to the fork server."""
    folder = tmp_path / "it"
    write_busy_config(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FORETUNE_CACHE": str(folder / "kept")}
    command = [sys.executable, "-m", "foretune"]
    process = subprocess.Popen([*command, *RUN, "--json"], cwd=folder, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["schema"] == "foretune.train.update/1" and event["update"] == 5:
            process.kill()
            break
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    assert record_of(folder / "run").outcome == "started"
    subprocess.run([*command, *RESUME], cwd=folder, env=environment, check=True, capture_output=True)
    assert left_by(folder / "run") == undisturbed("lora")


# -- what is damaged


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("trained.safetensors", -1),
        ("manifest.json", 30),
        pytest.param("optimizer.safetensors", 900, marks=pytest.mark.full),
        pytest.param("random.safetensors", -9, marks=pytest.mark.full),
        pytest.param("state.json", 40, marks=pytest.mark.full),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    name: str, place: int, server: ForkServer, undisturbed: Undisturbed, killed: Killed, tmp_path: Path
) -> None:
    """The record says so, and the damaged one does not stand in the way of the one that is written again."""
    run = killed(tmp_path / "it")
    newest = checkpoints(run / "checkpoints")[-1][1]
    flip_byte(newest / name, place)
    assert resumed(server, tmp_path / "it") == undisturbed("lora")
    record = record_of(run)
    assert record.resumed_at == (3,)
    assert [text for text in record.warnings if "passed over" in text and newest.name in text] != []


def test_when_all_are_damaged_it_is_refused_and_nothing_is_removed(
    server: ForkServer, killed: Killed, tmp_path: Path
) -> None:
    run = killed(tmp_path / "it")
    for _, path in checkpoints(run / "checkpoints"):
        flip_byte(path / "random.safetensors", -3)
    ended = refused(server, tmp_path / "it")
    assert "None of the 2 checkpoints" in ended.err


# -- what has changed


def refused(server: ForkServer, folder: Path, *more: str) -> Ended:
    """Resume, and see that nothing was touched."""
    before = files_of(folder / "run")
    ended = server.run(folder, *RESUME, *more)
    assert ended.code == 8
    assert files_of(folder / "run") == before
    return ended


def files_of(run: Path) -> dict[str, bytes]:
    """Return all but who held it last."""
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "holder.json"}


def test_what_it_began_with_may_not_change_and_is_named(server: ForkServer, tmp_path: Path) -> None:
    folder = tmp_path / "it"
    model = copy_model(tmp_path)
    write_busy_config(folder, model=model)
    kill(server, folder, KILLED_AT_5)
    for changed in ("seed=1", "optimizer.learning_rate=0.02"):
        assert "the configuration changed" in refused(server, folder, "--set", changed).err
    rows = (folder / "rows.jsonl").read_text()
    write_rows(folder / "rows.jsonl", [conversation(number) for number in range(1, 21)])
    assert "the training rows" in refused(server, folder).err
    (folder / "rows.jsonl").write_text(rows)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert "the base model's files changed" in refused(server, folder).err


def test_the_rows_of_the_evaluation_may_not_change_either(server: ForkServer, tmp_path: Path) -> None:
    folder = tmp_path / "it"
    tests = write_rows(tmp_path / "tests.jsonl", [conversation(number) for number in range(4)])
    write_busy_config(folder, evaluation__split=..., evaluation__data=str(tests))
    kill(server, folder, KILLED_AT_5)
    write_rows(tests, [conversation(number) for number in range(5)])
    assert "the evaluation rows changed" in refused(server, folder).err


def test_checkpoints_and_places_may_change(
    server: ForkServer, undisturbed: Undisturbed, killed: Killed, tmp_path: Path
) -> None:
    """Another cadence, and everything moved elsewhere: rows and run are known by what they hold."""
    killed(tmp_path / "it")
    moved = (tmp_path / "it").rename(tmp_path / "moved")
    more = [f"data.train={moved}/rows.jsonl", f"output={moved}/run", "checkpoint.every_updates=1", "checkpoint.keep=5"]
    left = resumed(server, moved, *(word for text in more for word in ("--set", text)))
    expected = undisturbed("lora")
    assert left._replace(checkpoints={}) == expected._replace(checkpoints={})
    assert list(left.checkpoints) == ["5", "6", "7", "8", "9"]
    for name in ("trained.safetensors", "optimizer.safetensors", "random.safetensors"):
        assert left.checkpoints["9"][name] == expected.checkpoints["9"][name]


def test_a_finished_run_is_refused(server: ForkServer, tmp_path: Path) -> None:
    write_busy_config(tmp_path / "it", schedule__epochs=1.0)
    assert server.run(tmp_path / "it", *RUN).code == 0
    assert "holds a run that is finished" in refused(server, tmp_path / "it").err
    assert_sound(tmp_path / "it")


def test_where_there_is_no_run_there_is_none_to_resume(server: ForkServer, tmp_path: Path) -> None:
    write_busy_config(tmp_path / "it")
    ended = server.run(tmp_path / "it", *RESUME)
    assert (ended.code, "no run to resume" in ended.err) == (8, True)
    assert not (tmp_path / "it/run").exists()
