"""A recipe is a folder that says everything, runs as it stands, and is there whole or not at all."""

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from runs.made_run import model_folder

import foretune
from foretune import durable
from foretune.api import build_config, find_device, load_config, write_recipe
from foretune.contract import fingerprint
from foretune.data import read_rows
from foretune.errors import ConfigError, RunDirectoryError, SaveError, UnsupportedError
from foretune.memory import MemoryEstimate
from foretune.recipe import RECIPE_FILE, require_same_version
from foretune.recipe.readme import Readme, write_readme

QLORA = {"model.id": "Qwen/Qwen2.5-7B", "quantization": {"scheme": "nf4"}, "lora.rank": 16}
CARD = find_device("RTX 3060 12GB")


def readme(folder: Path) -> str:
    """Return the README with its paragraphs on one line."""
    return " ".join((folder / "README.md").read_text().split())


def test_names_every_file_it_wrote(tmp_path: Path) -> None:
    recipe = write_recipe(build_config(QLORA).config, str(tmp_path / "r"), device=CARD)
    found = sorted(
        path.relative_to(tmp_path / "r").as_posix() for path in (tmp_path / "r").rglob("*") if path.is_file()
    )
    assert list(recipe.files) == found
    assert set(found) >= {"config.yaml", "train.sh", "train.py", "evaluate.py", "requirements.txt", "README.md"}


def test_configuration_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    asked = build_config({**QLORA, "batch.sequence_length": 512, "seed": 7}).config
    recipe = write_recipe(asked, str(tmp_path / "r"), device=CARD)
    loaded = load_config(tmp_path / "r/config.yaml").config
    assert loaded == recipe.config
    assert loaded.with_(data=asked.data, output=None) == asked


def test_configuration_is_commented_and_names_the_schema_beside_it(tmp_path: Path) -> None:
    write_recipe(build_config(QLORA).config, str(tmp_path / "r"), device=CARD)
    text = (tmp_path / "r/config.yaml").read_text()
    name = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    assert name is not None
    assert json.loads((tmp_path / "r" / name[1]).read_text())["$schema"].endswith("draft-07/schema#")
    assert "  # Peak learning rate.\n" in text


def test_recipe_that_is_moved_means_the_same(tmp_path: Path) -> None:
    recipe = write_recipe(build_config(QLORA).config, str(tmp_path / "first"), device=CARD)
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(tmp_path / "first", tmp_path / "elsewhere/second")
    config = load_config(Path(moved) / "config.yaml").config
    assert config.data.train == str(tmp_path / "elsewhere/second/data/instructions.jsonl")
    assert config.output == str(tmp_path / "elsewhere/second/run")
    assert fingerprint(config, folder=moved) == recipe.fingerprint
    assert str(tmp_path) not in "".join(path.read_text() for path in Path(moved).rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["instructions", "messages"])
def test_sample_rows_are_rows(tmp_path: Path, name: str) -> None:
    write_recipe(build_config(QLORA).config, str(tmp_path / "r"), device=CARD)
    rows = list(read_rows(tmp_path / f"r/data/{name}.jsonl"))
    assert len(rows) >= 20
    assert {type(row).__name__ for row in rows} == {"InstructionRow" if name == "instructions" else "MessagesRow"}


def test_own_rows_are_named_and_the_samples_are_only_beside_them(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    asked = build_config({**QLORA, "data.train": str(rows)}).config
    write_recipe(asked, str(tmp_path / "r"), device=CARD)
    assert load_config(tmp_path / "r/config.yaml").config.data.train == str(rows)
    assert f"and name them as `./...`: - `data.train: {rows}`" in readme(tmp_path / "r")
    assert "sample rows, for a first look" not in readme(tmp_path / "r")


def test_a_folder_named_with_dots_is_the_folder_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write_recipe(build_config(QLORA).config, "../here/../there", device=CARD)
    assert "train: ./data/instructions.jsonl" in (tmp_path / "there/config.yaml").read_text()
    assert "output: ./run" in (tmp_path / "there/config.yaml").read_text()


def test_without_a_card_it_says_whom_it_is_for(tmp_path: Path) -> None:
    recipe = write_recipe(build_config(QLORA).config, str(tmp_path / "r"))
    assert recipe.warnings[-1].startswith("It is for an NVIDIA card, and none was named.")


@pytest.mark.parametrize(("words", "code"), [((), 8), (("--dry-run",), 0), (("--help",), 0)], ids=str)
def test_shell_script_evaluates_what_was_trained_and_nothing_else(
    tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    """Stand-ins for the two scripts: training ends well, and there is nothing to evaluate."""
    write_recipe(build_config(QLORA).config, str(tmp_path / "r"), device=CARD)
    (tmp_path / "r/.venv/bin").mkdir(parents=True)
    (tmp_path / "r/.venv/ready").touch()
    (tmp_path / "r/.venv/bin/python").symlink_to("/bin/sh")
    (tmp_path / "r/train.py").write_text("exit 0")
    (tmp_path / "r/evaluate.py").write_text("exit 8")
    assert subprocess.run(["sh", str(tmp_path / "r/train.sh"), *words], check=False).returncode == code


def test_requirements_pin_this_version_exactly(tmp_path: Path) -> None:
    write_recipe(build_config(QLORA).config, str(tmp_path / "r"), device=CARD)
    assert (tmp_path / "r/requirements.txt").read_text() == f"foretune[train]=={foretune.__version__}\n"


@pytest.mark.parametrize("script", ["train.py", "evaluate.py"])
def test_scripts_call_the_package_and_hold_no_logic(tmp_path: Path, script: str) -> None:
    write_recipe(build_config(QLORA).config, str(tmp_path / "r"), device=CARD)
    tree = ast.parse((tmp_path / "r" / script).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"pathlib", "foretune.cli"}
    assert not [
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.For, ast.While, ast.ClassDef))
    ]
    assert len((tmp_path / "r" / script).read_text().splitlines()) <= 10


# -- the plan


def test_readme_has_the_plan_with_interval_stack_and_basis(tmp_path: Path) -> None:
    recipe = write_recipe(build_config(QLORA).config, str(tmp_path / "r"), device=CARD)
    need, text = recipe.prediction, readme(tmp_path / "r")
    assert need is not None
    assert f"(estimated; stack {need.stack})" in text
    assert "**fits**: needs 10.66 GiB of 12.00 GiB on NVIDIA GeForce RTX 3060 12 GB" in text
    assert "| reserved | 8.15 GiB | 8.12 GiB to 9.66 GiB |" in text
    assert all(line in text.replace("\\", "") for line in need.assumptions)
    kept = json.loads((tmp_path / "r" / RECIPE_FILE).read_text())["prediction"]
    assert MemoryEstimate.create(**kept) == need


def test_without_a_device_there_is_a_need_and_no_verdict(tmp_path: Path) -> None:
    recipe = write_recipe(build_config(QLORA).config, str(tmp_path / "r"))
    assert recipe.fit is None
    assert "No device was named, so there is no verdict." in readme(tmp_path / "r")


def test_what_does_not_fit_is_not_written(tmp_path: Path) -> None:
    config = build_config({"model.id": "Qwen/Qwen2.5-7B"}).config
    with pytest.raises(ConfigError, match="It does not fit") as caught:
        write_recipe(config, str(tmp_path / "r"), device=CARD)
    assert "--allow-infeasible writes it all the same" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_written_when_asked_for_and_says_so(tmp_path: Path) -> None:
    config = build_config({"model.id": "Qwen/Qwen2.5-7B"}).config
    recipe = write_recipe(config, str(tmp_path / "r"), device=CARD, allow_infeasible=True)
    assert recipe.fit is not None
    assert recipe.fit.verdict == "does not fit"
    text = readme(tmp_path / "r")
    assert "**By its plan this does not fit.**" in text
    assert "sh train.sh --allow-infeasible" in text


@pytest.mark.parametrize(
    "change",
    [{"parallelism": "ddp"}, {"attention": "sdpa", "model.id": "google/gemma-2-2b"}],
    ids=["several devices", "sdpa where scores are capped"],
)
def test_what_foretune_would_not_run_is_not_written(tmp_path: Path, change: dict[str, object]) -> None:
    asked = {"model.id": "gpt2", **change}
    with pytest.raises(UnsupportedError):
        write_recipe(build_config(asked).config, str(tmp_path / "r"))
    assert list(tmp_path.iterdir()) == []


def test_a_cpu_run_is_traced(tmp_path: Path) -> None:
    asked = {"model.id": str(model_folder()), "device": "cpu", "precision.dtype": "fp32", "lora.rank": 4}
    recipe = write_recipe(build_config(asked).config, str(tmp_path / "r"))
    assert recipe.prediction is not None
    assert recipe.prediction.kind == "traced"
    assert "trains on a CPU" in readme(tmp_path / "r")


def test_names_cannot_break_out_of_the_readme(tmp_path: Path) -> None:
    config = build_config({"model.id": "a`|<script>alert(1)</script>"}).config
    text = write_readme(Readme(config, None, None, ("<b>*bold*</b>",), tmp_path, False))
    assert text.startswith("# full of `a'/<script>alert(1)</script>`\n")  # inside a code span it is text
    assert "- \\<b\\>\\*bold\\*\\</b\\>" in text


# -- the folder


@pytest.mark.parametrize("taken", ["file", "full folder", "link"])
def test_nothing_is_overwritten(tmp_path: Path, taken: str) -> None:
    place = tmp_path / "r"
    if taken == "file":
        place.write_text("mine")
    elif taken == "link":
        place.symlink_to(tmp_path)
    else:
        place.mkdir()
        (place / "mine").write_text("mine")
    with pytest.raises(RunDirectoryError, match="exists already"):
        write_recipe(build_config(QLORA).config, str(place), device=CARD)
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    write_recipe(build_config(QLORA).config, str(tmp_path / "r"), device=CARD)
    assert (tmp_path / "r/README.md").is_file()


def test_a_folder_in_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="does not exist"):
        write_recipe(build_config(QLORA).config, str(tmp_path / "not/r"), device=CARD)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(point: str) -> None:
        if point == "sync train.py":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "at", full)
    with pytest.raises(SaveError, match="No space left"):
        write_recipe(build_config(QLORA).config, str(tmp_path / "r"), device=CARD)
    assert list(tmp_path.iterdir()) == []


# -- the version


def other_version(folder: Path, text: str) -> str:
    (folder / RECIPE_FILE).write_text(text)
    return str(folder / "config.yaml")


def test_a_recipe_of_another_version_is_refused(tmp_path: Path) -> None:
    config = other_version(tmp_path, '{"foretune": "0.0.9"}')
    with pytest.raises(UnsupportedError, match=r"of foretune 0\.0\.9, and .* is installed") as caught:
        require_same_version(config)
    assert f"pip install -r {tmp_path}/requirements.txt" in str(caught.value)


@pytest.mark.parametrize("command", [("train",), ("train", "--dry-run"), ("evaluate",)])
def test_commands_refuse_a_recipe_of_another_version(call, tmp_path: Path, command: tuple[str, ...]) -> None:
    write_recipe(build_config(QLORA).config, str(tmp_path / "r"), device=CARD)
    config = other_version(tmp_path / "r", '{"foretune": "0.0.9"}')
    called = call(command[0], config, *command[1:])
    assert (called.code, called.out) == (2, "")
    assert "this recipe is of foretune 0.0.9" in called.err
    assert not (tmp_path / "r/run").exists()


def test_an_estimate_of_it_is_not_refused(call, tmp_path: Path) -> None:
    write_recipe(build_config(QLORA).config, str(tmp_path / "r"), device=CARD)
    config = other_version(tmp_path / "r", '{"foretune": "0.0.9"}')
    assert call("estimate", "--config", config).code == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "foretune.recipe/1"}'])
def test_a_broken_recipe_file_is_no_recipe(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="is no recipe's file"):
        require_same_version(other_version(tmp_path, text))


def test_a_configuration_outside_a_recipe_passes(tmp_path: Path) -> None:
    require_same_version(str(tmp_path / "run.yaml"))


# -- the command


def test_rows_may_be_named_by_a_flag(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").touch()
    called = call("recipe", "r", "--model", "gpt2", "--vram", "24", "--data", "rows.jsonl", "--json")
    assert called.code == 0
    assert called.document["config"]["data"]["train"] == str(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("field", ["data.train", "evaluation.data"])
def test_rows_that_are_not_there_are_told_before_anything_is_written(call, tmp_path: Path, field: str) -> None:
    called = call("recipe", str(tmp_path / "r"), "--model", "gpt2", "--set", f"{field}={tmp_path}/none.jsonl")
    assert called.code == 5
    assert "none.jsonl" in called.err
    assert list(tmp_path.iterdir()) == []


def test_evaluate_takes_the_configuration_of_a_run(call, tmp_path: Path) -> None:
    write_recipe(build_config(QLORA).config, str(tmp_path / "r"), device=CARD)
    called = call("evaluate", str(tmp_path / "r/config.yaml"))
    assert called.code == 8
    assert str(tmp_path / "r/run") in called.err
