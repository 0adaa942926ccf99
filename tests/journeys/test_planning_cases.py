"""What users of other planners ran into (topic 5), asked of the command line. docs/cases.md lists every case."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from foretune.api import list_models


@pytest.fixture
def asked(call) -> Callable[..., dict[str, Any]]:
    """Return the JSON answer of a command, which must be one."""

    def answer(*words: str) -> dict[str, Any]:
        called = call(*words, "--offline", "--json")
        assert called.code == 0, called.out
        return called.document

    return answer


def estimated(model: str, *words: str) -> tuple[str, ...]:
    return ("estimate", "--model", model, *words)


def test_case_018_the_first_plan_recomputes_and_says_what_kept_activations_would_need(asked) -> None:
    words = ("--method", "lora", "--rank", "16", "--vram", "16", "--objective", "longest-sequence")
    document = asked("recommend", "--model", "qwen2.5-3b", *words)
    first = document["plans"][0]
    assert first["config"]["gradient_checkpointing"]
    assert any(why.startswith("recomputed activations: kept ones") or "kept activations" in why for why in first["why"])
    assert "PYTORCH" not in json.dumps(document)


def test_case_025_a_search_is_computed_and_runs_nothing(asked) -> None:
    document = asked("recommend", "--model", "gpt2", "--method", "lora", "--vram", "4", "--max", "batch")
    assert document["value"] >= 1
    assert document["estimate"]["kind"] == "estimated"
    assert document["next_need_bytes"] > 4 * 2**30


def test_case_030_no_paged_optimizer_is_recommended(asked) -> None:
    for words in (("--method", "lora"), ("--method", "full"), ()):
        document = asked("recommend", "--model", "qwen2.5-0.5b", *words, "--vram", "12")
        assert {plan["config"]["optimizer"]["name"] for plan in document["plans"]} <= {"adamw", "adamw_8bit"}
        assert all(
            plan["config"]["optimizer"]["name"] == "adamw" for plan in document["plans"] if plan["method"] != "full"
        )


def test_case_149_a_figure_is_an_interval_with_its_basis(asked) -> None:
    document = asked(*estimated("mistral-7b-v0.3", "--method", "qlora", "--vram", "12"))
    for name in ("allocated", "reserved", "process"):
        around = document[f"{name}_interval"]
        assert around["low_bytes"] < around["likely_bytes"] < around["high_bytes"]
        assert "published rows" in around["basis"]
    assert document["kind"] == "estimated"


@pytest.mark.parametrize(("dtype", "each"), [("bf16", 8), ("fp32", 16)])
def test_case_150_weights_gradients_and_states_of_70b_follow_their_formats(asked, dtype: str, each: int) -> None:
    document = asked(*estimated("llama-3.1-70b", "--method", "full", "--dtype", dtype))
    parts = document["components_bytes"]
    held = parts["weights"] + parts["gradients"] + parts["optimizer states"]
    assert held == pytest.approx(each * document["total_params"], rel=1e-3)


def test_case_151_what_sets_two_models_apart_is_seen_by_component(asked) -> None:
    words = ("--micro-batch", "4", "--seq-len", "2048")
    older, newer = (
        asked(*estimated(model, *words))["components_bytes"] for model in ("meta-llama/Llama-2-7b-hf", "llama-3.1-8b")
    )
    apart = {name: newer[name] - older[name] for name in newer if name != "weights"}
    assert max(apart, key=lambda name: apart[name]) == "logits and loss"


def test_case_152_a_v100_is_recommended_no_bf16_and_fp32_is_counted_whole(asked) -> None:
    document = asked("recommend", "--model", "llama-3.2-1b", "--gpu", "V100 32GB", "--seq-len", "4096")
    assert "bf16" not in {plan["config"]["precision"]["dtype"] for plan in document["plans"]}
    full = asked(*estimated("llama-3.2-1b", "--method", "full", "--dtype", "fp32", "--seq-len", "4096"))
    in_the_step = [phase["allocated_bytes"] for phase in full["phases"] if phase["phase"] == "optimizer (later)"]
    assert in_the_step[0] >= 16 * 1_235_814_400


def test_case_153_without_a_measurement_no_time_is_given(asked) -> None:
    document = asked(*estimated("gpt2", "--vram", "8"))
    assert not [key for key in document if "second" in key or "time" in key or "hour" in key]


def test_case_154_without_a_measurement_no_cost_is_given(call, asked) -> None:
    document = asked("recommend", "--model", "gpt2", "--vram", "8")
    assert "cost" not in json.dumps(document)
    assert call("recommend", "--model", "gpt2", "--vram", "8", "--price-per-hour", "2", "--json").code == 2


def test_case_156_every_card_that_carries_it_is_listed_smallest_first(asked) -> None:
    words = ("--method", "qlora", "--seq-len", "1024", "--devices", "all")
    document = asked("recommend", "--model", "llama-3.1-8b", *words)
    cards = document["carriers"]
    sizes = [card["device"]["total_bytes"] for card in cards]
    assert sizes == sorted(sizes)
    assert {12, 16, 24} <= {round(size / 2**30) for size in sizes}
    assert [card["without_bf16"] for card in cards if card["device"]["name"] == "NVIDIA Tesla T4"] == [True]


def test_case_159_no_minimum_is_stored_and_the_method_decides(asked) -> None:
    assert not [field for field in list_models()[0].to_dict() if "min" in field or "vram" in field]
    verdicts = {
        method: asked(*estimated("qwen2.5-7b", "--method", method, "--vram", "16"))["verdict"]
        for method in ("qlora", "full")
    }
    assert verdicts == {"qlora": "fits", "full": "does not fit"}


def test_case_160_other_names_of_modules_are_counted_exactly(asked, tmp_path: Path) -> None:
    config = {
        "architectures": ["InternLM2ForCausalLM"],
        "model_type": "internlm2",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 92544,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    document = asked(*estimated(str(tmp_path), "--vram", "24"))
    assert document["total_params"] == 7_737_708_544
    assert any("internlm2" in text for text in document["assumptions"])


def test_case_164_what_must_be_free_is_not_what_a_monitor_shows(asked) -> None:
    document = asked(*estimated("qwen2.5-1.5b", "--gpu", "h200"))
    assert document["allocated_bytes"] < document["reserved_bytes"] < document["process_bytes"] < document["need_bytes"]
    assert document["kind"] == "estimated"


def test_case_165_the_need_grows_in_a_line_with_the_length(asked) -> None:
    lengths = (512, 1024, 2048, 4096)
    needs = [asked(*estimated("qwen2.5-0.5b", "--seq-len", str(n)))["allocated_bytes"] for n in lengths]
    pairs = zip(pairwise(needs), pairwise(lengths), strict=True)
    slopes = [(more - less) / (longer - shorter) for (less, more), (shorter, longer) in pairs]
    assert max(slopes) < 1.02 * min(slopes)
    assert slopes[-1] > 12 * 151_936  # of the logits alone
