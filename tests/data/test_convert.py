"""Rows of other formats: what each becomes, what is refused with which words, and that no text is lost."""

import json
import os
import threading
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretune.data import (
    SOURCE_FORMATS,
    InstructionRow,
    MessagesRow,
    RowProblem,
    SourceFormat,
    convert,
    convert_row,
    convert_rows,
    parse_row,
    read_rows,
)
from foretune.errors import DataError


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("rows.json")


def jsonl(rows: Sequence[Any]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def messages(*turns: str) -> dict[str, Any]:
    """Write `s: text`, `u: text` and `a: text` as a row of messages."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    parts = [turn.partition(": ") for turn in turns]
    return {"messages": [{"role": roles[who], "content": text} for who, _, text in parts]}


def said(**turns: str) -> list[dict[str, str]]:
    return [{"from": who, "value": text} for who, text in turns.items()]


def refusal(file: Path, source: SourceFormat, drop: Sequence[str] = ()) -> DataError:
    with pytest.raises(DataError) as caught:
        list(convert_rows(file, source, drop=drop))
    return caught.value


# -- what a row becomes

ALPACA = {"instruction": "Add.", "input": "1 + 1", "output": "2"}
ASK = {"role": "user", "content": "hi"}
TELL = {"role": "assistant", "content": "hello"}

BECOMES: list[tuple[SourceFormat, dict[str, Any], dict[str, Any]]] = [
    ("sharegpt", {"conversations": said(human="hi", gpt="hello")}, messages("u: hi", "a: hello")),
    ("sharegpt", {"conversation": said(user="hi", assistant="hello")}, messages("u: hi", "a: hello")),
    ("sharegpt", {"conversations": said(system="s", human="hi", gpt="x")}, messages("s: s", "u: hi", "a: x")),
    ("sharegpt", {"conversations": said(human="hi", gpt="x"), "system": "s"}, messages("s: s", "u: hi", "a: x")),
    (
        "sharegpt",
        {"conversations": said(system="s", human="a", chatgpt="b", user="c", bing="d"), "system": ""},
        messages("s: s", "u: a", "a: b", "u: c", "a: d"),
    ),
    ("sharegpt", {"conversations": [*said(human="a"), *said(bard="b")], "conversation": []}, messages("u: a", "a: b")),
    ("sharegpt", {"conversations": said(human="a", model="b"), "id": None, "tools": ""}, messages("u: a", "a: b")),
    ("sharegpt", {"conversations": [{"from": "human", "value": "", "weight": None}, *said(bot="b")]},
     messages("u: ", "a: b")),
    ("alpaca", ALPACA, ALPACA),
    ("alpaca", {"output": "2", "instruction": "Add."}, {"instruction": "Add.", "input": "", "output": "2"}),
    ("alpaca", {**ALPACA, "input": None, "system": "", "history": None}, {**ALPACA, "input": ""}),
    ("alpaca", {**ALPACA, "system": None, "history": [], "text": ""}, ALPACA),
    ("alpaca", {**ALPACA, "system": "s"}, messages("s: s", "u: Add.\n1 + 1", "a: 2")),
    ("alpaca", {**ALPACA, "input": "", "system": "s"}, messages("s: s", "u: Add.", "a: 2")),
    ("alpaca", {**ALPACA, "history": [["a", "b"], ["c", "d"]]},
     messages("u: a", "a: b", "u: c", "a: d", "u: Add.\n1 + 1", "a: 2")),
    ("prompt-completion", {"prompt": "a ", "completion": " b"}, {"instruction": "a ", "input": "", "output": " b"}),
    ("prompt-completion", {"prompt": [ASK], "completion": [TELL]}, messages("u: hi", "a: hello")),
    (
        "prompt-completion",
        {"prompt": [{"role": "system", "content": "s"}, ASK, TELL, ASK], "completion": [TELL]},
        messages("s: s", "u: hi", "a: hello", "u: hi", "a: hello"),
    ),
    ("openai", {"messages": [ASK, TELL]}, messages("u: hi", "a: hello")),
    (
        "openai",
        {"messages": [ASK, {**TELL, "tool_calls": None, "refusal": None, "name": ""}], "tools": [], "functions": None},
        messages("u: hi", "a: hello"),
    ),
    (
        "openai",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, TELL]},
        messages("u: hi", "a: hello"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("source", "row", "ours"), BECOMES)
def test_row_becomes_ours(source: SourceFormat, row: dict[str, Any], ours: dict[str, Any]) -> None:
    converted = convert_row(row, 7, source)
    assert json.loads(converted.text) == ours
    assert converted.row == parse_row(converted.text.encode(), 7)
    assert converted.dropped == ()


@pytest.mark.parametrize(("who", "role"), convert.SPEAKERS.items())
def test_every_speaker_of_sharegpt_has_its_role(who: str, role: str) -> None:
    before = {"system": [], "user": [], "assistant": ["human"]}[role]
    after = {"system": ["human", "gpt"], "user": ["gpt"], "assistant": []}[role]
    turns = [{"from": name, "value": "x"} for name in (*before, who, *after)]
    row = convert_row({"conversations": turns}, 1, "sharegpt").row
    assert isinstance(row, MessagesRow)
    assert row.messages[len(before)].role == role


def test_text_is_written_as_it_stands() -> None:
    odd = 'é\u2028\x00\t"\\\U0001f600'
    converted = convert_row({"prompt": odd, "completion": odd}, 1, "prompt-completion")
    assert converted.row == InstructionRow(1, odd, "", odd)
    assert "\n" not in converted.text
    assert "\U0001f600" in converted.text


# -- what is refused


def part(**keys: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [keys]}, TELL]}


REFUSED: list[tuple[SourceFormat, Any, str]] = [
    # The row as a whole.
    ("sharegpt", [1], "the row is a list, and no object."),
    ("sharegpt", None, "the row is null, and no object."),
    ("sharegpt", {}, "conversations is missing."),
    ("sharegpt", {"conversations": []}, "conversations is an empty list, and no list of messages."),
    ("sharegpt", {"conversations": "hi"}, "conversations is a string, and no list of messages."),
    ("sharegpt", {"conversations": said(human="a", gpt="b"), "conversation": said(human="a", gpt="b")},
     "the row has conversations and conversation; which"),
    ("sharegpt", {"conversations": said(system="s", human="a", gpt="b"), "system": "t"},
     "the row has a system text and conversations another; which"),
    ("sharegpt", {"conversations": said(human="a", gpt="b"), "system": 1}, "system must be a string, got a number."),
    ("sharegpt", {"conversations": said(human="a", gpt="b"), "id": "x"}, "the key 'id' has no place in our rows"),
    ("sharegpt", {"conversations": said(human="a", gpt="b"), "id": 0}, "the key 'id' has no place in our rows"),
    ("sharegpt", {"conversations": said(human="a", gpt="b"), "images": ["x"]}, "the key 'images' has no place"),
    # Its turns.
    ("sharegpt", {"conversations": ["hi"]}, "message 1: it is a string, and no object with from and value."),
    ("sharegpt", {"conversations": [{"value": "hi"}]}, "message 1: from is missing; allowed are system, human, user,"),
    ("sharegpt", {"conversations": said(human="a", function_call="b")}, "message 2: from is 'function_call'; allowed"),
    ("sharegpt", {"conversations": said(human="a", observation="b")}, "message 2: from is 'observation'; allowed"),
    ("sharegpt", {"conversations": said(human="a", tool="b")}, "message 2: from is 'tool'; allowed"),
    ("sharegpt", {"conversations": said(Human="a", gpt="b")}, "message 1: from is 'Human'; allowed"),
    ("sharegpt", {"conversations": [{"from": ["human"], "value": "a"}]}, "message 1: from is a list; allowed"),
    ("sharegpt", {"conversations": [{"from": "human"}]}, "message 1: value is missing."),
    ("sharegpt", {"conversations": [{"from": "human", "value": None}]}, "message 1: value must be a string, got null."),
    ("sharegpt", {"conversations": [{"from": "human", "value": "a", "weight": 0}]},
     "message 1: the key 'weight' has no place in our rows; known are: from, value."),
    ("sharegpt", {"conversations": said(human="a", gpt="b"), "system": "\ud800"},
     "message 1: content holds half of a surrogate pair at character 1"),
    # Their order is that of our rows.
    ("sharegpt", {"conversations": said(gpt="a", human="b")}, "message 1: expected system or user, got assistant."),
    ("sharegpt", {"conversations": said(human="a", user="b")}, "message 2: expected assistant, got user."),
    ("sharegpt", {"conversations": said(human="a")}, "message 1: the last message is not the assistant's."),
    ("sharegpt", {"conversations": said(human="a", gpt=" ")}, "message 2: the assistant's content is empty."),
    ("sharegpt", {"conversations": said(human="a", system="b", gpt="c")}, "message 2: expected assistant, got system."),
    ("alpaca", {"output": "2"}, "instruction is missing."),
    ("alpaca", {"instruction": "a"}, "output is missing."),
    ("alpaca", {"instruction": "a", "system": "s"}, "output is missing."),
    ("alpaca", {**ALPACA, "instruction": " ", "system": "s"}, "instruction is empty."),
    ("alpaca", {**ALPACA, "output": ""}, "output is empty."),
    ("alpaca", {**ALPACA, "output": 2}, "output must be a string, got a number."),
    ("alpaca", {**ALPACA, "input": 0}, "input must be a string, got a number."),
    ("alpaca", {**ALPACA, "input": ["a"], "history": [["a", "b"]]}, "input must be a string, got a list."),
    ("alpaca", {**ALPACA, "text": "x"}, "the key 'text' has no place in our rows; known are: instruction, input, "),
    ("alpaca", {**ALPACA, "images": [0]}, "the key 'images' has no place"),
    ("alpaca", {**ALPACA, "system": ["s"]}, "system must be a string, got a list."),
    ("alpaca", {**ALPACA, "history": "a"}, "history must be a list of pairs, got a string."),
    ("alpaca", {**ALPACA, "history": [["a", "b"], ["c"]]}, "item 2 of history is no pair of strings."),
    ("alpaca", {**ALPACA, "history": [["a", None]]}, "item 1 of history is no pair of strings."),
    ("alpaca", {**ALPACA, "history": [{"a": "b"}]}, "item 1 of history is no pair of strings."),
    ("alpaca", {**ALPACA, "history": [["a", ""]]}, "message 2: the assistant's content is empty."),
    ("prompt-completion", {"completion": "b"}, "prompt is missing."),
    ("prompt-completion", {"prompt": "a"}, "completion is missing."),
    ("prompt-completion", {"prompt": "a", "completion": None}, "two lists of messages, got a string and null."),
    ("prompt-completion", {"prompt": "a", "completion": [TELL]}, "two lists of messages, got a string and a list."),
    ("prompt-completion", {"prompt": [ASK], "completion": "b"}, "two lists of messages, got a list and a string."),
    ("prompt-completion", {"prompt": "", "completion": "b"}, "prompt is empty."),
    ("prompt-completion", {"prompt": "a", "completion": "\n"}, "completion is empty."),
    ("prompt-completion", {"prompt": [ASK, TELL], "completion": []}, "completion is an empty list, and no list of"),
    ("prompt-completion", {"prompt": [ASK], "completion": [ASK]}, "message 2: expected assistant, got user."),
    ("prompt-completion", {"prompt": "a", "completion": "b", "label": False}, "the key 'label' has no place"),
    ("openai", {}, "messages is missing."),
    ("openai", {"messages": None}, "messages is null, and no list of messages."),
    ("openai", {"messages": ["hi"]}, "message 1: it is a string, and no object with role and content."),
    ("openai", {"messages": [{"content": "hi"}]}, "message 1: role is missing; allowed are system, user"),
    ("openai", {"messages": [{"role": "developer", "content": "x"}, ASK, TELL]}, "message 1: role is 'developer';"),
    ("openai", {"messages": [ASK, TELL, {"role": "tool", "content": "x"}]}, "message 3: role is 'tool';"),
    ("openai", {"messages": [{"role": "human", "content": "x"}]}, "message 1: role is 'human';"),
    ("openai", {"messages": [{"role": {}, "content": "x"}]}, "message 1: role is an object;"),
    ("openai", {"messages": [ASK, {**TELL, "weight": 0}]}, "message 2: the key 'weight' has no place in our rows"),
    ("openai", {"messages": [ASK, {**TELL, "weight": 1}]}, "message 2: the key 'weight' has no place in our rows"),
    ("openai", {"messages": [{**ASK, "name": "n"}, TELL]}, "message 1: the key 'name' has no place in our rows"),
    ("openai", {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
     "message 2: the key 'tool_calls' has no place"),
    ("openai", {"messages": [ASK, {"role": "assistant", "content": None}]}, "message 2: content must be a string"),
    ("openai", {"messages": [ASK, {"role": "assistant"}]}, "message 2: content is missing."),
    ("openai", {"messages": [ASK, TELL], "tools": [{"type": "function"}]}, "the key 'tools' has no place"),
    ("openai", {"messages": [ASK, TELL], "functions": [{}]}, "the key 'functions' has no place"),
    ("openai", {"messages": [ASK, TELL], "parallel_tool_calls": False}, "the key 'parallel_tool_calls' has no place"),
    ("openai", {"messages": [{"role": "user", "content": []}, TELL]}, "message 1: content is a list of 0 parts;"),
    ("openai", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}, TELL]},
     "message 1: content is a list of 2 parts;"),
    ("openai", part(type="image_url", image_url={}), "the part of content is of type 'image_url', and no text"),
    ("openai", part(text="a"), "message 1: the part of content is of type null, and no text"),
    ("openai", part(type="text"), "message 1: text is missing."),
    ("openai", part(type="text", text=1), "message 1: text must be a string, got a number."),
    ("openai", part(type="text", text="a", annotations=[1]), "message 1: the key 'annotations' has no place"),
    ("openai", {"messages": [{"role": "user", "content": ["a"]}, TELL]}, "message 1: the part of content is a string,"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "row", "words"), REFUSED)
@pytest.mark.parametrize("form", ["lines", "array"])
def test_row_is_refused_with_file_line_and_reason(
    file: Path, source: SourceFormat, row: Any, words: str, form: str
) -> None:
    good = next(row for name, row, _ in BECOMES if name == source)
    lines = [json.dumps(good), "", json.dumps(row)]
    file.write_text("\n".join(lines) if form == "lines" else f"[{lines[0]},\n\n{lines[2]}]")
    error = refusal(file, source)
    assert error.problems[0].place == "rows.json:3"
    assert words in error.message


@pytest.mark.parametrize("source", SOURCE_FORMATS)
def test_row_of_another_format_is_refused_with_the_right_name(file: Path, source: SourceFormat) -> None:
    for other, row, _ in BECOMES:
        if other == source:
            continue
        with pytest.raises(RowProblem) as caught:
            convert_row(row, 1, source)
        assert f"--from {other}?" in (caught.value.hint or "")


def test_a_key_of_the_same_format_is_not_said_to_be_anothers(file: Path) -> None:
    file.write_text(jsonl([{"messages": [ASK, TELL], "tools": [1]}]))
    assert refusal(file, "openai").hint == "--drop tools leaves it out."


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": NaN, "completion": "b"}', "NaN is no number"),
        (b'{"prompt": "a", "prompt": "a", "completion": "b"}', "duplicate key 'prompt'"),
        (b'{"prompt": "a", "completion": "b", "x": 1e999}', "1e999 is too large a number"),
        (b'{"x": ' + b"[" * 70 + b"]" * 70 + b"}", "nested more than 64 deep"),
        (b'{"x": ' + b"[" * 99_999 + b"]" * 99_999 + b"}", "nested more than 64 deep"),
        (b'{"prompt": "\xff", "completion": "b"}', "not UTF-8"),
        (b'{"prompt": "\\ud800", "completion": "b"}', "instruction holds half of a surrogate pair at character 1"),
        (b'{"prompt": "a", "completion": }', "not JSON"),
        (b'{"prompt": "a", "completion": "b"', "not JSON"),
        (b"{'prompt': 1}", "not JSON"),
        (b'{"prompt": "a\tb", "completion": "b"}', "not JSON: Invalid control character"),
        (b"[]", "the row is a list, and no object."),
    ],
)
@pytest.mark.parametrize("form", ["lines", "array"])
def test_loose_json_is_refused_with_its_line(file: Path, line: bytes, words: str, form: str) -> None:
    good = b'{"prompt": "a", "completion": "b"}'
    file.write_bytes(b"\n".join([good, line, good]) if form == "lines" else b"[%s,\n%s,\n%s]" % (good, line, good))
    error = refusal(file, "prompt-completion")
    goes_on = form == "array" and line.endswith(b'"b"')  # an object without its end breaks where the next begins
    assert error.problems[0].place == f"rows.json:{3 if goes_on else 2}"
    assert words in error.message


# -- files

PAIR = '{"prompt": "a", "completion": "b"}'


def test_array_and_lines_give_equal_rows(file: Path) -> None:
    for source in SOURCE_FORMATS:
        rows = [row for name, row, _ in BECOMES if name == source]
        file.write_text(jsonl(rows))
        lines = [one and one.text for one in convert_rows(file, source)]
        for text in (json.dumps(rows), json.dumps(rows, indent=2), f"\ufeff\r\n\t {json.dumps(rows)}\n\n"):
            file.write_text(text)
            assert [one and one.text for one in convert_rows(file, source)] == lines


def test_the_line_of_an_element_is_that_on_which_it_begins(file: Path) -> None:
    file.write_text(f'[\n\n  {PAIR}, {PAIR},\n{{\n"prompt": "a",\n"completion": "b"\n}}\n, {PAIR}]')
    assert [one.row.line for one in convert_rows(file, "prompt-completion") if one] == [3, 3, 4, 8]


def test_blank_lines_are_none_and_the_last_needs_no_newline(file: Path) -> None:
    file.write_text(f"\n{PAIR}\r\n \t\r\n{PAIR}")
    found = list(convert_rows(file, "prompt-completion"))
    assert [one is None for one in found] == [True, False, True, False]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (f"[\n{PAIR},\n{PAIR}\n", 4, "Expecting ',' or ']' after an element (column 1)"),
        (f"[\n{PAIR}\n{PAIR}\n]", 3, "Expecting ',' or ']' after an element (column 1)"),
        (f"[\n{PAIR},\n]", 3, "not JSON: "),
        (f"[\n{PAIR},\n,{PAIR}]", 3, "not JSON: Expecting value (column 1)"),
        (f"[\n{PAIR}\n]\n\n{PAIR}\n", 5, "Something stands after the array (column 1)"),
        (f"[\n{PAIR}\n]]", 3, "Something stands after the array (column 2)"),
        (f'[\n{PAIR},\n{{"prompt":\n"a}}]', 4, "not JSON: Unterminated string"),
        (f'[\n{PAIR},\n{{"prompt":\n"a" "b"}}]', 4, "not JSON: Expecting ',' delimiter (column 5)"),
        (f'[\n{PAIR},\n{{"prompt":\n"a",\n"prompt": 1}}]', 3, "duplicate key 'prompt'"),
        ("[", 1, "not JSON: Expecting value (column 2)"),
        ("[\n[\n", 3, "not JSON: Expecting value (column 1)"),
        (f"[{PAIR}, [{PAIR}]]", 1, "the row is a list, and no object."),
    ],
)
def test_malformed_array_names_the_line(file: Path, text: str, line: int, words: str) -> None:
    file.write_text(text)
    error = refusal(file, "prompt-completion")
    assert error.problems[0].place == f"rows.json:{line}"
    assert words in error.message


@pytest.mark.parametrize("text", ["", "\n \n", "[]", " [\n]\n", "\ufeff"])
def test_file_without_a_row_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    error = refusal(file, "alpaca")
    assert (error.problems[0].place, error.message) == ("rows.json", "There is no row in it.")


def test_file_that_is_not_there_is_refused(file: Path) -> None:
    assert "does not exist" in refusal(file, "alpaca").message


def test_too_long_an_array_is_refused_with_the_way_out(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "MAX_ARRAY_BYTES", 40)
    file.write_text(f"[{PAIR}]")
    assert len(list(convert_rows(file, "prompt-completion"))) == 1
    file.write_text(f"[{PAIR},{PAIR}]")
    error = refusal(file, "prompt-completion")
    assert "longer than 40 bytes" in error.message
    assert "JSONL" in (error.hint or "")


def test_row_that_could_not_be_read_again_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "MAX_LINE_BYTES", 60)
    file.write_text(f"[{PAIR}]")
    list(convert_rows(file, "prompt-completion"))
    file.write_text(json.dumps([{"prompt": "a", "completion": "b" * 30}]))
    assert "would be longer than 60 bytes" in refusal(file, "prompt-completion").message


@pytest.mark.parametrize("text", [f"{PAIR}\n{PAIR}\n", f"[{PAIR},{PAIR}]"])
def test_pipe_is_read_too(file: Path, text: str) -> None:
    os.mkfifo(file)
    writer = threading.Thread(target=file.write_text, args=(text,))
    writer.start()
    assert len(list(convert_rows(file, "prompt-completion"))) == 2
    writer.join()


def test_lines_take_no_memory_that_grows_with_the_file(file: Path) -> None:
    row = json.dumps({"conversations": said(human="x" * 500, gpt="y" * 500)})
    file.write_text(f"{row}\n" * 10_000)  # 10 MB
    tracemalloc.start()
    try:
        for _ in convert_rows(file, "sharegpt"):
            pass
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()


# -- keys that may be lost


def test_dropped_keys_are_named_where_they_held_something() -> None:
    row = {**ALPACA, "text": "x", "id": 0, "images": []}
    converted = convert_row(row, 1, "alpaca", drop=["text", "id", "images", "absent"])
    assert json.loads(converted.text) == ALPACA
    assert converted.dropped == ("text", "id")


def test_drop_is_for_keys_of_the_row_alone() -> None:
    with pytest.raises(RowProblem, match="message 2: the key 'weight'"):
        convert_row({"messages": [ASK, {**TELL, "weight": 1}]}, 1, "openai", drop=["weight"])


def test_one_of_two_system_texts_can_be_dropped() -> None:
    row = {"conversations": said(system="s", human="a", gpt="b"), "system": "t"}
    converted = convert_row(row, 1, "sharegpt", drop=["system"])
    assert json.loads(converted.text) == messages("s: s", "u: a", "a: b")


def test_dropping_what_a_row_is_made_of_leaves_it_refused() -> None:
    with pytest.raises(RowProblem, match="output is missing"):
        convert_row(ALPACA, 1, "alpaca", drop=["output"])


# -- nothing is lost

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SOLID = TEXT.filter(str.strip)
PAIRS = st.lists(st.tuples(TEXT, SOLID), min_size=1, max_size=4)


@st.composite
def foreign_rows(draw: st.DrawFn) -> tuple[SourceFormat, dict[str, Any], list[str]]:
    """Draw a row of some format, with its texts in the order in which they are said."""
    source = draw(st.sampled_from(SOURCE_FORMATS))
    pairs = draw(PAIRS)
    system = draw(st.none() | SOLID)
    texts = ([] if system is None else [system]) + [text for pair in pairs for text in pair]
    if source == "sharegpt":
        user, model = draw(st.sampled_from(["human", "user"])), draw(st.sampled_from(["gpt", "bot", "model"]))
        turns = [{"from": who, "value": text} for pair in pairs for who, text in zip((user, model), pair, strict=True)]
        if system is not None and draw(st.booleans()):
            return source, {"conversations": [{"from": "system", "value": system}, *turns]}, texts
        return source, {"conversations": turns, "system": system}, texts
    if source == "alpaca":
        *history, (_, output) = pairs
        instruction, about = draw(SOLID), draw(TEXT)
        row = {"instruction": instruction, "input": about, "output": output}
        texts[-2:] = [instruction, about, output]
        return source, {**row, "system": system, "history": [list(pair) for pair in history]}, texts
    turns = [] if system is None else [{"role": "system", "content": system}]
    turns += [{"role": who, "content": text} for p in pairs for who, text in zip(("user", "assistant"), p, strict=True)]
    if source == "openai":
        return source, {"messages": turns}, texts
    if draw(st.booleans()):
        prompt, completion = draw(SOLID), draw(SOLID)
        return source, {"prompt": prompt, "completion": completion}, [prompt, completion]
    at = draw(st.integers(1, len(turns) - 1))
    return source, {"prompt": turns[:at], "completion": turns[at:]}, texts


def spoken(row: InstructionRow | MessagesRow) -> list[str]:
    if isinstance(row, InstructionRow):
        return [row.instruction, row.input, row.output]
    return [message.content for message in row.messages]


@given(foreign_rows())
def test_every_text_stands_in_the_output_in_order(drawn: tuple[SourceFormat, dict[str, Any], list[str]]) -> None:
    source, row, texts = drawn
    converted = convert_row(row, 1, source)
    assert parse_row(converted.text.encode(), 1) == converted.row
    found = spoken(converted.row)
    if source == "alpaca" and isinstance(converted.row, MessagesRow):
        instruction, about, output = texts[-3:]
        texts = [*texts[:-3], f"{instruction}\n{about}" if about else instruction, output]
    if isinstance(converted.row, InstructionRow) and source == "prompt-completion":
        del found[1]
    assert found == texts


@given(st.lists(foreign_rows(), min_size=1, max_size=5), st.sampled_from([None, 1]))
def test_array_and_lines_say_the_same(
    drawn: list[tuple[SourceFormat, dict[str, Any], list[str]]], indent: int | None
) -> None:
    source = drawn[0][0]
    rows = [row for name, row, _ in drawn if name == source]
    with TemporaryDirectory() as folder:
        lines, array, ours = (Path(folder, name) for name in ("lines", "array", "ours"))
        lines.write_text(jsonl(rows))
        array.write_text(json.dumps(rows, indent=indent))
        texts = [one.text for one in convert_rows(lines, source) if one]
        assert [one.text for one in convert_rows(array, source) if one] == texts
        ours.write_text("".join(f"{text}\n" for text in texts), newline="\n")
        assert list(read_rows(ours)) == [one.row for one in convert_rows(lines, source) if one]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(
        {*convert.FORMAT_OF, "from", "value", "role", "content", "system", "history", "input", "output", "x"}
    )), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(JSON, st.sampled_from(SOURCE_FORMATS))
def test_any_object_is_converted_or_refused(value: Any, source: SourceFormat) -> None:
    if not isinstance(value, dict):
        value = {"messages": value, "prompt": value}
    with suppress(RowProblem):
        assert parse_row(convert_row(value, 1, source).text.encode(), 1)


def test_formats_are_those_of_the_type() -> None:
    assert get_args(SourceFormat) == SOURCE_FORMATS == tuple(convert._FORMATS)
