"""The model and the rows to try everything on."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from foretune.api import build_config, check_data, describe_model, make_sample_model, resolve_model, sample_rows
from foretune.errors import RunDirectoryError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sample_model(tmp_path_factory.mktemp("sample") / "model")


def test_model_is_one_that_transformers_loads_and_foretune_counts(model: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert describe_model(resolve_model(str(model))).total_params == loaded.num_parameters() < 200_000
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_model_is_the_same_every_time_and_leaves_random_numbers_alone(model: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    again = make_sample_model(tmp_path / "model")
    assert torch.equal(torch.rand(3), expected)
    names = sorted(path.name for path in model.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    assert all((model / name).read_bytes() == (again / name).read_bytes() for name in names)


def test_tokenizer_takes_any_text_and_gives_it_back(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    for text in ("What is one plus one?", "naïve 你好 😀\n\t x"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) <= 512
    assert tokenizer.eos_token != tokenizer.pad_token


def test_rows_are_of_both_forms_and_every_answer_is_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETUNE_CACHE", str(tmp_path / "kept"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in sample_rows()))
    config = build_config(
        {"model.id": str(model), "lora.rank": 4, "data.train": str(rows), "data.supervision": "assistant_only"}
    ).config
    *_, answer = check_data(config, offline=True)
    stats = answer.stats
    assert (stats.num_message_rows, stats.num_instruction_rows) == (36, 24)
    assert 0 < stats.num_answer_tokens < stats.num_tokens


def test_a_folder_that_exists_is_never_written_into(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(RunDirectoryError, match="exists already"):
        make_sample_model(tmp_path / "mine")
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]
    assert not list((tmp_path / "mine").iterdir())
