"""One fine-tune on the meta device: foretune's own loader, step and loop."""

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from foretune.contract import TrainingConfig
from foretune.errors import UnsupportedError
from foretune.memory.components import Facts
from foretune.memory.kernels import MAX_MICROSTEPS, NUM_UPDATES, reduction_workspaces
from foretune.memory.stack import StackProfile
from foretune.runtime.adapters import adapted_names, attach_adapters, freeze_towers
from foretune.runtime.checkpointing import enable_checkpointing
from foretune.runtime.load import DTYPES, build_model, decoder_linears, model_config
from foretune.runtime.optimizer import make_optimizer
from foretune.runtime.step import TrainingStep
from foretune.runtime.trace.fused import traced_liger_sum
from foretune.runtime.trace.recorder import Recorder
from foretune.runtime.update import Batch, run_update

__all__ = ["OwnRun"]


def _require_trained(count: int, facts: Facts) -> None:
    """Refuse a program that trains something else than what the answer says."""
    if count != facts.trainable_params:
        raise UnsupportedError(
            f"{facts.shape.id}: the program trains {count:,} parameters, and {facts.trainable_params:,} are counted; "
            "it is not traced yet.",
            hint="Parts beside the language model are such a case.",
            field="model.id",
        )


class OwnRun:
    """One fine-tune on the meta device."""

    def __init__(
        self,
        recorder: Recorder,
        config: TrainingConfig,
        facts: Facts,
        raw_config: Mapping[str, Any],
        stack: StackProfile,
    ) -> None:
        self.recorder, self.config, self.facts, self.stack = recorder, config, facts, stack
        self.code_map: Tensor | None = None
        self.is_evaluating = False
        self.base = self._build(raw_config)
        fused = self._liger_sum if config.loss == "liger" else None
        self.step = TrainingStep(self.base, self.base, is_chunked=config.loss == "chunked", fused_loss=fused)
        with torch.device("meta"), recorder:
            self._load()
            recorder.enter("prepare")
            self.model = self._prepare()
        self.step.model = self.model
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        _require_trained(sum(parameter.numel() for parameter in self.trained), facts)
        head = self.base.get_output_embeddings()
        head.register_forward_pre_hook(self._enter_loss)
        if stack.empties_cache:
            recorder.empty_cache()
        gc.collect()

    def _build(self, raw_config: Mapping[str, Any]) -> nn.Module:
        """flash-attn is not there without a GPU: its wrapper is a rule of the attention's stand-in."""
        is_flash = self.config.attention == "flash_attention_2"
        attention = "sdpa" if is_flash else self.config.attention
        made: Any = model_config(raw_config, attention=attention)
        if is_flash and getattr(made, "sliding_window", None):
            made.sliding_window = None  # a window is an argument of its kernel, not a mask
        return build_model(made, dtype=DTYPES[self.config.precision.dtype], device="meta", attention=attention)

    # -- load
    def _load(self) -> None:
        """Parameters in module order, quantized as they come; then buffers."""
        quantization = self.config.quantization
        linears = decoder_linears(self.base) if quantization is not None else {}
        for name, parameter in self._in_load_order():
            owner = name.removesuffix(".weight")
            if owner in linears and name.endswith(".weight"):
                self._quantize(owner, linears[owner])
            else:
                self.recorder.track(parameter, name)
        for name, buffer in self.base.named_buffers():
            self.recorder.track(buffer, name)
        if quantization is not None:
            bits = "8" if quantization.scheme == "int8" else "4"
            setattr(self.base, f"is_loaded_in_{bits}bit", True)  # PEFT asks for these two
            self.base.quantization_method = "bitsandbytes"

    def _in_load_order(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.base.named_parameters())

    def _quantize(self, name: str, linear: nn.Linear) -> None:
        from foretune.runtime.trace.int8 import quantize_int8_on_meta  # needs bitsandbytes
        from foretune.runtime.trace.quantized import quantize_on_meta

        settings = self.config.quantization
        assert settings is not None
        if settings.scheme == "int8":
            quantized: nn.Module = quantize_int8_on_meta(linear)
        else:
            compute = DTYPES[settings.compute_dtype_for(self.config.precision)]
            quantized = quantize_on_meta(linear, settings, compute, self.stack, self)
        parent, _, child = name.rpartition(".")
        setattr(self.base.get_submodule(parent), child, quantized)

    def mean_of_scales(self, count: int) -> None:
        """Nested quantization centres the scales on their mean."""
        sizes = reduction_workspaces(1, count, is_inner=True, device=self.stack.multiprocessors)
        self.recorder.temporaries(sizes, "mean of scales workspace")

    def keep_code_map(self) -> None:
        """The library keeps the map of nested scales on the device, once (functional.py, name2qmap)."""
        if self.code_map is None:
            self.code_map = torch.empty(256, dtype=torch.float32)

    # -- prepare
    def _prepare(self) -> nn.Module:
        model = self._adapted()
        self.recorder.component = "activations"
        if self.config.gradient_checkpointing:
            enable_checkpointing(self.base)
        model.train()
        return model

    def _adapted(self) -> nn.Module:
        """Attach the adapters, if there are any."""
        if self.config.lora is None:
            freeze_towers(self.base, self.facts.shape)
            return self.base
        self.recorder.component = "adapters"
        names = adapted_names(self.base, self.facts.shape, self.facts.adapted)
        dtypes = self.config.precision.adapter_dtype, self.config.precision.dtype
        dtype, base_dtype = (DTYPES[name] for name in dtypes)
        return attach_adapters(self.base, self.config.lora, names, dtype=dtype, base_dtype=base_dtype)

    # -- updates
    def train(self) -> None:
        """Run the updates by the runtime's own loop."""
        settings = self.config.optimizer
        self.optimizer = self._optimizer()
        for update in range(NUM_UPDATES):
            self.recorder.suffix = "" if update == 0 else " (later)"
            run_update(self.step, self._batches(), 1, self.optimizer, settings, self.trained)
        if self.config.evaluation.is_asked_for:
            self._evaluate()
        self.recorder.enter("save")  # weights go to the host one by one; the device allocates nothing

    def _evaluate(self) -> None:
        """One batch through the step without gradients, checkpointing or dropout."""
        self.recorder.enter("evaluation")
        self.recorder.component = "activations"
        self.is_evaluating = True
        self.step.eval()
        with torch.no_grad():
            ids, targets, positions = self._batch_of_rows()
            loss = self.step(ids, targets, positions)
            del ids, targets, positions, loss
        self.step.train()

    def _optimizer(self) -> Any:
        settings = self.config.optimizer
        if settings.name.endswith("8bit"):
            from foretune.runtime.trace.quantized import Traced8bitOptimizer  # needs bitsandbytes

            return Traced8bitOptimizer(settings, self.trained)
        return make_optimizer(settings, self.trained)

    def _batches(self) -> Iterator[Batch]:
        """Make each microstep's batch when it is asked for; afterwards the optimizer's phase begins."""
        for _ in range(self._num_microsteps()):
            self._begin_forward()
            yield self._batch_of_rows()
            self._count_gradients()
        self._begin_optimizer()

    def _num_microsteps(self) -> int:
        return min(self.config.batch.accumulation_steps, MAX_MICROSTEPS)

    def _batch_of_rows(self) -> Batch:
        """Token ids and targets, and positions where rows are packed."""
        return Batch(self._ids(), self._ids(), self._ids() if self.config.batch.packing else None)

    def _ids(self) -> Tensor:
        batch = self.config.batch
        return torch.empty((batch.micro_batch_size, batch.sequence_length), dtype=torch.long, device="meta")

    # -- phases
    def _begin_forward(self) -> None:
        self.recorder.enter(f"forward{self.recorder.suffix}")
        self.recorder.component = "activations"

    def _count_gradients(self) -> None:
        for parameter in self.trained:
            if parameter.grad is not None:
                self.recorder.count_as(parameter.grad, "gradients")

    def _begin_optimizer(self) -> None:
        self.recorder.enter(f"optimizer{self.recorder.suffix}")
        self.recorder.component = "optimizer states"

    def _liger_sum(self, *arguments: Any) -> Tensor:
        self._enter_loss()  # the head is not called
        return traced_liger_sum(*arguments)

    def _enter_loss(self, *_: Any) -> None:
        if not self.recorder.in_backward and not self.is_evaluating:
            self.recorder.enter(f"loss{self.recorder.suffix}")
