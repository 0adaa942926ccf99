"""From a row to what an engine is asked: settings, nearest settings, stacks, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from evidence.rows import ABSENT, CONFIG, observation

from foretune import api
from foretune.contract import TrainingConfig
from foretune.errors import ConfigError, ForetuneError, UnsupportedError
from foretune.evidence import (
    OWN_OBSERVATIONS,
    Prediction,
    Refusal,
    StackChoice,
    choose_stack,
    request_of,
)
from foretune.evidence.compact import Tables


def config_of(**changes: Any) -> TrainingConfig:
    return request_of(observation(**changes)).request.config


def because(**changes: Any) -> str:
    return "; ".join(request_of(observation(**changes)).foreign_because)


def test_settings_are_the_rows() -> None:
    asked = request_of(observation())
    assert asked.request.config == TrainingConfig.create(
        model={"id": "made-up/small"},
        precision={"dtype": "fp16", "adapter_dtype": "fp32"},
        lora={"rank": 4, "alpha": 8.0, "targets": ("q_proj", "v_proj")},
        optimizer={"name": "adamw", "implementation": "foreach", "max_grad_norm": None},
        batch={"micro_batch_size": 2, "sequence_length": 64},
    )
    assert asked.request.shape.num_layers == CONFIG["num_hidden_layers"]
    assert asked.foreign_because == ()
    assert not asked.leaves_out_first
    assert request_of(observation(measured__scope="train_steps_after_warmup")).leaves_out_first


def test_device_is_the_rows() -> None:
    device = request_of(observation()).request.device
    assert device is not None
    assert (device.name, device.total_bytes, device.total_is) == ("Tesla T4", 15_636_365_312, "reported")
    assert (device.compute_capability, device.platform) == ("7.5", "linux")
    nominal = request_of(observation(device__memory_source="nominal")).request.device
    assert nominal is not None
    assert nominal.total_is == "marketing"


def test_a_device_is_what_a_row_says_of_it_and_never_its_name() -> None:
    assert request_of(observation(device__memory_total_bytes=ABSENT)).request.device is None
    renamed = request_of(observation(device__name="NVIDIA H100 80GB")).request.device
    same = request_of(observation()).request.device
    assert renamed is not None
    assert same is not None
    assert renamed.with_(name=same.name) == same
    assert same.multiprocessors == 40


def test_nf4_with_its_compute_format() -> None:
    settings = config_of(
        training__method="qlora",
        training__quantization="nf4_double_quant",
        training__compute_dtype="fp32",
        training__kbit_upcast=True,
    ).quantization
    assert settings is not None
    assert (settings.scheme, settings.double_quant, settings.compute_dtype) == ("nf4", True, "fp32")
    plain = config_of(training__method="qlora", training__quantization="nf4").quantization
    assert plain is not None
    assert plain.double_quant is False


def test_full_trains_every_weight() -> None:
    config = config_of(
        training__method="full", training__lora=None, training__base_dtype="bf16", training__adapter_dtype=ABSENT
    )
    assert (config.lora, config.precision.dtype, config.method) == (None, "bf16", "full")


@pytest.mark.parametrize(
    ("optimizer", "name", "kernel"),
    [
        ("adamw_torch", "adamw", "foreach"),
        ("adamw_torch_fused", "adamw", "fused"),
        ("adamw_8bit", "adamw_8bit", None),
        ("paged_adamw_8bit", "paged_adamw_8bit", None),
    ],
)
def test_optimizers_in_the_contracts_words(optimizer: str, name: str, kernel: str | None) -> None:
    settings = config_of(training__optimizer=optimizer).optimizer
    assert (settings.name, settings.implementation) == (name, kernel)


def test_clipping_is_the_rows_and_else_the_contracts_default() -> None:
    assert config_of().optimizer.max_grad_norm is None
    assert config_of(training__grad_clip=0.5).optimizer.max_grad_norm == 0.5
    assert config_of(training__grad_clip=ABSENT).optimizer.max_grad_norm == 1.0


NEAREST: list[tuple[str, dict[str, Any], Any, str]] = [
    ("attention", {"training__attention": "flash_attention_2"}, "sdpa", "attention: flash_attention_2"),
    ("attention", {"training__attention": "unknown"}, "sdpa", "attention: unknown"),
    ("loss", {"training__loss": "triton_ce"}, "stock", "loss: triton_ce"),
    ("loss", {"training__loss": "chunked"}, "stock", "loss: chunked"),
    ("loss", {"training__loss": "liger_fused"}, "chunked", "loss: liger_fused"),
    ("gradient_checkpointing", {"training__gradient_checkpointing": "reentrant"}, True, "reentrant checkpointing"),
    ("gradient_checkpointing", {"training__gradient_checkpointing": "offloaded"}, True, "checkpointing: offloaded"),
]


@pytest.mark.parametrize(("field", "change", "setting", "reason"), NEAREST)
def test_a_nearest_setting_makes_a_row_foreign(field: str, change: dict[str, Any], setting: Any, reason: str) -> None:
    assert getattr(config_of(**change), field) == setting
    assert reason in because(**change)


def test_foretunes_own_chunked_loss_is_the_contracts() -> None:
    change = {"software__driver": "foretune", "training__loss": "foretune_chunked"}
    assert config_of(**change).loss == "chunked"
    assert "loss" not in because(**change)


@pytest.mark.parametrize(
    ("optimizer", "nearest"), [("paged_adamw_32bit", "paged_adamw_8bit"), ("adamw_8bit_torchao", "adamw_8bit")]
)
def test_an_optimizer_without_a_setting_is_predicted_by_the_nearest(optimizer: str, nearest: str) -> None:
    assert config_of(training__optimizer=optimizer).optimizer.name == nearest
    assert f"optimizer: {optimizer}" in because(training__optimizer=optimizer)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_single_process_under_zero_is_predicted_as_if_without(strategy: str) -> None:
    assert f"{strategy} with one process" in because(training__parallel__strategy=strategy)
    assert config_of(training__parallel__strategy=strategy) == config_of()


def test_a_model_whose_code_is_remote_is_foreign() -> None:
    qwen = {**CONFIG, "model_type": "qwen", "kv_channels": 16}
    change = {"model__config": qwen, "training__lora__target_modules": ["c_attn", "w1"]}
    assert "the code of qwen models is remote" in because(**change)


def test_adamw_tensor_by_tensor_is_nearest_to_fused() -> None:
    assert config_of(training__optimizer_foreach=False).optimizer.kernel == "fused"
    assert "tensor by tensor" in because(training__optimizer_foreach=False)


def test_capped_scores_are_computed_eagerly() -> None:
    capped = {**CONFIG, "model_type": "gemma2", "head_dim": 16, "attn_logit_softcapping": 50.0}
    assert config_of(model__config=capped).attention == "eager"
    assert "capped" in because(model__config=capped)


# -- stacks

STACKS: list[tuple[dict[str, Any], str]] = [
    ({}, "manual-loop"),
    ({"torch": "2.10.0+cu128", "transformers": "5.0.0", "peft": "0.19.1"}, "manual-loop-5.0"),
    (
        {"os": "windows", "torch": "2.6.0", "transformers": "5.8.1", "peft": "0.19.1", "bitsandbytes": "0.49.2"},
        "manual-loop-windows",
    ),
    (
        {"driver": "foretune", "torch": "2.11.0+cu130", "transformers": "5.17.0", "peft": "0.21.0"},
        "foretune-5.17",
    ),
    (
        {"driver": "foretune", "torch": "2.13.0", "transformers": "5.24.0", "peft": "0.21.0", "bitsandbytes": "0.50.2"},
        "foretune",
    ),
]


@pytest.mark.parametrize(("software", "name"), STACKS)
def test_a_known_loop_has_a_profile(software: dict[str, str], name: str) -> None:
    choice = choose_stack(observation(**{f"software__{key}": value for key, value in software.items()}))
    assert (choice.profile.name, choice.foreign_because) == (name, ())


def test_before_its_own_libraries_foretune_makes_rotary_angles_by_a_product() -> None:
    versions = {"software__torch": "2.11.0", "software__transformers": "5.17.0", "software__peft": "0.21.0"}
    profile = choose_stack(observation(software__driver="foretune", **versions)).profile
    assert profile.rotary_by_product
    assert profile.description.startswith("foretune-5.17: torch 2.11, transformers 5.17, peft 0.21")


FOREIGN: list[tuple[dict[str, Any], str]] = [
    ({"software__driver": "hf_trainer_of_tomorrow"}, "no profile describes the driver hf_trainer_of_tomorrow"),
    ({"software__driver": "torchtune"}, "no profile describes the driver torchtune"),
    ({"software__driver": "foretune", "software__os": "windows"}, "no profile describes the driver foretune"),
    ({"software__driver": "foretune", "software__transformers": "5.20.0"}, "transformers 5.20.0, not 5.24"),
    ({"software__transformers": "4.57.1"}, "transformers 4.57.1, not 5.17"),
    ({"software__torch": "2.1.0+cu121"}, "torch 2.1.0+cu121, not 2.14"),
    ({"software__transformers": ABSENT}, "not stated"),
    ({"software__kernels": ["fast_rope"]}, "kernels: fast_rope"),
    ({"software__compile": True}, "torch.compile"),
    (
        {"training__method": "qlora", "training__quantization": "nf4", "training__kbit_upcast": False},
        "another format than the profile's",
    ),
]


@pytest.mark.parametrize(("change", "reason"), FOREIGN)
def test_what_no_profile_describes_is_foreign(change: dict[str, Any], reason: str) -> None:
    choice = choose_stack(observation(**change))
    assert choice.is_foreign
    assert reason in "; ".join(choice.foreign_because)


OF_5_24 = {"torch": "2.13.0", "transformers": "5.24.0", "peft": "0.21.0", "bitsandbytes": "0.50.2"}


def choice_of(driver: str, software: dict[str, Any] | None = None, **changes: Any) -> StackChoice:
    facts = {"driver": driver, **(software or OF_5_24)}
    return choose_stack(observation(**{f"software__{key}": value for key, value in facts.items()}, **changes))


@pytest.mark.parametrize(("driver", "name"), [("hf_trainer", "trainer"), ("trl", "trl")])
def test_trainer_and_trl_are_known(driver: str, name: str) -> None:
    choice = choice_of(driver, training__autocast="bf16")
    assert (choice.profile.name, choice.profile.autocast, choice.foreign_because) == (name, "bf16", ())
    assert choice_of(driver).profile.autocast == "none"


def test_a_row_says_how_trainer_was_called() -> None:
    reentrant = choice_of("hf_trainer", training__gradient_checkpointing="reentrant")
    assert (reentrant.profile.checkpoint_form, reentrant.is_foreign) == ("reentrant", False)
    assert choice_of("hf_trainer", training__kbit_upcast=False).profile.kbit_upcast == "none"
    liger = {**OF_5_24, "kernels": ["liger_fused_linear_ce"]}
    assert choice_of("hf_trainer", liger).profile.loss_kernel == "liger"


@pytest.mark.parametrize("driver", ["axolotl", "hf_trainer", "llama_factory", "trl", "unsloth"])
def test_what_is_trainer_underneath_is_nearest_to_it(driver: str) -> None:
    choice = choice_of(driver, {**OF_5_24, "transformers": "4.51.3"})
    assert (choice.profile.name, choice.is_foreign) == ("trainer", True)
    assert choice.profile.collects_batches


@pytest.mark.parametrize("driver", ["ms_swift", "qwen_finetune"])
def test_scripts_of_2023_have_trainer_of_their_time(driver: str) -> None:
    software = {"torch": "2.1.1", "bitsandbytes": "0.41.3.post2", "transformers": "4.36.2"}
    choice = choice_of(driver, software, training__autocast="bf16")
    assert (choice.profile.name, choice.profile.checkpoint_form) == ("trainer-4.36", "reentrant")
    assert "transformers" not in "; ".join(choice.foreign_because)
    unstated = choice_of(driver, {**software, "transformers": ABSENT}, training__autocast="bf16")
    assert "its version of transformers is not stated" in unstated.foreign_because


def test_adapters_of_that_time_have_the_format_of_the_base() -> None:
    change = {"software__driver": "qwen_finetune", "training__adapter_dtype": "unknown"}
    assert config_of(**change).precision.adapter_dtype == "fp16"
    assert "the format of its adapters is not known" in because(**change)


def test_a_part_of_a_fused_layer_stands_for_the_whole() -> None:
    phi3 = {**CONFIG, "model_type": "phi3"}
    lora = config_of(model__config=phi3).lora
    assert lora is not None
    assert lora.targets == ("qkv_proj",)
    assert "an adapter on q_proj, a part of qkv_proj" in because(model__config=phi3)


# -- litgpt

LITGPT: dict[str, Any] = {
    "software": {"driver": "litgpt", "os": "linux", "torch": "2.1.0+cu121", "bitsandbytes": "0.41.1"},
    "training__base_dtype": "bf16",
    "training__compute_dtype": "bf16",
    "training__adapter_dtype": "bf16",
    "training__gradient_checkpointing": "none",
    "training__loss": "chunked",
}


def test_litgpt_has_a_profile_by_the_time_that_torch_tells() -> None:
    asked = request_of(observation(**LITGPT))
    assert (asked.request.stack.name, asked.foreign_because) == ("litgpt-0.2", ())
    assert asked.request.config.loss == "stock"
    unknown = {**LITGPT, "software": {"driver": "litgpt", "os": "linux"}}
    assert request_of(observation(**unknown)).request.stack.name == "litgpt-0.4"
    assert because(**unknown) == "its version of torch is not stated"


def test_under_four_bits_litgpts_adamw_is_the_paged_one() -> None:
    quantized = {"training__method": "qlora", "training__quantization": "nf4", "training__kbit_upcast": False}
    change = {**LITGPT, **quantized, "training__optimizer": "paged_adamw_32bit"}
    assert request_of(observation(**change)).foreign_because == ()
    assert config_of(**change).optimizer.name == "adamw"


def test_a_length_of_the_first_batch_alone_is_asked_for_the_first_update() -> None:
    change = {"training__seq_len_kind": "longest_known", "training__gradient_accumulation_steps": 64}
    asked = request_of(observation(**change))
    assert asked.is_first_batch
    assert asked.request.config.batch.accumulation_steps == 1
    assert not request_of(observation(training__seq_len_kind="exact")).is_first_batch


# -- refusals

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"outcome": "stopped"}, "The run failed"),
    ({"kind": "after_forward"}, "no peak of training"),
    ({"device__count": 2}, "several devices"),
    ({"training__parallel__world_size": 8}, "several devices"),
    ({"training__parallel__strategy": "fsdp2"}, "divided by fsdp2"),
    ({"training__parallel__cpu_offload": True}, "moved to the host"),
    ({"training__method": "other", "training__method_detail": "dora"}, "Its method is other"),
    ({"training__method": "lora", "training__lora": None}, "adapters say otherwise"),
    ({"training__seq_len": None}, "sequence length is not known"),
    ({"training__micro_batch_size": None}, "micro batch size is not known"),
    ({"model__config": ABSENT}, "config of its model is not known"),
    ({"training__quantization": "gptq_int4"}, "gptq_int4"),
    ({"training__base_dtype": "int8"}, "format of its base weights is int8"),
    ({"training__compute_dtype": "float8"}, "computes in float8"),
    ({"training__optimizer": "lion"}, "lion"),
    ({"training__optimizer_in_backward": True}, "within backward"),
    ({"training__gradient_checkpointing": "selective"}, "selective"),
    ({"training__attention": "flex"}, "attention is flex"),
    ({"training__loss": "dpo"}, "loss is dpo"),
    ({"training__padding_mask": True}, "the model gets a mask"),
    ({"software__allocator_conf": "expandable_segments:True"}, "expandable_segments:True"),
    ({"model__config": {**CONFIG, "model_type": "qwen9"}}, "'qwen9' is not one of"),
    ({"model__config": {"hidden_size": 3}}, "model_type"),
    ({"training__lora__rank": 1 << 40}, "make no configuration"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_not_asked_says_why(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ForetuneError) as caught:
        request_of(observation(**change))
    assert isinstance(caught.value, (UnsupportedError, ConfigError))
    assert reason in caught.value.message


def test_swapping_ids_and_device_names_changes_no_prediction(tmp_path: Path) -> None:
    """Nothing is looked up by the id of a row, its source's name or the name of its device."""
    lines = OWN_OBSERVATIONS.read_text(encoding="utf-8").splitlines()
    whole = [Tables.of(json.loads(lines[0]), "1").expand(json.loads(line), "x") for line in lines[1::17]]
    chosen = [row for row in whole if row.get("outcome", "ok") == "ok"]
    swapped = []
    for number, (row, other) in enumerate(zip(chosen, reversed(chosen), strict=True)):
        device = {**row["device"], "name": other["device"].get("name", "a card")}
        source = {**row["source"], "name": f"source {number}"}
        swapped.append({**row, "id": other["id"], "source": source, "device": device, "group": f"g{number}"})
    before, after = (list(api.score(written(tmp_path / name, rows))) for name, rows in (("a", chosen), ("b", swapped)))

    def bytes_of(found: Prediction | Refusal) -> object:
        is_refusal = isinstance(found, Refusal)
        return found.reason if is_refusal else (found.allocated_bytes, found.reserved_bytes, found.stack, found.foreign)

    assert [bytes_of(row) for row in before] == [bytes_of(row) for row in after]
    assert sum(isinstance(row, Prediction) for row in before) >= 5


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path
