"""`foretune models`: exact counts for a person and for a script."""

import json
from pathlib import Path

from foretune.models import list_models

QWEN_PARAMS = 494_032_768  # https://huggingface.co/Qwen/Qwen2.5-0.5B, safetensors metadata


def test_list_has_every_model_of_the_catalogue(call) -> None:
    document = call("models", "list", "--json").document
    assert [model["id"] for model in document["models"]] == [entry.id for entry in list_models()]


def test_list_is_a_line_a_model_in_80_columns(call) -> None:
    lines = call("models", "list").out.splitlines()
    assert len(lines) == 1 + len(list_models())
    assert max(map(len, lines)) <= 80


def test_search_looks_at_aliases_and_types_in_any_case(call) -> None:
    found = call("models", "list", "--search", "QWEN2.5-0.5b-INSTRUCT", "--json").document["models"]
    assert [model["id"] for model in found]
    assert call("models", "list", "--search", "gpt_neox", "--json").document["models"]


def test_search_without_result_is_an_empty_answer_with_a_note(call) -> None:
    called = call("models", "list", "--search", "potato")
    assert (called.code, called.out) == (0, "")
    assert "potato" in called.err


def test_show_gives_exact_counts_at_the_top_level(call) -> None:
    document = call("models", "show", "qwen2.5-0.5b", "--offline", "--json").document
    assert document["total_params"] == QWEN_PARAMS
    assert document["tied_embeddings"] is True
    assert (document["num_layers"], document["hidden_size"], document["context_length"]) == (24, 896, 32768)
    assert document["adaptable_share"] == document["adaptable_params"] / QWEN_PARAMS
    assert {projection["num_layers"] for projection in document["projections"]} == {24}
    assert sum(
        p["in_features"] * p["out_features"] * p["num_layers"] for p in document["projections"]
    ) == document["quantizable_params"]  # fmt: skip


def test_conv1d_takes_adapters_but_no_4_bit(call) -> None:
    document = call("models", "show", "gpt2", "--json").document
    assert document["quantizable_share"] == 0
    assert document["adaptable_share"] > 0.6


def test_show_reads_a_file(call, tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    document = call("models", "show", str(tmp_path), "--json").document
    assert document["source"] == "file"
    # 2 x 100 x 64 embeddings and head, per layer 4 x 64^2 + 3 x 64 x 128 + 2 norms, 1 norm.
    assert document["total_params"] == 2 * 6400 + 2 * (4 * 4096 + 3 * 8192 + 128) + 64


def test_text_names_every_linear_layer(call) -> None:
    called = call("models", "show", "gpt2")
    assert "124,439,808" in called.out
    assert all(name in called.out for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"))
