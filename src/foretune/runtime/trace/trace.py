"""Trace a fine-tune: build the model without data, run the real step, replay what it allocates."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import transformers
from torch import Tensor

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec
from foretune.memory.allocator import Program
from foretune.memory.answer import MemoryEstimate
from foretune.memory.figures import assemble, facts_of, figures_of, kernels_for
from foretune.memory.stack import FORETUNE, StackProfile
from foretune.models import ModelShape
from foretune.runtime.trace.callers import CallersRun
from foretune.runtime.trace.dequantize import dequantizing
from foretune.runtime.trace.packed import packed_rows
from foretune.runtime.trace.recorder import Birth, Recorder
from foretune.runtime.trace.run import OwnRun
from foretune.runtime.trace.stand_ins import cuda_paths
from foretune.runtime.trace.trainer import TrainerRun

__all__ = ["Trace", "record_run", "trace_memory"]


class Trace(NamedTuple):
    """What a trace gives: the answer, the program behind it, and what each storage was."""

    estimate: MemoryEstimate
    program: Program
    births: list[Birth]
    """By slot."""
    peak_position: int


def trace_memory(
    config: TrainingConfig,
    shape: ModelShape,
    raw_config: Mapping[str, Any],
    device: DeviceSpec | None = None,
    *,
    stack: StackProfile = FORETUNE,
) -> Trace:
    """Trace what a fine-tune needs: the real program on tensors without data.

    `raw_config` is the model's config.json. Raises ConfigError and UnsupportedError for what cannot be built.
    """
    recorder = Recorder(stack.on(device), shape.vocab_size)
    kernels_run: set[str] = set()
    paths = cuda_paths(kernels_for(config, shape, device, stack), kernels_run)
    program = record_run(recorder, paths, config, shape, raw_config)
    facts = facts_of(config, shape)
    figures = figures_of(program)
    requested = _requested_peak(program, recorder.births)
    estimate = assemble("traced", figures, facts, device, stack, requested_bytes=requested, kernels_run=kernels_run)
    if stack.transformers != ".".join(transformers.__version__.split(".")[:2]):
        ran = f"the classes of Transformers {transformers.__version__}, which ran"
        text = f"Rules of Transformers {stack.transformers} are laid over {ran}."
        estimate = estimate.with_(assumptions=(*estimate.assumptions, text))
    return Trace(estimate, program, recorder.births, figures.peak_position)


def record_run(
    recorder: Recorder,
    paths: AbstractContextManager[None],
    config: TrainingConfig,
    shape: ModelShape,
    raw_config: Mapping[str, Any],
) -> Program:
    """Run a fine-tune without data under a device's paths; the recorder has its births."""
    packed = packed_rows(recorder) if config.batch.packing else nullcontext()
    with _quiet_collector(), paths, _backward_noticed(recorder), dequantizing(config), packed:
        run = _kind_of(recorder.stack)(recorder, config, facts_of(config, shape), raw_config, recorder.stack)
        with recorder:
            run.train()
            num_events = len(recorder.events)
    return recorder.program(num_events)


def _kind_of(stack: StackProfile) -> type[OwnRun]:
    if stack.loss == "own":
        return OwnRun
    return TrainerRun if stack.collects_batches else CallersRun


def _requested_peak(program: Program, births: list[Birth]) -> int:
    """Sum the sizes that were asked for, before rounding."""
    live = peak = 0
    for slot, size in program.events:
        if slot >= 0:
            live += births[slot].num_bytes if size else -births[slot].num_bytes
            peak = max(peak, live)
    return peak


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """A death must come from a reference count, not from the garbage collector."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _backward_noticed(recorder: Recorder) -> Iterator[None]:
    """Tell the recorder when the engine runs: its thread has workspaces of its own."""
    original = Tensor.backward

    def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
        recorder.enter(f"backward{recorder.suffix}")
        recorder.in_backward = True
        try:
            original(self, *args, **kwargs)
        finally:
            recorder.in_backward = False

    with patch.object(Tensor, "backward", backward):
        yield
