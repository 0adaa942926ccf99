"""torch.autocast for CUDA, on tensors without data: the meta device has none of its own.

Follows aten/src/ATen/autocast_mode.{h,cpp}: which functions run in the lower precision and which in fp32, and that a
trained leaf's cast is kept until the outermost block ends.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

__all__ = ["Autocast"]

_LOWER: frozenset[Any] = frozenset(
    {
        F.linear,
        F.conv1d,
        torch.matmul,
        torch.bmm,
        torch.mm,
        torch.addmm,
        torch.baddbmm,
        torch.conv1d,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        Tensor.bmm,
        Tensor.mm,
        F.scaled_dot_product_attention,
    }
)
"""Products run in the lower precision."""

_FP32: frozenset[Any] = frozenset(
    {
        F.layer_norm,
        F.cross_entropy,
        F.nll_loss,
        torch.layer_norm,
        torch.pow,
        torch.rsqrt,
        torch.exp,
        torch.cumsum,
        torch.sum,
        Tensor.pow,
        Tensor.__pow__,
        Tensor.rsqrt,
        Tensor.exp,
        Tensor.cumsum,
        Tensor.sum,
    }
)
"""What needs range runs in fp32."""

_SOFTMAX: frozenset[Any] = frozenset({torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax})
"""In fp32 as well, unless a dtype is given."""


class Autocast:
    """A block that can be entered again, as `with torch.autocast("cuda", dtype)` can be made again."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.depth = dtype, 0
        self._modes: list[_Mode] = []
        self.casts: dict[int, tuple[Tensor, Tensor]] = {}
        """By the leaf's identity: itself, so that no other gets its identity, and the cast."""
        self.is_suspended = False
        self._before: tuple[bool, torch.dtype] = False, dtype

    def __enter__(self) -> Self:
        if not self.depth:
            self._before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", self.dtype)
            self._modes.append(_Mode(self))
            self._modes[-1].__enter__()
        self.depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.depth -= 1
        if not self.depth:
            self._modes.pop().__exit__(kind, error, trace)
            torch.set_autocast_enabled("cuda", self._before[0])
            torch.set_autocast_dtype("cuda", self._before[1])
            self.casts.clear()

    def carried(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs under autocast whenever it is called, if it is on now.

        Checkpointing does so: the recompute runs in backward, outside the caller's block.
        """
        if not self.depth:
            return function

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return run

    def left_out(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function inside which nothing is cast: `with torch.autocast(..., enabled=False)`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.is_suspended = self.is_suspended, True
            try:
                return function(*args, **kwargs)
            finally:
                self.is_suspended = before

        return run

    def lowered(self, value: Any) -> Any:
        """Cast an argument to the lower precision (cached_cast)."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == self.dtype:
            return value
        if value.dtype != torch.float32 or not (value.is_leaf and value.requires_grad) or value._is_view():
            return value.to(self.dtype)
        if id(value) not in self.casts:
            self.casts[id(value)] = value, value.to(self.dtype)
        return self.casts[id(value)][1]


class _Mode(TorchFunctionMode):
    def __init__(self, owner: Autocast) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.owner.is_suspended:
            return func(*args, **kwargs)
        if func in _LOWER:
            # a C++ call casts its last argument first (checked on torch's own autocast for the CPU)
            kwargs = tree_map(self.owner.lowered, kwargs)
            args = tuple([tree_map(self.owner.lowered, argument) for argument in args[::-1]][::-1])
        elif func in _FP32 or (func in _SOFTMAX and kwargs.get("dtype") is None):
            args, kwargs = tree_map(_widened, (args, kwargs))
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value
