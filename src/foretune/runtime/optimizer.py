"""The optimizers of the contract, and clipping."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from foretune.contract import OptimizerSettings

__all__ = ["clip_gradients", "make_optimizer"]


def make_optimizer(
    settings: OptimizerSettings, parameters: Iterable[nn.Parameter], undecayed: Iterable[nn.Parameter] | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer that the settings name, over trained parameters in module order.

    `undecayed` are a second group, without weight decay.
    """
    trained: list[Any] = list(parameters)
    if undecayed is not None:
        trained = [{"params": trained}, {"params": list(undecayed), "weight_decay": 0.0}]
    kernel: dict[str, Any] = {"fused": True} if settings.kernel == "fused" else {"foreach": True}
    if settings.name == "sgd":
        return torch.optim.SGD(
            trained,
            lr=settings.learning_rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            **kernel,
        )
    shared: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.epsilon,
        "weight_decay": settings.weight_decay,
    }
    if settings.name == "adamw":
        return torch.optim.AdamW(trained, **shared, **kernel)
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    kind = PagedAdamW8bit if settings.name == "paged_adamw_8bit" else AdamW8bit
    return kind(trained, **shared)


def clip_gradients(settings: OptimizerSettings, parameters: Iterable[nn.Parameter]) -> float | None:
    """Clip the global norm of the gradients, if the settings ask for it. Returns the norm before that."""
    if settings.max_grad_norm is None:
        return None
    return nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm).item()
