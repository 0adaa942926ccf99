"""A run as a notebook shows it: how it ended, and what was measured beside what was predicted."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from foretune.memory.words import need_sentence
from foretune.pictures import Html, Mark, Part, card, figures_table, folded, memory_bar, paragraph
from foretune.units import format_bytes

if TYPE_CHECKING:
    from foretune.evidence.record import PhasePair, RunRecord

__all__ = ["show_record"]


def show_record(record: "RunRecord") -> str:
    """Return a record as HTML that stands alone."""
    config = record.requested
    device = "" if record.hardware is None else f" on {record.hardware.device}"
    title = f"{config.model.id}: {record.kind}, {config.method}{device}: {record.outcome}"
    return card(title, *map(paragraph, _facts(record)), *_memory(record), *_more(record))


def _facts(record: "RunRecord") -> Iterator[str]:
    ended = "" if record.finished_at is None else f", ended {record.finished_at}"
    yield f"Begun {record.started_at}{ended}."
    scope = record.scope
    if scope is not None:
        rate = scope.tokens_per_second
        speed = "" if rate is None else f", {rate:,.0f} tokens/s without padding (measured)"
        yield f"{scope.updates_done:,} of {scope.num_updates:,} updates, {scope.num_tokens:,} tokens{speed}."
        if scope.first_loss is not None and scope.last_loss is not None:
            yield f"Loss of the first update {scope.first_loss:.4f}, of the last {scope.last_loss:.4f}."
    if record.evaluations:
        last = record.evaluations[-1]
        yield f"Held-out loss {last.loss:.4f} after update {last.update:,}."
    if record.failure is not None:
        yield f"Failed: {record.failure.message}"


def _memory(record: "RunRecord") -> Iterator[str]:
    peak = record.peak_pair
    if peak is None:
        yield paragraph("Memory was not measured.")
        if record.prediction is not None:
            yield paragraph(f"Predicted: {need_sentence(record.prediction, None)}")
        return
    pairs = [*record.phase_pairs, peak]
    top = max(size for pair in pairs for size in (pair.measured_bytes, pair.predicted_bytes) if size is not None)
    kind = "unknown" if record.prediction is None else record.prediction.kind
    what = "Growth of the process" if record.is_on_host else "Allocated"
    caption = f"{what}, peak of each phase; bar: measured, line across: predicted"
    headings = ("phase", "measured", f"predicted ({kind})", "")
    yield figures_table(caption, headings, [_row(pair, top, kind) for pair in pairs])


def _row(pair: "PhasePair", top_bytes: int, kind: str) -> tuple[str | Html, ...]:
    assert pair.measured_bytes is not None
    measured = format_bytes(pair.measured_bytes)
    predicted = "-" if pair.predicted_bytes is None else format_bytes(pair.predicted_bytes)
    marks = () if pair.predicted_bytes is None else (Mark(f"predicted ({kind})", pair.predicted_bytes),)
    bar = memory_bar(
        [Part("measured", pair.measured_bytes)],
        title=f"{pair.phase}: {measured} measured",
        description=f"{measured} measured, {predicted} predicted ({kind})",
        marks=marks,
        top_bytes=top_bytes,
    )
    return pair.phase, measured, predicted, Html(f'<div style="width:10em;max-width:20vw">{bar}</div>')


def _more(record: "RunRecord") -> Iterator[str]:
    if record.checks:
        failed = [check for check in record.checks if not check.holds]
        yield paragraph(
            f"Verified: {len(record.checks):,} checks of requested against effective, {len(failed):,} differ."
        )
    if record.warnings:
        yield folded("To know", *map(paragraph, record.warnings))
