"""The switches that the memory program reads follow the class's effective rules."""

from typing import Any

import pytest

from foretune.errors import ConfigError
from foretune.models import ModelShape, resolve_model, shape_from_config

DENSE = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def shape_of(**config: Any) -> ModelShape:
    return shape_from_config({**DENSE, **config}, id="tiny", source="file")


def sliding(shape: ModelShape) -> list[int]:
    return [index for index, slides in enumerate(shape.traits.sliding_layers) if slides]


# transformers/models/<family>/configuration_<family>.py, __post_init__ (5.24)
@pytest.mark.parametrize(
    ("config", "layers", "window"),
    [
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False}, [], None),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 6}, [6, 7], 32),
        ({"model_type": "mistral", "sliding_window": None}, [], None),
        ({"model_type": "mistral", "sliding_window": 32}, list(range(8)), 32),
        ({"model_type": "phi3", "sliding_window": None}, [], None),
        ({"model_type": "gemma2", "sliding_window": 32}, [0, 2, 4, 6], 32),
        ({"model_type": "gemma3_text", "sliding_window": 32}, [0, 1, 2, 3, 4, 6, 7], 32),
        ({"model_type": "cohere2", "sliding_window": 32}, [0, 1, 2, 4, 5, 6], 32),
        ({"model_type": "llama"}, [], None),
        ({"model_type": "smollm3", "sliding_window": 32, "use_sliding_window": False}, [], None),
    ],
)
def test_layers_slide_where_the_class_lets_them(config: dict[str, Any], layers: list[int], window: int | None) -> None:
    shape = shape_of(**config)
    assert (sliding(shape), shape.traits.sliding_window) == (layers, window)


def test_smollm3_goes_without_rotary_embedding_in_every_fourth_layer() -> None:
    assert shape_of(model_type="smollm3").traits.rotary_layers == (True, True, True, False) * 2


@pytest.mark.parametrize(
    ("model_type", "rotary_dim"), [("llama", 16), ("gpt_neox", 4), ("phi", 8), ("stablelm", 4), ("glm", 64)]
)
def test_a_part_of_each_head_is_rotated(model_type: str, rotary_dim: int) -> None:
    assert shape_of(model_type=model_type).traits.rotary_dim == rotary_dim


def test_falcon_with_alibi_has_no_rotary_embedding() -> None:
    assert shape_of(model_type="falcon", alibi=True).traits.rotary_dim is None


@pytest.mark.parametrize(
    ("id", "qk_norm"),
    [
        ("Qwen/Qwen3-0.6B", "head"),
        ("allenai/OLMo-2-1124-7B", "full"),
        ("google/gemma-3-270m", "head"),
        ("HuggingFaceTB/SmolLM2-135M", None),
    ],
)
def test_queries_and_keys_are_normed_as_in_the_class(id: str, qk_norm: str | None) -> None:
    assert resolve_model(id, offline=True).traits.qk_norm == qk_norm


def test_gemma_2_caps_its_scores_and_logits() -> None:
    traits = resolve_model("google/gemma-2-2b", offline=True).traits
    assert (traits.attention_softcap, traits.final_softcap, traits.head_dim) == (50.0, 30.0, 256)


def test_parallel_residuals_are_marked() -> None:
    parallel = {t: shape_of(model_type=t).traits.has_parallel_residual for t in ("llama", "gpt_neox", "cohere", "phi")}
    assert parallel == {"llama": False, "gpt_neox": True, "cohere": True, "phi": True}


def test_experts_are_counted_in_the_traits() -> None:
    traits = resolve_model("mistralai/Mixtral-8x7B-v0.1", offline=True).traits
    assert (traits.num_experts, traits.experts_per_token) == (8, 2)


# The card of Mistral-7B-Instruct-v0.2: "No Sliding-Window Attention"; the first Mistral had one of 4096.
@pytest.mark.parametrize(
    ("id", "window"),
    [
        ("mistralai/Mistral-7B-v0.1", 4096),
        ("mistralai/Mistral-7B-Instruct-v0.2", None),
        ("mistralai/Mistral-Nemo-Base-2407", None),
    ],
)
def test_catalogue_mistrals_have_the_window_of_their_config(id: str, window: int | None) -> None:
    assert resolve_model(id, offline=True).traits.sliding_window == window


# transformers/models/<family>/configuration_<family>.py (5.24); starcoder2-7b: its vendored config
@pytest.mark.parametrize(
    ("id", "dropouts"),
    [
        ("openai-community/gpt2", (0.1, 0.1, 0.1)),
        ("facebook/opt-125m", (0.0, 0.0, 0.1)),
        ("bigcode/starcoder2-7b", (0.1, 0.1, 0.1)),
        ("EleutherAI/pythia-160m", (0.0, 0.0, 0.0)),
        ("Qwen/Qwen2.5-0.5B", (0.0, 0.0, 0.0)),
    ],
)
def test_the_config_s_own_dropouts_are_read(id: str, dropouts: tuple[float, float, float]) -> None:
    traits = resolve_model(id, offline=True).traits
    assert (traits.embedding_dropout, traits.attention_dropout, traits.residual_dropout) == dropouts


def test_a_dropout_of_a_config_file_counts() -> None:
    assert shape_of(model_type="llama", attention_dropout=0.25).traits.attention_dropout == 0.25


@pytest.mark.parametrize("share", [1.0, -0.1, "0.1", True])
def test_a_dropout_is_a_share(share: Any) -> None:
    with pytest.raises(ConfigError, match="attention_dropout"):
        shape_of(model_type="llama", attention_dropout=share)
