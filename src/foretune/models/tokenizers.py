"""Where a model's tokenizer is: a local folder, the hub cache, or the Hub. Weights are never asked for."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from foretune.errors import ConfigError
from foretune.models import hub
from foretune.models.catalogue import find_catalogue, near_matches
from foretune.models.resolve import refuse_characters, refuse_id, refuse_revision

__all__ = ["TokenizerFiles", "resolve_tokenizer"]

NEEDED = "tokenizer.json"
FILES = (
    "tokenizer_config.json",
    NEEDED,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "config.json",
)
"""All that a fast tokenizer and its chat template are read from; the first is asked for first."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
"""Endings of files that decide about no id."""
MAX_TOKENIZER_BYTES = 512 << 20


class TokenizerFiles(NamedTuple):
    """A folder with a tokenizer, and what it is called."""

    folder: Path
    name: str
    revision: str | None
    """The commit of the Hub; None for a local folder."""

    def fingerprint(self) -> str:
        """Return a SHA-256 of the files that may decide about ids and renderings: all of the folder but weights.

        Raises ConfigError for a file that is larger than a tokenizer's can be.
        """
        import hashlib  # 3 ms, which an estimate need not pay

        digest = hashlib.sha256()
        try:
            for path in self._deciding():
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").digest()
                digest.update(f"{path.relative_to(self.folder)}\0".encode(errors="surrogateescape") + content)
        except OSError as error:
            raise _unreadable(str(error.filename or self.folder), error) from error
        return digest.hexdigest()

    def _deciding(self) -> Iterator[Path]:
        for path in sorted([*self.folder.glob("*"), *self.folder.glob("additional_chat_templates/*")]):
            if not path.is_file() or path.suffix in WEIGHTS:
                continue
            if path.stat().st_size > MAX_TOKENIZER_BYTES:
                message = f"The file is larger than {MAX_TOKENIZER_BYTES:,} bytes, and no tokenizer's is."
                raise ConfigError(message, hint="Pass a folder with the tokenizer alone.", place=str(path))
            yield path


def _unreadable(place: str, error: OSError) -> ConfigError:
    reason = error.strerror or type(error).__name__
    return ConfigError(f"The tokenizer cannot be read: {reason}.", hint="Check its permissions.", place=place)


def resolve_tokenizer(id_or_path: str, *, revision: str | None = None, offline: bool = False) -> TokenizerFiles:
    """Find a tokenizer: a folder (or a file in it), the hub cache, then the Hub unless `offline`.

    Raises ConfigError for a bad name and a folder without tokenizer.json, and ModelAccessError.
    """
    refuse_characters(id_or_path)
    folder = _local_folder(id_or_path)
    if folder is not None:
        return _checked(TokenizerFiles(folder, id_or_path, None))
    refuse_id(id_or_path, NEEDED)
    refuse_revision(revision)
    match = find_catalogue(id_or_path)
    id = match.id if match else id_or_path
    snapshot = hub.cached_snapshot(id, revision)
    if snapshot is None or not all((snapshot / name).exists() for name in FILES[:2]):
        if offline:
            raise _unknown_offline(id)
        snapshot = hub.fetch_files(id, revision, FILES, NEEDED)
    return _checked(TokenizerFiles(snapshot, id, snapshot.name))


def _local_folder(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        if path.is_file():
            return path.parent
        return path if path.is_dir() else None
    except PermissionError as error:
        raise _unreadable(text, error) from error
    except (OSError, RuntimeError, ValueError):
        return None


def _checked(files: TokenizerFiles) -> TokenizerFiles:
    try:
        if (files.folder / NEEDED).is_file():
            return files
    except OSError as error:
        raise _unreadable(str(files.folder), error) from error
    raise ConfigError(
        f"{files.name} has no {NEEDED}, which a fast tokenizer is read from.",
        hint="Pass a folder that save_pretrained of a fast tokenizer wrote, or a model that has one.",
        field="model.id",
    )


def _unknown_offline(id: str) -> hub.ModelOfflineError:
    near = near_matches(id)
    nearest = f" Nearest in the catalogue: {', '.join(near)}." if near and id not in near else ""
    return hub.ModelOfflineError(
        f"The tokenizer of {id} is not in the hub cache, and foretune is offline.",
        hint=f"Pass a folder with its tokenizer.json, or go online.{nearest}",
        field="model",
    )
