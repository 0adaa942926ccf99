"""What is refused, by name, before anything is counted (shared/cases 100, 101, 107)."""

from typing import Any

import pytest
from models.configs import GPT_OSS

from foretune.errors import ConfigError, UnsupportedError
from foretune.models import known_model_types, resolve_model, shape_from_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def refusal(config: dict[str, Any]) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        shape_from_config(config, id="some/model", source="file", place="config.json")
    assert "config.json" in str(caught.value)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"load_in_4bit": True}, "bitsandbytes 4-bit"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes 8-bit"),
        ({}, "method not stated"),
        ("int4", "method not stated"),
    ],
)
def test_a_quantized_checkpoint_is_refused_with_its_method_and_the_size_to_expect(settings: Any, method: str) -> None:
    error = refusal({**LLAMA, "quantization_config": settings})
    assert method in error.message
    assert "override" in error.message
    count = shape_from_config(LLAMA, id="x", source="file").total_params
    assert f"{count:,} parameters" in (error.hint or "")


def test_a_quantization_inside_text_config_is_found() -> None:
    text = {**LLAMA, "model_type": "gemma3_text", "quantization_config": {"quant_method": "gptq"}}
    error = refusal({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert "text_config.quantization_config" in error.message


# shared/cases 101: the size of an unquantized gpt-oss-20b, 20,914,757,184 parameters, is shown.
def test_mxfp4_is_refused_with_the_unquantized_size() -> None:
    error = refusal(GPT_OSS)
    assert "mxfp4" in error.message
    assert "20,914,757,184 parameters, 38.96 GiB in bf16" in (error.hint or "")


def test_an_uncountable_quantized_checkpoint_is_still_refused_for_its_quantization() -> None:
    error = refusal({"model_type": "unheard_of", "quantization_config": {"quant_method": "fp8"}})
    assert "already quantized (fp8)" in error.message


# shared/cases 107
@pytest.mark.parametrize("model_type", ["custom_lm", "internlm2", "minicpm"])
def test_remote_code_is_refused(model_type: str) -> None:
    error = refusal({**LLAMA, "model_type": model_type, "auto_map": {"AutoModelForCausalLM": "modeling.Custom"}})
    assert "remote code" in error.message


def test_auto_map_beside_a_native_class_is_ignored_and_said_so() -> None:
    shape = shape_from_config({**LLAMA, "auto_map": {"AutoModel": "m.M"}}, id="x", source="file")
    assert any("auto_map is ignored" in note for note in shape.notes)


def test_a_type_without_a_class_is_counted_as_its_twin_and_said_so() -> None:
    shape = shape_from_config({**LLAMA, "model_type": "internlm2"}, id="x", source="file")
    assert any("not the real ones" in note for note in shape.notes)


@pytest.mark.parametrize(
    "model_type", ["bert", "roberta", "deberta-v2", "electra", "modernbert", "clip", "xlm-roberta"]
)
def test_encoders_are_refused(model_type: str) -> None:
    assert "an encoder" in refusal({"model_type": model_type}).message


@pytest.mark.parametrize("model_type", ["t5", "mt5", "bart", "whisper", "marian", "pegasus"])
def test_encoder_decoders_are_refused(model_type: str) -> None:
    assert "encoder-decoder" in refusal({"model_type": model_type}).message


@pytest.mark.parametrize(
    "mark",
    [
        {"is_encoder_decoder": True},
        {"architectures": ["LlamaForMaskedLM"]},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": ["FooForConditionalGeneration", "FooForSeq2SeqLM"]},
    ],
)
def test_other_heads_than_a_causal_one_are_refused(mark: dict[str, Any]) -> None:
    assert "not a causal language model" in refusal({**LLAMA, **mark}).message


@pytest.mark.parametrize(
    "key",
    ["_attn_implementation_internal", "_experts_implementation_internal", "trust_remote_code", "_attn_foo_internal"],
)
def test_keys_that_swap_code_are_refused(key: str) -> None:
    assert key in refusal({**LLAMA, key: "eager"}).message
    nested = {"model_type": "qwen3_vl", "text_config": {**LLAMA, key: "eager"}}
    assert f"text_config.{key}" in refusal(nested).message


def test_an_unknown_type_names_the_nearest_ones() -> None:
    error = refusal({**LLAMA, "model_type": "qwen2_mo"})
    assert "qwen2_moe" in (error.hint or "")
    assert str(len(known_model_types())) in error.message


@pytest.mark.parametrize("model_type", ["gemma3n", "minimax_m3", "phi4_multimodal"])
def test_known_but_unsupported_types_say_why(model_type: str) -> None:
    assert model_type in refusal({"model_type": model_type}).message


@pytest.mark.parametrize("model_type", [None, 3, "", True, ["llama"], "x" * 200])
def test_a_model_type_that_is_no_name_is_an_error(model_type: Any) -> None:
    with pytest.raises(ConfigError, match="model_type"):
        shape_from_config({**LLAMA, "model_type": model_type}, id="x", source="file")


def test_a_catalogue_model_that_is_published_only_quantized_says_so() -> None:
    shape = resolve_model("openai/gpt-oss-20b", offline=True)
    assert shape.published_only_as == "mxfp4"
    assert any("published only as mxfp4" in note for note in shape.notes)
