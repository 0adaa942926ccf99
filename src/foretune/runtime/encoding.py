"""Encode a file of rows in processes of their own, in order, in memory that does not grow with the file."""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import date
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Timer
from typing import Any, NamedTuple

import foretune
from foretune import errors
from foretune.data import Detail, EncodedRows, EncodeSettings, open_rows, read_chunks
from foretune.errors import ConfigError, DataError, ForetuneError, MissingDependencyError, Problem
from foretune.runtime.encoder import read_frame, write_frame
from foretune.runtime.libraries import DATA_INSTALL_LINE

__all__ = ["EncodedChunk", "EncodingTask", "and_no_further", "default_workers", "encode_file"]

CHUNK_BYTES = 1 << 19
CHUNK_SECONDS = 180.0
"""For what a process is given at once; then it is ended, whatever it does."""
MAX_WORKERS = 4
"""Of the default: beyond them the parent, which writes and counts, is what takes the time."""


class EncodingTask(NamedTuple):
    """What is encoded, and by which tokenizer."""

    file: str
    folder: Path
    """Where the tokenizer's files are."""
    name: str
    """What the tokenizer is called in messages."""
    settings: EncodeSettings
    template: str | None
    """Another chat template than the tokenizer's own."""
    template_date: date
    """The day that templates are told."""


class EncodedChunk(NamedTuple):
    """Some lines of the file."""

    rows: EncodedRows
    num_blanks: int
    details: list[Detail]
    num_bytes: int
    facts: dict[str, Any]
    """Of the tokenizer."""


def default_workers() -> int:
    """Return how many processes encode where nobody says: one for each core, at most four."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)


def encode_file(task: EncodingTask, *, workers: int, num_details: int | None = 0) -> Generator[EncodedChunk]:
    """Yield a file's rows as tokens, in order and the same for any number of workers.

    `num_details` is how many rows are given in detail; None: all. Raises DataError for rows that cannot be trained
    (the first of them, and others near it) and where the file cannot be read, UnsupportedError for a tokenizer that
    cannot be used, and MissingDependencyError.
    """
    with ExitStack() as stack:
        stream = stack.enter_context(open_rows(task.file))
        pool = stack.enter_context(_Pool(task, workers))
        waiting: deque[Future[EncodedChunk]] = deque()
        for first, data in read_chunks(stream, task.file, CHUNK_BYTES):
            waiting.append(pool.submit(first, data, num_details))
            while len(waiting) >= 2 * workers or (waiting and waiting[0].done()):
                chunk = waiting.popleft().result()
                if num_details is not None:
                    num_details = max(num_details - len(chunk.rows.lines), 0)
                yield chunk
        while waiting:
            yield waiting.popleft().result()


class _Pool:
    """Processes that are started as they are needed, and ended with the block."""

    def __init__(self, task: EncodingTask, workers: int) -> None:
        self._task = task
        self._render_seconds = render_seconds()
        self._threads = ThreadPoolExecutor(workers)
        self._num_threads = max((os.cpu_count() or 1) // workers, 1)
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        self._all: list[_Process] = []
        self._lock = Lock()
        self._is_over = False

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_over = True
            for process in self._all:
                process.end()
        self._threads.shutdown(wait=True)

    def submit(self, first: int, data: bytes, num_details: int | None) -> "Future[EncodedChunk]":
        """Encode lines as soon as a process is free."""
        return self._threads.submit(self._encode, first, data, num_details)

    def _encode(self, first: int, data: bytes, num_details: int | None) -> EncodedChunk:
        try:
            process = self._idle.get_nowait()
        except Empty:
            process = self._started()
            process.load(self._task, self._render_seconds)
        chunk = process.encode(self._task.file, first, data, num_details)
        self._idle.put(process)
        return chunk

    def _started(self) -> "_Process":
        """Start a process, unless the block has ended: then nobody would end it."""
        with self._lock:
            if self._is_over:
                raise DataError("The encoding was given up.", place=self._task.file)
            process = _Process(self._task, self._num_threads)
            self._all.append(process)
            return process


def render_seconds() -> float:
    """Return how long a chat template may take for one rendering. Raises ConfigError for what is no time."""
    text = os.environ.get("FORETUNE_RENDER_SECONDS", "10")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if 0.1 <= seconds <= 3600:
        return seconds
    raise ConfigError(
        f"FORETUNE_RENDER_SECONDS is {text[:40]!r}, and no time from 0.1 to 3600 seconds.", hint="Correct or unset it."
    )


class _Process:
    """One process of `encoder.py`."""

    def __init__(self, task: EncodingTask, num_threads: int) -> None:
        source = str(Path(foretune.__file__).parents[1])
        paths = [source, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "true",
            "RAYON_NUM_THREADS": str(num_threads),
        }
        # -P: a file in the current folder must not stand in for a library.
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "foretune.runtime.encoder"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        except OSError as error:
            reason = error.strerror or type(error).__name__
            message = f"No process could be started to encode the rows: {reason}."
            raise DataError(message, hint="Close other programs, or use fewer --workers.", place=task.file) from error
        self._facts: dict[str, Any] = {}

    def load(self, task: EncodingTask, seconds: float) -> None:
        """Load the tokenizer. Raises UnsupportedError, MissingDependencyError."""
        answer = self._ask(
            {
                "folder": str(task.folder.resolve()),
                "template": task.template,
                "date": task.template_date.isoformat(),
                "name": task.name,
                "settings": task.settings._asdict(),
                "render_seconds": seconds,
            }
        )
        if answer is None:
            raise DataError(f"The tokenizer of {task.name} could not be loaded: its process ended.", place=task.file)
        if "error" in answer:
            raise _error_of(answer)
        self._facts = answer["facts"]

    def encode(self, file: str, first: int, data: bytes, num_details: int | None) -> EncodedChunk:
        """Encode whole lines. Raises DataError for those that cannot be trained."""
        answer = self._ask({"first": first, "data": data, "details": num_details})
        if answer is None:
            last = first + data.removesuffix(b"\n").count(b"\n")
            where = f"line {first}" if first == last else f"one of the lines {first} to {last}"
            raise DataError(
                f"{where} cannot be encoded: its process ran out of memory or time.",
                hint="Look for a very long row; a chat template may not loop without end.",
                place=f"{file}:{first}",
            )
        if answer["problems"]:
            problems = [Problem(message, hint, f"{file}:{line}") for line, message, hint in answer["problems"]]
            raise DataError.of(and_no_further(problems))
        details = [Detail(text, starts, ends) for text, starts, ends in answer["details"]]
        rows = EncodedRows.from_wire(answer["rows"])
        return EncodedChunk(rows, answer["blanks"], details, len(data), self._facts)

    def _ask(self, frame: Any) -> Any:
        """Send a frame and return the answer; None where the process ended, by itself or because time was over."""
        timer = Timer(CHUNK_SECONDS, self._process.kill)
        timer.start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            write_frame(self._process.stdin, frame)  # type: ignore[arg-type]
            return read_frame(self._process.stdout)  # type: ignore[arg-type]
        except (OSError, ValueError):
            return None
        finally:
            timer.cancel()

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


def and_no_further(problems: list[Problem]) -> list[Problem]:
    """Say beside the last of the first wrong rows that no later one was looked at."""
    last = problems[-1]
    return [*problems[:-1], last._replace(hint=" ".join(filter(None, (last.hint, "Later rows were not checked."))))]


def _error_of(answer: dict[str, Any]) -> ForetuneError:
    problems = [Problem(*problem) for problem in answer["problems"]]
    if answer["error"] == "ImportError":
        return MissingDependencyError(problems[0].message, hint=f"Run: {DATA_INSTALL_LINE}")
    kind: type[ForetuneError] = getattr(errors, answer["error"], DataError)
    return kind.of(problems)
