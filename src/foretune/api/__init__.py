"""The Python functions, one for each journey: composition only. The rooms do the work.

The command line prints what these return. What only reads a catalogue or a file is the room's own function,
named here so that there is one place to import from.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from foretune.api.answers import EstimateAnswer, Library, ModelSummary, TraceAnswer, Traced, VerifiedPlan
from foretune.contract import (
    BatchSettings,
    LoadedConfig,
    Origin,
    TrainingConfig,
    build_config,
    fingerprint,
    load_config,
    parse_config,
)
from foretune.devices import DeviceSpec, device_from_memory, find_device, list_devices
from foretune.errors import ConfigError, UnsupportedError
from foretune.memory import (
    FORETUNE,
    PROFILES,
    Fit,
    MemoryEstimate,
    StackProfile,
    Verdict,
    assess_fit,
    emit_program,
    estimate_memory,
    published_quantized_because,
)
from foretune.memory.qualify import require_device
from foretune.models import (
    ModelEntry,
    ModelShape,
    adapted_params,
    list_models,
    quantizable_params,
    resolve_config,
    resolve_model,
    resolve_targets,
)
from foretune.traces import AliveTensors, Timeline, alive_at, timeline_of

if TYPE_CHECKING:
    import os

    from foretune.api.doctor import examine_machine
    from foretune.api.evaluation import EvaluationAnswer, Generation, evaluate
    from foretune.api.merging import MergeAnswer, MergePlan, merge, plan_merge
    from foretune.api.recipes import Recipe, write_recipe
    from foretune.api.rows import DataAnswer, Progress, RowPreview, RowRun, check_data, prepare_data
    from foretune.api.runs import RunPlanned, plan_training, train
    from foretune.contract import dump_config, json_schema
    from foretune.data import Lengths, read_lengths
    from foretune.devices import Detection, detect_devices, host_memory
    from foretune.evidence import (
        EngineName,
        MergeCheck,
        MergedLayer,
        Prediction,
        Refusal,
        Request,
        RunRecord,
        ScoreReport,
        read_record,
        report_of,
    )
    from foretune.foreign import ImportedConfig, build_imported, import_config
    from foretune.machine import Finding, MachineReport
    from foretune.needs import LengthNeed, LengthsAnswer
    from foretune.planner import Boundary, Carriers, Frontier, Objective, Plan, Recommendation
    from foretune.runtime.run_events import CheckpointSaved, PhaseBegan, RunFinished, UpdateDone
    from foretune.runtime.sample import make_sample_model, sample_rows
    from foretune.runtime.trace import Trace

__all__ = [
    "AliveTensors",
    "Boundary",
    "Carriers",
    "CheckpointSaved",
    "DataAnswer",
    "Detection",
    "DeviceSpec",
    "EstimateAnswer",
    "EvaluationAnswer",
    "Finding",
    "Fit",
    "Frontier",
    "Generation",
    "ImportedConfig",
    "LengthNeed",
    "Lengths",
    "LengthsAnswer",
    "Library",
    "LoadedConfig",
    "MachineReport",
    "MemoryEstimate",
    "MergeAnswer",
    "MergeCheck",
    "MergePlan",
    "MergedLayer",
    "ModelEntry",
    "ModelShape",
    "ModelSummary",
    "Origin",
    "PhaseBegan",
    "Plan",
    "Prediction",
    "Progress",
    "Recipe",
    "Recommendation",
    "Refusal",
    "RowPreview",
    "RowRun",
    "RunFinished",
    "RunPlanned",
    "RunRecord",
    "ScoreReport",
    "StackProfile",
    "Timeline",
    "TraceAnswer",
    "Traced",
    "TrainingConfig",
    "UpdateDone",
    "VerifiedPlan",
    "boundary",
    "build_config",
    "build_imported",
    "carriers",
    "check_data",
    "describe_model",
    "detect_devices",
    "device_from_memory",
    "dump_config",
    "estimate",
    "estimate_lengths",
    "estimate_timeline",
    "evaluate",
    "examine_machine",
    "find_device",
    "find_stack",
    "fingerprint",
    "frontier",
    "host_memory",
    "import_config",
    "json_schema",
    "list_devices",
    "list_models",
    "load_config",
    "make_sample_model",
    "merge",
    "parse_config",
    "plan_merge",
    "plan_training",
    "prepare_data",
    "read_lengths",
    "read_record",
    "recommend",
    "report_of",
    "resolve_config",
    "resolve_model",
    "sample_rows",
    "score",
    "trace",
    "train",
    "verify",
    "write_recipe",
]

INSTALLED = "installed"
"""The stack of foretune's own profile on the libraries of this machine."""


def estimate(
    config: TrainingConfig,
    *,
    device: DeviceSpec | None = None,
    offline: bool = False,
    stack: StackProfile = FORETUNE,
    shape: ModelShape | None = None,
    with_changes: bool = True,
) -> EstimateAnswer:
    """Estimate the memory that a fine-tune needs, and whether a device has it. Nothing is downloaded but a config.

    `shape` is for a caller who has resolved the model; `with_changes` names the nearest changes where the answer is
    not yes. Raises ConfigError, UnsupportedError and ModelAccessError.

        config = build_config({"model.id": "Qwen/Qwen2.5-0.5B", "lora.rank": 16}).config
        estimate(config, device=find_device("rtx 3090")).fit.verdict
    """
    if shape is None:
        shape = resolve_model(config.model.id, revision=config.model.revision, offline=offline)
    because = published_quantized_because(shape)
    try:
        needed = estimate_memory(config, shape, device, stack=stack)
    except UnsupportedError:
        if because is None:
            raise
        needed = None
    fit = None
    if device is not None and needed is not None:
        fit = assess_fit(needed, config, shape, device, stack=stack, with_changes=with_changes)
    return EstimateAnswer(
        config=config,
        estimate=needed,
        fit=fit,
        model=shape.id,
        total_params=shape.total_params,
        unknown_because=because,
    )


def estimate_lengths(
    config: TrainingConfig,
    lengths: "Lengths",
    *,
    device: DeviceSpec | None = None,
    offline: bool = False,
    stack: StackProfile = FORETUNE,
    shape: ModelShape | None = None,
) -> "LengthsAnswer":
    """Estimate what a fine-tune needs on rows of given lengths, padded into micro batches and packed into full rows.

    The other arguments are those of `estimate`. Raises what it raises, and UnsupportedError where it knows no figures.

        answer = estimate_lengths(config, read_lengths("lengths.jsonl"), device=find_device("rtx 3090"))
        {need.rows: (need.tokens, need.verdict) for need in answer.needs}
    """
    from foretune.needs import answer_lengths

    if shape is None:
        shape = resolve_model(config.model.id, revision=config.model.revision, offline=offline)

    def with_rows(batch: BatchSettings) -> tuple[MemoryEstimate, Verdict | None]:
        changed = config.with_(batch=batch)
        return _with_figures(estimate(changed, device=device, stack=stack, shape=shape, with_changes=False))

    return answer_lengths(config, lengths, with_rows)


def estimate_timeline(
    config: TrainingConfig,
    *,
    device: DeviceSpec | None = None,
    offline: bool = False,
    stack: StackProfile = FORETUNE,
    shape: ModelShape | None = None,
    num_points: int = 400,
) -> Timeline:
    """Follow the components over the program that an estimate rests on, at about `num_points` of its events.

    The arguments are those of `estimate`. Raises what it raises, and UnsupportedError where there is no program, or
    one of more than a million events.

        timeline = estimate_timeline(config)
        max(zip(timeline.positions, map(sum, timeline.columns)), key=lambda moment: moment[1])
    """
    if shape is None:
        shape = resolve_model(config.model.id, revision=config.model.revision, offline=offline)
    return timeline_of(emit_program(config, shape, device, stack=stack), num_points)


def trace(
    config: TrainingConfig,
    *,
    device: DeviceSpec | None = None,
    offline: bool = False,
    stack: StackProfile = FORETUNE,
    shape: ModelShape | None = None,
    raw_config: Mapping[str, Any] | None = None,
    with_changes: bool = True,
) -> Traced:
    """Trace the memory that a fine-tune needs: the real program, from loading to the second update, without data.

    Needs the extra `train`, and neither weights nor a GPU. `shape` and `raw_config` (its config.json) are for a caller
    who has resolved the model; `with_changes` is as in `estimate`. With `device: cpu` the figures are the host's:
    allocated are the tensors, reserved is what the process grows by, and `device` is `host_memory()` or None. Raises
    ConfigError, UnsupportedError, ModelAccessError and MissingDependencyError.

        config = build_config({"model.id": "Qwen/Qwen2.5-0.5B", "lora.rank": 16}).config
        trace(config).answer.estimate.allocated_bytes
    """
    from foretune.runtime.border import foreign_border
    from foretune.runtime.libraries import libraries_for, require_libraries
    from foretune.runtime.qualify import require_rows_apart, require_runnable, require_same_class

    require_runnable(config, stack)
    if device is not None:
        require_device(config, device)
        _require_host(config, device)
    versions = require_libraries(*libraries_for(config))
    source = config.model
    if shape is None:
        shape = resolve_model(source.id, revision=source.revision, offline=offline)
    require_same_class(shape, stack)
    require_rows_apart(config, shape)
    if raw_config is None:
        raw_config = resolve_config(source.id, revision=source.revision, offline=offline)
    with foreign_border(shape.id, config.attention) as remarks:
        from foretune.runtime.trace import trace_memory, trace_memory_on_cpu

        if config.device == "cpu":
            traced = trace_memory_on_cpu(config, shape, raw_config, stack)
        else:
            traced = trace_memory(config, shape, raw_config, device, stack=stack)
    answer = TraceAnswer(
        config=config,
        estimate=traced.estimate,
        fit=None if device is None else _traced_fit(traced, config, shape, device, stack, with_changes=with_changes),
        model=shape.id,
        total_params=shape.total_params,
        unknown_because=published_quantized_because(shape),
        alive=alive_at(traced.program, traced.births, traced.peak_position),
        num_events=len(traced.program.events),
        libraries=tuple(Library(name=name, version=version) for name, version in versions.items()),
        remarks=tuple(remarks),
    )
    return Traced(answer, traced)


def _traced_fit(
    traced: "Trace", config: TrainingConfig, shape: ModelShape, device: DeviceSpec, stack: StackProfile, **how: bool
) -> Fit:
    """Hold a trace against a card, or against the host for a run on its CPU."""
    if config.device == "cpu":
        from foretune.memory.host import assess_host_fit

        return assess_host_fit(traced.estimate, device)
    return assess_fit(traced.estimate, config, shape, device, stack=stack, program=traced.program, **how)


def _require_host(config: TrainingConfig, device: DeviceSpec) -> None:
    """Raise ConfigError where a run on the CPU would be held against a card."""
    if config.device == "cpu" and device.vendor is not None:
        raise ConfigError(
            f"device is cpu, and {device.name} is a card: the run needs the host's memory.",
            hint="Give what host_memory() returns, or no device.",
            field="device",
        )


def recommend(
    config: TrainingConfig,
    *,
    device: DeviceSpec | None,
    objective: "Objective" = "longest-sequence",
    fixed: Collection[str] = (),
    offline: bool = False,
    stack: StackProfile = FORETUNE,
    shape: ModelShape | None = None,
) -> "Recommendation":
    """Search for what to run: the plans that serve an objective best on a device, each with its reason.

    `fixed` holds the dotted paths of the settings that stay as they are in `config` (`lora.rank`, and `method`);
    without any, methods, checkpointing, loss and optimizer are open, and what the objective raises. Raises
    ConfigError, UnsupportedError and ModelAccessError.

        config = build_config({"model.id": "Qwen/Qwen2.5-7B", "lora.rank": 16}).config
        recommend(config, device=find_device("rtx 3090")).plans[0].why
    """
    from foretune.planner import recommend_plans

    shape = shape or resolve_model(config.model.id, revision=config.model.revision, offline=offline)
    return recommend_plans(config, shape, device, objective, fixed=fixed, stack=stack)


def verify(
    recommendation: "Recommendation",
    number: int,
    *,
    device: DeviceSpec | None,
    offline: bool = False,
    stack: StackProfile = FORETUNE,
) -> "tuple[VerifiedPlan, ...]":
    """Trace the best plans: the real program beside each estimate. Nothing is run on a device. Raises as `trace`.

    [plan.is_equal for plan in verify(recommend(config, device=device), 1, device=device)]
    """
    found = []
    for plan in recommendation.plans[:number]:
        answer = trace(plan.config, device=device, offline=offline, stack=stack, with_changes=False).answer
        traced, planned = answer.estimate, plan.estimate
        peaks = (traced.allocated_bytes, traced.reserved_bytes)
        found.append(
            VerifiedPlan(
                rank=plan.rank,
                allocated_bytes=traced.allocated_bytes,
                reserved_bytes=traced.reserved_bytes,
                need_bytes=traced.need_bytes,
                verdict=answer.verdict,
                is_equal=peaks == (planned.allocated_bytes, planned.reserved_bytes),
            )
        )
    return tuple(found)


def boundary(
    config: TrainingConfig,
    setting: str,
    *,
    device: DeviceSpec,
    offline: bool = False,
    stack: StackProfile = FORETUNE,
    shape: ModelShape | None = None,
) -> "Boundary":
    """Find the largest `seq-len`, `batch` or `rank` that still fits, everything else as it is in `config`.

    Raises ConfigError, UnsupportedError and ModelAccessError.

        found = boundary(config, "seq-len", device=find_device("rtx 3090"))
        found.value, found.next_need_bytes
    """
    from foretune.planner import BOUNDARIES, find_boundary

    if setting not in BOUNDARIES:
        raise ConfigError(f"{setting[:60]!r} has no boundary.", hint=f"There are: {', '.join(BOUNDARIES)}.")
    shape = shape or resolve_model(config.model.id, revision=config.model.revision, offline=offline)
    return find_boundary(config, shape, device, BOUNDARIES[setting], stack=stack)


def frontier(
    config: TrainingConfig,
    *,
    device: DeviceSpec,
    fixed: Collection[str] = (),
    offline: bool = False,
    stack: StackProfile = FORETUNE,
    shape: ModelShape | None = None,
) -> "Frontier":
    """Find for each length and method the largest micro batch that fits. Raises as `recommend`.

    [(line.method, line.points) for line in frontier(config, device=find_device("rtx 3090")).lines]
    """
    from foretune.planner import find_frontier

    shape = shape or resolve_model(config.model.id, revision=config.model.revision, offline=offline)
    return find_frontier(config, shape, device, fixed=fixed, stack=stack)


def carriers(
    config: TrainingConfig,
    *,
    fixed: Collection[str] = (),
    offline: bool = False,
    stack: StackProfile = FORETUNE,
    shape: ModelShape | None = None,
) -> "Carriers":
    """List the cards of the catalogue that carry a fine-tune, smallest first. Raises as `recommend`.

    [(carrier.device.name, carrier.need_bytes) for carrier in carriers(config).carriers]
    """
    from foretune.planner import find_carriers

    shape = shape or resolve_model(config.model.id, revision=config.model.revision, offline=offline)
    return find_carriers(config, shape, list_devices(), fixed=fixed, stack=stack)


def score(
    file: "str | os.PathLike[str] | None" = None, *, engine: "EngineName" = "estimated", workers: int = 1
) -> "Iterator[Prediction | Refusal]":
    """Predict every row of a file of observations, in order; without a file those of the project.

    `report_of` sums up. With more than one worker so many processes answer. Raises EvidenceError, and for `traced`
    MissingDependencyError.

        report_of(score(), "estimated").summary
    """
    from foretune.evidence import read_observations, score_rows

    if engine == "traced":
        from foretune.runtime.libraries import require_libraries

        require_libraries("torch", "transformers", "peft")
    answer = _estimated if engine == "estimated" else _traced
    return score_rows(read_observations(file), answer, workers=workers)


def _estimated(request: "Request") -> tuple[MemoryEstimate, Verdict | None]:
    return _with_figures(
        estimate(request.config, device=request.device, stack=request.stack, shape=request.shape, with_changes=False)
    )


def _with_figures(answer: EstimateAnswer) -> tuple[MemoryEstimate, Verdict | None]:
    """Return the figures of an answer; raise UnsupportedError where there are none."""
    if answer.estimate is None:
        raise UnsupportedError(answer.unknown_because or "")
    return answer.estimate, answer.verdict


def _traced(request: "Request") -> tuple[MemoryEstimate, Verdict | None]:
    answer = trace(
        request.config,
        device=request.device,
        stack=request.stack,
        shape=request.shape,
        raw_config=request.raw_config,
        with_changes=False,
    ).answer
    return answer.estimate, answer.verdict


def find_stack(name: str) -> StackProfile:
    """Return the stack profile of that name; `installed` is foretune's own on the libraries of this machine.

    Raises ConfigError with the names that there are; for `installed` MissingDependencyError and, outside the tested
    ranges, UnsupportedError, each with the line to run.

        estimate(config, stack=find_stack("trl")).estimate.need_bytes
    """
    if name == INSTALLED:
        return _installed_stack()
    profile = PROFILES.get(name)
    if profile is None:
        names = ", ".join((*PROFILES, INSTALLED))
        from difflib import get_close_matches

        near = get_close_matches(name[:60].lower(), [*PROFILES, INSTALLED], n=1, cutoff=0.6)
        meant = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{name[:60]!r} is no stack profile.", hint=f"{meant}There are: {names}.")
    return profile


def _installed_stack() -> StackProfile:
    from foretune.runtime.libraries import installed_versions, require_libraries

    present = [name for name, version in installed_versions().items() if version or name != "bitsandbytes"]
    return FORETUNE.with_(**{"bitsandbytes": "not installed", **require_libraries(*present)})


def describe_model(shape: ModelShape) -> ModelSummary:
    """Count what a model consists of, what adapters reach and what 4-bit quantization reaches.

    describe_model(resolve_model("qwen2.5-0.5b")).adaptable_share
    """
    return ModelSummary(
        id=shape.id,
        model_type=shape.model_type,
        source=shape.source,
        revision=shape.revision,
        total_params=shape.total_params,
        text_params=shape.text_params,
        tower_params=shape.tower_params,
        tied_embeddings=shape.tied_embeddings,
        num_layers=shape.num_layers,
        hidden_size=shape.traits.hidden_size,
        vocab_size=shape.vocab_size,
        context_length=shape.max_positions,
        adaptable_params=adapted_params(resolve_targets(shape, "all-linear")) if shape.projections else 0,
        quantizable_params=quantizable_params(shape),
        projections=shape.projections,
        published_only_as=shape.published_only_as,
        notes=shape.notes,
    )


def __dir__() -> list[str]:
    """List the public names, those that are imported later among them."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import what only some journeys use when it is first asked for."""
    from importlib import import_module

    for module, names in _LATER.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_LATER: Mapping[str, tuple[str, ...]] = {
    "foretune.api.doctor": ("examine_machine",),
    "foretune.api.evaluation": ("EvaluationAnswer", "Generation", "evaluate"),
    "foretune.api.merging": ("MergeAnswer", "MergePlan", "merge", "plan_merge"),
    "foretune.api.recipes": ("Recipe", "write_recipe"),
    "foretune.api.rows": ("DataAnswer", "Progress", "RowPreview", "RowRun", "check_data", "prepare_data"),
    "foretune.api.runs": ("RunPlanned", "plan_training", "train"),
    "foretune.contract": ("dump_config", "json_schema"),
    "foretune.data": ("Lengths", "read_lengths"),
    "foretune.devices": ("Detection", "detect_devices", "host_memory"),
    "foretune.evidence": (
        *("MergeCheck", "MergedLayer", "Prediction", "Refusal", "RunRecord", "ScoreReport", "read_record"),
        "report_of",
    ),
    "foretune.foreign": ("ImportedConfig", "build_imported", "import_config"),
    "foretune.machine": ("Finding", "MachineReport"),
    "foretune.needs": ("LengthNeed", "LengthsAnswer"),
    "foretune.planner": ("Boundary", "Carriers", "Frontier", "Plan", "Recommendation"),
    "foretune.runtime.run_events": ("CheckpointSaved", "PhaseBegan", "RunFinished", "UpdateDone"),
    "foretune.runtime.sample": ("make_sample_model", "sample_rows"),
}
"""What is imported later, by the module that has it."""
