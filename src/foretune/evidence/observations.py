"""Published measurements of GPU memory: the values a row is read into, and the reader of both forms.

The public form is one JSON object a line; the project's own begins with a line of tables (`compact.py`) and expands
to the public one. Keys that no prediction needs are passed over. What a row does not say is None or `unknown`.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import UNSET, Meta, UnsetType

from foretune.errors import EvidenceError
from foretune.evidence.compact import Tables, is_header
from foretune.values import Value

__all__ = [
    "OWN_OBSERVATIONS",
    "DeviceFacts",
    "LoraFacts",
    "Measured",
    "ModelFacts",
    "Observation",
    "ParallelFacts",
    "SoftwareFacts",
    "Source",
    "TrainingFacts",
    "parse_observation",
    "read_observations",
]

OWN_OBSERVATIONS = Path(__file__).parent / "data" / "observations.jsonl"
"""The rows that live in the project (made by scripts/observations.py)."""

UNKNOWN = "unknown"
Text = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1, lt=1 << 62)]


class Source(Value, frozen=True, kw_only=True):
    """Who published a row."""

    name: Text
    where: str = UNKNOWN
    """Repository, path and commit, or package and version."""
    licence: str = UNKNOWN


class ModelFacts(Value, frozen=True, kw_only=True):
    """The base model."""

    id: Text
    config: str | None = None
    """Its config.json as JSON text with sorted keys, so that it can be compared. None: not known."""


class LoraFacts(Value, frozen=True, kw_only=True):
    """Adapters."""

    rank: Count
    alpha: float | None = None
    dropout: float | None = None
    target_modules: tuple[Text, ...] = ()
    modules_to_save: tuple[Text, ...] = ()
    use_dora: bool = False
    use_rslora: bool = False


class ParallelFacts(Value, frozen=True, kw_only=True):
    """How devices shared the work."""

    strategy: str = "single"
    world_size: Count = 1
    cpu_offload: bool = False


class TrainingFacts(Value, frozen=True, kw_only=True):
    """How it was trained, in the words of the public schema."""

    method: Text
    base_dtype: str = UNKNOWN
    quantization: str = "none"
    kbit_upcast: bool | None = None
    """Whether embeddings, norms and head became fp32."""
    fp32_modules: tuple[str, ...] | None = None
    """Which of `embeddings`, `norms` and `lm_head` are fp32. None: not known."""
    compute_dtype: str = UNKNOWN
    autocast: str = "none"
    adapter_dtype: str = UNKNOWN
    lora: LoraFacts | None = None
    optimizer: str = UNKNOWN
    optimizer_foreach: bool | None = None
    optimizer_in_backward: bool = False
    grad_clip: float | UnsetType | None = UNSET
    """None: no clipping. Left out: not known."""
    seq_len: Count | None = None
    seq_len_kind: str = UNKNOWN
    """`longest_known`: the longest row, which stands in the first batch and in no other."""
    micro_batch_size: Count | None = None
    gradient_accumulation_steps: Count | None = None
    gradient_checkpointing: str = UNKNOWN
    attention: str = UNKNOWN
    loss: str = UNKNOWN
    packing: bool | None = None
    padding_mask: bool | None = None
    """The model is called with a mask of ones and zeros: rows are padded to their length."""
    parallel: ParallelFacts = ParallelFacts()


class SoftwareFacts(Value, frozen=True, kw_only=True):
    """What ran it. None: not stated."""

    driver: str = UNKNOWN
    """The training loop: `manual_loop`, `hf_trainer`, ..."""
    os: str | None = None
    torch: str | None = None
    transformers: str | None = None
    peft: str | None = None
    bitsandbytes: str | None = None
    allocator_conf: str | None = None
    """PYTORCH_CUDA_ALLOC_CONF, where it is set."""
    compile: bool | None = None
    kernels: tuple[str, ...] = ()


class DeviceFacts(Value, frozen=True, kw_only=True):
    """On what it ran."""

    name: str = UNKNOWN
    count: Count = 1
    compute_capability: Annotated[str, Meta(pattern=r"^\d{1,3}\.\d{1,3}$")] | None = None
    memory_total_bytes: Count | None = None
    memory_source: str | None = None
    """`measured` or `nominal` (the size on the box)."""


class Measured(Value, frozen=True, kw_only=True):
    """What was measured, as far as a prediction has its counterpart. None: not measured."""

    peak_allocated_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    process_bytes: Count | None = None
    """Reserved and the CUDA context."""
    scope: str = UNKNOWN
    """Over what the peak was taken: `train_steps_after_warmup` leaves loading and the first update out."""


class Observation(Value, frozen=True, kw_only=True):
    """One published measurement."""

    id: Text
    source: Source
    model: ModelFacts
    training: TrainingFacts
    grade: str = UNKNOWN
    """A: every needed field is known; B: one or two are assumed; C: loose."""
    kind: str = "train_peak"
    outcome: str = "ok"
    group: str | None = None
    """One configuration; what is split or resampled is split by it."""
    software: SoftwareFacts = SoftwareFacts()
    device: DeviceFacts = DeviceFacts()
    measured: Measured = Measured()


_PARTS: Mapping[str, type[Value]] = {
    "source": Source,
    "model": ModelFacts,
    "training": TrainingFacts,
    "software": SoftwareFacts,
    "device": DeviceFacts,
    "measured": Measured,
    "lora": LoraFacts,
    "parallel": ParallelFacts,
}
"""Keys that hold an object, and what of it is kept."""
_NULL_IS_SAID = frozenset({"grad_clip"})
"""Keys whose null has a meaning of its own: no clipping."""


def read_observations(path: str | os.PathLike[str] | None = None) -> Iterator[Observation]:
    """Yield the rows of a file of either form, one at a time; without a path those of the project.

    Raises EvidenceError with file, line and cause: for a file that cannot be read or holds no row, for a line that is
    no row, and for an id that stands twice.
    """
    file = os.fspath(OWN_OBSERVATIONS if path is None else path)
    try:
        with open(file, "rb") as stream:  # noqa: PTH123 - the path may be any text
            yield from _rows(stream, OWN_OBSERVATIONS.name if path is None else str(file))
    except (OSError, ValueError) as error:
        if isinstance(error, EvidenceError):
            raise
        hint = "Name a file with one observation (a JSON object) a line."
        if isinstance(error, FileNotFoundError):
            raise EvidenceError("The file does not exist.", hint=hint, place=str(file)) from error
        reason = getattr(error, "strerror", None) or str(error)
        raise EvidenceError(f"The observations cannot be read: {reason}.", hint=hint, place=str(file)) from error


def _rows(stream: BinaryIO, name: str) -> Iterator[Observation]:
    tables: Tables | None = None
    first_lines: dict[str, int] = {}
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        place = f"{name}:{number}"
        data = _decoded(line, place)
        if tables is None and not first_lines and is_header(data):
            tables = Tables.of(data, place)
            continue
        row = parse_observation(data if tables is None else tables.expand(data, place), place=place)
        first = first_lines.setdefault(row.id, number)
        if first != number:
            message = f"The id {row.id[:80]!r} stands in line {first} already."
            raise EvidenceError(message, hint="Give each row an id of its own.", place=place)
        yield row
    if not first_lines:
        raise EvidenceError("There is no observation in it.", hint="Each line is one, a JSON object.", place=name)


def _decoded(line: bytes, place: str) -> dict[str, Any]:
    hint = "Each line is one observation, a JSON object."
    try:
        data = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise EvidenceError(f"The line is not JSON: {reason}.", hint=hint, place=place) from error
    if not isinstance(data, dict):
        raise EvidenceError("The line is not a JSON object.", hint=hint, place=place)
    return data


def parse_observation(data: Mapping[str, Any], *, place: str) -> Observation:
    """Check a row of the public form and keep what a prediction needs; `place` is what an error calls it.

    Raises EvidenceError with the key that is wrong or missing.
    """
    kept = _kept(data, Observation)
    model = kept.get("model")
    if isinstance(model, dict) and isinstance(model.get("config"), dict):
        model["config"] = msgspec.json.encode(model["config"], order="sorted").decode()
    elif isinstance(model, dict) and "config" in model:
        raise EvidenceError("model.config is no object.", hint="It holds the keys of a config.json.", place=place)
    try:
        return msgspec.convert(kept, Observation)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        key = where.rstrip("`")
        if what.startswith(lacks := "Object missing required field "):
            what = f"the field {what.removeprefix(lacks)} is missing"
        message = f"{key}: {what[:1].lower()}{what[1:]}." if key else f"{what}."
        raise EvidenceError(message, hint="The schema is that of docs/observations.md.", place=place) from error


def _kept(data: Mapping[str, Any], cls: type[Value]) -> dict[str, Any]:
    """Leave out the keys that are not read, and null, which says no more than a key that is left out."""
    kept = {}
    for key in cls.__struct_fields__:
        value, part = data.get(key), _PARTS.get(key)
        if value is None and not (key in data and key in _NULL_IS_SAID):
            continue
        kept[key] = _kept(value, part) if part is not None and isinstance(value, Mapping) else value
    return kept
