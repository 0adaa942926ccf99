"""`foretune trace`: the memory that a fine-tune needs by the real program, run on tensors without data."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from foretune.cli.commands import Command, Example, option
from foretune.cli.estimate import Request, answered, reply_with
from foretune.cli.files import require_files, write_new
from foretune.cli.options import plot_option, request_options
from foretune.cli.output import Reply
from foretune.cli.terminal import Terminal, escape, wrapped
from foretune.errors import ForetuneError
from foretune.units import format_bytes

if TYPE_CHECKING:
    from foretune.api import AliveTensors, TraceAnswer, Traced

__all__ = ["trace"]

NUM_SHOWN = 20

EXAMPLES = [
    Example("What is alive at the peak?", "foretune trace --model Qwen/Qwen2.5-0.5B --method qlora --why"),
    Example(
        "A family that the estimate does not know",
        "foretune trace --model ibm-granite/granite-3.1-1b-a400m-base --vram 16",
    ),
    Example(
        "A run on the CPU: does its process fit in this machine's memory?",
        "foretune trace --model gpt2 --dtype fp32 --set device=cpu --detect",
    ),
    Example(
        "A plot, and every allocation for a program of your own",
        "foretune trace --model gpt2 --vram 8 --plot step.svg --events step.ndjson",
    ),
]


@click.command(cls=Command, name="trace", examples=EXAMPLES)
@request_options
@option("--why", group="Answer", is_flag=True, help=f"List what is alive at the peak: the {NUM_SHOWN} largest.")
@option(
    "--events",
    group="Files",
    metavar="FILE",
    type=click.Path(),
    help="Write every allocation and free, a JSON object a line. The file may not exist yet.",
)
@plot_option
def trace(**given: Any) -> Reply | Iterator[Reply | ForetuneError]:
    """Trace the memory that a fine-tune needs, and whether it fits.

    Builds the model without weights and runs the real training step on tensors without data, from loading to the
    second update; so it answers for every family that Transformers builds, and for runs on the CPU (device: cpu): of
    these it says what their process grows by. Needs no GPU, but torch, Transformers and PEFT (pip install
    'foretune[train]'), and seconds where `foretune estimate` takes a fraction of one.
    """
    require_files(given, "events", "plot")
    return answered(given, _reply)


def _reply(request: Request, given: dict[str, Any]) -> Reply:
    from foretune import api

    traced = api.trace(
        request.loaded.config,
        device=request.device,
        offline=given["offline"],
        stack=request.stack,
        shape=request.shape,
    )
    answer, files = traced.answer, {"events_file": given["events"], "plot_file": given["plot"]}
    if given["events"] is not None:
        write_new(given["events"], event_lines(traced))
    if given["plot"] is not None:
        from foretune.cli.plot import draw_plot

        write_new(given["plot"], [draw_plot(answer, traced.timeline())])
    reply = reply_with(
        "trace",
        answer,
        request,
        given,
        lambda: {**_document(answer), **files},
        lambda terminal: _lines(answer, terminal, why=given["why"]),
    )
    return reply._replace(notes=tuple(f"Written: {escape(file)}" for file in files.values() if file is not None))


def _document(answer: "TraceAnswer") -> dict[str, Any]:
    """What a trace says beyond an estimate."""
    return {
        "alive": [group.to_dict() for group in answer.alive],
        "num_events": answer.num_events,
        "libraries": {library.name: library.version for library in answer.libraries},
        "remarks": answer.remarks,
    }


def event_lines(traced: "Traced") -> Iterator[str]:
    """Yield the lines of an events file: what was traced, then every event (docs/events.md)."""
    from msgspec.json import encode

    from foretune import __version__

    answer = traced.answer
    needed = answer.estimate
    head = {
        "schema": "foretune.events/1",
        "version": __version__,
        "kind": needed.kind,
        "model": answer.model,
        "fingerprint": needed.fingerprint,
        "stack": needed.stack,
        "libraries": {library.name: library.version for library in answer.libraries},
        "num_events": answer.num_events,
    }
    yield f"{encode(head).decode()}\n"
    for event in traced.events():
        yield f"{encode(event).decode()}\n"


def _lines(answer: "TraceAnswer", terminal: Terminal, *, why: bool) -> Iterator[str]:
    yield ""
    libraries = ", ".join(f"{library.name} {library.version}" for library in answer.libraries)
    yield from wrapped(f"Traced: {answer.num_events:,} allocations and frees, on {libraries}.", terminal)
    for remark in answer.remarks:
        yield from wrapped(f"Transformers says: {escape(remark)}", terminal, indent="  ", bullet="- ")
    if why:
        yield ""
        yield from _alive(answer, terminal)


def _alive(answer: "TraceAnswer", terminal: Terminal) -> Iterator[str]:
    """Draw the largest groups of what is alive at the peak, and the sum of the others."""
    needed = answer.estimate
    title = f"Alive at the peak, in {escape(needed.peak_phase)} ({needed.kind})"
    yield from (terminal.paint(line, "bold") for line in wrapped(title, terminal))
    shown, rest = answer.alive[:NUM_SHOWN], answer.alive[NUM_SHOWN:]
    for group in shown:
        yield from _group(group, terminal)
    if rest:
        others = format_bytes(sum(group.num_bytes for group in rest))
        text = f"{others:>10}  in {len(rest)} more groups, all of them with --json"
        yield from wrapped(text, terminal, indent="  ")


def _group(group: "AliveTensors", terminal: Terminal) -> Iterator[str]:
    many = f" x {group.count:,}" if group.count > 1 else ""
    size = f"{format_bytes(group.num_bytes):>10}"
    yield from wrapped(f"{escape(group.name)}{many}", terminal, indent="  ", bullet=f"{size}  ")
    kind = f"{' x '.join(f'{n:,}' for n in group.shape) or 'scalar'} {group.dtype}, " if group.dtype else ""
    text = f"{kind}{group.component}, made in {group.phase}"
    yield from (terminal.paint(line, "dim") for line in wrapped(text, terminal, indent=" " * 14))
