from hypothesis import given, settings
from hypothesis import strategies as st
from memory.reference_allocator import Full, ReferenceAllocator

from foretune.memory.allocator import EMPTY_CACHE, Events, replay, round_size
from foretune.memory.expandable import replay_expandable
from foretune.units import MIB

sizes = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(1, 64 * MIB)).map(round_size)


@st.composite
def programs(draw: st.DrawFn) -> Events:
    """Random allocations and frees, now and then an emptied cache."""
    program: Events = []
    live: list[int] = []
    for slot in range(draw(st.integers(1, 60))):
        program.append((slot, draw(sizes)))
        live.append(slot)
        for _ in range(draw(st.integers(0, 2))):
            if live:
                program.append((live.pop(draw(st.integers(0, len(live) - 1))), 0))
        if draw(st.integers(0, 19)) == 0:
            program.append(EMPTY_CACHE)
    return program


def run_reference(program: Events, **limits: int | None) -> tuple[int, int, int | None]:
    """Allocated peak, reserved peak and the position of an out-of-memory, every book checked."""
    allocator = ReferenceAllocator(**limits)
    allocated = reserved = 0
    for position, (slot, size) in enumerate(program):
        if size > 0:
            try:
                allocator.malloc(slot, size)
            except Full:
                return allocated, reserved, position
        elif size == 0:
            allocator.free(slot)
        else:
            allocator.empty()
        allocator.check()
        allocated, reserved = max(allocated, allocator.allocated), max(reserved, allocator.reserved)
    return allocated, reserved, None


@given(programs())
@settings(max_examples=150, deadline=None)
def test_the_lean_replay_equals_the_obvious_allocator(program: Events) -> None:
    result = replay(program)
    assert (result.allocated_peak, result.reserved_peak, None) == run_reference(program)


@given(programs(), st.integers(2, 200), st.sampled_from([None, 20 * MIB, 32 * MIB]))
@settings(max_examples=150, deadline=None)
def test_a_full_device_empties_the_cache_and_tries_again(program: Events, mib: int, max_split: int | None) -> None:
    result = replay(program, capacity=mib * MIB, max_split_size=max_split)
    position = result.out_of_memory.position if result.out_of_memory else None
    expected = run_reference(program, capacity=mib * MIB, max_split=max_split)
    assert (result.allocated_peak, result.reserved_peak, position) == expected


@given(programs())
@settings(max_examples=100, deadline=None)
def test_expandable_segments_hold_what_is_asked_for_and_no_slack(program: Events) -> None:
    result = replay_expandable(program)
    live: dict[int, int] = {}
    peak = 0
    for slot, size in program:
        if size > 0:
            live[slot] = size
        elif size == 0:
            del live[slot]
        peak = max(peak, sum(live.values()))
    assert result.allocated_peak == peak
    assert result.reserved_peak >= peak
    assert result.phases[-1].allocated_end == sum(live.values())


@given(programs())
@settings(max_examples=60, deadline=None)
def test_expandable_segments_give_back_whole_pages(program: Events) -> None:
    freed = [*program, *[(slot, 0) for slot in _still_live(program)], EMPTY_CACHE]
    result = replay_expandable(freed)
    assert result.phases[-1].reserved_end == 0
    assert result.phases[-1].allocated_end == 0


def _still_live(program: Events) -> list[int]:
    live: list[int] = []
    for slot, size in program:
        if size > 0:
            live.append(slot)
        elif size == 0:
            live.remove(slot)
    return live


@given(programs(), st.lists(st.integers(0, 60), max_size=4))
@settings(max_examples=60, deadline=None)
def test_phases_cut_the_same_replay(program: Events, cuts: list[int]) -> None:
    marks = sorted(min(cut, len(program)) for cut in cuts)
    whole, cut = replay(program), replay(program, marks)
    assert (whole.allocated_peak, whole.reserved_peak) == (cut.allocated_peak, cut.reserved_peak)
    assert max(phase.allocated_peak for phase in cut.phases) == whole.allocated_peak


def test_a_small_tensor_reserves_twenty_mebibytes() -> None:
    assert replay([(0, round_size(2 * MIB))]).reserved_peak == 20 * MIB


def test_best_fit_breaks_ties_by_the_newest_segment() -> None:
    # Two wholly free segments of equal size: the newer one lies at the lower address and is taken, so the older one
    # is what an emptied cache gives back.
    program = [(0, 12 * MIB), (1, 12 * MIB), (0, 0), (1, 0), (2, 12 * MIB), EMPTY_CACHE]
    assert replay(program).phases[-1].reserved_end == 12 * MIB


def test_the_allocated_peak_knows_where_it_was() -> None:
    program = [(0, 512), (1, 1024), (0, 0), (2, 512)]
    assert replay(program).peak_position == 1
