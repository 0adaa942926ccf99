"""The model of glibc's malloc: what its rules say, and what must hold of any program."""

from hypothesis import given
from hypothesis import strategies as st

from foretune.memory.heap import FIRST_THRESHOLD, Heap, replay_on_host

MIB = 1 << 20
LARGE = 40 * MIB
"""Above the highest threshold: always mapped."""


def test_a_large_tensor_is_mapped_and_given_back() -> None:
    heap = Heap()
    heap.allocate_aligned(0, LARGE)
    assert LARGE < heap.held_bytes <= LARGE + 8192
    heap.free(0)
    assert heap.held_bytes == 0


def test_a_freed_mapping_raises_the_threshold_up_to_32_mib() -> None:
    heap = Heap()
    for slot, size in enumerate((3 * MIB, LARGE)):
        heap.allocate_aligned(slot, size)
        heap.free(slot)
    assert 3 * MIB < heap.threshold < 3 * MIB + 8192
    heap.allocate_aligned(2, 3 * MIB)
    assert 2 not in heap.mapped


def test_a_freed_chunk_between_living_ones_is_too_small_for_a_tensor_of_its_own_size() -> None:
    heap = Heap()
    pinned = []
    for slot in range(3):
        heap.allocate_aligned(slot, MIB // 2)
        pinned.append(heap.allocate_small(112))
    before = heap.held_bytes
    heap.free(1)
    heap.allocate_aligned(3, MIB // 2)
    assert heap.held_bytes >= before + MIB // 4


def test_neighbours_that_are_free_become_one_chunk() -> None:
    heap = Heap()
    chunks = [heap.allocate_small(200_000) for _ in range(4)]
    heap.free_chunk(chunks[1])
    heap.free_chunk(chunks[2])
    assert heap.allocate_small(400_000) == chunks[1]


def test_the_top_is_given_back_where_it_reaches_twice_the_threshold() -> None:
    heap = Heap()
    chunks = [heap.allocate_small(FIRST_THRESHOLD - 4096) for _ in range(5)]
    assert heap.held_bytes > 4 * FIRST_THRESHOLD
    for chunk in reversed(chunks):
        heap.free_chunk(chunk)
    assert heap.held_bytes < 2 * FIRST_THRESHOLD


def test_slots_that_are_left_out_and_phases_without_events_count_nothing() -> None:
    events = [(0, LARGE), (1, LARGE), (1, 0)]
    found = replay_on_host(events, (1, 1, 3), left_out=frozenset({0}))
    assert found.phase_peaks[0] == 0
    assert LARGE < found.peak_bytes < LARGE + MIB
    assert len(found.phase_peaks) == 4


@given(st.lists(st.tuples(st.integers(1, 6 * MIB), st.integers(0, 12)), min_size=1, max_size=80))
def test_what_is_held_covers_what_lives_and_chunks_tile_the_heap(steps: list[tuple[int, int]]) -> None:
    heap, alive = Heap(), {}
    for slot, (size, chosen) in enumerate(steps):
        heap.allocate_aligned(slot, size)
        alive[slot] = size
        if chosen < 8 and len(alive) > chosen:
            dead = list(alive)[chosen]
            heap.free(dead)
            del alive[dead]
        assert heap.held_bytes >= sum(alive.values())
        chunk, before = 0, None
        while chunk != heap.top:
            assert heap.before[chunk] == before
            chunk, before = chunk + heap.sizes[chunk], chunk
        assert heap.last == before
        assert len(heap.sizes) == len(heap.before)
