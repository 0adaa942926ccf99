"""litgpt's model code on the tape: what is resident by its own definition, what its loop holds, what it refuses."""

from typing import Any

import pytest
from memory.runs import SMALL, all_layers, shape_of

from foretune.contract import TrainingConfig
from foretune.errors import ConfigError, UnsupportedError
from foretune.memory import PROFILES, estimate_memory
from foretune.memory.estimate import record
from foretune.memory.ops import linear
from foretune.memory.scans import split
from foretune.memory.tape import Tensor, recording
from foretune.memory.templates import Recording
from foretune.models import ModelShape, litgpt_shape
from foretune.runtime.qualify import require_runnable

STACKS = ("litgpt", "litgpt-0.2", "litgpt-0.4")
COMMON: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 9, "num_attention_heads": 8, "vocab_size": 8000}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 1408, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "phi": {"intermediate_size": 2048, "partial_rotary_factor": 0.5, "hidden_act": "gelu_new"},
    "gpt_neox": {"intermediate_size": 2048},
    "gemma2": {"intermediate_size": 2048, "num_key_value_heads": 4, "head_dim": 64, "sliding_window": 64},
    "falcon": {"multi_query": True, "parallel_attn": True, "bias": False, "new_decoder_architecture": False},
}
H, F, L, V, T, RANK = 512, 1408, 9, 8000, 300, 8
KEYS = 256
"""Width of all keys of the small Llama."""


def model(name: str) -> ModelShape:
    return shape_of({**COMMON, **MODELS[name]}, model_type=name)


def config(method: str = "lora", *, targets: Any = ("q_proj", "v_proj"), batch: int = 1, **more: Any) -> TrainingConfig:
    fields: dict[str, Any] = {
        "model": {"id": "test/model"},
        "precision": {"dtype": "bf16", "adapter_dtype": "bf16"},
        "gradient_checkpointing": False,
        "batch": {"micro_batch_size": batch, "sequence_length": T, "accumulation_steps": 2},
        **more,
    }
    if method != "full":
        fields.setdefault("lora", {"rank": RANK, "targets": targets, "dropout": 0.05})
    if method == "qlora":
        fields.setdefault("quantization", {"double_quant": False})
    return TrainingConfig.create(**fields)


def component(name: str, config: TrainingConfig, shape: ModelShape, stack: str) -> int:
    answer = estimate_memory(config, shape, stack=PROFILES[stack])
    return next(part.num_bytes for part in answer.components if part.name == name)


def test_the_head_is_a_weight_of_its_own_and_projections_are_fused() -> None:
    shape = litgpt_shape(model("llama"))
    layer = (H + 2 * KEYS) * H + H * H + 3 * H * F + 2 * H
    assert shape.total_params == 2 * V * H + L * layer + H
    assert component("weights", config(), model("llama"), "litgpt") == 2 * shape.total_params


def test_biases_and_one_norm_of_phi() -> None:
    shape = litgpt_shape(model("phi"))
    layer = 3 * H * (H + 1) + H * (H + 1) + 2048 * (H + 1) + H * (2048 + 1) + 2 * H
    assert shape.total_params == V * H + V + V * H + L * layer + 2 * H


def test_the_fused_projection_has_one_pair_of_matrices_for_its_enabled_parts() -> None:
    a, b = 2 * RANK * H, (H + KEYS) * RANK
    assert component("adapters", config(), model("llama"), "litgpt") == 2 * L * (a + b)
    whole = config(targets=("query", "key", "value", "proj", "mlp", "head"))
    a += RANK * H + RANK * H + 2 * RANK * H + RANK * F
    b += KEYS * RANK + H * RANK + 2 * F * RANK + H * RANK
    assert component("adapters", whole, model("llama"), "litgpt") == 2 * (L * (a + b) + RANK * (H + V))


def test_every_linear_layer_is_quantized_and_the_head_too() -> None:
    linear = (H + 2 * KEYS) * H + H * H + 3 * H * F
    packed = L * linear + V * H
    others = V * H + L * 2 * H + H
    weights = packed // 2 + packed // 16 + 2 * others
    assert component("weights", config("qlora"), model("llama"), "litgpt-0.4") == weights
    # 0.5: the old embedding stays beside the new one, whose norm has a weight and a bias
    assert component("weights", config("qlora"), model("llama"), "litgpt") == weights + 2 * V * H + 2 * 2 * H


def growth(method: str) -> int:
    """How many more bytes are asked for up to the second update's loss than up to the first's."""
    once = config(method).with_(batch={"sequence_length": T})
    at = record(once, model("llama"), None, PROFILES["litgpt-0.4"])[0].walk().phases
    return at["loss (later)"] - at["loss"]


def test_a_quantized_base_keeps_the_inputs_of_the_last_graph_too() -> None:
    """bitsandbytes up to 0.42 keeps each product's input, and litgpt's logits keep the graph into the next forward."""
    held = L * (3 * H + F) * T * 2 - H * T * 2  # the first layer's fused projection has no gradient to give
    head, unpacked = H * T * 2, 4 * V * H
    more = growth("qlora") - growth("lora")
    assert held + head <= more <= held + head + unpacked
    assert growth("lora") >= 4 * T * V


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_few_layers_stand_for_all(name: str, method: str, stack: str) -> None:
    wanted = config(method, targets=("query", "value", "head"), batch=2)
    few, _ = record(wanted, model(name), None, PROFILES[stack])
    tape, every = all_layers(wanted, litgpt_shape(model(name)), None, PROFILES[stack])
    whole = Recording.of(tape, every).expand()
    assert few.expand() == whole


@pytest.mark.parametrize("scope", ["all-linear", "attention", "mlp"])
def test_scopes_leave_the_head_alone(scope: str) -> None:
    _, facts = record(config(targets=scope), model("llama"), None, PROFILES["litgpt"])
    assert {p.name for p in facts.adapted} & {"lm_head"} == set()


def test_names_of_transformers_and_of_litgpt_mean_the_same() -> None:
    pairs = [("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("down_proj", "mlp"), ("lm_head", "head")]
    for theirs, own in pairs:
        first, second = (record(config(targets=(n,)), model("llama"), None, PROFILES["litgpt"]) for n in (theirs, own))
        assert first[1].adapted == second[1].adapted
    with pytest.raises(ConfigError, match="matches no linear layer"):
        record(config(targets=("w1",)), model("llama"), None, PROFILES["litgpt"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gradient_checkpointing": True}, "checkpoints nothing on one device"),
        ({"precision": {"dtype": "bf16"}}, "have the format of its weights"),
        ({"attention": "eager"}, "attention is eager"),
        ({"loss": "chunked"}, "has no chunked loss"),
    ],
)
def test_what_litgpt_leaves_no_choice_about_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        estimate_memory(config(**changes), model("llama"), stack=PROFILES["litgpt"])


def test_a_quantized_base_has_litgpts_optimizer() -> None:
    with pytest.raises(UnsupportedError, match="paged AdamW"):
        estimate_memory(config("qlora", optimizer={"name": "adamw_8bit"}), model("llama"), stack=PROFILES["litgpt"])
    big = config("qlora", lora={"rank": 256, "targets": ("query", "value")})
    assert component("optimizer states", big, model("llama"), "litgpt") == 0


def test_a_model_that_is_not_described_in_litgpts_modules_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="how litgpt runs qwen2 models is not estimated yet"):
        estimate_memory(config(), shape_of({**SMALL, "model_type": "qwen2"}), stack=PROFILES["litgpt"])


@pytest.mark.parametrize("stack", STACKS)
def test_the_trace_refuses_litgpt_by_name(stack: str) -> None:
    with pytest.raises(UnsupportedError, match=f"The stack {stack} runs litgpt's own model classes") as caught:
        require_runnable(config(), PROFILES[stack])
    assert f"foretune estimate --stack {stack}" in str(caught.value)


def test_a_slice_of_rows_is_multiplied_without_a_copy_by_a_frozen_weight() -> None:
    """LinearAlgebra.cpp, should_fold; the head's chunks at a batch of two. A trained weight has its input copied."""
    for is_trained, births in [(False, [2 * 10 * 16 * 2]), (True, [2 * 10 * 8 * 2, 2 * 10 * 16 * 2])]:
        with recording(PROFILES["litgpt-0.4"].device_rules()._replace(cublas_bytes=0)) as tape:
            x, weight = Tensor((2, 20, 8), "bf16"), Tensor((16, 8), "bf16", needs_grad=is_trained)
            before = len(tape.events)
            part = split(x, (10, 10), 1)[0]
            linear(part, weight)
            assert [size for _, size in tape.events[before:] if size > 0] == births
