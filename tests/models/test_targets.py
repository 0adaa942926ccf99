"""Targets match as PEFT matches them, or fail with what there is (shared/cases 014, 105, 106)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretune.errors import ConfigError
from foretune.models import (
    ModelShape,
    Projection,
    adapted_params,
    list_models,
    lora_parameters,
    quantizable_params,
    resolve_model,
    resolve_saved_modules,
    resolve_targets,
)

IDS = [entry.id for entry in list_models()]


def model(id: str) -> ModelShape:
    return resolve_model(id, offline=True)


def names(projections: tuple[Projection, ...]) -> list[str]:
    return [projection.name for projection in projections]


# shared/cases 106: reproduced there with peft 0.21.2.
def test_all_linear_of_phi_3_mini_trains_25_165_824_parameters_at_rank_16() -> None:
    found = resolve_targets(model("microsoft/Phi-3-mini-4k-instruct"), "all-linear")
    assert lora_parameters(found, 16) == 25_165_824
    assert names(found) == ["self_attn.o_proj", "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"]


# get_peft_model (peft 0.21.2) with target_modules="all-linear", r=16 on a meta-device build trains as many.
def test_all_linear_of_qwen_2_5_0_5b_trains_8_798_208_parameters_at_rank_16() -> None:
    assert lora_parameters(resolve_targets(model("Qwen/Qwen2.5-0.5B"), "all-linear"), 16) == 8_798_208


def test_the_head_is_never_in_all_linear() -> None:
    for id in IDS:
        assert not any("lm_head" in p.name or "embed" in p.name for p in resolve_targets(model(id), "all-linear"))


@pytest.mark.parametrize(
    ("id", "attention", "mlp"),
    [
        ("Qwen/Qwen2.5-0.5B", ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]),
        ("microsoft/phi-4", ["o_proj", "qkv_proj"], ["gate_up_proj", "down_proj"]),
        ("openai-community/gpt2", ["c_attn", "c_proj"], ["c_fc", "c_proj"]),
        ("facebook/opt-125m", ["k_proj", "v_proj", "q_proj", "out_proj"], ["fc1", "fc2"]),
        ("tiiuae/falcon-7b", ["query_key_value", "dense"], ["dense_h_to_4h", "dense_4h_to_h"]),
        ("EleutherAI/pythia-160m", ["query_key_value", "dense"], ["dense_h_to_4h", "dense_4h_to_h"]),
        ("nvidia/Nemotron-H-8B-Base-8K", ["q_proj", "k_proj", "v_proj", "o_proj"], ["up_proj", "down_proj"]),
    ],
)
def test_scopes_mean_the_modules_of_the_family(id: str, attention: list[str], mlp: list[str]) -> None:
    shape = model(id)
    assert [name.rpartition(".")[2] for name in names(resolve_targets(shape, "attention"))] == attention
    assert [name.rpartition(".")[2] for name in names(resolve_targets(shape, "mlp"))] == mlp


def test_linear_attention_is_attention_and_shared_experts_are_mlp() -> None:
    shape = model("Qwen/Qwen3.5-35B-A3B")
    attention = names(resolve_targets(shape, "attention"))
    assert "linear_attn.in_proj_qkv" in attention
    assert "self_attn.q_proj" in attention
    assert names(resolve_targets(shape, "mlp")) == [
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
        "mlp.shared_expert.down_proj",
    ]


def test_a_scope_that_matches_nothing_is_an_error_that_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"mixer\.in_proj"):
        resolve_targets(model("state-spaces/mamba-130m-hf"), "attention")
    with pytest.raises(ConfigError, match="'mlp' matches no linear layer"):
        resolve_targets(model("mistralai/Mixtral-8x7B-v0.1"), "mlp")


# shared/cases 105: peft 0.21.2 silently trains the part that matches.
def test_every_name_must_match_and_all_that_do_not_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_targets(model("Qwen/Qwen2.5-0.5B"), ("q_proj", "nonexistent_proj", "gate_prj"))
    error = caught.value
    assert [problem.field for problem in error.problems] == ["lora.targets", "lora.targets"]
    assert "nonexistent_proj" in str(error)
    assert "self_attn.q_proj" in str(error)
    assert "Nearest: gate_proj." in str(error)


def test_a_name_in_a_hybrid_reaches_only_the_layers_that_have_it() -> None:
    shape = model("Qwen/Qwen3.5-0.8B")
    (found,) = resolve_targets(shape, ("q_proj",))
    assert found.layers == (3, 7, 11, 15, 19, 23)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("q_proj", 24),
        ("self_attn.q_proj", 24),
        ("layers.3.self_attn.q_proj", 1),
        ("3.self_attn.q_proj", 1),
        ("model.layers.3.self_attn.q_proj", 1),
    ],
)
def test_names_match_the_end_of_the_module_path(name: str, count: int) -> None:
    (found,) = resolve_targets(model("Qwen/Qwen2.5-0.5B"), (name,))
    assert (found.name, len(found.layers)) == ("self_attn.q_proj", count)


@pytest.mark.parametrize("name", ["_proj", "proj", "elf_attn.q_proj", "layers.99.self_attn.q_proj", "", "."])
def test_a_part_of_a_word_matches_nothing(name: str) -> None:
    with pytest.raises(ConfigError):
        resolve_targets(model("Qwen/Qwen2.5-0.5B"), (name,))


# peft 0.21.2, tuners/tuners_utils.py, _check_lora_target_modules_mamba
def test_the_out_proj_of_a_mamba_mixer_takes_no_adapter() -> None:
    shape = model("state-spaces/mamba-130m-hf")
    assert names(resolve_targets(shape, "all-linear")) == ["mixer.in_proj", "mixer.x_proj", "mixer.dt_proj"]
    with pytest.raises(ConfigError, match="PEFT refuses"):
        resolve_targets(shape, ("out_proj",))


def test_no_name_at_all_is_an_error() -> None:
    with pytest.raises(ConfigError, match="No target"):
        resolve_targets(model("Qwen/Qwen2.5-0.5B"), ())


def test_stacked_experts_are_no_targets() -> None:
    with pytest.raises(ConfigError, match="stacked experts"):
        resolve_targets(model("mistralai/Mixtral-8x7B-v0.1"), ("gate_up_proj",))


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_an_adapter_on_head_or_embedding_points_to_modules_to_save(name: str) -> None:
    with pytest.raises(ConfigError, match="modules_to_save"):
        resolve_targets(model("Qwen/Qwen2.5-0.5B"), (name,))


def test_a_module_that_is_trained_whole_gets_no_adapter() -> None:
    shape = model("Qwen/Qwen2.5-0.5B")
    assert "self_attn.o_proj" not in names(resolve_targets(shape, "all-linear", ("o_proj",)))
    with pytest.raises(ConfigError):
        resolve_targets(shape, ("o_proj",), ("o_proj",))


# -- modules trained whole ---------------------------------------------------------------------------------------


# shared/cases 014: two vocab-sized trainables reproduced there with peft 0.21.2.
def test_on_a_tied_model_embedding_and_head_become_two_copies() -> None:
    saved = resolve_saved_modules(model("Qwen/Qwen2.5-0.5B"), ("embed_tokens", "lm_head"))
    assert sum(parameter.num_elements for parameter in saved) == 272_269_312
    assert [parameter.name for parameter in saved] == ["model.embed_tokens.weight", "lm_head.weight"]


def test_on_an_untied_model_the_head_is_the_head() -> None:
    shape = model("Qwen/Qwen2.5-7B")
    (saved,) = resolve_saved_modules(shape, ("lm_head",))
    assert saved.num_elements == 152_064 * 3_584


def test_norms_are_found_in_every_layer() -> None:
    saved = resolve_saved_modules(model("Qwen/Qwen2.5-0.5B"), ("input_layernorm", "norm"))
    assert sum(parameter.num_elements for parameter in saved) == 25 * 896


def test_a_module_counts_once_however_often_it_is_named() -> None:
    shape = model("Qwen/Qwen2.5-0.5B")
    assert resolve_saved_modules(shape, ("lm_head", "lm_head")) == resolve_saved_modules(shape, ("lm_head",))


def test_a_saved_module_that_is_not_there_is_an_error_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Nearest: embed_tokens"):
        resolve_saved_modules(model("Qwen/Qwen2.5-0.5B"), ("embed_token",))


# -- counts ------------------------------------------------------------------------------------------------------


@given(st.sampled_from(IDS), st.integers(1, 64))
def test_twice_the_rank_is_twice_the_lora_parameters(id: str, rank: int) -> None:
    found = resolve_targets(model(id), "all-linear")
    assert lora_parameters(found, 2 * rank) == 2 * lora_parameters(found, rank)


@given(st.sampled_from(IDS))
def test_the_quantizable_and_the_adapted_share_are_parts_of_the_model(id: str) -> None:
    shape = model(id)
    adapted = adapted_params(resolve_targets(shape, "all-linear"))
    assert 0 < adapted <= shape.text_params
    assert 0 <= quantizable_params(shape) <= shape.text_params


# shared/models/README.md, surprise 1: nn.Linear share of Mixtral 2.9 %, of gpt-oss-120b 0.8 %.
@pytest.mark.parametrize(("id", "percent"), [("mistralai/Mixtral-8x7B-v0.1", 2.9), ("openai/gpt-oss-120b", 0.8)])
def test_4_bit_reaches_little_of_a_mixture(id: str, percent: float) -> None:
    shape = model(id)
    assert round(100 * quantizable_params(shape) / shape.total_params, 1) == percent
