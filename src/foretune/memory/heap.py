"""A model of glibc's malloc: how far a process grows by the tensors that it allocates on a CPU.

Source of the rules: malloc/malloc.c (glibc 2.36), c10/core/impl/alloc_cpu.cpp (torch 2.13). One thread, one arena.

torch asks for each tensor with posix_memalign on 64 bytes. Rules. A request of n bytes becomes a chunk of n + 8,
rounded up to 16. An aligned one asks for 96 more, and gives back what lies before and behind it; so a freed chunk is
too small for the next tensor of its own size, unless a neighbour is free too. The smallest free chunk that is large
enough is taken, the one freed last among equals; its rest is split off. Else the top of the heap is cut, which grows by
what is missing and 128 KiB. What the heap has no room for is mapped, from a threshold on that rises to the size of each
mapping that is freed, up to 32 MiB; a freed mapping goes back to the system. Freed chunks merge with free neighbours,
and the top is given back where it reaches twice the threshold. Seven freed pieces of each size up to 1,032 bytes stay
apart (tcache); pieces up to 128 bytes are merged by the next large request (fastbins).

The small objects of C++ are not traced: three for each tensor are modelled, which live as long as it does and take
about the pieces that its alignment cuts off. They keep neighbours from merging; without them a quarter to a half of the
growth would be missing. They stand for the records of storage and tensor and a node of autograd's graph.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["FIRST_THRESHOLD", "Heap", "HostReplay", "replay_on_host"]

PAGE, ALIGNMENT, LEAST_CHUNK = 4096, 64, 32
TOP_PAD = 128 << 10
MOST_OF_THRESHOLD = 32 << 20
MOST_CACHED, CACHED_OF_A_SIZE, MOST_FAST = 1040, 7, 128
SMALL_BINS, CONSOLIDATES = 1024, 65536
FIRST_THRESHOLD = 1 << 20
"""The threshold when loading begins, raised from 128 KiB by what imports mapped and freed: between 1 and 2 MiB after
torch, Transformers and PEFT. The figures hardly depend on it."""
OBJECTS = (48, 64, 112)
"""Chunks of a tensor's small objects."""


class HostReplay(NamedTuple):
    """What a program's tensors make a process grow by."""

    peak_bytes: int
    phase_peaks: tuple[int, ...]
    """Of each stretch between marks."""


def replay_on_host(
    events: Iterable[tuple[int, int]], marks: tuple[int, ...], *, left_out: frozenset[int] = frozenset()
) -> HostReplay:
    """Replay a program's births (slot, bytes) and deaths (slot, 0) through malloc, but for some slots."""
    heap, peaks, peak, objects = Heap(), [], 0, {}
    borders = set(marks)
    for position, (slot, size) in enumerate(events):
        if position in borders:
            peaks.append(peak)
            peak = heap.held_bytes
        if slot < 0 or slot in left_out:
            continue
        if size:
            heap.allocate_aligned(slot, size)
            objects[slot] = [heap.allocate_small(chunk) for chunk in OBJECTS]
            peak = max(peak, heap.held_bytes)
        else:
            heap.free(slot)
            for chunk in objects.pop(slot):
                heap.free_chunk(chunk)
    peaks += [peak] * (len(marks) + 1 - len(peaks))
    return HostReplay(max(peaks), tuple(peaks))


class Heap:
    """One arena and the mappings beside it. Chunks are known by the address at which they begin."""

    def __init__(self, threshold: int = FIRST_THRESHOLD) -> None:
        self.threshold, self.trim_at = threshold, 2 * threshold
        self.top = self.end = 0
        self.sizes: dict[int, int] = {}
        self.before: dict[int, int | None] = {}
        """The chunk that lies before each."""
        self.last: int | None = None
        """The chunk below the top."""
        self.free_keys: dict[int, int] = {}
        """Of each free chunk: its order among chunks of its size."""
        self.bins: list[tuple[int, int, int]] = []
        """Free chunks by size and order."""
        self.num_freed = 0
        self.cached: dict[int, list[int]] = {}
        self.fast: dict[int, list[int]] = {}
        self.has_fast = False
        self.chunk_of: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.mapped_bytes = 0

    @property
    def held_bytes(self) -> int:
        """What the system has given: the heap up to its end, and mappings."""
        return self.end + self.mapped_bytes

    # -- what a program asks for
    def allocate_aligned(self, slot: int, num_bytes: int) -> None:
        """Allocate as posix_memalign does (_int_memalign)."""
        size = _chunk_size(num_bytes)
        asked = _chunk_size(size + ALIGNMENT + LEAST_CHUNK)
        chunk = self._take(asked)
        if chunk is None:
            self.mapped[slot] = -(-(asked + 8) // PAGE) * PAGE
            self.mapped_bytes += self.mapped[slot]
            return
        lead = -(chunk + 16) % ALIGNMENT
        if lead:
            lead += ALIGNMENT if lead < LEAST_CHUNK else 0
            aligned = self._cut(chunk, lead)
            self.free_chunk(chunk)
            chunk = aligned
        if self.sizes[chunk] > size + LEAST_CHUNK:
            self.free_chunk(self._cut(chunk, size))
        self.chunk_of[slot] = chunk

    def allocate_small(self, size: int) -> int:
        """Allocate a chunk of a size below the threshold; returns it."""
        cached = self.cached.get(size)
        if cached:
            return cached.pop()
        chunk = self._take(size)
        assert chunk is not None
        return chunk

    def free(self, slot: int) -> None:
        """Free what a slot holds: a mapping goes back to the system and raises the threshold."""
        size = self.mapped.pop(slot, None)
        if size is None:
            self.free_chunk(self.chunk_of.pop(slot))
            return
        self.mapped_bytes -= size
        if self.threshold < size <= MOST_OF_THRESHOLD:
            self.threshold, self.trim_at = size, 2 * size

    def free_chunk(self, chunk: int) -> None:
        """Free a chunk: to the cache, to the fast bins, or merged with its neighbours (_int_free)."""
        size = self.sizes[chunk]
        if size <= MOST_CACHED:
            cached = self.cached.setdefault(size, [])
            if len(cached) < CACHED_OF_A_SIZE:
                cached.append(chunk)
                return
        if size <= MOST_FAST and chunk + size != self.top:
            self.fast.setdefault(size, []).append(chunk)
            self.has_fast = True
            return
        self._merge(chunk)
        if size >= CONSOLIDATES:
            self._consolidate()

    # -- chunks
    def _take(self, size: int) -> int | None:
        """Find a chunk (_int_malloc); None where it is to be mapped."""
        if size <= MOST_FAST and self.fast.get(size):
            found = self.fast[size]
            chunk, cached = found.pop(), self.cached.setdefault(size, [])
            while found and len(cached) < CACHED_OF_A_SIZE:
                cached.append(found.pop())
            return chunk
        if size >= SMALL_BINS:
            self._consolidate()
        place = bisect_left(self.bins, (size,))
        if place < len(self.bins):
            whole, _, chunk = self.bins.pop(place)
            del self.free_keys[chunk]
            if whole - size >= LEAST_CHUNK:
                self._keep(self._cut(chunk, size))
            return chunk
        missing = size + LEAST_CHUNK - (self.end - self.top)
        if missing > 0:
            if size >= self.threshold:
                return None
            self.end += -(-(missing + TOP_PAD) // PAGE) * PAGE
        chunk = self.top
        self.sizes[chunk], self.before[chunk] = size, self.last
        self.last = chunk
        self.top += size
        return chunk

    def _cut(self, chunk: int, size: int) -> int:
        """Cut a chunk after a size; returns the rest."""
        rest = chunk + size
        self.sizes[rest] = self.sizes[chunk] - size
        self.sizes[chunk] = size
        self.before[rest] = chunk
        self._set_before(rest)
        return rest

    def _set_before(self, chunk: int) -> None:
        """Tell the chunk behind this one, or the top, what lies before it."""
        behind = chunk + self.sizes[chunk]
        if behind == self.top:
            self.last = chunk
        else:
            self.before[behind] = chunk

    def _keep(self, chunk: int) -> None:
        """Put a free chunk into its bin: small ones are taken oldest first, large ones newest first."""
        size = self.sizes[chunk]
        self.num_freed += 1
        key = self.num_freed if size < SMALL_BINS else -self.num_freed
        self.free_keys[chunk] = key
        insort(self.bins, (size, key, chunk))

    def _unlink(self, chunk: int) -> int:
        """Take a free chunk out of its bin; returns its size."""
        entry = (self.sizes[chunk], self.free_keys.pop(chunk), chunk)
        self.bins.pop(bisect_left(self.bins, entry))
        return entry[0]

    def _merge(self, chunk: int) -> None:
        """Merge a chunk that was freed with free neighbours and the top; trim the top where it is large."""
        size, before = self.sizes[chunk], self.before[chunk]
        if before is not None and before in self.free_keys:
            size += self._unlink(before)
            del self.sizes[chunk], self.before[chunk]
            chunk = before
        behind = chunk + size
        if behind != self.top and behind in self.free_keys:
            size += self._unlink(behind)
            del self.sizes[behind], self.before[behind]
        self.sizes[chunk] = size
        self._set_before(chunk)
        if chunk + size == self.top:
            self.last = self.before.pop(chunk)
            del self.sizes[chunk]
            self.top = chunk
        else:
            self._keep(chunk)
        if size >= CONSOLIDATES and self.end - self.top >= self.trim_at:
            self.end -= max((self.end - self.top - LEAST_CHUNK - 1 - TOP_PAD) // PAGE * PAGE, 0)

    def _consolidate(self) -> None:
        """Merge what lies in the fast bins (malloc_consolidate)."""
        if not self.has_fast:
            return
        self.has_fast = False
        for chunks in self.fast.values():
            while chunks:
                self._merge(chunks.pop())


def _chunk_size(num_bytes: int) -> int:
    """A header's 8 bytes more, rounded up to 16 (request2size)."""
    return max((num_bytes + 8 + 15) & ~15, LEAST_CHUNK)
