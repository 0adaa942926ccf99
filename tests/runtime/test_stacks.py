"""Other people's loops: the estimate's events are the trace's."""

import pytest
from memory.runs import STACK_RUNS, StackRun, all_layers, canonical, shape_of
from runtime.test_trace import events_of

from foretune.memory import estimate_memory
from foretune.runtime.trace import trace_memory


def compare(run: StackRun) -> None:
    model = run.model_of(2)
    shape = shape_of(model)
    trace = trace_memory(run.config, shape, model, stack=run.stack)
    assert canonical(all_layers(run.config, shape, stack=run.stack)[0]) == events_of(trace)
    estimate = estimate_memory(run.config, shape, stack=run.stack)
    assert (estimate.allocated_bytes, estimate.reserved_bytes) == (
        trace.estimate.allocated_bytes,
        trace.estimate.reserved_bytes,
    )


@pytest.mark.parametrize("run", STACK_RUNS[::3], ids=lambda run: run.name)
def test_the_estimate_has_the_events_of_the_traced_loop(run: StackRun) -> None:
    compare(run)


@pytest.mark.full
@pytest.mark.parametrize("run", STACK_RUNS, ids=lambda run: run.name)
def test_the_estimate_has_the_events_of_every_traced_loop(run: StackRun) -> None:
    compare(run)
