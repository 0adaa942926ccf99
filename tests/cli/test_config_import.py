"""`foretune config import` and `estimate --import`: the report, the written file, and files of others told by name."""

import json
from pathlib import Path

import pytest

from foretune.contract import load_config

CONFIGS = Path(__file__).parents[1] / "foreign/configs"
AXOLOTL = CONFIGS / "axolotl/full_bf16.yml"
FACTORY = CONFIGS / "llama_factory/lora_chat.yaml"
TRL = CONFIGS / "trl/lora.yaml"
RECIPE = CONFIGS / "canifinetune/qlora.yaml"
COMMAND = CONFIGS / "trl/command.txt"


def test_report_has_three_parts(call) -> None:
    called = call("config", "import", str(FACTORY))
    assert called.code == 0
    parts = [
        "Maps",
        "No counterpart, and it changes the result",
        "No counterpart, or off: nothing changes",
        "To decide",
    ]
    places = [called.out.index(f"\n{part}") for part in parts]
    assert places == sorted(places)
    assert "--set schedule.warmup_updates=N" in called.out
    assert "by default of LLaMA-Factory 0.9.5" in called.out
    assert "nearest to trainer" in called.out


def test_json_accounts_for_every_key(call) -> None:
    document = json.loads(call("config", "import", str(TRL), "--json").out)
    assert (document["schema"], document["tool"], document["is_complete"]) == ("foretune.config.import/1", "trl", False)
    keys = {entry["key"]: entry["fate"] for entry in document["entries"] if entry["place"]}
    assert keys["report_to"] == "no effect"
    assert keys["dataset_name"] == "to decide"
    assert keys["lora_r"] == "mapped"


def test_nothing_is_written_while_something_is_open(call, tmp_path: Path) -> None:
    output = tmp_path / "run.yaml"
    called = call("config", "import", str(FACTORY), "--output", str(output), "--json")
    error = json.loads(called.out)["error"]
    assert (called.code, error["code"], output.exists()) == (2, "unsupported", False)
    assert {problem["field"] for problem in error["problems"]} == {None, "data.train", "schedule.warmup_updates"}
    assert all("Add --" in problem["hint"] and ":" in problem["place"] for problem in error["problems"])


def test_written_file_is_ours_and_is_never_overwritten(call, tmp_path: Path) -> None:
    output = tmp_path / "run.yaml"
    words = ("config", "import", str(AXOLOTL), "--set", "lora.rank=4", "--output", str(output))
    assert call(*words).code == 0
    text = output.read_text()
    lines = text.splitlines()
    assert lines[0].startswith("# yaml-language-server")
    assert lines[1] == f"# Imported from {AXOLOTL}, a file of axolotl 0.19."
    assert "# Peak learning rate." in text
    config = load_config(output).config
    assert (config.batch.micro_batch_size, config.schedule.warmup_updates) == (4, 50)
    assert config.lora is not None
    again = call(*words)
    assert (again.code, output.read_text()) == (2, text)
    assert "nothing is overwritten" in again.err


def test_key_is_left_out_by_the_user_alone(call) -> None:
    called = call("config", "import", str(FACTORY), "--without", "template", "--without", "warmup_ratio")
    assert "You decided" in called.out
    assert "--without template" not in called.out.partition("To decide")[2]


def test_written_file_says_what_was_left_out(call, tmp_path: Path) -> None:
    output = tmp_path / "run.yaml"
    words = ["--without", "template", "--without", "warmup_ratio", "--set", "data.train=rows.jsonl"]
    assert call("config", "import", str(FACTORY), *words, "--output", str(output)).code == 0
    left_out = [line for line in output.read_text().splitlines() if line.startswith("# Left out")]
    assert left_out == ["# Left out: template: qwen", "# Left out: warmup_ratio: 0.1"]
    assert load_config(output).config.data.train == str(Path("rows.jsonl").absolute())


def test_unreadable_file_is_an_error(call, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("colour: red\n")
    called = call("config", "import", str(file))
    assert (called.code, called.out) == (2, "")
    assert "--tool" in called.err


def test_estimate_is_of_the_tools_own_stack(call) -> None:
    document = json.loads(call("estimate", "--import", str(TRL), "--json").out)
    assert document["imported"]["tool"] == "trl"
    assert document["stack"].startswith("trl: ")
    assert document["origins"]["lora.rank"] == {"source": "file", "place": f"{TRL}:5:1"}
    assert document["origins"]["lora.dropout"] == {"source": "default", "place": "default of TRL 1.16"}
    named = json.loads(call("estimate", "--import", str(TRL), "--stack", "foretune", "--json").out)
    assert named["stack"].startswith("foretune: ")


def test_flags_beat_an_imported_file(call) -> None:
    document = json.loads(call("estimate", "--import", str(TRL), "--seq-len", "256", "--vram", "24", "--json").out)
    assert document["config"]["batch"]["sequence_length"] == 256
    assert document["verdict"] == "fits"


def test_estimate_refuses_by_key_what_changes_memory(call) -> None:
    file = CONFIGS / "axolotl/deepspeed.yml"
    called = call("estimate", "--import", str(file))
    assert called.code == 2
    assert called.err.count("error:") == 1
    assert f"{file}:16:1: deepspeed is" in called.err
    assert call("estimate", "--import", str(file), "--without", "deepspeed").code == 0


@pytest.mark.parametrize(
    "words",
    [
        ("--import", str(TRL), "--config", str(AXOLOTL)),
        ("--model", "gpt2", "--without", "template"),
    ],
)
def test_import_stands_alone(call, words: tuple[str, ...]) -> None:
    assert call("estimate", *words).code == 2


@pytest.mark.parametrize("command", [("config", "validate"), ("config", "show"), ("estimate", "--config"), ("train",)])
@pytest.mark.parametrize(
    ("file", "title"),
    [(AXOLOTL, "axolotl"), (FACTORY, "LLaMA-Factory"), (TRL, "TRL"), (RECIPE, "canifinetune"), (COMMAND, "a command")],
    ids=["axolotl", "llama-factory", "trl", "canifinetune", "command"],
)
def test_file_of_another_tool_is_one_error(call, command: tuple[str, ...], file: Path, title: str) -> None:
    called = call(*command, str(file))
    assert called.code == 2
    assert called.err.count("error:") == 1
    assert title in called.err
    assert "`foretune config import" in called.err
