"""Other people's training loops on the meta device, as a stack profile describes them: from_pretrained's loader,
k-bit preparation, the model's own loss, and how long the caller holds what.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foretune.memory.kernels import NUM_UPDATES
from foretune.runtime.checkpointing import enable_checkpointing
from foretune.runtime.load import DTYPES, decoder_linears
from foretune.runtime.optimizer import clip_gradients
from foretune.runtime.trace.autocast import Autocast
from foretune.runtime.trace.fused import fuse, liger_loss, triton_cross_entropy
from foretune.runtime.trace.rotary import angles_by_product
from foretune.runtime.trace.run import OwnRun

__all__ = ["CallersRun"]


class CallersRun(OwnRun):
    """One fine-tune by Transformers, PEFT and a caller's loop."""

    def _build(self, raw_config: Mapping[str, Any]) -> nn.Module:
        base = super()._build(raw_config)
        settings: Any = base.config
        settings.use_cache = self.stack.keeps_cache and not self.config.gradient_checkpointing
        dtype = DTYPES.get(self.stack.autocast)
        self.autocast = Autocast(dtype) if dtype is not None else None
        self.cached: list[Tensor] = []
        return base

    # -- load
    def _load(self) -> None:
        if self.stack.has_warmup_block and self._is_read_onto_device:
            self.recorder.temporaries([self._packed_bytes() // 2 * 2], "loader's warm-up")
        super()._load()

    def _in_load_order(self) -> list[tuple[str, nn.Parameter]]:
        named = super()._in_load_order()
        if self.stack.load_order == "natural" and self._is_read_onto_device:
            named.sort(key=lambda item: _natural(item[0]))
        return named

    @property
    def _is_read_onto_device(self) -> bool:
        return self.config.quantization is not None or self.stack.loads_onto_device

    def _packed_bytes(self) -> int:
        """caching_allocator_warmup (transformers/modeling_utils.py): parameters at their packed size, and buffers."""
        linears = decoder_linears(self.base) if self.config.quantization is not None else {}
        packed = {id(linear.weight) for linear in linears.values()}
        total = sum(buffer.numel() * buffer.element_size() for buffer in self.base.buffers())
        for parameter in self.base.parameters():
            is_packed = id(parameter) in packed
            total += self._packed(parameter.numel()) if is_packed else parameter.numel() * parameter.element_size()
        return total

    def _packed(self, count: int) -> int:
        is_8bit = self.config.quantization is not None and self.config.quantization.scheme == "int8"
        return count if is_8bit else count // 2

    # -- prepare
    def _prepare(self) -> nn.Module:
        if self.config.quantization is not None and self.stack.kbit_upcast != "none":
            self._prepare_kbit()
        model = self._adapted()
        if self.stack.casts_adapters and self.config.quantization is not None:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(torch.bfloat16)
        self.recorder.component = "activations"
        if self.config.gradient_checkpointing:
            self._checkpoint()
        model.train()
        self._set_rotary()
        self._set_loss()
        self.patches = fuse(self.base, self.stack, self.config, self.autocast)
        return model

    def _prepare_kbit(self) -> None:
        """prepare_model_for_kbit_training (peft/utils/other.py), and what TRL turns back after it."""
        for parameter in self.base.parameters():
            parameter.requires_grad_(False)
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.to(torch.float32)
        if self.stack.kbit_upcast == "norms":
            for module in (self.base.get_input_embeddings(), self.base.get_output_embeddings()):
                if module.weight.dtype == torch.float32:
                    module.to(DTYPES[self.config.precision.dtype])

    def _checkpoint(self) -> None:
        is_reentrant = self.stack.checkpoint_form == "reentrant"
        enable_checkpointing(self.base, is_reentrant=is_reentrant)
        if self.autocast is not None:
            function = partial(_checkpoint_under, self.autocast, is_reentrant)
            for module in self.base.modules():
                if hasattr(module, "_gradient_checkpointing_func"):
                    module._gradient_checkpointing_func = function
        if self.stack.embeddings_want_grad and self.config.lora is not None:
            self.base.enable_input_require_grads()
        if self.facts.shape.model_type in self.stack.caches_though_checkpointed:
            self._keep_cached()

    def _keep_cached(self) -> None:
        """A cache made of views keeps each attention's fused product until the outputs go."""

        def keep(_module: nn.Module, _inputs: Any, product: Tensor) -> None:
            if not self.recorder.in_backward:
                self.cached.append(product)

        for name, module in self.base.named_modules():
            if name.endswith("attn.c_attn"):
                module.register_forward_hook(keep)

    def _set_rotary(self) -> None:
        """Rotary tables are left out of autocast, and were made by a product before Transformers 5.24."""
        for module in self.base.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                if self.stack.rotary_by_product:
                    module.forward = angles_by_product(module.forward)
                if self.autocast is not None:
                    module.forward = self.autocast.left_out(module.forward)

    def _set_loss(self) -> None:
        """Put the loss of an older Transformers, or a kernel's, in the place of the model's."""
        if self.stack.loss == "transformers" and self.stack.loss_kernel in ("none", "trl"):
            return
        cross_entropy = triton_cross_entropy if self.stack.loss_kernel == "triton" else nn.functional.cross_entropy
        upcasts = self.facts.shape.model_type not in self.stack.losses_without_upcast
        self.base.loss_function = partial(_shifted_loss, cross_entropy, upcasts)
        if self.stack.loss == "transformers 4.45":
            self.base.get_output_embeddings().register_forward_hook(lambda _head, _inputs, logits: logits.float())

    # -- updates
    def train(self) -> None:
        """Run the updates as the caller's loop does."""
        with ExitStack() as stack:
            for entered in self.patches:
                stack.enter_context(entered)
            self._train()

    def _train(self) -> None:
        stack, recorder = self.stack, self.recorder
        optimizer = self.optimizer = self._optimizer()
        self.batch = self._batch() if stack.keeps_batch else None
        is_scaled = self.config.batch.accumulation_steps > 1 or stack.scales_every_loss
        holds = stack.holds_outputs
        outputs: Any = None
        loss: Any = None
        for update in range(NUM_UPDATES):
            recorder.suffix = "" if update == 0 else " (later)"
            if stack.zeroes_grads_first:
                optimizer.zero_grad(set_to_none=True)
            for _ in range(self._num_microsteps()):
                self._begin_forward()
                inputs: Any = self.batch or self._batch()
                if holds == "no":
                    loss = self._call(inputs)["loss"]
                else:
                    outputs = self._call(inputs)
                    loss = outputs["loss"]
                (loss / 1.0 if is_scaled else loss).backward()
                if holds == "no":
                    loss = inputs = None
                self._count_gradients()
            self._begin_optimizer()
            clip_gradients(self.config.optimizer, self.trained)
            optimizer.step()
            if holds == "through the update":
                outputs = loss = None
            if not stack.zeroes_grads_first:
                optimizer.zero_grad(set_to_none=True)
        self.held = outputs, loss

    def _batch(self) -> dict[str, Tensor]:
        """Token ids and labels, which are the ids themselves where one batch serves all, and a mask of ones."""
        ids = self._ids()
        if self.stack.keeps_batch:
            return {"input_ids": ids, "labels": ids}
        batch = {"input_ids": ids, "labels": self._ids()}
        return {**batch, "attention_mask": self._ids()} if self.stack.passes_mask else batch

    def _call(self, batch: dict[str, Tensor]) -> Any:
        """Run the caller's forward; Accelerate's wrapper hands its outputs on in fp32."""
        with self.autocast or nullcontext():
            if self.stack.loss_kernel == "liger":
                self.recorder.component = "activations"
                return {"loss": liger_loss(self.base, batch, partial(self._enter_loss, None))}
            outputs = self.model(**batch)
        self.cached.clear()
        if self.stack.converts_outputs and "logits" in outputs and outputs["logits"].dtype != torch.float32:
            outputs["logits"] = outputs["logits"].float()
        return outputs


def _checkpoint_under(autocast: Autocast, is_reentrant: bool, function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(autocast.carried(function), *args, use_reentrant=is_reentrant)


def _shifted_loss(
    cross_entropy: Callable[..., Tensor], upcasts: bool, logits: Tensor, labels: Tensor, vocab_size: int, **_: Any
) -> Tensor:
    """The loss up to Transformers 4.48: logits and labels lose a token, which copies them.

    Source: transformers/loss/loss_utils.py of 4.48. Learnt on: A100 runs of fms-hf-tuning.
    """
    if upcasts:
        logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    targets = labels[..., 1:].contiguous()
    return cross_entropy(shifted.view(-1, vocab_size), targets.view(-1))


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
