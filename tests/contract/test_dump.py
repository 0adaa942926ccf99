"""What is written loads as the same configuration, everywhere."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretune.contract import (
    TrainingConfig,
    build_config,
    check_config,
    dump_config,
    fingerprint,
    load_config,
    parse_config,
)
from foretune.contract.scalars import echo
from foretune.errors import ConfigError


def _sibling(name: str) -> Any:
    """Import a helper beside this file (tests are no package)."""
    spec = importlib.util.spec_from_file_location(f"contract_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


strategies = _sibling("strategies")


def message_of(action: Callable[[], object]) -> str:
    """Return what a ConfigError says, or nothing; any other exception is a failure."""
    try:
        action()
    except ConfigError as error:
        return str(error)
    return ""


@given(strategies.configs())
@settings(max_examples=60, deadline=None)
def test_config_to_yaml_to_config_is_identity(config: TrainingConfig) -> None:
    check_config(config)
    loaded = parse_config(dump_config(config), name="run.yaml").config
    assert loaded == config
    assert fingerprint(loaded) == fingerprint(config)


@given(strategies.configs())
@settings(max_examples=15, deadline=None)
def test_comments_change_nothing(config: TrainingConfig) -> None:
    assert parse_config(dump_config(config, comments=True), name="run.yaml").config == config


@given(strategies.configs())
@settings(max_examples=15, deadline=None)
def test_the_json_of_a_config_loads_as_the_same_config(config: TrainingConfig) -> None:
    assert parse_config(json.dumps(config.to_dict()), name="run.json").config == config
    assert TrainingConfig.create(**config.to_dict()) == config


@given(strategies.configs())
@settings(max_examples=15, deadline=None)
def test_every_field_given_on_the_command_line_gives_the_same_config(config: TrainingConfig) -> None:
    assert build_config(config.to_dict()).config == config


@given(st.one_of(st.text(), st.text(alphabet="abc:-[]{}#&*!|>'\"%@`\n \t,?\\~.0123456789\x00\u2028e")))
@settings(max_examples=150, deadline=None)
def test_no_text_raises_anything_but_a_config_error(text: str) -> None:
    message = message_of(lambda: parse_config(text, name="run.yaml"))
    assert message.replace("\n", "").isprintable()


@given(st.binary(max_size=200))
@settings(max_examples=60, deadline=None)
def test_no_bytes_raise_anything_but_a_config_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.mktemp("bytes") / "run.yaml"
    file.write_bytes(data)
    with pytest.raises(ConfigError):
        load_config(file)


@given(st.text(max_size=60), st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_no_override_raises_anything_but_a_config_error(key: str, value: str) -> None:
    for text in (f"{key}={value}", f"lora.targets={value}", key):
        message = message_of(lambda text=text: build_config({"model.id": "gpt2"}, overrides=[text]))
        assert message.replace("\n", "").isprintable()


leaf_values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.text()))


@given(
    st.sampled_from(["seed", "lora.rank", "lora.targets", "optimizer.learning_rate", "device", "batch"]), leaf_values
)
@settings(max_examples=100, deadline=None)
def test_no_python_value_raises_anything_but_a_config_error(field: str, value: object) -> None:
    try:
        config = build_config({"model.id": "gpt2", field: value}).config
    except ConfigError:
        return
    msgspec.json.encode(config)


@given(st.text())
def test_an_echo_is_printable_and_short(text: str) -> None:
    assert echo(text).isprintable()
    assert len(echo(text)) <= 80


def test_the_text_is_readable() -> None:
    config = build_config({"model.id": "Qwen/Qwen2.5-0.5B", "lora.targets": ["q_proj", "v_proj"]}).config
    lines = dump_config(config).splitlines()
    assert lines[:4] == ["model:", "  id: Qwen/Qwen2.5-0.5B", "  revision: null", "precision:"]
    assert "  targets: [q_proj, v_proj]" in lines
    assert "  epsilon: 1.0e-08" in lines
    assert "quantization: null" in lines


def test_comments_start_with_the_schema_for_editors() -> None:
    config = build_config({"model.id": "gpt2"}).config
    lines = dump_config(config, comments=True, schema="https://example.org/s.json").splitlines()
    assert lines[0] == "# yaml-language-server: $schema=https://example.org/s.json"
    assert all(len(line) <= 110 for line in lines)
    assert "  # Format of LoRA's matrices. PEFT keeps them in fp32 whatever the base model has." in lines


def test_paths_inside_the_folder_are_written_relative_to_it(tmp_path: Path) -> None:
    inside, outside = tmp_path / "job" / "a.jsonl", tmp_path / "job-other" / "b.jsonl"
    config = build_config({"model.id": "gpt2", "data.train": str(inside), "evaluation.data": str(outside)}).config
    text = dump_config(config, folder=tmp_path / "job")
    assert "train: ./a.jsonl" in text
    assert f"data: {outside}" in text
    (tmp_path / "job").mkdir()
    file = tmp_path / "job" / "run.yaml"
    file.write_text(text)
    assert load_config(file).config == config


def test_a_folder_that_moves_keeps_its_fingerprint() -> None:
    one = build_config({"model.id": "gpt2", "data.train": "/one/a.jsonl"}).config
    two = build_config({"model.id": "gpt2", "data.train": "/two/a.jsonl"}).config
    assert fingerprint(one) != fingerprint(two)
    assert fingerprint(one, folder="/one") == fingerprint(two, folder="/two")


def test_the_fingerprint_does_not_depend_on_the_order_of_the_file() -> None:
    first = parse_config("model: {id: gpt2}\nprecision: {dtype: bf16}\nseed: 1\n").config
    second = parse_config("seed: 1\nprecision: {dtype: bf16}\nmodel: {id: gpt2}\n").config
    assert fingerprint(first) == fingerprint(second)
    assert len(fingerprint(first)) == 16


def test_every_setting_changes_the_fingerprint() -> None:
    config = build_config({"model.id": "gpt2", "lora": {}}).config
    changed = [config.with_(seed=1), config.with_(loss="chunked"), config.with_(lora=None)]
    assert len({fingerprint(item) for item in (config, *changed)}) == 4
