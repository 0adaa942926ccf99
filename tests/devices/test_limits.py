"""The limit of a control group, of both versions, wherever it stands."""

from pathlib import Path

import pytest

from foretune.devices import MemoryLimit, host_memory, memory_limit
from foretune.devices import detect as detect_module
from foretune.devices import limits as limits_module
from foretune.units import GIB


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(limits_module, "GROUPS", tmp_path)
    monkeypatch.setattr(limits_module, "MEMBERSHIP", tmp_path / "membership")
    return tmp_path


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_control_groups_there_is_no_limit() -> None:
    assert memory_limit() is None


def test_version_2_gives_back_its_cache(groups: Path) -> None:
    (groups / "membership").write_text("0::/\n")
    group(groups, memory__max=8 * GIB, memory__current=5 * GIB, memory__stat=f"anon 1\ninactive_file {2 * GIB}")
    assert memory_limit() == MemoryLimit(8 * GIB, 5 * GIB)


def test_the_tightest_of_nested_limits_holds(groups: Path) -> None:
    (groups / "membership").write_text("0::/user.slice/session-1.scope\n")
    group(groups / "user.slice", memory__max=4 * GIB, memory__current=1 * GIB)
    group(groups / "user.slice/session-1.scope", memory__max="max", memory__current=1 * GIB)
    assert memory_limit() == MemoryLimit(4 * GIB, 3 * GIB)


def test_version_1_has_its_own_names_and_a_number_for_none(groups: Path) -> None:
    (groups / "membership").write_text("5:cpu:/x\n4:memory:/docker/abc\n0::/\n")
    group(groups / "memory", memory__limit_in_bytes=9223372036854771712)
    assert memory_limit() is None
    group(groups / "memory/docker/abc", memory__limit_in_bytes=2 * GIB)
    assert memory_limit() == MemoryLimit(2 * GIB, None)


def test_a_group_that_the_container_does_not_see_is_its_root(groups: Path) -> None:
    (groups / "membership").write_text("4:memory:/kubepods/pod1/abc\n")
    group(groups / "memory", memory__limit_in_bytes=6 * GIB, memory__usage_in_bytes=7 * GIB)
    assert memory_limit() == MemoryLimit(6 * GIB, 0)


def test_a_limit_is_the_size_of_the_machine_for_a_run_on_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect_module, "system_memory", lambda: (64 * GIB, 60 * GIB))
    for limit, expected in (
        (MemoryLimit(16 * GIB, 10 * GIB), (16 * GIB, 10 * GIB)),
        (MemoryLimit(16 * GIB, None), (16 * GIB, 16 * GIB)),
        (MemoryLimit(128 * GIB, 1 * GIB), (64 * GIB, 60 * GIB)),
        (None, (64 * GIB, 60 * GIB)),
    ):
        monkeypatch.setattr(detect_module, "memory_limit", lambda limit=limit: limit)
        host = host_memory()
        assert host is not None
        assert (host.total_bytes, host.free_bytes) == expected
