"""The text of docs/evidence.md: what was compared with what so far, from the stores behind docs/accuracy.md."""

import json
from collections import Counter
from collections.abc import Iterator

from docs_accuracy import FAMILIES, NONE, OWN, Row, read_stores, spread
from docs_table import markdown_table, paragraph

from foretune.evidence import METRICS

__all__ = ["evidence_page"]

INTRODUCTION = """What foretune says has been held against something else wherever something else was to be had.
This page says against what, how often, and what came out; it summarises, and the tables stand in
[accuracy](accuracy.md). Below stands what has no evidence at all. All errors are absolute and in percent of
what was measured."""

MEASURED = """{rows} measurements are stored: {public} that {sources} public sources published, and {own} of
foretune's own step on an H200. The estimate predicts {predicted} of them. The others it refuses, most of them
since they ran on several devices or by a method that it does not have ([refused
rows](accuracy.md#refused-rows)). A row is of a *known* stack where a profile describes the loop and the
versions that ran; of the others the nearest is predicted."""

KNOWN_ROWS = """A row of a known stack shows how good the model of the program is; a row of a foreign one shows how far
off you may be if you train with another program than the one you name. Intervals cover both
([intervals](accuracy.md#intervals)); their ranges differ by a factor of a hundred and more."""

CARDS = """By card, of the rows that are predicted. *Known*: rows of a known stack. Verdicts: what the estimate says of
runs that succeeded, and of runs that ran out of memory."""

PROGRAM = """Most of these are tests, which need no GPU and run with every change; the last column says where they
stand."""

UNMEASURED = """Nobody has looked, so nothing is claimed:

- **Every run of `foretune train` on CUDA.** No test has executed one. Loading by `device_map`, bf16 and fp16 compute,
  fp16's loss scaler, QLoRA and 8-bit bases on a card, bitsandbytes' optimizers, flash attention, Liger's loss and the
  readings of CUDA's allocator ran in pieces or not at all. `train` says so in its first line there
  ([training](training.md)).
- **Parts of the memory that no measurement has touched**: compute capability 10.0 and later; experts, state space and
  hybrid models, an 8-bit base, DoRA on a quantized base and modules trained whole on a GPU; foretune's own step at full
  depth, or with an 8-bit optimizer there. An answer that rests on one of them says so and is twice as wide
  ([the list](accuracy.md#what-no-measurement-has-touched)).
- **foretune's own stack profile**, as today's answers name it (torch 2.13, Transformers 5.24): the H200 measured the
  same step on the libraries before (torch 2.11, Transformers 5.17).
- **The CUDA context** on every card but a T4 and an H200: a range of published reports stands in its place.
- **Time and cost.** No answer has any.
- **Several devices.** They are refused.
- **Calibration**: there is none yet ([numbers](numbers.md#calibrated)).
- **Quality of the models that come out.** A run proves that it trained what was asked for on the tokens that were asked
  for; whether that is a good model only your evaluation says."""


def evidence_page() -> str:
    """Put the page together."""
    stores = read_stores()
    rows = stores.rows
    own = sum(row.observed.source.name == OWN for row in rows)
    sources = len({row.observed.source.name for row in rows} - {OWN})
    predicted = sum("estimated" in row.predicted for row in rows)
    told = MEASURED.format(rows=len(rows), public=len(rows) - own, own=own, sources=sources, predicted=predicted)
    parts = (
        "# Evidence",
        paragraph(INTRODUCTION),
        "## Against measurements",
        paragraph(told),
        measured_table(rows),
        paragraph(KNOWN_ROWS),
        paragraph(CARDS),
        cards_table(rows),
        "## Against programs",
        paragraph(PROGRAM),
        programs_table(),
        "## What has no evidence",
        UNMEASURED,
    )
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def measured_table(rows: list[Row]) -> str:
    """Sum up each measure over all rows, known and foreign stacks apart."""
    drawn = []
    for foreign in (False, True):
        for metric in METRICS:
            found = spread(rows, "estimated", metric, foreign=foreign)
            if found is not None:
                stack = "foreign" if foreign else "known"
                errors = (f"{found.median:.2f}", f"{found.p90:.2f}", f"{found.worst:.2f}")
                drawn.append([stack, metric, str(found.n), *errors])
    return markdown_table(("stack", "measure", "rows", "median", "p90", "worst"), drawn)


def cards_table(rows: list[Row]) -> str:
    """Count what is predicted by card, and what was said of runs that ended well and of those that did not."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        if (line := row.predicted.get("estimated")) is not None:
            of = counts.setdefault(row.observed.device.name, Counter())
            of.update(["foreign" if line["foreign"] else "known", f"{line['outcome']}: {line['verdict']}"])
    order = sorted(counts.items(), key=lambda item: (-item[1]["known"], -item[1]["foreign"], item[0]))
    drawn = [[name, str(of["known"]), str(of["foreign"]), said(of, "ok"), said(of, "oom")] for name, of in order]
    return markdown_table(("card", "known", "foreign", "runs that succeeded", "runs that ran out of memory"), drawn)


def said(of: Counter[str], outcome: str) -> str:
    """Write the verdicts on runs of one outcome."""
    words = ("fits", "tight", "does not fit")
    return ", ".join(f"{word} {of[f'{outcome}: {word}']}" for word in words if of[f"{outcome}: {word}"]) or NONE


def programs_table() -> str:
    """List the comparisons with programs, with what came out."""
    lines = FAMILIES.read_text(encoding="utf-8").splitlines()
    runs = [run for line in lines for run in json.loads(line)["runs"] if "digest" in run]
    equal = sum(not run.get("differs") for run in runs)
    events = f"{len(lines)} types of models, {len(runs)} runs: in {equal} every event and both peaks are equal"
    return markdown_table(("what", "against what", "what came out", "where"), comparisons(events))


def comparisons(events: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield what was compared, with what, the result and the test."""
    yield "the estimate's events", "the trace's, of the real classes", events, "`tests/golden/families.jsonl`"
    yield (
        "the estimate's events",
        "the allocator's history of an H200",
        "12 short runs, 52,000 events: each of the same size and in the same order",
        "`tests/memory/test_h200.py`",
    )
    yield (
        "the trace, before any measurement of this step was known",
        "an H200",
        "13 short runs: allocated equal but for 1,024 bytes in one, reserved but for 12 MiB in one",
        "[blind](accuracy.md#foretunes-own-step-on-an-h200)",
    )
    yield (
        "the trace under a CPU's rules",
        "torch's profiler of the real step",
        "41 configurations: peaks within 0.003 %",
        "`tests/runtime/test_cpu_truth.py`",
    )
    yield (
        "the growth of a process on a CPU",
        "25 real processes",
        "5.5 % less to 7.6 % more than predicted; one of twenty updates 12.7 % more",
        "`benchmarks/cpu_growth.py`",
    )
    yield (
        "the trace of Trainer and SFTTrainer",
        "the real trainers in fp32 on a CPU",
        "every allocation",
        "`tests/runtime/test_trainer_truth.py`, `make trl`",
    )
    yield (
        "the losses of a run, update by update",
        "Transformers' Trainer, full and LoRA, on a CPU; in `make full` on a real model of 135M",
        "equal to 2e-5, and to 1e-4 on the real model",
        "`tests/runs/test_train.py`, `test_real_model.py`",
    )
    yield (
        "an artifact, loaded again",
        "the logits that the run stored",
        "bit by bit on the same machine",
        "`tests/runs/test_train.py`",
    )
    yield (
        "a resumed run",
        "one that was never interrupted",
        "losses and weights bit by bit on a CPU",
        "`tests/runs/test_resume.py`",
    )
    yield (
        "ids of rows and which of them carry loss",
        "the template's own call; a second, slow encoder",
        "of 53 published templates, ids equal on every accepted row; with Llama 3.1's tokenizer no mask differs",
        "[data](data.md#conversations)",
    )
