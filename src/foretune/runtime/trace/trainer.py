"""Transformers' Trainer on the meta device, and TRL's SFTTrainer, which is one: what its loop makes and holds.

Follows transformers/trainer.py of 5.24 (get_batch_samples, training_step, create_optimizer), accelerate 1.15 and
trl/trainer/sft_trainer.py of 1.16.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.trainer_pt_utils import get_parameter_names

from foretune.memory.kernels import NUM_UPDATES
from foretune.runtime.optimizer import clip_gradients, make_optimizer
from foretune.runtime.trace.callers import CallersRun
from foretune.runtime.trace.trl_head import add_fused_head

__all__ = ["TrainerRun"]

_WITHOUT_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Names of parameters without weight decay (Trainer.get_decay_parameter_names)."""


class TrainerRun(CallersRun):
    """One fine-tune by Trainer."""

    def _prepare(self) -> nn.Module:
        parameters = inspect.signature(self.base.forward).parameters.values()
        self.takes_count = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        self.shifts_labels = LOSS_MAPPING.get(getattr(self.base, "loss_type", None)) is ForCausalLMLoss
        if self.stack.loss_kernel == "trl":
            add_fused_head(self.base, self.recorder, has_triton=self.stack.has_triton, begin=self._enter_loss)
        return super()._prepare()

    def _optimizer(self) -> Any:
        """Two groups, with weight decay and without; bitsandbytes' embeddings keep 32-bit states.

        Source: transformers/trainer.py (create_optimizer). Learnt on: Trainer on a CPU.
        """
        if not self.stack.splits_decay:
            return super()._optimizer()
        decayed = set(get_parameter_names(self.model, [nn.LayerNorm], _WITHOUT_DECAY))
        named = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        groups = [[p for name, p in named if (name in decayed) is has_decay] for has_decay in (True, False)]
        settings = self.config.optimizer
        if settings.name.endswith("8bit"):
            from foretune.runtime.trace.quantized import Traced8bitOptimizer  # needs bitsandbytes

            wide = [module.weight for module in self.base.modules() if isinstance(module, nn.Embedding)]
            return Traced8bitOptimizer(settings, groups[0] + groups[1], wide if self.stack.embeddings_in_32bit else [])
        return make_optimizer(settings, groups[0], groups[1])

    # -- updates
    def _train(self) -> None:
        recorder, model = self.recorder, self.model
        optimizer = self.optimizer = self._optimizer()
        total = torch.zeros((), device="meta")
        batches: list[dict[str, Tensor]] = []
        for update in range(NUM_UPDATES):
            recorder.suffix = "" if update == 0 else " (later)"
            self._begin_forward()
            batches, count = self._collect()
            for inputs in batches[: self._num_microsteps()]:
                self._begin_forward()
                reported = self._step(inputs, count)
                torch.isnan(reported), torch.isinf(reported)
                total += reported
                self._count_gradients()
            self._begin_optimizer()
            clip_gradients(self.config.optimizer, model.parameters())
            optimizer.step()
            model.zero_grad(set_to_none=True)
        self.held = batches, inputs, count, reported, total

    def _collect(self) -> tuple[list[dict[str, Tensor]], Tensor | None]:
        """All batches of an update, also those whose microsteps repeat another's, and their number of targets.

        Source: transformers/trainer.py (get_batch_samples). Learnt on: Trainer on a CPU.
        """
        batches = [self._batch() for _ in range(self.config.batch.accumulation_steps)]
        if not self.takes_count:
            return batches, None
        labels = [batch["labels"][..., 1:] if self.shifts_labels else batch["labels"] for batch in batches]
        count: Any = sum(of_batch.ne(-100).sum() for of_batch in labels)
        return batches, count / 1

    def _step(self, batch: dict[str, Tensor], count: Tensor | None) -> Tensor:
        """training_step: the batch's dictionary is made anew, the loss divided twice by Python's numbers."""
        loss = self._tiled_loss(batch, count) if self.stack.loss_kernel == "trl" else self._model_loss(batch, count)
        if count is None:
            loss = loss / self.config.batch.accumulation_steps
        (loss / 1).backward()
        return loss.detach()

    def _model_loss(self, batch: dict[str, Tensor], count: Tensor | None) -> Tensor:
        """Trainer.compute_loss: the outputs die when it returns."""
        inputs: Any = batch if count is None else {**batch, "num_items_in_batch": count}
        loss: Tensor = self._call(inputs)["loss"]
        if count is not None:
            loss *= 1
        return loss

    def _tiled_loss(self, batch: dict[str, Tensor], count: Tensor | None) -> Tensor:
        """The loss of each token, then entropy and accuracy for the log.

        Source: trl/trainer/sft_trainer.py (compute_loss). Learnt on: SFTTrainer on a CPU.
        """
        inputs: Any = {**batch, "use_cache": False, "fused_lm_head": True}
        outputs = self._call(inputs)
        del inputs
        of_tokens = -outputs["log_probs"]
        num_tokens = outputs["label_mask"].sum() if count is None else count
        loss = of_tokens.sum() / num_tokens.clamp(min=1)
        if count is not None:
            loss = loss * 1
        if "aux_loss" in outputs:
            loss = loss + 1.0 * outputs["aux_loss"] / self.config.batch.accumulation_steps
        num_valid = outputs["label_mask"].sum()
        entropy = outputs["entropy"].detach().sum()
        num_correct = outputs["is_top1"].sum()
        ratios = entropy / num_valid, num_correct / num_valid
        del ratios
        if "attention_mask" in batch:
            batch["attention_mask"].sum()
        return loss
