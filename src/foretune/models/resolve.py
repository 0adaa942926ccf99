"""From what a person writes (an id or a path) to a ModelShape."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from foretune.errors import ConfigError
from foretune.models import hub
from foretune.models.catalogue import CatalogueMatch, catalogue_config, catalogue_shape, find_catalogue, near_matches
from foretune.models.families import shape_from_config
from foretune.models.shape import ModelShape

__all__ = ["read_config", "resolve_config", "resolve_model"]

MAX_CONFIG_BYTES = 8 << 20
MAX_DEPTH = 64
_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?(?:/[A-Za-z0-9._][A-Za-z0-9._-]{0,94})?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def resolve_model(id_or_path: str, *, revision: str | None = None, offline: bool = False) -> ModelShape:
    """Describe a model. No weights are read, and nothing is downloaded but a config.json.

    The first of these that knows the model answers:

    1. a path: a file, or a folder with a config.json;
    2. the catalogue (by id or alias, in any case, with or without the organisation);
    3. the hub cache;
    4. the Hub, unless `offline`.

    With a `revision`, which the catalogue cannot honour, the cache and the Hub come before it; offline, the catalogue
    still answers, with a note that says so.

    Raises ConfigError for a bad name, path or config, UnsupportedError for what foretune does not train, and
    ModelAccessError when the model's config cannot be had.

    >>> resolve_model("qwen2.5-0.5b").total_params
    494032768
    """
    found = _find(id_or_path, revision, offline)
    if isinstance(found, _Known):
        return catalogue_shape(found.match, notes=found.notes)
    shape = shape_from_config(
        found.config, id=found.id, source=found.source, place=found.place, revision=found.revision
    )
    return _cross_checked(shape) if found.source == "hub" else shape


def resolve_config(id_or_path: str, *, revision: str | None = None, offline: bool = False) -> dict[str, Any]:
    """Return the config.json of a model as it is written, by the order of `resolve_model`.

    Of a model of the catalogue: the keys that matter. Raises ConfigError and ModelAccessError.

    >>> resolve_config("qwen2.5-0.5b")["hidden_size"]
    896
    """
    found = _find(id_or_path, revision, offline)
    return catalogue_config(found.match) if isinstance(found, _Known) else found.config


class _Known(NamedTuple):
    """A model that the catalogue answers for."""

    match: CatalogueMatch
    notes: tuple[str, ...] = ()


class _Read(NamedTuple):
    """A config that was read, and where."""

    config: dict[str, Any]
    id: str
    source: Literal["file", "cache", "hub"]
    place: str
    revision: str | None = None


def _find(id_or_path: str, revision: str | None, offline: bool) -> _Known | _Read:
    refuse_characters(id_or_path)
    path = _local_config(id_or_path)
    if path is not None:
        return _Read(read_config(path), id_or_path, "file", str(path))
    refuse_id(id_or_path)
    if revision is not None:
        return _at_revision(id_or_path, revision, offline)
    match = find_catalogue(id_or_path)
    return _Known(match) if match else _from_hub(id_or_path, None, offline)


def _at_revision(id: str, revision: str, offline: bool) -> _Known | _Read:
    refuse_revision(revision)
    match = find_catalogue(id)
    full_id = match.id if match else id
    if match and offline and hub.cached_config(full_id, revision) is None:
        note = f"Offline, revision {revision} was not consulted: this is the catalogue's description."
        return _Known(match, (note,))
    return _from_hub(full_id, revision, offline)


def _from_hub(id: str, revision: str | None, offline: bool) -> _Read:
    found = hub.cached_config(id, revision)
    source: Literal["cache", "hub"] = "cache"
    if found is None:
        if offline:
            raise _unknown_offline(id, revision)
        found, source = hub.fetch_config(id, revision), "hub"
    return _Read(_parse(found.text, found.place), id, source, found.place, found.revision)


def _cross_checked(shape: ModelShape) -> ModelShape:
    """Add a note that compares the count with the one in the safetensors headers, as far as the Hub gives it."""
    published = hub.published_parameters(shape.id, shape.revision)
    if published is None:
        return shape
    difference = published - shape.total_params
    if difference == 0:
        note = f"The safetensors headers hold the same {published:,} parameters."
    else:
        note = (
            f"The safetensors headers hold {published:,} parameters, {difference:+,}: stored duplicates of tied "
            "weights, buffers or modules that Transformers does not build are the usual causes."
        )
    fields = {name: getattr(shape, name) for name in shape.__struct_fields__}
    return ModelShape(**{**fields, "notes": (*shape.notes, note)})


def _unknown_offline(id: str, revision: str | None) -> hub.ModelOfflineError:
    near = near_matches(id)
    nearest = f" Nearest in the catalogue: {', '.join(near)}." if near else ""
    at = f" at revision {revision}" if revision else ""
    return hub.ModelOfflineError(
        f"{id}{at} is neither in the catalogue nor in the hub cache, and foretune is offline.",
        hint=f"Pass the path of its config.json, or go online.{nearest}",
        field="model",
    )


# -- names and paths ---------------------------------------------------------------------------------------------


def refuse_characters(text: str) -> None:
    """Raise ConfigError for what is neither an id nor a path: nothing, control characters, an address."""
    if not text.strip():
        raise ConfigError("The model is empty.", hint="Write an id or the path of a config.json.", field="model")
    if _CONTROL.search(text):
        raise ConfigError(
            f"{text[:60]!r} holds a control character.", hint="Write an id or a path on one line.", field="model"
        )
    if "://" in text:
        raise ConfigError(
            f"{text[:60]!r} is an address, not a model.",
            hint="Write the id alone, for example Qwen/Qwen2.5-0.5B.",
            field="model",
        )


def refuse_id(text: str, needed: str = "config.json") -> None:
    """Raise ConfigError for what is no path with the needed file, and cannot be an id."""
    if _is_path_like(text):
        raise ConfigError(
            f"There is no file or folder {text[:200]!r} with a {needed}.",
            hint="Check the path, or write an id such as Qwen/Qwen2.5-0.5B.",
            field="model",
        )
    if not _ID.fullmatch(text) or ".." in text or "--" in text:
        raise ConfigError(
            f"{text[:60]!r} is neither a path that exists nor an id.",
            hint="An id looks like Qwen/Qwen2.5-0.5B.",
            field="model",
        )


def refuse_revision(revision: str | None) -> None:
    """Raise ConfigError for what cannot be a branch, a tag or a commit."""
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ConfigError(
            f"{revision[:60]!r} is not a revision.", hint="Write a branch, a tag or a 40-hex commit.", field="revision"
        )


def _is_path_like(text: str) -> bool:
    return text.startswith((".", "/", "~", os.sep)) or text.endswith(".json") or text.count("/") > 1 or "\\" in text


def _local_config(text: str) -> Path | None:
    """Return the config file meant by a path; None: it is no path. A folder without a config.json is none either."""
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            inside = path / "config.json"
            return inside if inside.exists() else None
        return path if path.exists() else None
    except PermissionError as error:
        raise ConfigError(
            "The folder cannot be searched: permission denied.", hint="Check its permissions.", place=text
        ) from error
    except (OSError, RuntimeError, ValueError):
        return None


# -- strict JSON -------------------------------------------------------------------------------------------------


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json strictly. Raises ConfigError with the file's name."""
    place = str(path)
    try:
        if not path.is_file():
            raise ConfigError("This is not a regular file.", hint="Pass a config.json.", place=place)
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"The file cannot be read: {reason}.", hint="Check its permissions.", place=place) from error
    return _parse(text, place)


def _parse(text: bytes, place: str) -> dict[str, Any]:
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(
            "The file is larger than 8 MiB, and no config is.", hint="Pass a config.json, not weights.", place=place
        )
    try:
        data = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"The file is not UTF-8 text (byte {error.start}).", hint="Pass a config.json, not weights.", place=place
        ) from error
    except RecursionError:
        raise _too_deep(place) from None
    except json.JSONDecodeError as error:
        where = f"{place}:{error.lineno}:{error.colno}"
        raise ConfigError(
            f"This is not JSON: {error.msg}.", hint="Pass the config.json as the model has it.", place=where
        ) from error
    except ValueError as error:
        raise ConfigError(f"{error}", hint="Correct the config.", place=place) from None
    if not isinstance(data, dict):
        raise ConfigError("The config is not a JSON object.", hint="Pass a config.json.", place=place)
    _refuse_depth(data, place)
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"The key {key[:60]!r} stands twice in one object.")
        found[key] = value
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number that JSON knows.")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:30]} is too large a number.")
    return value


def _integer(text: str) -> int:
    if len(text) > 100:
        raise ValueError(f"A number of {len(text)} digits is too large.")
    return int(text)


def _too_deep(place: str) -> ConfigError:
    return ConfigError(
        f"The config is nested more than {MAX_DEPTH} deep.",
        hint="Pass the config.json as the model has it.",
        place=place,
    )


def _refuse_depth(data: dict[str, Any], place: str) -> None:
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return
    raise _too_deep(place)
