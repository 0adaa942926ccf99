"""The text of docs/accuracy.md, from the project's observations and the predictions stored in docs/predictions/."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from docs_accuracy_words import (
    AGAINST,
    FOREIGN,
    INTERVALS,
    INTRODUCTION,
    KNOWN,
    OOM,
    OOM_REASONS,
    OWN_STEP,
    PEERS_NOTE,
    PUBLISHED,
    REASONS,
    UNTOUCHED,
    VERDICT,
)
from docs_table import markdown_table, paragraph
from intervals import residuals

from foretune.evidence import METRICS, Observation, Spread, read_observations, spread_of
from foretune.evidence.intervals import interval_score, left_out_ranges
from foretune.memory import PROFILES
from foretune.memory.interval import ErrorRange, error_classes
from foretune.units import MIB

__all__ = ["accuracy_page"]

FAMILIES = Path(__file__).resolve().parents[1] / "tests" / "golden" / "families.jsonl"
FOLDER = Path(__file__).resolve().parents[1] / "docs" / "predictions"
ENGINES = ("estimated", "traced")
OWN = "foretune-gpu-truth"
FAR_OFF = {"allocated": 0.5, "reserved": 8.0}
"""Percent beyond which a row of a known stack is named."""
NONE = "–"

Stored = Mapping[str, Any]
"""A line of docs/predictions/."""


class Row(NamedTuple):
    """A row that was measured, and what each engine says of it; without those that refuse it."""

    observed: Observation
    predicted: Mapping[str, Stored]

    def error(self, engine: str, metric: str, *, foreign: bool) -> float | None:
        """Percent of what was measured. None: not measured, refused, or of the other kind of stack."""
        stored, measured = self.predicted.get(engine), measured_bytes(self.observed, metric)
        if stored is None or measured is None or stored["foreign"] != foreign:
            return None
        return float((stored[f"{metric}_bytes"] / measured - 1) * 100)


class Stores(NamedTuple):
    """The first line of each engine's file, and the rows."""

    heads: Mapping[str, Stored]
    rows: list[Row]


Applies = Callable[[Observation], bool]


def accuracy_page() -> str:
    """Put the page together."""
    stores = read_stores()
    parts = (
        introduction(stores),
        known(stores.rows),
        own_step(stores.rows),
        foreign(stores.rows),
        refused(stores.heads),
        peers(stores.rows),
        far_off(stores.rows),
        intervals(),
        verdicts(stores.rows),
        against(),
        untouched(stores.rows),
    )
    return "\n".join(parts)


# -- what is read
def read_lines(name: str) -> list[dict[str, Any]]:
    """Read a file of predictions."""
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def read_stores() -> Stores:
    """Read the observations and both engines' predictions."""
    files = {engine: read_lines(engine) for engine in ENGINES}
    found = {engine: {line["id"]: line for line in lines[1:]} for engine, lines in files.items()}
    rows = []
    for observed in read_observations():
        predicted = {engine: found[engine][observed.id] for engine in ENGINES if observed.id in found[engine]}
        rows.append(Row(observed, predicted))
    return Stores({engine: lines[0] for engine, lines in files.items()}, rows)


def measured_bytes(observed: Observation, metric: str) -> int | None:
    """What was measured. None: it was not."""
    name = "process_bytes" if metric == "process" else f"peak_{metric}_bytes"
    found: int | None = getattr(observed.measured, name)
    return found


# -- tables
SPREAD = ("n", "median", "mean", "p90", "worst")


def spread_table(title: str, lines: Iterable[tuple[str, str, Iterable[Row]]], *, foreign: bool) -> str:
    """Draw the errors of each line's rows, the engines side by side; lines that nobody predicts are left out."""
    headings = [
        title,
        "measure",
        *(f"{engine}: {name}" if name == "n" else name for engine in ENGINES for name in SPREAD),
    ]
    drawn = []
    for label, metric, rows in lines:
        rows = list(rows)
        spreads = [spread(rows, engine, metric, foreign=foreign) for engine in ENGINES]
        if any(spreads):
            drawn.append([label, metric, *(cell for found in spreads for cell in cells(found))])
    return markdown_table(headings, drawn)


def spread(rows: Iterable[Row], engine: str, metric: str, *, foreign: bool) -> Spread | None:
    """Sum up an engine's errors. None: it predicts none of them."""
    errors = [error for row in rows if (error := row.error(engine, metric, foreign=foreign)) is not None]
    return spread_of(errors) if errors else None


def cells(found: Spread | None) -> list[str]:
    """Write a spread."""
    if found is None:
        return [NONE] * len(SPREAD)
    return [str(found.n), *(f"{value:.3f}" for value in found[1:])]


# -- which rows
def is_plain_loop(observed: Observation) -> bool:
    """Say whether a plain loop around Transformers ran it."""
    return observed.software.driver == "manual_loop"


def is_quantized(observed: Observation) -> bool:
    """Say whether the base is held in fewer bits."""
    return observed.training.quantization != "none"


def is_best_of_fms(observed: Observation, method: str | None = None) -> bool:
    """Say whether it is one of fms-acceleration's rows of which everything is known, on one device."""
    is_one = observed.source.name == "fms-accel" and observed.grade == "A" and observed.device.count == 1
    return is_one and method in (None, observed.training.method)


GROUPS: tuple[tuple[str, tuple[str, ...], Applies], ...] = (
    (
        "16-bit weights, T4 (Linux) and RTX 4080 (Windows)",
        ("allocated", "reserved"),
        lambda observed: is_plain_loop(observed) and not is_quantized(observed),
    ),
    (
        "nf4, T4 and RTX 4080",
        ("allocated", "reserved"),
        lambda observed: is_plain_loop(observed) and is_quantized(observed),
    ),
    ("the same on a T4", ("process",), is_plain_loop),
    ("fms-acceleration, A100: full", ("allocated",), lambda observed: is_best_of_fms(observed, "full")),
    ("fms-acceleration, A100: lora", ("allocated",), lambda observed: is_best_of_fms(observed, "lora")),
    ("fms-acceleration, A100: qlora", ("allocated",), lambda observed: is_best_of_fms(observed, "qlora")),
    ("fms-acceleration, A100: in all", ("allocated",), is_best_of_fms),
    ("foretune's own step, H200", METRICS, lambda observed: observed.source.name == OWN),
)
"""Title, measures, and which rows."""


# -- sections
def introduction(stores: Stores) -> str:
    """Say what the page is over, and of which versions."""
    versions = ", ".join(f"{name} {text}" for name, text in stores.heads["traced"]["libraries"].items())
    numbers = {stores.heads[engine]["estimator_version"] for engine in ENGINES}
    assert len(numbers) == 1, "the stored predictions are of different versions (scripts/predictions.py)"
    own = sum(row.observed.source.name == OWN for row in stores.rows)
    text = INTRODUCTION.format(rows=len(stores.rows) - own, own=own, version=numbers.pop(), libraries=versions)
    return "\n\n".join(map(paragraph, text.split("\n\n"))) + "\n"


def known(rows: list[Row]) -> str:
    """Sum up the rows whose stack a profile describes."""
    lines = [
        (label, metric, [row for row in rows if applies(row.observed)])
        for label, metrics, applies in GROUPS
        for metric in metrics
    ]
    lines += others(rows)
    return f"## Known stacks\n\n{paragraph(KNOWN)}\n\n{spread_table('rows', lines, foreign=False)}"


def others(rows: list[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield lines of the rows in none of the groups, by source and whether the base is quantized."""
    left: dict[str, list[Row]] = {}
    for row in rows:
        if not any(applies(row.observed) for _, _, applies in GROUPS):
            kind = "quantized" if is_quantized(row.observed) else "16-bit and fp32 weights"
            left.setdefault(f"{row.observed.source.name}: {kind}", []).append(row)
    for label, group in sorted(left.items()):
        yield from ((label, metric, group) for metric in METRICS)


def own_step(rows: list[Row]) -> str:
    """Show each configuration of foretune's own step, and what was traced before it was measured."""
    blind = {line["id"]: line for line in read_lines("traced_blind")[1:]}
    drawn = []
    for row in rows:
        if row.observed.source.name == OWN:
            sides = [blind.get(row.observed.id), row.predicted.get("traced"), row.predicted.get("estimated")]
            measured = [f"{measured_bytes(row.observed, metric):,}" for metric in ("allocated", "reserved")]
            off = [difference(row.observed, side, metric) for side in sides for metric in ("allocated", "reserved")]
            drawn.append([described(row.observed), *measured, *off])
    headings = ["configuration", "allocated", "reserved"]
    headings += [
        f"{side}: {metric}" for side in ("blind", "traced", "estimated") for metric in ("allocated", "reserved")
    ]
    contexts = [outside / MIB for row in rows if row.observed.source.name == OWN and (outside := context(row.observed))]
    text = OWN_STEP.format(least=min(contexts), most=max(contexts))
    return f"## Foretune's own step on an H200\n\n{paragraph(text)}\n\n{markdown_table(headings, drawn)}"


def context(observed: Observation) -> int:
    """What the process holds beside what the allocator reserved; 0: not measured."""
    process, reserved = measured_bytes(observed, "process"), measured_bytes(observed, "reserved")
    return 0 if process is None or reserved is None else process - reserved


def difference(observed: Observation, predicted: Stored | None, metric: str) -> str:
    """Write by how many bytes a prediction is off."""
    measured = measured_bytes(observed, metric)
    if predicted is None or measured is None:
        return "refused"
    off = predicted[f"{metric}_bytes"] - measured
    return f"{off:+,} ({off / measured:+.3%})" if abs(off) * 1e5 > measured else f"{off:+,}" if off else "0"


def described(observed: Observation) -> str:
    """Name a configuration by what sets it apart."""
    training = observed.training
    words = [observed.model.id.rpartition("/")[2], f"{training.method}, {training.base_dtype}"]
    if training.attention != "sdpa":
        words.append(training.attention)
    if training.loss != "stock":
        words.append("chunked loss")
    if training.method == "full":
        words.append("fused" if training.optimizer.endswith("fused") else "foreach")
    if training.gradient_checkpointing == "none":
        words.append("activations kept")
    if (training.gradient_accumulation_steps or 1) > 1:
        words.append(f"{training.gradient_accumulation_steps} microsteps, dropout")
    if training.padding_mask:
        words.append("padded")
    if observed.software.allocator_conf is not None:
        words.append("expandable segments")
    return "; ".join(words)


def foreign(rows: list[Row]) -> str:
    """Sum up the rows whose stack is only the nearest."""
    sources = sorted({row.observed.source.name for row in rows})
    lines = [
        (source, metric, [row for row in rows if row.observed.source.name == source])
        for source in sources
        for metric in METRICS
    ]
    lines += [("all", metric, rows) for metric in METRICS]
    return f"## Foreign stacks\n\n{paragraph(FOREIGN)}\n\n{spread_table('source', lines, foreign=True)}"


def refused(heads: Mapping[str, Stored]) -> str:
    """Count the rows that are not predicted, by reason."""
    reasons = {reason for head in heads.values() for reason in head["refused"]}

    def counts(reason: str) -> list[int]:
        return [heads[engine]["refused"].get(reason, 0) for engine in ENGINES]

    ordered = sorted(reasons, key=lambda reason: (-max(counts(reason)), reason))
    drawn = [["in all", *(str(sum(heads[engine]["refused"].values())) for engine in ENGINES)]]
    drawn += [[reason, *(str(count or NONE) for count in counts(reason))] for reason in ordered]
    return f"## Refused rows\n\n{markdown_table(('reason', *ENGINES), drawn)}"


def is_comparable(observed: Observation) -> bool:
    """Say whether it is one of the rows that the other estimators were run on."""
    training = observed.training
    return (
        observed.source.name != OWN
        and (observed.outcome, observed.kind) == ("ok", "train_peak")
        and observed.grade in ("A", "B")
        and (observed.device.count, training.parallel.world_size) == (1, 1)
        and training.method in ("full", "lora", "qlora")
        and training.seq_len is not None
    )


def peers(rows: list[Row]) -> str:
    """Stand beside two published estimators."""
    same = [row for row in rows if is_comparable(row.observed)]
    shares = [sum(engine not in row.predicted for row in same) / len(same) for engine in ENGINES]
    drawn = [["refused", *PUBLISHED["refused"], *(f"{100 * share:.0f} %" for share in shares)]]
    for label, metric, is_foreign in (
        ("allocated, exact settings", "allocated", False),
        ("allocated, nearest settings", "allocated", True),
        ("reserved, exact settings", "reserved", False),
        ("process, T4", "process", False),
    ):
        found = [spread(same, engine, metric, foreign=is_foreign) for engine in ENGINES]
        ours = [NONE if each is None else f"{each.median:.2f} / {each.worst:.2f} ({each.n})" for each in found]
        drawn.append([label, *PUBLISHED[label], *ours])
    headings = ("median / worst (rows)", "canifinetune 0.4.1", "fitcheck-llm 0.3.1", "estimated", "traced")
    note = paragraph(PEERS_NOTE.format(rows=len(same)))
    return f"## Beside two published estimators\n\n{note}\n\n{markdown_table(headings, drawn)}"


def far_off(rows: list[Row]) -> str:
    """Name the rows of known stacks that are missed most, with the reason."""
    drawn = []
    for row in rows:
        sides = [(engine, metric) for engine in ENGINES for metric in FAR_OFF]
        errors = [row.error(engine, metric, foreign=False) for engine, metric in sides]
        if any(abs(error or 0.0) > FAR_OFF[metric] for error, (_, metric) in zip(errors, sides, strict=True)):
            found = [NONE if error is None else f"{error:+.2f}" for error in errors]
            drawn.append([f"`{row.observed.id}`", row.observed.model.id, *found, reason_of(row)])
    headings = ["row", "model", *(f"{engine}: {metric}" for engine in ENGINES for metric in FAR_OFF), "reason"]
    limits = " or ".join(f"{limit} % of {metric}" for metric, limit in FAR_OFF.items())
    text = f"Every row of a known stack that is off by more than {limits}; errors in percent, with their sign."
    return f"## Rows that are missed\n\n{paragraph(text)}\n\n{markdown_table(headings, drawn)}"


def reason_of(row: Row) -> str:
    """Say why a row is missed, as far as that is known."""
    config = json.loads(row.observed.model.config or "{}")
    marks = [config.get("model_type"), *(stored["stack"] for stored in row.predicted.values())]
    return next((text for mark, text in REASONS.items() if mark in marks), "not known")


def intervals() -> str:
    """How well intervals cover the rows of groups that were left out when they were learnt, by source."""
    drawn = []
    for name, by_metric in residuals().items():
        for metric, found in by_metric.items():
            entry: ErrorRange = getattr(error_classes()[name], metric)
            shown: dict[str, list[tuple[bool, float, float]]] = {}
            for rows, low, high in left_out_ranges(found, (entry.scale_below, entry.scale_above)):
                for each in rows:
                    fixed = interval_score(-5.0, 5.0, each.error_percent)
                    told = (each.is_within(low, high), each.score(low, high), fixed)
                    shown.setdefault(each.source, []).append(told)
            for source, told in sorted(shown.items()):
                inside, ours, fixed = zip(*told, strict=True)
                share = f"{100 * mean(inside):.0f} %"
                span = f"{entry.low_percent:+.2f} to {entry.high_percent:+.2f}"
                drawn.append(
                    [name, metric, span, source, str(len(told)), share, f"{mean(ours):.2f}", f"{mean(fixed):.2f}"]
                )
    headings = ("class", "measure", "range, %", "source", "rows", "covered, left out", "score", "score of ±5 %")
    return f"## Intervals\n\n{paragraph(INTERVALS)}\n\n{markdown_table(headings, drawn)}"


def verdicts(rows: list[Row]) -> str:
    """What was said of runs that succeeded and of runs that ran out of memory, each `fits` of the latter by name."""
    told = [(row, row.predicted["estimated"]) for row in rows if "estimated" in row.predicted]
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for _, line in told:
        if line["verdict"] is not None:
            of = counts.setdefault((line["outcome"], "foreign" if line["foreign"] else "known"), {})
            of[line["verdict"]] = of.get(line["verdict"], 0) + 1
    names = ("fits", "tight", "does not fit", "unknown")
    words = {"ok": "succeeded", "oom": "ran out of memory"}
    drawn = [
        [words[outcome], stack, *(str(of.get(name, 0)) for name in names)]
        for (outcome, stack), of in sorted(counts.items())
    ]
    title, _, text = VERDICT.partition("\n\n")
    table = markdown_table(("runs that", "stack", *names), drawn)
    wrong = [
        [
            f"`{row.observed.id}`",
            row.observed.model.id,
            row.observed.training.method,
            OOM_REASONS.get(row.observed.id, "not known"),
        ]
        for row, line in told
        if (line["outcome"], line["verdict"]) == ("oom", "fits")
    ]
    examined = markdown_table(("row", "model", "method", "why"), wrong) if wrong else "None.\n"
    return f"{title}\n\n{paragraph(text)}\n\n{table}\n{paragraph(OOM)}\n\n{examined}"


def against() -> str:
    """Count the families that are equal to the program, and name what is not."""
    rows = [json.loads(line) for line in FAMILIES.read_text(encoding="utf-8").splitlines()]
    runs = [(row["model_type"], run) for row in rows for run in row["runs"] if "digest" in run]
    different = sorted({name for name, run in runs if run.get("differs")})
    equal = sum(not run.get("differs") for _, run in runs)
    text = f"{len(rows)} model types, {len(runs)} runs: in {equal} all events are equal, both peaks to the byte"
    rest = f"; the events of {', '.join(different)} are not, their peaks within 0.5 %." if different else "."
    title, _, words = AGAINST.partition("\n\n")
    parts = words.replace("{families}", f"{text}{rest}").strip().split("\n\n")
    return "\n\n".join([title, *map(paragraph, parts)]) + "\n"


def untouched(rows: list[Row]) -> str:
    """Name what no row has touched."""
    touched = {line["stack"] for row in rows for line in row.predicted.values() if not line["foreign"]}
    title, _, text = UNTOUCHED.partition("\n\n")
    left = ", ".join(f"`{name}`" for name in PROFILES if name not in touched)
    return f"{title}\n\n{paragraph(text.format(profiles=left))}\n"
