"""The README of a recipe: how to run it, where the rows go, the plan with its basis, and what is refused."""

from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

from foretune import __version__
from foretune.contract import ScheduleSettings, TrainingConfig
from foretune.memory import ByteRange, Fit, MemoryEstimate
from foretune.units import format_bytes

__all__ = ["Readme", "write_readme"]

WIDTH = 100


class Readme(NamedTuple):
    """What a README tells of."""

    config: TrainingConfig
    prediction: MemoryEstimate | None
    fit: Fit | None
    warnings: tuple[str, ...]
    folder: Path
    """Where it will stand: paths inside are written relative to it."""
    has_rows: bool
    """Whether somebody named rows; else the sample rows stand in."""

    @property
    def is_infeasible(self) -> bool:
        """Whether the plan says that it does not fit."""
        return self.fit is not None and self.fit.verdict == "does not fit"


def write_readme(about: Readme) -> str:
    """Write the README as Markdown."""
    config = about.config
    lines = [
        f"# {config.method} of {_code(_inside(config.model.id, about.folder))}",
        "",
        (
            f"A recipe of foretune {__version__}. `config.yaml` says all of it; the scripts call the installed package "
            "and hold nothing of their own. Another version of foretune refuses to run it."
        ),
        "",
        *_how_to_run(about),
        *_rows(about),
        *_plan(about),
        *_refused(about),
    ]
    return "".join(f"{text}\n" for line in lines for text in _wrapped(line))


def _wrapped(line: str) -> list[str]:
    """Break a paragraph or an item of a list; headings, tables and commands stay on their line."""
    if line.startswith(("#", "|", "    ")) or len(line) <= WIDTH:
        return [line]
    return wrap(line, WIDTH, subsequent_indent="  " if line.startswith("- ") else "", break_on_hyphens=False)


def _how_to_run(about: Readme) -> Iterator[str]:
    forced = " --allow-infeasible" if about.is_infeasible else ""
    if forced:
        yield (
            "**By its plan this does not fit.** It was written because `--allow-infeasible` asked for it, and training "
            "refuses it without that option."
        )
        yield ""
    yield "## Run it"
    yield ""
    yield f"    sh train.sh{forced}"
    yield ""
    yield (
        "sets up `.venv` in this folder, trains, and proves that the artifact reloads. Or, and so on Windows, in an "
        "environment of your own:"
    )
    yield ""
    yield "    pip install -r requirements.txt"
    yield f"    python train.py --dry-run{forced}"
    yield f"    python train.py{forced}"
    yield '    python evaluate.py --prompt "How many days has a week?"'
    yield ""
    yield (
        "The first `train.py` checks everything and shows what would run; nothing is written. Ctrl-C stops a run with "
        "a checkpoint, and `python train.py --resume` goes on. Where pip does not find foretune, build its wheel "
        "(`pip wheel --no-deps -w DIST .` in its source) and set `PIP_FIND_LINKS` to the full path of DIST."
    )
    yield ""
    yield f"Run and artifact go to {_code(_inside(about.config.output or '', about.folder))}."
    yield from _outside(about)
    if about.config.device == "cpu":
        yield "It trains on a CPU: install a CPU build of torch first, or pip brings gigabytes of CUDA libraries."
    else:
        yield "On CUDA, runs are not qualified yet: `train.py` says so first, and verifies all the same."
    yield ""


def _outside(about: Readme) -> Iterator[str]:
    """Name the files and folders that do not move with this one."""
    config = about.config
    paths = {
        "model.id": config.model.id,
        "data.train": config.data.train,
        "evaluation.data": config.evaluation.data,
        "output": config.output,
    }
    outside = [
        f"{field}: {path}"
        for field, path in paths.items()
        if path is not None and Path(path).is_absolute() and not Path(path).is_relative_to(about.folder)
    ]
    if outside:
        yield ""
        yield (
            "These stand outside this folder. Where it moves to another machine, copy them into it, and name them as "
            "`./...`:"
        )
        yield ""
        yield from (f"- {_code(text)}" for text in outside)
        yield ""


def _rows(about: Readme) -> Iterator[str]:
    data = about.config.data
    where = _code(_inside(data.train or "", about.folder))
    yield "## Your rows"
    yield ""
    if not about.has_rows:
        yield (
            f"**No rows were named, so {where} stands in: a few sample rows, for a first look.** Put your own beside "
            "it and set `data.train`."
        )
    else:
        yield f"Trained on {where}."
    yield "The two forms, one row a line:"
    yield ""
    yield "- `data/instructions.jsonl`: an instruction, what it is about, and the answer (any tokenizer);"
    yield "- `data/messages.jsonl`: a conversation (by the tokenizer's own chat template)."
    yield ""
    taught = "the answers alone carry" if data.supervision == "assistant_only" else "every token carries"
    yield (
        f"`data.supervision: {data.supervision}`: {taught} loss. `foretune data check --config config.yaml` shows "
        "which tokens those are, row by row, before anything is trained."
    )
    yield ""


# -- the plan


def _plan(about: Readme) -> Iterator[str]:
    yield "## The plan"
    yield ""
    yield from _settings(about.config)
    yield ""
    if about.prediction is None:
        yield "Memory: **unknown**."
    else:
        yield from _verdict(about.prediction, about.fit)
        yield ""
        yield from _figures(about.prediction)
        yield ""
        yield "Assumed:"
        yield ""
        length = about.config.batch.sequence_length
        yield f"- rows of {length:,} tokens; `train.py --dry-run` predicts from your own rows."
        yield from (f"- {_plain(text)}" for text in about.prediction.assumptions)
        untested = about.prediction.untested_paths
        yield from (f"- not tested against a measurement: {_plain(text)}" for text in untested)
    if about.warnings:
        yield ""
        yield from (f"- {_plain(text)}" for text in about.warnings)
    yield ""


def _settings(config: TrainingConfig) -> Iterator[str]:
    batch, lora = config.batch, config.lora
    yield "| | |"
    yield "| --- | --- |"
    if lora is not None:
        targets = lora.targets if isinstance(lora.targets, str) else ", ".join(lora.targets)
        yield f"| adapters | rank {lora.rank}, alpha {lora.alpha:g}, on {_plain(targets)} |"
    yield f"| base weights | {config.precision.dtype}{_quantized(config)} |"
    rows = f"{batch.accumulation_steps:,} x {batch.micro_batch_size:,} rows"
    yield f"| an update | {rows} of up to {batch.sequence_length:,} tokens |"
    yield f"| optimizer | {config.optimizer.name}, learning rate up to {config.optimizer.learning_rate:g} |"
    yield f"| length | {_length(config.schedule)} |"
    activations = "recomputed" if config.gradient_checkpointing else "kept"
    yield f"| memory | {activations} activations, {config.loss} loss, {config.attention} attention |"


def _length(schedule: ScheduleSettings) -> str:
    passes, updates = schedule.passes, schedule.updates
    if passes is not None:
        return f"{passes:g} epoch{'s' * (passes != 1)}"
    return f"{updates:,} update{'s' * (updates != 1)}"


def _quantized(config: TrainingConfig) -> str:
    return "" if config.quantization is None else f", linear layers held in {config.quantization.scheme}"


def _verdict(need: MemoryEstimate, fit: Fit | None) -> Iterator[str]:
    basis = f"({need.kind}; stack {_plain(need.stack)})"
    if fit is None:
        yield f"Needs **{format_bytes(need.need_bytes)}** {basis}. No device was named, so there is no verdict."
        return
    budget = format_bytes(fit.budget_bytes) + (" free when it was written" if fit.budget_is == "free now" else "")
    yield f"**{fit.verdict}**: needs {format_bytes(need.need_bytes)} of {budget} on {_plain(fit.device.name)} {basis}."
    if fit.verdict != "fits":
        yield _plain(fit.because)
    for change in fit.changes:
        settings = " ".join(f"`{setting}`" for setting in change.settings)
        yield f"- {_plain(change.label)}: {format_bytes(change.need_bytes)}, {change.verdict} ({settings})"


def _figures(need: MemoryEstimate) -> Iterator[str]:
    yield f"| {need.kind} | figure | 90 % interval |"
    yield "| --- | ---: | --- |"
    for name, figure, bounds in (
        ("allocated, at the peak", need.allocated_bytes, need.allocated_interval),
        ("reserved", need.reserved_bytes, need.reserved_interval),
        ("process", need.process_bytes, need.process_interval),
    ):
        yield f"| {name} | {format_bytes(figure)} | {_span(bounds)} |"
    yield f"| must be free | {format_bytes(need.need_bytes)} | the upper end of the process' interval |"
    yield f"| download of the base model | {format_bytes(need.host.download_bytes)} | |"
    yield f"| host memory while loading | {format_bytes(need.host.ram_load_bytes)} | |"
    yield f"| the result on disk | {format_bytes(need.host.artifact_bytes)} | |"


def _span(bounds: ByteRange) -> str:
    return f"{format_bytes(bounds.low_bytes)} to {format_bytes(bounds.high_bytes)}"


# -- what is refused


def _refused(about: Readme) -> Iterator[str]:
    yield "## What is refused, rather than changed behind your back"
    yield ""
    yield from (f"- {text}" for text in _refusals(about.config))


def _refusals(config: TrainingConfig) -> Iterator[str]:
    if config.data.truncation == "error":
        yield f"a row longer than {config.batch.sequence_length:,} tokens (`data.truncation: error`), with its line;"
    if not config.data.allow_template_rewrite:
        yield "a chat template that drops or changes a turn of yours;"
    if config.precision.dtype == "bf16":
        yield "a card without bfloat16: nothing falls back to another dtype;"
    yield "a plan that does not fit the memory that is free when it starts, for your own longest rows;"
    yield "a base model with remote code, with pickled weights, or that is published quantized;"
    yield "an output folder that holds anything, unless `--resume` goes on with the run in it;"
    yield "a run whose modules, dtypes, adapters or optimizer differ from `config.yaml`, before the first update;"
    yield f"another foretune than {__version__}."


def _inside(path: str, folder: Path) -> str:
    return f"./{path[len(str(folder)) + 1 :]}" if path.startswith(f"{folder}/") else path


def _plain(text: str) -> str:
    """Keep a text from being read as Markdown or HTML."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    for character in "\\`*_[]<>|":
        shown = shown.replace(character, f"\\{character}")
    return shown


def _code(text: str) -> str:
    shown = "".join(c if c.isprintable() else " " for c in text).replace("`", "'").replace("|", "/")
    return f"`{shown}`"
