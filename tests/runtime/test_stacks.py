"""Other people's loops: the estimate's events are the trace's."""

from typing import Any

import pytest
from memory.runs import AUTOCAST, FMS, STACK_RUNS, StackRun, all_layers, canonical, shape_of
from runtime.random_runs import random_run
from runtime.test_trace import events_of

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec
from foretune.memory import PROFILES, StackProfile, estimate_memory
from foretune.runtime.trace import trace_memory

TRAINER, TRL, AMP = PROFILES["trainer"], PROFILES["trl"], {"autocast": "fp16", "loss_kernel": "triton"}
RANDOM_STACKS = (
    TRAINER,
    TRL,
    AUTOCAST,
    PROFILES["fms-4.45"],
    TRAINER.with_(autocast="none", converts_outputs=False, checkpoint_form="reentrant"),
    FMS.with_(**AMP, fused=("rmsnorm", "rope", "lora"), kbit_upcast="norms"),
)


def compare(
    config: TrainingConfig, model: dict[str, Any], stack: StackProfile, device: DeviceSpec | None = None
) -> None:
    shape = shape_of(model)
    trace = trace_memory(config, shape, model, device, stack=stack)
    assert canonical(all_layers(config, shape, device, stack)[0]) == events_of(trace)
    estimate = estimate_memory(config, shape, device, stack=stack)
    assert (estimate.allocated_bytes, estimate.reserved_bytes) == (
        trace.estimate.allocated_bytes,
        trace.estimate.reserved_bytes,
    )


@pytest.mark.parametrize("run", STACK_RUNS[::3], ids=lambda run: run.name)
def test_the_estimate_has_the_events_of_the_traced_loop(run: StackRun) -> None:
    compare(run.config, run.model_of(2), run.stack)


@pytest.mark.full
@pytest.mark.parametrize("run", STACK_RUNS, ids=lambda run: run.name)
def test_the_estimate_has_the_events_of_every_traced_loop(run: StackRun) -> None:
    compare(run.config, run.model_of(2), run.stack)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(60))
def test_random_models_on_the_loops_of_others_have_the_events_of_the_trace(seed: int) -> None:
    run = random_run(seed)
    compare(run.config.with_(loss="stock"), run.model, RANDOM_STACKS[seed % len(RANDOM_STACKS)], run.device)
