"""One optimizer update: microsteps accumulated by the token-weighted sum of the whole update."""

import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from foretune.contract import OptimizerSettings
from foretune.errors import NonFiniteLossError
from foretune.runtime.optimizer import clip_gradients
from foretune.runtime.step import TrainingStep

__all__ = ["Batch", "Update", "require_finite", "run_update"]


class Batch(NamedTuple):
    """A micro batch on the device."""

    input_ids_BS: Tensor
    targets_BS: Tensor
    """Shifted by one: what each place is to predict, IGNORED where it carries no loss."""
    position_ids_BS: Tensor | None = None
    """Given for packed rows: from 0 for each example."""


class Update(NamedTuple):
    """What an update gave."""

    losses: list[float]
    """Each microstep's share of the mean loss; their sum is the mean over all tokens that carry loss."""
    gradient_norm: float | None
    """Before clipping; None: nothing is clipped, so it was not computed."""
    was_skipped: bool = False
    """The loss scale was too large for fp16 and was halved; no weight moved."""


def _unwatched(_: str) -> None:
    """Nobody asks which phase it is."""


def run_update(
    step: TrainingStep,
    batches: Iterable[Batch],
    num_targets: int,
    optimizer: torch.optim.Optimizer,
    settings: OptimizerSettings,
    trained: list[nn.Parameter],
    *,
    scaler: torch.amp.GradScaler | None = None,
    enter: Callable[[Literal["backward", "optimizer"]], None] = _unwatched,
) -> Update:
    """Run the microsteps of one update and apply it.

    Every microstep's summed loss is divided by the tokens of the whole update, so that accumulation equals the
    large batch whatever the rows are. `scaler` is for fp16, whose small gradients vanish without it. `enter` is told
    when backward and the optimizer begin. Raises NonFiniteLossError before any weight is changed.
    """
    losses = []
    for input_ids_BS, targets_BS, position_ids_BS in batches:
        loss = step(input_ids_BS, targets_BS, position_ids_BS)
        enter("backward")
        scaled = loss / num_targets
        (scaled if scaler is None else scaler.scale(scaled)).backward()
        del scaled
        losses.append(require_finite(loss.item() / num_targets, "loss"))
        del loss, input_ids_BS, targets_BS, position_ids_BS
    enter("optimizer")
    if scaler is not None:
        return _scaled_update(losses, scaler, optimizer, settings, trained)
    norm = clip_gradients(settings, trained)
    if norm is not None:
        require_finite(norm, "norm of the gradients")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Update(losses, norm)


def _scaled_update(
    losses: list[float],
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    settings: OptimizerSettings,
    trained: list[nn.Parameter],
) -> Update:
    """Apply scaled gradients; where one overflowed, the scaler skips the update and halves its scale."""
    scaler.unscale_(optimizer)
    norm = clip_gradients(settings, trained)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    was_skipped = scaler.get_scale() < before
    if not was_skipped and norm is not None:
        require_finite(norm, "norm of the gradients")
    return Update(losses, None if was_skipped else norm, was_skipped)


def require_finite(value: float, what: str) -> float:
    """Return a finite number. Raises NonFiniteLossError."""
    if math.isfinite(value):
        return value
    raise NonFiniteLossError(
        f"The {what} is {value}, which teaches nothing.",
        hint="Lower optimizer.learning_rate, or look at the rows of this update; no weight was changed by it.",
    )
