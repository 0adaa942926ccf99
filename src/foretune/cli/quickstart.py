"""`foretune quickstart`: the whole journey on a CPU, by the commands that a person would type."""

# os.path, as in the contract: pathlib costs 3 ms of every start.
# ruff: noqa: PTH103, PTH112, PTH118

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import click

from foretune.cli.commands import Command, Example
from foretune.cli.output import Reply
from foretune.cli.terminal import Heading, Terminal, escape, table, wrapped
from foretune.errors import ForetuneError, Problem, RunDirectoryError
from foretune.units import format_bytes

__all__ = ["quickstart"]

MODEL_SIZES = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
SETTINGS = {
    "device": "cpu",
    "precision.dtype": "fp32",
    "lora.rank": 16,
    "data.supervision": "assistant_only",
    "evaluation.split": 0.1,
    "batch.sequence_length": 192,
    "batch.micro_batch_size": 8,
    "schedule.epochs": 12,
    "optimizer.learning_rate": 3e-3,
}
QUESTION = "How many days has a week?"
PLAN = ("estimate", "--model", "Qwen/Qwen2.5-7B", "--method", "qlora", "--gpu", "RTX 3060 12GB", "--offline")
ON_A_CARD = ("--set", "device=cuda", "--set", "precision.dtype=bf16", "--vram", "8")

Document = dict[str, Any]


class _Step(NamedTuple):
    """A command, what it is for, and how its answer is said in a line or two."""

    name: str
    title: str
    words: tuple[str, ...]
    brief: Callable[[Document], Iterator[str]]

    @property
    def command(self) -> str:
        """The command as a person types it."""
        return shlex.join(("foretune", *self.words))


@click.command(
    cls=Command,
    name="quickstart",
    examples=[
        Example("The whole journey on a CPU, in a minute or two", "foretune quickstart first-steps"),
        Example("What will it do?", "foretune help quickstart"),
    ],
)
@click.argument("folder", type=click.Path(), metavar="FOLDER")
def quickstart(folder: str) -> Iterator[Reply | ForetuneError]:
    """Go the whole way once: plan, check, estimate, trace, train, evaluate.

    A 7B model is planned for a card from the catalogue. Then a tiny model, a tokenizer and rows are made in FOLDER, and
    trained on the CPU by the commands that are shown, each in a process of its own. Nothing is downloaded. Needs:
    pip install 'foretune[train]'.
    """
    from foretune import api

    api.find_stack(api.INSTALLED)
    _make_folder(folder)
    return _steps(folder)


def _steps(folder: str) -> Iterator[Reply | ForetuneError]:
    answers: dict[str, Document] = {}
    steps = _journey(folder)
    with _Commands() as commands:
        for number, step in enumerate(steps, 1):
            if step.name == "data":
                _make_inputs(folder)
            yield _begun(step, number, len(steps))
            answer = commands.answer(step)
            if isinstance(answer, ForetuneError):
                yield answer
                return
            answers[step.name] = answer
            yield _told(step, answer)
    yield _summary(folder, answers)


def _journey(folder: str) -> tuple[_Step, ...]:
    config, run = os.path.join(folder, "run.yaml"), os.path.join(folder, "run")
    return (
        _Step("plan", "Does a 7B model fit a card of 12 GB? Nothing is downloaded for that.", PLAN, _say_fit),
        _Step(
            "data",
            f"A tiny model, a tokenizer and rows were made in {folder}. Which tokens carry loss?",
            ("data", "check", "--config", config, "--preview", "1"),
            _say_data,
        ),
        _Step(
            "estimate",
            "What would it need on a card? Estimated, by arithmetic.",
            ("estimate", "--config", config, *ON_A_CARD),
            _say_peaks,
        ),
        _Step(
            "trace",
            "The same by the real training step, run without data.",
            ("trace", "--config", config, *ON_A_CARD),
            _say_peaks,
        ),
        _Step("train", "Train it on this CPU, with every promise checked.", ("train", config), _say_run),
        _Step(
            "evaluate",
            "Reload what was trained, and ask it what it was taught.",
            ("evaluate", run, "--prompt", QUESTION, "--max-tokens", "24"),
            _say_evaluation,
        ),
    )


# -- what is made


def _make_folder(folder: str) -> None:
    """Make the folder, or take an empty one. Raises RunDirectoryError."""
    if os.path.lexists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):  # noqa: PTH208
        raise RunDirectoryError(f"{folder} is not empty.", hint="Choose another folder; nothing is overwritten.")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        hint = "Choose another place."
        raise RunDirectoryError(f"{folder} cannot be made: {error.strerror}.", hint=hint) from error


def _make_inputs(folder: str) -> None:
    """Make model, rows and configuration in the folder."""
    from foretune import api
    from foretune.cli.files import write_new
    from foretune.data.samples import sample_messages, write_jsonl

    model, rows = os.path.join(folder, "model"), os.path.join(folder, "rows.jsonl")
    api.make_sample_model(model, MODEL_SIZES)
    write_new(rows, [write_jsonl(sample_messages())])
    places = {"model.id": os.path.join(".", model), "data.train": rows, "output": os.path.join(folder, "run")}
    config = api.build_config({**SETTINGS, **places}).config
    write_new(os.path.join(folder, "run.yaml"), [api.dump_config(config, folder=folder)])


# -- what is run


class _Commands:
    """Runs commands, each in a process of its own that hears what stops us. Use as a context manager."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._stopped_by: int | None = None
        self._before: Any = None

    def __enter__(self) -> "_Commands":
        self._before = signal.signal(signal.SIGTERM, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _stop(self, number: int, _: object) -> None:
        """Pass SIGTERM on; we end when the command has ended. (Ctrl-C goes to both of us.)"""
        self._stopped_by = number
        if self._child is not None:
            self._child.terminate()

    def answer(self, step: _Step) -> Document | ForetuneError:
        """Run a command, and return the last document it prints, or its error. Raises KeyboardInterrupt."""
        said, exit_code = self._output([sys.executable, "-m", "foretune", *step.words, "--json"])
        if self._stopped_by is not None:
            raise _Stopped(128 + self._stopped_by)
        if not said.strip():
            return ForetuneError(
                f"`{step.command}` ended with exit code {exit_code} and said nothing.",
                hint="Where the system ended it, there was too little memory. Run the command by itself to see more.",
            )
        document: Document = json.loads(said.rstrip().rsplit("\n", 1)[-1] if step.name == "train" else said)
        return _error_of(document["error"]) if "error" in document else document

    def _output(self, command: list[str]) -> tuple[str, int]:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as child:
            self._child = child
            if self._stopped_by is not None:  # while it was started
                child.terminate()
            assert child.stdout is not None
            try:
                said = child.stdout.read()
            finally:
                exit_code = child.wait()
                self._child = None
        return said, exit_code


class _Stopped(KeyboardInterrupt):
    """SIGTERM, told as Ctrl-C is."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


def _error_of(told: Document) -> ForetuneError:
    error = ForetuneError.of([Problem(**problem) for problem in told["problems"]])
    error.code, error.exit_code, error.record = told["code"], told["exit_code"], told.get("record")
    return error


# -- what is said


def _begun(step: _Step, number: int, total: int) -> Reply:
    """Say what comes before it is done: it may take a while."""

    def draw(terminal: Terminal) -> Iterator[str]:
        title = f"{number}/{total}  {escape(step.title)}"
        yield from (terminal.paint(line, "bold") for line in wrapped(title, terminal))
        yield from wrapped(f"$ {escape(step.command)}", terminal, indent="  ")

    return Reply(
        "quickstart.begun",
        lambda: {"step": step.name, "number": number, "of": total, "title": step.title, "command": step.command},
        draw,
    )


def _told(step: _Step, answer: Document) -> Reply:
    return Reply(
        "quickstart.done",
        lambda: {"step": step.name, "answer": answer},
        lambda terminal: [
            line for text in step.brief(answer) for line in wrapped(escape(text), terminal, indent="     ")
        ],
    )


def _say_fit(answer: Document) -> Iterator[str]:
    fit = answer["fit"]
    need, budget = format_bytes(answer["need_bytes"]), format_bytes(fit["budget_bytes"])
    yield f"{fit['verdict'].capitalize()}: needs {need} of {budget} on {fit['device']['name']} ({answer['kind']})."


def _say_data(answer: Document) -> Iterator[str]:
    stats = answer["stats"]
    tokens, taught = stats["num_tokens"], stats["num_supervised_tokens"]
    yield f"{stats['num_rows']:,} rows of {tokens:,} tokens; {taught:,} carry loss, those of the answers."


def _say_peaks(answer: Document) -> Iterator[str]:
    allocated, reserved = format_bytes(answer["allocated_bytes"]), format_bytes(answer["reserved_bytes"])
    yield f"Peaks: {allocated} allocated, {reserved} reserved ({answer['kind']})."


def _say_run(answer: Document) -> Iterator[str]:
    record = answer["record"]
    scope, checks = record["scope"], record["checks"]
    first, last = scope["first_loss"], scope["last_loss"]
    yield f"Loss {first:.2f} in the first update, {last:.2f} in the last of {scope['updates_done']:,}."
    yield f"{len(checks):,} properties verified before the first update and after the last; saved and compared."


def _say_evaluation(answer: Document) -> Iterator[str]:
    probe, (said,) = answer["record"]["probe"], answer["generations"]
    same = "bit by bit" if probe["is_bitwise_equal"] else f"within {probe['max_abs_difference']:.3g}"
    yield f"It reloads: the logits are those of the trained model {same}."
    yield f"{QUESTION} {said['text'].strip()}"


def _summary(folder: str, answers: dict[str, Document]) -> Reply:
    """Hold predictions beside what they predicted."""
    estimated, traced, record = answers["estimate"], answers["trace"], answers["train"]["record"]
    prediction = record["prediction"]
    measured = max(each["peak_process_bytes"] or 0 for each in record["readings"])
    peaks = [
        _Peak("allocated on a card", estimated["allocated_bytes"], "estimated", traced["allocated_bytes"], "traced"),
        _Peak("reserved on a card", estimated["reserved_bytes"], "estimated", traced["reserved_bytes"], "traced"),
        _Peak("growth of the process", prediction["process_bytes"], prediction["kind"], measured, "measured"),
    ]

    def draw(terminal: Terminal) -> Iterator[str]:
        numbers = (Heading(name, is_number=True) for name in ("predicted", "found", "difference"))
        yield from table((Heading("Peak"), *numbers), [peak.cells() for peak in peaks], terminal)
        yield ""
        yield from wrapped(f"Everything is in {escape(folder)}. Next, with a model and rows of your own:", terminal)
        yield "  foretune recipe my-recipe --model MODEL --gpu CARD --data ROWS.jsonl"
        yield from wrapped("(Without a card: --dtype fp32 --set device=cpu in place of --gpu CARD.)", terminal)

    return Reply("quickstart", lambda: {"folder": folder, "peaks": [peak._asdict() for peak in peaks]}, draw)


class _Peak(NamedTuple):
    """A prediction beside what it predicted."""

    what: str
    predicted_bytes: int
    predicted_kind: str
    found_bytes: int
    found_kind: str

    def cells(self) -> tuple[str, ...]:
        """Write it for a person."""
        predicted, found = self.predicted_bytes, self.found_bytes
        difference = "none" if predicted == found else f"{predicted / found - 1:+.1%}" if found else "unknown"
        return (
            self.what,
            f"{format_bytes(predicted)} ({self.predicted_kind})",
            f"{format_bytes(found)} ({self.found_kind})",
            difference,
        )
