"""The loop around the step: foretune's own, a plain one around the model, and Transformers' Trainer.

What a loop's own variables hold decides what outlives a step.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

from foretune.contract import TrainingConfig
from foretune.memory import ops
from foretune.memory.autocast import Autocast
from foretune.memory.decoder import RunOptions
from foretune.memory.families.litgpt_head import LitGptHead
from foretune.memory.head import StockHead
from foretune.memory.kernels import MAX_MICROSTEPS
from foretune.memory.optimizers import Optimizer, Parameters, clip_gradients, make_optimizer
from foretune.memory.stack import StackProfile
from foretune.memory.tape import Tensor, backward, current, drop_graph
from foretune.memory.tiles import finished_loss

__all__ = ["AUTOCAST_DTYPES", "Loop", "Prepared", "TrainerLoop", "TrlLoop", "emitted_microsteps"]

AUTOCAST_DTYPES = {"bf16": "bf16", "fp16": "f16"}


class Batch:
    """A batch on the device. Slots die in alphabetical order, as the entries of the loops' dictionaries do."""

    __slots__ = ("ids", "labels", "mask", "positions")

    def __init__(
        self, ids: Tensor, labels: Tensor, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> None:
        self.ids, self.labels, self.mask, self.positions = ids, labels, mask, positions


class Prepared(NamedTuple):
    """A model that is ready to be trained."""

    head: StockHead | LitGptHead
    options: RunOptions
    trainable: Parameters
    undecayed: frozenset[int]
    """Norms and biases, by identity."""
    embeddings: frozenset[int]
    num_standing_for: Mapping[int, int]
    is_deep: bool
    """CPython defers the death of so many nested nodes."""
    shifts_labels: bool
    """Trainer counts targets as the class's loss has them."""
    products: list[Tensor]
    """What a class keeps of a forward until its outputs go."""


def emitted_microsteps(config: TrainingConfig) -> int:
    """Return how many microsteps of an update are emitted."""
    return min(config.batch.accumulation_steps, MAX_MICROSTEPS)


class Loop:
    """foretune's own loop, and a plain one around the model."""

    def __init__(self, config: TrainingConfig, stack: StackProfile, prepared: Prepared) -> None:
        self.config, self.stack, self.prepared, self.tape = config, stack, prepared, current()
        self.autocast = Autocast(AUTOCAST_DTYPES[stack.autocast]) if stack.autocast != "none" else None
        self.kept: list[Any] = []

    def train(self, num_updates: int) -> None:
        """Run the updates."""
        config, stack, tape, options = self.config, self.stack, self.tape, self.prepared.options
        optimizer = self.optimizer()
        is_scaled = config.batch.accumulation_steps > 1 or stack.scales_every_loss
        batch = self.batch() if stack.keeps_batch else None
        outputs: dict[str, Any] | None = None
        loss: Tensor | None = None
        for update in range(num_updates):
            suffix = "" if update == 0 else " (later)"
            if stack.zeroes_grads_first:
                optimizer.zero_grad()
            for _ in range(emitted_microsteps(config)):
                tape.enter(f"forward{suffix}")
                inputs = batch or self.batch()
                options.padding, options.positions = inputs.mask, inputs.positions
                outputs = self.call(inputs, f"loss{suffix}")
                loss, outputs = self._take_loss(loss, outputs)
                tape.enter(f"backward{suffix}")
                backward(ops.scale(loss) if is_scaled else loss)
                options.padding = options.positions = None
                if stack.holds_outputs == "no":
                    drop_graph(loss.edge)
                    loss = None
                    del inputs
            tape.enter(f"optimizer{suffix}")
            self.clip()
            optimizer.step()
            if stack.holds_outputs == "through the update":
                loss, outputs = self._end_update(loss, outputs)
            if not stack.zeroes_grads_first:
                optimizer.zero_grad()
        self.kept += [outputs, loss, optimizer, batch]
        if config.evaluation.is_asked_for and stack.loss == "own":
            self._evaluate()
        tape.enter("save")

    # -- what the loops share
    def optimizer(self) -> Optimizer:
        """Return the optimizer, in groups where the stack has them."""
        stack, prepared = self.stack, self.prepared
        return make_optimizer(
            self.config.optimizer,
            prepared.trainable,
            undecayed=prepared.undecayed if stack.splits_decay else None,
            in_32bit=prepared.embeddings if stack.embeddings_in_32bit else frozenset(),
            pages_adamw=stack.loss == "litgpt" and self.config.quantization is not None,
        )

    def clip(self) -> None:
        """Clip the gradients' norm where the settings ask for it."""
        if self.config.optimizer.max_grad_norm is not None:
            clip_gradients(self.prepared.trainable, self.prepared.num_standing_for)

    def batch(self) -> Batch:
        """Token ids and targets on the device, a mask where the loop passes one, positions where rows are packed."""
        size = self.config.batch.micro_batch_size, self.config.batch.sequence_length
        ids = Tensor(size, "i64")
        if self.stack.keeps_batch:
            return Batch(ids, ids)
        labels = Tensor(size, "i64")
        mask = Tensor(size, "i64") if self.stack.passes_mask else None
        return Batch(ids, labels, mask, Tensor(size, "i64") if self.config.batch.packing else None)

    def call(self, inputs: Batch, phase: str) -> dict[str, Any]:
        """Run the caller's forward; Accelerate's wrapper hands its outputs on in fp32."""
        with self.autocast or nullcontext():
            outputs = self.prepared.head(inputs.ids, inputs.labels, phase)
        self._forget_products()
        if self.stack.converts_outputs and "logits" in outputs and outputs["logits"].dtype != "f32":
            with self.tape.counted_as("logits and loss"):
                outputs["logits"] = ops.to(outputs["logits"], "f32")
        return outputs

    def _forget_products(self) -> None:
        products = self.prepared.products
        while products:
            self.tape.segment("products", len(products) - 1)
            products.pop()
            if not products:
                self.tape.segment("products end")

    def _evaluate(self) -> None:
        """One batch forward without gradients, checkpointing or dropout."""
        tape, options = self.tape, self.prepared.options
        tape.enter("evaluation")
        before = tape.is_grad_enabled, tape.is_training, options.is_checkpointed
        tape.is_grad_enabled = tape.is_training = options.is_checkpointed = False
        inputs = self.batch()
        options.positions = inputs.positions
        outputs = self.prepared.head(inputs.ids, inputs.labels, "evaluation")
        options.positions = None
        del inputs
        del outputs
        tape.is_grad_enabled, tape.is_training, options.is_checkpointed = before

    def _take_loss(self, old: Tensor | None, outputs: dict[str, Any]) -> tuple[Tensor, Any]:
        """loss = outputs.loss: the old loss and its graph go; so do the outputs, unless the loop holds them."""
        graph = old.edge if old is not None else None
        if not self.prepared.is_deep:
            drop_graph(graph)
        old = None
        loss = outputs["loss"]
        if self.prepared.is_deep:
            drop_graph(graph)
        return loss, None if self.stack.holds_outputs == "no" else outputs

    def _end_update(self, loss: Tensor | None, outputs: dict[str, Any] | None) -> tuple[None, None]:
        """The function that made the update returns, and its locals die."""
        if outputs is not None:
            outputs.clear()
        if loss is not None:
            drop_graph(loss.edge)
        return None, None


class TrainerLoop(Loop):
    """Trainer's: all batches of an update first, a loss divided by the count of their targets, and its running sum.

    transformers/trainer.py (get_batch_samples, training_step, _inner_training_loop).
    """

    def train(self, num_updates: int) -> None:
        """Run the updates."""
        tape, optimizer = self.tape, self.optimizer()
        total = Tensor((), "f32")
        batches: list[Batch] = []
        for update in range(num_updates):
            suffix = "" if update == 0 else " (later)"
            tape.enter(f"forward{suffix}")
            batches, count = self._collect()
            for inputs in batches[: emitted_microsteps(self.config)]:
                tape.enter(f"forward{suffix}")
                reported = self._step(inputs, count, suffix)
                _is_finite(reported)
            tape.enter(f"optimizer{suffix}")
            self.clip()
            optimizer.step()
            optimizer.zero_grad()
        self.kept += [batches, inputs, count, reported, total, optimizer]
        tape.enter("save")

    def _collect(self) -> tuple[list[Batch], Tensor]:
        """All batches of an update, also those whose microsteps repeat another's, and their number of targets."""
        batches = [self.batch() for _ in range(self.config.batch.accumulation_steps)]
        for batch in batches:
            item = _number_of_targets(batch.labels, is_shifted=self.prepared.shifts_labels)
            count = Tensor((), "i64")  # Python's sum begins with 0
            del item
        count = _divided(count)
        return batches, count

    def _step(self, batch: Batch, count: Tensor, suffix: str) -> Tensor:
        """training_step: the loss is divided by Python's numbers."""
        self.prepared.options.padding = batch.mask
        loss = self.loss(batch, count, f"loss{suffix}")
        self.tape.enter(f"backward{suffix}")
        backward(ops.scale(loss))
        self.prepared.options.padding = None
        reported = loss.detach()
        drop_graph(loss.edge)
        return reported

    def loss(self, batch: Batch, count: Tensor, phase: str) -> Tensor:
        """compute_loss: the outputs die when it returns."""
        self.prepared.head.num_items = count
        outputs = self.call(batch, phase)
        self.prepared.head.num_items = None
        loss: Tensor = outputs["loss"]
        return ops.scale_in_place(loss)


class TrlLoop(TrainerLoop):
    """TRL's SFTTrainer, which is a Trainer with a loss of its own in tiles."""

    def loss(self, batch: Batch, count: Tensor, phase: str) -> Tensor:
        """The loss of each token, and what is logged."""
        outputs = self.call(batch, phase)
        with self.tape.counted_as("logits and loss"):
            return finished_loss(outputs, count, batch.mask)


def _number_of_targets(labels: Tensor, *, is_shifted: bool) -> Tensor:
    """labels.ne(-100).sum()."""
    of_batch = ops.narrow(labels, -1, labels.shape[-1] - 1) if is_shifted else labels
    return ops.count_all(Tensor(of_batch.shape, "bool"))


def _divided(count: Tensor) -> Tensor:
    return Tensor((), "f32")


def _is_finite(reported: Tensor) -> None:
    """Whether the loss is to be reported: isnan and isinf."""
    answers = [Tensor((), "bool"), Tensor((), "bool")]
    while answers:
        answers.pop()
