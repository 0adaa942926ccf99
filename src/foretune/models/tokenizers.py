"""Where a model's tokenizer is: a local folder, the hub cache, or the Hub. Weights are never asked for."""

from pathlib import Path
from typing import NamedTuple

from foretune.errors import ConfigError
from foretune.models import hub
from foretune.models.catalogue import find_catalogue, near_matches
from foretune.models.resolve import refuse_characters, refuse_id, refuse_revision

__all__ = ["TokenizerFiles", "resolve_tokenizer"]

NEEDED = "tokenizer.json"
FILES = (
    NEEDED,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
)
"""All that a fast tokenizer and its chat template are read from."""


class TokenizerFiles(NamedTuple):
    """A folder with a tokenizer, and what it is called."""

    folder: Path
    name: str
    revision: str | None
    """The commit of the Hub; None for a local folder."""

    def fingerprint(self) -> str:
        """Return a SHA-256 of the files that decide about ids and renderings."""
        import hashlib  # 3 ms, which an estimate need not pay

        digest = hashlib.sha256()
        for name in FILES:
            path = self.folder / name
            if path.is_file():
                digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def asks_for_the_date(self) -> bool:
        """Whether a chat template may ask for today's date."""
        files = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")
        return any((self.folder / name).is_file() and _asks((self.folder / name).read_bytes()) for name in files)


def _asks(data: bytes) -> bool:
    return b"strftime_now" in data


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
    if snapshot is None or not (snapshot / NEEDED).exists():
        if offline:
            raise _unknown_offline(id)
        snapshot = hub.fetch_files(id, revision, FILES)
    return _checked(TokenizerFiles(snapshot, id, snapshot.name))


def _local_folder(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        if path.is_file():
            return path.parent
        return path if path.is_dir() else None
    except (OSError, RuntimeError, ValueError):
        return None


def _checked(files: TokenizerFiles) -> TokenizerFiles:
    if (files.folder / NEEDED).is_file():
        return files
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
