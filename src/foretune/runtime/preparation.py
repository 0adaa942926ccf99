"""From a file of rows to what is trained: encoded, cut, counted, and kept for the next command."""

from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from foretune.data import (
    DataStats,
    Detail,
    Example,
    Lengths,
    RowProblem,
    StatsCounter,
    StoreWriter,
    TokenStore,
    digest_file,
    open_store,
    prune_stores,
    store_place,
    truncate,
)
from foretune.errors import DataError
from foretune.runtime.encoding import EncodingTask, encode_file

__all__ = ["Preparation", "PreparedRows", "Progress", "prepare_rows"]

FORMAT = 1
"""Of what the encoder gives: raised when ids or answers of the same row change."""


class Preparation(NamedTuple):
    """What is asked for, beside the encoding itself."""

    task: EncodingTask
    identity: Any
    """Of the tokenizer and the libraries: with the task, what the cache goes by."""
    limit: int | None
    """`batch.sequence_length`; None: rows may have any length."""
    truncation: Literal["error", "right"]
    workers: int
    cache: Path | None
    """None: nothing is kept."""
    num_details: int | None = 0
    """Rows to be given in detail; None: all."""


class Progress(NamedTuple):
    """How far the encoding is."""

    num_bytes: int
    total_bytes: int
    num_rows: int


class PreparedRows(NamedTuple):
    """The rows of a file, counted."""

    stats: DataStats
    lengths: Lengths
    """Tokens of each row before truncation."""
    row_lengths: "array[int]"
    """Tokens of each row after truncation, in the order of the file: 4 bytes a row."""
    facts: dict[str, Any]
    """Of the tokenizer."""
    details: list[tuple[Example, Detail]]
    """The first rows, whole."""
    store: TokenStore | None
    """All rows, whole; None where nothing is kept."""
    was_cached: bool


def prepare_rows(asked: Preparation) -> Iterator[Progress | PreparedRows]:
    """Encode a file of rows, and last give what it holds.

    Raises DataError with file, line and cause for a row that cannot be trained, a file that cannot be read, that
    holds no row, or that changed meanwhile; what `encode_file` raises else.
    """
    file = asked.task.file
    content = digest_file(file)
    place = None if asked.cache is None else store_place(asked.cache, _identity(asked, content))
    store = None if place is None else open_store(place)
    counted = _Counted(asked)
    if store is None:
        yield from _encode(asked, counted, place)
        if digest_file(file) != content:
            raise DataError("The file changed while it was read.", hint="Run the command again.", place=file)
        store = None if place is None else open_store(place)
        was_cached = False
    else:
        _recall(asked, counted, store)
        was_cached = True
    yield PreparedRows(
        stats=counted.counter.stats(counted.num_blanks),
        lengths=counted.counter.lengths(),
        row_lengths=counted.row_lengths,
        facts=counted.facts,
        details=counted.details,
        store=store,
        was_cached=was_cached,
    )


def _identity(asked: Preparation, content: str) -> Any:
    task = asked.task
    return [FORMAT, content, asked.identity, task.settings._asdict(), task.template]


class _Counted:
    """What is gathered while rows pass by."""

    def __init__(self, asked: Preparation) -> None:
        self._asked = asked
        self.counter = StatsCounter(asked.task.settings.supervision)
        self.num_rows = self.num_blanks = 0
        self.row_lengths = array("I")
        self.facts: dict[str, Any] = {}
        self.details: list[tuple[Example, Detail]] = []
        self._problems: list[RowProblem] = []

    def add(self, example: Example) -> None:
        """Cut and count one row; the first that is too long is reported at the end of its chunk."""
        self.num_rows += 1
        if self._asked.limit is None:
            self.row_lengths.append(len(example.ids))
            self.counter.add(example, full_length=len(example.ids), is_answer_cut=False)
            return
        try:
            cut = truncate(example, self._asked.limit, self._asked.truncation)
        except RowProblem as problem:
            self._problems.append(problem)
            return
        self.row_lengths.append(len(cut.example.ids))
        self.counter.add(cut.example, full_length=len(example.ids), is_answer_cut=cut.loses_answer)

    def keep_details(self, examples: Iterable[Example], details: Iterable[Detail]) -> None:
        """Keep the first rows in detail, as many as were asked for; each chunk brings its own first rows."""
        most = self._asked.num_details
        wanted = None if most is None else most - len(self.details)
        self.details += islice(zip(examples, details, strict=False), wanted)

    def raise_problems(self, most: int = 10) -> None:
        """Raise DataError for the rows that are too long."""
        if self._problems:
            located = [problem.located(self._asked.task.file) for problem in self._problems[:most]]
            raise DataError.of([error.problems[0] for error in located])

    def require_rows(self) -> None:
        """Raise DataError where there is no row."""
        if self.num_rows == 0:
            lines = "1 blank line" if self.num_blanks == 1 else f"{self.num_blanks:,} blank lines"
            raise DataError(
                f"There are no rows in it ({lines}).", hint="Write a row a line.", place=self._asked.task.file
            )


def _encode(asked: Preparation, counted: _Counted, place: Path | None) -> Iterator[Progress]:
    total, done = Path(asked.task.file).stat().st_size, 0
    with ExitStack() as stack:
        writer = None
        if place is not None:
            with suppress(OSError):  # a cache that cannot be written is none
                writer = stack.enter_context(StoreWriter(place))
        for chunk in encode_file(asked.task, workers=asked.workers, num_details=asked.num_details):
            examples = list(chunk.rows.examples())
            counted.keep_details(examples, chunk.details)
            counted.num_blanks += chunk.num_blanks
            counted.facts = chunk.facts
            for example in examples:
                counted.add(example)
            counted.raise_problems()
            if writer is not None:
                try:
                    writer.append(chunk.rows)
                except OSError:
                    writer = None
            done += chunk.num_bytes
            yield Progress(done, total, counted.num_rows)
        counted.require_rows()
        if writer is not None and asked.cache is not None:
            with suppress(OSError):
                writer.publish({"blanks": counted.num_blanks, "facts": counted.facts})
                prune_stores(asked.cache)


def _recall(asked: Preparation, counted: _Counted, store: TokenStore) -> None:
    """Count the rows of a store, and encode again only those that are wanted in detail."""
    counted.num_blanks, counted.facts = store.meta["blanks"], store.meta["facts"]
    for example in store.examples():
        counted.add(example)
        counted.raise_problems()
    wanted = len(store) if asked.num_details is None else min(asked.num_details, len(store))
    chunks = encode_file(asked.task, workers=1, num_details=asked.num_details)
    while len(counted.details) < wanted:
        chunk = next(chunks)
        counted.keep_details(chunk.rows.examples(), chunk.details)
    chunks.close()
