"""The benchmark against a real GPU, as far as it goes without one."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZES = [4 << 20, 1 << 20, 600, 600, 8 << 20]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCHMARKS / "gpu_truth.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_without_a_gpu_it_says_so_and_ends_well(tmp_path: Path) -> None:
    ended = run("--out", str(tmp_path / "out"))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("No GPU: ")
    assert len(ended.stdout.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_dry_run_traces_each_configuration_and_a_mask_changes_its_kernels() -> None:
    ended = run("--dry-run", "--only", "lora-padded,full-foreach")
    assert (ended.returncode, ended.stderr) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in ended.stdout.splitlines()[2:]}
    assert set(rows) == {"lora-padded", "full-foreach"}
    for allocated, reserved, *_ in rows.values():
        assert 1000 < float(allocated.replace(",", "")) <= float(reserved.replace(",", "")) < 20000


@pytest.fixture
def gpu_truth_events(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_truth_events

    return gpu_truth_events


def records(events: ModuleType, measured: list[int], traced: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A measured and a traced run that load the first, empty the cache, and hold the others through the forward."""
    figures = ("allocated_peak_bytes", "reserved_peak_bytes", "allocated_end_bytes", "reserved_end_bytes")

    def phases(*ends: int) -> list[dict[str, Any]]:
        named = zip(("load", "prepare", "forward"), ends, strict=True)
        return [{"phase": name, "num_events": end, **dict.fromkeys(figures, 1)} for name, end in named]

    num = len(measured)
    one = {
        "actions": events.packed([ord("A")] * num + [ord("R"), ord("F")] * (num - 1)),
        "sizes": events.packed(measured + [size for size in measured[1:] for _ in "RF"]),
        "addresses": events.packed([*range(num), *(address for address in range(1, num) for _ in "RF")]),
        "stacks": events.packed_text(["load.py:1 load", "model.py:2 forward"]),
        "stack_of": events.packed([0] + [1] * (num - 1)),
        "emptied_at": 1,
        "phases": phases(1, 1, 2 * num - 1),
        "context_bytes": 0,
    }
    rounded = [-(-size // 512) * 512 for size in traced]
    born = list(enumerate(rounded))
    program = [born[0], (-1, -1), *born[1:], *((slot, 0) for slot, _ in born[1:])]
    other = {
        "slots": events.packed([slot for slot, _ in program]),
        "sizes": events.packed([size for _, size in program]),
        "kinds": events.packed([0] * len(traced)),
        "names": events.packed_text(["aten.mm [2]"]),
        "phases": phases(1, 2, len(program)),
        "allocated_bytes": 1,
        "reserved_bytes": 1,
    }
    return one, other


def test_equal_runs_do_not_differ(gpu_truth_events: ModuleType) -> None:
    found = gpu_truth_events.compare(*records(gpu_truth_events, SIZES, SIZES), is_expandable=False)
    assert (found["num_different"], found["first_difference"], found["num_events"]) == (0, None, 10)
    assert found["replayed_allocated_bytes"] == (13 << 20) + 2 * 1024


def test_what_the_trace_lacks_is_named_with_its_phase_and_frames(gpu_truth_events: ModuleType) -> None:
    measured = [*SIZES[:2], 3 << 20, *SIZES[2:]]
    found = gpu_truth_events.compare(*records(gpu_truth_events, measured, SIZES), is_expandable=False)
    assert found["num_different"] == 2
    assert found["first_difference"] == "forward 1: 3,145,728 measured, 1,024 traced"
    assert found["lacking_in_trace"] == [[3 << 20, "forward", "model.py:2 forward"]]
    assert found["lacking_in_measured"] == []
