"""Activation checkpointing: torch's non-reentrant form around each layer, switched on by us."""

import warnings
from typing import Any

from torch import nn

from foretune.errors import UnsupportedError

__all__ = ["enable_checkpointing"]


def enable_checkpointing(model: nn.Module, *, is_reentrant: bool = False) -> None:
    """Recompute each layer in backward. Our own runs are never reentrant; other people's loops are.

    Transformers also makes the embeddings' output want gradients; the non-reentrant form does not need that, and a
    leaf there would keep its gradient from step to step, so it is switched off again.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UnsupportedError(
            f"{type(model).__name__} has no gradient checkpointing.", hint="Set gradient_checkpointing: false."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Transformers 5.24 renamed it
        enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": is_reentrant})
        model.disable_input_require_grads()
