"""Each rule of the table is broken by its own example, and by nothing beside it."""

import re

import pytest

from foretune.contract import RULES, build_config, check_config, experimental_choices, parse_config
from foretune.contract.fields import find_field
from foretune.errors import ConfigError, UnsupportedError

QLORA = {"lora": {}, "quantization": {}}
CPU = {"device": "cpu", "precision.dtype": "fp32"}
HUB = {"model.id": "Qwen/Qwen2.5-0.5B"}

BROKEN: dict[str, list[dict[str, object]]] = {
    "device": [{"device": text} for text in ("mps", "cuda:1", "cuda:0", "auto", "0", "cuda:0,cuda:1", "xpu", "CUDA")],
    "parallelism": [{"parallelism": "ddp"}, {"parallelism": "fsdp"}],
    "cpu-fp32": [{"device": "cpu"}, {"device": "cpu", "precision.dtype": "fp16", "lora": {}}],
    "cpu-unquantized": [{**CPU, **QLORA}],
    "cpu-optimizer": [{**CPU, "optimizer.name": "adamw_8bit"}, {**CPU, "optimizer.name": "paged_adamw_8bit"}],
    "cpu-attention": [{"device": "cpu", "precision.dtype": "bf16", "attention": "flash_attention_2"}],
    "cpu-loss": [{**CPU, "loss": "liger"}],
    "no-full-fp16": [{"precision.dtype": "fp16"}],
    "quantized-base-is-frozen": [{"quantization": {}}, {"quantization.scheme": "int8"}],
    "int8-options": [
        {"lora": {}, "quantization": {"scheme": "int8", "double_quant": True}},
        {"lora": {}, "quantization": {"scheme": "int8", "double_quant": False}},
        {"lora": {}, "quantization": {"scheme": "int8", "compute_dtype": "bf16"}},
    ],
    "adapter-dtype-needs-adapters": [{"precision.adapter_dtype": "bf16"}],
    "no-fp16-adapters": [{"lora": {}, "precision.adapter_dtype": "fp16"}],
    "no-fp16-modules": [{"lora.modules_to_save": ["lm_head"], "precision.dtype": "fp16"}],
    "flash-16-bit": [{"attention": "flash_attention_2", "precision.dtype": "fp32"}],
    "names-once": [
        {"lora.targets": ["q_proj", "v_proj", "q_proj"]},
        {"lora.modules_to_save": ["lm_head", "lm_head"]},
    ],
    "adapted-or-whole": [{"lora.targets": ["q_proj", "lm_head"], "lora.modules_to_save": ["lm_head"]}],
    "momentum": [{"optimizer.momentum": 0.9}, {"optimizer.momentum": 0.9, "optimizer.name": "paged_adamw_8bit"}],
    "adamw-options": [
        {"optimizer.name": "sgd", f"optimizer.{name}": value}
        for name, value in (("beta1", 0.8), ("beta2", 0.99), ("epsilon", 1e-6))
    ],
    "implementation": [
        {"optimizer.name": "adamw_8bit", "optimizer.implementation": "fused"},
        {"optimizer.name": "paged_adamw_8bit", "optimizer.implementation": "foreach"},
    ],
    "one-length": [{"schedule.updates": 10, "schedule.epochs": 1}],
    "warmup": [{"schedule.updates": 10, "schedule.warmup_updates": 10}],
    "packing-or-sorting": [{"batch.packing": True, "batch.sort_by_length": True}],
    "spans": [{"data.spans": "template"}],
    "template-date": [
        {"data.template_date": text} for text in ("today", "2026-02-30", "2026-1-31", "2026-01-31T00:00", "0000-01-01")
    ],
    "held-out-once": [{"evaluation.data": "a.jsonl", "evaluation.split": 0.1}],
    "other-rows": [{"evaluation.data": "a.jsonl", "data.train": "./a.jsonl"}],
    "evaluation-cadence": [{"evaluation.every_updates": 5}],
    "keep": [{"checkpoint.keep": 2}],
    "revision": [{"model.id": "./folder", "model.revision": "main"}, {"model.id": "/m", "model.revision": "main"}],
}
ALSO_BROKEN = {"cpu-attention": {"cpu-fp32"}}

KEPT: dict[str, list[dict[str, object]]] = {
    "device": [{"device": "cuda"}, CPU],
    "parallelism": [{"parallelism": "single"}],
    "cpu-fp32": [CPU, {**CPU, "lora": {}}],
    "cpu-unquantized": [CPU],
    "cpu-optimizer": [CPU, {**CPU, "optimizer.name": "sgd"}],
    "cpu-attention": [{**CPU, "attention": "eager"}, {**CPU, "attention": "sdpa"}],
    "cpu-loss": [{**CPU, "loss": "chunked"}, {"loss": "liger"}],
    "no-full-fp16": [{"precision.dtype": "fp16", "lora": {}}, {"precision.dtype": "fp32"}],
    "quantized-base-is-frozen": [QLORA],
    "int8-options": [
        {"lora": {}, "quantization": {"scheme": "int8"}},
        {"lora": {}, "quantization": {"double_quant": False, "compute_dtype": "fp32"}},
    ],
    "adapter-dtype-needs-adapters": [{"lora": {}, "precision.adapter_dtype": "bf16"}],
    "no-fp16-adapters": [{"lora": {}, "precision.adapter_dtype": "fp32"}],
    "no-fp16-modules": [{"lora.modules_to_save": ["lm_head"]}, {"lora": {}, "precision.dtype": "fp16"}],
    "flash-16-bit": [{"attention": "flash_attention_2"}, {"attention": "flash_attention_2", "precision.dtype": "bf16"}],
    "names-once": [{"lora.targets": ["q_proj", "v_proj"], "lora.modules_to_save": ["lm_head"]}],
    "adapted-or-whole": [{"lora.modules_to_save": ["lm_head"]}],
    "momentum": [{"optimizer.momentum": 0.9, "optimizer.name": "sgd"}, {"optimizer.momentum": 0}],
    "adamw-options": [{"optimizer.beta1": 0.8}, {"optimizer.name": "adamw_8bit", "optimizer.epsilon": 1e-6}],
    "implementation": [{"optimizer.implementation": "foreach"}, {"optimizer.name": "adamw_8bit"}],
    "one-length": [{"schedule.updates": 10}, {"schedule.epochs": 2.5}],
    "warmup": [{"schedule.updates": 10, "schedule.warmup_updates": 9}, {"schedule.warmup_updates": 100}],
    "packing-or-sorting": [{"batch.packing": True}, {"batch.sort_by_length": True}],
    "spans": [{"data.spans": "template", "data.supervision": "assistant_only"}],
    "template-date": [{"data.template_date": "2024-02-29"}],
    "held-out-once": [{"evaluation.data": "a.jsonl"}, {"evaluation.split": 0.1}],
    "other-rows": [{"evaluation.data": "a.jsonl", "data.train": "b.jsonl"}],
    "evaluation-cadence": [{"evaluation.every_updates": 5, "evaluation.split": 0.1}],
    "keep": [{"checkpoint.keep": 2, "checkpoint.every_minutes": 10}, {"checkpoint.every_updates": 3}],
    "revision": [{"model.revision": "main"}, {"model.id": "./folder"}],
}


def names_of_broken(settings: dict[str, object]) -> set[str]:
    fields_to_name = {rule.fields[0]: rule.name for rule in RULES}
    try:
        build_config({**HUB, **settings})
    except ConfigError as error:
        found = set()
        for problem in error.problems:
            assert problem.hint
            same_field = [rule.name for rule in RULES if rule.fields[0] == problem.field]
            assert same_field, problem
            found.add(same_field[0] if len(same_field) == 1 else _by_message(same_field, problem.message))
        assert found <= set(fields_to_name.values()) | {rule.name for rule in RULES}
        return found
    return set()


def _by_message(names: list[str], message: str) -> str:
    words = {
        "cpu-unquantized": "device is cpu",
        "quantized-base-is-frozen": "lora is null",
        "cpu-optimizer": "needs CUDA",
        "cpu-attention": "needs CUDA",
        "flash-16-bit": "16 bits",
        "cpu-fp32": "device is cpu",
        "no-full-fp16": "lora is null",
        "adapter-dtype-needs-adapters": "there are no adapters",
        "no-fp16-adapters": "adapter_dtype is fp16",
        "no-fp16-modules": "modules_to_save names modules",
        "names-once": "twice",
        "adapted-or-whole": "adapted or trained whole",
    }
    return next(name for name in names if words[name] in message)


def test_every_rule_has_a_broken_and_a_kept_example() -> None:
    assert set(BROKEN) == set(KEPT) == {rule.name for rule in RULES}


@pytest.mark.parametrize(("name", "settings"), [(name, case) for name, cases in BROKEN.items() for case in cases])
def test_the_rule_and_no_other_is_broken(name: str, settings: dict[str, object]) -> None:
    assert names_of_broken(settings) == {name} | ALSO_BROKEN.get(name, set())


@pytest.mark.parametrize(("name", "settings"), [(name, case) for name, cases in KEPT.items() for case in cases])
def test_the_rule_is_kept(name: str, settings: dict[str, object]) -> None:
    assert names_of_broken(settings) == set(), name


def test_every_rule_names_fields_that_exist_and_has_a_claim() -> None:
    for rule in RULES:
        assert rule.claim
        assert all(find_field(field) is not None for field in rule.fields), rule.name
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_all_broken_rules_are_reported_at_once_with_their_lines() -> None:
    text = (
        "model: {id: gpt2}\nprecision: {dtype: bf16}\ndevice: cpu\noptimizer:\n  name: adamw_8bit\n"
        "checkpoint:\n  keep: 3\nbatch: {packing: true, sort_by_length: true}\n"
    )
    with pytest.raises(ConfigError) as caught:
        parse_config(text, name="run.yaml")
    places = [problem.place for problem in caught.value.problems]
    assert places == ["run.yaml:2:13", "run.yaml:5:3", "run.yaml:7:3", "run.yaml:8:24"]


def test_a_rule_is_checked_beside_a_wrong_value_that_it_does_not_read() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({**HUB, "device": "cuda:1", "precision.dtype": "bf17", "checkpoint.keep": 3, "lora.rnk": 1})
    fields = {problem.field for problem in caught.value.problems}
    assert fields == {"device", "precision.dtype", "checkpoint.keep", "lora.rnk"}


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [(case, field) for cases in KEPT.values() for case in cases for field in case if field != "model.id"],
)
def test_a_wrong_value_breaks_no_rule_that_its_right_value_keeps(settings: dict[str, object], wrong: str) -> None:
    """So a rule names every field that it reads: one that read another would be told wrongly."""
    with pytest.raises(ConfigError) as caught:
        build_config({**HUB, **settings, wrong: float("nan")})
    assert [problem.field for problem in caught.value.problems] == [wrong]


@pytest.mark.parametrize("unknown", ["lorra", "lora_r", "max_steps"])
def test_what_an_unknown_key_may_have_meant_breaks_no_rule(unknown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({**HUB, "precision.dtype": "fp16", unknown: 1})
    assert [problem.field for problem in caught.value.problems] == [unknown]


@pytest.mark.parametrize("device", ["mps", "cuda:1"])
def test_an_unqualified_device_is_refused_by_name_and_says_what_is_qualified(device: str) -> None:
    """case-040: the accelerator of an Apple machine is not qualified."""
    with pytest.raises(UnsupportedError, match=re.escape(f"device is '{device}'")) as caught:
        build_config({**HUB, "device": device})
    assert "cpu and cuda" in str(caught.value)
    assert caught.value.code == "unsupported"


def test_choosing_one_card_is_explained() -> None:
    with pytest.raises(UnsupportedError, match="CUDA_VISIBLE_DEVICES"):
        build_config({**HUB, "device": "cuda:1"})


def test_a_contradiction_beside_an_unqualified_request_is_a_plain_config_error() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({**HUB, "device": "mps", "checkpoint.keep": 4})
    assert type(caught.value) is ConfigError
    assert len(caught.value.problems) == 2


def test_experimental_choices_are_accepted_and_named() -> None:
    config = build_config({**HUB, "attention": "flash_attention_2", "loss": "liger"}).config
    assert experimental_choices(config) == ("attention: flash_attention_2", "loss: liger")
    assert experimental_choices(build_config(HUB).config) == ()


def test_a_configuration_changed_in_code_is_checked_by_the_same_rules() -> None:
    config = build_config(HUB).config
    check_config(config)
    with pytest.raises(ConfigError, match="fp32"):
        check_config(config.with_(device="cpu"))


def test_effective_values_follow_from_what_is_unset() -> None:
    config = build_config({**HUB, **QLORA}).config
    assert config.quantization is not None
    assert config.quantization.uses_double_quant
    assert config.quantization.compute_dtype_for(config.precision) == "bf16"
    assert config.optimizer.kernel == "fused"
    assert config.schedule.passes == 1.0
    other = build_config(
        {**HUB, "lora": {}, "quantization.scheme": "int8", "optimizer.name": "adamw_8bit", "schedule.updates": 3}
    ).config
    assert other.quantization is not None
    assert not other.quantization.uses_double_quant
    assert other.optimizer.kernel is None
    assert other.schedule.passes is None
