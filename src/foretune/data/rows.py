"""Rows of a JSONL file: an instruction with its answer, or a conversation. Whatever is neither is refused.

A row is a line; lines end at `\\n` alone, so that a text may hold U+2028 or U+0085. Blank lines are counted, and
nothing is dropped.
"""

import json
import os
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal, NamedTuple

from foretune.data.strict_json import JsonProblem, decode_json
from foretune.errors import DataError

__all__ = [
    "InstructionRow",
    "Message",
    "MessagesRow",
    "Row",
    "RowProblem",
    "open_rows",
    "parse_row",
    "read_chunks",
    "read_lines",
    "read_rows",
]

MAX_LINE_BYTES = 16 << 20
BLOCK = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BLANKS = b" \t\r"

Role = Literal["system", "user", "assistant"]
ROLES = ("system", "user", "assistant")
INSTRUCTION_KEYS = ("instruction", "input", "output")
TWO_KINDS = 'A line is {"instruction": ..., "input": ..., "output": ...} or {"messages": [...]}.'

FOREIGN_KEYS = {
    "conversations": "sharegpt",
    "conversation": "sharegpt",
    "prompt": "prompt-completion",
    "completion": "prompt-completion",
    "history": "alpaca",
}
"""Keys by which another format is known, with the name that `data convert --from` gives it."""
FOREIGN_ROLES = {"human": "sharegpt", "gpt": "sharegpt", "model": "sharegpt", "bot": "sharegpt", "chatgpt": "sharegpt"}


class Message(NamedTuple):
    """One turn of a conversation."""

    role: Role
    content: str


class InstructionRow(NamedTuple):
    """An instruction, what it is about, and the answer."""

    line: int
    instruction: str
    input: str
    output: str


class MessagesRow(NamedTuple):
    """A conversation: system or not, then user and assistant by turns, the assistant last."""

    line: int
    messages: tuple[Message, ...]


Row = InstructionRow | MessagesRow


class RowProblem(ValueError):
    """What is wrong with one row; whoever knows the file makes a DataError of it."""

    def __init__(
        self, line: int, message: str, *, turn: int | None = None, hint: str | None = None, is_of_all: bool = False
    ) -> None:
        where = f"line {line}" if turn is None else f"line {line}, message {turn}"
        super().__init__(f"{where}: {message}")
        self.told = message if turn is None else f"message {turn}: {message}"
        """The same beside a place that has the line."""
        self.line = line
        self.hint = hint
        self.is_of_all = is_of_all
        """Other rows would fail alike, so they need not be tried."""

    def located(self, file: str) -> DataError:
        """Return the error that names the file, the line and the cause."""
        return DataError(self.told, hint=self.hint, place=f"{file}:{self.line}")


# -- lines


def read_rows(path: str | os.PathLike[str]) -> Iterator[Row]:
    """Yield the rows of a JSONL file in order, in memory that does not grow with the file.

    Raises DataError with file, line and cause.
    """
    file = str(os.fspath(path))
    with open_rows(file) as stream:
        for line, data in read_lines(stream, file):
            try:
                row = parse_row(data, line)
            except RowProblem as problem:
                raise problem.located(file) from problem
            if row is not None:
                yield row


def open_rows(file: str) -> BinaryIO:
    """Open a file of rows. Raises DataError where it cannot be read."""
    try:
        return open(file, "rb")  # noqa: PTH123 - the path may be any text; the caller closes it
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error


def unreadable(file: str, error: Exception) -> DataError:
    """Say why a file of rows cannot be read."""
    if isinstance(error, FileNotFoundError):
        return DataError("The file does not exist.", hint="Check the path.", place=file)
    reason = getattr(error, "strerror", None) or str(error)
    return DataError(f"The rows cannot be read: {reason}.", hint="Name a JSONL file that you may read.", place=file)


def read_lines(stream: BinaryIO, file: str) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each line, blank ones too; nothing after the last newline is a line.

    Raises DataError for a line of more than 16 MiB and where reading fails.
    """
    for first, chunk in read_chunks(stream, file):
        yield from enumerate(chunk.removesuffix(b"\n").split(b"\n"), first)


def read_chunks(stream: BinaryIO, file: str, size: int = BLOCK) -> Iterator[tuple[int, bytes]]:
    """Yield the number of a first line with the bytes of whole lines, of about `size` bytes or one long line.

    Raises DataError for a line of more than 16 MiB and where reading fails.
    """
    first, rest = 1, b""
    try:
        block = stream.read(size).removeprefix(BYTE_ORDER_MARK)
        while block:
            head, newline, tail = block.rpartition(b"\n")
            if newline:
                chunk = rest + head + newline
                _refuse_length(chunk, first, file)
                yield first, chunk
                first += chunk.count(b"\n")
                rest = tail
            else:
                rest += tail
                _refuse_length(rest, first, file)
            block = stream.read(size)
    except OSError as error:
        raise unreadable(file, error) from error
    if rest:
        yield first, rest


def _refuse_length(chunk: bytes, first: int, file: str) -> None:
    if len(chunk) <= MAX_LINE_BYTES:
        return
    for number, line in enumerate(chunk.split(b"\n"), first):
        if len(line) > MAX_LINE_BYTES:
            problem = RowProblem(number, f"the line is longer than {MAX_LINE_BYTES:,} bytes.", hint="Split the row.")
            raise problem.located(file)


# -- one row


def parse_row(data: bytes, line: int) -> Row | None:
    """Read one line; None for a blank one. Raises RowProblem.

    >>> parse_row(b'{"instruction": "1 + 1?", "output": "2"}', 1)
    InstructionRow(line=1, instruction='1 + 1?', input='', output='2')
    """
    if not data.strip(BLANKS):
        return None
    try:
        found = decode_json(data)
    except JsonProblem as problem:
        if line == 1 and data.lstrip().startswith(b"["):
            hint = "Write an object on each line: `jq -c '.[]' FILE > rows.jsonl` does it."
            raise RowProblem(line, "this is a JSON array, and no JSONL.", hint=hint, is_of_all=True) from problem
        text, hint = str(problem), "Each line is one JSON object."
        raise RowProblem(line, text[:1].lower() + text[1:], hint=hint) from problem
    if not isinstance(found, dict):
        raise RowProblem(line, f"the line is {kind_of(found)}, and no object.", hint=TWO_KINDS)
    if "messages" in found:
        return _messages_row(found, line)
    return _instruction_row(found, line)


def _instruction_row(found: dict[str, Any], line: int) -> InstructionRow:
    _refuse_keys(found, INSTRUCTION_KEYS, line)
    if "instruction" not in found or "output" not in found:
        missing = "instruction" if "instruction" not in found else "output"
        raise RowProblem(line, f"{missing} is missing.", hint=TWO_KINDS)
    texts = {key: _text(found.get(key, ""), key, line) for key in INSTRUCTION_KEYS}
    for key in ("instruction", "output"):
        if not texts[key].strip():
            raise RowProblem(line, f"{key} is empty.", hint="Write a text, or remove the row yourself.")
    return InstructionRow(line, **texts)


def _messages_row(found: dict[str, Any], line: int) -> MessagesRow:
    both = [key for key in INSTRUCTION_KEYS if key in found]
    if both:
        message = f"the row has messages and {both[0]}; which of them is to be trained cannot be told."
        raise RowProblem(line, message, hint=TWO_KINDS)
    _refuse_keys(found, ("messages",), line)
    listed = found["messages"]
    if not isinstance(listed, list) or not listed:
        what = "an empty list" if listed == [] else kind_of(listed)
        raise RowProblem(line, f"messages is {what}, and no list of messages.", hint=TWO_KINDS)
    messages = tuple(_message(item, line, turn) for turn, item in enumerate(listed, 1))
    _refuse_order(messages, line)
    return MessagesRow(line, messages)


def _message(item: Any, line: int, turn: int) -> Message:
    if not isinstance(item, dict):
        raise RowProblem(line, f"it is {kind_of(item)}, and no object with role and content.", turn=turn)
    role = item.get("role")
    if role not in ROLES:
        shown = "missing" if "role" not in item else short_form(role)
        hint = "foretune maps no other role by guess."
        if isinstance(role, str) and role in FOREIGN_ROLES:
            hint += f" `foretune data convert --from {FOREIGN_ROLES[role]} FILE NEW` does it by rule."
        raise RowProblem(line, f"role is {shown}; allowed are system, user and assistant.", turn=turn, hint=hint)
    _refuse_keys(item, ("role", "content"), line, turn)
    content = item.get("content")
    if isinstance(content, list):
        hint = "Write one string; images, sound and parts are not trained."
        raise RowProblem(line, "content is a list of parts: multimodal input is not supported.", turn=turn, hint=hint)
    return Message(role, _text(content, "content", line, turn))


def _refuse_order(messages: tuple[Message, ...], line: int) -> None:
    """Require system or not, then user and assistant by turns, and an assistant that says something at the end."""
    turn, wanted = 0, "user"
    for turn, message in enumerate(messages, 1):
        if message.role == "system" and turn == 1:
            continue
        if message.role != wanted:
            expected = "expected system or user" if turn == 1 else f"expected {wanted}"
            hint = "After an optional system text, user and assistant take turns."
            raise RowProblem(line, f"{expected}, got {message.role}.", turn=turn, hint=hint)
        if wanted == "assistant" and not message.content.strip():
            hint = "Write a text, or remove the row yourself."
            raise RowProblem(line, "the assistant's content is empty.", turn=turn, hint=hint)
        wanted = "assistant" if wanted == "user" else "user"
    if messages[-1].role != "assistant":
        raise RowProblem(line, "the last message is not the assistant's.", turn=turn, hint="End with the answer.")


def _refuse_keys(found: dict[str, Any], known: tuple[str, ...], line: int, turn: int | None = None) -> None:
    """Refuse whatever else holds something: it would be left out of training without a word."""
    for key, value in found.items():
        if key in known or value in (None, "", [], {}):
            continue
        hint = "Remove the key, or put its text where it is trained."
        if turn is None and key in FOREIGN_KEYS:
            hint = f"`foretune data convert --from {FOREIGN_KEYS[key]} FILE NEW` turns such rows into ours."
        if key in ("tools", "tool_calls", "tool_call_id", "function_call"):
            raise RowProblem(line, f"{key} is not supported: tools are not trained.", turn=turn, hint=hint)
        names = " and ".join(known) if len(known) < 3 else f"{', '.join(known)}, or messages alone"
        raise RowProblem(line, f"the key {short_form(key)} is not known; known are: {names}.", turn=turn, hint=hint)


def _text(value: Any, key: str, line: int, turn: int | None = None) -> str:
    if not isinstance(value, str):
        raise RowProblem(line, f"{key} must be a string, got {kind_of(value)}.", turn=turn)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            message = f"{key} holds half of a surrogate pair at character {error.start + 1}, which is no text."
            raise RowProblem(line, message, turn=turn) from error
    return value


def kind_of(value: Any) -> str:
    """Name the kind of a JSON value, as JSON calls it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return names[type(value)]


def short_form(value: Any) -> str:
    """Show a foreign value on one short line."""
    if isinstance(value, str):
        return repr(value[:60] + ("…" if len(value) > 60 else ""))
    return kind_of(value)
