"""`foretune config`: write, check, explain."""

import json
from pathlib import Path

import pytest

from foretune.contract import json_schema, load_config
from foretune.contract.fields import leaves

SCHEMA = json.loads(json.dumps(json_schema()))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_init_writes_a_file_that_loads_and_its_schema(call) -> None:
    document = call("config", "init", "run.yaml", "--model", "gpt2", "--method", "full", "--json").document
    assert document == document | {"file": "run.yaml", "schema_file": "foretune.schema.json", "wrote_schema": True}
    config = load_config("run.yaml").config
    assert (config.model.id, config.method) == ("gpt2", "full")
    assert Path("run.yaml").read_text().startswith("# yaml-language-server: $schema=foretune.schema.json\n")
    assert json.loads(Path("foretune.schema.json").read_text()) == SCHEMA


def test_init_has_a_default_name_and_writes_into_folders(call) -> None:
    Path("inner").mkdir()
    assert call("config", "init").out == "foretune.yaml\nforetune.schema.json\n"
    assert call("config", "init", "inner/run.yaml").code == 0
    assert Path("inner/foretune.schema.json").exists()


def test_init_overwrites_nothing(call) -> None:
    Path("run.yaml").write_text("mine")
    called = call("config", "init", "run.yaml")
    assert called.code == 2
    assert Path("run.yaml").read_text() == "mine"
    assert not Path("foretune.schema.json").exists()


def test_init_keeps_another_schema_and_says_so(call) -> None:
    Path("foretune.schema.json").write_text("{}")
    called = call("config", "init", "run.yaml")
    assert called.code == 0
    assert "kept" in called.err
    assert Path("foretune.schema.json").read_text() == "{}"
    Path("foretune.schema.json").unlink()
    call("config", "init", "b.yaml")
    assert call("config", "init", "c.yaml").err == ""


def test_init_refuses_a_bad_setting_before_it_writes(call) -> None:
    assert call("config", "init", "run.yaml", "--set", "lora.rnk=8").code == 2
    assert not Path("run.yaml").exists()


def test_validate_reports_all_problems_of_all_files(call) -> None:
    Path("a.yaml").write_text("model: {id: gpt2}\nprecision: {dtype: bf17}\nsed: 1\n")
    Path("b.yaml").write_text("model: {id: gpt2}\n")
    Path("c.yaml").write_text("model: {id: gpt2}\nprecision: {dtype: bf16}\n")
    called = call("config", "validate", "a.yaml", "b.yaml", "c.yaml", "--json")
    problems = called.document["error"]["problems"]
    assert called.code == 2
    assert sorted(problem["place"] for problem in problems) == ["a.yaml:2:13", "a.yaml:3:1", "b.yaml"]
    assert call("config", "validate", "c.yaml").out.startswith("c.yaml: valid (full, ")


def test_validate_marks_experimental_choices(call) -> None:
    Path("a.yaml").write_text("model: {id: gpt2}\nprecision: {dtype: bf16}\nloss: liger\n")
    assert "experimental: loss: liger" in call("config", "validate", "a.yaml").out


def test_show_prints_a_file_that_means_the_same(call) -> None:
    call("config", "init", "run.yaml")
    shown = call("config", "show", "run.yaml", "--set", "lora.rank=8").out
    Path("shown.yaml").write_text(shown)
    assert load_config("shown.yaml").config == load_config("run.yaml", overrides=["lora.rank=8"]).config


def test_show_origin_has_a_line_for_every_setting(call) -> None:
    Path("a.yaml").write_text("model: {id: gpt2}\nprecision: {dtype: bf16}\nlora: {}\nquantization: {}\n")
    lines = call("config", "show", "a.yaml", "--set", "lora.rank=8", "--origin").out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [leaf.path for leaf in leaves()]
    assert any(line.startswith("lora.rank: 8 ") and line.endswith("(--set lora.rank)") for line in lines)
    assert any(line.startswith("model.id: ") and line.endswith("# file (a.yaml:1:9)") for line in lines)
    assert any(line.startswith("seed: ") and line.endswith("# default") for line in lines)


def test_show_takes_a_method(call) -> None:
    Path("a.yaml").write_text("model: {id: gpt2}\nprecision: {dtype: bf16}\n")
    assert call("config", "show", "a.yaml", "--method", "qlora", "--json").document["method"] == "qlora"


def test_schema_is_the_schema_itself_as_text(call) -> None:
    assert json.loads(call("config", "schema").out) == SCHEMA
    assert call("config", "schema", "--json").document["json_schema"] == SCHEMA
