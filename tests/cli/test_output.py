"""How answers and failures get out: one JSON document or text, colours, encodings, exit codes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from foretune.cli import app
from foretune.cli.terminal import Terminal, escape, wants_color, wrapped
from foretune.cli.topics import EXIT_CODES
from foretune.errors import ForetuneError

SMALL = ("--model", "gpt2", "--offline")

ANSWERS = [
    ("--version",),
    ("--help",),
    ("models",),
    ("estimate", *SMALL),
    ("estimate", *SMALL, "--vram", "8", "--explain"),
    ("estimate", *SMALL, "--gpu", "3090"),
    ("models", "list"),
    ("models", "show", "gpt2"),
    ("devices", "list"),
    ("devices", "show", "a100", "80gb"),
    ("devices", "detect"),
    ("config", "schema"),
    ("doctor",),
    ("completion", "bash"),
    ("help",),
    ("help", "models", "show"),
    ("help", "exit-codes"),
]

FAILURES = [
    (("nonsense",), 2),
    (("--nonsense",), 2),
    (("estimate",), 2),
    (("estimate", "--modl", "gpt2"), 2),
    (("estimate", "--model"), 2),
    (("estimate", "gpt2"), 2),
    (("estimate", *SMALL, "--rank", "many"), 2),
    (("estimate", *SMALL, "--rank", "nan"), 2),
    (("estimate", *SMALL, "--seq-len", "1" * 5000), 2),
    (("estimate", *SMALL, "--dtype", "bf17"), 2),
    (("estimate", *SMALL, "--method", "loar"), 2),
    (("estimate", *SMALL, "--set", "lora"), 2),
    (("estimate", *SMALL, "--set", "lora.rnk=8"), 2),
    (("estimate", *SMALL, "--set", "lora.rank="), 2),
    (("estimate", *SMALL, "--targets", "q_prj"), 2),
    (("estimate", "--model", "facebook/opt-125m", "--offline", "--set", "batch.packing=true"), 2),
    (("estimate", *SMALL, "--gpu", "rtx 9999"), 2),
    (("estimate", *SMALL, "--gpu", "3090", "--vram", "24"), 2),
    (("estimate", *SMALL, "--vram", "lots"), 2),
    (("estimate", *SMALL, "--vram", "8", "--free", "9"), 2),
    (("estimate", *SMALL, "--free", "8"), 2),
    (("estimate", *SMALL, "--check"), 2),
    (("estimate", *SMALL, "--vram", "8", "--accept", "tight"), 2),
    (("estimate", *SMALL, "--stack", "none"), 2),
    (("estimate", *SMALL, "--color", "sometimes"), 2),
    (("estimate", *SMALL, "--vram", "0.1", "--check"), 3),
    (("estimate", "--model", "no/such-model", "--offline"), 4),
    (("estimate", "--model", "./nowhere", "--offline"), 2),
    (("estimate", "--model", "\x1b[31m", "--offline"), 2),
    (("estimate", "--model", "\udc80", "--offline"), 2),
    (("estimate", "--config", "nowhere.yaml"), 2),
    (("models", "show"), 2),
    (("models", "show", "no/such-model", "--offline"), 4),
    (("models", "shw"), 2),
    (("devices", "show", "potato"), 2),
    (("config", "validate", "nowhere.yaml"), 2),
    (("config", "validate"), 2),
    (("config", "show", "nowhere.yaml"), 2),
    (("config", "init", "no-folder/run.yaml"), 2),
    (("completion", "tcsh"), 2),
    (("help", "nothing"), 2),
]


@pytest.mark.parametrize("words", ANSWERS, ids=" ".join)
def test_json_is_one_document_and_nothing_else(call, words) -> None:
    called = call(*words, "--json")
    document = called.document
    assert (called.code, called.err) == (0, "")
    assert re.fullmatch(r"foretune\.[a-z.-]+/1", document["schema"])
    assert document["version"]


@pytest.mark.parametrize(("words", "code"), FAILURES, ids=lambda value: repr(value)[:80])
def test_failure_is_a_json_error_with_its_exit_code(call, words, code) -> None:
    called = call(*words, "--json")
    document = called.document
    assert (called.code, called.err) == (code, "")
    if code != 3:
        error = document["error"]
        assert document["schema"] == "foretune.error/1"
        assert error["exit_code"] == code
        assert error["code"]
        assert error["message"]
        assert error["problems"]
        assert "\x1b" not in called.out


@pytest.mark.parametrize(("words", "code"), [case for case in FAILURES if case[1] != 3], ids=lambda v: repr(v)[:80])
def test_failure_as_text_is_on_stderr_and_says_what_to_do(call, words, code) -> None:
    called = call(*words)
    assert (called.code, called.out) == (code, "")
    assert called.err.startswith("error: ")
    assert "Traceback" not in called.err
    assert "\x1b" not in called.err


@pytest.mark.parametrize("words", ANSWERS, ids=" ".join)
def test_text_is_on_stdout_without_escapes_and_within_80_columns(call, words) -> None:
    called = call(*words)
    assert (called.code, called.err) == (0, "")
    assert "\x1b" not in called.out
    if words[0] != "completion" and words != ("config", "schema"):
        assert max(map(len, called.out.splitlines())) <= 80


@pytest.mark.parametrize("words", ANSWERS, ids=" ".join)
def test_narrow_terminal_and_plain_encoding_do_not_break(call, words) -> None:
    called = call(*words, env={"COLUMNS": "40", "LC_ALL": "C"}, encoding="ascii", terminal=True)
    assert called.code == 0
    assert called.out.isascii()


def test_json_on_a_plain_encoding_holds_the_same_text(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mödel🙂.yaml").write_text("model: {id: gpt2}\nprecision: {dtype: bf16}\nseed: x\n")
    called = call("config", "validate", "mödel🙂.yaml", "--json", encoding="ascii")
    assert called.document["error"]["problems"][0]["place"] == "mödel🙂.yaml:3:1"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("estimte",), "Did you mean `foretune estimate`?"),
        (("models", "lst"), "Did you mean `foretune models list`?"),
        (("estimate", "--vrm", "8"), "Did you mean --vram?"),
        (("estimate", *SMALL, "--dtype", "bf17"), "Did you mean bf16?"),
        (("estimate", *SMALL, "--set", "lora.rnk=8"), "Did you mean lora.rank?"),
        (("estimate", *SMALL, "--method", "loar"), "Did you mean lora?"),
        (("estimate", "--model", "qwen/qwen2.5-0.5c", "--offline"), "Qwen/Qwen2.5-0.5B"),
        (("estimate", *SMALL, "--gpu", "rtx 3099"), "NVIDIA GeForce RTX 309"),
        (("help", "exit-code"), "Did you mean exit-codes?"),
    ],
)
def test_error_names_the_nearest_right_word(call, words, hint) -> None:
    assert hint in call(*words).err


@pytest.mark.parametrize(
    ("choice", "environment", "is_terminal", "expected"),
    [
        ("always", {"NO_COLOR": "1"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
        (None, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        (None, {"NO_COLOR": "", "FORCE_COLOR": "1"}, False, True),
        (None, {"FORCE_COLOR": ""}, False, False),
        ("auto", {"FORCE_COLOR": "1", "TERM": "dumb"}, False, True),
        (None, {"TERM": "dumb"}, True, False),
        (None, {"TERM": "xterm"}, True, True),
        (None, {}, False, False),
    ],
)
def test_color_is_flag_then_no_color_then_force_color_then_terminal(choice, environment, is_terminal, expected) -> None:
    assert wants_color(choice, environment, is_terminal=is_terminal) is expected


def test_color_repeats_what_a_word_says(call) -> None:
    words = ("estimate", *SMALL, "--vram", "0.5")
    plain, painted = call(*words), call(*words, "--color=always")
    assert "\x1b[" in painted.out
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted.out) == plain.out
    assert plain.out.startswith("Does not fit: ")


@pytest.mark.parametrize("text", ["a\x1b[2Jb", "a\nb", "a\u202eb", "a\udc80b", "a\x9bb"])
def test_foreign_text_is_shown_escaped_on_one_line(text: str) -> None:
    shown = escape(text)
    assert shown.isprintable()
    assert shown.startswith("a\\")


def test_a_paragraph_keeps_within_the_width() -> None:
    assert all(len(line) <= 30 for line in wrapped("word " * 40, Terminal(width=30), bullet="- "))


def test_an_own_mistake_exits_1_and_says_how_to_report_it(call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TypeError("bad \x1b")

    monkeypatch.setattr(app, "_invoke", fail)
    called = call("models", "list")
    assert called.code == 1
    assert "report" in called.err
    assert "Traceback" not in called.err
    assert call("models", "list", "--json").document["error"]["code"] == "internal"
    assert "Traceback" in call("models", "list", "--debug").err


def test_ctrl_c_exits_130(call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "_invoke", interrupt)
    assert call("models", "list").code == 130
    assert call("models", "list", "--json").document["error"]["exit_code"] == 130


def test_a_closed_pipe_is_quiet(call, monkeypatch: pytest.MonkeyPatch) -> None:
    def close(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(app, "_emit", close)
    called = call("models", "list")
    assert (called.code, called.out, called.err) == (141, "", "")


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    program = [sys.executable, "-m", "foretune", "models", "list", "--json"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        complaint = process.stderr.read()
    assert (process.returncode, complaint) == (141, b"")


def test_an_answer_that_cannot_be_written_is_not_success(call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(app, "_emit", fill)
    called = call("models", "list", "--json")
    assert called.code == 1
    assert "No space left" in called.err


def test_every_exit_code_of_an_error_is_documented() -> None:
    kinds = [ForetuneError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert {kind.exit_code for kind in kinds} <= {code for code, _ in EXIT_CODES}


def test_several_files_with_json_are_a_line_each_and_failures_stand_among_them(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("model: {id: gpt2}\nprecision: {dtype: bf16}\nlora: {}\n")
    Path("b.yaml").write_text("model: {id: gpt2}\nlora: {}\n")
    words = ("estimate", "--config", "a.yaml", "--config", "b.yaml", "--config", "a.yaml", "--vram", "8", "--json")
    called = call(*words)
    lines = [json.loads(line) for line in called.out.splitlines()]
    assert [line["schema"] for line in lines] == ["foretune.estimate/1", "foretune.error/1", "foretune.estimate/1"]
    assert called.code == 2
