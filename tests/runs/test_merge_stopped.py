"""A merge that is stopped, or that the disk does not take, leaves nothing; the next one goes through."""

import errno
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from runs.busy_run import staged
from runs.fork_server import Ended, ForkServer
from runs.made_run import write_config

from foretune.durable import verify_folder

RUN = "runs/first"
TENSOR = "write a tensor of model.safetensors"


@pytest.fixture(scope="module")
def kept(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    write_config(folder / "run.yaml", folder)
    assert server.run(folder, "train", "run.yaml", "--workers", "1", "--output", RUN).code == 0
    return folder


@pytest.fixture
def trained(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "it"))


def what_is_left(folder: Path) -> set[str]:
    return {path.name for path in (folder / RUN).iterdir()}


def error_of(ended: Ended) -> dict[str, Any]:
    """Return the error of a command whose answer is one document."""
    return json.loads(ended.out)["error"]


def goes_through(server: ForkServer, folder: Path) -> None:
    ended = server.run(folder, "merge", RUN, "--check")
    assert ended.code == 0, ended.err
    verify_folder(folder / RUN / "merged")
    assert staged(folder / RUN) == []


@pytest.mark.parametrize("point", [TENSOR, "sync model.safetensors", "rename"])
def test_killed_it_leaves_no_merged_model_and_what_it_left_is_cleared(
    point: str, server: ForkServer, trained: Path
) -> None:
    assert server.run(trained, "merge", RUN, point=point, number=1, kind="kill").code == 128 + signal.SIGKILL
    assert not {"merged", "merges"} & what_is_left(trained)
    goes_through(server, trained)


@pytest.mark.parametrize(("point", "number"), [(TENSOR, 5), ("merge weights", 1), ("sync config.json", 1)])
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopped_it_leaves_nothing(point: str, number: int, stop: int, server: ForkServer, trained: Path) -> None:
    before = what_is_left(trained)
    ended = server.run(trained, "merge", RUN, "--json", point=point, number=number, kind="signal", signal=stop)
    if point == "sync config.json":  # too late: it is finished
        assert (ended.code, what_is_left(trained)) == (0, before | {"merged", "merges"})
        return
    assert (ended.code, error_of(ended)["code"]) == (128 + stop, "interrupted"), ended.err
    assert what_is_left(trained) == before
    goes_through(server, trained)


@pytest.mark.parametrize("point", ["stage", TENSOR, "write artifact.json", "rename", "published", "write 0001.json"])
def test_a_disk_that_takes_no_more_is_a_save_error(point: str, server: ForkServer, trained: Path) -> None:
    before = what_is_left(trained)
    fault = {"point": point, "number": 1, "kind": "error", "error": errno.ENOSPC}
    ended = server.run(trained, "merge", RUN, "--json", **fault)
    assert (ended.code, error_of(ended)["code"]) == (13, "save"), ended.err
    assert "No space left" in error_of(ended)["message"]
    assert what_is_left(trained) <= before | {"merges"}
    goes_through(server, trained)
