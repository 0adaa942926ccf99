"""What an interrupted run goes on from: trained weights, optimizer, scaler, every random state, and how far it was.

The rows that come next need no file: their order is a function of seed and epoch. Tensors lie in safetensors, the rest
in JSON; nothing is pickled. A checkpoint is there whole or not at all.
"""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy
import torch
from msgspec import Meta
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from foretune.contract import CheckpointSettings, fingerprint
from foretune.durable import (
    MANIFEST,
    publish_folder,
    remove_folder,
    staged,
    verify_folder,
    write_file,
)
from foretune.errors import RunDirectoryError
from foretune.evidence import EvaluationReading, RunRecord
from foretune.runtime.live import Live
from foretune.values import Value, encode_json

__all__ = [
    "ProgressState",
    "checkpoint_name",
    "checkpoints",
    "discard_checkpoints_after",
    "first_progress",
    "load_checkpoint",
    "prune_checkpoints",
    "read_progress",
    "save_checkpoint",
]

FORMAT = 1
WEIGHTS, OPTIMIZER, RANDOM, PROGRESS = (
    "trained.safetensors",
    "optimizer.safetensors",
    "random.safetensors",
    "state.json",
)
_NAME = re.compile(r"update-(\d{8,})")
Count = Annotated[int, Meta(ge=0)]


class ProgressState(Value, frozen=True, kw_only=True):
    """How far a run is, and what it must be the same as to go on."""

    update: Count = 0
    """Updates that are done."""
    skipped: Count = 0
    first_loss: float | None = None
    last_loss: float | None = None
    evaluations: tuple[EvaluationReading, ...] = ()
    fingerprint: str
    """Of the configuration, without its checkpoints and its output."""
    label_sha256: str
    evaluation_label_sha256: str | None = None
    base_sha256: str
    libraries: tuple[str, ...] = ()
    num_threads: Count = 0

    @property
    def best(self) -> EvaluationReading | None:
        """The evaluation with the lowest loss, the first of several."""
        return min(self.evaluations, key=lambda each: each.loss, default=None)


def first_progress(record: RunRecord, base_sha256: str) -> ProgressState:
    """Return where a run begins, and what it must be the same as to be gone on with.

    Paths, checkpoints and output may change: rows and weights are known by their contents.
    """
    config, data = record.requested, record.data
    assert data is not None
    bare = config.with_(
        checkpoint=CheckpointSettings(),
        output=None,
        data=config.data.with_(train=None),
        model=config.model.with_(id="base", revision=None),
        evaluation=config.evaluation.with_(data=None),
    )
    return ProgressState(
        fingerprint=fingerprint(bare),
        label_sha256=data.label_sha256,
        evaluation_label_sha256=data.evaluation_label_sha256,
        base_sha256=base_sha256,
        libraries=record.code.libraries,
        num_threads=torch.get_num_threads(),
    )


def checkpoint_name(update: int) -> str:
    """Return what the checkpoint after an update is called."""
    return f"update-{update:08}"


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints of a run's folder that are whole by name, oldest first, each with its update."""
    found = []
    if folder.is_dir():
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and (path / MANIFEST).exists():
                found.append((int(match.group(1)), path))
    return sorted(found)


def save_checkpoint(folder: Path, live: Live, progress: ProgressState) -> Path:
    """Write a checkpoint below `folder`; one of the same update that is there already stays. Raises SaveError."""
    final = folder / checkpoint_name(progress.update)
    if final.exists():
        return final
    with staged(final) as draft:
        save_file({name: each.detach().contiguous() for name, each in live.trained.items()}, draft / WEIGHTS)
        tensors, described = _flat_optimizer(live)
        save_file(tensors, draft / OPTIMIZER)
        save_file(_random_tensors(live), draft / RANDOM)
        state = {
            "format": FORMAT,
            "progress": progress.to_dict(),
            "optimizer": described,
            "scaler": None if live.scaler is None else live.scaler.state_dict(),
            "random": _random_numbers(),
        }
        write_file(draft / PROGRESS, encode_json(state).encode())
        publish_folder(draft, final)
    return final


def read_progress(checkpoint: Path) -> ProgressState:
    """Read how far a checkpoint is, when its files are what its manifest says. Raises SaveError, RunDirectoryError."""
    verify_folder(checkpoint)
    state = json.loads((checkpoint / PROGRESS).read_bytes())
    if state.get("format") != FORMAT:
        hint = "Go on with the version of foretune that wrote it."
        raise RunDirectoryError(f"{checkpoint} was written by another version of foretune.", hint=hint)
    return msgspec.convert(state["progress"], ProgressState)


def load_checkpoint(checkpoint: Path, live: Live) -> None:
    """Put weights, optimizer, scaler and random states back. The files were verified by `read_progress`."""
    state = json.loads((checkpoint / PROGRESS).read_bytes())
    trained = live.trained
    with safe_open(checkpoint / WEIGHTS, "pt") as file, torch.no_grad():
        if set(file.keys()) != set(trained):
            raise RunDirectoryError(f"{checkpoint} holds other weights than this configuration trains.")
        for name, parameter in trained.items():
            parameter.copy_(file.get_tensor(name))
    live.optimizer.load_state_dict(_optimizer_state(checkpoint, state["optimizer"]))
    if live.scaler is not None:
        live.scaler.load_state_dict(state["scaler"])
    live.updates_applied = state["progress"]["update"] - state["progress"]["skipped"]
    with safe_open(checkpoint / RANDOM, "pt") as file:
        torch.set_rng_state(file.get_tensor("cpu"))
        if live.device.type == "cuda":
            torch.cuda.set_rng_state(file.get_tensor("cuda"))
        numpy_state = file.get_tensor("numpy").numpy()
    numbers = state["random"]
    random.setstate((numbers["version"], tuple(numbers["python"]), numbers["gauss_next"]))
    generator = numbers["numpy"]
    numpy.random.set_state(("MT19937", numpy_state, generator["pos"], generator["has_gauss"], generator["cached"]))


def prune_checkpoints(folder: Path, keep: int, pinned: int | None) -> None:
    """Remove all but the newest `keep`, and the one that is pinned (the best by evaluation)."""
    for update, path in checkpoints(folder)[:-keep]:
        if update != pinned:
            remove_folder(path)


def discard_checkpoints_after(folder: Path, update: int) -> None:
    """Remove checkpoints of later updates: damaged ones, which would stand in the way of those that come."""
    for later, path in checkpoints(folder):
        if later > update:
            remove_folder(path)


# -- the optimizer


def _flat_optimizer(live: Live) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Part an optimizer's state into tensors, by `number.name`, and what JSON can hold."""
    state = live.optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        numbers[str(index)] = {}
        for name, value in _unwrapped(entries):
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value.detach().contiguous().clone()
            else:
                numbers[str(index)][name] = value
    return tensors, {"groups": state["param_groups"], "numbers": numbers}


def _unwrapped(entries: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what an optimizer keeps for a weight. bitsandbytes hides quantized states in a dictionary of their own from
    FSDP, and takes them unhidden too (optim/optimizer.py, Optimizer8bit.state_dict and load_state_dict)."""
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from _unwrapped(value)
        else:
            yield name, value


def _optimizer_state(checkpoint: Path, described: dict[str, Any]) -> dict[str, Any]:
    states: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in described["numbers"].items()}
    with safe_open(checkpoint / OPTIMIZER, "pt") as file:
        for key in file.keys():  # noqa: SIM118 - it is no dictionary
            index, _, name = key.partition(".")
            states[int(index)][name] = file.get_tensor(key)
    groups = [
        {**group, **({"betas": tuple(group["betas"])} if "betas" in group else {})} for group in described["groups"]
    ]
    return {"state": states, "param_groups": groups}


# -- random states


def _random_tensors(live: Live) -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state(), "numpy": torch.from_numpy(numpy.random.get_state()[1].copy())}
    if live.device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _random_numbers() -> dict[str, Any]:
    version, python, gauss_next = random.getstate()
    _, _, pos, has_gauss, cached = numpy.random.get_state()
    return {
        "version": version,
        "python": python,
        "gauss_next": gauss_next,
        "numpy": {"pos": pos, "has_gauss": has_gauss, "cached": cached},
    }
