"""The Hugging Face cache and Hub: the only module that talks to either, and only when it is asked to.

The cache is read as the files it is. huggingface_hub is imported inside `_get`, for its session and its token; each
question is one request with a short time limit and no retry, so that a person without network does not wait.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from foretune.errors import MissingDependencyError, ModelAccessError

__all__ = [
    "HubFile",
    "HubState",
    "ModelNotFoundError",
    "ModelNotGrantedError",
    "ModelOfflineError",
    "ModelTokenError",
    "ask_hub",
    "cache_folder",
    "cached_config",
    "cached_snapshot",
    "fetch_config",
    "fetch_files",
    "is_offline",
    "list_files",
    "published_parameters",
    "token_source",
]

TIMEOUT_SECONDS = 10.0
PROBE_SECONDS = 4.0
_COMMIT = re.compile(r"[0-9a-f]{40}")


class ModelTokenError(ModelAccessError):
    """The Hub wants a token, and there is none."""

    code = "model-access-token"


class ModelNotGrantedError(ModelAccessError):
    """There is a token, but its owner was not granted access."""

    code = "model-access-gated"


class ModelNotFoundError(ModelAccessError):
    """There is no such model, revision or config."""

    code = "model-access-not-found"


class ModelOfflineError(ModelAccessError):
    """The model is not known here, and the Hub was not, or could not be, asked."""

    code = "model-access-offline"


class HubFile(NamedTuple):
    """A config.json as bytes, the commit it belongs to and what to call it in an error."""

    text: bytes
    revision: str | None
    place: str


class Answer(NamedTuple):
    """What the Hub answered."""

    status: int
    error_code: str | None
    commit: str | None
    body: bytes
    had_token: bool


class HubState(NamedTuple):
    """Whether the Hub answers."""

    status: int
    """HTTP's: 200, or 401 where it does not take the token."""
    had_token: bool


# -- cache -------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder of the hub cache, as huggingface_hub chooses it."""
    stated = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return _expanded(stated) if stated else _home() / "hub"


def _home() -> Path:
    """Return the folder of the hub's cache and token, as huggingface_hub chooses it."""
    home = os.environ.get("HF_HOME")
    if home:
        return _expanded(home)
    base = os.environ.get("XDG_CACHE_HOME")
    return (_expanded(base) if base else Path.home() / ".cache") / "huggingface"


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()


def is_offline() -> bool:
    """Say whether the environment forbids to ask the Hub, as huggingface_hub reads it."""
    stated = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return stated.upper() in ("1", "ON", "YES", "TRUE")


def token_source() -> str | None:
    """Say where huggingface_hub finds a token: an environment variable's name, or `file`; None: it finds none.

    The token itself is not read.
    """
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name, "").strip():
            return name
    stated = os.environ.get("HF_TOKEN_PATH")
    try:
        return "file" if (_expanded(stated) if stated else _home() / "token").stat().st_size else None
    except OSError:
        return None


def ask_hub() -> HubState:
    """Ask the Hub one small question, with a short time limit. Raises ConnectionError where there is no answer."""
    answer = _get("api/models/openai-community/gpt2?expand[]=sha", timeout=PROBE_SECONDS)
    return HubState(status=answer.status, had_token=answer.had_token)


def cached_snapshot(id: str, revision: str | None = None) -> Path | None:
    """Return the folder of a revision in the hub cache, named by its commit; None: it is not there."""
    folder = cache_folder() / f"models--{id.replace('/', '--')}"
    wanted = revision or "main"
    try:
        commit = wanted if _COMMIT.fullmatch(wanted) else (folder / "refs" / wanted).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def cached_config(id: str, revision: str | None = None) -> HubFile | None:
    """Read a config.json from the hub cache, without network and without huggingface_hub; None: it is not there."""
    snapshot = cached_snapshot(id, revision)
    try:
        path = snapshot / "config.json" if snapshot else None
        return HubFile(path.read_bytes(), path.parent.name, str(path)) if path else None
    except OSError:
        return None


# -- network -----------------------------------------------------------------------------------------------------


def fetch_config(id: str, revision: str | None = None) -> HubFile:
    """Download a config.json. Raises ModelAccessError: token missing, not granted, not found or offline."""
    wanted = revision or "main"
    answer = _ask(id, f"{id}/resolve/{wanted}/config.json")
    _refuse_answer(id, wanted, answer)
    return HubFile(answer.body, answer.commit, f"config.json of {id}")


def fetch_files(id: str, revision: str | None, names: Sequence[str], needed: str) -> Path:
    """Download some small files of a model into the hub cache, and return the folder of their revision.

    The first is asked for to see whether there is access; `needed` is the one that messages name.

    Raises ModelAccessError: token missing, not granted, not found or offline.
    """
    wanted = revision or "main"
    answer = _ask(id, f"{id}/resolve/{wanted}/{names[0]}", what=needed)
    _refuse_answer(id, wanted, answer, needed)
    try:
        return Path(_download(id, answer.commit or wanted, names))
    except OSError as error:
        raise ModelOfflineError(
            f"The files of {id} could not be downloaded ({type(error).__name__}).",
            hint="Check the network and the disk, or pass a folder that has them.",
            field="model",
        ) from None  # the cause may hold the request with its token


def list_files(id: str, revision: str | None = None) -> tuple[str, tuple[str, ...]]:
    """Ask for the commit of a revision and the names of its files. Raises ModelAccessError."""
    wanted = revision or "main"
    answer = _ask(id, f"api/models/{id}/revision/{wanted}", what="safetensors file")
    _refuse_answer(id, wanted, answer, "safetensors file")
    try:
        found = msgspec.json.decode(answer.body, type=dict[str, Any])
        commit, names = found["sha"], tuple(str(entry["rfilename"]) for entry in found["siblings"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        commit, names = "", ()
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise ModelOfflineError(
            f"The Hub's answer about the files of {id} cannot be read.",
            hint="Try again later, or pass a folder that has them.",
            field="model",
        )
    return commit, names


def _download(id: str, revision: str, names: Sequence[str]) -> str:
    """Download through huggingface_hub. Raises OSError (this is what tests replace)."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # lazily exported

    disable_progress_bars()
    return str(snapshot_download(id, revision=revision, allow_patterns=list(names), cache_dir=cache_folder()))


def published_parameters(id: str, revision: str | None = None) -> int | None:
    """Ask for the parameter count that the Hub read from the safetensors headers; None: there is none."""
    answer = _ask(id, f"api/models/{id}/revision/{revision or 'main'}?expand[]=safetensors")
    if answer.status != 200:
        return None
    try:
        found = msgspec.json.decode(answer.body, type=dict[str, Any]).get("safetensors")
    except msgspec.DecodeError:
        return None
    total = found.get("total") if isinstance(found, Mapping) else None
    return total if isinstance(total, int) and total > 0 else None


HUB_OFFLINE = "HF_HUB_OFFLINE is set"


def _ask(id: str, path: str, what: str = "config.json") -> Answer:
    try:
        return _get(path)
    except OSError as error:
        is_set = str(error) == HUB_OFFLINE
        why = HUB_OFFLINE if is_set else f"the Hub cannot be reached ({type(error).__name__})"
        remedy = "Unset it" if is_set else "Check the network"
        raise ModelOfflineError(
            f"{id} is not in the catalogue or the cache, and {why}.",
            hint=f"{remedy}, or pass the path of a {what}.",
            field="model",
        ) from None  # the cause may hold the request with its token


def _get(path: str, *, timeout: float = TIMEOUT_SECONDS) -> Answer:
    """Send one request. Raises OSError when there is no answer (this is what tests replace)."""
    if is_offline():
        raise ConnectionError(HUB_OFFLINE)
    try:
        from huggingface_hub import constants, get_session
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # lazily exported
    except ImportError as error:
        raise MissingDependencyError(
            "Reading a model from the Hub needs huggingface_hub.", hint="Run: pip install huggingface_hub"
        ) from error
    # The HTTP library has changed between releases of huggingface_hub; its base error is the first base of theirs.
    transport_error = cast("type[Exception]", HfHubHTTPError.__bases__[0])
    headers = build_hf_headers()
    try:
        reply = get_session().get(
            f"{constants.ENDPOINT}/{path}", headers=headers, timeout=timeout, follow_redirects=True
        )
    except transport_error as error:
        raise ConnectionError(type(error).__name__) from None
    return Answer(
        reply.status_code,
        reply.headers.get("x-error-code"),
        reply.headers.get("x-repo-commit"),
        reply.content,
        "authorization" in {name.lower() for name in headers},
    )


def _refuse_answer(id: str, revision: str, answer: Answer, name: str = "config.json") -> None:
    if answer.status == 200:
        return
    if answer.status == 403 or (answer.error_code == "GatedRepo" and answer.had_token):
        raise ModelNotGrantedError(
            f"{id} is gated, and this account was not granted access (HTTP {answer.status}).",
            hint=f"Accept its licence at https://huggingface.co/{id}, or pass the path of a {name}.",
            field="model",
        )
    if answer.status == 401 and not answer.had_token:
        raise ModelTokenError(
            f"The Hub does not show {id} without a token: it is gated or private, or there is no such model.",
            hint=f"Check the spelling; then `hf auth login`, or set HF_TOKEN, or pass the path of a {name}.",
            field="model",
        )
    if answer.status in (401, 404):
        what = {"RevisionNotFound": f"no revision {revision!r} of {id}", "EntryNotFound": f"no {name} in {id}"}
        found = what.get(answer.error_code or "", f"no model {id}")
        raise ModelNotFoundError(
            f"The Hub has {found} that this account can see.",
            hint=f"Check the spelling, or pass the path of a {name}.",
            field="model",
        )
    raise ModelOfflineError(
        f"The Hub did not answer for {id} (HTTP {answer.status}).",
        hint=f"Try again later, or pass the path of a {name}.",
        field="model",
    )
