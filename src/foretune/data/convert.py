"""Rows of other formats, made into ours: without loss, or refused with file, line and reason.

A file is JSONL, or one JSON array of objects. Each row that is made has passed `parse_row`; what holds something and
has no place in it is refused by name, unless the caller drops that key. Messages are counted as they are written: a
system text that stands outside the list is message 1.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator
from io import BufferedReader
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

from foretune.data.rows import (
    BLANKS,
    BYTE_ORDER_MARK,
    INSTRUCTION_KEYS,
    MAX_LINE_BYTES,
    ROLES,
    Row,
    RowProblem,
    kind_of,
    open_rows,
    parse_row,
    read_lines,
    short_form,
    unreadable,
)
from foretune.data.strict_json import JsonProblem, decode_json, read_elements
from foretune.errors import DataError

__all__ = ["SOURCE_FORMATS", "Converted", "SourceFormat", "convert_row", "convert_rows"]

SourceFormat = Literal["sharegpt", "alpaca", "prompt-completion", "openai"]
SOURCE_FORMATS: tuple[SourceFormat, ...] = get_args(SourceFormat)

MAX_ARRAY_BYTES = 1 << 28
"""Of a file that is one array: it is held in memory, and JSONL is not."""

TWO_FILES = "The file is JSONL, an object on each line, or one JSON array of objects."
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
}
"""Who speaks in a turn of ShareGPT, and the role that this is."""


FORMAT_OF = {
    "conversations": "sharegpt",
    "conversation": "sharegpt",
    "instruction": "alpaca",
    "output": "alpaca",
    "prompt": "prompt-completion",
    "completion": "prompt-completion",
    "messages": "openai",
}
"""Keys by which a format is known."""


class Converted(NamedTuple):
    """One row: as it is written (without a newline), as it is read again, and the keys that were dropped from it."""

    text: str
    row: Row
    dropped: tuple[str, ...] = ()


def convert_rows(
    path: str | os.PathLike[str], source: SourceFormat, *, drop: Collection[str] = ()
) -> Iterator[Converted | None]:
    """Yield the rows of a file in order, made into ours; None for a blank line.

    The memory for JSONL does not grow with the file; one array may have 256 MiB. `drop` names keys of a row that
    may be lost. Raises DataError with file, line and cause, for a file without a row too.
    """
    file = str(os.fspath(path))
    num_rows = 0
    try:
        with open_rows(file) as stream:
            for line, found in _read_values(stream, file):
                num_rows += found is not None
                yield None if found is None else convert_row(found, line, source, drop=drop)
    except RowProblem as problem:
        raise problem.located(file) from problem
    except OSError as error:
        raise unreadable(file, error) from error
    if not num_rows:
        raise DataError("There is no row in it.", hint=TWO_FILES, place=file)


def convert_row(found: dict[str, Any], line: int, source: SourceFormat, *, drop: Collection[str] = ()) -> Converted:
    """Make one row of another format into ours. Raises RowProblem.

    >>> convert_row({"prompt": "1 + 1?", "completion": "2"}, 1, "prompt-completion").text
    '{"instruction": "1 + 1?", "input": "", "output": "2"}'
    """
    dropped = tuple(key for key in found if key in drop and _holds(found[key]))
    kept = {key: value for key, value in found.items() if key not in drop}
    text, row = _checked(_FORMATS[source](kept, line), line)
    return Converted(text, row, dropped)


def _checked(row: dict[str, Any], line: int) -> tuple[str, Row]:
    """Write a row, and read it as training will."""
    text = json.dumps(row, ensure_ascii=False)
    try:
        data = text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: written as an escape, so that its key can be named
        data = json.dumps(row).encode()
    if len(data) > MAX_LINE_BYTES:
        message = f"the row would be longer than {MAX_LINE_BYTES:,} bytes."
        raise RowProblem(line, message, hint="Split the row.")
    parsed = parse_row(data, line)
    assert parsed is not None
    return text, parsed


# -- the file


def _read_values(stream: BinaryIO, file: str) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the line of each row, and the row; None for a blank line."""
    assert isinstance(stream, BufferedReader)
    head = stream.peek(1).removeprefix(BYTE_ORDER_MARK)  # so that a pipe can be read too
    if head.lstrip(b" \t\r\n").startswith(b"["):
        yield from _read_array(stream)
        return
    for line, data in read_lines(stream, file):
        yield line, _line_object(data, line) if data.strip(BLANKS) else None


def _line_object(data: bytes, line: int) -> dict[str, Any]:
    try:
        return _object(decode_json(data), line)
    except JsonProblem as problem:
        raise _row_problem(problem, line) from problem


def _read_array(stream: BufferedReader) -> Iterator[tuple[int, dict[str, Any]]]:
    data = stream.read(MAX_ARRAY_BYTES + 1).removeprefix(BYTE_ORDER_MARK)
    if len(data) > MAX_ARRAY_BYTES:
        hint = "Write it as JSONL, an object on each line: `jq -c '.[]'` does it."
        raise RowProblem(1, f"the array is longer than {MAX_ARRAY_BYTES:,} bytes.", hint=hint)
    try:
        for line, found in read_elements(data):
            yield line, _object(found, line)
    except JsonProblem as problem:
        raise _row_problem(problem, problem.line) from problem


def _row_problem(problem: JsonProblem, line: int) -> RowProblem:
    text = str(problem)
    return RowProblem(line, text[:1].lower() + text[1:], hint=TWO_FILES)


def _object(found: Any, line: int) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise RowProblem(line, f"the row is {kind_of(found)}, and no object.", hint=TWO_FILES)
    return found


# -- the formats


def _from_sharegpt(found: dict[str, Any], line: int) -> dict[str, Any]:
    """Read `conversations` (or `conversation`) of `from` and `value`, and a system text beside it."""
    _refuse_keys(found, ("conversations", "conversation", "system"), line)
    keys = [key for key in ("conversations", "conversation") if _holds(found.get(key))]
    if len(keys) == 2:
        message = "the row has conversations and conversation; which of them is to be trained cannot be told."
        raise RowProblem(line, message, hint="--drop one of them.")
    key = keys[0] if keys else "conversations"
    system = _system(found, line)
    listed = _list(found, key, line)
    turns = [_sharegpt_message(turn, line, number) for number, turn in enumerate(listed, 1 + len(system))]
    if system and any(turn["role"] == "system" for turn in turns):
        message = f"the row has a system text and {key} another; which of them is to be trained cannot be told."
        raise RowProblem(line, message, hint="--drop system leaves out the one beside the turns.")
    return {"messages": [*system, *turns]}


def _sharegpt_message(turn: Any, line: int, number: int) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise RowProblem(line, f"it is {kind_of(turn)}, and no object with from and value.", turn=number)
    speaker = turn.get("from")
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        what = short_form(speaker) if "from" in turn else "missing"
        hint = "foretune maps no other speaker by guess, and tools are not trained."
        raise RowProblem(line, f"from is {what}; allowed are {', '.join(SPEAKERS)}.", turn=number, hint=hint)
    _refuse_keys(turn, ("from", "value"), line, number)
    return {"role": role, "content": _string(turn, "value", line, number)}


def _from_alpaca(found: dict[str, Any], line: int) -> dict[str, Any]:
    """Read `instruction`, `input` and `output`; with a `system` or a `history` the row becomes a conversation.

    Its last user turn is the instruction, a newline and the input (where there is one), and `history` has the pairs
    of user and assistant before it: so LLaMA-Factory reads such rows (AlpacaDatasetConverter).
    """
    _refuse_keys(found, (*INSTRUCTION_KEYS, "system", "history"), line)
    own = {key: found[key] for key in INSTRUCTION_KEYS if key in found}
    row = {**own, "input": "" if _is_nothing(own.get("input")) else own["input"]}
    system = _system(found, line)
    history = _history(found.get("history"), line)
    if not system and not history:
        return {key: row[key] for key in INSTRUCTION_KEYS if key in row}
    _checked(row, line)  # its texts are what they have to be: the same rules with a history and without
    asked = f"{row['instruction']}\n{row['input']}" if row["input"] else row["instruction"]
    return {"messages": [*system, *history, _user(asked), _assistant(row["output"])]}


def _history(pairs: Any, line: int) -> list[dict[str, Any]]:
    if _is_nothing(pairs):
        return []
    if not isinstance(pairs, list):
        raise RowProblem(line, f"history must be a list of pairs, got {kind_of(pairs)}.")
    messages = []
    for number, pair in enumerate(pairs, 1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            hint = "A pair is a list of two strings: the user's and the assistant's."
            raise RowProblem(line, f"item {number} of history is no pair of strings.", hint=hint)
        messages += [_user(pair[0]), _assistant(pair[1])]
    return messages


def _from_prompt_completion(found: dict[str, Any], line: int) -> dict[str, Any]:
    """Read `prompt` and `completion`: two strings are an instruction and its output, two lists one conversation.

    TRL computes the loss on the completion alone; here `data.supervision` says where loss is.
    """
    _refuse_keys(found, ("prompt", "completion"), line)
    for key in ("prompt", "completion"):
        if key not in found:
            raise RowProblem(line, f"{key} is missing.")
    prompt, completion = found["prompt"], found["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        listed = [*_list(found, "prompt", line), *_list(found, "completion", line)]
        return {"messages": [_openai_message(item, line, number) for number, item in enumerate(listed, 1)]}
    if not isinstance(prompt, str) or not isinstance(completion, str):
        got = f"{kind_of(prompt)} and {kind_of(completion)}"
        raise RowProblem(line, f"prompt and completion must be two strings or two lists of messages, got {got}.")
    for key in ("prompt", "completion"):
        if not found[key].strip():
            raise RowProblem(line, f"{key} is empty.", hint="Write a text, or remove the row yourself.")
    return {"instruction": prompt, "input": "", "output": completion}


def _from_openai(found: dict[str, Any], line: int) -> dict[str, Any]:
    """Read `messages` of `role` and `content`.

    Refused are developers, tools, names and weights: nothing of ours means the same.
    """
    _refuse_keys(found, ("messages",), line)
    listed = _list(found, "messages", line)
    return {"messages": [_openai_message(item, line, number) for number, item in enumerate(listed, 1)]}


def _openai_message(item: Any, line: int, number: int) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise RowProblem(line, f"it is {kind_of(item)}, and no object with role and content.", turn=number)
    role = item.get("role")
    if role not in ROLES:
        what = short_form(role) if "role" in item else "missing"
        hint = "foretune maps no other role by guess, and tools are not trained."
        message = f"role is {what}; allowed are system, user and assistant."
        raise RowProblem(line, message, turn=number, hint=hint)
    _refuse_keys(item, ("role", "content"), line, number)
    content = item.get("content")
    if isinstance(content, list):
        return {"role": role, "content": _only_part(content, line, number)}
    return {"role": role, "content": _string(item, "content", line, number)}


def _only_part(parts: list[Any], line: int, number: int) -> str:
    """Take the text of a content that is one part; how several are joined is not written anywhere."""
    if len(parts) != 1:
        message = (
            f"content is a list of {len(parts):,} parts; one text part is taken, and more are not joined by guess."
        )
        raise RowProblem(line, message, turn=number, hint="Write one string.")
    part = parts[0]
    if not isinstance(part, dict) or part.get("type") != "text":
        what = f"of type {short_form(part.get('type'))}" if isinstance(part, dict) else kind_of(part)
        message = f"the part of content is {what}, and no text: multimodal input is not supported."
        raise RowProblem(line, message, turn=number, hint="Write one string; images, sound and parts are not trained.")
    _refuse_keys(part, ("type", "text"), line, number)
    return _string(part, "text", line, number)


_FORMATS: dict[SourceFormat, Callable[[dict[str, Any], int], dict[str, Any]]] = {
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "prompt-completion": _from_prompt_completion,
    "openai": _from_openai,
}


# -- what the formats share


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _system(found: dict[str, Any], line: int) -> list[dict[str, Any]]:
    """Return the system text of a row as the messages that it makes: none or one."""
    if _is_nothing(found.get("system")):
        return []
    return [{"role": "system", "content": _string(found, "system", line)}]


def _holds(value: Any) -> bool:
    return not _is_nothing(value)


def _is_nothing(value: Any) -> bool:
    """Say whether a key might as well not be there."""
    return value in (None, "", [], {})


def _list(found: dict[str, Any], key: str, line: int) -> list[Any]:
    """Return a list that is not empty."""
    if key not in found:
        raise RowProblem(line, f"{key} is missing.")
    listed = found[key]
    if not isinstance(listed, list) or not listed:
        what = "an empty list" if listed == [] else kind_of(listed)
        raise RowProblem(line, f"{key} is {what}, and no list of messages.")
    return listed


def _string(found: dict[str, Any], key: str, line: int, turn: int | None = None) -> str:
    if key not in found:
        raise RowProblem(line, f"{key} is missing.", turn=turn)
    if not isinstance(found[key], str):
        raise RowProblem(line, f"{key} must be a string, got {kind_of(found[key])}.", turn=turn)
    text: str = found[key]
    return text


def _refuse_keys(found: dict[str, Any], known: tuple[str, ...], line: int, turn: int | None = None) -> None:
    """Refuse whatever else holds something: it would be lost without a word."""
    for key, value in found.items():
        if key in known or _is_nothing(value):
            continue
        hint = "Remove the key yourself, if it may be lost; --drop is for keys of the row."
        if turn is None:
            other = FORMAT_OF.get(key)
            hint = f"--drop {short_form(key)[1:-1]} leaves it out."
            hint = f"It is a key of {other}: --from {other}? {hint}" if other else hint
        message = f"the key {short_form(key)} has no place in our rows; known are: {', '.join(known)}."
        raise RowProblem(line, message, turn=turn, hint=hint)
