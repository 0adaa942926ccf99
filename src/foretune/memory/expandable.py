"""The caching allocator with expandable segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True).

Source: c10/cuda/CUDACachingAllocator.cpp (find_expandable_block, map_block, unmap_block). Each pool is one range of
addresses of which whole pages are mapped: 2 MiB for the small pool, 20 MiB for the large one. Every block is split,
so nothing is lost to a block's rest; pages are mapped where free memory ends, and given back when the cache is
emptied. No published measurement has touched this path.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Literal

from foretune.memory.allocator import (
    LARGE_SEGMENT,
    MIN_BLOCK,
    SMALL_LIMIT,
    SMALL_SEGMENT,
    Events,
    OutOfMemory,
    PhasePeak,
    Replay,
)

__all__ = ["replay_expandable"]

_KEY = 88
_RANGE = 1 << 80


class _Block:
    """A stretch of a pool's addresses."""

    __slots__ = ("address", "next", "pool", "previous", "size", "state")

    def __init__(self, pool: "_Pool", address: int, size: int, state: Literal["free", "live", "unmapped"]) -> None:
        self.pool, self.address, self.size, self.state = pool, address, size, state
        self.previous: _Block | None = None
        self.next: _Block | None = None

    @property
    def key(self) -> int:
        """Sorts by size, then by address."""
        return self.size << _KEY | self.address

    @property
    def expandable_size(self) -> int:
        """How large a free block can become."""
        after = self.next
        return self.size + (after.size if after is not None and after.state == "unmapped" else 0)


class _Pool:
    """A range of addresses with its free and its unmapped blocks."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.free: list[int] = []
        self.blocks: dict[int, _Block] = {}
        self.unmapped: list[_Block] = [_Block(self, 0, _RANGE, "unmapped")]

    # -- free blocks
    def insert(self, block: _Block) -> None:
        block.state = "free"
        insort(self.free, block.key)
        self.blocks[block.key] = block

    def take(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, block.key)]
        del self.blocks[block.key]

    def find(self, size: int) -> _Block | None:
        """Best fit by the size a block can become: the one at the mapped end comes last."""
        i = bisect_left(self.free, size << _KEY)
        if i == len(self.free):
            return None
        best = self.blocks[self.free[i]]
        for key in self.free[i + 1 :]:
            block = self.blocks[key]
            if block.expandable_size >= best.expandable_size:
                break
            best = block
        return best

    # -- pages
    def pages_for(self, block: _Block, size: int) -> int:
        """Bytes that must be mapped so that `size` bytes from an unmapped block's start are there."""
        return -(-size // self.page) * self.page

    def map(self, block: _Block, num_bytes: int) -> None:
        """Map the start of an unmapped block; it becomes free and is not yet in the list."""
        if num_bytes < block.size:
            rest = _Block(self, block.address + num_bytes, block.size - num_bytes, "unmapped")
            _link(block, rest)
            self.unmapped[self.unmapped.index(block)] = rest
            block.size = num_bytes
        else:
            self.unmapped.remove(block)
        block.state = "free"

    def merge(self, block: _Block) -> _Block:
        """Join a block with neighbours in the same state (neighbours that are free are in the list)."""
        for other in (block.previous, block.next):
            if other is not None and other.state == block.state:
                if other.state == "free":
                    self.take(other)
                else:
                    self.unmapped.remove(other)
                first, second = (other, block) if other is block.previous else (block, other)
                first.size += second.size
                first.next = second.next
                if first.next is not None:
                    first.next.previous = first
                block = first
        return block


def _link(before: _Block, block: _Block) -> None:
    block.previous, block.next = before, before.next
    if before.next is not None:
        before.next.previous = block
    before.next = block


class _Allocator:
    """Both pools and the counters."""

    def __init__(self, capacity: int | None) -> None:
        self.small, self.large = _Pool(SMALL_SEGMENT), _Pool(LARGE_SEGMENT)
        self.capacity = capacity
        self.live: dict[int, _Block] = {}
        self.allocated = self.reserved = self.retries = 0

    def malloc(self, slot: int, size: int) -> bool:
        """Serve a request; False where the device is full."""
        pool = self.small if size <= SMALL_LIMIT else self.large
        block = pool.find(size)
        if block is not None:
            pool.take(block)
        else:
            block = self._grow(pool, size)
            if block is None:
                self.retries += 1
                self.empty_cache()
                block = self._grow(pool, size)
            if block is None:
                return False
        if block.size - size >= MIN_BLOCK:
            rest = _Block(pool, block.address + size, block.size - size, "free")
            _link(block, rest)
            block.size = size
            pool.insert(rest)
        block.state = "live"
        self.live[slot] = block
        self.allocated += block.size
        return True

    def _grow(self, pool: _Pool, size: int) -> _Block | None:
        """Map pages at the lowest unmapped address that gives room, joined with a free block right before it."""
        for start in sorted(pool.unmapped, key=lambda block: block.address):
            before = start.previous if start.previous is not None and start.previous.state == "free" else None
            missing = size - (before.size if before else 0)
            if start.size < missing:
                continue
            num_bytes = min(pool.pages_for(start, missing), start.size)
            if self.capacity is not None and self.reserved + num_bytes > self.capacity:
                return None
            pool.map(start, num_bytes)
            self.reserved += num_bytes
            return pool.merge(start)
        return None

    def free(self, slot: int) -> None:
        block = self.live.pop(slot)
        self.allocated -= block.size
        block.state = "free"
        block = block.pool.merge(block)
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """Unmap every page that lies wholly in a free block."""
        for pool in (self.small, self.large):
            for block in [pool.blocks[key] for key in pool.free]:
                first = -(-block.address // pool.page) * pool.page
                last = (block.address + block.size) // pool.page * pool.page
                if last <= first:
                    continue
                pool.take(block)
                self._cut(pool, block, first, last)
                self.reserved -= last - first

    def _cut(self, pool: _Pool, block: _Block, first: int, last: int) -> None:
        """Leave what lies before and after the whole pages free, and unmap the pages."""
        end = block.address + block.size
        middle = block
        if first > block.address:
            middle = _Block(pool, first, end - first, "unmapped")
            _link(block, middle)
            block.size = first - block.address
            pool.insert(block)
        if last < end:
            rest = _Block(pool, last, end - last, "free")
            _link(middle, rest)
            pool.insert(rest)
        middle.address, middle.size, middle.state = first, last - first, "unmapped"
        middle = pool.merge(middle)
        pool.unmapped.append(middle)


def replay_expandable(program: Events, marks: Sequence[int] = (), *, capacity: int | None = None) -> Replay:
    """Replay a program as `allocator.replay` does, on an allocator with expandable segments."""
    allocator = _Allocator(capacity)
    phases: list[PhasePeak] = []
    peak = peak_reserved = peak_position = start = 0
    for stop in (*marks, len(program)):
        high, high_reserved = allocator.allocated, allocator.reserved
        for position in range(start, stop):
            slot, size = program[position]
            if size > 0:
                if not allocator.malloc(slot, size):
                    full = OutOfMemory(position, size, allocator.allocated, allocator.reserved)
                    return Replay(peak, peak_reserved, peak_position, tuple(phases), full, allocator.retries)
                high, high_reserved = max(high, allocator.allocated), max(high_reserved, allocator.reserved)
                if allocator.allocated > peak:
                    peak, peak_position = allocator.allocated, position
            elif size == 0:
                allocator.free(slot)
            else:
                allocator.empty_cache()
        phases.append(PhasePeak(high, high_reserved, allocator.allocated, allocator.reserved))
        peak_reserved = max(peak_reserved, high_reserved)
        start = stop
    return Replay(peak, peak_reserved, peak_position, tuple(phases), None, allocator.retries)
