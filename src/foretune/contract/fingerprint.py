"""A short name for what a configuration says."""

import os

import msgspec

from foretune.contract.config import TrainingConfig
from foretune.contract.paths import make_portable

__all__ = ["fingerprint"]


def fingerprint(config: TrainingConfig, *, folder: str | os.PathLike[str] | None = None) -> str:
    """Return 16 hex digits: the start of the SHA-256 of the configuration's canonical JSON (sorted keys).

    Equal configurations have equal fingerprints on every machine. Paths count as they stand; with `folder`, those
    inside it count relative to it, so that a folder that is moved keeps its fingerprint.

        fingerprint(load_config("run.yaml").config)
    """
    from hashlib import sha256

    if folder is not None:
        config = make_portable(config, os.fspath(folder))
    return sha256(msgspec.json.encode(config, order="deterministic")).hexdigest()[:16]
