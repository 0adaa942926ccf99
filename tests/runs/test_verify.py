"""Whatever differs from what was asked for is found: before the first update, and after the last one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs.made_live import BF16, LORA, NF4, alive, family_folder, loaded, made_config, packed, update
from runs.made_run import configured
from runs.planted import (
    EIGHT,
    EIGHT_BIT_ADAM,
    FOUR,
    LEAKS,
    PLANTED,
    PLANTED_AFTER,
    SGD,
    WithoutPositions,
    attention_of_one_layer,
    by_class,
    group,
    moved,
    one_element,
    query,
    recast,
    some_trained,
    state,
)
from torch import nn
from transformers import LlamaForCausalLM

import foretune.runtime.train
from foretune.api import train
from foretune.contract import OptimizerSettings, PrecisionSettings, TrainingConfig
from foretune.errors import VerificationError
from foretune.evidence import RunRecord, read_record
from foretune.runtime.adapters import attach_adapters
from foretune.runtime.checkpoint import ProgressState, load_checkpoint, save_checkpoint
from foretune.runtime.live import Live, make_live_optimizer, remember
from foretune.runtime.load import Loaded
from foretune.runtime.meter import Meter
from foretune.runtime.update import Batch
from foretune.runtime.verify import Moment, observe, require_verified


def fields_that_differ(live: Live, moment: Moment, rows: Batch | None = None) -> set[str]:
    return {check.field for check in observe(live, moment, rows) if not check.holds}


def require_caught(live: Live, moment: Moment, field: str, rows: Batch | None = None) -> VerificationError:
    """Require that verification ends the run and names the field. Returns what it says."""
    with pytest.raises(VerificationError) as caught:
        require_verified(live, moment, rows)
    assert caught.value.exit_code == 11
    assert field in {problem.field for problem in caught.value.problems}
    return caught.value


@pytest.mark.parametrize("name", PLANTED)
def test_a_deviation_is_found_before_the_first_update(name: str) -> None:
    planted = PLANTED[name]
    live = alive(made_config(**planted.fields))
    assert not fields_that_differ(live, "before")
    planted.plant(live)
    require_caught(live, "before", planted.field)


@pytest.mark.parametrize("name", [*PLANTED, *PLANTED_AFTER])
def test_a_deviation_is_found_after_the_last_update(name: str) -> None:
    planted = {**PLANTED, **PLANTED_AFTER}[name]
    live = alive(made_config(**planted.fields))
    update(live)
    assert not fields_that_differ(live, "after")
    planted.plant(live)
    require_caught(live, "after", planted.field)


# -- what only updates bring about


STEPPED = {"AdamW": {}, "SGD": {"optimizer": SGD.with_(momentum=0.0)}, "8-bit AdamW": {"optimizer": EIGHT_BIT_ADAM}}


@pytest.mark.parametrize("name", STEPPED)
def test_a_step_that_is_skipped_is_found(name: str) -> None:
    live = alive(made_config(**STEPPED[name]))
    apply, live.optimizer.step = live.optimizer.step, lambda: None
    update(live)
    live.optimizer.step = apply
    update(live)
    said = require_caught(live, "after", "optimizer steps")
    assert "optimizer steps is 1 after the last update, and 2 was asked for." in str(said)


@pytest.mark.parametrize("name", STEPPED)
def test_a_step_that_is_taken_twice_is_found(name: str) -> None:
    live = alive(made_config(**STEPPED[name]))
    apply = live.optimizer.step

    def twice() -> None:
        apply()
        apply()

    live.optimizer.step = twice
    update(live)
    require_caught(live, "after", "optimizer steps")


@pytest.mark.parametrize("name", ["AdamW", "8-bit AdamW"])
def test_thousands_of_steps_are_counted_as_they_were_taken(name: str) -> None:
    live = alive(made_config(**STEPPED[name]))
    update(live)
    for kept in live.optimizer.state.values():
        kept["step"] = torch.tensor(12_345.0) if isinstance(kept["step"], torch.Tensor) else 12_345
    live.updates_applied = live.updates_here = live.steps_here = 12_345
    assert "optimizer steps" not in fields_that_differ(live, "after")
    live.updates_applied = 12_346
    assert "optimizer steps" in fields_that_differ(live, "after")


def test_an_optimizer_that_does_nothing_is_found() -> None:
    live = alive(made_config())
    live.optimizer.step = lambda: None
    update(live)
    assert fields_that_differ(live, "after") == {"trained weights", "optimizer states", "optimizer steps"}


def test_a_rate_of_zero_is_found_by_what_it_leaves_unchanged() -> None:
    live = alive(made_config())
    group(live)["lr"] = 0.0
    update(live, 2)
    assert fields_that_differ(live, "after") == {"trained weights"}


# -- what is no deviation

WHOLE_HEAD = LORA.with_(modules_to_save=("lm_head",))
NORMAL: dict[str, dict[str, Any]] = {
    "adapters in fp32 under bf16": {"precision": BF16},
    "adapters in bf16 under bf16": {"precision": PrecisionSettings.create(dtype="bf16", adapter_dtype="bf16")},
    "adapters in fp32 under fp16": {"precision": PrecisionSettings.create(dtype="fp16")},
    "everything in bf16": {"precision": BF16, "lora": None},
    "a head that is trained whole": {"lora": WHOLE_HEAD},
    "a head that is trained whole in bf16": {"precision": BF16, "lora": WHOLE_HEAD},
    "DoRA": {"lora": LORA.with_(use_dora=True, use_rslora=True, dropout=0.1)},
    "other parts": {"loss": "chunked", "attention": "eager", "gradient_checkpointing": False},
    "SGD": {"optimizer": SGD.with_(momentum=0.0)},
    "SGD with momentum": {"optimizer": SGD},
    "an 8-bit optimizer": {"optimizer": EIGHT_BIT_ADAM, "lora": None},
    "nf4": FOUR,
    "nf4 with plain scales, computed in fp32": {
        "precision": BF16,
        "quantization": NF4.with_(double_quant=False, compute_dtype="fp32"),
    },
    "int8": EIGHT,
}


@pytest.mark.parametrize("name", NORMAL)
def test_what_is_as_asked_for_is_no_deviation(name: str) -> None:
    live = alive(made_config(**NORMAL[name]))
    assert not fields_that_differ(live, "before", packed())
    update(live, 2)
    assert not fields_that_differ(live, "after", packed())


@pytest.mark.parametrize("fields", [{}, {"precision": BF16, "lora": None}, FOUR], ids=["lora", "full", "nf4"])
@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gemma3", "gemma3_text", "glm4_moe", "hunyuan_v1_moe", "ernie4_5_moe"]
)
def test_families_with_something_of_their_own_are_no_deviation(family: str, fields: dict[str, Any]) -> None:
    attention = "eager" if family == "gemma2" else "sdpa"
    live = alive(made_config(family_folder(family), attention=attention, **fields))
    assert not fields_that_differ(live, "before", packed())
    update(live)
    assert not fields_that_differ(live, "after", packed())


def test_what_a_class_keeps_in_fp32_is_no_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    strict = alive(made_config(family_folder("glm4_moe"), precision=BF16))
    assert {each.dtype for name, each in strict.base.named_parameters() if "mlp.gate.weight" in name} == {torch.float32}
    assert not fields_that_differ(strict, "before")
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules", ["model.norm"])
    only_fp16 = alive(made_config(precision=PrecisionSettings.create(dtype="fp16")))
    assert only_fp16.base.model.norm.weight.dtype == torch.float32
    assert not fields_that_differ(only_fp16, "before")
    only_fp16.base._keep_in_fp32_modules = set()
    assert fields_that_differ(only_fp16, "before") == {"precision.dtype"}


def test_what_a_class_makes_in_fp32_is_no_deviation_and_nothing_else_is() -> None:
    live = alive(made_config(family_folder("hunyuan_v1_moe"), precision=BF16))
    in_fp32 = [name for name, (each, _) in live.loaded.items() if each.dtype == torch.float32]
    assert in_fp32 == [f"model.layers.{number}.mlp.gate.wg.weight" for number in range(2)]
    recast(live.base.model.norm.weight, torch.float32)
    assert "precision.dtype" in fields_that_differ(live, "before")


def test_what_a_class_leaves_out_of_training_is_frozen_though_loading_forgets_it() -> None:
    base = loaded(made_config(family_folder("ernie4_5_moe")))
    bias = "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"
    assert base.get_parameter(bias).requires_grad
    live = alive(made_config(family_folder("ernie4_5_moe"), lora=None), base)
    assert {name for name, each in live.model.named_parameters() if not each.requires_grad} == {bias}


def test_norms_in_fp32_beside_a_quantized_base_are_no_deviation() -> None:
    config = made_config(**FOUR)
    base: Any = loaded(config)
    for layer in base.model.layers:
        layer.input_layernorm.float()
    assert not fields_that_differ(alive(config, base), "before")


def test_a_tower_is_frozen_and_everything_else_is_trained() -> None:
    live = alive(made_config(family_folder("gemma3"), lora=None))
    frozen = {name for name, each in live.model.named_parameters() if not each.requires_grad}
    assert frozen
    assert all("vision_tower" in name or "multi_modal_projector" in name for name in frozen)


def test_a_run_that_goes_on_from_a_checkpoint_is_no_deviation(tmp_path: Path) -> None:
    config = made_config(optimizer=OptimizerSettings.create(learning_rate=0.01, weight_decay=0.1))
    first = alive(config)
    group(first)["lr"] = 0.004
    update(first, 2)
    progress = ProgressState(update=2, fingerprint="", label_sha256="", base_sha256="")
    path = save_checkpoint(tmp_path, first, progress)
    live = alive(config)
    load_checkpoint(path, live)
    remember(live)
    assert group(live)["lr"] == 0.004
    assert not fields_that_differ(live, "before")
    update(live)
    assert (live.updates_applied, live.updates_here) == (3, 1)
    assert not fields_that_differ(live, "after")


def test_paged_states_lie_in_managed_memory() -> None:
    """As torch sees it that is another device (bitsandbytes/functional.py, get_paged); meta stands for it here."""
    live = alive(made_config(optimizer=EIGHT_BIT_ADAM.with_(name="paged_adamw_8bit")))
    update(live)
    moved(live, "state1", device="meta")
    assert fields_that_differ(live, "after") == {"optimizer states (device)"}
    state(live)["state1"].is_paged = True
    assert not fields_that_differ(live, "after")


# -- packed rows


@pytest.mark.parametrize("fields", [{}, {"loss": "chunked"}, {"precision": BF16}], ids=["stock", "chunked", "bf16"])
@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_between_packed_examples_is_found(leak: str, fields: dict[str, Any]) -> None:
    live = alive(made_config(**fields))
    assert not fields_that_differ(live, "before", packed())
    update(live)
    assert not fields_that_differ(live, "after", packed())
    LEAKS[leak](live)
    require_caught(live, "before", "packed examples", packed())
    require_caught(live, "after", "packed examples", packed())


@pytest.mark.parametrize("family", ["gpt_oss", "opt", "bloom"])
def test_a_model_that_leaks_in_transformers_is_found(family: str) -> None:
    """Their classes make masks without the positions (5.24), so nothing keeps packed examples apart."""
    live = alive(made_config(family_folder(family), attention="eager", precision=BF16))
    assert not fields_that_differ(live, "before")
    require_caught(live, "before", "packed examples", packed())


def test_hidden_states_that_are_no_numbers_are_not_isolated() -> None:
    live = alive(made_config())

    def no_numbers(_: Any, inputs: Any, output: Any) -> None:
        output[0].fill_(float("nan"))

    live.base.model.register_forward_hook(no_numbers)
    require_caught(live, "before", "packed examples", packed())


def test_looking_leaves_modes_gradients_and_random_numbers_as_they_were() -> None:
    live = alive(made_config(lora=LORA.with_(dropout=0.5)))
    before = torch.get_rng_state()
    observe(live, "before", packed())
    assert all(module.training for module in live.step.modules())
    assert all(parameter.grad is None for parameter in live.model.parameters())
    assert torch.equal(torch.get_rng_state(), before)


# -- whole runs


class AtTheLastUpdate(Meter):
    """Plants a deviation in a run of two updates, when the optimizer is about to apply the second."""

    def __init__(self, lives: list[Live], plant: Callable[[Live], Any]) -> None:
        super().__init__("cpu")
        self.lives, self.plant = lives, plant

    def enter(self, phase: str) -> None:
        super().enter(phase)
        if phase == "optimizer (later)":
            self.plant(self.lives[0])


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> list[Live]:
    """Collect the living runs as they get their optimizers."""
    found: list[Live] = []

    def kept(live: Live) -> None:
        make_live_optimizer(live)
        found.append(live)

    monkeypatch.setattr(foretune.runtime.train, "make_live_optimizer", kept)
    return found


def run_config(folder: Path, **changes: Any) -> TrainingConfig:
    return configured(folder, schedule__updates=2, schedule__epochs=..., **changes).config


def require_failed_run(config: TrainingConfig, field: str, meter: Meter | None = None) -> RunRecord:
    """Run it, and require that nothing is handed over and that the record says what was found."""
    with pytest.raises(VerificationError) as caught:
        list(train(config, meter=meter))
    assert caught.value.exit_code == 11
    assert field in {problem.field for problem in caught.value.problems}
    assert config.output is not None
    folder = Path(config.output)
    record = read_record(folder / "record.json")
    assert caught.value.record == str(folder / "record.json")
    assert (record.outcome, record.artifact) == ("verification-error", None)
    assert record.failure is not None
    assert (record.failure.code, record.failure.message) == ("verification", caught.value.message)
    left = {path.name for path in folder.iterdir()}
    assert left <= {"record.json", "config.yaml", "updates.jsonl", "checkpoints", "lock"}
    assert not list((folder / "checkpoints").iterdir())
    assert {path.name for path in folder.parent.iterdir()} <= {"rows.jsonl", "kept", "run"}
    return record


def without_a_layer(base: nn.Module, lora: Any, names: list[str], **options: Any) -> nn.Module:
    return attach_adapters(base, lora, names[1:], **options)


def in_bf16(**options: Any) -> Any:
    return loaded(made_config(precision=BF16))


@pytest.mark.parametrize(
    ("field", "where", "fault", "changes"),
    [
        ("lora.targets", "foretune.runtime.live.attach_adapters", without_a_layer, {}),
        ("precision.dtype", "foretune.runtime.train.load_model", lambda *_, **__: Loaded(in_bf16(), ()), {}),
        ("gradient_checkpointing", "foretune.runtime.live.enable_checkpointing", lambda base: None, {}),
        (
            "packed examples",
            "foretune.runtime.live.TrainingStep",
            WithoutPositions,
            {"batch__packing": True, "num_rows": 8},
        ),
    ],
)
def test_a_run_whose_parts_do_otherwise_ends_before_its_first_update(
    field: str, where: str, fault: Any, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, fault)
    record = require_failed_run(run_config(tmp_path, **changes), field)
    assert record.scope is not None
    assert record.scope.updates_done == 0
    assert "before the first update" in str(record.failure)


@pytest.mark.parametrize(
    ("field", "plant", "changes"),
    [
        ("base weights that are not trained", lambda live: one_element(query(live).base_layer.weight), {}),
        ("values of trained weights", lambda live: some_trained(live).data.fill_(float("nan")), {}),
        ("optimizer steps", lambda live: live.optimizer.step(), {}),
        ("attention", attention_of_one_layer, {}),
        ("packed examples", by_class, {"batch__packing": True, "num_rows": 8}),
    ],
)
def test_a_run_that_goes_wrong_hands_nothing_over(
    field: str, plant: Callable[[Live], Any], changes: dict[str, Any], tmp_path: Path, lives: list[Live]
) -> None:
    record = require_failed_run(run_config(tmp_path, **changes), field, AtTheLastUpdate(lives, plant))
    assert record.scope is not None
    assert record.scope.updates_done == 2
    assert "after the last update" in str(record.failure)
