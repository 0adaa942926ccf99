"""`foretune score`: predictions held against published measurements."""

import gc
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from foretune.cli.commands import Choice, Command, Example, Whole, option
from foretune.cli.output import Reply
from foretune.cli.terminal import Heading, Terminal, escape, standard_streams, table, wrapped
from foretune.units import format_bytes

if TYPE_CHECKING:
    from foretune.api import Prediction, Refusal, ScoreReport
    from foretune.evidence import SummaryLine

__all__ = ["score"]

EXAMPLES = [
    Example("How far are estimates from what was measured?", "foretune score"),
    Example("Row by row, for a program", "foretune score --rows --json"),
]


@click.command(cls=Command, name="score", examples=EXAMPLES)
@click.argument("file", required=False, metavar="[FILE]", type=click.Path())
@option(
    "--engine",
    group="Answer",
    type=Choice(["estimated", "traced"]),
    default="estimated",
    metavar="NAME",
    help="estimated, or traced: the real program, which takes seconds a row.  [default: estimated]",
)
@option("--rows", group="Answer", is_flag=True, help="Show each row: predicted, measured, error, stack.")
@option(
    "--workers",
    group="Answer",
    type=Whole(1, 256),
    default=1,
    metavar="N",
    help="Answer in so many processes.  [default: 1]",
)
def score(file: str | None, engine: Any, rows: bool, workers: int) -> Reply:
    """Predict published measurements, and show how far off the predictions are.

    FILE holds one observation a line, a JSON object (docs/observations.md); without it the observations of the project
    are taken. Rows that ran on a stack no profile describes are predicted on the nearest one, and stand apart as
    foreign. Rows that are not predicted are counted with the reason.
    """
    from foretune import api

    gc.enable()  # off for commands of one answer; here are hundreds
    report = api.report_of(_watched(api.score(file, engine=engine, workers=workers)), engine)
    return Reply("score", lambda: _document(report, rows=rows), lambda terminal: _draw(report, terminal, rows=rows))


def _watched(scored: "Iterable[Prediction | Refusal]") -> "Iterator[Prediction | Refusal]":
    """Count the rows on a terminal's stderr while they are answered."""
    stderr = standard_streams()[1]
    is_terminal = bool(stderr.isatty())
    for number, row in enumerate(scored, start=1):
        if is_terminal:
            stderr.write(f"\r{number:,} rows")
            stderr.flush()
        yield row
    if is_terminal:
        stderr.write("\r\x1b[K")


def _document(report: "ScoreReport", *, rows: bool) -> dict[str, Any]:
    document = report.to_dict()
    if not rows:
        del document["predictions"]
    return document


def _draw(report: "ScoreReport", terminal: Terminal, *, rows: bool) -> Iterator[str]:
    title = f"{report.rows:,} rows: {len(report.predictions):,} predicted, {len(report.refused):,} refused"
    yield terminal.paint(title, "bold")
    if rows:
        yield from (_row(prediction) for prediction in report.predictions)
        yield from (f"{escape(refusal.id)}  refused: {escape(refusal.reason)}" for refusal in report.refused)
    yield ""
    yield from _summary(report, terminal)
    for outcome, words in (("ok", "runs that succeeded"), ("oom", "runs that ran out of memory")):
        counts = report.verdicts.get(outcome)
        if counts:
            shown = ", ".join(f"{verdict} {count:,}" for verdict, count in sorted(counts.items()))
            yield from wrapped(f"Verdicts on {sum(counts.values()):,} {words}: {shown}.", terminal)
    if report.refused:
        yield ""
        yield terminal.paint("Refused", "bold")
        for reason, count in report.reasons.items():
            yield from wrapped(escape(reason), terminal, bullet=f"{count:>6,}  ")


def _row(prediction: "Prediction") -> str:
    """Write a row on one line."""
    from foretune.evidence import METRICS

    parts = [escape(prediction.id)]
    for metric in METRICS:
        measured, error = getattr(prediction.measured, metric), prediction.error_percent(metric)
        if measured is not None:
            predicted = format_bytes(getattr(prediction, f"{metric}_bytes"))
            parts.append(f"{metric} {predicted} of {format_bytes(measured)} ({error:+.2f} %)")
    if len(parts) == 1:
        parts.append(f"allocated {format_bytes(prediction.allocated_bytes)}, not measured")
    if prediction.outcome == "oom":
        parts.append(f"ran out of memory; predicted: {prediction.verdict or 'no verdict'}")
    return "  ".join((*parts, f"{prediction.stack}{', foreign' if prediction.foreign else ''}"))


def _summary(report: "ScoreReport", terminal: Terminal) -> Iterator[str]:
    if not report.summary:
        yield from wrapped("No row is both predicted and measured.", terminal)
        return
    text = (
        f"Absolute errors in percent, {report.engine} against measured (estimator {report.estimator_version}). "
        "Foreign: no profile describes the row's stack, and the nearest one is taken. Covered: percent of the rows "
        "that lie in their prediction's 90 % interval."
    )
    yield from wrapped(text, terminal)
    names = ("n", "median", "p90", "worst", "covered")
    headings = (Heading("source"), Heading("stack"), Heading("metric"), *(Heading(name, True) for name in names))
    yield from table(headings, [_cells(line) for line in report.summary], terminal)


def _cells(line: "SummaryLine") -> tuple[str, ...]:
    errors = (line.median_abs_pct, line.p90_abs_pct, line.max_abs_pct)
    stack = "foreign" if line.foreign else "known"
    shown = [f"{error:.2f}" for error in errors]
    return escape(line.source), stack, line.metric, f"{line.n:,}", *shown, f"{line.covered_pct:.0f}"
