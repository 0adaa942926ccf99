"""The process that reads, renders and tokenizes rows: `python -P -m foretune.runtime.encoder`.

A chat template is a program that somebody else wrote. Here it runs in Transformers' sandbox, in a process of its own
that never asks the Hub, with a limit on memory and one on the time of a rendering; `encoding.py` starts it, feeds it,
and ends it. Frames go both ways: eight bytes of length, then MessagePack.
"""

import logging
import os
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from datetime import date
from functools import wraps
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from foretune.data import (
    Detail,
    EncodedRows,
    EncodeSettings,
    Example,
    Row,
    RowProblem,
    Tokenizer,
    encode_rows,
    parse_row,
)
from foretune.errors import ForetuneError
from foretune.runtime.tokenizer import ModelTokenizer, load_tokenizer, without_torch

__all__ = ["encode_chunk", "main", "read_frame", "write_frame"]

SPARE_BYTES = 6 << 30
"""Address space beyond what the libraries have, where the system can limit it: a row of 16 MiB may take half of it."""
MAX_PROBLEMS = 10
"""Rows that are reported at once."""
_LENGTH = struct.Struct("<Q")


def read_frame(stream: BinaryIO) -> Any:
    """Read one frame; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = stream.read(length)
    return None if len(body) < length else msgspec.msgpack.decode(body)


def write_frame(stream: BinaryIO, frame: Any) -> None:
    """Write one frame."""
    body = msgspec.msgpack.encode(frame)
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def main() -> None:
    """Answer frames until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it ends
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not stand between two frames
    logging.getLogger("transformers").setLevel(logging.ERROR)  # of this process, which is ours
    without_torch()
    task = read_frame(stdin)
    if task is None:
        return
    try:
        import transformers.utils.chat_template_utils  # noqa: F401 - before memory is limited

        _limit_memory()
        tokenizer = _load(task)
    except ForetuneError as error:
        write_frame(stdout, {"error": type(error).__name__, "problems": error.problems})
        return
    except ImportError as error:
        write_frame(stdout, {"error": "ImportError", "problems": [(f"{error.name or error} is not installed.",)]})
        return
    write_frame(stdout, {"facts": _shown_facts(tokenizer)})
    settings = EncodeSettings(**task["settings"])
    while (chunk := read_frame(stdin)) is not None:
        write_frame(stdout, encode_chunk(chunk["first"], chunk["data"], tokenizer, settings, chunk["details"]))


def _load(task: dict[str, Any]) -> ModelTokenizer:
    tokenizer = load_tokenizer(
        Path(task["folder"]),
        template=task["template"],
        template_date=date.fromisoformat(task["date"]),
        name=task["name"],
    )
    seconds = task["render_seconds"]
    tokenizer.render = _timed(tokenizer.render, seconds)  # type: ignore[method-assign]
    tokenizer.render_own = _timed(tokenizer.render_own, seconds)  # type: ignore[method-assign]
    return tokenizer


def _shown_facts(tokenizer: ModelTokenizer) -> dict[str, Any]:
    """Return what is kept beside encoded rows: nothing of where the tokenizer lies."""
    facts = tokenizer.facts
    hidden = {"name", "special_ids", "special_texts"}
    shown = {name: value for name, value in facts._asdict().items() if name not in hidden}
    return {**shown, "library": tokenizer.library}


def _timed(render: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Let a rendering raise TimeoutError when its time is over, where the system has timers for it."""
    if not hasattr(signal, "setitimer"):
        return render

    def ring(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} seconds.")

    signal.signal(signal.SIGALRM, ring)

    @wraps(render)
    def timed(*args: Any, **kwargs: Any) -> Any:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            return render(*args, **kwargs)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    return timed


def _limit_memory() -> None:
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE_BYTES, hard))


# -- one chunk


def encode_chunk(
    first: int, data: bytes, tokenizer: Tokenizer, settings: EncodeSettings, num_details: int | None = 0
) -> dict[str, Any]:
    """Encode whole lines of a file. Returns packed rows, blank lines, details of the first rows, and problems.

    `num_details` is how many rows are shown in detail; None: all.
    """
    rows, num_blanks, problems = _parsed(first, data)
    examples, details = _encoded(rows, tokenizer, settings, problems, num_details)
    problems.sort(key=lambda problem: problem.line)
    return {
        "rows": EncodedRows.of(examples).to_wire(),
        "blanks": num_blanks,
        "details": [(detail.text, detail.starts, detail.ends) for detail in details],
        "problems": [(problem.line, problem.told, problem.hint) for problem in problems[:MAX_PROBLEMS]],
    }


def _parsed(first: int, data: bytes) -> tuple[list[Row], int, list[RowProblem]]:
    rows: list[Row] = []
    problems: list[RowProblem] = []
    num_blanks = 0
    for line, text in enumerate(data.removesuffix(b"\n").split(b"\n"), first):
        try:
            row = parse_row(text, line)
        except RowProblem as problem:
            problems.append(problem)
            if problem.is_of_all:
                break
            continue
        if row is None:
            num_blanks += 1
        else:
            rows.append(row)
    return rows, num_blanks, problems


def _encoded(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    settings: EncodeSettings,
    problems: list[RowProblem],
    num_details: int | None,
) -> tuple[list[Example], list[Detail]]:
    """Encode rows; those that cannot be are added to `problems`, as far as they come before the last to be told."""
    if len(problems) >= MAX_PROBLEMS:
        rows = [row for row in rows if row.line < problems[MAX_PROBLEMS - 1].line]
    examples: list[Example] = []
    details: list[Detail] = []
    num_refused = 0
    while rows and num_refused < MAX_PROBLEMS:
        try:
            for example, detail in encode_rows(rows, tokenizer, settings):
                examples.append(example)
                if num_details is None or len(details) < num_details:
                    details.append(detail)
            break
        except RowProblem as problem:
            problems.append(problem)
            num_refused += 1
            rows = [] if problem.is_of_all else [row for row in rows if row.line > problem.line]
    return examples, details


if __name__ == "__main__":
    main()
