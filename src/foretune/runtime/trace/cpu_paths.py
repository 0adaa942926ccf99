"""Trace as a CPU would run: the answer for `device: cpu`, and the check of the recorder against torch's own profiler.

What the CPU's kernels allocate beside their results, in fp32 and on one thread. The rest (order, lifetimes, the
engine's sums) is the recorder's as for CUDA; the profiler sees a CPU's bytes exactly. Convolutions' workspaces are
left out.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import accumulate
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
import torch.optim.optimizer as optim
import torch.utils._foreach_utils as foreach_utils
from torch import Tensor

from foretune.contract import TrainingConfig
from foretune.memory.allocator import Program
from foretune.memory.figures import facts_of
from foretune.memory.host import assemble_on_host
from foretune.memory.stack import FORETUNE, StackProfile
from foretune.models import ModelShape
from foretune.runtime.trace.recorder import Recorder
from foretune.runtime.trace.rules import Arguments, Rule, whole_numbers
from foretune.runtime.trace.stand_ins import math_attention
from foretune.runtime.trace.trace import Trace, record_run

__all__ = ["CpuTrace", "cpu_paths", "trace_memory_on_cpu", "trace_on_cpu"]

aten = torch.ops.aten


class CpuTrace(NamedTuple):
    """What a CPU allocates, in requested bytes: its allocator does not round."""

    resident_bytes: int
    """Alive when the first update begins."""
    peak_bytes: int
    events: list[int]
    """Of the updates, in order: positive for a birth, negative for a death."""


def trace_on_cpu(
    config: TrainingConfig, shape: ModelShape, raw_config: Mapping[str, Any], stack: StackProfile = FORETUNE
) -> CpuTrace:
    """Trace what a fine-tune needs on a CPU with one thread."""
    recorder, program = _recorded(config, shape, raw_config, stack)
    begin = program.marks[program.phases.index("forward") - 1]
    events = [0 if slot < 0 else recorder.births[slot].num_bytes * (1 if size else -1) for slot, size in program.events]
    resident = sum(events[:begin])
    return CpuTrace(resident, resident + max(accumulate(events[begin:])), events[begin:])


def trace_memory_on_cpu(
    config: TrainingConfig, shape: ModelShape, raw_config: Mapping[str, Any], stack: StackProfile = FORETUNE
) -> Trace:
    """Trace what a fine-tune needs of a host's memory. Raises ConfigError and UnsupportedError as `trace_memory`."""
    recorder, program = _recorded(config, shape, raw_config, stack)
    names = {birth.name for birth in recorder.births}
    kernels = [word for word, mark in ATTENTION_MARKS.items() if any(mark in name for name in names)]
    estimate, position = assemble_on_host(
        program, facts_of(config, shape), stack, checkpoint_dtype=_checkpoint_dtype(raw_config), kernels_run=kernels
    )
    return Trace(estimate, program, recorder.births, position)


def _recorded(
    config: TrainingConfig, shape: ModelShape, raw_config: Mapping[str, Any], stack: StackProfile
) -> tuple["_CpuRecorder", Program]:
    recorder = _CpuRecorder(stack.with_(cublas_bytes=0, cublaslt_bytes=0), shape.vocab_size)
    return recorder, record_run(recorder, cpu_paths(recorder), config, shape, raw_config)


def _checkpoint_dtype(raw_config: Mapping[str, Any]) -> str | None:
    """Return what a config.json says of its weights; None where it says nothing."""
    for part in (raw_config, raw_config.get("text_config") or {}):
        found = part.get("dtype") or part.get("torch_dtype")
        if isinstance(found, str):
            return found.removeprefix("torch.")
    return None


@contextmanager
def cpu_paths(recorder: Recorder) -> Iterator[None]:
    """Run what is inside as a CPU would."""
    get_rng_state, fork_rng = torch.get_rng_state, torch.random.fork_rng

    def tracked_rng_state() -> Tensor:
        """Checkpointing keeps the generator's state for each layer; it comes by no operator."""
        state = get_rng_state()
        recorder.track(state, "random state")
        return state

    def forked_rng(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """Backward keeps one more while it recomputes; torch leaves that out for the meta device."""
        return fork_rng(*args, **{**kwargs, "device_type": "cpu"})

    with ExitStack() as patches:
        patches.enter_context(patch.object(torch, "get_rng_state", tracked_rng_state))
        patches.enter_context(patch.object(torch.random, "fork_rng", forked_rng))
        patches.enter_context(patch.object(F, "scaled_dot_product_attention", _attention))
        for module in (foreach_utils, optim):
            name = "_get_fused_kernels_supported_devices"
            devices = [*getattr(module, name)(), "meta"]
            patches.enter_context(patch.object(module, name, lambda devices=devices: devices))
        yield


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention of torch on a CPU (aten/src/ATen/native/transformers/sdp_utils_cpp.cpp)."""
    if torch.is_autocast_enabled("cuda"):  # the stand-in of autocast sets it, whatever is traced
        dtype = torch.get_autocast_dtype("cuda")
        value, key, query = value.to(dtype), key.to(dtype), query.to(dtype)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = _additive(attn_mask, query.dtype)
    is_flash = (
        dropout_p == 0.0
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and all(t.stride(-1) == 1 for t in (query, key, value))
        and (enable_gqa or query.shape[1] == key.shape[1])
    )
    if is_flash:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    return math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, _additive)


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """convert_boolean_attn_mask: where(mask, 0, -inf), whose numbers are no tensors of the device."""
    return torch.zeros_like(allowed, dtype=dtype)


def _flash_block(num_queries: int, num_keys: int) -> tuple[int, int]:
    queries = 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32
    return min(queries, num_queries), min(512, num_keys)


def _flash_forward(args: Arguments, _: StackProfile) -> list[int]:
    """Scores, maxima, sums and output of one block of queries (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)."""
    rows, columns = _flash_block(args[0].shape[2], args[1].shape[2])
    return [4 * rows * (columns + 2 + args[0].shape[3])]


def _flash_backward(args: Arguments, _: StackProfile) -> list[int]:
    """The incoming gradient made contiguous, two blocks of scores, one sum for each query."""
    grad = args[0]
    rows, columns = _flash_block(args[1].shape[2], args[2].shape[2])
    copy = 0 if grad.transpose(1, 2).is_contiguous() else 4 * grad.numel()
    return [copy, 4 * 2 * rows * columns, 4 * rows]


def _layer_norm_backward(args: Arguments, _: StackProfile) -> list[int]:
    """Partial sums of both parameters' gradients for one thread (aten/src/ATen/native/cpu/layer_norm_kernel.cpp)."""
    return [2 * math.prod(args[2]) * 4] if any(args[7][1:]) else []


def _sort(args: Arguments, _: StackProfile) -> list[int]:
    """Positions of a whole-number sort (aten/src/ATen/native/cpu/SortingKernel.cpp)."""
    return [] if args[0].dtype.is_floating_point else [args[0].numel() * 8]


AFTER: dict[Any, Rule] = {
    aten.cumsum.default: whole_numbers,
    aten.sum.default: whole_numbers,
    aten.sort.default: _sort,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}
"""Temporaries that a kernel allocates after its results."""

BEFORE: dict[Any, Rule] = {}

ATTENTION_MARKS = {"flash": "flash_attention_for_cpu", "math": "isneginf"}
"""Attention kernels, and the operators by which each is known."""


class _CpuRecorder(Recorder):
    """Records what a CPU's kernels allocate."""

    devices = frozenset({"meta", "cpu"})
    before, after = BEFORE, AFTER

    def empty_cache(self) -> None:
        """A CPU has none."""

    def program(self, num_events: int) -> Program:
        """Return what was recorded in the bytes that were asked for: a CPU's allocator does not round."""
        rounded = super().program(num_events)
        events = [(slot, self.births[slot].num_bytes if size else 0) for slot, size in rounded.events]
        return rounded._replace(events=events)

    def _safe_softmax(self, args: tuple[Any, ...]) -> Tensor:
        """As torch 2.13 runs it: rows without any score are zeroed in place."""
        with self:
            x = args[0]
            out = aten._softmax(x, args[1], False)
            masked = torch.isneginf(x)
            rows = masked.all(args[1], keepdim=True)
            del rows, masked
            return out
