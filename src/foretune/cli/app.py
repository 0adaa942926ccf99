"""The root command, and the border where every failure becomes a message and an exit code."""

import gc
import os
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import click

from foretune import __version__
from foretune.cli.commands import HELP_WIDTH, Answered, Example, Group, LazyCommand, Option
from foretune.cli.output import Output, Reply
from foretune.cli.usage import usage_error
from foretune.errors import ForetuneError

__all__ = ["main", "root", "run"]

INTERRUPTED = 130
CLOSED_PIPE = 141


def _show_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        raise Answered(Reply("version", dict, lambda _: [f"foretune {__version__}"]))


root = Group(
    name="foretune",
    help="Will this fine-tune fit on my GPU? Answered before anything is downloaded.",
    lazy={
        "estimate": LazyCommand("foretune.cli.estimate", "estimate", "The memory a fine-tune needs, and if it fits."),
        "recommend": LazyCommand("foretune.cli.recommend", "recommend", "What to run: the best settings that fit."),
        "trace": LazyCommand("foretune.cli.trace", "trace", "The same by the real program, run without data."),
        "recipe": LazyCommand("foretune.cli.recipe", "recipe", "A fine-tune as a folder to read and to run."),
        "train": LazyCommand("foretune.cli.train", "train", "Run a fine-tune, with every promise checked."),
        "evaluate": LazyCommand("foretune.cli.evaluate", "evaluate", "Reload what a run made, and what it does."),
        "merge": LazyCommand("foretune.cli.merge", "merge", "Adapters and base as one model, and how far it is off."),
        "quickstart": LazyCommand("foretune.cli.quickstart", "quickstart", "The whole journey once, on this CPU."),
        "score": LazyCommand("foretune.cli.score", "score", "How far predictions are from what was measured."),
        "data": LazyCommand("foretune.cli.data", "data", "The rows that are trained on: check and convert."),
        "models": LazyCommand("foretune.cli.models", "models", "The models whose architecture is known."),
        "devices": LazyCommand("foretune.cli.devices", "devices", "The GPUs that are known, and this machine's."),
        "config": LazyCommand("foretune.cli.config", "config", "Write, check and explain a configuration file."),
        "doctor": LazyCommand("foretune.cli.doctor", "doctor", "Is this machine ready, and what to run where not."),
        "completion": LazyCommand("foretune.cli.completion", "completion", "A completion script for your shell."),
        "help": LazyCommand("foretune.cli.topics", "help_command", "Help on a command, or on exit-codes."),
    },
    params=[
        Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_version,
            help="Show the version.",
            group="Output",
        )
    ],
    examples=[
        Example("Does LoRA on a 7B model fit on an RTX 3090?", "foretune estimate --model Qwen/Qwen2.5-7B --gpu 3090"),
        Example("What is this model made of?", "foretune models show Qwen/Qwen2.5-7B"),
        Example("What do exit codes mean?", "foretune help exit-codes"),
    ],
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit code."""
    gc.disable()  # a process of one answer: collecting costs 6 % of an estimate's start and frees about 1 MiB
    code = run(sys.argv[1:] if arguments is None else arguments)
    for number in (signal.SIGINT, signal.SIGTERM):  # too late: the answer is out, and the code shall agree with it
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run the command line. Returns the exit code; every failure is written, none is raised."""
    output = Output(arguments)
    try:
        return _run(arguments, output)
    except BrokenPipeError:
        return _leave_closed_pipe()
    except OSError as error:
        reason = f"The answer cannot be written: {error.strerror or type(error).__name__}."
        return _fail_last(output, _error("output", reason, "Check where stdout goes.", 1))


def _run(arguments: Sequence[str], output: Output) -> int:
    try:
        return _emit(_invoke(arguments, output), output)
    except Answered as answered:
        return output.answer(answered.reply)
    except ForetuneError as error:
        return output.fail(error.as_json())
    except click.ClickException as error:
        return output.fail(usage_error(error))
    except (KeyboardInterrupt, click.Abort) as stop:
        return output.fail(_error("interrupted", "Interrupted.", None, getattr(stop, "exit_code", INTERRUPTED)))
    except OSError:
        raise
    except Exception as error:
        return output.fail(_internal_error(error, output))


def _invoke(arguments: Sequence[str], output: Output) -> Any:
    width = min(output.terminal.width, HELP_WIDTH)
    return root.main(list(arguments), prog_name="foretune", standalone_mode=False, terminal_width=width)


def _emit(result: Any, output: Output) -> int:
    if isinstance(result, Reply):
        return output.answer(result)
    try:
        return output.stream(result)
    finally:  # what was begun ends now, however the answer ended: a run writes its record
        if isinstance(result, Generator):
            result.close()


def _error(code: str, message: str, hint: str | None, exit_code: int) -> dict[str, Any]:
    problem = {"message": message, "hint": hint, "place": None, "field": None}
    return {"code": code, "message": message, "hint": hint, "exit_code": exit_code, "problems": [problem]}


def _internal_error(error: Exception, output: Output) -> dict[str, Any]:
    if output.is_debug:
        from traceback import format_exception

        output.say("".join(format_exception(error)).splitlines())
    message = f"This is a mistake in foretune, not in your request: {type(error).__name__}: {error}"
    hint = "Please report it with the command and what it prints with --debug."
    return _error("internal", message, hint, 1)


def _leave_closed_pipe() -> int:
    """Say nothing more: whoever read stdout has gone. What Python still flushes at exit goes nowhere."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return CLOSED_PIPE


def _fail_last(output: Output, error: dict[str, Any]) -> int:
    """Report on stderr that stdout failed; where that fails too, the exit code is all there is."""
    output.is_json = False
    with suppress(OSError):
        output.fail(error)
    _leave_closed_pipe()
    return int(error["exit_code"])
