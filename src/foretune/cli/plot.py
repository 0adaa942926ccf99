"""A fine-tune's program as a picture: memory by component over the step, as an SVG that needs nothing else.

Widths follow the cube root of a phase's events, so that a short phase can be seen beside a long one.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from foretune.cli.drawing import LATER
from foretune.memory.words import words_of
from foretune.pictures import COLORS, STACKED, framed, label
from foretune.texts import text_of
from foretune.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from foretune.api import EstimateAnswer, Fit, MemoryEstimate, Timeline, TrainingConfig

__all__ = ["draw_plot"]

WIDTH, HEIGHT = 960, 520
LEFT, RIGHT, TOP, BOTTOM = 76, 716, 84, 446
LETTER = 6.4
"""Width of a letter of 12 px, about."""
NUM_TICKS = 6
FARTHEST = 2.2
"""A line this many times above the program is named at the upper edge instead of drawn."""

SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "opt", "prepare": "prep"}


class _Shown(NamedTuple):
    """What the picture shows of an answer."""

    config: "TrainingConfig"
    estimate: "MemoryEstimate"
    fit: "Fit | None"


class _Scale(NamedTuple):
    """From positions and bytes to the picture."""

    edges: tuple[tuple[int, float], ...]
    """First positions of the phases and where they stand; last the end of the program."""
    top_bytes: int

    def x(self, position: float) -> float:
        """Where an event stands."""
        start, left = self.edges[0]
        for stop, right in self.edges[1:]:
            if position <= stop:
                return left + (right - left) * (position - start) / max(stop - start, 1)
            start, left = stop, right
        return left

    def y(self, num_bytes: float) -> float:
        """How high a number of bytes stands."""
        return BOTTOM - (BOTTOM - TOP) * num_bytes / self.top_bytes


def draw_plot(answer: "EstimateAnswer", timeline: "Timeline") -> str:
    """Return the picture of an estimate or a trace as the text of an SVG file; the answer must have figures."""
    assert answer.estimate is not None
    shown = _Shown(answer.config, answer.estimate, answer.fit)
    scale = _scale(shown, timeline)
    parts = [
        *_bands(timeline, scale),
        *_grid(scale),
        *_areas(timeline, scale),
        *_reserved(shown, timeline, scale),
        *_levels(shown, scale),
        *_peak(shown, timeline, scale),
        *_headings(shown, timeline, scale),
        *_legend(shown),
    ]
    return framed("\n".join(parts), width=WIDTH, height=HEIGHT, title=_title(shown), description=_description(shown))


def _scale(shown: _Shown, timeline: "Timeline") -> _Scale:
    widths = [(band.stop - band.start) ** (1 / 3) for band in timeline.bands]
    edges, x = [(timeline.bands[0].start, float(LEFT))], float(LEFT)
    for band, width in zip(timeline.bands, widths, strict=True):
        x += (RIGHT - LEFT) * width / sum(widths)
        edges.append((band.stop, x))
    highest = max(shown.estimate.reserved_bytes, 1)
    near = [level for level, _, _ in _marked(shown) if level <= highest * FARTHEST]
    return _Scale(tuple(edges), int(max([highest, *near]) * 1.12))


def _marked(shown: _Shown) -> list[tuple[int, str, str]]:
    """Levels to mark, where a device was given: bytes, class and name."""
    fit = shown.fit
    if fit is None:
        return []
    name, has, need = fit.device.name, format_bytes(fit.budget_bytes), shown.estimate.need_bytes
    card = name if has in name else f"{name}: {has}"
    return [
        (fit.budget_bytes, "card", f"{has} free on {name}" if fit.budget_is == "free now" else card),
        (need, "need", f"need, with context and margin: {format_bytes(need)}"),
    ]


# -- the layers of the picture


def _bands(timeline: "Timeline", scale: _Scale) -> Iterator[str]:
    for number, band in enumerate(timeline.bands):
        left, right = scale.x(band.start), scale.x(band.stop)
        name = band.phase.removesuffix(LATER)
        place = f'x="{left:.1f}" y="{TOP - 18}" width="{right - left:.1f}" height="{BOTTOM - TOP + 18}"'
        tip = f"<title>{text_of(band.phase)}: {band.stop - band.start:,} events</title>"
        yield f'<rect class="{"paper" if number % 2 else "band"}" {place}>{tip}</rect>'
        for text in (name, SHORT.get(name, name)):
            if right - left >= LETTER * len(text) + 4:
                yield label((left + right) / 2, TOP - 5, text, "dim", anchor="middle")
                break


def _grid(scale: _Scale) -> Iterator[str]:
    unit, name = (GIB, "GiB") if scale.top_bytes >= GIB else (MIB, "MiB")
    step = _nice(scale.top_bytes / unit / NUM_TICKS)
    for number in range(int(scale.top_bytes / unit / step) + 1):
        y = scale.y(number * step * unit)
        yield f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield label(LEFT - 8, y + 4, f"{number * step:,.10g} {name}", "dim", anchor="end")


def _nice(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** (len(f"{int(least)}") - 1) if least >= 1 else 0.1 if least > 0.1 else 0.01
    return next((factor * power for factor in (1, 2, 5) if factor * power >= least), 10 * power)


def _areas(timeline: "Timeline", scale: _Scale) -> Iterator[str]:
    """Stack the components. A moment is a pixel wide, the highest of those that fall into it: a peak may be one event
    of a hundred thousand."""
    index = {name: number for number, name in enumerate(timeline.components)}
    highest: dict[int, tuple[int, ...]] = {}
    for position, column in zip(timeline.positions, timeline.columns, strict=True):
        pixel = int(scale.x(position))
        if pixel not in highest or sum(column) > sum(highest[pixel]):
            highest[pixel] = column
    xs = [min(x, RIGHT) for pixel in highest for x in (pixel, pixel + 1)]
    columns = [column for column in highest.values() for _ in range(2)]
    below = [0] * len(xs)
    for name in STACKED:
        above = [base + column[index[name]] for base, column in zip(below, columns, strict=True)]
        if above != below:
            line = [(x, scale.y(value)) for x, value in zip(xs, above, strict=True)]
            back = [(x, scale.y(value)) for x, value in zip(xs, below, strict=True)]
            points = " ".join(f"{x},{y:.1f}" for x, y in [*line, *reversed(back)])
            yield f'<polygon fill="{COLORS[name]}" points="{points}"><title>{name}</title></polygon>'
        below = above


def _reserved(shown: _Shown, timeline: "Timeline", scale: _Scale) -> Iterator[str]:
    peaks = {phase.phase: phase.reserved_bytes for phase in shown.estimate.phases}
    corners = [
        f"{scale.x(edge):.1f},{scale.y(peaks[band.phase]):.1f}"
        for band in timeline.bands
        for edge in (band.start, band.stop)
    ]
    title = f"{_levels_of(shown)[1]}, peak of each phase"
    yield f'<polyline class="line" points="{" ".join(corners)}"><title>{title}</title></polyline>'


def _levels(shown: _Shown, scale: _Scale) -> Iterator[str]:
    """Draw the card and the need as lines, a far one as a word at the upper edge."""
    num_above, marked = 0, _marked(shown)
    for level, name, text in marked:
        y = scale.y(level)
        if y < TOP:
            yield label(LEFT + 8, TOP + 16 + 16 * num_above, f"above: {text}", "halo")
            num_above += 1
            continue
        yield f'<line class="{name}" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        is_below_another = any(0 < y - scale.y(other) < 20 for other, _, _ in marked)
        y += 15 if is_below_another else -5  # outside of the two lines, which may lie close together
        x, anchor = (LEFT + 8, "start") if name == "card" else (RIGHT - 8, "end")
        yield label(x, y, text, "halo", anchor=anchor)


def _peak(shown: _Shown, timeline: "Timeline", scale: _Scale) -> Iterator[str]:
    position, num_bytes = timeline.peak
    x, y = scale.x(position), scale.y(num_bytes)
    yield f'<circle class="line" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    text = f"peak {format_bytes(shown.estimate.allocated_bytes)}"
    lines = [shown.estimate.reserved_bytes, *(level for level, _, _ in _marked(shown))]
    is_crowded = any(y - 24 < scale.y(line) <= y for line in lines)
    is_right = x > (LEFT + RIGHT) / 2
    place = (x - 8 if is_right else x + 8), (y + 14 if is_crowded else y - 6)
    yield label(*place, text, "halo", anchor="end" if is_right else "start")


def _headings(shown: _Shown, timeline: "Timeline", scale: _Scale) -> Iterator[str]:
    yield label(LEFT, 28, _title(shown), "head")
    yield label(LEFT, 48, _subtitle(shown), "dim")
    groups: dict[str, list[float]] = {}
    for band in timeline.bands:
        groups.setdefault(_part(band.phase), []).extend((scale.x(band.start), scale.x(band.stop)))
    for name, xs in groups.items():
        left, right = min(xs), max(xs)
        line = f'x1="{left + 1:.1f}" x2="{right - 1:.1f}" y1="{BOTTOM + 6}" y2="{BOTTOM + 6}"'
        yield f'<line class="line" {line}/>'
        if right - left >= LETTER * len(name):
            yield label((left + right) / 2, BOTTOM + 24, name, "", anchor="middle")
    text = f"{timeline.bands[-1].stop:,} allocations and frees in program order; not to the scale of time"
    yield label((LEFT + RIGHT) / 2, BOTTOM + 48, text, "dim", anchor="middle")


def _part(phase: str) -> str:
    if phase in ("load", "prepare"):
        return "before"
    return "second update" if phase.endswith(LATER) else "first update"


def _legend(shown: _Shown) -> Iterator[str]:
    """Name the colours from the top of the stack down, with what each holds at the peak."""
    sums = {part.name: part.num_bytes for part in shown.estimate.components}
    x, y = RIGHT + 20, TOP + 4
    yield label(x, y - 12, f"at the peak ({shown.estimate.kind})", "dim")
    y += 8
    for name in reversed(STACKED):
        yield f'<rect x="{x}" y="{y - 9}" width="11" height="11" fill="{COLORS[name]}"/>'
        yield label(x + 18, y, name)
        yield label(WIDTH - 16, y, format_bytes(sums[name]), anchor="end")  # type: ignore[index]
        y += 20
    if "allocator slack" in sums:
        yield label(x + 18, y, "allocator slack")
        yield label(WIDTH - 16, y, format_bytes(sums["allocator slack"]), anchor="end")
    y += 26
    needed = shown.estimate
    allocated, reserved = _levels_of(shown)
    for text, num_bytes in ((allocated, needed.allocated_bytes), (reserved, needed.reserved_bytes)):
        if text == reserved:
            yield f'<line class="line" x1="{x}" x2="{x + 12}" y1="{y - 4}" y2="{y - 4}"/>'
        yield label(x + 18, y, text)
        yield label(WIDTH - 16, y, format_bytes(num_bytes), anchor="end")
        y += 20


# -- words


def _levels_of(shown: _Shown) -> tuple[str, str]:
    """What the two levels are called."""
    words = words_of(shown.estimate)
    return words.allocated, words.reserved


def _title(shown: _Shown) -> str:
    needed, (allocated, _) = shown.estimate, _levels_of(shown)
    size = format_bytes(needed.allocated_bytes)
    return f"{needed.model}, {needed.method}: {size} {allocated} at the peak ({needed.kind})"


def _subtitle(shown: _Shown) -> str:
    batch, config = shown.config.batch, shown.config
    parts = [config.precision.dtype, f"{batch.micro_batch_size:,} x {batch.sequence_length:,} tokens"]
    parts += [config.optimizer.name, f"{shown.estimate.attention_kernel.replace(':', '')} attention"]
    parts += [f"{config.loss} loss", "recomputed activations" if config.gradient_checkpointing else "kept activations"]
    return ", ".join(parts)


def _description(shown: _Shown) -> str:
    """Say in words what the picture shows."""
    needed = shown.estimate
    parts = sorted(needed.components, key=lambda part: -part.num_bytes)
    shares = ", ".join(f"{part.name} {format_bytes(part.num_bytes)}" for part in parts if part.num_bytes)
    marks = "".join(f" {text}." for _, _, text in _marked(shown))
    held = "The process grows by" if shown.config.device == "cpu" else "Reserved"
    return (
        f"Memory over one fine-tune from loading to the second update, {needed.kind}. The peak lies in "
        f"{needed.peak_phase}: {shares}. {held} at most {format_bytes(needed.reserved_bytes)}.{marks}"
    )
