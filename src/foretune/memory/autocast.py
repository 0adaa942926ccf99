"""torch.autocast on the tape: a block inside which products run in a lower precision.

Follows aten/src/ATen/autocast_mode.{h,cpp}, as runtime/trace/autocast.py does; which operations are cast stands where
they are (`ops.lowered`, `ops.widened`).
"""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from foretune.memory.tape import Tensor, current

__all__ = ["Autocast"]


class Autocast:
    """A block that can be entered again: by a caller's forward, and by each recomputation in backward."""

    __slots__ = ("casts", "depth", "dtype")

    def __init__(self, dtype: str) -> None:
        self.dtype, self.depth = dtype, 0
        self.casts: dict[int, tuple[int | None, Tensor, Tensor]] = {}
        """By the leaf's identity: its layer, itself, so that no other gets its identity, and the cast."""

    def __enter__(self) -> Self:
        self.depth += 1
        current().autocast = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.depth -= 1
        if not self.depth:
            current().autocast = None
            self._forget()

    def kept(self, leaf: Tensor, cast: Callable[[Tensor, str], Tensor]) -> Tensor:
        """Cast a trained fp32 leaf once; the cast is kept until the outermost block ends."""
        found = self.casts.get(id(leaf))
        if found is None:
            found = self.casts[id(leaf)] = current().segments[-1].layer, leaf, cast(leaf, self.dtype)
        return found[2]

    def _forget(self) -> None:
        """Let go of the casts, each in the part of its layer."""
        tape, is_apart = current(), False
        for key in list(self.casts):
            layer = self.casts[key][0]
            if layer != tape.segments[-1].layer:
                tape.segment("casts", layer)
                is_apart = True
            del self.casts[key]
        if is_apart:
            tape.segment("casts end")
