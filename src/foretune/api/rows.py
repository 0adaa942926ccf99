"""The journeys of the data room: what a file of rows holds, and what a model would learn from it."""

from array import array
from collections.abc import Generator, Iterator
from datetime import date
from hashlib import sha256
from pathlib import Path
from sys import byteorder
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from foretune.contract import BatchSettings, TrainingConfig
from foretune.data import (
    DataStats,
    Detail,
    EncodeSettings,
    Example,
    LengthBin,
    Packing,
    Padding,
    bin_lengths,
    cache_folder,
    labels_of,
    open_store,
    pack_rows,
    pad_rows,
    plan_batches,
    runs_of,
    supervised_mask,
)
from foretune.errors import ConfigError, DataError
from foretune.models import resolve_tokenizer
from foretune.runtime.encoding import EncodingTask, default_workers
from foretune.runtime.libraries import require_text_libraries
from foretune.runtime.preparation import Preparation, PreparedRows, Progress, prepare_rows
from foretune.values import Value

if TYPE_CHECKING:
    from foretune.runtime.feed import Rows

__all__ = [
    "DataAnswer",
    "Progress",
    "RowPreview",
    "RowRun",
    "check_data",
    "kept_rows",
    "order_sha256",
    "prepare_data",
    "prepared",
    "row_preparation",
]

HASHED_AT_ONCE = 1 << 16
Count = Annotated[int, Meta(ge=0)]


class RowRun(Value, frozen=True, kw_only=True):
    """Neighbouring tokens that carry loss, or do not."""

    text: str
    is_supervised: bool


class RowPreview(Value, frozen=True, kw_only=True):
    """One row as a model sees it."""

    line: Count
    text: str
    """The row as it is tokenized; EOS that was added to an instruction row is not part of it."""
    ids: tuple[int, ...]
    labels: tuple[int, ...]
    """Each token's id where it carries loss, else -100; a model shifts them by one."""
    runs: tuple[RowRun, ...]

    @property
    def supervised(self) -> tuple[str, ...]:
        """The texts that carry loss."""
        return tuple(run.text for run in self.runs if run.is_supervised)


class DataAnswer(Value, frozen=True, kw_only=True):
    """What a file of rows holds, and which of its tokens a model would learn from."""

    file: str
    model: str
    tokenizer: str
    """Class, and library with its version."""
    revision: str | None
    """The commit of the Hub that the tokenizer is from; None for a folder."""
    has_chat_template: bool
    """Whether conversations can be written; instruction rows have a form of their own."""
    template_date: str | None
    """The day that the chat template is told; None where it does not ask."""
    sequence_length: Annotated[int, Meta(ge=1)] | None
    """Rows are cut to it, or refused; None: they were taken as they are."""
    truncation: Literal["error", "right"]
    stats: DataStats
    padding: Padding
    """Rows in the micro batches of the configuration, each padded to its longest row."""
    packing: Packing
    """Rows packed to the sequence length (to the longest row where there is none)."""
    length_bins: tuple[LengthBin, ...]
    """Rows by their tokens before truncation."""
    rows: tuple[RowPreview, ...]
    """The first rows in detail."""
    order_sha256: str
    """Of the micro batches of the first epoch: a function of the rows' lengths, `batch` and `seed` alone."""
    was_cached: bool
    """Whether the tokens were kept by an earlier command."""


def check_data(
    config: TrainingConfig,
    *,
    chat_template: str | None = None,
    limit: int | None = None,
    num_rows: int | None = 2,
    offline: bool = False,
    workers: int | None = None,
    use_cache: bool = True,
) -> Iterator[Progress | DataAnswer]:
    """Encode the rows of `data.train` and say what they hold; the last item is the answer, those before it progress.

    `chat_template` is the text of another template than the tokenizer's own. `limit` is the longest row in tokens, as
    `batch.sequence_length` is in a run; None: any length. `num_rows` is how many rows are given in detail; None: all.
    Needs the extra `data`, and no torch. Raises DataError with file, line and cause; ConfigError, UnsupportedError,
    ModelAccessError and MissingDependencyError.

        *_, answer = check_data(build_config({"model.id": "./tokenizer", "data.train": "rows.jsonl"}).config)
        answer.stats.supervised_share
    """
    asked = row_preparation(
        config,
        config.data.train,
        chat_template=chat_template,
        limit=limit,
        num_rows=num_rows,
        offline=offline,
        workers=workers,
        cache=cache_folder() if use_cache else None,
    )
    for item in prepare_rows(asked):
        if isinstance(item, Progress):
            yield item
        else:
            yield _answer(config, asked, item)


def prepare_data(
    config: TrainingConfig, *, offline: bool = False, workers: int | None = None, use_cache: bool = True
) -> Iterator[Progress | PreparedRows]:
    """Encode the rows of `data.train` whatever their length, for their lengths alone. Raises as `check_data`.

    *_, prepared = prepare_data(config)
    prepared.lengths.longest
    """
    cache = cache_folder() if use_cache else None
    return prepare_rows(row_preparation(config, config.data.train, offline=offline, workers=workers, cache=cache))


def row_preparation(
    config: TrainingConfig,
    file: str | None,
    *,
    chat_template: str | None = None,
    limit: int | None = None,
    num_rows: int | None = 0,
    offline: bool = False,
    workers: int | None = None,
    cache: Path | None = None,
) -> Preparation:
    """Say how a file of rows is encoded under a configuration. Raises as `check_data` before it reads a row."""
    data = config.data
    if file is None:
        raise ConfigError("No file of rows is named.", hint="Pass FILE, or set data.train.", field="data.train")
    versions = require_text_libraries()
    files = resolve_tokenizer(config.model.id, revision=config.model.revision, offline=offline)
    day = date.today() if data.template_date is None else date.fromisoformat(data.template_date)
    task = EncodingTask(
        file=file,
        folder=files.folder,
        name=files.name,
        settings=EncodeSettings(data.supervision, data.spans, data.allow_template_rewrite),
        template=chat_template,
        template_date=day,
    )
    return Preparation(
        task=task,
        tokenizer=files,
        versions=versions,
        limit=limit,
        truncation=data.truncation,
        workers=workers or default_workers(),
        cache=cache,
        num_details=num_rows,
    )


def prepared(task: Preparation) -> Generator[Progress, None, PreparedRows]:
    """Encode a file of rows for a run, yielding how far it is."""
    found = None
    for item in prepare_rows(task):
        if isinstance(item, PreparedRows):
            found = item
        else:
            yield item
    assert found is not None, "the last item is the rows"
    return found


def kept_rows(found: PreparedRows, cache: Path) -> "Rows":
    """Open the rows where they are kept. Raises DataError where the cache did not take them."""
    from foretune.runtime.feed import Rows

    store = None if found.place is None else open_store(found.place)
    if store is None:
        raise DataError(
            f"The encoded rows cannot be kept in {cache}, and a run reads them from there.",
            hint="Free some space there, or name a folder that you may write to: FORETUNE_CACHE=FOLDER.",
        )
    return Rows(store, found.row_lengths)


def _answer(config: TrainingConfig, asked: Preparation, found: PreparedRows) -> DataAnswer:
    limit, batch, files = asked.limit, config.batch, asked.tokenizer
    trained = found.lengths if limit is None else found.lengths.cut(limit)
    asks = found.facts["asks_for_date"]
    return DataAnswer(
        file=asked.task.file,
        model=files.name,
        tokenizer=found.facts["library"],
        revision=files.revision,
        has_chat_template=found.facts["has_template"],
        template_date=asked.task.template_date.isoformat() if asks else None,
        sequence_length=limit,
        truncation=asked.truncation,
        stats=found.stats,
        padding=pad_rows(trained, batch.micro_batch_size, is_sorted=batch.sort_by_length),
        packing=pack_rows(trained, limit or trained.longest),
        length_bins=bin_lengths(found.lengths),
        rows=tuple(_preview(example, detail, config, limit, found) for example, detail in found.details),
        order_sha256=_first_order(config, limit, found),
        was_cached=found.was_cached,
    )


def _first_order(config: TrainingConfig, limit: int | None, found: PreparedRows) -> str:
    batch = config.batch.with_(sequence_length=limit or found.lengths.longest)
    return order_sha256(found.row_lengths, batch, config.seed)


def order_sha256(lengths: "array[int]", batch: BatchSettings, seed: int) -> str:
    """Return a SHA-256 of the first epoch's micro batches: which rows stand in which, and in what order."""
    plan = plan_batches(lengths, batch, seed=seed, epoch=0)
    digest = sha256()
    for numbers in (plan.rows, plan.row_starts, plan.batch_starts):
        for start in range(0, len(numbers), HASHED_AT_ONCE):
            part = array("Q", numbers[start : start + HASHED_AT_ONCE])
            if byteorder == "big":
                part.byteswap()
            digest.update(part)
    return digest.hexdigest()


def _preview(
    example: Example, detail: Detail, config: TrainingConfig, limit: int | None, found: PreparedRows
) -> RowPreview:
    cut = example._replace(ids=example.ids[:limit], answer=example.answer[:limit])
    shown = Detail(detail.text, detail.starts[: len(cut.ids)], detail.ends[: len(cut.ids)])
    mask = supervised_mask(cut, config.data.supervision)
    return RowPreview(
        line=example.line,
        text=detail.text,
        ids=tuple(cut.ids),
        labels=tuple(labels_of(cut, config.data.supervision)),
        runs=tuple(
            RowRun(text=text, is_supervised=is_supervised)
            for text, is_supervised in runs_of(mask, shown, found.facts["eos_text"])
        ),
    )
