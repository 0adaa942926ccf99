"""Where a model's weights are: safetensors in a local folder, in the hub cache, or on the Hub. Pickles are refused."""

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from foretune.errors import ConfigError, UnsupportedError
from foretune.models import hub
from foretune.models.catalogue import find_catalogue
from foretune.models.resolve import refuse_characters, refuse_id, refuse_revision

__all__ = ["StoredTensor", "WeightFiles", "fetch_weights", "find_weights", "read_safetensors_header"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG = "config.json"
BESIDE = (CONFIG, "generation_config.json")
"""What is downloaded with the weights."""
MAX_HEADER_BYTES = 25_000_000
"""As huggingface_hub limits it."""
MAX_INDEX_BYTES = 64 << 20
MAX_TENSORS = 200_000
ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""safetensors' own dtypes."""
_PLAIN_NAME = re.compile(r"[\w.-]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class StoredTensor(NamedTuple):
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    start: int
    """Where its bytes begin in the file."""


class WeightFiles(NamedTuple):
    """Where weights are, and what of them is known before they are read."""

    name: str
    """What the model is called."""
    revision: str | None
    """The commit of the Hub; None for a local folder."""
    folder: Path | None
    """None: they are on the Hub, and nothing was downloaded yet."""
    files: tuple[str, ...]
    """Names of the safetensors files."""

    def tensors(self) -> dict[str, StoredTensor]:
        """Read all headers. Raises ConfigError for a file that is no safetensors file, and a name that stands twice."""
        assert self.folder is not None
        found: dict[str, StoredTensor] = {}
        for file in self.files:
            for name, tensor in read_safetensors_header(self.folder / file).items():
                if name in found:
                    raise _damaged(self.folder / file, f"the tensor {name[:80]!r} stands in two files")
                found[name] = tensor
        return found

    def fingerprint(self) -> str:
        """Return a SHA-256 of config.json and the weights; of the hub cache's files their own names, which are one."""
        import hashlib

        assert self.folder is not None
        digest = hashlib.sha256()
        for name in (CONFIG, *self.files):
            path = self.folder / name
            stored = path.resolve().name
            if path.is_symlink() and _SHA256.fullmatch(stored):
                content = stored
            else:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{name}\0{content}\n".encode())
        return digest.hexdigest()


# -- finding


def find_weights(id_or_path: str, *, revision: str | None = None, offline: bool = False) -> WeightFiles:
    """Find a model's weights without reading or downloading one: a folder, the hub cache, then the Hub.

    Raises ConfigError for a folder without weights, UnsupportedError for pickles and adapters, ModelAccessError.
    """
    refuse_characters(id_or_path)
    folder = _local_folder(id_or_path)
    if folder is not None:
        return _in_folder(folder, id_or_path, None)
    refuse_id(id_or_path, "safetensors file")
    refuse_revision(revision)
    match = find_catalogue(id_or_path)
    id = match.id if match else id_or_path
    snapshot = hub.cached_snapshot(id, revision)
    if snapshot is not None and _is_whole(snapshot):
        return _in_folder(snapshot, id, snapshot.name)
    if offline:
        raise hub.ModelOfflineError(
            f"The weights of {id} are not in the hub cache, and foretune is offline.",
            hint="Pass a folder that has them, or go online.",
            field="model",
        )
    commit, names = hub.list_files(id, revision)
    return WeightFiles(id, commit, None, _chosen(names, f"The repository {id}"))


def fetch_weights(weights: WeightFiles) -> WeightFiles:
    """Download what is on the Hub into the hub cache; what is here already is returned. Raises ModelAccessError."""
    if weights.folder is not None:
        return weights
    folder = hub.fetch_files(weights.name, weights.revision, (*BESIDE, INDEX, *weights.files), "safetensors file")
    return _in_folder(folder, weights.name, folder.name)


def _local_folder(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        if path.is_file():
            return path.parent
        return path if path.is_dir() else None
    except (OSError, RuntimeError, ValueError):
        return None


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot of the cache has every file of the weights."""
    if (folder / SINGLE).exists():
        return True
    try:
        return (folder / INDEX).exists() and all((folder / name).exists() for name in _indexed(folder / INDEX))
    except ConfigError:
        return False


def _in_folder(folder: Path, name: str, revision: str | None) -> WeightFiles:
    try:
        names = {path.name for path in folder.iterdir() if path.is_file()}
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"The folder cannot be read: {reason}.", hint="Check it.", place=str(folder)) from error
    if "adapter_config.json" in names:
        raise UnsupportedError(
            f"{folder} holds an adapter, and adapters are trained on a base model.",
            hint="Name the base model in model.id.",
            field="model.id",
        )
    files = _chosen(names, f"The folder {folder}")
    if INDEX in names and SINGLE not in names:
        files = _indexed(folder / INDEX)
        missing = [file for file in files if file not in names]
        if missing:
            raise _damaged(folder / INDEX, f"it names {missing[0]}, which is not there")
    return WeightFiles(name, revision, folder, files)


def _chosen(names: "set[str] | tuple[str, ...]", where: str) -> tuple[str, ...]:
    if SINGLE in names:
        return (SINGLE,)
    shards = tuple(sorted(name for name in names if re.fullmatch(r"model-\d+-of-\d+\.safetensors", name)))
    if INDEX in names and shards:
        return shards
    pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
    if pickles:
        raise UnsupportedError(
            f"{where} has weights as pickles only ({pickles[0]}), which can run code when they are read.",
            hint="Use a repository with safetensors, or convert them where you trust them.",
            field="model.id",
        )
    raise ConfigError(
        f"{where} has no {SINGLE} (or {INDEX} with its files).",
        hint="Pass a folder that save_pretrained wrote, or a hub id.",
        field="model.id",
    )


def _indexed(path: Path) -> tuple[str, ...]:
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise _damaged(path, "it is larger than any index")
        mapped = json.loads(path.read_bytes(), object_pairs_hook=_unique)["weight_map"]
        names = {str(name) for name in mapped.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, "it is no index of safetensors files") from error
    for name in names:
        if not _PLAIN_NAME.fullmatch(name) or name.startswith("."):
            raise _damaged(path, f"it names {name[:80]!r}, which is no plain file name")
    return tuple(sorted(names))


# -- headers


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """Read what a safetensors file holds. Raises ConfigError for a header that is none, or a name that stands twice.

    Offsets and holes are checked by the library that reads the tensors; it accepts a name twice, which this does not.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise _damaged(path, "its header is longer than it may be")
            header = json.loads(file.read(length), object_pairs_hook=_unique)
        return dict(_entries(header, 8 + length, size - 8 - length))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"The file cannot be read: {reason}.", hint="Check it.", place=str(path)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _damaged(path, str(error) or "its header is none") from error


def _entries(header: dict[str, Any], begin: int, num_bytes: int) -> Iterator[tuple[str, StoredTensor]]:
    if len(header) > MAX_TENSORS:
        raise ValueError(f"it names more than {MAX_TENSORS:,} tensors")
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
            raise ValueError(f"the tensor {name[:80]!r} has a size that is none")
        bits = math.prod(shape) * ITEM_BITS[entry["dtype"]]
        if start > end or end > num_bytes or 8 * (end - start) != bits:
            raise ValueError(f"the tensor {name[:80]!r} does not lie in the file as its header says")
        yield name, StoredTensor(entry["dtype"], shape, end - start, begin + start)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the name {key[:80]!r} stands in it twice")
        found[key] = value
    return found


def _damaged(path: Path, reason: str) -> ConfigError:
    text = f"This is no whole safetensors checkpoint: {reason}."
    return ConfigError(text, hint="Copy or download it again.", place=os.fspath(path))
