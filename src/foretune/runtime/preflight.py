"""What this machine must have before a run begins: a device that can do it, memory, room on the disk, a place to write.

What is asked for is a rule of the contract; here it is held against the machine. Nothing is changed or chosen.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from foretune.contract import TrainingConfig
from foretune.devices import Detection, DeviceSpec, detect_devices
from foretune.errors import ConfigError
from foretune.memory.components import Facts
from foretune.memory.qualify import require_device
from foretune.runtime.run_folder import CHECKPOINTS
from foretune.units import format_bytes

__all__ = ["UNQUALIFIED", "checkpoint_bytes", "require_disk", "require_room", "run_device", "warnings_about"]

UNQUALIFIED = "No test has executed this path on CUDA: it is not qualified. What is verified is verified all the same."
"""Said first by every run on CUDA, until a GPU has run the tests."""
RECORD_BYTES = 16 << 20
"""Room for records and the history of updates."""


def run_device(config: TrainingConfig) -> tuple[DeviceSpec | None, Detection | None]:
    """Return the card that a run would use; None on a CPU.

    Raises ConfigError where there is none, or where it cannot do what is asked for.
    """
    if config.device == "cpu":
        return None, None
    import torch

    found = detect_devices()
    if not torch.cuda.is_available() or not found.devices:
        why = found.reason or "torch sees no CUDA device"
        raise ConfigError(
            f"device is cuda, and this machine has none that can be used: {why}.",
            hint="Set device: cpu with precision.dtype: fp32, or run where there is an NVIDIA card.",
            field="device",
        )
    device = found.devices[0]
    require_device(config, device)
    return device, found


def warnings_about(device: DeviceSpec | None, detection: Detection | None) -> Iterator[str]:
    """Say what a person should know about a card before a run."""
    if device is None:
        return
    yield UNQUALIFIED
    if detection is not None and len(detection.devices) > 1:
        yield (
            f"{len(detection.devices)} cards are visible; the run uses the first, {device.name}. "
            "CUDA_VISIBLE_DEVICES=N chooses another."
        )
    for holder in device.holders:
        used = "" if holder.used_bytes is None else f" {format_bytes(holder.used_bytes)}"
        yield f"Another process, {holder.pid} ({holder.name or 'unknown'}), holds{used} of {device.name}."


def checkpoint_bytes(facts: Facts) -> int:
    """Return the size of a checkpoint: trained weights and the optimizer's states beside them."""
    optimizer = facts.config.optimizer
    states = {"adamw": 2, "sgd": 1 if optimizer.momentum else 0}.get(optimizer.name)
    weights = facts.trainable_params * facts.trained_item_bytes
    return weights + (2 * facts.trainable_params if states is None else states * weights)


def require_disk(config: TrainingConfig, facts: Facts, artifact_bytes: int) -> tuple[int, int]:
    """Return the bytes that a run writes at most at once, and those that are free at its output.

    Raises ConfigError where they are too few, or where nothing may be written.
    """
    assert config.output is not None
    place = _writable_place(Path(config.output))
    checkpoint = config.checkpoint
    keeps = checkpoint.every_updates is not None or checkpoint.every_minutes is not None
    # The newest ones, the best by evaluation, and the one that is being written before an old one goes.
    number = checkpoint.keep + 1 + config.evaluation.is_asked_for if keeps else 1
    needed = artifact_bytes + number * checkpoint_bytes(facts) + RECORD_BYTES
    free = shutil.disk_usage(place).free
    if needed > free + _held_bytes(Path(config.output) / CHECKPOINTS):
        raise ConfigError(
            f"The run writes up to {format_bytes(needed)} at {place} (artifact, {number} checkpoints), and "
            f"{format_bytes(free)} are free.",
            hint="Free some space, keep fewer checkpoints (checkpoint.keep), or choose another output: "
            "--output FOLDER.",
            field="output",
        )
    return needed, free


def require_room(output: Path, needed: int) -> int:
    """Return the bytes that are free where an output is to be. Raises ConfigError where they are too few."""
    place = _writable_place(output)
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ConfigError(
            f"{format_bytes(needed)} are written at {place}, and {format_bytes(free)} are free.",
            hint="Free some space, or choose another output: --output FOLDER.",
            field="output",
        )
    return free


def _writable_place(output: Path) -> Path:
    """Return the folder that exists and in which an output will be. Raises ConfigError where nothing may be written."""
    place = output.absolute()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        message = f"output is {output}, and {place} cannot be written."
        raise ConfigError(message, hint="Choose another output: --output FOLDER.", field="output")
    return place


def _held_bytes(folder: Path) -> int:
    """Return what the checkpoints of a run that goes on take already: newer ones take their place."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
