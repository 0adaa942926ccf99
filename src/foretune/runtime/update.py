"""One optimizer update: microsteps accumulated by the token-weighted sum of the whole update."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from foretune.contract import OptimizerSettings
from foretune.runtime.loss import IGNORED
from foretune.runtime.optimizer import clip_gradients
from foretune.runtime.step import TrainingStep

__all__ = ["Batch", "count_targets", "run_update"]

Batch = tuple[Tensor, Tensor]
"""Token ids and shifted targets, both [B, S] int64."""


def count_targets(batches: Iterable[Batch]) -> int:
    """Count the tokens that carry loss."""
    return sum(int((targets_BS != IGNORED).sum()) for _, targets_BS in batches)


def run_update(
    step: TrainingStep,
    batches: Iterable[Batch],
    num_targets: int,
    optimizer: torch.optim.Optimizer,
    settings: OptimizerSettings,
    trained: list[nn.Parameter],
) -> list[float]:
    """Run the microsteps of one update and apply it. Returns each microstep's share of the mean loss.

    Every microstep's summed loss is divided by the tokens of the whole update, so that accumulation equals the
    large batch whatever the rows are.
    """
    losses = []
    for input_ids_BS, targets_BS in batches:
        loss = step(input_ids_BS, targets_BS)
        (loss / num_targets).backward()
        losses.append(loss.item() / num_targets)
        del loss, input_ids_BS, targets_BS
    clip_gradients(settings, trained)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return losses
