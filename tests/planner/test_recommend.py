"""Plans against a search that tries everything, the bounds they rest on, and what they say."""

import random
from typing import Any

import pytest
from memory.runs import SMALL, shape_of

from foretune.api import boundary, build_config, carriers, find_device, recommend, resolve_model
from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec
from foretune.errors import ConfigError, UnsupportedError
from foretune.memory import FORETUNE, estimate_memory, least_bytes, record_memory
from foretune.models import ModelShape
from foretune.planner import OBJECTIVES, Objective, Plan
from foretune.planner.search import Search
from foretune.planner.space import DIMENSIONS, every_point, rows_of, space_for
from foretune.units import GIB, MIB

CONFIG = build_config({"model.id": "test/model", "lora.rank": 16}, overrides=["batch.sequence_length=512"]).config


def device(total_bytes: int, **fields: Any) -> DeviceSpec:
    given: dict[str, Any] = {"name": "a card", "total_is": "given", "compute_capability": "8.6", "has_bf16": True}
    return DeviceSpec.create(**(given | {"total_bytes": total_bytes} | fields))


def drawn(seed: int) -> tuple[ModelShape, DeviceSpec, Objective]:
    """A small model, a card and an objective."""
    draw = random.Random(seed)
    heads = draw.choice([4, 8])
    shape = shape_of(
        SMALL,
        hidden_size=heads * 64,
        num_attention_heads=heads,
        num_key_value_heads=draw.choice([2, heads]),
        intermediate_size=draw.choice([256, 1408]),
        vocab_size=draw.choice([300, 8000, 60000]),
        num_hidden_layers=draw.choice([1, 2, 5]),
        max_position_embeddings=draw.choice([512, 2048, 3000]),
    )
    small = 1100 * MIB + draw.choice([20, 60, 120, 300, 900]) * MIB
    return shape, device(small), draw.choice(OBJECTIVES)


def everything(
    config: TrainingConfig, shape: ModelShape, card: DeviceSpec, objective: Objective
) -> list[tuple[str, int, int]]:
    """Method, value and need of every candidate that fits, each estimated in full."""
    space = space_for(config, (), objective, shape, card)
    search = Search(config, shape, card, space, DIMENSIONS.get(objective), FORETUNE, budget=None, is_dtype_fixed=False)
    found = []
    for method, row, place in every_point(space):
        need = estimate_memory(search.config_of(method, row, place), shape, card).need_bytes
        if need <= card.total_bytes:
            found.append((method, place, need))
    return found


def held_against(shape: ModelShape, card: DeviceSpec, objective: Objective) -> None:
    fitting = everything(CONFIG, shape, card, objective)
    answer = recommend(CONFIG, device=card, objective=objective, shape=shape)
    if not fitting:
        assert not answer.plans
        assert answer.nearest_misses
        return
    best = answer.plans[0]
    if objective == "least-memory":
        assert best.estimate.need_bytes == min(need for _, _, need in fitting)
    elif objective == "full-if-it-fits":
        order = ["full", "lora", "qlora"]
        assert order.index(best.method) == min(order.index(method) for method, _, _ in fitting)
    else:
        assert best.value == answer.space.values[max(place for _, place, _ in fitting)]
        for plan in answer.plans[:-1]:  # of each method too; the last one may be the faster variant
            highest = max(place for method, place, _ in fitting if method == plan.method)
            assert plan.value == answer.space.values[highest]
    assert all(plan.estimate.need_bytes <= card.total_bytes for plan in answer.plans)


@pytest.mark.parametrize("seed", range(8))
def test_no_candidate_beats_the_first_plan(seed: int) -> None:
    held_against(*drawn(seed))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8, 60))
def test_no_candidate_beats_the_first_plan_on_many_more(seed: int) -> None:
    held_against(*drawn(seed))


@pytest.mark.parametrize("seed", range(12))
def test_bounds_lie_below_the_need(seed: int) -> None:
    """What a search rules out by arithmetic or by a walk of one update could not have fitted."""
    shape, card, objective = drawn(seed)
    space = space_for(CONFIG, (), objective, shape, card)
    search = Search(CONFIG, shape, card, space, DIMENSIONS.get(objective), FORETUNE, budget=None, is_dtype_fixed=False)
    points = list(every_point(space))
    for method, row, place in random.Random(seed).sample(points, min(len(points), 10)):
        config = search.config_of(method, row, place)
        recorded, estimate = record_memory(config, shape, card), estimate_memory(config, shape, card)
        assert least_bytes(config, shape) <= recorded.least_requested_bytes <= estimate.requested_bytes
        assert recorded.least_need_bytes <= estimate.need_bytes


def test_the_bound_of_one_update_is_close() -> None:
    shape = resolve_model("Qwen/Qwen2.5-0.5B", offline=True)
    for method in ("full", "lora", "qlora"):
        config = build_config({"model.id": "x"}, method=method).config
        least = record_memory(config, shape).least_requested_bytes
        assert least >= 0.99 * estimate_memory(config, shape).requested_bytes


# -- what the plans say


def plans(model: str, gpu: str, objective: Objective = "longest-sequence", **more: Any) -> tuple[Plan, ...]:
    shape = resolve_model(model, offline=True)
    return recommend(CONFIG, device=find_device(gpu), objective=objective, shape=shape, **more).plans


def test_plans_differ_in_more_than_a_number_and_say_why() -> None:
    found = plans("Qwen/Qwen2.5-7B", "rtx 3090")
    assert len({(plan.method, plan.config.gradient_checkpointing) for plan in found}) == len(found) >= 3
    assert [plan.rank for plan in found] == list(range(1, len(found) + 1))
    values = [plan.value for plan in found if plan.value is not None]
    assert values == sorted(values, reverse=True)
    assert all(plan.fit is not None and plan.fit.verdict == "fits" for plan in found)
    assert all(plan.why and "tokens" in plan.why[0] for plan in found)
    assert any("kept activations would need" in why for why in found[0].why)


def test_what_is_fixed_stays() -> None:
    fixed = {"method", "loss", "gradient_checkpointing", "lora.rank"}
    (only,) = plans("Qwen/Qwen2.5-0.5B", "rtx 3090", fixed=fixed, objective="largest-batch")[:1]
    assert (only.method, only.config.loss, only.config.gradient_checkpointing) == ("lora", "stock", True)
    assert only.config.lora is not None
    assert only.config.lora.rank == 16
    assert only.config.batch.sequence_length == 512


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_card_without_bf16_is_never_asked_for_it(objective: Objective) -> None:
    found = plans("Qwen/Qwen2.5-0.5B", "t4", objective)
    assert found
    assert {plan.config.precision.dtype for plan in found} <= {"fp16", "fp32"}
    assert all(plan.config.precision.dtype == "fp32" for plan in found if plan.method == "full")


def test_adapters_are_never_given_an_8_bit_or_paged_optimizer() -> None:
    shape = resolve_model("Qwen/Qwen2.5-7B", offline=True)
    space = space_for(CONFIG, (), "least-memory", shape, None)
    assert {row.optimizer for method in ("lora", "qlora") for row in rows_of(space, method)} == {"adamw"}
    assert {row.optimizer for row in rows_of(space, "full")} == {"adamw", "adamw_8bit"}


def test_lengths_end_at_the_models_context() -> None:
    found = plans("Qwen/Qwen2.5-0.5B", "h200")
    assert found[0].value == 32_768
    assert "the model's context" in found[0].why[0]


def test_nothing_fits_names_the_nearest_misses_and_what_would_help() -> None:
    shape = resolve_model("Qwen/Qwen2.5-7B", offline=True)
    answer = recommend(CONFIG, device=device(6 * GIB), objective="largest-batch", shape=shape)
    assert not answer.plans
    first = answer.nearest_misses[0]
    needs = [plan.estimate.need_bytes for plan in answer.nearest_misses]
    assert first.method == "qlora"
    assert needs == sorted(needs)
    assert first.fit is not None
    assert first.fit.verdict != "fits"
    assert first.fit.changes
    for change in first.fit.changes:
        is_other_training = any(s.startswith(("lora.rank", "batch.sequence_length")) for s in change.settings)
        assert not is_other_training or "changes what is trained" in change.label or "must be cut" in change.label


def test_every_candidate_is_accounted_for() -> None:
    shape = resolve_model("Qwen/Qwen2.5-7B", offline=True)
    for total in (6, 12, 24, 80):
        answer = recommend(CONFIG, device=device(total * GIB), shape=shape)
        accounted = sum(each.count for each in answer.rejected) + len(answer.plans)
        assert accounted == answer.considered
        assert answer.replayed < answer.walked < answer.considered


def test_a_question_without_an_answer_is_refused() -> None:
    shape = resolve_model("Qwen/Qwen2.5-0.5B", offline=True)
    with pytest.raises(ConfigError, match="depends on a device"):
        recommend(CONFIG, device=None, shape=shape)
    assert recommend(CONFIG, device=None, objective="least-memory", shape=shape).plans
    with pytest.raises(UnsupportedError, match="does not run CUDA"):
        recommend(CONFIG, device=device(GIB, vendor="AMD"), shape=shape)
    with pytest.raises(UnsupportedError, match="no budget"):
        recommend(CONFIG, device=device(GIB, is_unified=True), shape=shape)


# -- boundaries and cards


@pytest.mark.parametrize(("setting", "step"), [("seq-len", 64), ("batch", 1), ("rank", 1)])
def test_a_boundary_fits_and_the_next_step_does_not(setting: str, step: int) -> None:
    shape = shape_of(SMALL, max_position_embeddings=8192)
    card = device(1400 * MIB)
    found = boundary(CONFIG, setting, device=card, shape=shape)
    assert found.value is not None
    assert found.estimate is not None
    assert found.estimate.need_bytes <= card.total_bytes
    assert found.step == step
    if found.next_value is not None:
        assert found.next_value == found.value + step
        section, _, field = found.setting.partition(".")
        more = CONFIG.with_(**{section: getattr(CONFIG, section).with_(**{field: found.next_value})})
        assert estimate_memory(more, shape, card).need_bytes > card.total_bytes


def test_a_boundary_that_does_not_exist_is_said() -> None:
    shape = shape_of(SMALL)
    found = boundary(CONFIG, "batch", device=device(500 * MIB), shape=shape)
    assert (found.value, found.next_value) == (None, 1)
    full = build_config({"model.id": "x"}, method="full").config
    with pytest.raises(ConfigError, match="no rank"):
        boundary(full, "rank", device=device(GIB), shape=shape)


def test_case_156_cards_are_listed_smallest_first_and_those_without_bf16_are_marked() -> None:
    shape = resolve_model("meta-llama/Llama-3.1-8B", offline=True)
    config = build_config({"model.id": "x"}, method="qlora").config
    answer = carriers(config, fixed={"method"}, shape=shape)
    sizes = [each.device.total_bytes for each in answer.carriers]
    assert sizes == sorted(sizes)
    assert sizes[0] < 12.5 * GIB
    assert all(each.need_bytes <= each.device.total_bytes for each in answer.carriers)
    t4 = next(each for each in answer.carriers if "T4" in each.device.name)
    assert t4.without_bf16
    assert t4.config.precision.dtype == "fp16"
    named = len(answer.carriers) + answer.too_small + answer.not_cuda + answer.refused
    assert named == answer.considered
