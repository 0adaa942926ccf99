"""`foretune doctor` on planted machines: what it says, what it never says, and its exit codes."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from devices.fake_nvml import card as nvml_card
from devices.fake_nvml import fake_nvml, process
from machine.planted import BUSY, CPU_TORCH, CUDA_TORCH, LINUX, T4, card, machine

from foretune import devices
from foretune.api import doctor as journey
from foretune.api import selftest
from foretune.devices import Detection
from foretune.errors import DataError
from foretune.machine import Finding, library_findings
from foretune.machine.software import TorchBuild
from foretune.machine.storage import HostMemory
from foretune.units import GIB

Plant = Callable[..., None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plant:
    """Plant a machine: `plant(detection, torch=build, python=interpreter, libraries={...})`; else a good one."""
    monkeypatch.chdir(tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)

    def planted(
        detection: Detection | None = None,
        *,
        torch: TorchBuild = CUDA_TORCH,
        python: Any = LINUX,
        libraries: dict[str, str | None] | None = None,
    ) -> None:
        from foretune.runtime.libraries import version_of

        changes = libraries or {}
        monkeypatch.setattr(devices, "detect_devices", lambda: detection or machine(card()), raising=False)
        monkeypatch.setattr(devices, "has_nvidia_card", lambda: False, raising=False)
        monkeypatch.setattr(journey, "host_memory_now", lambda: HostMemory(64 * GIB, 60 * GIB, None))
        monkeypatch.setattr(
            "shutil.disk_usage", lambda path: SimpleNamespace(total=2 << 40, used=1 << 40, free=1 << 40)
        )
        monkeypatch.setattr(journey, "torch_build", lambda: torch)
        monkeypatch.setattr(journey, "this_interpreter", lambda: python)
        monkeypatch.setattr(
            journey,
            "library_findings",
            lambda quote: library_findings(lambda name: changes[name] if name in changes else version_of(name)),
        )

    planted()
    return planted


MACHINES: dict[str, tuple[dict[str, Any], bool, str]] = {
    "good": ({}, True, "training on a GPU: yes"),
    "no GPU": ({"detection": machine(), "torch": CPU_TORCH}, True, "no GPU that CUDA can use"),
    "T4": ({"detection": machine(T4)}, True, "--dtype fp16"),
    "two, the first busy": ({"detection": machine(BUSY, card())}, False, "CUDA_VISIBLE_DEVICES=1"),
    "driver mismatch": ({"detection": machine(reason="mismatch")}, True, "restart the machine"),
    "CPU torch beside a GPU": ({"torch": CPU_TORCH}, False, "--index-url"),
    "old driver": ({"detection": machine(card(), driver="535.1")}, False, "CUDA 13 needs driver 580"),
    "WSL": ({"python": LINUX._replace(is_wsl=True)}, True, ".wslconfig"),
    "Windows": ({"python": LINUX._replace(system="win32")}, True, "wsl --install"),
    "old Python": ({"python": LINUX._replace(version=(3, 10, 1))}, False, "foretune needs Python 3.11"),
    "untested transformers": ({"libraries": {"transformers": "5.30.0"}}, False, "'transformers>=5.24,<5.25'"),
    "no peft": ({"libraries": {"peft": None}}, False, "pip install 'foretune[train]'"),
    "no bitsandbytes": ({"libraries": {"bitsandbytes": None}}, True, "qlora"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_machine_is_told_with_what_to_run_and_its_exit_code(call, plant: Plant, name: str) -> None:
    planted, is_ready, words = MACHINES[name]
    plant(**planted)
    told, document = call("doctor"), call("doctor", "--json").document
    assert (told.code, told.err) == (0, "")
    assert words in " ".join(told.out.split())
    assert document["is_ready"] is is_ready
    assert (document["schema"], call("doctor", "--check").code) == ("foretune.doctor/1", 0 if is_ready else 3)
    states = {finding["state"] for finding in document["findings"]}
    assert states <= {"ok", "missing", "problem", "unknown"}
    assert all(f"  {state}" in told.out for state in states)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("columns", ["40", "80"])
def test_a_narrow_plain_terminal_is_enough(call, plant: Plant, name: str, columns: str) -> None:
    plant(**MACHINES[name][0])
    called = call("doctor", env={"COLUMNS": columns, "TERM": "dumb"}, encoding="ascii", terminal=True)
    assert called.code == 0
    assert called.out.isascii()
    words = [line for line in called.out.splitlines() if not line.lstrip().startswith("$ ")]
    assert max(map(len, words)) <= max(int(columns), 30)
    if name == "CPU torch beside a GPU":
        assert "$ pip install --force-reinstall torch==2.13.0 --index-url https://" in called.out


def test_colour_only_repeats_a_word(call, plant: Plant) -> None:
    import re

    plain, painted = call("doctor"), call("doctor", "--color", "always")
    assert "\x1b" not in plain.out
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted.out) == plain.out


def test_a_full_disk_and_a_run_that_was_killed_are_found(call, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=5 << 20))
    Path("runs/first").mkdir(parents=True)
    record = {"schema": "foretune.record/1", "outcome": "started", "started_at": "x", "process": {"host": ""}}
    monkeypatch.setattr("socket.gethostname", lambda: "")
    Path("runs/first/record.json").write_text(json.dumps(record))
    called = call("doctor", "--check")
    text = " ".join(called.out.split())
    assert called.code == 3
    assert "this folder (.) has 5.0 MiB free" in text
    assert "foretune train runs/first/config.yaml --resume" in text


def test_nothing_is_written(call, plant: Plant, tmp_path: Path) -> None:
    before = set(tmp_path.rglob("*"))
    call("doctor")
    assert set(tmp_path.rglob("*")) == before


def test_no_network_is_used_unless_it_is_asked_for(call, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(path: str, **_: Any) -> None:
        asked.append(path)
        raise ConnectionError("no route")

    monkeypatch.setattr("foretune.models.hub._get", refuse)
    call("doctor")
    assert asked == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert "does not answer (ConnectionError)" in call("doctor", "--online").out
    assert len(asked) == 1


# -- what must never be said

CANARIES = {
    "user": "secretuser42",
    "host": "secrethost77",
    "token": "hf_CanaryCanaryCanaryCanaryCanary01",
    "key": "canary-key-5550001",
    "argument": "canary-argument-5550002",
    "folder": "canary-folder-5550003",
    "uuid": "GPU-ca9a0000-0000-4000-8000-00000ca9a000",
    "value": "canary-value-5550004",
}


@pytest.fixture
def leaky(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Plant secrets wherever a machine has any."""
    home = tmp_path / "home" / CANARIES["user"]
    here = home / CANARIES["folder"]
    here.mkdir(parents=True)
    (home / "hf").mkdir()
    (home / "hf" / "token").write_text(CANARIES["token"])
    path = f"{home}/bin/python3 {here}/train.py --key={CANARIES['argument']}"
    used = [process(pid, GIB) for pid in (71, 72)]
    nvml = fake_nvml(
        nvml_card("Tesla T4", uuid=CANARIES["uuid"], compute=used), names={71: path, 72: f"{CANARIES['user']}-job x"}
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr("socket.gethostname", lambda: CANARIES["host"])
    monkeypatch.chdir(here)
    for name, value in {
        "HOME": str(home),
        "USER": CANARIES["user"],
        "LOGNAME": CANARIES["user"],
        "HOSTNAME": CANARIES["host"],
        "HF_TOKEN": CANARIES["token"],
        "WANDB_API_KEY": CANARIES["key"],
        "CUDA_VISIBLE_DEVICES": CANARIES["uuid"],
        "PYTORCH_CUDA_ALLOC_CONF": CANARIES["value"],
        "OMP_NUM_THREADS": CANARIES["value"],
        "HF_ENDPOINT": f"https://u:{CANARIES['key']}@mirror",
        "TMPDIR": str(home),
        "FORETUNE_CACHE": str(home / "kept"),
        "PYTHONPATH": str(here),
    }.items():
        monkeypatch.setenv(name, value)
    drafts = [here / f".staged-{CANARIES['user']}", here / ".staged-adapter-x"]
    for draft in drafts:
        draft.mkdir()
        os.utime(draft, (10**9, 10**9))
    run = here / "first"
    run.mkdir()
    record = {
        "schema": "foretune.record/1",
        "outcome": "started",
        "started_at": "2026",
        "process": {"host": CANARIES["host"]},
    }
    (run / "record.json").write_text(json.dumps(record))
    return home


@pytest.mark.parametrize(
    "words",
    [
        ("doctor",),
        ("doctor", "--json"),
        ("doctor", "--check", "--color", "always"),
        ("doctor", "--online"),
        ("doctor", "--selftest", "--json"),
    ],
    ids=" ".join,
)
def test_no_form_of_the_answer_holds_a_secret(
    call, leaky: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    def fail(self: Any) -> str:
        raise DataError(f"{leaky}/rows.jsonl of {CANARIES['user']}: {CANARIES['key']}", hint=f"{CANARIES['token']}")

    monkeypatch.setattr(selftest._Bench, "make", fail)
    monkeypatch.setattr(selftest, "_gpu_steps", lambda: ())
    called = call(*words, env={"HF_HOME": str(leaky / "hf"), "HF_HUB_CACHE": str(leaky / "hub")})
    said = called.out + called.err
    for name, secret in CANARIES.items():
        assert secret not in said, name
        assert secret.split("-")[-1] not in said, name
    assert str(leaky) not in said
    assert str(len(CANARIES["token"])) not in said.replace("\n", " ").split()
    if "--selftest" not in words:
        assert "python3 (pid 71, 1.00 GiB)" in " ".join(said.split())
        assert "HF_TOKEN" in said


# -- the self-test


def steps(call) -> dict[str, dict[str, Any]]:
    called = call("doctor", "--selftest", "--json")
    found = [finding for finding in called.document["findings"] if finding["group"] == "Self-test"]
    return {finding["check"]: finding for finding in found}


def test_selftest_runs_every_journey_and_leaves_nothing(
    call, plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    plant(machine(), torch=CPU_TORCH)
    found = steps(call)
    assert [finding["state"] for finding in found.values()] == ["ok"] * 4, found
    assert "the same to the byte (traced)" in found["selftest.estimate-and-trace"]["found"]
    assert "(measured)" in found["selftest.training"]["found"]
    assert "predicted (traced)" in found["selftest.training"]["found"]
    assert not list(scratch.glob("foretune*"))


def wrong(*_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


def nan(*_: Any, **__: Any) -> float:
    return float("nan")


FAULTS = {
    "selftest.sample-model": ("foretune.runtime.sample._write_model", wrong),
    "selftest.estimate-and-trace": ("foretune.api.estimate", wrong),
    "selftest.training": ("foretune.runtime.train.run_update", wrong),
    "selftest.reloading": ("foretune.runtime.reload.probe_logits", wrong),
}


@pytest.mark.parametrize("check", FAULTS)
def test_each_step_of_the_selftest_can_fail_and_what_rests_on_it_is_not_run(
    call, plant: Plant, monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    plant(machine(), torch=CPU_TORCH)
    monkeypatch.setattr(*FAULTS[check])
    found = steps(call)
    states = [finding["state"] for finding in found.values()]
    position = list(FAULTS).index(check)
    assert states == ["ok"] * position + ["problem"] + ["unknown"] * (3 - position)
    assert "planted" in found[check]["found"]


def test_an_estimate_that_is_a_block_off_fails(call, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretune import api

    def off(*words: Any, **named: Any) -> Any:
        answer = estimate(*words, **named)
        needed = answer.estimate
        return answer.with_(estimate=needed.with_(allocated_bytes=needed.allocated_bytes + 512))

    estimate = api.estimate
    plant(machine(), torch=CPU_TORCH)
    monkeypatch.setattr(api, "estimate", off)
    found = steps(call)["selftest.estimate-and-trace"]
    assert (found["state"], "bytes allocated, and the trace" in found["found"]) == ("problem", True)


def test_a_failed_selftest_is_no_with_check(call, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Finding(check="selftest.x", group="Self-test", state="problem", found="x failed")
    monkeypatch.setattr(selftest, "selftest_findings", lambda *, use_gpu: [failed])
    called = call("doctor", "--selftest", "--check")
    assert (called.code, "self-test: failed" in called.out) == (3, True)
    assert call("doctor", "--selftest").code == 0


def test_on_a_card_the_selftest_computes_there(call, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in ("make", "predict", "train", "reload"):
        monkeypatch.setattr(selftest._Bench, step, lambda self: "done")
    monkeypatch.setattr("foretune.runtime.arithmetic.check_matmul", lambda device, dtype: 0.001)
    monkeypatch.setattr("foretune.runtime.arithmetic.check_allocator", lambda: 256 << 20)
    monkeypatch.setattr("foretune.runtime.arithmetic.check_nf4", wrong)
    found = steps(call)
    assert found["selftest.16-bit-products"]["found"].endswith("bf16 within 0.001 of fp32, fp16 within 0.001 of fp32")
    assert "256.0 MiB" in found["selftest.memory-of-the-card"]["found"]
    assert found["selftest.nf4-layer"]["state"] == "problem"
