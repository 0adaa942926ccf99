"""What a program shows, traced or estimated: who is alive at its peak, its events, its memory over the step."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

from msgspec import Meta

from foretune.memory.allocator import Program
from foretune.memory.components import COMPONENT_ORDER
from foretune.values import Value

__all__ = ["AliveTensors", "Band", "Storage", "Timeline", "alive_at", "events_of", "timeline_of"]

Bytes = Annotated[int, Meta(ge=0)]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Storage(Protocol):
    """What was allocated, as the runtime names it."""

    @property
    def name(self) -> str:
        """A parameter's name, or the operator that made it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Empty for a workspace."""

    @property
    def dtype(self) -> str:
        """Empty for a workspace."""

    @property
    def phase(self) -> str:
        """In which it was made."""

    @property
    def num_bytes(self) -> int:
        """As it was asked for."""


class AliveTensors(Value, frozen=True, kw_only=True):
    """Storages that are alive at the peak and alike: in name but for numbers of layers, in shape, dtype and phase."""

    name: str
    """A parameter's name or the operator that made them; `*` stands for the numbers of layers."""
    count: int
    shape: tuple[int, ...]
    dtype: str | None
    """None: a workspace has none."""
    phase: str
    """In which they were made."""
    component: str
    num_bytes: Bytes
    """Of all together, each rounded up to the allocator's 512 bytes."""


class Band(NamedTuple):
    """A stretch of the program in one phase."""

    phase: str
    start: int
    stop: int
    """Positions of its first event and of the one after its last."""


class Timeline(NamedTuple):
    """Memory over a program, at chosen events."""

    components: tuple[str, ...]
    positions: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]
    """For each position the bytes of each component after that event, rounded up to 512 a storage."""
    bands: tuple[Band, ...]
    peak: tuple[int, int]
    """Position and bytes of the highest sum."""


def alive_at(program: Program, births: Sequence[Storage], position: int) -> tuple[AliveTensors, ...]:
    """List what is alive after an event of a program, the largest first; what is alike stands together.

    With the allocator's slack they add up to what is allocated.
    """
    living: dict[int, int] = {}
    for slot, size in program.events[: position + 1]:
        if size > 0:
            living[slot] = size
        elif size == 0:
            del living[slot]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for slot, size in living.items():
        born = births[slot]
        key = (_NUMBER.sub("*", born.name), born.shape, born.dtype, born.phase, program.components[slot])
        group = groups.setdefault(key, [0, 0])
        group[0] += 1
        group[1] += size
    alive = [
        AliveTensors(
            name=name,
            count=count,
            shape=shape,
            dtype=dtype or None,
            phase=phase,
            component=component,
            num_bytes=num_bytes,
        )
        for (name, shape, dtype, phase, component), (count, num_bytes) in groups.items()
    ]
    return tuple(sorted(alive, key=lambda group: (-group.num_bytes, group.name)))


def events_of(program: Program, births: Sequence[Storage]) -> Iterator[dict[str, Any]]:
    """Yield every event in order, each readable by itself (docs/events.md)."""
    for band in _bands(program):
        for slot, size in program.events[band.start : band.stop]:
            if size < 0:
                yield {"event": "empty_cache", "phase": band.phase}
                continue
            born = births[slot]
            yield {
                "event": "allocate" if size else "free",
                "slot": slot,
                "bytes": born.num_bytes,
                "name": born.name,
                "shape": born.shape,
                "dtype": born.dtype or None,
                "phase": band.phase,
                "component": program.components[slot],
            }


def timeline_of(program: Program, num_points: int = 400) -> Timeline:
    """Follow the components over a program, at about `num_points` events that keep every high and low.

    The program is cut into stretches, and of each the highest and the lowest sum are kept in their order, beside the
    first and last event of each phase. The peak is among them.
    """
    totals = list(_totals(program))
    chosen: set[int] = set()
    bands = _bands(program)
    stretch = max(2 * len(totals) // max(num_points, 1), 1)
    for band in bands:
        for start in range(band.start, band.stop, stretch):
            part = range(start, min(start + stretch, band.stop))
            chosen |= {max(part, key=totals.__getitem__), min(part, key=totals.__getitem__)}
        chosen |= {band.start, band.stop - 1}
    positions = tuple(sorted(chosen))
    peak = max(range(len(totals)), key=totals.__getitem__)
    names = COMPONENT_ORDER[:-1]  # the slack is the allocator's, not a storage
    return Timeline(names, positions, tuple(_columns(program, positions, names)), bands, (peak, totals[peak]))


def _bands(program: Program) -> tuple[Band, ...]:
    edges = [0, *program.marks, len(program.events)]
    spans = zip(program.phases, edges, edges[1:], strict=False)
    return tuple(Band(phase, start, stop) for phase, start, stop in spans if stop > start)


def _totals(program: Program) -> Iterator[int]:
    """The sum of all living storages after each event."""
    sizes: dict[int, int] = {}
    total = 0
    for slot, size in program.events:
        if size > 0:
            sizes[slot] = size
            total += size
        elif size == 0:
            total -= sizes.pop(slot)
        yield total


def _columns(program: Program, positions: tuple[int, ...], names: Sequence[str]) -> Iterator[tuple[int, ...]]:
    sums = dict.fromkeys(names, 0)
    sizes: dict[int, int] = {}
    wanted = iter((*positions, -1))
    next_position = next(wanted)
    for position, (slot, size) in enumerate(program.events):
        if size > 0:
            sizes[slot] = size
            sums[program.components[slot]] += size
        elif size == 0:
            sums[program.components[slot]] -= sizes.pop(slot)
        if position == next_position:
            yield tuple(sums.values())
            next_position = next(wanted)
