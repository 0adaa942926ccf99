"""Loss on rows that are not trained on, by the training step itself: only sums leave it, never logits."""

import torch

from foretune.runtime.feed import Feed, on_device
from foretune.runtime.live import Live
from foretune.runtime.update import require_finite

__all__ = ["mean_loss"]


def mean_loss(live: Live, feed: Feed) -> tuple[float, int]:
    """Return the mean loss over all tokens that carry loss, and their number; the model trains on as before.

    Raises NonFiniteLossError.
    """
    modes = {module: module.training for module in live.step.modules()}
    live.step.eval()
    total, count = 0.0, 0
    try:
        with torch.no_grad():
            for rows in feed.evaluation_batches():
                host = feed.batch(rows)
                total += live.step(*on_device(host, live.device, feed.config.batch)).item()
                count += host.num_supervised
    finally:
        for module, mode in modes.items():
            module.training = mode
    return require_finite(total / count, "loss of an evaluation"), count
