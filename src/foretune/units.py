"""Bytes in and out of text. Inside the program bytes are `int`; MiB and GiB are powers of two."""

import re

from foretune.errors import ConfigError

__all__ = ["GIB", "KIB", "MIB", "format_bytes", "parse_bytes"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {"": GIB, "gib": GIB, "g": GIB, "mib": MIB, "m": MIB, "kib": KIB, "b": 1, "gb": 10**9, "mb": 10**6}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def format_bytes(num_bytes: int) -> str:
    """Write bytes for a person: `5.91 GiB`, `140.9 MiB`, `512 B`.

    >>> format_bytes(6_345_000_000)
    '5.91 GiB'
    """
    size = abs(num_bytes)
    if size >= GIB:
        return f"{num_bytes / GIB:,.2f} GiB"
    if size >= MIB:
        return f"{num_bytes / MIB:.1f} MiB"
    if size >= KIB:
        return f"{num_bytes / KIB:.1f} KiB"
    return f"{num_bytes} B"


def parse_bytes(text: str) -> int:
    """Read `24`, `24GiB`, `15360 MiB` or `24 GB` as bytes; a bare number is GiB, GB is 10^9.

    Raises ConfigError for anything else, and for more than 2^60 bytes.
    """
    match = _TEXT.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is not a size.", hint="Write for example 24, 24GiB, 15360MiB or 24GB.")
    num_bytes = int(float(match[1]) * unit)
    if not 0 < num_bytes <= 1 << 60:
        raise ConfigError(f"{text!r} is out of range.", hint="A size lies above 0 and below 2^60 bytes.")
    return num_bytes
