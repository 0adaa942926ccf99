"""Record a few layers, emit any number: layers of one kind between the same neighbours have the same events.

A recorded layer stands for every layer of its context: its own signature and those of the layers before and after
it. Layers at the ends, and the first and last of a signature, stand for themselves alone: what outlives a layer
(masks, tables, the residual's gradient) begins and ends there. A death is kept as (part, layer, index), so expansion
is one comprehension for each layer.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from foretune.memory.allocator import EMPTY_CACHE, Program, round_size
from foretune.memory.tape import Segment, Tape

__all__ = ["EMPTY", "Recording", "StandIns", "find_stand_ins"]

_NUM_FIRST = 2

EMPTY = -2
"""Size of an event that empties the cache."""


class StandIns(NamedTuple):
    """Which recorded layer stands for each layer of the stack."""

    recorded: tuple[int, ...]
    """The layers that are recorded, in order."""
    of: tuple[int, ...]
    """For each layer that is emitted, the index in `recorded` of the one that stands for it."""

    alone: frozenset[int]
    """The stand-ins that stand for one layer only; they know each other by their places."""

    @classmethod
    def all_of(cls, num_layers: int) -> "StandIns":
        """Record every layer."""
        every = range(num_layers)
        return cls(tuple(every), tuple(every), frozenset(every))

    @property
    def places(self) -> dict[int, int]:
        """Where each of those that stand alone is."""
        return {stand_in: place for place, stand_in in enumerate(self.of) if stand_in in self.alone}

    def shortened(self, num_layers: int) -> "StandIns":
        """Cut one run of layers, from a layer to the next of its stand-in: the shortest that leaves `num_layers` or
        fewer, else the longest. Layers that stand for themselves alone stay."""
        surplus = len(self.of) - num_layers
        cuts = [(max(surplus - (stop - start), 0), stop - start, start) for start, stop in self._cuts(surplus)]
        if surplus <= 0 or not cuts:
            return self
        _, length, start = min(cuts)
        return self._replace(of=self.of[:start] + self.of[start + length :])

    def _cuts(self, surplus: int) -> Iterator[tuple[int, int]]:
        """Yield for each layer the cut that begins with it and comes closest to `surplus` layers."""
        bounds = [-1, *sorted(self.places.values()), len(self.of)]
        for before, after in pairwise(bounds):
            places: dict[int, list[int]] = {}
            for place in range(before + 1, after):
                places.setdefault(self.of[place], []).append(place)
            for where in places.values():
                for start in where[:-1]:
                    nearest = bisect_left(where, start + max(surplus, 1))
                    yield start, where[min(nearest, len(where) - 1)]


def find_stand_ins(signatures: Sequence[object], *, num_last: int = 1) -> StandIns:
    """Choose the layers to record; `signatures` says of each layer what it is like.

    `num_last` layers at the end stand for themselves alone: one, or two where the gradient that enters the last layer
    is handed on differently (parallel residuals). Layers are left out between two where both sides see the signature
    next to them that they see in the stack; not between two that stand for themselves alone, which refer to each
    other by their places.
    """
    n = len(signatures)
    ends = {signature: place for place, signature in enumerate(signatures)}
    starts = {signature: n - 1 - place for place, signature in enumerate(reversed(signatures))}
    alone = {*range(min(_NUM_FIRST, n)), *range(max(n - num_last, 0), n), *ends.values(), *starts.values()}
    contexts: list[object] = [i if i in alone else tuple(signatures[i - 1 : i + 2]) for i in range(n)]
    counts = Counter(contexts)
    last_of = {context: place for place, context in enumerate(contexts)}
    recorded = [0]
    seen = {contexts[0]}
    while recorded[-1] < n - 1:
        here = recorded[-1]
        following = here + 1
        for place in range(here + 1, n):
            if place - 1 > here and contexts[place - 1] not in seen and last_of[contexts[place - 1]] < place:
                break
            is_alike = signatures[place - 1] == signatures[here] and signatures[place] == signatures[here + 1]
            are_alone = counts[contexts[here]] == counts[contexts[place]] == 1
            if is_alike and not (are_alone and place > here + 1):
                following = place
        recorded.append(following)
        seen.add(contexts[following])
    stand_in_of = {contexts[layer]: index for index, layer in reversed(list(enumerate(recorded)))}
    of = tuple(stand_in_of[context] for context in contexts)
    return StandIns(
        tuple(recorded), of, frozenset(i for i, layer in enumerate(recorded) if counts[contexts[layer]] == 1)
    )


class _Part(NamedTuple):
    """One recorded segment: births in order, deaths by the part, layer and index of the birth."""

    visit: int
    layer: int | None
    """Index of the recorded layer; None: outside the layers."""
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
    end: dict[str, int]
    """What is left at the program's end, by component."""


def _added(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    out = dict(a)
    for name, num_bytes in b.items():
        out[name] = out.get(name, 0) + num_bytes
    return out


class Recording(NamedTuple):
    """A recorded program, cut into parts; `expand` emits it for any number of layers."""

    parts: tuple[_Part, ...]
    stand_ins: StandIns
    kernels_run: frozenset[str]
    """Attention kernels that sdpa chose."""

    @classmethod
    def of(cls, tape: Tape, stand_ins: StandIns) -> "Recording":
        """Cut a finished tape."""
        return cls(tuple(_compile(tape)), stand_ins, frozenset(tape.kernels_run))

    @property
    def num_layers(self) -> int:
        """Number of layers that `expand` emits."""
        return len(self.stand_ins.of)

    @property
    def num_events(self) -> int:
        """Number of events that `expand` emits."""
        return sum(len(part.lines) for _, part in _in_order(self.parts, self.stand_ins))

    def shortened(self, num_events: int) -> "Recording":
        """Return the same program with so many layers less that about `num_events` are left."""
        outside = sum(len(part.lines) for part in self.parts if part.layer is None)
        num_layers = self.num_layers * max(num_events - outside, 0) // max(self.num_events - outside, 1)
        return self._replace(stand_ins=self.stand_ins.shortened(num_layers))

    def expand(self) -> Program:
        """Emit the events of all layers; sizes are rounded to the allocator's 512 bytes."""
        places = self.stand_ins.places
        events: list[tuple[int, int]] = []
        components: list[str] = []
        marks: list[int] = []
        phases: list[str] = []
        bases: dict[tuple[int, int | None], int] = {}
        for real, part in _in_order(self.parts, self.stand_ins):
            if not phases or part.phase != phases[-1]:
                if phases:
                    marks.append(len(events))
                phases.append(part.phase)
            bases[part.visit, real] = len(components)
            base = [bases[visit, _place(layer, part.layer, real, places)] for visit, layer in part.references]
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
        for _, part in _in_order(self.parts, self.stand_ins):
            high = live + part.highest_bytes
            phases[part.phase] = max(phases.get(part.phase, 0), high)
            if high > peak:
                peak, peak_phase = high, part.phase
                at_peak = _added(sums, part.sums(part.highest_at))
            if id(part) not in nets:
                nets[id(part)] = part.sums(len(part.moves))
            sums = _added(sums, nets[id(part)])
            live += part.net_bytes
        return Walk(peak, peak_phase, phases, at_peak, sums)

    def requested_peak(self) -> int:
        """Return the peak of requested bytes, without allocator, rounding or events: the walk for a search.

        A part is its net change and its highest point, so layers that repeat cost an addition each.
        """
        live = peak = 0
        for _, part in _in_order(self.parts, self.stand_ins):
            peak = max(peak, live + part.highest_bytes)
            live += part.net_bytes
        return peak


def _compile(tape: Tape) -> list[_Part]:
    """Cut the recording into parts; outside the layers one without events is left out, unless it begins a phase."""
    born: list[tuple[int, int | None, int]] = [(0, None, 0)] * len(tape.components)
    parts: list[_Part] = []
    visit, last = -1, None
    bounds = [segment.position for segment in tape.segments[1:]] + [len(tape.events)]
    for segment, end in zip(tape.segments, bounds, strict=True):
        key = (segment.kind, segment.phase) if segment.layer is not None else None
        if key is None or key != last:
            visit += 1
        last = key
        if segment.layer is None and segment.position == end and segment.kind != segment.phase:
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
            visit_born, layer_born, index = born[slot]
            lines.append((references.setdefault((visit_born, layer_born), len(references)), index, 0))
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


def _place(layer: int | None, here: int | None, real: int | None, places: dict[int, int]) -> int | None:
    """Say which layer of the stack the recorded `layer` is, seen from recorded layer `here` that stands for `real`."""
    if layer is None:
        return None
    if here is None or (here in places and layer in places):
        return places[layer]
    assert real is not None
    return real + layer - here


def _in_order(parts: Sequence[_Part], stand_ins: StandIns) -> list[tuple[int | None, _Part]]:
    """Pair each part with the layer it stands for: runs of recorded layers become runs of all layers."""
    out: list[tuple[int | None, _Part]] = []
    i = 0
    while i < len(parts):
        if parts[i].layer is None:
            out.append((None, parts[i]))
            i += 1
            continue
        stop = i
        while stop < len(parts) and parts[stop].visit == parts[i].visit:
            stop += 1
        group = parts[i:stop]
        by_layer = {part.layer: part for part in group}
        order: list[tuple[int | None, _Part]] = [
            (place, by_layer[stand_in]) for place, stand_in in enumerate(stand_ins.of) if stand_in in by_layer
        ]
        out += order if len(group) < 2 or (group[0].layer or 0) < (group[1].layer or 0) else order[::-1]
        i = stop
    return out
