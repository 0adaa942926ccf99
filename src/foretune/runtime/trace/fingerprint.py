"""The fingerprint of a model type: what the trace of a short model allocates and frees, line by line, kept as a row.

A row is one JSON object: a config of real widths cut to a few layers, the way in which it is traced, and either its
lines or why it is refused. Taken again with other libraries, the first line that differs names what moved.
"""

import re
import zlib
from base64 import b85decode, b85encode
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from itertools import groupby, repeat, zip_longest
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

from foretune.contract import TrainingConfig
from foretune.errors import ConfigError
from foretune.memory.figures import kernels_of
from foretune.memory.stack import FORETUNE
from foretune.models import shape_from_config
from foretune.runtime.border import foreign_border

__all__ = ["Fingerprint", "Line", "Way", "decode", "encode", "first_difference", "stored", "take", "take_again"]

NUM_ROWS, NUM_TOKENS = 2, 128
"""The batch that is traced."""

_LATER = " (later)"
_CAUSE = re.compile(
    r".* cannot be run without data: \w+|Transformers refuses this \S+ config|Transformers cannot build this model"
)
"""Where foretune's words end and those of a library begin."""


class Line(NamedTuple):
    """One event: an allocation, or a free with what is freed."""

    phase: str
    name: str
    """A parameter's name, or the operator that made it."""
    num_bytes: int
    freed: int | None
    """None: an allocation; else the number of the one that is freed, in the order of births."""

    def __str__(self) -> str:
        what = f"{self.name} {self.num_bytes:,} bytes"
        return what if self.freed is None else f"the free of allocation {self.freed:,} ({what})"


class Fingerprint(NamedTuple):
    """The lines of one model; or none, and the refusal."""

    lines: tuple[Line, ...]
    refusal: str | None = None
    """foretune's words only: a library's change from version to version."""


class Way(NamedTuple):
    """How a fingerprint is taken."""

    method: Literal["full", "lora"]
    attention: Literal["eager", "sdpa"]

    def config(self, model: str) -> TrainingConfig:
        """Write it out: bf16, activation checkpointing, adapters on every linear layer."""
        fields: dict[str, Any] = {"lora": {}} if self.method == "lora" else {}
        return TrainingConfig.create(
            model={"id": model},
            precision={"dtype": "bf16"},
            attention=self.attention,
            gradient_checkpointing=True,
            batch={"micro_batch_size": NUM_ROWS, "sequence_length": NUM_TOKENS},
            **fields,
        )


# -- taking one ---------------------------------------------------------------------------------------------------


def take(model: str, raw_config: Mapping[str, Any], way: Way) -> Fingerprint:
    """Trace a model from loading to the end of its first update, as the libraries that are installed run it.

    What foretune or a library refuses is a refusal; our own mistakes pass. Raises MissingDependencyError.
    """
    try:
        with foreign_border(model, way.attention), _sets_in_order(raw_config):
            return Fingerprint(_lines(model, raw_config, way))
    except ConfigError as error:
        first = error.message.splitlines()[0]
        cause = _CAUSE.match(first)
        return Fingerprint((), cause[0] if cause else first)


def take_again(row: Mapping[str, Any]) -> Fingerprint:
    """Trace a stored row's model in its way."""
    return take(row["model"], row["config"], Way(row["method"], row["attention"]))


def _lines(model: str, raw_config: Mapping[str, Any], way: Way) -> tuple[Line, ...]:
    from foretune.runtime.trace.recorder import Recorder
    from foretune.runtime.trace.stand_ins import cuda_paths
    from foretune.runtime.trace.trace import record_run

    class FirstUpdate(Recorder):
        """Stops where the second update would begin."""

        num_events = 0

        def enter(self, phase: str) -> None:
            if phase.endswith(_LATER):
                self.num_events = len(self.events)
                raise _EnoughError
            super().enter(phase)

    shape = shape_from_config(raw_config, id=model, source="file")
    recorder = FirstUpdate(FORETUNE.on(None), shape.vocab_size)
    with suppress(_EnoughError):
        record_run(recorder, cuda_paths(kernels_of(None, FORETUNE), set()), way.config(model), shape, raw_config)
    return _canonical(recorder.program(recorder.num_events), recorder.births)


class _EnoughError(Exception):
    """The first update is over."""


class _SortedSet(set[Any]):
    """A set that is walked in the order of its elements."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__()))


@contextmanager
def _sets_in_order(raw_config: Mapping[str, Any]) -> Iterator[None]:
    """Pin an order that changes from process to process: classes that mix kinds of attention (Gemma 3 and 4, Llama 4,
    MiMo-V2-Flash) make their masks by walking `set(config.layer_types)`."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, masking_utils

    from foretune.runtime.load import model_config

    modules = [masking_utils]
    kind = type(model_config(raw_config, attention="eager"))
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:  # else the build refuses it
        modules.append(import_module(MODEL_FOR_CAUSAL_LM_MAPPING[kind].__module__))
    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(patch.object(module, "set", _SortedSet, create=True))
        yield


def _canonical(program: Any, births: Sequence[Any]) -> tuple[Line, ...]:
    """Number births in order. Emptying the cache is no line: it is ours."""
    numbers: dict[int, int] = {}
    lines = []
    for position, (slot, size) in enumerate(program.events):
        if size < 0:
            continue
        freed = None if size else numbers[slot]
        numbers.setdefault(slot, len(numbers))
        phase = program.phases[bisect_right(program.marks, position)]
        lines.append(Line(phase, births[slot].name, births[slot].num_bytes, freed))
    return tuple(lines)


# -- keeping one --------------------------------------------------------------------------------------------------


def encode(lines: Sequence[Line]) -> dict[str, Any]:
    """Write lines as JSON values.

    `phases`: how many lines of each follow each other. `storages`: the sizes that have each name. `lines`: whole
    numbers in text, deflated, in base 85: n allocates the n-th of all storages, -n frees the n-th last allocation.
    """
    phases = [[phase, len(list(group))] for phase, group in groupby(line.phase for line in lines)]
    storages: dict[str, list[int]] = {}
    for name, num_bytes in dict.fromkeys((line.name, line.num_bytes) for line in lines):
        storages.setdefault(name, []).append(num_bytes)
    index = {storage: number for number, storage in enumerate(_flat(storages))}
    numbers = []
    num_births = 0
    for line in lines:
        if line.freed is None:
            numbers.append(index[line.name, line.num_bytes])
            num_births += 1
        else:
            numbers.append(line.freed - num_births)
    packed = zlib.compress(" ".join(map(str, numbers)).encode(), 9)
    return {"phases": phases, "storages": storages, "lines": b85encode(packed).decode()}


def decode(row: Mapping[str, Any]) -> tuple[Line, ...]:
    """Read what `encode` wrote."""
    phases = [phase for name, count in row["phases"] for phase in repeat(name, count)]
    numbers = zlib.decompress(b85decode(row["lines"])).decode().split()
    storages = _flat(row["storages"])
    births: list[tuple[str, int]] = []
    lines = []
    for phase, number in zip(phases, map(int, numbers), strict=True):
        if number >= 0:
            births.append(storages[number])
            lines.append(Line(phase, *births[-1], None))
        else:
            lines.append(Line(phase, *births[number], len(births) + number))
    return tuple(lines)


def _flat(storages: Mapping[str, Sequence[int]]) -> list[tuple[str, int]]:
    return [(name, num_bytes) for name, sizes in storages.items() for num_bytes in sizes]


def stored(row: Mapping[str, Any]) -> Fingerprint:
    """Read a row's fingerprint."""
    if "refusal" in row:
        return Fingerprint((), row["refusal"])
    return Fingerprint(decode(row))


# -- comparing two ------------------------------------------------------------------------------------------------


def first_difference(expected: Fingerprint, got: Fingerprint) -> str | None:
    """Say in words where two fingerprints differ first, or None where they are the same."""
    if expected.refusal != got.refusal:
        return _refusals_differ(expected.refusal, got.refusal)
    for position, (a, b) in enumerate(zip_longest(expected.lines, got.lines)):
        if a != b:
            phase = (a or b).phase
            moved = "" if a is None or b is None or a.phase == b.phase else f" in {b.phase}"
            of = f"line {position + 1:,} of {len(expected.lines):,}"
            return f"{phase}: expected {a or 'the end'}, got {b or 'the end'}{moved} ({of})"
    return None


def _refusals_differ(expected: str | None, got: str | None) -> str:
    if expected is None:
        return f"it was traced, and is refused now: {got}"
    if got is None:
        return f"it was refused, and is traced now; the refusal was: {expected}"
    return f"expected the refusal: {expected} Got: {got}"
