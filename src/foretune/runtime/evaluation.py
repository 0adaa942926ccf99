"""Loss on rows that are not trained on, by the training step itself: only sums leave it, never logits."""

from foretune.runtime.feed import Feed, on_device
from foretune.runtime.live import Live, at_rest
from foretune.runtime.update import require_finite

__all__ = ["mean_loss"]


def mean_loss(live: Live, feed: Feed) -> tuple[float, int]:
    """Return the mean loss over all tokens that carry loss, and their number; the model trains on as before.

    Raises NonFiniteLossError.
    """
    total, count = 0.0, 0
    with at_rest(live.step):
        for rows in feed.evaluation_batches():
            host = feed.batch(rows)
            total += live.step(*on_device(host, live.device, feed.config.batch)).item()
            count += host.num_supervised
    return require_finite(total / count, "loss of an evaluation"), count
