"""What a report may not hold: who and where a person is, and what opens doors."""

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from foretune.texts import escape

__all__ = ["Private", "private_words"]

HIDDEN = "(hidden)"
_LONGEST = 300
_PATTERNS = re.compile(
    r"hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{8,}|AKIA[A-Z0-9]{12,}"
    r"|eyJ[\w-]+\.[\w-]+\.[\w-]*|://[^/\s@]+@|(?:GPU|MIG)-[0-9a-fA-F-]{8,}"
    r"|[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
    r"|(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]"
)
"""Tokens of well-known kinds, passwords in URLs, UUIDs, places on the PCI bus."""
_SECRET_NAME = re.compile(r"TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_KEY", re.IGNORECASE)
_SHORTEST = 4
"""Names and secrets that are shorter are not looked for in other words."""


class Private:
    """The words of one machine that no report may hold."""

    def __init__(self, *, home: str = "", names: frozenset[str] = frozenset(), secrets: tuple[str, ...] = ()) -> None:
        self._home = home.rstrip("/\\")
        self._names = names
        self._secrets = secrets

    def foreign(self, text: str) -> str:
        """Return a foreign text without private words, on one line, its control characters escaped."""
        if self._home:
            text = text.replace(self._home, "~")
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        text = _PATTERNS.sub(HIDDEN, text)
        text = re.sub(r"[^\s/\\:=,;'\"()@]+", lambda word: HIDDEN if word[0] in self._names else word[0], text)
        for name in self._names:
            if len(name) >= _SHORTEST:
                text = text.replace(name, HIDDEN)
        return escape(text[:_LONGEST])


def private_words(environment: Mapping[str, str] | None = None) -> Private:
    """Read once what is private on this machine: home, user and host names, and the values of secret variables."""
    environment = os.environ if environment is None else environment
    home = str(Path.home()) if "HOME" in environment or os.name == "nt" else ""
    names = {environment.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "COMPUTERNAME", "HOSTNAME")}
    with suppress(OSError):
        names |= {(host := socket.gethostname()), host.partition(".")[0]}
    folder = Path(home).name
    if folder and folder != "root":
        names.add(folder)
    secrets = {value for name, value in environment.items() if _SECRET_NAME.search(name) and len(value) >= _SHORTEST}
    return Private(
        home=home if len(home) > 1 else "",
        names=frozenset(name for name in names if name and name not in ("root", "localhost")),
        secrets=tuple(sorted(secrets, key=len, reverse=True)),
    )
