"""The one training step: from a batch to the sum of its token losses. `train`, `bench` and `trace` all run it.

It reads no tensor's value; what needs one (finite check, counts) is the loop's. Shape suffixes: B batch, S tokens.
"""

from typing import Any

from torch import Tensor, nn

from foretune.errors import UnsupportedError
from foretune.runtime.loss import FusedLoss, HeadMap, chunked_loss_sum, probe_head_map, token_loss_sum

__all__ = ["TrainingStep"]


class TrainingStep(nn.Module):
    """Backbone, head and loss.

    `model` is what is called (PEFT's wrapper or the model itself), `base` the causal model inside it. With the stock
    loss the model's own forward gives the logits; with the chunked loss its backbone is run and the head applied to
    chunks of tokens, so that full logits never exist. `fused_loss` computes head and loss by a kernel
    (`liger_loss_sum`); it is refused for a model that changes its logits. Raises UnsupportedError.
    """

    def __init__(
        self, model: nn.Module, base: nn.Module, *, is_chunked: bool, fused_loss: FusedLoss | None = None
    ) -> None:
        super().__init__()
        self.model, self.base, self.is_chunked, self.fused_loss = model, base, is_chunked, fused_loss
        self.head_map: HeadMap | None = probe_head_map(base) if is_chunked or fused_loss is not None else None
        if fused_loss is not None and self.head_map is not None and self.head_map.name != "identity":
            raise UnsupportedError(
                f"{type(base).__name__} changes its logits after the head ({self.head_map.name}), which a fused loss "
                "does not.",
                hint="Set loss: chunked.",
                field="loss",
            )

    def forward(self, input_ids_BS: Tensor, targets_BS: Tensor, position_ids_BS: Tensor | None = None) -> Tensor:
        """Return the summed loss of the batch, a scalar in fp32. `targets_BS` are shifted by one already.

        No attention mask is passed: rows are padded on the right, where a causal model never looks. Packed rows come
        with positions that begin at 0 for each example; Transformers keeps examples apart by them only where there is
        neither a mask nor a cache (masking_utils.py, find_packed_sequence_indices).
        """
        positions = {} if position_ids_BS is None else {"position_ids": position_ids_BS}
        if self.head_map is None:
            return token_loss_sum(self.model(input_ids=input_ids_BS, use_cache=False, **positions).logits, targets_BS)
        backbone: Any = getattr(self.base, self.base.base_model_prefix)
        hidden_BSH = backbone(input_ids=input_ids_BS, use_cache=False, **positions).last_hidden_state
        head: Any = self.base.get_output_embeddings()
        if self.fused_loss is not None:
            hidden_TH = hidden_BSH.view(-1, hidden_BSH.shape[-1])
            return self.fused_loss(hidden_TH, head.weight, targets_BS.view(-1), getattr(head, "bias", None))
        return chunked_loss_sum(hidden_BSH, targets_BS, head, self.head_map)
