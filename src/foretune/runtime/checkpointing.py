"""Activation checkpointing: torch's non-reentrant form around each layer, switched on by us."""

import warnings

from torch import nn

from foretune.errors import UnsupportedError

__all__ = ["enable_checkpointing"]


def enable_checkpointing(model: nn.Module) -> None:
    """Recompute each layer in backward.

    Transformers also makes the embeddings' output want gradients; the non-reentrant form does not need that, and a
    leaf there would keep its gradient from step to step, so it is switched off again.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UnsupportedError(
            f"{type(model).__name__} has no gradient checkpointing.", hint="Set gradient_checkpointing: false."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.disable_input_require_grads()
