"""Record a few layers, emit any number: layers of one kind have the same events.

A unit is the smallest run of layers that repeats (one layer in most models, six in Gemma 3). Units 0, 1, one inner
unit (2) and the last ones are recorded; the inner one is the template of every further unit. A death is kept as
(part, unit, index), so expansion is one comprehension for each unit.
"""

from collections.abc import Sequence
from typing import NamedTuple

from foretune.memory.allocator import EMPTY_CACHE, Program, round_size
from foretune.memory.tape import Segment, Tape

__all__ = ["EMPTY", "Recording", "Units", "Walk", "find_units"]

_INNER = 2
_LONGEST_PERIOD = 8

EMPTY = -2
"""Size of an event that empties the cache."""


class Units(NamedTuple):
    """How a stack of layers is cut into units."""

    total: int
    """Units of the whole stack."""
    recorded: tuple[tuple[int, ...], ...]
    """The layers of each recorded unit; all of them where nothing repeats."""

    def recorded_for(self, unit: int) -> int:
        """Return the recorded unit that stands for a unit."""
        recorded = len(self.recorded)
        if self.total == recorded:
            return unit
        last_inner = self.total - (recorded - _INNER)
        return unit if unit < _INNER else _INNER if unit <= last_inner else unit - self.total + recorded

    def place(self, unit: int | None, here: int | None, real: int | None) -> int | None:
        """Say which real unit a recorded one is, seen from the part of recorded unit `here` that stands for `real`."""
        recorded = len(self.recorded)
        if unit is None or self.total == recorded:
            return unit
        if here == _INNER and real is not None:
            return real + unit - _INNER
        if here is not None and here < _INNER:
            return unit
        return unit if unit < _INNER else unit - recorded + self.total


def find_units(signatures: Sequence[object], *, num_last: int = 1) -> Units:
    """Cut layers into repeating units; `signatures` says of each layer what it is like.

    `num_last` units at the end are recorded on their own: one, or two where the gradient that enters the last layer
    is handed on differently (parallel residuals). The last unit takes the layers that are left over. Where no short
    period repeats often enough, every layer is recorded.
    """
    n = len(signatures)
    for period in range(1, _LONGEST_PERIOD + 1):
        count = n // period
        if count <= _INNER + 1 + num_last:
            break
        if all(signatures[i] == signatures[i % period] for i in range(n)):
            units = [0, 1, _INNER, *range(count - num_last, count)]
            starts = [unit * period for unit in units]
            ends = [start + period for start in starts[:-1]] + [n]
            return Units(count, tuple(tuple(range(a, b)) for a, b in zip(starts, ends, strict=True)))
    return Units(n, tuple((i,) for i in range(n)))


class _Part(NamedTuple):
    """One recorded segment: births in order, deaths by the part, unit and index of the birth."""

    visit: int
    unit: int | None
    phase: str
    components: list[str]
    lines: list[tuple[int, int, int]]
    """Which of the references, index of the birth there, rounded bytes (0: a death)."""
    references: tuple[tuple[int, int | None], ...]
    """The parts that its lines name, each once."""
    moves: list[tuple[str, int]]
    """Component and signed requested bytes of each line."""
    net_bytes: int
    highest_bytes: int
    highest_at: int
    """How many moves lead to the highest point."""
    is_emptying: bool
    """The cache is emptied before its events."""

    def sums(self, num_moves: int) -> dict[str, int]:
        """Add up the first moves by component."""
        sums: dict[str, int] = {}
        for component, num_bytes in self.moves[:num_moves]:
            sums[component] = sums.get(component, 0) + num_bytes
        return sums


class Walk(NamedTuple):
    """Requested bytes of a program: the peak, its phase and components, and the peak of each phase."""

    peak: int
    peak_phase: str
    phases: dict[str, int]
    sums: dict[str, int]


def _added(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    out = dict(a)
    for name, num_bytes in b.items():
        out[name] = out.get(name, 0) + num_bytes
    return out


class Recording(NamedTuple):
    """A recorded program, cut into parts; `expand` emits it for any number of units."""

    parts: tuple[_Part, ...]
    units: Units

    @classmethod
    def of(cls, tape: Tape, units: Units) -> "Recording":
        """Cut a finished tape."""
        return cls(tuple(_compile(tape)), units)

    def with_total(self, total: int) -> "Recording":
        """Return the same program for another number of units."""
        return self._replace(units=self.units._replace(total=total))

    @property
    def num_events(self) -> int:
        """Number of events that `expand` emits."""
        return sum(len(part.lines) for _, part in _in_order(self.parts, self.units))

    def expand(self) -> Program:
        """Emit the events of all units; sizes are rounded to the allocator's 512 bytes."""
        units = self.units
        events: list[tuple[int, int]] = []
        components: list[str] = []
        marks: list[int] = []
        phases: list[str] = []
        bases: dict[tuple[int, int | None], int] = {}
        for real, part in _in_order(self.parts, units):
            if not phases or part.phase != phases[-1]:
                if phases:
                    marks.append(len(events))
                phases.append(part.phase)
            bases[part.visit, real] = len(components)
            base = [bases[visit, units.place(unit, part.unit, real)] for visit, unit in part.references]
            if part.is_emptying:
                events.append(EMPTY_CACHE)
            events += [(base[r] + k, n) for r, k, n in part.lines]
            components += part.components
        return Program(events, components, tuple(marks), tuple(phases))

    def walk(self) -> Walk:
        """Walk the requested bytes: where the peak lies, of what it consists, and the peak of each phase."""
        live = peak = 0
        sums: dict[str, int] = {}
        at_peak: dict[str, int] = {}
        peak_phase = ""
        phases: dict[str, int] = {}
        nets: dict[int, dict[str, int]] = {}
        for _, part in _in_order(self.parts, self.units):
            high = live + part.highest_bytes
            phases[part.phase] = max(phases.get(part.phase, 0), high)
            if high > peak:
                peak, peak_phase = high, part.phase
                at_peak = _added(sums, part.sums(part.highest_at))
            if id(part) not in nets:
                nets[id(part)] = part.sums(len(part.moves))
            sums = _added(sums, nets[id(part)])
            live += part.net_bytes
        return Walk(peak, peak_phase, phases, at_peak)

    def requested_peak(self) -> int:
        """Return the peak of requested bytes, without allocator, rounding or events: the walk for a search.

        A part is its net change and its highest point, so units that repeat cost an addition each.
        """
        live = peak = 0
        for _, part in _in_order(self.parts, self.units):
            peak = max(peak, live + part.highest_bytes)
            live += part.net_bytes
        return peak


def _compile(tape: Tape) -> list[_Part]:
    """Cut the recording into parts; a part without a unit and without events only marks its phase."""
    born: list[tuple[int, int | None, int]] = [(0, None, 0)] * len(tape.components)
    parts: list[_Part] = []
    visit, last = -1, None
    bounds = [segment.position for segment in tape.segments[1:]] + [len(tape.events)]
    for segment, end in zip(tape.segments, bounds, strict=True):
        key = (segment.kind, segment.phase) if segment.layer is not None else None
        if key is None or key != last:
            visit += 1
        last = key
        if segment.layer is None and segment.position == end:
            continue
        parts.append(_part(tape, segment, end, visit, born))
    return parts


def _part(tape: Tape, segment: Segment, end: int, visit: int, born: list[tuple[int, int | None, int]]) -> _Part:
    """Compile one segment. Emptying the cache is a segment of its own."""
    components: list[str] = []
    lines: list[tuple[int, int, int]] = []
    moves: list[tuple[str, int]] = []
    references: dict[tuple[int, int | None], int] = {(visit, segment.layer): 0}
    net = highest = highest_at = 0
    is_emptying = False
    for slot, num_bytes in tape.events[segment.position : end]:
        if num_bytes > 0:
            born[slot] = (visit, segment.layer, len(components))
            lines.append((0, len(components), round_size(num_bytes)))
            components.append(tape.components[slot])
            moves.append((tape.components[slot], num_bytes))
            net += num_bytes
            if net > highest:
                highest, highest_at = net, len(moves)
        elif num_bytes == EMPTY:
            is_emptying = True
        else:
            visit_born, unit_born, index = born[slot]
            lines.append((references.setdefault((visit_born, unit_born), len(references)), index, 0))
            moves.append((tape.components[slot], -tape.sizes[slot]))
            net -= tape.sizes[slot]
    return _Part(
        visit,
        segment.layer,
        segment.phase,
        components,
        lines,
        tuple(references),
        moves,
        net,
        highest,
        highest_at,
        is_emptying,
    )


def _in_order(parts: Sequence[_Part], units: Units) -> list[tuple[int | None, _Part]]:
    """Pair each part with the unit it stands for: recorded runs of units become runs of all units."""
    out: list[tuple[int | None, _Part]] = []
    i = 0
    while i < len(parts):
        if parts[i].unit is None:
            out.append((None, parts[i]))
            i += 1
            continue
        stop = i
        while stop < len(parts) and parts[stop].visit == parts[i].visit:
            stop += 1
        group = parts[i:stop]
        by_unit = {part.unit: part for part in group}
        order: list[tuple[int | None, _Part]] = []
        for n in range(units.total):
            part = by_unit.get(units.recorded_for(n))
            if part is not None:
                order.append((n, part))
        out += order if len(group) < 2 or (group[0].unit or 0) < (group[1].unit or 0) else order[::-1]
        i = stop
    return out
