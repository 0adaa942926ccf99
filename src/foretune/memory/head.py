"""The head and the loss: from normed hidden states to one number."""

from collections.abc import Callable
from typing import Any

from foretune.memory.kernels import chunk_tokens
from foretune.memory.ops import add, contiguous, cross_entropy, linear, mul, scale, split_rows, tanh, to, view
from foretune.memory.tape import Tensor, checkpoint, current

__all__ = ["Backbone", "ChunkedHead", "StockHead", "TransformersHead"]

Backbone = Callable[[Tensor], tuple[Tensor, Any]]
"""From token ids to hidden states and the cache."""


class StockHead:
    """foretune's step with the stock loss: full logits of the model, then cross-entropy over shifted targets.

    The model's forward ends with the logits, so hidden states die there unless the head is trained.
    """

    num_items: Tensor | None = None
    """How many targets the update has, where the loop counts them: the model's loss is a sum divided by it."""
    scales_input = False
    """The class scales what enters the head (MiniCPM3)."""

    def __init__(
        self,
        backbone: Backbone,
        weight: Tensor,
        bias: Tensor | None,
        *,
        has_softcap: bool,
        is_scaled: bool = False,
        in_32bit: bool = False,
        prepared: Callable[[Tensor], Tensor] = lambda weight: weight,
    ) -> None:
        self.prepared = prepared
        self.backbone, self.weight, self.bias = backbone, weight, bias
        self.has_softcap, self.is_scaled, self.in_32bit = has_softcap, is_scaled, in_32bit

    def __call__(self, input_ids: Tensor, targets: Tensor, phase: str) -> dict[str, Any]:
        """Run the step's forward; `phase` is entered where the head begins."""
        logits = self.forward(input_ids, phase)
        with current().counted_as("logits and loss"):
            logits = to(logits, "f32")
            loss = cross_entropy(view(logits, -1, self.weight.shape[0]), view(targets, -1))
        return {"loss": loss}

    def forward(self, input_ids: Tensor, phase: str) -> Tensor:
        """The model's forward without labels."""
        outputs = self.backbone(input_ids)
        with current().counted_as("logits and loss"):
            hidden_states = outputs[0]
            if self.scales_input:
                hidden_states = scale(hidden_states)
            return self.model_logits(hidden_states, phase)

    def model_logits(self, hidden_states: Tensor, phase: str) -> Tensor:
        """As the model's forward makes them: some classes hand logits in fp32 back (models/mamba2, nemotron_h)."""
        if not self.in_32bit:
            current().enter(phase)
            return self.logits(hidden_states)
        return to(self._head(to(hidden_states, self.weight.dtype), phase), "f32")

    def _head(self, hidden_states: Tensor, phase: str) -> Tensor:
        current().enter(phase)
        return self.logits(hidden_states)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[..., V], scaled (models/granite/modeling_granite.py) or capped (models/gemma2) where the family does."""
        logits = self.product(hidden_states)
        if self.is_scaled:
            logits = scale(logits)
        if self.has_softcap:
            logits = scale(logits)
            logits = tanh(logits)
            logits = scale(logits)
        return logits

    def product(self, hidden_states: Tensor) -> Tensor:
        """The head itself."""
        return linear(hidden_states, self.prepared(self.weight), self.bias)


class TransformersHead(StockHead):
    """The model's own loss_function (transformers/loss/loss_utils.py): labels are shifted, logits handed back."""

    def __call__(self, input_ids: Tensor, targets: Tensor, phase: str) -> dict[str, Any]:
        """Run the model's forward with labels."""
        outputs = self.backbone(input_ids)
        with current().counted_as("logits and loss"):
            hidden_states = outputs[0]
            if self.scales_input:
                hidden_states = scale(hidden_states)
            logits = self.model_logits(hidden_states, phase)
            loss = self.loss(logits, targets)
        return {"loss": loss, "logits": logits, "cache": outputs[1]}

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """ForCausalLMLoss: labels are padded by one and shifted, which copies them at a batch of two and more."""
        logits = to(logits, "f32")
        labels = Tensor((labels.shape[0], labels.shape[1] + 1), "i64")
        shift_labels = contiguous(labels.view_as((labels.shape[0], labels.shape[1] - 1), labels.strides))
        logits = view(logits, -1, self.weight.shape[0])
        shift_labels = view(shift_labels, -1)
        loss = self._mean(logits, shift_labels)
        return loss  # noqa: RET504 - the local outlives the call's temporaries

    def _mean(self, source: Tensor, target: Tensor) -> Tensor:
        """fixed_cross_entropy."""
        loss = cross_entropy(source, target)
        if self.num_items is not None:
            loss = mul(loss, self.num_items)
        return loss


class ChunkedHead(StockHead):
    """Head and loss over a chunk of tokens at a time, recomputed in backward: full logits never exist."""

    def __call__(self, input_ids: Tensor, targets: Tensor, phase: str) -> dict[str, Any]:
        """Run the step's forward."""
        hidden_states = self.backbone(input_ids)[0]
        current().enter(phase)
        with current().counted_as("logits and loss"):
            hidden_states = view(hidden_states, -1, hidden_states.shape[-1])
            targets = view(targets, -1)
            total = Tensor((), "f32")
            rows = chunk_tokens(targets.shape[0])
            pieces = split_rows(hidden_states, rows), split_rows(targets, rows)
            for hidden, target in zip(*pieces, strict=True):
                total = add(total, checkpoint(self._chunk, hidden, target))
        return {"loss": total}

    def _chunk(self, hidden_states: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(hidden_states)
        return cross_entropy(to(logits, "f32"), targets)
