"""Python, the system, the libraries and torch's build: each state, and the line that follows from it."""

import tomllib
from pathlib import Path

import pytest
from machine.planted import LINUX

from foretune.machine import library_findings, python_findings, torch_build
from foretune.machine.report import Finding, MachineReport
from foretune.machine.software import TESTED_PYTHON, TorchBuild
from foretune.runtime.libraries import EXTRAS, Range

ROOT = Path(__file__).parents[2]
TESTED = {
    "msgspec": "0.20.0", "click": "8.2.1", "ruamel.yaml": "0.18.10", "huggingface_hub": "1.1.0",
    "nvidia-ml-py": "12.575.51", "transformers": "5.24.1", "tokenizers": "0.22.1", "jinja2": "3.1.6",
    "torch": "2.13.0+cu130", "peft": "0.21.0", "bitsandbytes": "0.50.1", "safetensors": "0.7.0", "numpy": "2.3.1",
    "filelock": "3.20.0", "liger-kernel": "0.8.1", "starlette": "0.46.0", "uvicorn": "0.34.0",
}  # fmt: skip


def by_check(findings: object) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}  # type: ignore[attr-defined]


def libraries(**changes: str | None) -> dict[str, list[Finding]]:
    installed = {**TESTED, **{name.replace("_", "-"): version for name, version in changes.items()}}
    found: dict[str, list[Finding]] = {"ok": [], "missing": [], "problem": []}
    for finding in library_findings(installed.get):
        found[finding.state].append(finding)
    return found


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = {"core": project["dependencies"], **project["optional-dependencies"]}
    for extra, ranges in EXTRAS.items():
        lines = [line.split("[")[0] for line in listed[extra] if not line.startswith("foretune")]
        names = {line.partition(">=")[0]: line for line in lines}
        assert set(names) <= set(ranges)
        for name, line in names.items():
            least = line.partition(">=")[2].partition(",")[0]
            assert ranges[name].first[: least.count(".") + 1] == tuple(map(int, least.split(".")))
    assert f">={'.'.join(map(str, TESTED_PYTHON.first))}" == project["requires-python"]
    newest = max(int(line.rpartition(".")[2]) for line in project["classifiers"] if ":: Python :: 3." in line)
    assert TESTED_PYTHON.stop == (3, newest + 1)


def test_a_python_that_is_too_old_stops_planning() -> None:
    found = by_check(python_findings(LINUX._replace(version=(3, 10, 9))))["python.version"]
    assert (found.state, found.needed_for) == ("problem", "planning")
    assert "3.11" in (found.advice or "")
    assert not MachineReport.of([found], has_gpu=True).ready.planning


def test_a_python_that_is_too_new_is_unknown_and_stops_nothing() -> None:
    found = by_check(python_findings(LINUX._replace(version=(3, 15, 0))))["python.version"]
    assert (found.state, found.needed_for) == ("unknown", None)


def test_outside_an_environment_the_lines_make_one() -> None:
    found = by_check(python_findings(LINUX._replace(is_virtual=False)))["python.version"]
    assert (found.state, found.run) == ("ok", ("python3 -m venv .venv", ". .venv/bin/activate"))
    found = by_check(python_findings(LINUX._replace(is_virtual=False, system="win32")))["python.version"]
    assert found.run == ("py -m venv .venv", ".venv\\Scripts\\activate")


def test_wsl_is_told_whose_driver_it_has_and_where_its_memory_ends() -> None:
    found = by_check(python_findings(LINUX._replace(is_wsl=True)))["system"]
    assert found.state == "ok"
    assert all(text in (found.advice or "") for text in ("driver is that of Windows", ".wslconfig", "spills"))


def test_windows_says_what_works_there_and_the_way_to_wsl() -> None:
    found = by_check(python_findings(LINUX._replace(system="win32")))["system"]
    assert (found.state, found.run) == ("unknown", ("wsl --install",))
    assert "Estimates" in (found.advice or "")
    assert by_check(python_findings(LINUX._replace(system="darwin")))["system"].state == "unknown"


def test_tested_libraries_are_named_with_their_versions() -> None:
    found = libraries()
    assert [len(found[state]) for state in ("ok", "missing", "problem")] == [len(EXTRAS), 0, 0]
    assert "torch 2.13.0+cu130" in found["ok"][2].found


@pytest.mark.parametrize(
    ("changes", "line", "needed_for"),
    [
        ({"click": None}, "pip install 'foretune'", "planning"),
        ({"transformers": None}, "pip install 'foretune[data]'", "training"),
        ({"peft": None, "torch": None}, "pip install 'foretune[train]'", "training"),
        ({"bitsandbytes": None}, "pip install 'foretune[train]'", "some settings"),
        ({"liger_kernel": None}, "pip install 'foretune[liger]'", "some settings"),
        ({"starlette": None}, "pip install 'foretune[web]'", "some settings"),
    ],
)
def test_what_is_missing_has_its_install_line(changes: dict[str, None], line: str, needed_for: str) -> None:
    found = libraries(**changes)["missing"]
    assert [(finding.run, finding.needed_for) for finding in found] == [((line,), needed_for)]
    assert all(name.replace("_", "-") in found[0].found for name in changes)


@pytest.mark.parametrize(
    ("name", "version", "line"),
    [
        ("transformers", "5.25.0", "pip install 'transformers>=5.24,<5.25'"),
        ("transformers", "4.57.0", "pip install 'transformers>=5.24,<5.25'"),
        ("torch", "2.9.1+cu128", "pip install 'torch>=2.10,<2.15'"),
        ("numpy", "1.26.4", "pip install 'numpy>=2.0'"),
    ],
)
def test_a_library_that_was_not_tested_is_a_problem_with_the_range(name: str, version: str, line: str) -> None:
    (found,) = libraries(**{name: version})["problem"]
    assert (found.run, found.needed_for) == ((line,), "training")
    assert version in found.found


def test_a_range_without_an_end_takes_what_comes_later() -> None:
    assert Range((1, 0)).holds("2.4.0")
    assert not Range((1, 0)).holds("0.36")
    assert str(Range((1, 0))) == ">=1.0"


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", ("2.13.0+cpu", None)),
        ("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", ("2.13.0", "13.0")),
        ("__version__ = '2.10.0+rocm7.1'\ncuda = None\nhip = '7.1.5'\n", ("2.10.0+rocm7.1", None, True)),
    ],
)
def test_the_build_of_torch_is_read_as_text(tmp_path: Path, text: str, build: tuple[str, ...]) -> None:
    (tmp_path / "version.py").write_text(text + "raise RuntimeError('imported')\n")
    assert torch_build(tmp_path) == TorchBuild(*build)  # type: ignore[arg-type]


def test_a_torch_that_cannot_be_read_is_not_told(tmp_path: Path) -> None:
    assert torch_build(tmp_path) is None
    (tmp_path / "version.py").write_bytes(b"\xff\xfe")
    assert torch_build(tmp_path) is None


def test_the_torch_that_is_installed_here_is_found() -> None:
    import torch

    assert torch_build() == TorchBuild(torch.__version__, torch.version.cuda)
