"""Wrong uses (wrong_uses.py), each with one error that says what to do next; their wording is kept in a file.

After a change that is meant: `FORETUNE_REWRITE=1 pytest tests/journeys/test_wrong_uses.py`, and read the difference.
"""

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from journeys.wrong_uses import CASES, prepare

from foretune.api.prediction import Predicted
from foretune.cli.output import Output

KEPT = Path(__file__).parents[1] / "golden/wrong_uses.txt"
HEAD = "Wrong uses, and what each says. tests/journeys/test_wrong_uses.py compares and rewrites it.\n"
REWRITES = "FORETUNE_REWRITE" in os.environ
WIDTH = 60


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder in which the cases are typed, made once."""
    folder = tmp_path_factory.mktemp("wrong")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HOME", str(folder / "no-cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("FORETUNE_CACHE", str(tmp_path_factory.mktemp("kept")))
        patch.setattr("foretune.api.planning.predict", lambda *_: Predicted(None))
        prepare()
    return folder


@pytest.fixture(scope="module")
def kept() -> Iterator[dict[str, str]]:
    """Give what is kept of each case; where that is asked for, it is written anew."""
    parts = KEPT.read_text(encoding="utf-8").split("\n## ")[1:] if KEPT.exists() else []
    told = {part.partition("\n")[0]: f"{part.rstrip()}\n" for part in parts}
    yield told
    if REWRITES:
        KEPT.write_text("\n## ".join([HEAD, *(told[name] for name in CASES if name in told)]), encoding="utf-8")


class Told(NamedTuple):
    """What a wrong use gave."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The error on stderr, without the progress before it."""
        return self.err[self.err.find("error: ") :]


@pytest.fixture
def typed(call: Callable[..., Any], place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Told]:
    """Type a command there, with a fault or without; what it leaves is removed."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("foretune.api.planning.predict", lambda *_: Predicted(None))

    def answer(line: str, fault: Callable[[pytest.MonkeyPatch], None] | None) -> Told:
        before = set(place.rglob("*"))
        with pytest.MonkeyPatch.context() as patch:
            if fault is not None:
                fault(patch)
            called = call(*shlex.split(line)[1:], env={"COLUMNS": str(WIDTH)})
        for path in sorted(set(place.rglob("*")) - before):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return Told(called.code, _plain(called.out, place), _plain(called.err, place))

    return answer


def _plain(text: str, place: Path) -> str:
    """Return a text without what differs from one machine to the next."""
    text = text.replace(str(place), "/here")
    return re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|\+00:00)", "2026-01-31T12:00:00Z", text)


def both_at_once(patch: pytest.MonkeyPatch) -> None:
    """Tell a failure as text, and as JSON beside it: for commands that take too long to be run twice."""
    fail = Output.fail

    def told(output: Output, error: dict[str, Any]) -> int:
        code, output.is_json = fail(output, error), True
        assert fail(output, error) == code
        return code

    patch.setattr(Output, "fail", told)


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_use_is_one_error_that_says_what_to_do(
    name: str, typed: Callable[..., Told], kept: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, fault, encodes = CASES[name]
    if encodes:
        both_at_once(monkeypatch)
        text = in_json = typed(line, fault)
    else:
        text, in_json = typed(line, fault), typed(line.replace("foretune ", "foretune --json ", 1), fault)
        assert (text.out, in_json.err) == ("", "")
    check_words(text, json.loads(in_json.out))
    told = f"{name}\n$ {line}\n{unbroken(text.error)}exit code {text.code}\n"
    if REWRITES:
        kept[name] = told
    assert told == kept.get(name), "the wording differs from what is kept"


def check_words(text: Told, document: dict[str, Any]) -> None:
    """Hold text and document against each other, and both against what an error promises."""
    error = document["error"]
    assert document["schema"] == "foretune.error/1"
    assert text.code == error["exit_code"] not in (0, 1)
    assert error["code"] not in ("error", "internal")
    assert "Traceback" not in text.err
    lines = text.error.splitlines()
    assert [line for line in lines if len(line) > WIDTH and not is_unbroken(line)] == []
    shown = " ".join(text.error.split())
    for problem in error["problems"]:
        assert problem["hint"], "it does not say what to do"
        said = [problem["place"] or "", problem["message"], problem["hint"]]
        assert all(" ".join(part.split()) in shown for part in said)
        sentences = re.split(r"(?<=[.?!:;]) ", " ".join(said))
        assert len(set(sentences)) == len(sentences), "it says something twice"


def unbroken(text: str) -> str:
    """Return an error as it goes into a pipe: where lines are broken differs with the length of paths."""
    return re.sub(r"\n(?:    |  (?!hint:|record:))", " ", text)


def is_unbroken(line: str) -> bool:
    """Whether a line is one thing to be copied, or the record's path."""
    words = re.sub(r"^(error:| +hint:| +record:| +)\s*", "", line)
    return line.startswith("  record: ") or " " not in words or bool(re.fullmatch(r"\S*`[^`]*`\S*|Run: .*", words))


def test_every_command_is_used_wrongly() -> None:
    from foretune.cli.app import root

    used = {shlex.split(case.line)[1] for case in CASES.values()}
    assert set(root.lazy) <= used
    assert len(CASES) >= 40


def test_what_is_kept_is_of_cases_that_there_are(kept: dict[str, str]) -> None:
    assert set(kept) == set(CASES)


def test_a_home_with_spaces_and_other_letters_works(
    call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way in such a folder, by relative and by absolute paths; nothing is lost on the way."""
    from runs.made_run import conversation, copy_model, write_rows

    home = tmp_path / "Füße und Köpfe/läuft"
    home.mkdir(parents=True)
    monkeypatch.chdir(home)
    monkeypatch.setattr("foretune.api.planning.predict", lambda *_: Predicted(None))
    copy_model(Path()).rename("das Modell")
    write_rows(Path("meine Zeilen.jsonl"), [conversation(number) for number in range(8)])
    wanted = {
        "device": "cpu",
        "precision.dtype": "fp32",
        "data.train": "meine Zeilen.jsonl",
        "batch.sequence_length": "128",
        "output": "Läufe/der erste",
    }
    settings = [word for key, value in wanted.items() for word in ("--set", f"{key}={value}")]

    def done(*words: str) -> dict[str, Any]:
        called = call(*words, "--json")
        assert called.code == 0, called.out
        is_stream = "train" in words and "--dry-run" not in words
        document: dict[str, Any] = json.loads(called.out.rstrip().rsplit("\n", 1)[-1] if is_stream else called.out)
        return document

    done("config", "init", "mein Lauf.yaml", "--model", "./das Modell", *settings)
    assert done("data", "check", "--config", "mein Lauf.yaml")["stats"]["num_rows"] == 8
    assert done("config", "validate", str(home / "mein Lauf.yaml"))["files"]
    assert done("train", "mein Lauf.yaml")["record"]["outcome"] == "success"
    assert done("evaluate", "mein Lauf.yaml")["record"]["probe"]["is_bitwise_equal"]
    assert done("recipe", "ein Rezept", "--config", "mein Lauf.yaml")["files"]
    assert done("train", "ein Rezept/config.yaml", "--dry-run", "--output", "Läufe/noch einer")["num_updates"]
    assert done("merge", "Läufe/der erste")["record"]["merge_check"]["verdict"] == "verified"
    text = call("evaluate", "Läufe/der erste/merged", env={"COLUMNS": str(WIDTH)})
    assert (text.code, "Läufe/der erste/merged" in text.out) == (0, True)
