"""What a start imports. CPU milliseconds are measured by `make bench`; here it is which modules come along."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from data.made import made_tokenizer

HEAVY = {"torch", "transformers", "peft", "pydantic", "numpy", "rich", "ruamel", "huggingface_hub", "pynvml", "yaml"}
OURS = ("foretune.contract", "foretune.models", "foretune.devices", "foretune.memory", "foretune.api")

ESTIMATE = ["estimate", "--model", "Qwen/Qwen2.5-7B", "--gpu", "RTX 3090", "--offline"]
PROGRAM = """
import sys
from foretune.cli.app import run
code = run(sys.argv[1:])
print(*sys.modules, file=sys.stderr)
sys.exit(code)
"""


def imported(*words: str) -> set[str]:
    """Return the modules that a command imports, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("words", [ESTIMATE, [*ESTIMATE, "--json"], [*ESTIMATE, "--set", "optimizer.name=sgd"]])
def test_estimate_imports_nothing_heavy(words: list[str]) -> None:
    found = imported(*words)
    assert {name.split(".")[0] for name in found} & HEAVY == set()
    assert not [name for name in found if name.startswith(("foretune.data", "foretune.needs"))]


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["help", "exit-codes"]])
def test_help_imports_neither_msgspec_nor_a_room(words: list[str]) -> None:
    found = imported(*words)
    assert "msgspec" not in found
    assert not [name for name in found if name.startswith(OURS)]


@pytest.mark.parametrize("words", [["devices", "list"], ["config", "schema"]])
def test_command_imports_only_its_rooms(words: list[str]) -> None:
    assert "foretune.memory" not in imported(*words)


def test_checking_data_imports_no_torch_and_leaves_transformers_to_its_processes(tmp_path: Path) -> None:
    made_tokenizer("words").save_pretrained(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    found = imported("data", "check", str(tmp_path / "rows.jsonl"), "--model", str(tmp_path), "--no-cache")
    assert {name.split(".")[0] for name in found} & HEAVY == set()


def test_doctor_imports_nothing_that_trains() -> None:
    found = {name.split(".")[0] for name in imported("doctor")}
    assert found & (HEAVY - {"pynvml"}) == set()


def cpu_seconds(*arguments: str) -> float:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(("words", "budget_ms"), [(["--help"], 60), (ESTIMATE, 150), (["doctor"], 250)])
def test_start_stays_near_its_budget(words: list[str], budget_ms: int) -> None:
    """Twice the budget, because other tests run beside this one; `make bench` holds the budget itself."""
    bare = min(cpu_seconds("-c", "pass") for _ in range(3))
    ours = min(cpu_seconds("-m", "foretune", *words) for _ in range(4))
    assert 1000 * (ours - bare) <= 2 * budget_ms
