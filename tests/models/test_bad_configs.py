"""A config may hold anything; the answer is a shape or one error that a person can act on, at once."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.configs import LATENT, LLAMA

from foretune.errors import ConfigError, ForetuneError
from foretune.models import resolve_model, shape_from_config

VARIANTS = [json.loads(line) for line in (Path(__file__).parent / "variants.jsonl").read_text().splitlines()]
ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.integers(-(10**30), 10**30),
    st.sampled_from([0, 1, 2**40, 2**40 + 1, 2**62, 10**9, 512, 513, 10**400]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(-1, 3), st.text(max_size=3), st.none()), max_size=6),
    st.dictionaries(st.sampled_from(["hidden_size", "head_dim", "model_type", "x"]), st.integers(-1, 4), max_size=3),
)


def outcome(config: dict[str, Any]) -> int | None:
    """Return the count, or None for a refusal; anything but a ForetuneError fails the test."""
    started = time.process_time()
    problems: list[str] = []
    count = None
    try:
        count = shape_from_config(config, id="x", source="file", place="config.json").total_params
    except ForetuneError as error:
        problems = [str(problem) for problem in error.problems]
    assert time.process_time() - started < 0.2
    assert count is not None or (problems and all(len(problem) < 3000 for problem in problems))
    return count


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_change_to_a_config_gives_a_shape_or_a_clean_error(data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(VARIANTS))
    config = dict(row["base"])
    for _ in range(data.draw(st.integers(1, 3))):
        section = config
        if isinstance(config.get("text_config"), dict) and data.draw(st.booleans()):
            part = data.draw(st.sampled_from(["text_config", "vision_config"]))
            if isinstance(config.get(part), dict):
                config = {**config, part: dict(config[part])}
                section = config[part]
        key = data.draw(st.sampled_from([*sorted(section), "head_dim"]))
        section[key] = data.draw(ODD)
    count = outcome(config)
    assert count is None or 0 < count < 1 << 62


@given(st.recursive(ODD, lambda inner: st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=8))
def test_no_object_at_all_gives_anything_but_a_clean_error(value: Any) -> None:
    config = value if isinstance(value, dict) else {"model_type": value}
    outcome(config)
    outcome({**LLAMA, **config})


@pytest.mark.parametrize(
    "value", [0, -1, 2**40 + 1, 1.5, 64.0, "64", True, [64], {"a": 1}, math.nan, math.inf, 10**400]
)
@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers"])
def test_a_size_that_is_no_size_is_named_with_its_value_and_a_remedy(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        shape_from_config({**LLAMA, key: value}, id="x", source="file", place="some/config.json")
    error = caught.value
    assert error.problems[0].field == key
    assert str(error).startswith(f"some/config.json: {key} is ")
    assert error.hint


@pytest.mark.parametrize(("layers", "is_fine"), [(1, True), (512, True), (513, False), (10**9, False)])
def test_a_model_has_1_to_512_layers(layers: int, is_fine: bool) -> None:
    assert (outcome({**LLAMA, "num_hidden_layers": layers}) is not None) == is_fine


def test_all_missing_sizes_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        shape_from_config({"model_type": "llama", "vocab_size": 100}, id="x", source="file")
    fields = [problem.field for problem in caught.value.problems]
    assert fields == ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]


def test_a_product_beyond_62_bits_is_refused() -> None:
    with pytest.raises(ConfigError):
        shape_from_config({**LLAMA, "hidden_size": 2**40, "vocab_size": 2**40}, id="x", source="file")


def test_more_heads_than_columns_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_attention_heads"):
        shape_from_config({**LLAMA, "num_attention_heads": 128}, id="x", source="file")


def test_two_spellings_of_one_key_that_disagree_are_refused() -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100}
    with pytest.raises(ConfigError, match="contradicts n_embd"):
        shape_from_config(config, id="x", source="file")


def test_layer_types_need_one_entry_a_layer() -> None:
    config = {**LLAMA, "model_type": "qwen2", "layer_types": ["full_attention"]}
    with pytest.raises(ConfigError, match="1 entries for 2 layers"):
        shape_from_config(config, id="x", source="file")


@pytest.mark.parametrize("share", [1e308, -0.1, math.nan, True, "half"])
def test_a_rotary_share_is_a_share(share: Any) -> None:
    with pytest.raises(ConfigError, match="share from 0 to 1"):
        shape_from_config({**LLAMA, "rope_scaling": {"partial_rotary_factor": share}}, id="x", source="file")


# shared/cases 103: the sizes of the language model are those of text_config, never those of the vision tower.
def test_a_vision_language_model_is_read_from_text_config() -> None:
    text = {
        "model_type": "qwen3_vl_text",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    vision = {"model_type": "qwen3_vl", "hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "num_heads": 16}
    config = {"model_type": "qwen3_vl", "tie_word_embeddings": True, "text_config": text, "vision_config": vision}
    shape = shape_from_config(config, id="x", source="file")
    assert (shape.num_layers, shape.vocab_size) == (28, 151936)
    # meta-device build (scripts/catalogue_golden.py)
    assert shape.total_params == 2_152_704_000
    assert shape.tower_params == shape.total_params - shape.text_params > 0


def test_without_a_text_config_a_multimodal_config_is_an_error() -> None:
    with pytest.raises(ConfigError, match="text_config is missing"):
        shape_from_config({"model_type": "gemma3", "vision_config": {}}, id="x", source="file")


def test_defaults_that_fill_a_text_config_are_named() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    shape = shape_from_config({"model_type": "gemma3", "text_config": text, "vision_config": {}}, id="x", source="file")
    assert any("does not state num_attention_heads" in note for note in shape.notes)


# shared/cases 104: DeepSeek-V2-Lite's keys; the count is that of a meta-device build.
def test_latent_attention_has_its_own_formula() -> None:
    assert shape_from_config(LATENT, id="x", source="file").total_params == 15_706_484_224


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"model_type": "llama", "model_type": "gpt2"}', "stands twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": Infinity}', "Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too large"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"\x7fELF\x02\x01\x01\x00\x80", "not UTF-8"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "nested more than 64"),
        (b"[" * 200_000, "nested more than 64"),
        (b" " * (8 * 2**20 + 1), "larger than 8 MiB"),
    ],
    ids=["empty", "open", "list", "twice", "nan", "inf", "1e999", "digits", "bom", "binary", "deep", "abyss", "huge"],
)
def test_a_file_that_is_no_config_is_named_with_its_cause(tmp_path: Path, text: bytes, cause: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=cause) as caught:
        resolve_model(str(path))
    assert str(caught.value).startswith(str(path))
    assert caught.value.hint


def test_a_folder_with_a_config_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    shape = resolve_model(str(tmp_path))
    assert (shape.source, shape.id) == ("file", str(tmp_path))


def test_a_folder_where_the_config_should_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="not a regular file"):
        resolve_model(str(tmp_path))


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")

    def denied(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied") as caught:
        resolve_model(str(path))
    assert str(caught.value).startswith(str(path))


def test_a_folder_that_may_not_be_searched_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", denied)
    with pytest.raises(ConfigError, match="cannot be searched"):
        resolve_model(str(tmp_path))
