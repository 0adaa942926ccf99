"""Other people's loops on the tape: templates, and what autocast and checkpointing keep."""

from typing import Any

import pytest
from memory.runs import (
    AUTOCAST,
    FALCON,
    FMS,
    IN_FP32,
    LORA,
    SMALL,
    STACK_RUNS,
    StackRun,
    all_layers,
    shape_of,
    templated,
)

from foretune.errors import UnsupportedError
from foretune.memory import estimate_memory
from foretune.memory.autocast import Autocast
from foretune.memory.ops import linear, lowered, to, widened
from foretune.memory.ready import ReadyQueue
from foretune.memory.tape import DeviceRules, Tensor, recording
from foretune.memory.templates import Recording

LAYERS = 9


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("run", STACK_RUNS, ids=lambda run: run.name)
def test_templates_emit_what_recording_every_layer_does(run: StackRun, batch_size: int) -> None:
    shape = shape_of(run.model_of(LAYERS))
    config = run.config.with_(batch=run.config.batch.with_(micro_batch_size=batch_size, sequence_length=64))
    tape, stand_ins = all_layers(config, shape, stack=run.stack)
    short, whole = templated(config, shape, stack=run.stack), Recording.of(tape, stand_ins)
    assert len(whole.expand().events) == len(tape.events)
    assert short.expand() == whole.expand()
    assert short.walk() == whole.walk()
    assert len(short.stand_ins.recorded) < LAYERS


def test_weights_that_a_layer_returns_are_refused_under_the_reentrant_form() -> None:
    run = StackRun("eager", FMS, {"attention": "eager"}, FALCON)
    with pytest.raises(UnsupportedError, match="return their attention weights") as caught:
        estimate_memory(run.config, shape_of(run.model_of(2)), stack=FMS)
    assert caught.value.problems[0].hint == "Set attention: sdpa, or trace it."
    kept = run.config.with_(gradient_checkpointing=False)
    assert estimate_memory(kept, shape_of(run.model_of(2)), stack=FMS).allocated_bytes > 0


def test_a_trained_leaf_is_cast_once_until_the_outermost_block_ends() -> None:
    with recording(DeviceRules()) as tape:
        trained, frozen = Tensor((8, 8), "f32", needs_grad=True), Tensor((8, 8), "f32")
        with Autocast("bf16") as autocast:
            with autocast:
                first = lowered(trained)
            assert lowered(trained) is first
            assert lowered(frozen) is not lowered(frozen)
            assert linear(Tensor((2, 3, 8), "f32"), frozen).dtype == "bf16"
            assert widened(Tensor((2,), "bf16")).dtype == "f32"
            del first
            alive = len(tape.events)
        assert len(tape.events) == alive + 1  # the cast dies with the block
        assert lowered(trained) is trained
        tape.events = []


@pytest.mark.parametrize(
    ("sequences", "order"), [([1, 1, 1, 1, 1, 1, 0], "acfbdeg"), ([5, 3, 9, 1, 9, 9, 2, 7, 7, 0, 9], "cfekhiabgdj")]
)
def test_equal_tasks_come_in_the_order_of_cpps_heap(sequences: list[int], order: str) -> None:
    """What std::priority_queue gives, compiled by GCC 12."""
    first, *others = [(sequence, chr(ord("a") + i), None) for i, sequence in enumerate(sequences)]
    queue = ReadyQueue(first)
    for task in others:
        queue.push(task)
    assert "".join(queue.pop()[1] for _ in sequences) == order


def events_of(stack: Any, settings: dict[str, Any]) -> list[tuple[int, int]]:
    run = StackRun("", stack, settings)
    return all_layers(run.config, shape_of(SMALL), stack=stack)[0].events


def test_reentrant_checkpoints_keep_the_layers_output_through_its_backward() -> None:
    settings = {**LORA, "attention": "sdpa"}
    peaks = [
        estimate_memory(StackRun("", stack, settings).config, shape_of(SMALL), stack=stack).phases
        for stack in (FMS, FMS.with_(checkpoint_form="non-reentrant"))
    ]
    by_name = [{phase.phase: phase.allocated_bytes for phase in phases} for phases in peaks]
    assert by_name[0]["forward"] == by_name[1]["forward"]
    assert events_of(FMS, settings) != events_of(FMS.with_(checkpoint_form="non-reentrant"), settings)


def test_autocast_changes_nothing_where_all_is_bf16_but_the_adapters() -> None:
    full: dict[str, Any] = {}
    assert events_of(FMS, full) == events_of(AUTOCAST, full)
    assert events_of(FMS, LORA) != events_of(AUTOCAST, LORA)
    assert events_of(FMS, IN_FP32) != events_of(AUTOCAST, IN_FP32)


def test_a_cast_keeps_its_tensors_layout() -> None:
    with recording(DeviceRules()) as tape:
        column_major = Tensor((4, 6), "f32", (1, 4))
        assert to(column_major, "bf16").strides == (1, 4)
        tape.events = []
