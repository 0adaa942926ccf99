"""Lines to rows: strict JSON, two kinds of rows, and the line of whatever is neither."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretune.data import (
    InstructionRow,
    Message,
    MessagesRow,
    RowProblem,
    parse_row,
    read_chunks,
    read_lines,
    read_rows,
)
from foretune.data.rows import MAX_LINE_BYTES
from foretune.errors import DataError

CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
ASKED = '{"instruction": "a", "output": "b"}'


def written(folder: Path, data: bytes | str, name: str = "rows.jsonl") -> Path:
    file = folder / name
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    return file


# -- what is a row


def test_an_instruction_may_leave_out_its_input() -> None:
    assert parse_row(ASKED.encode(), 7) == InstructionRow(7, "a", "", "b")


def test_a_conversation_keeps_every_turn() -> None:
    turns = [("system", ""), ("user", " a"), ("assistant", "b\n"), ("user", ""), ("assistant", "None")]
    row = parse_row(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}).encode(), 1)
    assert row == MessagesRow(1, tuple(Message(role, content) for role, content in turns))  # type: ignore[arg-type]


@pytest.mark.parametrize("empty", ["null", '""', "[]", "{}"])
def test_a_key_that_holds_nothing_is_not_missed(empty: str) -> None:
    row = f'{{"instruction": "a", "output": "b", "tools": {empty}, "history": {empty}}}'
    assert parse_row(row.encode(), 1) == InstructionRow(1, "a", "", "b")


@pytest.mark.parametrize("blank", [b"", b" ", b"\t \r", b"\r"])
def test_a_blank_line_is_no_row(blank: bytes) -> None:
    assert parse_row(blank, 1) is None


MESSAGES = [
    ("[]", "messages is an empty list"),
    ("{}", "messages is an object"),
    ('["a"]', "line 3, message 1: it is a string, and no object"),
    ('[{"content": "a"}]', "message 1: role is missing; allowed are system, user and assistant"),
    ('[{"role": null, "content": "a"}]', "message 1: role is null"),
    ('[{"role": "human", "content": "a"}]', "message 1: role is 'human'"),
    ('[{"role": "user"}]', "message 1: content must be a string, got null"),
    ('[{"role": "user", "content": null}]', "message 1: content must be a string, got null"),
    ('[{"role": "user", "content": 3}]', "message 1: content must be a string, got a number"),
    ('[{"role": "user", "content": [{"type": "text", "text": "a"}]}]', "content is a list of parts: multimodal"),
    ('[{"role": "user", "content": "a"}]', "message 1: the last message is not the assistant's"),
    ('[{"role": "assistant", "content": "a"}]', "message 1: expected system or user, got assistant"),
    (
        '[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]',
        "line 3, message 2: expected assistant, got user",
    ),
    (
        '[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "assistant", "content": "c"}]',
        "message 2: expected assistant, got system",
    ),
    ('[{"role": "user", "content": "a"}, {"role": "assistant", "content": " \\n"}]', "assistant's content is empty"),
    (
        '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}]',
        "message 2: the key 'reasoning_content' is not known",
    ),
    (
        '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [{}]}]',
        "message 2: tool_calls is not supported",
    ),
    ('[{"role": "tool", "content": "a"}]', "message 1: role is 'tool'"),
]

OTHERS = [
    ("3", "the line is a number, and no object"),
    ("null", "the line is null, and no object"),
    ("[1]", "the line is a list, and no object"),
    ("{}", "instruction is missing"),
    ('{"instruction": "a"}', "output is missing"),
    ('{"instruction": "a", "output": null}', "output must be a string, got null"),
    ('{"instruction": "a", "input": null, "output": "b"}', "input must be a string, got null"),
    ('{"instruction": "a", "output": ["b"]}', "output must be a string, got a list"),
    ('{"instruction": true, "output": "b"}', "instruction must be a string, got true"),
    ('{"instruction": "a", "output": " \\n"}', "output is empty"),
    ('{"instruction": "", "output": "b"}', "instruction is empty"),
    ('{"instruction": "a", "output": "b", "id": 4}', "the key 'id' is not known"),
    (f'{CHAT[:-1]}, "tools": "[]"}}', "tools is not supported"),
    (f'{CHAT[:-1]}, "output": "b"}}', "the row has messages and output"),
    ('{"conversations": [1]}', "the key 'conversations' is not known"),
    ('{"instruction": "a", "output": "\\ud800"}', "output holds half of a surrogate pair at character 1"),
    ('{"instruction": "a", "output": NaN}', "NaN is no number"),
    ('{"instruction": "a", "output": "b", "score": -Infinity}', "-Infinity is no number"),
    ('{"instruction": "a", "output": "b", "score": 1e999}', "1e999 is too large a number"),
    ('{"instruction": "a", "output": "b", "id": ' + "9" * 5000 + "}", "A number of 5,000 digits".lower()),
    ('{"instruction": "a", "output": "x", "output": "b"}', "duplicate key 'output'"),
    ('{"instruction": "a", "output": "b', "it is not JSON"),
    ('{"instruction": "a", "output": "b"} {}', "it is not JSON: Extra data"),
    ('{"instruction": "a\tb", "output": "b"}', "it is not JSON: Invalid control character"),
    ("{'instruction': 'a'}", "it is not JSON"),
    ('{"instruction": "a", "output": "b", "x": ' + "[" * 65 + "]" * 65 + "}", "nested more than 64 deep"),
    ('{"x": ' + "[" * 200_000, "nested more than 64 deep"),
]


@pytest.mark.parametrize(("text", "why"), [*((f'{{"messages": {listed}}}', why) for listed, why in MESSAGES), *OTHERS])
def test_what_is_no_row_is_refused_with_its_line_and_why(text: str, why: str) -> None:
    with pytest.raises(RowProblem) as caught:
        parse_row(text.encode(), 3)
    assert str(caught.value).startswith("line 3")
    assert why in str(caught.value)


def test_bytes_that_are_no_utf_8_are_refused() -> None:
    with pytest.raises(RowProblem, match="line 9: it is not UTF-8: invalid start byte"):
        parse_row(b'{"instruction": "\xff", "output": "b"}', 9)


def test_a_row_of_another_format_is_told_how_to_convert_it() -> None:
    with pytest.raises(RowProblem) as caught:
        parse_row(b'{"conversations": [{"from": "human", "value": "a"}]}', 1)
    assert caught.value.hint is not None
    assert "foretune data convert --from sharegpt" in caught.value.hint


# -- lines


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    text = '{"instruction": "a\u2028b", "output": "x\u0085y\u000bz"}'.replace("\u000b", "\u2029")
    file = written(tmp_path, f"{text}\r\n\r\n{ASKED}\n")
    assert [(row.line, row.output) for row in read_rows(file)] == [(1, "x\u0085y\u2029z"), (3, "b")]  # type: ignore[union-attr]


def test_nothing_after_the_last_line_feed_is_a_line(tmp_path: Path) -> None:
    for data, lines in ((b"a\n", [b"a"]), (b"a\n\n", [b"a", b""]), (b"a", [b"a"]), (b"", []), (b"\n", [b""])):
        with written(tmp_path, data).open("rb") as stream:
            assert list(read_lines(stream, "rows")) == list(enumerate(lines, 1))


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert len(list(read_rows(written(tmp_path, b"\xef\xbb\xbf" + ASKED.encode())))) == 1


def test_a_line_of_more_than_16_mib_is_refused_by_its_number(tmp_path: Path) -> None:
    rows = f"{ASKED}\n\n".encode() + b'{"instruction": "' + b"x" * MAX_LINE_BYTES
    for end in (b"", b'"}\n', b'"}\n' + ASKED.encode()):
        with pytest.raises(DataError, match=":3: the line is longer than 16,777,216 bytes"):
            list(read_rows(written(tmp_path, rows + end)))


def test_a_line_of_exactly_16_mib_is_read(tmp_path: Path) -> None:
    row = b'{"instruction": "a", "output": "' + b"x" * (MAX_LINE_BYTES - 35) + b'"}'
    assert len(row) <= MAX_LINE_BYTES
    assert len(list(read_rows(written(tmp_path, row + b"\n" + ASKED.encode())))) == 2


@given(st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"")), max_size=30), st.integers(1, 64))
def test_chunks_are_whole_lines_and_all_of_them(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], size: int
) -> None:
    data = b"\n".join(lines).removeprefix(b"\xef\xbb\xbf")
    file = written(tmp_path_factory.mktemp("chunks"), data)
    with file.open("rb") as stream:
        chunks = list(read_chunks(stream, "rows", size))
    assert b"".join(chunk for _, chunk in chunks) == data
    assert all(chunk.endswith(b"\n") for _, chunk in chunks[:-1])
    numbers = [first for first, _ in chunks]
    assert numbers == [1 + data[: sum(len(c) for _, c in chunks[:k])].count(b"\n") for k in range(len(chunks))]


@pytest.mark.parametrize("name", ["missing.jsonl", ".", "bad\0name"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"does not exist|cannot be read"):
        list(read_rows(f"{tmp_path}/{name}"))


# -- damaged lines


def damaged(rng: random.Random) -> bytes:
    """Return a line with a random damage, mostly one that matters."""
    line = bytearray(rng.choice((CHAT, ASKED, '{"instruction": "é\\u2028", "input": "😀", "output": "x"}')).encode())
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(line) or 1)
        kind = rng.randrange(6)
        if kind == 0:
            line[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del line[place : place + rng.randint(1, 9)]
        elif kind == 2:
            line[place:place] = rng.choice((b"[", b"{", b'"', b"\\u", b"NaN", b"\xed\xa0\x80", b"null", b"1e999"))
        elif kind == 3:
            line[place:place] = line[: rng.randint(0, len(line))]
        elif kind == 4:
            line[place:place] = rng.choice((b"[", b'{"a":')) * rng.randint(1, 3000)
        else:
            line = line[:place] or bytearray(b"x")
    return bytes(line).replace(b"\n", b" ") or b"x"


def problem_of(line: bytes, number: int) -> RowProblem | None:
    try:
        row = parse_row(line, number)
    except RowProblem as problem:
        return problem
    assert row is None or row.line == number
    return None


@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_a_damaged_line_is_a_row_or_a_problem_with_its_line(count: int) -> None:
    rng = random.Random(5)
    problems = {number: problem_of(damaged(rng), number) for number in range(1, count + 1)}
    refused = {number: problem for number, problem in problems.items() if problem is not None}
    assert len(refused) > count / 2
    assert all(problem.line == number for number, problem in refused.items())
    assert all(str(problem).startswith(f"line {number}") for number, problem in refused.items())
    assert max(len(str(problem)) for problem in refused.values()) < 400
