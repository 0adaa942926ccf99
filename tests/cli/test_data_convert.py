"""`foretune data convert`: one file in, one file out, whole or not at all."""

import json
from pathlib import Path

import pytest

from foretune.cli.data_convert import FORMATS
from foretune.data import SOURCE_FORMATS, read_rows

CHAT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
PAIR = {"prompt": "a", "completion": "b"}
ALPACA = {"instruction": "Add.", "input": "", "output": "2"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*rows: object, name: str = "in.jsonl") -> None:
    Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def convert(call, source: str, *words: str):
    return call("data", "convert", "--from", source, "in.jsonl", "out.jsonl", *words)


def test_formats_are_those_of_the_room() -> None:
    assert FORMATS == SOURCE_FORMATS


def test_answer_counts_rows_by_kind_and_blank_lines(call) -> None:
    write(ALPACA, {**ALPACA, "system": "s"}, {**ALPACA, "history": [["a", "b"]]})
    Path("in.jsonl").write_text("\n" + Path("in.jsonl").read_text())
    called = convert(call, "alpaca", "--json")
    assert called.code == 0
    document = called.document
    assert document["schema"] == "foretune.data.convert/1"
    del document["schema"], document["version"]
    assert document == {
        "in_file": "in.jsonl", "out_file": "out.jsonl", "from": "alpaca", "rows": 3, "instruction_rows": 1,
        "messages_rows": 2, "blank_lines": 1, "dropped": {},
    }  # fmt: skip
    assert len(list(read_rows("out.jsonl"))) == 3


def test_text_says_what_was_written_left_out_and_dropped(call) -> None:
    write({**CHAT, "id": "x"}, {**CHAT, "id": "y"}, CHAT)
    Path("in.jsonl").write_text(Path("in.jsonl").read_text() + "\n\n")
    called = convert(call, "sharegpt", "--drop", "id")
    assert called.out == (
        "out.jsonl: 3 rows (0 instructions, 3 conversations)\nblank lines left out: 2\ndropped: id of 2 rows\n"
    )
    assert called.err == ""


def test_dropped_keys_are_counted_even_where_there_is_none(call) -> None:
    write({**PAIR, "id": 1, "tag": None}, PAIR)
    called = convert(call, "prompt-completion", "--drop", "id", "--drop", "tag", "--drop", "idd", "--json")
    assert called.document["dropped"] == {"id": 1, "tag": 0, "idd": 0}
    Path("out.jsonl").unlink()
    called = convert(call, "prompt-completion", "--drop", "id", "--drop", "idd")
    assert called.err == "--drop idd: no row has anything there.\n"


def test_refused_row_exits_with_5_and_its_line_and_leaves_nothing(call) -> None:
    write(CHAT, {**CHAT, "id": "x"})
    called = convert(call, "sharegpt", "--json")
    error = called.document["error"]
    assert (called.code, error["code"]) == (5, "data")
    assert error["problems"][0]["place"] == "in.jsonl:2"
    assert error["hint"] == "--drop id leaves it out."
    assert [path.name for path in Path().iterdir()] == ["in.jsonl"]


def test_malformed_end_of_an_array_leaves_nothing(call) -> None:
    Path("in.jsonl").write_text(f"[{json.dumps(PAIR)},\n{json.dumps(PAIR)}")
    called = convert(call, "prompt-completion")
    assert called.code == 5
    assert called.err.startswith("error: in.jsonl:2: it is not JSON: ")
    assert [path.name for path in Path().iterdir()] == ["in.jsonl"]


def test_file_that_exists_is_kept(call) -> None:
    write(PAIR)
    Path("out.jsonl").write_text("mine")
    called = convert(call, "prompt-completion")
    assert (called.code, Path("out.jsonl").read_text()) == (2, "mine")
    assert call("data", "convert", "--from", "prompt-completion", "in.jsonl", "in.jsonl").code == 2
    assert Path("in.jsonl").read_text() == f"{json.dumps(PAIR)}\n"


def test_missing_files_and_folders_are_named(call) -> None:
    assert convert(call, "openai").code == 5
    write(PAIR)
    called = call("data", "convert", "--from", "openai", "in.jsonl", "no/out.jsonl")
    assert called.code == 2
    assert "no/out.jsonl: The folder no does not exist." in called.err


def test_format_has_to_be_named_and_known(call) -> None:
    write(PAIR)
    for words in ([], ["--from", "guanaco"]):
        called = call("data", "convert", *words, "in.jsonl", "out.jsonl")
        assert called.code == 2
        assert all(name in called.err for name in FORMATS)
        assert len(called.err.splitlines()) == 2


def test_foreign_text_in_a_failure_is_escaped(call) -> None:
    write({**PAIR, "\x1b[2J": 1})
    called = convert(call, "prompt-completion")
    assert "\x1b" not in called.err


def test_group_shows_its_help(call) -> None:
    assert "convert" in call("data").out
