"""From a file of rows to what is trained: encoded, cut, counted, and kept for the next command."""

from array import array
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from foretune.data import (
    STORE_FORMAT,
    DataStats,
    Detail,
    Example,
    Lengths,
    RowProblem,
    StatsCounter,
    StoreWriter,
    TokenStore,
    Truncated,
    digest_file,
    open_store,
    prune_stores,
    store_place,
    truncate,
)
from foretune.errors import DataError
from foretune.models import TokenizerFiles
from foretune.runtime.encoding import EncodingTask, and_no_further, encode_file

__all__ = ["Preparation", "PreparedRows", "Progress", "prepare_rows"]

FORMAT = 1
"""Of what the encoder gives: raised when ids or answers of the same row change."""
BLOCK_OF_ROWS = 2048
"""Rows of a store that are looked at before the wrong ones are told."""
MAX_PROBLEMS = 10


class Preparation(NamedTuple):
    """What is asked for, beside the encoding itself."""

    task: EncodingTask
    tokenizer: TokenizerFiles
    versions: dict[str, str]
    """Of the libraries that render and tokenize."""
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
    was_cached: bool
    place: Path | None = None
    """Where `open_store` finds the rows; None: they are kept nowhere, or could not be."""


def prepare_rows(asked: Preparation) -> Iterator[Progress | PreparedRows]:
    """Encode a file of rows, and last give what it holds.

    Raises DataError with file, line and cause for a row that cannot be trained, a file that cannot be read, that
    holds no row, or that changed meanwhile; what `encode_file` raises else.
    """
    contents = _contents(asked)
    counted = _Counted(asked)
    store = _kept(asked, contents)
    was_cached = store is not None
    if store is None:
        place = yield from _encode(asked, counted, contents)
    else:
        yield from _recall(asked, counted, store)
        _require_unchanged(asked, contents)
        place = store.folder
    yield PreparedRows(
        stats=counted.counter.stats(counted.num_blanks),
        lengths=counted.counter.lengths(),
        row_lengths=counted.row_lengths,
        facts=counted.facts,
        details=counted.details,
        was_cached=was_cached,
        place=place,
    )


# -- what it goes by


def _contents(asked: Preparation) -> tuple[str, str]:
    """Digest the rows and the tokenizer's files."""
    return digest_file(asked.task.file), asked.tokenizer.fingerprint()


def _require_unchanged(asked: Preparation, contents: tuple[str, str]) -> None:
    """Raise DataError where a file changed while it was read."""
    if _contents(asked) != contents:
        message = "The file, or one of the tokenizer's, changed while it was read."
        raise DataError(message, hint="Run the command again.", place=asked.task.file)


def _place(asked: Preparation, contents: tuple[str, str], *, day: date | None) -> Path:
    """Return where the rows are kept; `day` where the chat template asks for it."""
    task = asked.task
    identity = [
        [FORMAT, STORE_FORMAT, asked.versions],
        *contents,
        task.settings._asdict(),
        task.template,
        None if day is None else day.isoformat(),
    ]
    assert asked.cache is not None
    return store_place(asked.cache, identity)


def _kept(asked: Preparation, contents: tuple[str, str]) -> TokenStore | None:
    """Open what an earlier command kept of the same rows; of a template that asks for the date, on the same day."""
    if asked.cache is None:
        return None
    places = (_place(asked, contents, day=day) for day in (None, asked.task.template_date))
    return next((store for store in map(open_store, places) if store is not None), None)


# -- counting


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

    def add(self, examples: Iterable[Example]) -> None:
        """Cut and count rows. Raises DataError for the first that are too long, when all of these are counted."""
        for example in examples:
            self.num_rows += 1
            cut = self._cut(example)
            if cut is not None:
                self.row_lengths.append(len(cut.example.ids))
                self.counter.add(cut.example, full_length=len(example.ids), is_answer_cut=cut.loses_answer)
        if self._problems:
            located = [problem.located(self._asked.task.file) for problem in self._problems[:MAX_PROBLEMS]]
            raise DataError.of(and_no_further([error.problems[0] for error in located]))

    def _cut(self, example: Example) -> Truncated | None:
        if self._asked.limit is None:
            return Truncated(example, is_cut=False, loses_answer=False)
        try:
            return truncate(example, self._asked.limit, self._asked.truncation)
        except RowProblem as problem:
            self._problems.append(problem)
            return None

    def keep_details(self, examples: Iterable[Example], details: Iterable[Detail]) -> None:
        """Keep the first rows in detail, as many as were asked for; each chunk brings its own first rows."""
        most = self._asked.num_details
        wanted = None if most is None else most - len(self.details)
        self.details += islice(zip(examples, details, strict=False), wanted)

    def require_rows(self) -> None:
        """Raise DataError where there is no row."""
        if self.num_rows == 0:
            blanks = "1 blank line" if self.num_blanks == 1 else f"{self.num_blanks:,} blank lines"
            message = f"There are no rows in it ({blanks})."
            raise DataError(message, hint="Write a row a line.", place=self._asked.task.file)


def _encode(asked: Preparation, counted: _Counted, contents: tuple[str, str]) -> Generator[Progress, None, Path | None]:
    """Encode the rows, and return where they are kept now."""
    total, done = Path(asked.task.file).stat().st_size, 0
    with ExitStack() as stack:
        writer = None
        if asked.cache is not None:
            with suppress(OSError):  # a cache that cannot be written is none
                writer = stack.enter_context(StoreWriter(asked.cache / "tokens"))
        for chunk in encode_file(asked.task, workers=asked.workers, num_details=asked.num_details):
            examples = list(chunk.rows.examples())
            counted.keep_details(examples, chunk.details)
            counted.num_blanks += chunk.num_blanks
            counted.facts = chunk.facts
            counted.add(examples)
            if writer is not None:
                try:
                    writer.append(chunk.rows)
                except OSError:
                    writer = None
            done += chunk.num_bytes
            yield Progress(done, total, counted.num_rows)
        counted.require_rows()
        _require_unchanged(asked, contents)
        if writer is not None and asked.cache is not None:
            day = asked.task.template_date if counted.facts["asks_for_date"] else None
            place = _place(asked, contents, day=day)
            with suppress(OSError):
                writer.publish(place, {"blanks": counted.num_blanks, "facts": counted.facts})
                prune_stores(asked.cache)
                return place
    return None


def _recall(asked: Preparation, counted: _Counted, store: TokenStore) -> Iterator[Progress]:
    """Count the rows of a store, and encode again only those that are wanted in detail."""
    counted.num_blanks, counted.facts = store.meta["blanks"], store.meta["facts"]
    total, examples = Path(asked.task.file).stat().st_size, store.examples()
    while block := list(islice(examples, BLOCK_OF_ROWS)):
        counted.add(block)
        yield Progress(total * counted.num_rows // len(store), total, counted.num_rows)
    wanted = len(store) if asked.num_details is None else min(asked.num_details, len(store))
    if wanted:
        with closing(encode_file(asked.task, workers=1, num_details=asked.num_details)) as chunks:
            for chunk in chunks:
                counted.keep_details(chunk.rows.examples(), chunk.details)
                if len(counted.details) >= wanted:
                    break
