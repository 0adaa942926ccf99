"""Rotary angles as Transformers made them before 5.24: by a matrix product instead of a multiplication."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["angles_by_product"]

_MULTIPLICATIONS = frozenset({torch.mul, Tensor.mul, Tensor.__mul__})


def angles_by_product(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a rotary embedding's forward: positions times frequencies become one product, and the positions stay."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _ByProduct():
            return forward(*args, **kwargs)

    return run


class _ByProduct(TorchFunctionMode):
    """Runs [B, S, 1] * [W] as [1, W, 1] @ [B, 1, S]; both live as long as the angles do."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _MULTIPLICATIONS and isinstance(args[1], Tensor) and _is_outer(args[0], args[1]):
            positions, frequencies = args
            expanded = frequencies[None, :, None].expand(positions.shape[0], -1, 1)
            angles: Any = (expanded @ positions.transpose(1, 2)).transpose(1, 2)
            angles.positions = positions
            return angles
        return func(*args, **(kwargs or {}))


def _is_outer(a: Tensor, b: Tensor) -> bool:
    return a.dim() == 3 and a.shape[-1] == 1 and b.dim() == 1
