"""A run on a CPU: from a program's tensors to what its process needs of the host's memory.

There is no caching allocator and no context. What counts is how far the process grows after imports, from before
loading to its peak: the sum of three terms, none of them fitted.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from foretune.devices import DeviceSpec
from foretune.memory.allocator import Program
from foretune.memory.answer import ByteRange, Fit, HostNeed, MemoryEstimate, PhaseMemory, Verdict
from foretune.memory.components import COMPONENT_ORDER, Facts, components_at, describe_components
from foretune.memory.figures import answered_for
from foretune.memory.heap import HostReplay, replay_on_host
from foretune.memory.kernels import MAX_MICROSTEPS
from foretune.memory.overhead import host_need
from foretune.memory.stack import StackProfile
from foretune.units import MIB, format_bytes

__all__ = ["FIRST_USE_BYTES", "assemble_on_host", "assess_host_fit", "growth_bytes"]

LIBRARIES_BYTES = 24 * MIB
"""Pages of torch's code that a step touches for the first time, and modules that are imported while a model is loaded.
Measured on models of two layers whose tensors are smaller than 1 MiB: 21 to 27 MiB in four settings."""
PRODUCTS_BYTES = 5_522_080 + 1_786_528 + 1_049_248
"""Buffers that MKL keeps for products of one thread once they were large (mkl_blas_sgemm_getbufs): read off its calls
of malloc. Other processors may run other kernels."""
FIRST_USE_BYTES = LIBRARIES_BYTES + PRODUCTS_BYTES

TENSORS_PERCENT = 1.0
"""Tensors lay within 0.003 % of torch's own profiler in 41 configurations."""
GROWTH_PERCENT = 15.0
"""Twice the furthest that the growth of a process was off, in 25 runs of four updates; a longer one was 12.7 % off."""
SEEN_TOKENS, SEEN_PARAMS = 1024, 166_000_000
"""The most of a batch and of a model in these runs; beyond them the interval is twice as wide."""
WIDER = 2
GROWTH_BASIS = (
    "25 processes of our own (49M to 166M parameters, four updates) grew by 5.5 % less to 7.6 % more than predicted, "
    f"one of twenty updates by 12.7 % more; {GROWTH_PERCENT:g} % is taken"
)
NO_CONTEXT = "none: a CPU has no context; libraries that a step loads are in the growth"
WORKSPACES = "What kernels allocate beside their results while they run: blocks of scores, copies, sums of one thread."


def growth_bytes(program: Program, *, converts: bool) -> tuple[int, tuple[int, ...]]:
    """Return the peak of a process' growth and that of each phase.

    Formula: F + W + H(t), and while loading W_file more where weights are converted. F: what first use adds (pages of
    code, late imports, MKL's buffers); W: the base's weights; H: what the other tensors make the heap and its mappings
    hold (heap.py). Weights in the checkpoint's own format are mapped from the file: a page counts once, before training
    copies it (copy on write) as after. Others are read into memory of their own, and of the file's mapping all pages
    may be resident until it is closed.
    Source: safetensors' mmap; /proc/self/status (VmHWM). Leaves out: pages of a table of embeddings that no token
    reads, a second thread's buffers, transparent huge pages, allocators other than glibc's.
    """
    weights = frozenset(
        slot for slot, size in program.events[: program.marks[0]] if size > 0 and program.components[slot] == "weights"
    )
    weights_bytes = sum(size for slot, size in program.events[: program.marks[0]] if slot in weights)
    heap: HostReplay = replay_on_host(program.events, program.marks, left_out=weights)
    resident = FIRST_USE_BYTES + weights_bytes
    phases = [resident + peak for peak in heap.phase_peaks]
    if converts:
        phases[0] += weights_bytes // 2
    return max(phases), tuple(phases)


def assemble_on_host(
    program: Program, facts: Facts, stack: StackProfile, *, checkpoint_dtype: str | None, kernels_run: Sequence[str]
) -> tuple[MemoryEstimate, int]:
    """Put the answer for a CPU together, from a program in the bytes asked for; with the position of its peak.

    `checkpoint_dtype` is config.json's; None where it has none.
    """
    config, shape = facts.config, facts.shape
    position, tensors, tensor_peaks = _peaks(program)
    growth, growth_peaks = growth_bytes(program, converts=checkpoint_dtype != "float32")
    allocated = _around(tensors, TENSORS_PERCENT, "tensors lay within 0.003 % of torch's profiler in 41 configurations")
    reserved = _growth_interval(growth, facts)
    disk = host_need(config, shape, facts.trainable_params)
    phases = _by_phase(program.phases, tensor_peaks, growth_peaks)
    estimate = MemoryEstimate(
        kind="traced",
        **answered_for(facts, stack),
        attention_kernel="eager" if config.attention == "eager" else f"sdpa: {' and '.join(kernels_run)}",
        requested_bytes=tensors,
        allocated_bytes=tensors,
        reserved_bytes=growth,
        allocated_interval=allocated,
        reserved_interval=reserved,
        process_interval=reserved,
        context=ByteRange(low_bytes=0, likely_bytes=0, high_bytes=0, basis=NO_CONTEXT),
        process_bytes=growth,
        safety_margin_bytes=reserved.high_bytes - growth,
        safety_margin_basis=reserved.basis,
        need_bytes=reserved.high_bytes,
        peak_phase=program.phases[sum(mark <= position for mark in program.marks)],
        components=tuple(
            part.with_(formula=WORKSPACES, inputs=(), source="aten/src/ATen/native/cpu")
            if part.name == "workspaces"
            else part
            for part in describe_components(components_at(program, position, tensors), facts)
            if part.name != COMPONENT_ORDER[-1]
        ),
        phases=phases,
        host=_host(disk, phases),
        assumptions=_assumptions(facts, checkpoint_dtype),
    )
    return estimate, position


def assess_host_fit(estimate: MemoryEstimate, host: DeviceSpec) -> Fit:
    """Hold an answer for a CPU against a host's memory: what is free now, where that is known.

    fits: the upper end of the growth's interval is within it. tight: the lower end is. does not fit: neither. Swap
    does not count.
    """
    budget = host.free_bytes if host.free_bytes is not None else host.total_bytes
    least, most = estimate.process_interval.low_bytes, estimate.need_bytes
    verdict: Verdict = "fits" if most <= budget else "tight" if least <= budget else "does not fit"
    largest = estimate.largest_component
    share = f"The largest part is {largest.name}, {format_bytes(largest.num_bytes)}."
    because = {
        "fits": f"The process grows by up to {format_bytes(most)}, and {format_bytes(budget)} are there.",
        "tight": f"It may run: at the lower end of its interval it grows by {format_bytes(least)}. To be sure, "
        f"{format_bytes(max(most - budget, 0))} more must be free.",
        "does not fit": f"The process grows by at least {format_bytes(least)}, and {format_bytes(budget)} are there.",
    }[verdict]
    return Fit(
        verdict=verdict,
        device=host,
        budget_bytes=budget,
        budget_is="free now" if host.free_bytes is not None else "total",
        headroom_bytes=budget - most,
        because=f"{because} {share}",
    )


def _peaks(program: Program) -> tuple[int, int, tuple[int, ...]]:
    """Return position and height of the peak of all tensors, and the peak of each phase."""
    sizes: dict[int, int] = {}
    changes = []
    for slot, size in program.events:
        changes.append(size if size else -sizes[slot])
        if size:
            sizes[slot] = size
    totals = list(accumulate(changes))
    position = max(range(len(totals)), key=totals.__getitem__)
    borders = (0, *program.marks, len(totals))
    peaks = tuple(max(totals[max(start - 1, 0) : max(stop, start, 1)]) for start, stop in pairwise(borders))
    return position, totals[position], peaks


def _by_phase(names: tuple[str, ...], tensors: tuple[int, ...], growths: tuple[int, ...]) -> tuple[PhaseMemory, ...]:
    """Peaks of each phase: the microsteps of an update are put together."""
    peaks: dict[str, tuple[int, int]] = {}
    for name, allocated, reserved in zip(names, tensors, growths, strict=True):
        before = peaks.get(name, (0, 0))
        peaks[name] = max(before[0], allocated), max(before[1], reserved)
    return tuple(
        PhaseMemory(phase=name, allocated_bytes=allocated, reserved_bytes=reserved)
        for name, (allocated, reserved) in peaks.items()
    )


def _host(disk: HostNeed, phases: tuple[PhaseMemory, ...]) -> HostNeed:
    """Host memory is what the answer is about: the process' growth when it loads and when it saves."""
    return disk.with_(ram_load_bytes=phases[0].reserved_bytes, ram_save_bytes=phases[-1].reserved_bytes)


def _growth_interval(growth: int, facts: Facts) -> ByteRange:
    """Return where a process' growth lies: twice as wide beyond what was run."""
    if facts.tokens <= SEEN_TOKENS and facts.shape.total_params <= SEEN_PARAMS:
        return _around(growth, GROWTH_PERCENT, GROWTH_BASIS)
    basis = f"{GROWTH_BASIS}; twice that for more than {SEEN_TOKENS:,} tokens or {SEEN_PARAMS / 1e6:.0f}M parameters"
    return _around(growth, WIDER * GROWTH_PERCENT, basis)


def _around(num_bytes: int, percent: float, basis: str) -> ByteRange:
    pad = int(num_bytes * percent / 100)
    return ByteRange(low_bytes=num_bytes - pad, likely_bytes=num_bytes, high_bytes=num_bytes + pad, basis=basis)


def _assumptions(facts: Facts, checkpoint_dtype: str | None) -> tuple[str, ...]:
    """State in words what the figures rest on."""
    batch = facts.config.batch
    if checkpoint_dtype == "float32":
        read = "in float32 by config.json: mapped from the file, and copied page by page where they are trained"
    else:
        known = "taken to be in 16 bits" if checkpoint_dtype is None else f"in {checkpoint_dtype} by config.json"
        read = f"{known}: converted while they are read, when the file's own pages count too"
    texts = [
        f"Every row has {batch.sequence_length:,} tokens, padded where it is shorter.",
        f"The checkpoint is one of safetensors, its weights {read}.",
        "One thread (OMP_NUM_THREADS=1) on Linux with glibc's malloc; more threads have buffers of their own.",
        "Host memory is what the process grows by; the interpreter and its libraries have about 0.4 GiB before.",
    ]
    if batch.accumulation_steps > MAX_MICROSTEPS:
        texts.append(f"Of {batch.accumulation_steps:,} microsteps three are run; the others repeat the second.")
    return tuple(texts)
