"""What is checked and computed before a run's folder exists; nothing is written here."""

from collections.abc import Callable, Generator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from foretune.api.prediction import predict, require_fit
from foretune.api.rows import kept_rows, order_sha256, prepared, row_preparation
from foretune.contract import TrainingConfig, fingerprint
from foretune.data import DataStats, split_rows
from foretune.errors import ConfigError, UnsupportedError
from foretune.evidence import BaseIdentity, DataIdentity, Hardware, Padding, RunRecord, read_record
from foretune.memory import Fit, MemoryEstimate
from foretune.models import ModelShape, WeightFiles, find_weights, resolve_config, resolve_model
from foretune.runtime.preparation import Preparation, PreparedRows, Progress
from foretune.values import Value

if TYPE_CHECKING:
    from foretune.devices import Detection, DeviceSpec
    from foretune.memory.components import Facts
    from foretune.runtime.feed import Rows
    from foretune.runtime.schedule import RunLength

__all__ = ["Planned", "Request", "RunPlanned", "first_record", "plan_run", "require_qualified"]


class Request(NamedTuple):
    """What a run is asked for beside its configuration."""

    offline: bool = False
    workers: int | None = None
    allow_infeasible: bool = False
    resumes: bool = False


class RunPlanned(Value, frozen=True, kw_only=True):
    """What a run will do, before it does anything."""

    config: TrainingConfig
    fingerprint: str
    model: str
    base: BaseIdentity
    total_params: int
    trainable_params: int
    hardware: Hardware
    data: DataIdentity
    stats: DataStats
    num_updates: int
    updates_per_epoch: int
    microsteps_per_update: int
    last_microsteps: int
    """Of the last update of an epoch, which takes what is left."""
    peak_learning_rate: float
    widest_rows: int
    widest_tokens: int
    """Rows of the micro batch that needs most, and tokens of each; it is rehearsed first."""
    prediction: MemoryEstimate | None
    """Of that micro batch. None: there is none, and `warnings` says why."""
    fit: Fit | None = None
    disk_bytes: int
    """What the run writes at most at once."""
    free_disk_bytes: int
    output: str
    is_unqualified: bool = False
    """No test has executed this path on the device."""
    warnings: tuple[str, ...] = ()


class Planned(NamedTuple):
    """A checked run with what it works on."""

    answer: RunPlanned
    shape: ModelShape
    raw_config: dict[str, Any]
    weights: WeightFiles
    rows: "PlannedRows"
    length: "RunLength"
    record: RunRecord
    device: "DeviceSpec | None"


class PlannedRows(NamedTuple):
    """What is trained on, and what is held out."""

    train: "Rows"
    held_out: "Rows | None"
    padding: Padding
    identity: DataIdentity
    stats: DataStats
    tokenizer_folder: Path
    template_date: date


def first_record(config: TrainingConfig) -> RunRecord:
    """Return the record of a run of which nothing is known but what was asked for."""
    from foretune.runtime.identity import code_identity
    from foretune.runtime.libraries import all_versions
    from foretune.runtime.run_folder import now, this_process

    return RunRecord(
        kind="train",
        outcome="started",
        started_at=now(),
        requested=config,
        fingerprint=fingerprint(config),
        code=code_identity(all_versions()),
        process=this_process(),
    )


def plan_run(
    record: RunRecord, asked: Request, *, cache: Path | None, note: Callable[[RunRecord], None]
) -> Generator[Progress, None, Planned]:
    """Check everything about the run of a record. `note` is given the record as it grows.

    Without a cache nothing is written, and only the lengths of the rows are known afterwards.
    """
    from foretune.runtime.identity import hardware_of
    from foretune.runtime.libraries import libraries_for, require_libraries
    from foretune.runtime.preflight import require_disk, warnings_about

    config = record.requested
    require_libraries(*libraries_for(config))
    output = _require_output(config, asked)
    target = _target(config, asked)
    weights, detection = target.weights, target.detection
    record = record.with_(
        base=BaseIdentity(id=weights.name, resolved_revision=weights.revision),
        hardware=hardware_of(target.device, driver=None if detection is None else detection.driver_version),
    )
    note(record)
    rows = yield from _rows(config, asked, cache, output)
    work = _work(config, rows)
    prediction, fit, why = predict(work.widest_config, target.shape, _memory_of(target), target.raw_config)
    if not asked.allow_infeasible:
        require_fit(fit, "runs it all the same")
    disk = require_disk(config, target.facts, _artifact_bytes(prediction, target.facts))
    record = record.with_(
        data=rows.identity,
        pad=rows.padding,
        row_order_sha256=order_sha256(rows.train.lengths, config.batch, config.seed),
        prediction=prediction,
        warnings=(*warnings_about(target.device, detection), *why),
    )
    note(record)
    answer = _answer(record, target, rows, work, fit, disk)
    return Planned(answer, target.shape, target.raw_config, weights, rows, work.length, record, target.device)


def _answer(
    record: RunRecord, target: "_Target", rows: PlannedRows, work: "_Work", fit: Fit | None, disk: tuple[int, int]
) -> RunPlanned:
    config, length, widest = record.requested, work.length, work.widest_config.batch
    assert config.output is not None
    assert record.base is not None
    assert record.hardware is not None
    return RunPlanned(
        config=config,
        fingerprint=record.fingerprint,
        model=target.shape.id,
        base=record.base,
        total_params=target.shape.total_params,
        trainable_params=target.facts.trainable_params,
        hardware=record.hardware,
        data=rows.identity,
        stats=rows.stats,
        num_updates=length.num_updates,
        updates_per_epoch=length.updates_per_epoch,
        microsteps_per_update=min(length.accumulation_steps, length.batches_per_epoch),
        last_microsteps=length.last_group,
        peak_learning_rate=config.optimizer.learning_rate,
        widest_rows=widest.micro_batch_size,
        widest_tokens=widest.sequence_length,
        prediction=record.prediction,
        fit=fit,
        disk_bytes=disk[0],
        free_disk_bytes=disk[1],
        output=config.output,
        is_unqualified=config.device == "cuda",
        warnings=record.warnings,
    )


class _Target(NamedTuple):
    """What is trained, and on what."""

    shape: ModelShape
    raw_config: dict[str, Any]
    facts: "Facts"
    device: "DeviceSpec | None"
    detection: "Detection | None"
    weights: WeightFiles


def _target(config: TrainingConfig, asked: Request) -> _Target:
    """Find model, device and weights, and read the headers of what is here already."""
    from foretune.memory.figures import facts_of
    from foretune.runtime.preflight import run_device

    source = config.model
    shape = resolve_model(source.id, revision=source.revision, offline=asked.offline)
    raw_config = resolve_config(source.id, revision=source.revision, offline=asked.offline)
    require_qualified(config, shape)
    facts = facts_of(config, shape)
    device, detection = run_device(config)
    weights = find_weights(source.id, revision=source.revision, offline=asked.offline)
    if weights.folder is not None:
        weights.tensors()
    return _Target(shape, raw_config, facts, device, detection, weights)


def _memory_of(target: _Target) -> "DeviceSpec | None":
    """Return what a prediction is held against: the card, or on a CPU the host's memory where it can be read."""
    from foretune.devices import host_memory

    return target.device or host_memory()


class _Work(NamedTuple):
    """How much there is to do."""

    length: "RunLength"
    widest_config: TrainingConfig
    """The configuration with the shape of the micro batch that needs most."""


def _work(config: TrainingConfig, rows: PlannedRows) -> _Work:
    from foretune.runtime.feed import Feed
    from foretune.runtime.schedule import run_length

    feed = Feed(rows.train, config, rows.padding.id)
    length = run_length(config.schedule, feed.batches_per_epoch, config.batch.accumulation_steps)
    widest = feed.widest_shape()
    batch = config.batch.with_(sequence_length=widest.tokens, micro_batch_size=widest.rows)
    return _Work(length, config.with_(batch=batch))


# -- the request


def _require_output(config: TrainingConfig, asked: Request) -> Path:
    from foretune.runtime.run_folder import require_free

    if config.output is None:
        raise ConfigError(
            "No folder is named for the run.", hint="Set output, or pass --output FOLDER.", field="output"
        )
    if config.data.train is None:
        raise ConfigError("No file of rows is named.", hint="Set data.train.", field="data.train")
    output = Path(config.output)
    if not asked.resumes:
        require_free(output)
    return output


def require_qualified(config: TrainingConfig, shape: ModelShape) -> None:
    """Raise UnsupportedError where foretune would not run a configuration on any device."""
    from foretune.memory import FORETUNE, published_quantized_because
    from foretune.runtime.qualify import require_rows_apart, require_runnable, require_same_class

    because = published_quantized_because(shape)
    if because is not None:
        raise UnsupportedError(because, hint="Name an unquantized checkpoint.", field="model.id")
    require_runnable(config, FORETUNE)
    require_same_class(shape, FORETUNE)
    require_rows_apart(config, shape)
    if shape.refuses_sdpa and config.attention == "sdpa":
        raise UnsupportedError(
            f"attention is sdpa, which Transformers refuses for {shape.id} ({shape.model_type}).",
            hint="Set attention: eager.",
            field="attention",
        )


# -- rows


def _rows(
    config: TrainingConfig, asked: Request, cache: Path | None, output: Path
) -> Generator[Progress, None, PlannedRows]:
    """Encode what is trained on and what is held out."""
    task, found = yield from _encoded(config, config.data.train, asked, cache, output)
    train, held_out, tested = _stored(found, cache), None, None
    if config.evaluation.split is not None:
        kept, out = split_rows(len(train), config.evaluation.split, config.seed)
        train, held_out = train.subset(kept), train.subset(out)
    elif config.evaluation.data is not None:
        _, tested = yield from _encoded(config, config.evaluation.data, asked, cache, output)
        held_out = _stored(tested, cache)
    stats, asks = found.stats, found.facts["asks_for_date"]
    day = task.task.template_date
    identity = DataIdentity(
        file=task.task.file,
        label_sha256=stats.sha256,
        num_rows=stats.num_rows,
        num_blank_lines=stats.num_blank_lines,
        dropped_rows=0,
        num_tokens=stats.num_tokens,
        num_supervised_tokens=stats.num_supervised_tokens,
        truncated_rows=stats.truncated_rows,
        held_out_rows=len(held_out) if held_out is not None and tested is None else 0,
        evaluation_file=config.evaluation.data,
        evaluation_label_sha256=None if tested is None else tested.stats.sha256,
        evaluation_rows=0 if held_out is None else len(held_out),
        tokenizer_sha256=task.tokenizer.fingerprint(),
        template_date=day.isoformat() if asks else None,
    )
    return PlannedRows(train, held_out, _padding(found), identity, stats, task.tokenizer.folder, day)


def _encoded(
    config: TrainingConfig, file: str | None, asked: Request, cache: Path | None, output: Path
) -> Generator[Progress, None, tuple[Preparation, PreparedRows]]:
    limit = config.batch.sequence_length
    task = row_preparation(config, file, limit=limit, offline=asked.offline, workers=asked.workers, cache=cache)
    day = _recorded_day(output) if asked.resumes else None
    if day is not None and config.data.template_date is None:
        task = task._replace(task=task.task._replace(template_date=day))
    return task, (yield from prepared(task))


def _recorded_day(output: Path) -> date | None:
    """Return the day that the chat template was told when the run began."""
    from foretune.runtime.run_folder import RECORD

    if not (output / RECORD).is_file():
        return None
    data = read_record(output / RECORD).data
    return None if data is None or data.template_date is None else date.fromisoformat(data.template_date)


def _stored(found: PreparedRows, cache: Path | None) -> "Rows":
    from foretune.runtime.feed import Rows

    return Rows(None, found.row_lengths) if cache is None else kept_rows(found, cache)


def _padding(found: PreparedRows) -> Padding:
    pad, eos = found.facts["pad_id"], found.facts["eos_id"]
    if pad is not None:
        return Padding(id=pad, source="pad")
    if eos is None:
        raise ConfigError(
            "The tokenizer has neither PAD nor EOS, so no token can fill a row.",
            hint="Set eos_token in the tokenizer's config.",
            field="model.id",
        )
    return Padding(id=eos, source="eos")


def _artifact_bytes(prediction: MemoryEstimate | None, facts: "Facts") -> int:
    if prediction is not None:
        return prediction.host.artifact_bytes
    return int(facts.trainable_params * facts.trained_item_bytes)
