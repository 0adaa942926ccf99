"""Trace a fine-tune: build the model without data, run the real step, replay what it allocates."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec
from foretune.errors import UnsupportedError
from foretune.memory.allocator import Program
from foretune.memory.answer import MemoryEstimate
from foretune.memory.components import Facts
from foretune.memory.figures import assemble, facts_of, figures_of, kernels_of
from foretune.memory.kernels import MAX_MICROSTEPS, NUM_UPDATES
from foretune.memory.stack import FORETUNE, StackProfile
from foretune.models import ModelShape
from foretune.runtime.adapters import attach_adapters
from foretune.runtime.checkpointing import enable_checkpointing
from foretune.runtime.load import DTYPES, build_model, decoder_linears, model_config
from foretune.runtime.optimizer import make_optimizer
from foretune.runtime.step import TrainingStep
from foretune.runtime.trace.recorder import Birth, Recorder
from foretune.runtime.trace.stand_ins import cuda_paths
from foretune.runtime.update import Batch, run_update

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
    program = record_run(recorder, cuda_paths(kernels_of(device, stack)), config, shape, raw_config)
    facts = facts_of(config, shape)
    figures = figures_of(program)
    requested = _requested_peak(program, recorder.births)
    estimate = assemble("traced", figures, facts, device, stack, requested_bytes=requested)
    return Trace(estimate, program, recorder.births, figures.peak_position)


def record_run(
    recorder: Recorder,
    paths: AbstractContextManager[None],
    config: TrainingConfig,
    shape: ModelShape,
    raw_config: Mapping[str, Any],
) -> Program:
    """Run a fine-tune without data under a device's paths; the recorder has its births."""
    with _quiet_collector(), paths, _backward_noticed(recorder):
        run = _Run(recorder, config, facts_of(config, shape), raw_config, recorder.stack)
        with recorder:
            run.train()
            num_events = len(recorder.events)
    return recorder.program(num_events)


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


def _require_trained(count: int, facts: Facts) -> None:
    """Refuse a program that trains something else than what the answer says."""
    if count != facts.trainable_params:
        raise UnsupportedError(
            f"{facts.shape.id}: the program trains {count:,} parameters, and {facts.trainable_params:,} are counted; "
            "it is not traced yet.",
            hint="Parts beside the language model, modules_to_save and DoRA are such cases.",
            field="model.id",
        )


class _Run:
    """One fine-tune on the meta device."""

    def __init__(
        self,
        recorder: Recorder,
        config: TrainingConfig,
        facts: Facts,
        raw_config: Mapping[str, Any],
        stack: StackProfile,
    ) -> None:
        self.recorder, self.config, self.stack = recorder, config, stack
        dtype = DTYPES[config.precision.dtype]
        made = model_config(raw_config, attention=config.attention)
        self.base = build_model(made, dtype=dtype, device="meta", attention=config.attention)
        self.step_is_chunked = config.loss == "chunked"
        step = TrainingStep(self.base, self.base, is_chunked=self.step_is_chunked)
        with torch.device("meta"), recorder:
            self._load()
            recorder.enter("prepare")
            self.model = self._prepare(facts)
        step.model = self.model
        self.step = step
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        _require_trained(sum(parameter.numel() for parameter in self.trained), facts)
        head = self.base.get_output_embeddings()
        head.register_forward_pre_hook(self._enter_loss)
        if stack.empties_cache:
            recorder.empty_cache()
        gc.collect()

    # -- load
    def _load(self) -> None:
        """Parameters in module order, quantized as they come; then buffers."""
        linears = decoder_linears(self.base) if self.config.quantization is not None else {}
        for name, parameter in list(self.base.named_parameters()):
            owner = name.removesuffix(".weight")
            if owner in linears and name.endswith(".weight"):
                self._quantize(owner, linears[owner])
            else:
                self.recorder.track(parameter, name)
        for name, buffer in self.base.named_buffers():
            self.recorder.track(buffer, name)
        if self.config.quantization is not None:
            self.base.is_loaded_in_4bit = True  # PEFT asks for these two
            self.base.quantization_method = "bitsandbytes"

    def _quantize(self, name: str, linear: nn.Linear) -> None:
        from foretune.runtime.trace.quantized import quantize_on_meta  # needs bitsandbytes

        settings = self.config.quantization
        assert settings is not None
        compute = DTYPES[settings.compute_dtype_for(self.config.precision)]
        parent, _, child = name.rpartition(".")
        setattr(self.base.get_submodule(parent), child, quantize_on_meta(linear, settings, compute, self.stack))

    # -- prepare
    def _prepare(self, facts: Facts) -> nn.Module:
        model = self.base
        lora = self.config.lora
        if lora is not None:
            self.recorder.component = "adapters"
            prefix = facts.shape.layer_prefix
            names = [f"{prefix}{i}.{projection.name}" for projection in facts.adapted for i in projection.layers]
            model = attach_adapters(self.base, lora, names)
        self.recorder.component = "activations"
        if self.config.gradient_checkpointing:
            enable_checkpointing(self.base)
        model.train()
        return model

    # -- updates
    def train(self) -> None:
        """Run the updates by the runtime's own loop."""
        settings, recorder = self.config.optimizer, self.recorder
        optimizer: Any
        if settings.name.endswith("8bit"):
            from foretune.runtime.trace.quantized import Traced8bitOptimizer  # needs bitsandbytes

            optimizer = Traced8bitOptimizer(settings, self.trained)
        else:
            optimizer = make_optimizer(settings, self.trained)
        for update in range(NUM_UPDATES):
            recorder.suffix = "" if update == 0 else " (later)"
            run_update(self.step, self._batches(optimizer), 1, optimizer, settings, self.trained)
        self.optimizer = optimizer

    def _batches(self, optimizer: Any) -> Iterator[Batch]:
        """Make each microstep's batch when it is asked for; afterwards the optimizer's phase begins."""
        recorder, batch = self.recorder, self.config.batch
        size = batch.micro_batch_size, batch.sequence_length
        for _ in range(min(batch.accumulation_steps, MAX_MICROSTEPS)):
            recorder.enter(f"forward{recorder.suffix}")
            recorder.component = "activations"
            yield (
                torch.empty(size, dtype=torch.long, device="meta"),
                torch.empty(size, dtype=torch.long, device="meta"),
            )
            for parameter in self.trained:
                if parameter.grad is not None:
                    recorder.count_as(parameter.grad, "gradients")
        recorder.enter(f"optimizer{recorder.suffix}")
        recorder.component = "optimizer states"

    def _enter_loss(self, *_: Any) -> None:
        if not self.recorder.in_backward:
            self.recorder.enter(f"loss{self.recorder.suffix}")
