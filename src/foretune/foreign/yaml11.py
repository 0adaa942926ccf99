"""Plain scalars by YAML 1.1, as PyYAML resolves them: what other tools read where we read YAML 1.2.

`yes` is true, `010` is eight, `1_000` and `12:30:45` are numbers, and `1e-4` is text (a number of YAML 1.1 has a point
and a sign before its exponent), which each tool then makes a number. https://yaml.org/type/.
"""

import re

from foretune.contract.scalars import BadScalar, Scalar, read_plain

__all__ = ["read_yaml11"]

_WORDS: dict[str, Scalar] = {
    **{spelled: True for word in ("yes", "true", "on") for spelled in (word, word.capitalize(), word.upper())},
    **{spelled: False for word in ("no", "false", "off") for spelled in (word, word.capitalize(), word.upper())},
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
}
_INTEGER = re.compile(
    r"(?P<sign>[-+]?)(?:0b(?P<bin>[01_]+)|0x(?P<hex>[0-9a-fA-F_]+)|0(?P<oct>[0-7_]+)"
    r"|(?P<sixty>[1-9][0-9_]*(?::[0-5]?[0-9])+)|(?P<dec>0|[1-9][0-9_]*))"
)
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?")
_BASES = {"bin": 2, "hex": 16, "oct": 8, "dec": 10}


def read_yaml11(text: str) -> Scalar:
    """Resolve an unquoted scalar as PyYAML does. Raises BadScalar where no setting can hold it (`read_plain`).

    >>> read_yaml11("yes"), read_yaml11("010"), read_yaml11("1e-4"), read_yaml11("1.0e-4")
    (True, 8, '1e-4', 0.0001)
    """
    if text in _WORDS:
        return _WORDS[text]
    match = _INTEGER.fullmatch(text)
    if match is not None and text.strip("+-_0bx"):
        return _whole(match, text)
    if _FLOAT.fullmatch(text) and any(character.isdigit() for character in text):
        return read_plain(text.replace("_", ""))
    kept = read_plain(text)
    return kept if match is not None or isinstance(kept, str) else text


def _whole(match: re.Match[str], text: str) -> int:
    kind = next(name for name in ("bin", "hex", "oct", "sixty", "dec") if match[name] is not None)
    digits = match[kind].replace("_", "")
    if len(digits) > 70:
        raise BadScalar("a number", "is too large for a whole number (below 2^63)", "Write a smaller number.")
    number = 0
    if kind == "sixty":
        for part in digits.split(":"):
            number = number * 60 + int(part)
    else:
        number = int(digits, _BASES[kind])
    if number >= 1 << 63:
        raise BadScalar(text, "is too large for a whole number (below 2^63)", "Write a smaller number.")
    return -number if match["sign"] == "-" else number
