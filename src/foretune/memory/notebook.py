"""An answer as a notebook shows it: a bar of what the need consists of, held against the device, and its figures."""

from collections.abc import Iterator, Sequence

from foretune.memory.answer import Fit, MemoryEstimate
from foretune.memory.words import interval_text, need_sentence, words_of
from foretune.pictures import STACKED, Mark, Part, card, figures_table, folded, legend, memory_bar, paragraph
from foretune.units import format_bytes

__all__ = ["need_bar", "show_estimate"]

SLACK = "allocator slack"


def show_estimate(
    needed: MemoryEstimate, fit: Fit | None = None, *, title: str | None = None, remarks: Sequence[str] = ()
) -> str:
    """Return HTML that stands alone. `title` replaces model and method."""
    parts = need_parts(needed)
    pieces = [
        paragraph(need_sentence(needed, fit)),
        need_bar(needed, fit),
        legend(parts),
        paragraph(_below(needed, fit)),
        *(paragraph(text) for text in remarks),
        folded("Figures", _figures(needed, parts), _phases(needed)),
    ]
    notes = [*needed.assumptions, *(f"Not tested against a measurement: {path}" for path in needed.untested_paths)]
    if notes:
        pieces.append(folded("Assumed", *(paragraph(text) for text in notes)))
    return card(title or f"{needed.model}: {needed.method}", *pieces)


def need_parts(needed: MemoryEstimate) -> list[Part]:
    """Return of what the need consists, in the order of every picture; together they are the need."""
    sizes: dict[str, int] = {part.name: part.num_bytes for part in needed.components}
    parts = [Part(name, sizes[name]) for name in (*STACKED, SLACK) if sizes.get(name)]
    beside = "process beside tensors" if needed.is_of_host else words_of(needed).held
    rest = [
        (beside, needed.reserved_bytes - needed.allocated_bytes),
        ("context", needed.context.high_bytes),
        ("safety margin", needed.safety_margin_bytes),
    ]
    return [*parts, *(Part(name, size) for name, size in rest if size > 0)]


def need_bar(needed: MemoryEstimate, fit: Fit | None) -> str:
    """Return the bar: the parts of the need, the interval of the process, and what the device has."""
    parts = need_parts(needed)
    described = ", ".join(f"{part.name} {format_bytes(part.num_bytes)}" for part in parts)
    process = needed.process_interval
    return memory_bar(
        parts,
        title=f"Memory of {needed.model}, {needed.method} ({needed.kind}): needs {format_bytes(needed.need_bytes)}",
        description=f"{described}. {_below(needed, fit)}",
        marks=_marks(fit),
        interval=(process.low_bytes, process.high_bytes),
    )


def _marks(fit: Fit | None) -> list[Mark]:
    if fit is None:
        return []
    device = fit.device
    whole = Mark(device.name, device.total_bytes)
    if fit.budget_bytes == device.total_bytes:
        return [whole]
    return [Mark(f"{fit.budget_is} on {device.name}", fit.budget_bytes), whole._replace(is_dashed=True)]


def _below(needed: MemoryEstimate, fit: Fit | None) -> str:
    """Say what the lines of the bar are."""
    lines = "; dashed: ".join(f"{mark.name}, {format_bytes(mark.num_bytes)}" for mark in _marks(fit))
    line = f" The line across: {lines}." if lines else ""
    return f"Below the bar, where the process lies: {interval_text(needed.process_interval)} ({needed.kind}).{line}"


def _figures(needed: MemoryEstimate, parts: Sequence[Part]) -> str:
    words = words_of(needed)
    rows = [*parts, Part(words.allocated, needed.allocated_bytes), Part(words.reserved, needed.reserved_bytes)]
    rows += [Part("process", needed.process_bytes)] * (not needed.is_of_host) + [Part("need", needed.need_bytes)]
    caption = f"At the peak, in {needed.peak_phase} ({needed.kind})"
    return figures_table(caption, ("", "size", "bytes"), _rows(rows))


def _rows(parts: Sequence[Part]) -> Iterator[tuple[str, str, str]]:
    for part in parts:
        yield part.name, format_bytes(part.num_bytes), f"{part.num_bytes:,}"


def _phases(needed: MemoryEstimate) -> str:
    words = words_of(needed)
    rows = [
        (phase.phase, format_bytes(phase.allocated_bytes), format_bytes(phase.reserved_bytes))
        for phase in needed.phases
    ]
    return figures_table(f"Peaks of the phases ({needed.kind})", ("phase", words.allocated, words.reserved), rows)
