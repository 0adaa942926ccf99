"""Record every storage's birth and death in program order while a program runs on the meta device.

A dispatch mode sees each operator's results; a weak reference on the storage tells of its death. What CUDA does and
the meta device does not is added by the rules of `rules.py`.
"""

import math
import sys
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foretune.errors import UnsupportedError
from foretune.memory.allocator import EMPTY_CACHE, Program, round_size
from foretune.memory.stack import StackProfile
from foretune.runtime.trace.rules import (
    BIRTHS,
    BLAS,
    IN_PLACE_IN_BACKWARD,
    IN_PLACE_SUMS,
    ON_META,
    WORKSPACES_AFTER,
    WORKSPACES_BEFORE,
    Rule,
    is_bias_product,
)

__all__ = ["MAX_EVENTS", "Birth", "Recorder"]

aten = torch.ops.aten
MAX_EVENTS = 500_000
DEVICE = "meta"
WRAPPERS = frozenset({"_fn", "inner"})
"""Python functions that torch puts around a mode's own."""
ENGINE = "_engine_run_backward"
"""The Python function that waits for the engine (torch/autograd/graph.py): a sum that any other asks for is no sum of
the engine's (the backward of Bloom's gelu is Python)."""

# Under a dispatch mode the operands of a sum in the engine's buffer have these use counts when nobody else holds them:
# of the tensor, four (buffer, argument, wrapper, our own) and of its storage, two. Learnt on torch 2.13, checked
# against the tape's reference counts on 280 configurations.
SOLE_TENSOR, SOLE_STORAGE = 4, 2


class Birth(NamedTuple):
    """What was allocated, for a person to read."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    phase: str
    num_bytes: int


class Recorder(TorchDispatchMode):
    """Events of one run. Use as a context manager around everything that allocates."""

    devices = frozenset({DEVICE})
    """Whose storages are followed."""
    before, after = WORKSPACES_BEFORE, WORKSPACES_AFTER
    """What kernels allocate beside their results."""

    def __init__(self, stack: StackProfile, vocab_size: int) -> None:
        super().__init__()
        self.stack, self.vocab_size = stack, vocab_size
        self.events: list[tuple[int, int]] = []
        self.births: list[Birth] = []
        self.components: list[str] = []
        self.marks: list[int] = []
        self.phases: list[str] = ["load"]
        self.component = "weights"
        self.suffix = ""
        """Of the phase: ` (later)` after the first update."""
        self.in_backward = False
        self.slots: dict[int, tuple[Any, int]] = {}
        self.workspaces: set[tuple[str, bool]] = set()
        self.truth = True
        """What a truth value is if it is read: there is no padding, and rows are not packed."""

    # -- what happens
    def enter(self, phase: str) -> None:
        """Begin a phase."""
        if phase != self.phases[-1]:
            self.marks.append(len(self.events))
            self.phases.append(phase)

    def allocate(self, num_bytes: int, name: str, shape: Sequence[int] = (), dtype: str = "") -> int:
        """Record a birth; returns its slot."""
        slot = len(self.births)
        self.births.append(Birth(name, tuple(shape), dtype, self.phases[-1], num_bytes))
        self.components.append(self._component_of(name, shape))
        self.events.append((slot, round_size(num_bytes)))
        if len(self.events) > MAX_EVENTS:
            raise UnsupportedError(
                f"The program has more than {MAX_EVENTS:,} events: a loop over tokens that a GPU does not run so.",
                hint="Use a shorter sequence, or a model whose kernels are known.",
            )
        return slot

    def free(self, slot: int) -> None:
        """Record a death."""
        self.events.append((slot, 0))

    def temporaries(self, sizes: Sequence[int], name: str) -> None:
        """Record workspaces of one kernel: born in order, dead in reverse, as C++'s locals are."""
        for slot in reversed([self.allocate(size, name) for size in sizes if size]):
            self.free(slot)

    def empty_cache(self) -> None:
        """Record torch.cuda.empty_cache()."""
        self.events.append(EMPTY_CACHE)

    def track(self, tensor: Tensor, name: str) -> None:
        """Follow a tensor's storage from now to its death."""
        if tensor.device.type not in self.devices:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.slots or not storage.nbytes():
            return
        slot = self.allocate(storage.nbytes(), name, tensor.shape, str(tensor.dtype).removeprefix("torch."))

        def died(_: Any, key: int = key, slot: int = slot) -> None:
            self.slots.pop(key, None)
            self.free(slot)

        self.slots[key] = (weakref.ref(storage, died), slot)

    def count_as(self, tensor: Tensor, component: str) -> None:
        """Count a living tensor under another component."""
        found = self.slots.get(tensor.untyped_storage()._cdata)
        if found is not None:
            self.components[found[1]] = component

    def _component_of(self, name: str, shape: Sequence[int]) -> str:
        if name.endswith("workspace"):
            return "workspaces"
        is_logits = self.phases[-1].startswith("loss") or self.vocab_size in shape
        return "logits and loss" if is_logits and self.component == "activations" else self.component

    def program(self, num_events: int) -> Program:
        """Return what was recorded up to an event, ready for the replay."""
        kept = [mark for mark in self.marks if mark <= num_events]
        return Program(self.events[:num_events], self.components, tuple(kept), tuple(self.phases[: len(kept) + 1]))

    # -- the mode
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten._local_scalar_dense.default and args[0].device.type == DEVICE:
            return self._answer(args[0])
        if self._sums_in_place(func, args):
            return IN_PLACE_SUMS[func](*args)
        if func in IN_PLACE_IN_BACKWARD and self.in_backward and not torch.is_grad_enabled() and _is_on_device(args):
            return IN_PLACE_IN_BACKWARD[func](*args)
        if func is aten._safe_softmax.default:
            return self._safe_softmax(args)
        if func is aten.logsumexp.default:
            return self._logsumexp(*args)
        if func is aten._fused_sgd_.default:
            return None  # in place, and without an implementation on meta
        for argument in args:
            if isinstance(argument, Tensor) and argument.dim() == 0:  # torch.tensor(number) is not dispatched on meta
                self.track(argument, "torch.tensor")
        held = [self.allocate(n, f"{func} workspace") for n in self._sizes(self.before, func, args)]
        out = ON_META.get(func, func)(*args, **(kwargs or {}))
        results = tree_leaves(out)
        if func in BIRTHS:
            results = [out[position] for position in BIRTHS[func]]
        for result in results:
            if isinstance(result, Tensor):
                self.track(result, str(func))
        self.library_workspaces(func, args)
        self.temporaries(self._sizes(self.after, func, args), f"{func} workspace")
        for slot in held:
            self.free(slot)
        return out

    def _answer(self, tensor: Tensor) -> Any:
        """What a value would be if it were read; every loss is one."""
        if tensor.dtype is torch.bool:
            return self.truth
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _sizes(self, table: dict[Any, Rule], func: Any, args: tuple[Any, ...]) -> list[int]:
        rule = table.get(func)
        return rule(args, self.stack) if rule is not None and _is_on_device(args) else []

    def library_workspaces(self, func: Any, args: tuple[Any, ...]) -> None:
        """Record what cuBLAS and cublasLt keep, at the first product of a thread."""
        if func not in BLAS or not _is_on_device(args):
            return
        wanted = [("cublas", self.stack.cublas_bytes)]
        if is_bias_product(func, args):
            wanted.insert(0, ("cublaslt", self.stack.cublaslt_bytes))
        for library, num_bytes in wanted:
            if num_bytes and (library, self.in_backward) not in self.workspaces:
                self.workspaces.add((library, self.in_backward))
                self.allocate(num_bytes, f"{library} workspace")

    def _sums_in_place(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Say whether the engine would add a gradient in place, which it never does under a dispatch mode."""
        if func not in IN_PLACE_SUMS or not self.in_backward or torch.is_grad_enabled() or not self.stack.sums_in_place:
            return False
        a, b = args[0], args[1]
        return (
            isinstance(b, Tensor)
            and a.dim() > 0
            and a.shape == b.shape
            and a.dtype == b.dtype
            and a.device.type == DEVICE
            and a._use_count() <= SOLE_TENSOR
            and torch._C._storage_Use_Count(a.untyped_storage()._cdata) <= SOLE_STORAGE
            and _is_asked_by_engine()
        )

    def _logsumexp(self, x: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
        """What the operator does inside (aten/src/ATen/native/ReduceOps.cpp, logsumexp_out_impl)."""
        with self:
            maxima = torch.amax(x, dims, keepdim=True)
            squeezed = maxima if keepdim else torch.squeeze(maxima, dims)
            magnitudes = squeezed.abs()
            are_infinite = magnitudes == math.inf
            squeezed.masked_fill_(are_infinite, 0)
            del are_infinite, magnitudes
            below = (x - maxima).exp_()
            result = torch.sum(below, dims, keepdim=keepdim)
            del below
            return result.log_().add_(squeezed)

    def _safe_softmax(self, args: tuple[Any, ...]) -> Tensor:
        """Softmax; then which scores are -inf, in which rows all are, and a zero that is put there in place."""
        x = args[0]
        with self:
            out = aten._softmax(x, args[1], False)
        self.temporaries([x.numel(), x.numel() // x.shape[-1], x.element_size()], "aten._safe_softmax workspace")
        return out


def _is_asked_by_engine() -> bool:
    """Say whether the operator comes from the engine itself and not from Python, by the frames above the mode's."""
    frame = sys._getframe(3)
    while frame.f_code.co_name in WRAPPERS and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name == ENGINE


def _is_on_device(args: tuple[Any, ...]) -> bool:
    first = args[0]
    if isinstance(first, (list, tuple)):
        first = first[0] if first else None
    return isinstance(first, Tensor) and first.device.type == DEVICE
