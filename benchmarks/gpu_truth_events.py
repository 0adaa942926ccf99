"""The allocator's events of a measured run beside those of its trace: where they differ, and by what.

An event is (slot, size) as in `foretune.memory.allocator`; sizes are rounded to the allocator's 512 B.
"""

import base64
import json
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from foretune.memory.allocator import EMPTY_CACHE, Events, Replay, replay, round_size
from foretune.memory.expandable import replay_expandable

__all__ = ["ACTIONS", "compare", "packed", "packed_text", "replayed", "unpacked", "unpacked_text"]

ACTIONS = {
    "alloc": "A",
    "free_requested": "R",
    "free_completed": "F",
    "segment_alloc": "S",
    "segment_free": "s",
    "segment_map": "M",
    "segment_unmap": "m",
    "oom": "O",
}
"""One letter for each action of torch's memory history; others are `?`."""
NUM_SHOWN, NUM_AROUND = 30, 4
MAX_MATCHED = 12_000
"""Longer stretches are compared as bags of sizes: difflib takes quadratic time."""


def packed(numbers: Iterable[int]) -> str:
    """Whole numbers as text: 64 bits each, compressed."""
    return base64.b64encode(zlib.compress(array("q", numbers).tobytes(), 9)).decode()


def unpacked(text: str) -> list[int]:
    """The numbers again."""
    return array("q", zlib.decompress(base64.b64decode(text))).tolist()


def packed_text(texts: Sequence[str]) -> str:
    """A list of texts, compressed."""
    return base64.b64encode(zlib.compress(json.dumps(texts).encode(), 9)).decode()


def unpacked_text(text: str) -> list[str]:
    """The texts again."""
    found: list[str] = json.loads(zlib.decompress(base64.b64decode(text)))
    return found


class Side(NamedTuple):
    """A run: its events, where phases begin, and what each slot is."""

    events: Events
    marks: tuple[int, ...]
    phases: tuple[str, ...]
    names: list[str]


class Stretch(NamedTuple):
    """One phase of both runs as signed sizes, and the slots behind them."""

    phase: str
    sizes: tuple[list[int], list[int]]
    slots: tuple[list[int], list[int]]


def replayed(events: Events, marks: Sequence[int], *, is_expandable: bool) -> Replay:
    """Replay through the model of the allocator that was in use."""
    return (replay_expandable if is_expandable else replay)(events, marks)


def measured_side(record: dict[str, Any]) -> Side:
    """Read torch's history. A phase ends where its counts of allocations and frees are reached."""
    actions, sizes, addresses = (unpacked(record[key]) for key in ("actions", "sizes", "addresses"))
    stacks, stack_of = unpacked_text(record["stacks"]), iter(unpacked(record["stack_of"]))
    events: Events = []
    names: list[str] = []
    slots: dict[int, int] = {}
    emptied_at = record["emptied_at"]
    for action, size, address in zip(actions, sizes, addresses, strict=True):
        if len(events) == emptied_at:
            events.append(EMPTY_CACHE)
        if action == ord("A"):
            slots[address] = len(names)
            events.append((len(names), round_size(size)))
            names.append(stacks[next(stack_of)])
        elif action == ord("F") and address in slots:
            events.append((slots.pop(address), 0))
    # The first phase is over when the second ends with an emptied cache.
    ends = [min(phase["num_events"] + (i > 0), len(events)) for i, phase in enumerate(record["phases"])]
    return Side(events[: ends[-1]], tuple(ends[:-1]), tuple(phase["phase"] for phase in record["phases"]), names)


def traced_side(record: dict[str, Any]) -> Side:
    """Read a trace's program."""
    slots, sizes, names = unpacked(record["slots"]), unpacked(record["sizes"]), unpacked_text(record["names"])
    phases = record["phases"]
    marks = tuple(phase["num_events"] for phase in phases[:-1])
    kinds = unpacked(record["kinds"])
    events = list(zip(slots, sizes, strict=True))
    return Side(events, marks, tuple(phase["phase"] for phase in phases), [names[kind] for kind in kinds])


def stretches(measured: Side, traced: Side) -> list[Stretch]:
    """Cut both runs into their phases; into one stretch where they do not have the same."""
    sides = (measured, traced)
    if measured.phases != traced.phases:
        cuts = [[(0, len(side.events))] for side in sides]
        names: tuple[str, ...] = ("whole",)
    else:
        names = measured.phases
        cuts = [list(zip((0, *side.marks), (*side.marks, len(side.events)), strict=True)) for side in sides]
    signed = [_signed(side.events) for side in sides]
    made = []
    for name, one, other in zip(names, *cuts, strict=True):
        parts = [
            [pair for pair in events[first:last] if pair[0]]
            for events, (first, last) in zip(signed, (one, other), strict=True)
        ]
        sizes, slots = ([[pair[i] for pair in part] for part in parts] for i in (0, 1))
        made.append(Stretch(name, (sizes[0], sizes[1]), (slots[0], slots[1])))
    return made


def _signed(events: Events) -> list[tuple[int, int]]:
    """Sizes of births, negative ones of deaths, each with its slot; an emptied cache is 0."""
    born: dict[int, int] = {}
    made = []
    for slot, size in events:
        if size > 0:
            born[slot] = size
        made.append((0 if slot < 0 else size or -born[slot], slot))
    return made


class Difference(NamedTuple):
    """Events first..last of the measured stretch stand where first..last of the traced one do."""

    measured: tuple[int, int]
    traced: tuple[int, int]

    @property
    def num_events(self) -> int:
        """How many events differ."""
        return max(self.measured[1] - self.measured[0], self.traced[1] - self.traced[0])


def differences(measured: list[int], traced: list[int]) -> list[Difference]:
    """Where two lists of sizes differ; what they share at both ends is set aside first."""
    start, most = 0, min(len(measured), len(traced))
    while start < most and measured[start] == traced[start]:
        start += 1
    end = 0
    while end < most - start and measured[-1 - end] == traced[-1 - end]:
        end += 1
    one, other = measured[start : len(measured) - end], traced[start : len(traced) - end]
    if not one and not other:
        return []
    if len(one) + len(other) > MAX_MATCHED:
        return [Difference((start, len(measured) - end), (start, len(traced) - end))]
    codes = SequenceMatcher(None, one, other, autojunk=False).get_opcodes()
    return [Difference((start + i, start + j), (start + k, start + m)) for tag, i, j, k, m in codes if tag != "equal"]


def lacking(parts: list[Stretch], found: list[list[Difference]], side: int, names: list[str]) -> list[Any]:
    """The largest births of one side (0: measured) that the other lacks: size, phase, what it is."""
    rows = []
    for part, differing in zip(parts, found, strict=True):
        ours: Counter[int] = Counter()
        theirs: Counter[int] = Counter()
        places: dict[int, list[int]] = {}
        for difference in differing:
            pair = (difference.measured, difference.traced)
            for position in range(*pair[side]):
                size = part.sizes[side][position]
                if size > 0:
                    ours[size] += 1
                    places.setdefault(size, []).append(part.slots[side][position])
            theirs.update(size for size in part.sizes[1 - side][slice(*pair[1 - side])] if size > 0)
        # What only stands elsewhere in the phase is not lacking.
        for size, count in (ours - theirs).items():
            rows += [(size, part.phase, names[slot]) for slot in places[size][:count]]
    rows.sort(key=lambda row: -row[0])
    return [list(row) for row in rows[:NUM_SHOWN]]


def first_difference(
    parts: list[Stretch], found: list[list[Difference]], names: tuple[list[str], list[str]]
) -> tuple[str | None, list[str]]:
    """Say in words what comes first, and list what stands around it."""
    for part, differing in zip(parts, found, strict=True):
        if not differing:
            continue
        first = differing[0]
        starts = first.measured[0], first.traced[0]
        heads = []
        for side, position in enumerate(starts):
            sizes = part.sizes[side]
            heads.append(f"{sizes[position]:,}" if position < len(sizes) else "the phase's end")
        around = []
        for offset in range(-NUM_AROUND, 2 * NUM_AROUND):
            cells = [_cell(part, side, starts[side] + offset, names[side]) for side in (0, 1)]
            around.append(f"{'>' if offset == 0 else ' '} {cells[0]:75} | {cells[1]}")
        return f"{part.phase} {starts[0]:,}: {heads[0]} measured, {heads[1]} traced", around
    return None, []


def _cell(part: Stretch, side: int, position: int, names: list[str]) -> str:
    if not 0 <= position < len(part.sizes[side]):
        return ""
    name = names[part.slots[side][position]]
    return f"{part.sizes[side][position]:,} {name if len(name) < 60 else name[:57] + '...'}"


def compare(measured: dict[str, Any], traced: dict[str, Any], *, is_expandable: bool) -> dict[str, Any]:
    """Hold a measured run beside its trace: peaks, phases, and events."""
    one, other = measured_side(measured), traced_side(traced)
    parts = stretches(one, other)
    found = [differences(*part.sizes) for part in parts]
    names = one.names, other.names
    first, around = first_difference(parts, found, names)
    model = replayed(one.events, one.marks, is_expandable=is_expandable)
    return {
        "measured_allocated_bytes": max(phase["allocated_peak_bytes"] for phase in measured["phases"]),
        "traced_allocated_bytes": traced["allocated_bytes"],
        "measured_reserved_bytes": max(phase["reserved_peak_bytes"] for phase in measured["phases"]),
        "traced_reserved_bytes": traced["reserved_bytes"],
        "replayed_allocated_bytes": model.allocated_peak,
        "replayed_reserved_bytes": model.reserved_peak,
        "context_bytes": measured["context_bytes"],
        "num_events": len(one.events),
        "num_different": sum(difference.num_events for part in found for difference in part),
        "first_difference": first,
        "around": around,
        "phases": _phases(measured, traced, model, found),
        "lacking_in_trace": lacking(parts, found, 0, one.names),
        "lacking_in_measured": lacking(parts, found, 1, other.names),
    }


def _phases(
    measured: dict[str, Any], traced: dict[str, Any], model: Replay, found: list[list[Difference]]
) -> list[dict[str, Any]]:
    """Peaks and ends of each phase, measured, traced, and by the allocator's model on the measured events."""
    if [p["phase"] for p in measured["phases"]] != [p["phase"] for p in traced["phases"]]:
        return []
    rows = []
    for one, other, phase, differing in zip(measured["phases"], traced["phases"], model.phases, found, strict=True):
        row: dict[str, Any] = {"phase": one["phase"]}
        for key in ("allocated_peak_bytes", "reserved_peak_bytes", "allocated_end_bytes", "reserved_end_bytes"):
            row[f"measured_{key}"], row[f"traced_{key}"] = one[key], other[key]
        row["replayed_reserved_peak_bytes"] = phase.reserved_peak
        row["num_different"] = sum(difference.num_events for difference in differing)
        rows.append(row)
    return rows
