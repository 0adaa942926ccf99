"""What users of other tools ran into, asked of the command line. docs/cases.md lists every case and who holds it.

The numbers are those of the cases; where a case builds its model, the counts are of a meta-device build.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models.configs import GPT_OSS, LATENT

from foretune.models import hub


@pytest.fixture
def estimate(call) -> Callable[..., dict[str, Any]]:
    """Return the JSON answer of `estimate --model ...`, which must be one."""

    def answer(model: str, *words: str) -> dict[str, Any]:
        called = call("estimate", "--model", model, "--offline", "--json", *words)
        assert called.code == 0, called.out
        return called.document

    return answer


@pytest.fixture
def refusal(call) -> Callable[..., dict[str, Any]]:
    """Return the JSON error of a command, which must be one about the request."""

    def error(*words: str) -> dict[str, Any]:
        called = call(*words, "--json")
        assert called.code == 2, called.out
        found = called.document["error"]
        assert found["problems"]
        return {**found, "text": " ".join(f"{p['message']} {p['hint']}" for p in found["problems"])}

    return error


def for_model(model: str, *words: str) -> tuple[str, ...]:
    return ("estimate", "--model", model, "--offline", *words)


def written(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def proposed(document: dict[str, Any]) -> list[list[str]]:
    return [change["settings"] for change in document["fit"]["changes"]]


# -- 1-fit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "item"), [("bf16", 2), ("fp32", 4)])
def test_case_001_full_training_counts_the_states_that_the_first_update_makes(estimate, dtype: str, item: int) -> None:
    words = ("--method", "full", "--dtype", dtype, "--seq-len", "512", "--vram", "48")
    document = estimate("llama-3.1-8b", *words)
    parts, params = document["components_bytes"], 8_030_261_248
    assert document["verdict"] == "does not fit"
    assert document["total_params"] == params
    assert parts["weights"] == pytest.approx(item * params, rel=1e-3)
    assert parts["gradients"] == pytest.approx(item * params, rel=1e-3)
    assert parts["optimizer states"] >= 2 * item * params  # 32.1 GB in bf16, 64.2 GB in fp32
    assert "backward (later)" in [phase["phase"] for phase in document["phases"]]


def test_case_009_the_logits_of_a_large_vocabulary_are_the_largest_part(estimate) -> None:
    words = ("--targets", "q_proj,v_proj", "--micro-batch", "4", "--seq-len", "4096", "--vram", "48")
    document = estimate("google/gemma-2b", *words)
    assert document["total_params"] == 2_506_172_416
    assert document["largest_component"] == "logits and loss"
    assert document["components_bytes"]["logits and loss"] >= 4 * 4096 * 256_000 * 4
    shorter = {"batch.micro_batch_size=1", "batch.sequence_length=2048"}
    assert shorter & {setting for settings in proposed(document) for setting in settings}


def test_case_012_stacked_experts_are_never_counted_as_four_bit(call, estimate) -> None:
    document = estimate("Qwen/Qwen3-30B-A3B", "--method", "qlora", "--vram", "24")
    assert document["verdict"] == "does not fit"
    assert document["components_bytes"]["weights"] > 2 * 28_991_029_248
    shown = call("models", "show", "Qwen/Qwen3-30B-A3B", "--offline", "--json").document
    assert shown["total_params"] == 30_532_122_624
    assert shown["quantizable_params"] <= 30_532_122_624 - 28_991_029_248
    assert shown["quantizable_share"] < 0.05


@pytest.mark.parametrize("vram", ["8", "80"])
def test_case_014_trained_embeddings_of_a_tied_model_are_refused(refusal, vram: str) -> None:
    saved = "lora.modules_to_save=[embed_tokens,lm_head]"
    error = refusal(*for_model("qwen2.5-0.5b", "--rank", "8", "--set", saved, "--vram", vram))
    assert (error["code"], error["problems"][0]["field"]) == ("unsupported", "lora.modules_to_save")


def test_case_015_trained_embeddings_beside_qlora_cost_a_copy_gradients_and_both_states(estimate) -> None:
    """The report's library keeps all four in fp32; PEFT's copy has the model's dtype, two bytes each."""
    words = ("--method", "qlora", "--vram", "24")
    saved = ("--set", "lora.modules_to_save=[embed_tokens,lm_head]")
    without, beside = estimate("qwen2.5-7b", *words), estimate("qwen2.5-7b", *words, *saved)
    trained = 2 * 152_064 * 3_584
    assert beside["trainable_params"] - without["trainable_params"] == trained
    parts = [
        beside["components_bytes"][name] - without["components_bytes"][name]
        for name in ("adapters", "gradients", "optimizer states")
    ]
    assert parts == [2 * trained, pytest.approx(2 * trained, rel=0.1), pytest.approx(4 * trained, rel=1e-6)]
    assert beside["need_bytes"] > without["need_bytes"] + 7 * trained


@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "qwen2.5-3b", "llama-3.1-8b"])
def test_case_018_checkpointing_is_proposed_first(call, estimate, model: str) -> None:
    words = ("--seq-len", "2048", "--vram", "8", "--no-gradient-checkpointing")
    document = estimate(model, *words)
    first = proposed(document)[0]
    assert document["verdict"] == "does not fit"
    assert first[0] == "gradient_checkpointing=true"
    changed = estimate(model, *words[:-1], *(word for setting in first for word in ("--set", setting)))
    assert changed["need_bytes"] == document["fit"]["changes"][0]["need_bytes"]
    assert document["components_bytes"]["activations"] > 3 * changed["components_bytes"]["activations"]
    assert "PYTORCH" not in call(*for_model(model, *words)).out


def test_case_022_reserved_is_told_apart_from_allocated_and_is_what_must_be_free(estimate) -> None:
    document = estimate("qwen2.5-0.5b", "--seq-len", "4096", "--micro-batch", "2")
    assert all(phase["reserved_bytes"] >= phase["allocated_bytes"] > 0 for phase in document["phases"])
    assert document["reserved_bytes"] > document["allocated_bytes"]
    beside = document["context"]["high_bytes"] + document["safety_margin_bytes"]
    assert document["need_bytes"] == document["reserved_bytes"] + beside


@pytest.mark.parametrize(("gpu", "capability"), [("T4", "7.5"), ("V100 16GB", "7.0")])
def test_case_027_bf16_is_refused_by_capability_and_nothing_becomes_fp16_unasked(
    refusal, estimate, gpu: str, capability: str
) -> None:
    error = refusal(*for_model("qwen2.5-0.5b", "--gpu", gpu, "--dtype", "bf16"))
    assert f"compute capability {capability}" in error["message"]
    assert "8.0" in error["message"]
    assert "fp16 for lora" in error["hint"]
    full = refusal(*for_model("qwen2.5-0.5b", "--gpu", gpu, "--dtype", "fp16", "--method", "full"))
    assert full["problems"][0]["field"] == "precision.dtype"
    answer = estimate("qwen2.5-0.5b", "--gpu", gpu, "--dtype", "fp16")
    assert answer["config"]["precision"] == {"dtype": "fp16", "adapter_dtype": "fp32"}


def test_case_029_what_lies_outside_the_allocator_is_a_term_of_its_own(estimate) -> None:
    words = ("--micro-batch", "4", "--seq-len", "1024")
    document = estimate("qwen2.5-0.5b", *words)
    assert document["context"]["low_bytes"] > 0
    assert document["safety_margin_bytes"] > 0
    # A card that holds the allocator's peak and nothing beside it: the counters alone would say that it fits.
    vram = f"{document['reserved_bytes'] // 2**20 + 1}MiB"
    assert estimate("qwen2.5-0.5b", *words, "--vram", vram)["verdict"] != "fits"


def test_case_030_a_paged_optimizer_is_refused_or_explained_and_never_proposed(estimate, refusal) -> None:
    error = refusal(*for_model("llama-3.1-8b", "--method", "full", "--optimizer", "paged_adamw_32bit"))
    assert error["code"] == "unsupported"
    assert "optimizer.name is 'paged_adamw_32bit'" in error["message"]
    paged = estimate("llama-3.1-8b", "--method", "full", "--optimizer", "paged_adamw_8bit")
    assert any("managed memory" in text for text in paged["assumptions"])
    document = estimate("llama-3.1-8b", "--vram", "8")
    assert document["verdict"] == "does not fit"
    assert "optimizer" not in json.dumps(proposed(document))


def test_case_031_more_cards_do_not_lower_the_need_of_one(estimate, refusal) -> None:
    document = estimate("llama-3.1-8b", "--seq-len", "4096", "--micro-batch", "2", "--vram", "24")
    assert document["verdict"] == "does not fit"
    error = refusal(*for_model("llama-3.1-8b", "--set", "parallelism=ddp", "--vram", "24"))
    assert error["code"] == "unsupported"
    assert "parallelism is ddp" in error["message"]
    assert "More cards would not lower the need of one" in error["message"]
    assert refusal(*for_model("llama-3.1-8b", "--gpus", "4"))["code"] == "usage"
    assert "it is for single." in refusal(*for_model("gpt2", "--set", "parallelism=zero3"))["message"]
    assert "device is 'cuda:0,1'" in refusal(*for_model("gpt2", "--set", "device=cuda:0,1"))["message"]


def test_case_033_sharded_qlora_is_refused_because_of_its_load(estimate, refusal) -> None:
    words = ("--method", "qlora", "--vram", "24")
    error = refusal(*for_model("llama-3.1-70b", *words, "--set", "parallelism=fsdp"))
    assert error["code"] == "unsupported"
    assert "parallelism is fsdp" in error["message"]
    assert "loaded whole before it is sharded" in error["message"]
    document = estimate("llama-3.1-70b", *words)
    assert document["verdict"] == "does not fit"
    assert document["components_bytes"]["weights"] > 70e9 / 2


def test_case_034_host_memory_is_given_and_offloading_is_never_proposed(call, estimate, refusal) -> None:
    document = estimate("mistral-7b-v0.3", "--method", "full", "--vram", "24")
    assert document["host"]["ram_load_bytes"] > 0
    assert document["host"]["ram_save_bytes"] > 0
    text = call(*for_model("mistral-7b-v0.3", "--method", "full", "--vram", "24")).out
    assert "RAM while loading" in text
    assert "offload" not in text + json.dumps(document["fit"])
    assert "is no setting" in refusal(*for_model("mistral-7b-v0.3", "--set", "optimizer.offload=true"))["text"]


def test_case_036_the_disk_that_a_full_result_needs_is_planned(estimate) -> None:
    host = estimate("llama-3.1-8b", "--method", "full")["host"]
    assert host["artifact_bytes"] >= 16.06e9
    assert host["disk_bytes"] > host["artifact_bytes"]


def test_case_040_apple_devices_are_refused_and_their_memory_is_no_budget(call, refusal) -> None:
    error = refusal(*for_model("gpt2", "--set", "device=mps"))
    assert error["code"] == "unsupported"
    assert "'mps'" in error["message"]
    assert "cpu and cuda" in error["message"]
    called = call(*for_model("gpt2", "--gpu", "M3 Max 96GB", "--check", "--json"))
    assert (called.code, called.document["verdict"]) == (3, "unknown")


# -- 3-loading ---------------------------------------------------------------------------------------------------

QUANTIZED_LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}
VISION_LANGUAGE = {
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "depth": 24,
        "num_heads": 16,
    },
}
REMOTE = {
    "model_type": "custom_lm",
    "auto_map": {"AutoModelForCausalLM": "modeling_custom.CustomForCausalLM"},
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "vocab_size": 32000,
}


def test_case_100_an_fp8_checkpoint_is_refused(refusal, tmp_path: Path) -> None:
    error = refusal(*for_model(written(tmp_path, QUANTIZED_LLAMA), "--vram", "16"))
    assert error["code"] == "unsupported"
    assert "fp8" in error["message"]
    assert "8,030,261,248 parameters, 14.96 GiB in bf16" in error["hint"]


def test_case_101_an_mxfp4_checkpoint_is_refused_with_the_size_of_the_unquantized_one(refusal, tmp_path: Path) -> None:
    error = refusal(*for_model(written(tmp_path, GPT_OSS), "--vram", "16"))
    assert error["code"] == "unsupported"
    assert "mxfp4" in error["message"]
    assert "20,914,757,184 parameters, 38.96 GiB in bf16" in error["hint"]


def test_case_103_the_sizes_are_those_of_text_config(call, refusal, tmp_path: Path) -> None:
    path = written(tmp_path, VISION_LANGUAGE)
    shown = call("models", "show", path, "--json").document
    assert (shown["num_layers"], shown["vocab_size"], shown["hidden_size"]) == (28, 151_936, 2048)
    assert shown["total_params"] == 2_152_704_000
    assert "qwen3_vl_text" in refusal(*for_model(path, "--vram", "16"))["message"]


def test_case_104_latent_attention_is_counted_by_its_own_formula_and_estimated(call, tmp_path: Path) -> None:
    path = written(tmp_path, LATENT)
    assert call("models", "show", path, "--json").document["total_params"] == 15_706_484_224
    answer = call(*for_model(path, "--vram", "80"), "--json").document
    assert answer["verdict"] == "fits"
    assert answer["components_bytes"]["weights"] == pytest.approx(2 * 15_706_484_224, rel=1e-3)


def test_case_105_every_target_must_match(refusal) -> None:
    error = refusal(*for_model("qwen2.5-0.5b", "--targets", "q_proj,nonexistent_proj"))
    assert "'nonexistent_proj'" in error["message"]
    assert "self_attn.q_proj" in error["hint"]
    assert "'q_proj'" not in error["message"]


def test_case_105_the_coverage_of_a_hybrid_is_shown(call) -> None:
    shown = call("models", "show", "ibm-granite/granite-4.0-h-micro", "--offline", "--json").document
    layers = {projection["name"]: projection["num_layers"] for projection in shown["projections"]}
    assert layers["self_attn.q_proj"] < shown["num_layers"] == 40
    assert not any("gate_proj" in name for name in layers)
    assert 0.5 < shown["adaptable_share"] < 1


def test_case_106_all_linear_of_a_fused_model_comes_from_its_modules(estimate, refusal) -> None:
    document = estimate("phi-3-mini-4k-instruct", "--rank", "16", "--targets", "all-linear")
    assert document["total_params"] == 3_821_079_552
    assert document["trainable_params"] == 25_165_824
    error = refusal(*for_model("phi-3-mini-4k-instruct", "--targets", "q_proj,v_proj"))
    assert len(error["problems"]) == 2
    assert "qkv_proj" in error["hint"]


def test_case_107_remote_code_is_refused_without_a_question(
    refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"stdin.{name} is used")

    monkeypatch.setattr("sys.stdin", Silent())
    error = refusal(*for_model(written(tmp_path, REMOTE)))
    assert error["code"] == "unsupported"
    assert "never runs remote code" in error["message"]


def test_case_107_a_models_config_in_place_of_a_training_configuration_is_told(refusal, tmp_path: Path) -> None:
    error = refusal("estimate", "--config", written(tmp_path, REMOTE))
    assert len(error["problems"]) == 1
    assert "a model's config.json" in error["message"]
    assert "--model" in error["hint"]


@pytest.mark.parametrize(
    ("status", "hub_code", "had_token", "code"),
    [
        (401, None, False, "model-access-token"),
        (403, "GatedRepo", True, "model-access-gated"),
        (404, "RepoNotFound", True, "model-access-not-found"),
        (None, None, True, "model-access-offline"),
    ],
)
def test_case_108_four_ways_to_have_no_access_are_four_messages(
    call, monkeypatch: pytest.MonkeyPatch, status: int | None, hub_code: str | None, had_token: bool, code: str
) -> None:
    def get(_path: str) -> hub.Answer:
        if status is None:
            raise ConnectionError("Authorization: Bearer hf_secret")
        return hub.Answer(status, hub_code, None, b"", had_token)

    monkeypatch.setattr(hub, "_get", get)
    called = call("estimate", "--model", "me/gated", "--json")
    assert (called.code, called.document["error"]["code"]) == (4, code)
    assert "hf_" not in called.out + called.err + call("estimate", "--model", "me/gated").err


def test_case_115_new_tokens_are_an_unknown_key(refusal, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text('model: {id: gpt2}\nprecision: {dtype: bf16}\nnew_special_tokens: ["<x>"]\n')
    error = refusal("estimate", "--config", str(path), "--offline")
    assert error["problems"][0]["field"] == "new_special_tokens"
    assert error["problems"][0]["place"].endswith("run.yaml:3:1")


def test_case_118_capped_attention_is_never_switched_unasked(estimate, refusal, tmp_path: Path) -> None:
    error = refusal(*for_model("google/gemma-2-2b", "--attention", "sdpa"))
    assert (error["code"], error["problems"][0]["field"]) == ("unsupported", "attention")
    assert estimate("google/gemma-2-2b", "--attention", "eager")["attention_kernel"] == "eager"
    path = tmp_path / "run.yaml"
    path.write_text("model: {id: google/gemma-2-2b}\nprecision: {dtype: bf16}\n")
    assert refusal("estimate", "--config", str(path), "--offline")["problems"][0]["field"] == "attention"


def test_case_121_a_missing_tie_is_the_familys_own(call, tmp_path: Path) -> None:
    shown = call("models", "show", "google/gemma-2-2b", "--offline", "--json").document
    assert (shown["total_params"], shown["tied_embeddings"]) == (2_614_341_888, True)
    config = {
        "model_type": "gemma2",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256000,
    }
    shown = call("models", "show", written(tmp_path, config), "--json").document
    assert (shown["total_params"], shown["tied_embeddings"]) == (2_614_341_888, True)


@pytest.mark.parametrize("precision", ["", "precision: {}\n", "precision: {dtype: auto}\n"])
def test_case_122_the_dtype_is_never_inferred(refusal, tmp_path: Path, precision: str) -> None:
    written(tmp_path, {"model_type": "gpt2", "torch_dtype": "float32"})
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{id: ./config.json}}\n{precision}lora: {{}}\n")
    error = refusal("estimate", "--config", str(path), "--offline")
    assert error["problems"][0]["field"] == "precision.dtype"
    assert "never inferred" in error["hint"]
