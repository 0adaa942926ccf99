"""The journey of `evaluate`: from a run's artifact to what it is and does after it was loaded again."""

from collections.abc import Callable, Generator, Iterator
from datetime import date
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from foretune.api.rows import kept_rows, prepared, row_preparation
from foretune.contract import TrainingConfig
from foretune.data import DataStats, cache_folder
from foretune.errors import ConfigError
from foretune.evidence import EvaluationReading, RunRecord
from foretune.models import ModelShape, WeightFiles, fetch_weights, find_weights, resolve_config, resolve_model
from foretune.runtime.preparation import Progress
from foretune.values import Value

if TYPE_CHECKING:
    from foretune.runtime.artifact import ArtifactFacts
    from foretune.runtime.feed import Feed
    from foretune.runtime.live import Live

__all__ = ["EvaluationAnswer", "Generation", "Source", "evaluate", "source_of"]

LARGEST_EXPONENT = 700.0
"""Above it a perplexity is no finite number."""
Kind = Literal["messages", "instruction"]


class Generation(Value, frozen=True, kw_only=True):
    """What the model said to one prompt."""

    prompt: str
    """As the model saw it."""
    text: str
    ended_by: Literal["stop", "length"]
    """A stop token, or the number of tokens that was allowed."""


class EvaluationAnswer(Value, frozen=True, kw_only=True):
    """What an artifact is and does after it was loaded again."""

    run: str
    artifact: str
    kind: Literal["adapter", "model"]
    format: str
    stop_ids: tuple[int, ...]
    record: RunRecord
    record_file: str
    loss: float | None = None
    """Mean over the tokens that carry loss; None: no file was given."""
    perplexity: float | None = None
    """e to the power of the loss; None where that is no finite number."""
    stats: DataStats | None = None
    generations: tuple[Generation, ...] = ()


class _Tested(NamedTuple):
    """A file of rows, ready to be evaluated on."""

    feed: "Feed"
    stats: DataStats


def evaluate(
    run: str,
    *,
    data: str | None = None,
    prompts: tuple[str, ...] = (),
    format: Kind | None = None,
    allow_other_format: bool = False,
    max_new_tokens: int = 128,
    offline: bool = False,
    workers: int | None = None,
) -> Iterator[Progress | EvaluationAnswer]:
    """Reload what a run made through the loader of training, and say what it does; the last item is the answer.

    `run` is the run's folder, or what `merge` made in it. Logits are compared with those that were stored with it.
    `data` is a file of rows whose loss is measured, with the run's own settings. `prompts` are answered in the format
    of training; another `format` is refused unless it is allowed. Writes a record below `RUN/evaluations/`. Raises
    RunDirectoryError for a run without success and for another base model, VerificationError, DataError, SaveError and
    what loading raises.

        *_, answer = evaluate("runs/first", data="held-out.jsonl")
        answer.loss, answer.record.probe.is_bitwise_equal
    """
    from foretune.runtime.libraries import libraries_for, require_libraries

    require_libraries("torch", "transformers", "peft")
    from foretune.memory.figures import facts_of
    from foretune.runtime.border import quietly
    from foretune.runtime.failures import running
    from foretune.runtime.preflight import run_device
    from foretune.runtime.reload import compare_probe, finished_artifact, reload_model
    from foretune.runtime.run_folder import evaluation_of, note_later, now

    trained, artifact, described = finished_artifact(Path(run))
    config = _as_loaded(trained.requested, described)
    kind = _chosen_format(described, format, allow_other=allow_other_format) if prompts else None
    require_libraries(*libraries_for(config))
    device, _ = run_device(config)
    source = source_of(trained, artifact, described, offline=offline, fetch=fetch_weights)
    tested = None
    if data is not None:
        tested = yield from _rows(config, data, artifact, trained, workers)
    with running(lambda: "evaluation"), quietly():
        facts = facts_of(config, source.shape)
        live = reload_model(config, facts, source.raw_config, source.folder, artifact, described)
        record = evaluation_of(trained, compare_probe(live, artifact, described), device)
        readings = () if tested is None else (_reading(live, tested, described),)
        said = _generations(live, artifact, described, kind, prompts, max_new_tokens)
    record = record.with_(evaluations=readings, finished_at=now(), artifact=artifact.name)
    loss = readings[0].loss if readings else None
    yield EvaluationAnswer(
        run=run,
        artifact=str(artifact),
        kind=described.kind,
        format=described.format.kind,
        stop_ids=described.stop_ids,
        record=record,
        record_file=str(note_later(artifact.parent, record)),
        loss=loss,
        perplexity=exp(loss) if loss is not None and loss < LARGEST_EXPONENT else None,
        stats=None if tested is None else tested.stats,
        generations=said,
    )


def _as_loaded(config: TrainingConfig, described: "ArtifactFacts") -> TrainingConfig:
    """Return the configuration by which an artifact is loaded: a whole model has no adapters, and is not quantized."""
    return config if described.kind == "adapter" else config.with_(lora=None, quantization=None)


class Source(NamedTuple):
    """Where the weights are that are loaded first: the base's, or a whole model's own."""

    shape: ModelShape
    raw_config: dict[str, Any]
    folder: Path
    weights: WeightFiles | None
    """The base's; None for a whole model."""


def source_of(
    trained: RunRecord,
    artifact: Path,
    described: "ArtifactFacts",
    *,
    offline: bool,
    fetch: Callable[[WeightFiles], WeightFiles],
) -> Source:
    """Find what an artifact is loaded from; `fetch` gets a base that is not here. Raises RunDirectoryError."""
    from foretune.runtime.reload import require_base

    folder, model, revision, weights = artifact, str(artifact), None, None
    if described.kind == "adapter":
        assert trained.base is not None
        model, revision = trained.requested.model.id, trained.base.resolved_revision
        weights = fetch(find_weights(model, revision=revision, offline=offline))
        require_base(weights, trained)
        assert weights.folder is not None
        folder = weights.folder
    shape = resolve_model(model, revision=revision, offline=offline)
    return Source(shape, resolve_config(model, revision=revision, offline=offline), folder, weights)


def _chosen_format(described: "ArtifactFacts", asked: Kind | None, *, allow_other: bool) -> Kind:
    """Return how prompts are written: as in training, unless another way is asked for and allowed."""
    trained = described.format.kind
    if trained == "both":
        return asked or "messages"
    if asked is None or asked == trained:
        return trained
    if allow_other:
        return asked
    raise ConfigError(
        f"The format {asked} is asked for, and the rows were trained as {trained}: answers to other prompts say "
        "nothing about the training.",
        hint="Leave --format out, or pass --allow-other-format.",
    )


def _rows(
    config: TrainingConfig, file: str, artifact: Path, trained: RunRecord, workers: int | None
) -> Generator[Progress, None, _Tested]:
    """Encode rows with the artifact's own tokenizer and the run's settings."""
    from foretune.runtime.feed import Feed

    assert trained.data is not None
    assert trained.pad is not None
    same = config.with_(model=config.model.with_(id=str(artifact), revision=None))
    cache = cache_folder()
    task = row_preparation(same, file, limit=config.batch.sequence_length, workers=workers, cache=cache)
    if trained.data.template_date is not None:
        day = date.fromisoformat(trained.data.template_date)
        task = task._replace(task=task.task._replace(template_date=day))
    found = yield from prepared(task)
    unpacked = config.with_(batch=config.batch.with_(packing=False))
    return _Tested(Feed(kept_rows(found, cache), unpacked, trained.pad.id), found.stats)


def _reading(live: "Live", tested: _Tested, described: "ArtifactFacts") -> EvaluationReading:
    from foretune.runtime.evaluation import mean_loss

    loss, num_tokens = mean_loss(live, tested.feed)
    return EvaluationReading(update=described.updates, loss=loss, num_tokens=num_tokens, is_best=False)


def _generations(
    live: "Live",
    artifact: Path,
    described: "ArtifactFacts",
    kind: Kind | None,
    prompts: tuple[str, ...],
    max_new_tokens: int,
) -> tuple[Generation, ...]:
    if kind is None:
        return ()
    from foretune.runtime.artifact import written_prompt
    from foretune.runtime.reload import generate
    from foretune.runtime.tokenizer import load_tokenizer

    day = described.format.template_date
    tokenizer = load_tokenizer(
        artifact,
        name=described.base.id,
        template=None,
        template_date=date.today() if day is None else date.fromisoformat(day),
    )
    found = []
    for prompt in prompts:
        text = written_prompt(tokenizer, kind, prompt)
        ids = list(tokenizer.encode([text])[0].ids)
        made, ended_by = generate(live, ids, described, max_new_tokens=max_new_tokens)
        answer = tokenizer.backend.decode(made, skip_special_tokens=False)
        found.append(Generation(prompt=text, text=answer, ended_by=ended_by))
    return tuple(found)
