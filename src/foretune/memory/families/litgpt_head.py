"""litgpt's heads and its loss (finetune/lora.py, finetune/full.py, utils.py: chunked_cross_entropy).

Fabric hands outputs on as fp32 copies. The loop's `logits` live until the next forward has made its own, and with them
the graph and all that it holds: bitsandbytes' 4-bit product keeps its input there.
"""

from typing import Any

from foretune.memory.blocks import Module, call
from foretune.memory.families.litgpt_ops import cross_entropies, flat, mean_of
from foretune.memory.head import Backbone
from foretune.memory.layout import numel
from foretune.memory.ops import narrow, reshape, scale, split_rows, tanh, to
from foretune.memory.scans import split
from foretune.memory.tape import Tensor, current, drop_graph

__all__ = ["LitGptHead"]

CHUNK_TOKENS = 128
"""lm_head_chunk_size, and chunk_size of the loss."""


class LitGptHead:
    """With adapters: the head in chunks of 128 tokens, all of which are kept, and a loss for each. Without: full
    logits, the loss in chunks of 128 rows."""

    num_items: Tensor | None = None
    """No loop of litgpt's counts targets."""

    def __init__(self, backbone: Backbone, lm_head: Module, *, is_chunked: bool, has_softcap: bool) -> None:
        self.backbone, self.lm_head, self.is_chunked = backbone, lm_head, is_chunked
        self.has_softcap = has_softcap
        self.logits: list[Tensor] = []
        self.last: Tensor | None = None

    def __call__(self, input_ids: Tensor, targets: Tensor, phase: str) -> dict[str, Any]:
        """Run the step's forward; `phase` is entered where the head begins."""
        logits = self._logits(input_ids, phase)
        self._forget()
        self.logits = logits
        with current().counted_as("logits and loss"):
            loss = self._chunked(logits, targets) if self.is_chunked else self._whole(logits, targets)
        self.last = loss
        return {"loss": loss}

    def _logits(self, input_ids: Tensor, phase: str) -> list[Tensor]:
        outputs = call(self._forward, input_ids, phase)
        with current().counted_as("logits and loss"):
            return [to(output, "f32") for output in outputs]

    def _forward(self, input_ids: Tensor, phase: str) -> list[Tensor]:
        x = self.backbone(input_ids)[0]
        current().enter(phase)
        with current().counted_as("logits and loss"):
            if self.is_chunked:
                length = x.shape[1]
                sizes = [min(CHUNK_TOKENS, length - start) for start in range(0, length, CHUNK_TOKENS)]
                return [call(self.lm_head, x_i) for x_i in split(x, sizes, 1)]
            x = call(self.lm_head, x)
            if self.has_softcap:
                x = scale(tanh(scale(x)))
            return [x]

    def _forget(self) -> None:
        """`logits` is bound anew: the old ones go, and the graph of their step."""
        while self.logits:
            self.logits.pop()
        if self.last is not None:
            drop_graph(self.last.edge)
            self.last.edge = None
            self.last = None

    @staticmethod
    def _chunked(logits: list[Tensor], targets: Tensor) -> Tensor:
        logits[-1] = narrow(logits[-1], 1, logits[-1].shape[1] - 1)
        targets = targets.view_as((targets.shape[0], targets.shape[1] - 1), targets.strides)
        logit_chunks = [flat(chunk) for chunk in logits]
        columns = [chunk.shape[1] for chunk in logits]
        target_chunks = [reshape(chunk, (numel(chunk.shape),)) for chunk in split(targets, columns, 1)]
        losses = [cross_entropies(chunk, target) for chunk, target in zip(logit_chunks, target_chunks, strict=True)]
        return mean_of(losses, targets)

    @staticmethod
    def _whole(outputs: list[Tensor], targets: Tensor) -> Tensor:
        logits = narrow(outputs[0], 1, outputs[0].shape[1] - 1)
        targets = targets.view_as((targets.shape[0], targets.shape[1] - 1), targets.strides)
        logits = flat(logits)
        targets = reshape(targets, (numel(targets.shape),))
        logit_chunks, target_chunks = split_rows(logits, CHUNK_TOKENS), split_rows(targets, CHUNK_TOKENS)
        losses = [cross_entropies(chunk, target) for chunk, target in zip(logit_chunks, target_chunks, strict=True)]
        return mean_of(losses, targets)
