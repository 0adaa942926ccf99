"""A recipe runs where nothing is but what its requirements bring: the wheel, an empty environment, another folder."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from runs.made_run import model_folder

import foretune
from foretune.api import build_config, read_record, write_recipe

ROOT = Path(__file__).parents[2]
TORCH = "torch==2.13.0"
"""As in the Makefile: any other range may bring gigabytes."""
METHODS = {"lora": {"lora.rank": 4}, "full": {}}


def ran(*words: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user of a fresh machine does: nothing of this process leaks into it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel, of a copy: building writes into the source."""
    source, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src/foretune", source / "src/foretune", ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    ran(sys.executable, "-m", "pip", "wheel", *options, "-w", wheels, source, cwd=source)
    return wheels


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the libraries that are installed here, without foretune."""
    folder = tmp_path_factory.mktemp("libraries")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "foretune" not in entry.name and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


def empty_environment(folder: Path) -> Path:
    """Make an environment in which nothing is installed, and return its Python."""
    ran(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    return folder / "bin/python"


def made_recipe(folder: Path, method: str) -> Path:
    """Write a recipe of a tiny model that trains on the sample rows."""
    asked = {
        "model.id": str(model_folder(max_position_embeddings=512)),
        "device": "cpu",
        "precision.dtype": "fp32",
        "batch.sequence_length": 256,
        "batch.accumulation_steps": 4,
        "schedule.updates": 4,
        **METHODS[method],
    }
    write_recipe(build_config(asked).config, str(folder))
    return folder


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.full)])
def test_recipe_runs_from_its_requirements(tmp_path: Path, wheels: Path, libraries: Path, method: str) -> None:
    python, recipe = empty_environment(tmp_path / "env"), made_recipe(tmp_path / "the recipe", method)
    (site,) = (tmp_path / "env/lib").glob("*/site-packages")
    (site / "libraries.pth").write_text(f"{libraries}\n")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "FORETUNE_CACHE": str(tmp_path / "cache")}
    wanted = ("--no-index", "--find-links", wheels, "-r", recipe / "requirements.txt")
    ran(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *wanted, cwd=elsewhere)
    where = ran(python, "-c", "import foretune; print(foretune.__file__)", cwd=elsewhere).stdout
    assert where.startswith(str(site))
    ran(python, recipe / "train.py", cwd=elsewhere, **offline)
    record = read_record(recipe / "run/record.json")
    assert (record.outcome, record.requested.method) == ("success", method)
    assert record.code.foretune == foretune.__version__
    evaluated = ran(python, recipe / "evaluate.py", "--prompt", "Hi", "--max-tokens", "4", "--json", cwd=elsewhere)
    answer = json.loads(evaluated.stdout)
    assert answer["record"]["probe"]["is_bitwise_equal"] is True
    assert list(elsewhere.iterdir()) == []


@pytest.mark.network
@pytest.mark.parametrize("method", METHODS)
def test_recipe_sets_itself_up(tmp_path: Path, wheels: Path, method: str) -> None:
    recipe = made_recipe(tmp_path / "the recipe", method)
    (tmp_path / "constraints.txt").write_text(f"{TORCH}\n")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    given = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    given |= {"PIP_FIND_LINKS": str(wheels), "PIP_CONSTRAINT": str(tmp_path / "constraints.txt")}
    ran("sh", recipe / "train.sh", cwd=elsewhere, PYTHON=sys.executable, HF_HUB_OFFLINE="1", **given)
    assert read_record(recipe / "run/record.json").outcome == "success"
    assert len(list((recipe / "run/evaluations").iterdir())) == 1
