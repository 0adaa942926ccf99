"""The one training step: from a batch to the sum of its token losses. `train`, `bench` and `trace` all run it.

It reads no tensor's value; what needs one (finite check, counts) is the loop's. Shape suffixes: B batch, S tokens.
"""

from typing import Any

from torch import Tensor, nn

from foretune.runtime.loss import HeadMap, chunked_loss_sum, probe_head_map, token_loss_sum

__all__ = ["TrainingStep"]


class TrainingStep(nn.Module):
    """Backbone, head and loss.

    `model` is what is called (PEFT's wrapper or the model itself), `base` the causal model inside it. With the stock
    loss the model's own forward gives the logits; with the chunked loss its backbone is run and the head applied to
    chunks of tokens, so that full logits never exist.
    """

    def __init__(self, model: nn.Module, base: nn.Module, *, is_chunked: bool) -> None:
        super().__init__()
        self.model, self.base, self.is_chunked = model, base, is_chunked
        self.head_map: HeadMap | None = probe_head_map(base) if is_chunked else None

    def forward(self, input_ids_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the summed loss of the batch, a scalar in fp32. `targets_BS` are shifted by one already.

        No attention mask is passed: rows are padded on the right, where a causal model never looks.
        """
        if self.head_map is None:
            return token_loss_sum(self.model(input_ids=input_ids_BS, use_cache=False).logits, targets_BS)
        backbone: Any = getattr(self.base, self.base.base_model_prefix)
        hidden_BSH = backbone(input_ids=input_ids_BS, use_cache=False).last_hidden_state
        return chunked_loss_sum(hidden_BSH, targets_BS, self.base.get_output_embeddings(), self.head_map)
