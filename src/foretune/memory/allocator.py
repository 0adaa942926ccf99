"""A model of PyTorch's CUDA caching allocator: replay a program's allocations and frees, read both peaks.

Source of the rules: c10/cuda/CUDACachingAllocator.cpp (torch 2.13). One stream, one device.

A program is a list of (slot, size): size > 0 allocates `size` bytes (already rounded by `round_size`) under `slot`,
size 0 frees the slot, size < 0 empties the cache. Marks cut it into phases.

Rules. Requests are rounded up to 512 B. Up to 1 MiB come from the small pool, in segments of 2 MiB; larger ones from
the large pool, in segments of 20 MiB below 10 MiB and of the size rounded up to 2 MiB above. The smallest free block
that is large enough is taken, the lowest address among equals; `cudaMalloc` hands out descending addresses, so that is
the newest segment. The rest of a block is split off if it is 512 B or more (small pool) or above 1 MiB (large pool).
A freed block merges with free neighbours. If the device cannot give a segment, wholly free segments are returned to it
and it is asked again; then the program is out of memory.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, NamedTuple

from foretune.units import MIB

__all__ = ["EMPTY_CACHE", "Events", "OutOfMemory", "PhasePeak", "Program", "Replay", "replay", "round_size"]

SMALL_LIMIT = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_SEGMENT_LIMIT = 10 * MIB
SEGMENT_ROUNDING = 2 * MIB
OVERSIZE_ROUNDING = 20 * MIB
MIN_BLOCK = 512

EMPTY_CACHE = (-1, -1)
# A free block's key is size << 88 | address: one integer that sorts by size, then by address.
_TOP_ADDRESS = 1 << 87
_NO_LIMIT = 1 << 62
_SEGMENT_SPACING = 1 << 62  # more than any segment: addresses of two segments never meet

Events = list[tuple[int, int]]


class Program(NamedTuple):
    """Events ready for the replay, what each storage counts as, and where phases begin."""

    events: Events
    components: list[str]
    marks: tuple[int, ...]
    phases: tuple[str, ...]
    """Names of the stretches between marks; one more than marks."""


class PhasePeak(NamedTuple):
    """What one phase reached. Bytes."""

    allocated_peak: int
    reserved_peak: int
    allocated_end: int
    reserved_end: int


class OutOfMemory(NamedTuple):
    """Where the device could not give another segment."""

    position: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


class Replay(NamedTuple):
    """The result of a replay. Bytes; `phases` has one entry for each stretch between marks."""

    allocated_peak: int
    reserved_peak: int
    peak_position: int
    """Index of the event that brought the allocated peak."""
    phases: tuple[PhasePeak, ...]
    out_of_memory: OutOfMemory | None
    retries: int
    """How often the cache was emptied because the device was full."""


def round_size(num_bytes: int) -> int:
    """Round a request of at least one byte up to the allocator's 512 bytes."""
    return (num_bytes + MIN_BLOCK - 1) & -MIN_BLOCK


def segment_size(size: int) -> int:
    """Return the size of the segment that the allocator asks the device for."""
    if size <= SMALL_LIMIT:
        return SMALL_SEGMENT
    if size < LARGE_SEGMENT_LIMIT:
        return LARGE_SEGMENT
    return (size + SEGMENT_ROUNDING - 1) // SEGMENT_ROUNDING * SEGMENT_ROUNDING


def _is_oversize(size: int, block_size: int, max_split: int) -> bool:
    """Say whether `max_split_size` keeps a free block from a request."""
    return size < max_split <= block_size or (size >= max_split and block_size >= size + OVERSIZE_ROUNDING)


def replay(
    program: Events,
    marks: Sequence[int] = (),
    *,
    capacity: int | None = None,
    max_split_size: int | None = None,
) -> Replay:
    """Replay a program through the allocator.

    `marks` are rising positions in the program; a phase ends before each of them and the last at the end. `capacity`
    is the most the device can give to the allocator. `max_split_size` is PYTORCH_CUDA_ALLOC_CONF's setting in bytes:
    larger blocks are never split nor given to smaller requests.

    This is one long function on purpose: it is the hot loop (about 0.6 us an event) and uses locals only. A block is
    [address, size, previous, next, key if free else 0, is in the small pool].
    """
    free_small: list[int] = []
    free_large: list[int] = []
    by_small: dict[int, list[Any]] = {}
    by_large: dict[int, list[Any]] = {}
    live: dict[int, list[Any]] = {}
    allocated = reserved = segments = retries = position = 0
    peak = peak_reserved = peak_position = 0
    limit = capacity if capacity is not None else _NO_LIMIT
    max_split = max_split_size if max_split_size is not None else _NO_LIMIT
    has_limit = max_split_size is not None
    phases: list[PhasePeak] = []
    oom: OutOfMemory | None = None

    def release_cached(reserved: int) -> int:
        for keys, blocks in ((free_small, by_small), (free_large, by_large)):
            for key in [k for k in keys if blocks[k][2] is None and blocks[k][3] is None]:
                del keys[bisect_left(keys, key)]
                reserved -= blocks.pop(key)[1]
        return reserved

    start = 0
    for stop in (*marks, len(program)):
        phase_peak, phase_reserved = allocated, reserved
        position = start - 1
        for slot, size in program[start:stop]:
            position += 1
            if size > 0:
                small = size <= 1048576
                if small:
                    keys, blocks = free_small, by_small
                else:
                    keys, blocks = free_large, by_large
                i = bisect_left(keys, size << 88)
                block = blocks[keys[i]] if i < len(keys) else None
                if has_limit and block is not None and _is_oversize(size, block[1], max_split):
                    block = None
                if block is not None:
                    del blocks[keys.pop(i)]
                    block[4] = 0
                else:
                    wanted = segment_size(size)
                    if reserved + wanted > limit:
                        retries += 1
                        reserved = release_cached(reserved)
                        if reserved + wanted > limit:
                            oom = OutOfMemory(position, size, allocated, reserved)
                            break
                    segments += 1
                    block = [_TOP_ADDRESS - segments * _SEGMENT_SPACING, wanted, None, None, 0, small]
                    reserved += wanted
                    if reserved > phase_reserved:
                        phase_reserved = reserved
                rest = block[1] - size
                if (rest > 1048576 and size < max_split) or (small and rest >= 512):
                    after = block[3]
                    address = block[0] + size
                    key = rest << 88 | address
                    split = [address, rest, block, after, key, small]
                    if after is not None:
                        after[2] = split
                    block[3] = split
                    block[1] = size
                    insort(keys, key)
                    blocks[key] = split
                    allocated += size
                else:
                    allocated += block[1]
                if allocated > phase_peak:
                    phase_peak = allocated
                    if allocated > peak:
                        peak, peak_position = allocated, position
                live[slot] = block
            elif size == 0:
                block = live.pop(slot)
                if block[5]:
                    keys, blocks = free_small, by_small
                else:
                    keys, blocks = free_large, by_large
                allocated -= block[1]
                before = block[2]
                if before is not None and before[4]:
                    key = before[4]
                    del keys[bisect_left(keys, key)]
                    del blocks[key]
                    before[1] += block[1]
                    after = block[3]
                    before[3] = after
                    if after is not None:
                        after[2] = before
                    block = before
                after = block[3]
                if after is not None and after[4]:
                    key = after[4]
                    del keys[bisect_left(keys, key)]
                    del blocks[key]
                    block[1] += after[1]
                    after = after[3]
                    block[3] = after
                    if after is not None:
                        after[2] = block
                key = block[1] << 88 | block[0]
                block[4] = key
                insort(keys, key)
                blocks[key] = block
            else:
                reserved = release_cached(reserved)
        phases.append(PhasePeak(phase_peak, phase_reserved, allocated, reserved))
        peak_reserved = max(peak_reserved, phase_reserved)
        if oom:
            break
        start = stop
    return Replay(peak, peak_reserved, peak_position, tuple(phases), oom, retries)
