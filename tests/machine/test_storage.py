"""Room on disks and in memory."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretune.devices import MemoryLimit
from foretune.machine import memory_finding, places, storage_findings
from foretune.machine import storage as storage_module
from foretune.machine.report import Finding
from foretune.machine.storage import HostMemory, Place
from foretune.units import GIB


def place(path: Path, **changes: object) -> Place:
    whole = Place("current", "this folder", ".", path, GIB, "runs", "cd /a/larger/disk")
    return whole._replace(**changes)


def looked_at(path: Path) -> Finding:
    (finding,) = storage_findings((place(path),))
    return finding


def test_free_bytes_are_those_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=7 * GIB))
    found = looked_at(tmp_path / "not" / "there" / "yet")
    assert (found.state, found.figures[0].value) == ("ok", 7 * GIB)


def test_a_full_disk_is_a_problem_with_the_way_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=GIB - 1))
    found = looked_at(tmp_path)
    assert (found.state, found.needed_for, found.run) == ("problem", "training", ("cd /a/larger/disk",))


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module.os, "access", lambda path, mode: False)
    found = looked_at(tmp_path)
    assert (found.state, found.needed_for) == ("problem", "training")
    assert "cannot be written" in found.found


def test_a_file_where_a_folder_should_be_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert looked_at(tmp_path / "file").state == "problem"


def test_a_disk_that_does_not_answer_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(path: Path) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(shutil, "disk_usage", stale)
    found = looked_at(tmp_path)
    assert (found.state, "Stale file handle" in found.found) == ("unknown", True)


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({}, [".", "~/.cache/huggingface/hub", "~/.cache/foretune"]),
        ({"HF_HOME": "/data/alice"}, [".", "$HF_HOME/hub", "~/.cache/foretune"]),
        ({"HF_HOME": "/data/alice", "HF_HUB_CACHE": "/x"}, [".", "$HF_HUB_CACHE", "~/.cache/foretune"]),
        ({"XDG_CACHE_HOME": "/c"}, [".", "$XDG_CACHE_HOME/huggingface/hub", "$XDG_CACHE_HOME/foretune"]),
        ({"FORETUNE_CACHE": "/f"}, [".", "~/.cache/huggingface/hub", "$FORETUNE_CACHE"]),
    ],
)
def test_places_are_named_by_where_they_come_from(environment: dict[str, str], shown: list[str]) -> None:
    assert [each.shown for each in places(Path(), environment)[:3]] == shown


def test_the_temporary_folder_is_named_without_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert places(Path(), {"TMPDIR": "/home/alice/t"})[3].shown == "$TMPDIR"
    monkeypatch.setattr(storage_module.tempfile, "gettempdir", lambda: "/var/tmp")
    assert places(Path(), {})[3].shown == "/var/tmp"
    monkeypatch.setattr(storage_module.tempfile, "gettempdir", lambda: "/home/alice")
    assert places(Path(), {})[3].shown == "Python's choice"


# -- memory


def test_memory_is_told_with_what_a_container_leaves_of_it() -> None:
    found = memory_finding(HostMemory(64 * GIB, 60 * GIB, MemoryLimit(16 * GIB, 10 * GIB)))
    assert found.state == "ok"
    assert all(text in found.found for text in ("64.00 GiB", "60.00 GiB", "16.00 GiB", "10.00 GiB"))
    assert [figure.name for figure in found.figures] == ["total_bytes", "available_bytes", "limit_bytes"]


@pytest.mark.parametrize(
    "memory",
    [
        HostMemory(8 * GIB, 2 * GIB, None),
        HostMemory(64 * GIB, 60 * GIB, MemoryLimit(2 * GIB, None)),
        HostMemory(64 * GIB, 60 * GIB, MemoryLimit(16 * GIB, 1 * GIB)),
    ],
)
def test_little_memory_is_a_problem_wherever_the_limit_lies(memory: HostMemory) -> None:
    assert memory_finding(memory).state == "problem"


def test_a_limit_above_the_machine_is_none() -> None:
    found = memory_finding(HostMemory(8 * GIB, 6 * GIB, MemoryLimit(16 * GIB, 1 * GIB)))
    assert (found.state, "16" in found.found) == ("ok", False)


def test_memory_that_is_not_told_is_unknown() -> None:
    assert memory_finding(HostMemory(None, None, None)).state == "unknown"
