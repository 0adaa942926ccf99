"""The frontier of sequence length against micro batch as an SVG that needs nothing else."""

from collections.abc import Iterator
from math import log2
from typing import TYPE_CHECKING

from foretune.pictures import COLORS, framed, label
from foretune.texts import text_of
from foretune.units import format_bytes

if TYPE_CHECKING:
    from foretune.api import Frontier
    from foretune.devices import DeviceSpec
    from foretune.models import ModelShape

__all__ = ["draw_frontier"]

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 76, 700, 84, 446
LINE_COLORS = {"lora": COLORS["weights"], "qlora": COLORS["activations"], "full": COLORS["gradients"]}


def draw_frontier(frontier: "Frontier", shape: "ModelShape", device: "DeviceSpec", stack: str) -> str:
    """Return the picture as the text of an SVG file; both axes are logarithmic."""
    lengths = [point.sequence_length for line in frontier.lines for point in line.points]
    shortest, longest = (min(lengths), max(lengths)) if lengths else (256, 512)
    most = max([point.micro_batch_size for line in frontier.lines for point in line.points], default=1)
    across, up = max(log2(longest / shortest), 1.0), max(log2(most), 1.0)

    def x(length: float) -> float:
        return LEFT + (RIGHT - LEFT) * log2(length / shortest) / across

    def y(rows: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * log2(rows) / up

    def axes() -> Iterator[str]:
        tick = 1
        while tick <= most:
            yield f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
            yield label(LEFT - 8, y(tick) + 4, f"{tick:,}", "dim", anchor="end")
            tick *= 2
        tick = 1 << (shortest - 1).bit_length()
        while tick <= longest:
            yield f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" y2="{BOTTOM}"/>'
            name = f"{tick // 1024:,}k" if tick >= 1024 else f"{tick:,}"
            yield label(x(tick), BOTTOM + 18, name, "dim", anchor="middle")
            tick *= 2
        yield label((LEFT + RIGHT) / 2, BOTTOM + 40, "tokens a row", "dim", anchor="middle")
        yield label(8, TOP - 12, "rows at once", "dim")

    def lines() -> Iterator[str]:
        for number, line in enumerate(frontier.lines):
            color, points = LINE_COLORS[line.method], line.points
            corners = " ".join(f"{x(p.sequence_length):.1f},{y(p.micro_batch_size):.1f}" for p in points)
            yield f'<polyline fill="none" stroke="{color}" stroke-width="2.5" points="{corners}"/>'
            for p in points:
                tip = f"{line.method}: {p.micro_batch_size:,} x {p.sequence_length:,} tokens, "
                tip += f"needs {format_bytes(p.need_bytes)}"
                place = f'cx="{x(p.sequence_length):.1f}" cy="{y(p.micro_batch_size):.1f}" r="4"'
                yield f'<circle fill="{color}" {place}><title>{text_of(tip)}</title></circle>'
            at = TOP + 6 + 22 * number
            yield f'<line stroke="{color}" stroke-width="2.5" x1="{RIGHT + 20}" x2="{RIGHT + 42}" y1="{at}" y2="{at}"/>'
            reach = f"{line.method}: to {points[-1].sequence_length:,}" if points else f"{line.method}: does not fit"
            yield label(RIGHT + 50, at + 4, reach)

    title = f"{shape.id}: what fits (estimated)"
    card = f"{device.name}, {format_bytes(device.total_bytes)}"
    subtitle = f"{card}; each method in its way that needs least, to {frontier.most_rows} rows; stack {stack}"
    described = ". ".join(
        f"{line.method}: "
        + ", ".join(f"{p.micro_batch_size} rows of {p.sequence_length:,} tokens" for p in line.points)
        for line in frontier.lines
    )
    body = "\n".join([label(LEFT, 28, title, "head"), label(LEFT, 48, subtitle, "dim"), *axes(), *lines()])
    return framed(body, width=WIDTH, height=HEIGHT, title=title, description=described)
