"""`foretune doctor`: whether this machine is ready, and what to run where it is not."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from foretune.cli.commands import Command, Example, option
from foretune.cli.output import Reply
from foretune.cli.terminal import Paint, Terminal, standard_streams, wrapped

if TYPE_CHECKING:
    from foretune.api import Finding, MachineReport

__all__ = ["doctor"]

NOT_READY = 3
_PAINTS: dict[str, Paint] = {"ok": "green", "missing": "yellow", "problem": "red", "unknown": "cyan"}
_STATE_WIDTH = 9


@click.command(
    cls=Command,
    name="doctor",
    examples=[
        Example("Is this machine ready, and what is to be run?", "foretune doctor"),
        Example("For a bug report: no name, path or token of yours", "foretune doctor --json"),
        Example("Do estimate, trace, training and saving work here?", "foretune doctor --selftest"),
    ],
)
@option("--selftest", group="Checks", is_flag=True, help="Make, trace, train and reload a tiny model: ten seconds.")
@option("--online", group="Checks", is_flag=True, help="Ask the Hub whether it answers; else no network is used.")
@option("--check", group="Answer", is_flag=True, help="Exit with 3 unless this machine is ready to train.")
def doctor(selftest: bool, online: bool, check: bool) -> Reply:
    """Look at this machine: Python, libraries, GPUs, memory, disks, Hub, leftovers of killed runs.

    Each check says ok, missing, problem or unknown, what was found, and the line to run next. Nothing is written
    (--selftest: in a temporary folder that is removed), and the answer holds no user or host name, home, token or
    command line: it can be shown to anybody. With --check ready means: for the first GPU where there is one, else for
    the CPU in fp32; and, with --selftest, that it passed.
    """
    from foretune import api

    if selftest:
        _say_that_it_takes_time()
    report = api.examine_machine(online=online, selftest=selftest)
    return Reply(
        "doctor",
        lambda: _document(report),
        lambda terminal: _draw(report, terminal),
        exit_code=NOT_READY if check and not report.is_ready else 0,
    )


def _say_that_it_takes_time() -> None:
    stderr = standard_streams()[1]
    if stderr.isatty():
        stderr.write("Making, tracing, training and reloading a tiny model ...\n")
        stderr.flush()


def _document(report: "MachineReport") -> dict[str, Any]:
    return {"is_ready": report.is_ready, **report.to_dict()}


def _draw(report: "MachineReport", terminal: Terminal) -> Iterator[str]:
    yield from wrapped(_summary(report), terminal)
    group = None
    for finding in report.findings:
        if finding.group != group:
            group = finding.group
            yield ""
            yield terminal.paint(group, "bold")
        yield from _finding(finding, terminal)


def _summary(report: "MachineReport") -> str:
    ready = report.ready
    answers = [
        f"planning: {_yes(ready.planning)}",
        f"training on the CPU (fp32): {_yes(ready.training_on_cpu)}",
        f"training on a GPU: {_yes(ready.training_on_gpu)}",
    ]
    if ready.self_test is not None:
        answers.append(f"self-test: {'passed' if ready.self_test else 'failed'}")
    return f"Ready for {'; '.join(answers)}."


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _finding(finding: "Finding", terminal: Terminal) -> Iterator[str]:
    """Draw the state as a word, what was found, what it prevents, and the lines to run, each below the other."""
    needed = f" (needed for {finding.needed_for})" if finding.is_wrong and finding.needed_for else ""
    bullet = f"  {finding.state:<{_STATE_WIDTH}}"
    first, *others = wrapped(f"{finding.found}{needed}", terminal, bullet=bullet)
    yield first.replace(finding.state, terminal.paint(finding.state, _PAINTS[finding.state]), 1)
    yield from others
    indent = " " * len(bullet)
    if finding.advice:
        yield from wrapped(finding.advice, terminal, indent=indent)
    for line in finding.run:  # whole, however narrow the terminal: it is to be copied
        yield f"{indent}$ {terminal.paint(line, 'bold')}"
