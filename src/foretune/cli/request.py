"""From flags and files to checked configurations, devices and stacks, with the place that each value came from."""

# os.path, as in the contract: pathlib costs 3 ms of every start.
# ruff: noqa: PTH113, PTH118

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from foretune.contract import LoadedConfig, Origin, Override, build_config, load_config, parse_override
from foretune.devices import DeviceSpec, device_from_memory, find_device, with_free
from foretune.errors import ConfigError, RunDirectoryError
from foretune.models import ModelShape
from foretune.units import parse_bytes

__all__ = [
    "FLAGS",
    "TEXT_FIELDS",
    "chosen_device",
    "chosen_host",
    "overrides_of",
    "requested_configs",
    "run_config",
    "run_folder",
    "single_request",
    "with_default_attention",
]

FLAGS: Mapping[str, tuple[str, str]] = {
    "model": ("--model", "model.id"),
    "revision": ("--revision", "model.revision"),
    "seq_len": ("--seq-len", "batch.sequence_length"),
    "micro_batch": ("--micro-batch", "batch.micro_batch_size"),
    "accumulation": ("--accumulation", "batch.accumulation_steps"),
    "rank": ("--rank", "lora.rank"),
    "alpha": ("--alpha", "lora.alpha"),
    "targets": ("--targets", "lora.targets"),
    "dtype": ("--dtype", "precision.dtype"),
    "optimizer": ("--optimizer", "optimizer.name"),
    "attention": ("--attention", "attention"),
    "loss": ("--loss", "loss"),
    "gradient_checkpointing": ("--gradient-checkpointing", "gradient_checkpointing"),
}
"""Flags that are short for a field: parameter, flag, dotted path."""

TEXT_FIELDS = frozenset({"model.id", "model.revision"})
"""Fields whose flag is taken as it stands; other values are read as YAML reads them."""

EAGER = "Transformers chooses eager for a model that caps its attention scores"


def overrides_of(given: Mapping[str, Any]) -> list[str | Override]:
    """Turn the flags that were given, and the `--set` texts, into settings; the contract checks them."""
    found: list[str | Override] = [
        _override(flag, field, given[name]) for name, (flag, field) in FLAGS.items() if given.get(name) is not None
    ]
    return [*found, *given.get("settings", ())]


def _override(flag: str, field: str, value: Any) -> Override:
    if isinstance(value, bool):
        return Override(field, value, flag if value else f"--no-{flag[2:]}")
    if field in TEXT_FIELDS:
        return Override(field, value, flag)
    if field == "lora.targets":
        return Override(field, _targets(value), flag)
    return parse_override(f"{field}={value}", place=flag)


def _targets(text: str) -> str | list[str]:
    """Read a scope (`attention`) or names of layers (`q_proj,v_proj`)."""
    names = [name.strip() for name in text.strip("[] ").split(",")]
    return names[0] if names in (["all-linear"], ["attention"], ["mlp"]) else names


def requested_configs(given: Mapping[str, Any]) -> Iterator[tuple[str | None, LoadedConfig | ConfigError]]:
    """Yield each file with its configuration or its error; without files the one of the command line.

    Without a file and without `--method`, adapters are the default (with a quantization: qlora).
    """
    overrides = overrides_of(given)
    for file in given["configs"]:
        try:
            yield file, load_config(file, overrides=overrides, method=given["method"])
        except ConfigError as error:
            yield file, error
    if not given["configs"]:
        yield None, _from_command_line(overrides, given)


def _from_command_line(overrides: list[str | Override], given: Mapping[str, Any]) -> LoadedConfig:
    groups = {_key(override).split(".")[0] for override in overrides}
    if "model" not in groups:
        hint = "Write --model ID|PATH or --config FILE; `foretune models list` shows the catalogue."
        raise ConfigError("No model is named.", hint=hint, field="model.id")
    if given["method"] is None and "lora" not in groups:
        overrides = [*overrides, Override("lora", {}, "command-line default")]
    return build_config(overrides=overrides, method=given["method"])


def _key(override: str | Override) -> str:
    return override.partition("=")[0].strip() if isinstance(override, str) else override.key


def run_config(file: str, overrides: Iterable[str | Override] = ()) -> LoadedConfig:
    """Load the configuration of what is to be run. Raises UnsupportedError in a recipe of another version."""
    from foretune.recipe import require_same_version

    require_same_version(file)
    return load_config(file, overrides=overrides)


def run_folder(path: str) -> str:
    """Return the folder of a run that is named by its path, or by the configuration file it was run from."""
    if not os.path.isfile(path):
        return path
    output = run_config(path).config.output
    if output is None:
        raise ConfigError(
            "it names no output, so its run is not known.",
            hint="Name the run's folder instead.",
            place=path,
            field="output",
        )
    if not os.path.isfile(os.path.join(output, "record.json")):
        raise RunDirectoryError(
            f"its output, {output}, holds no run yet.",
            hint=f"`foretune train {shlex.quote(path)}` makes it.",
            place=path,
        )
    return output


def single_request(given: Mapping[str, Any], *, several: str) -> tuple[LoadedConfig, ModelShape]:
    """Return the one configuration that is asked about, with its model. Raises ConfigError with `several` for more."""
    from foretune.models import resolve_model

    (_, loaded), *more = requested_configs(given)
    if more:
        raise ConfigError(several, hint="Give one --config FILE.")
    if isinstance(loaded, ConfigError):
        raise loaded
    source = loaded.config.model
    shape = resolve_model(source.id, revision=source.revision, offline=given["offline"])
    return with_default_attention(loaded, shape, has_file=bool(given["configs"])), shape


def with_default_attention(loaded: LoadedConfig, shape: ModelShape, *, has_file: bool) -> LoadedConfig:
    """Return the configuration with Transformers' own choice where nobody chose: eager where scores are capped."""
    is_open = loaded.origins["attention"].source == "default" and not has_file
    if not shape.refuses_sdpa or not is_open:
        return loaded
    origins = {**loaded.origins, "attention": Origin("command-line default", EAGER)}
    return LoadedConfig(loaded.config.with_(attention="eager"), origins)


def chosen_device(given: Mapping[str, Any]) -> DeviceSpec | None:
    """Return the device that --gpu, --vram or --detect names; None where none of them is given."""
    named = [flag for flag in ("gpu", "vram", "detect") if given[flag]]
    if len(named) > 1:
        flags = " and ".join(f"--{flag}" for flag in named)
        raise ConfigError(f"{flags} both name a device.", hint="Give one of --gpu, --vram and --detect.")
    free_bytes = None if given["free"] is None else _size("--free", given["free"])
    if given["gpu"] is not None:
        return with_free(find_device(given["gpu"]), free_bytes)
    if given["vram"] is not None:
        return device_from_memory(_size("--vram", given["vram"]), free_bytes)
    if given["detect"]:
        return with_free(_first_detected(), free_bytes)
    if free_bytes is not None:
        raise ConfigError(
            "--free says how much of a device is free, and none is named.", hint="Add --gpu NAME or --vram GIB."
        )
    return None


def chosen_host(given: Mapping[str, Any]) -> DeviceSpec | None:
    """Return this machine's memory where --detect asks for it, for a run on its CPU; None where it does not.

    Raises ConfigError for --gpu and --vram, which name a card.
    """
    for flag in ("gpu", "vram"):
        if given[flag] is not None:
            hint = f"Leave --{flag} out; --detect takes this machine's memory. Or set device: cuda."
            raise ConfigError("a card is named, but device is cpu.", hint=hint, place=f"--{flag}")
    if not given["detect"]:
        if given["free"] is not None:
            raise ConfigError("--free says how much of a device is free, and none is named.", hint="Add --detect.")
        return None
    from foretune.devices import host_memory

    host = host_memory()
    if host is None:
        hint = "Compare the need with what your system says is free."
        raise ConfigError("this machine's memory cannot be read (Linux tells it).", hint=hint, place="--detect")
    return host if given["free"] is None else with_free(host, _size("--free", given["free"]))


def _size(flag: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(error.message, hint=error.hint, place=flag) from error


def _first_detected() -> DeviceSpec:
    from foretune.devices import detect_devices

    detection = detect_devices()
    if not detection.devices:
        hint = "Name a device with --gpu NAME, or its memory with --vram GIB."
        raise ConfigError(f"no GPU is found: {detection.reason}.", hint=hint, place="--detect")
    return detection.devices[0]
