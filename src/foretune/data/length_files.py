"""Files of row lengths: the reader of all forms, strict, and in memory that does not grow with the rows.

Forms: a line each with a number of tokens (`512`), an object (`{"tokens": 512}` or `{"length": 512}`) or a bar of a
histogram (`{"length": 512, "count": 40}`); or one JSON object that maps lengths to numbers of rows (`{"512": 40}`).
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO

from foretune.data.lengths import Lengths
from foretune.data.rows import BYTE_ORDER_MARK
from foretune.data.strict_json import JsonProblem, decode_json
from foretune.errors import DataError

__all__ = ["read_lengths"]

MAX_TOKENS = 1 << 30
"""Of a row: as many as `batch.sequence_length` may be."""
MAX_COUNT = 1 << 40
"""Rows in one bar of a histogram."""
MAX_TOTAL = 1 << 62
"""Tokens in all: what a JSON number surely holds."""
MAX_DISTINCT = 1 << 20
"""Different lengths: what is held in memory."""
MAX_LINE = 1 << 12
MAX_OBJECT = 1 << 26
"""Bytes of a file that is one object: more than MAX_DISTINCT lengths, each on a line of its own."""
BLOCK = 1 << 21

HINT = (
    'Each line is a number of tokens, {"tokens": N}, {"length": N} or {"length": N, "count": K}; or the file is one '
    'object {"LENGTH": COUNT, ...}.'
)
_BEGINS_OBJECT = re.compile(rb'\s*\{\s*"\d')
_PLAIN_ROW = re.compile(rb'\{"(?:tokens|length)": ?([1-9][0-9]{0,8})\}')
_KEY = re.compile(r"[1-9][0-9]{0,9}")


def read_lengths(path: str | os.PathLike[str]) -> Lengths:
    """Read how long rows are.

    A gigabyte of short lines takes half a minute, and no more memory than its different lengths. Raises DataError
    with file, line and cause: for a file that cannot be read, holds no length or more than 2^20 different ones, and
    for a line that is none.

        estimate_lengths(config, read_lengths("lengths.jsonl"))
    """
    file = str(os.fspath(path))
    try:
        with open(file, "rb") as stream:  # noqa: PTH123 - the path may be any text
            counted = _counted(stream, file)
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        if isinstance(error, FileNotFoundError):
            raise DataError("The file does not exist.", hint="Check the path.", place=file) from error
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"The lengths cannot be read: {reason}.", hint="Name a file that you may read.", place=file
        ) from error
    if not counted:
        raise DataError("There is no length in it.", hint=HINT, place=file)
    lengths = Lengths.of(counted)
    if lengths.num_tokens >= MAX_TOTAL:
        raise DataError("It has 2^62 tokens or more in all.", hint="Check its counts.", place=file)
    return lengths


def _counted(stream: BinaryIO, file: str) -> dict[int, int]:
    head = stream.read(BLOCK).removeprefix(BYTE_ORDER_MARK)
    if _BEGINS_OBJECT.match(head):
        return _counted_in_object(head + stream.read(MAX_OBJECT), file)
    return _counted_in_lines(head, stream, file)


# -- a length a line


def _counted_in_lines(head: bytes, stream: BinaryIO, file: str) -> dict[int, int]:
    """Count block by block: equal lines of a block are parsed once."""
    counted: dict[int, int] = {}
    for first, lines in _blocks(head, stream, file):
        for line, times in Counter(lines).items():
            try:
                parsed = _parsed(line)
                if parsed is not None:
                    _add(counted, parsed[0], parsed[1] * times)
            except JsonProblem as error:
                raise DataError(f"{error}", hint=HINT, place=f"{file}:{first + lines.index(line)}") from error
    return counted


def _blocks(head: bytes, stream: BinaryIO, file: str) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the number of a first line with the lines that follow, split at newlines alone."""
    first, rest, block = 1, b"", head
    while block:
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        yield first, lines
        first += len(lines)
        if len(rest) > MAX_LINE:
            raise DataError(_too_long(), hint=HINT, place=f"{file}:{first}")
        block = stream.read(BLOCK)
    yield first, [rest]


def _too_long() -> str:
    return f"The line is longer than {MAX_LINE:,} bytes."


def _parsed(line: bytes) -> tuple[int, int] | None:
    """Return length and count of a line; None for a blank one."""
    line = line.strip(b" \t\r")
    if len(line) <= 9 and line.isdigit() and line[0] != ord("0"):
        return int(line), 1
    plain = _PLAIN_ROW.fullmatch(line)  # a quick way for most lines; JSON says the same of them
    if plain is not None:
        return int(plain[1]), 1
    if not line:
        return None
    if len(line) > MAX_LINE:
        raise JsonProblem(_too_long())
    return _row(decode_json(line))


def _row(data: Any) -> tuple[int, int]:
    if not isinstance(data, dict):
        return _whole("The line", data, MAX_TOKENS), 1
    unknown = [key for key in data if key not in ("tokens", "length", "count")]
    if unknown:
        raise JsonProblem(f"The key {unknown[0][:60]!r} is not known.")
    if len(data.keys() & {"tokens", "length"}) != 1:
        raise JsonProblem("The object has to have either tokens or length.")
    name = "tokens" if "tokens" in data else "length"
    return _whole(name, data[name], MAX_TOKENS), _whole("count", data.get("count", 1), MAX_COUNT)


# -- one object


def _counted_in_object(data: bytes, file: str) -> dict[int, int]:
    if len(data) > MAX_OBJECT:
        raise DataError(f"The object is longer than {MAX_OBJECT:,} bytes.", hint=HINT, place=file)
    counted: dict[int, int] = {}
    try:
        for key, count in decode_json(data).items():
            if _KEY.fullmatch(key) is None or int(key) > MAX_TOKENS:
                raise JsonProblem(f"The key {key[:60]!r} is no number from 1 to {MAX_TOKENS:,}.", key=key)
            try:
                _add(counted, int(key), _whole(f"The count of {key}", count, MAX_COUNT))
            except JsonProblem as error:
                raise JsonProblem(str(error), key=key) from error
    except JsonProblem as error:
        raise DataError(f"{error}", hint=HINT, place=f"{file}:{_line_of(error, data)}") from error
    return counted


def _line_of(error: JsonProblem, data: bytes) -> int:
    """Return the line on which the key last stands; what is wrong with the text itself has its own line."""
    if error.key is None:
        return error.line
    return data.count(b"\n", 0, max(data.rfind(f'"{error.key}"'.encode(errors="replace")), 0)) + 1


# -- both


def _add(counted: dict[int, int], length: int, count: int) -> None:
    if length not in counted and len(counted) >= MAX_DISTINCT:
        raise JsonProblem(f"It has more than {MAX_DISTINCT:,} different lengths.")
    counted[length] = counted.get(length, 0) + count


def _whole(name: str, value: Any, most: int) -> int:
    """Check that a value is a whole number from 1 to `most`."""
    if type(value) is int and 1 <= value <= most:
        return value
    shown = "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else json.dumps(value)[:60]
    raise JsonProblem(f"{name} is {shown}, and no whole number from 1 to {most:,}.")
