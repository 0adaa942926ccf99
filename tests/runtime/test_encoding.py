"""Rows encoded in processes of their own: the same for any number of them, bounded, and never silent."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from data.made import DAY, TEMPLATES, made, made_tokenizer

from foretune.data import EncodeSettings, Example, encode_rows, read_rows
from foretune.errors import ConfigError, DataError, UnsupportedError
from foretune.runtime import encoder, encoding
from foretune.runtime.encoder import encode_chunk
from foretune.runtime.encoding import EncodingTask, encode_file

CHATML = TEMPLATES["markup"]
ANSWERS = EncodeSettings("assistant_only")
Folder = Callable[..., Path]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return a folder with a made tokenizer, and a chat template in it."""
    made_already: dict[tuple[str, str | None], Path] = {}

    def save(name: str = "words", template: str | None = CHATML) -> Path:
        place = made_already.get((name, template))
        if place is None:
            place = made_already[name, template] = tmp_path_factory.mktemp("tokenizer")
            made_tokenizer(name).save_pretrained(place)
            if template is not None:
                (place / "chat_template.jinja").write_text(template)
        return place

    return save


def chat(question: str, answer: str) -> str:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}, ensure_ascii=False)


def rows_file(folder: Path, lines: list[str], name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(folder / name)


def task_of(file: str, tokenizer: Path, **changed: object) -> EncodingTask:
    return EncodingTask(file, tokenizer, "made", ANSWERS, None, DAY)._replace(**changed)  # type: ignore[arg-type]


def examples_of(task: EncodingTask, workers: int = 1) -> list[Example]:
    return [each for chunk in encode_file(task, workers=workers) for each in chunk.rows.examples()]


MIXED = [
    chat("Where is the answer?", "The answer is 😀 here.")
    if number % 3
    else json.dumps({"instruction": f"Say {number}", "output": f"{number} answers"})
    for number in range(400)
]


def test_any_number_of_processes_gives_the_same_rows_in_order(
    tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "CHUNK_BYTES", 4000)
    task = task_of(rows_file(tmp_path, [*MIXED[:200], "", *MIXED[200:]]), folder())
    expected = [each for each, _ in encode_rows(list(read_rows(task.file)), made("words", "markup"), ANSWERS)]
    assert [each.line for each in expected] == [*range(1, 201), *range(202, 402)]
    for workers in (1, 3):
        assert examples_of(task, workers) == expected


def test_details_are_the_first_rows_whole(tmp_path: Path, folder: Folder) -> None:
    task = task_of(rows_file(tmp_path, MIXED[1:6]), folder())
    (chunk,) = encode_file(task, workers=1, num_details=2)
    assert [detail.text[:30] for detail in chunk.details] == ["<|im_start|>user\nWhere is the "] * 2
    assert list(chunk.details[0].ends)[-1] == len(chunk.details[0].text)


def test_the_first_wrong_rows_are_named_whatever_comes_later(
    tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "CHUNK_BYTES", 500)
    lines = [*MIXED[:9], '{"output": 3}', *MIXED[:40], "{", *MIXED[:40]]
    for workers in (1, 2):
        with pytest.raises(DataError, match=":10: instruction is missing") as caught:
            examples_of(task_of(rows_file(tmp_path, lines), folder()), workers)
        assert [problem.place for problem in caught.value.problems] == [f"{tmp_path}/rows.jsonl:10"]


def test_wrong_rows_near_each_other_are_named_together(tmp_path: Path, folder: Folder) -> None:
    lines = ["[]", chat("a", "b"), chat("a", " "), '{"instruction": "a", "output": "b", "x": 1}', chat("c", "d")]
    with pytest.raises(DataError) as caught:
        examples_of(task_of(rows_file(tmp_path, lines), folder()))
    assert [problem.place.rpartition(":")[2] for problem in caught.value.problems if problem.place] == ["1", "3", "4"]


def test_a_problem_of_the_template_has_its_line_among_the_others() -> None:
    data = "\n".join([chat("a", "two\nlines"), "{", chat("b", "two\nmore")]).encode()
    found = encode_chunk(5, data, made("words", "joins_lines"), ANSWERS, 0)
    assert [line for line, _, _ in found["problems"]] == [5, 6, 7]
    assert "changes this turn's text" in found["problems"][0][1]


LOOPS = {
    "a loop without end": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a text that doubles": (
        "{% set ns = namespace(t='xxxxxxxx') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}"
    ),
    "a text too long": "{{ 'x' * 10**12 }}",
    "a text that is long without a limit": "{{ ('x' * 8 * 10**9) | length }}",
    "a range too long": "{% for i in range(10**12) %}{% endfor %}",
}


@pytest.mark.parametrize("kind", LOOPS)
def test_a_template_is_bounded_in_time_and_memory(
    tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("FORETUNE_RENDER_SECONDS", "1")
    task = task_of(rows_file(tmp_path, [chat("a", "b")]), folder(), template=LOOPS[kind] + CHATML)
    with pytest.raises(DataError) as caught:
        examples_of(task)
    assert str(caught.value.problems[0].place).endswith(":1")


def test_what_a_template_may_not_do_is_refused_with_its_line(tmp_path: Path, folder: Folder) -> None:
    attacks = (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
    )
    for attack in attacks:
        task = task_of(rows_file(tmp_path, [chat("a", "b")]), folder(), template=attack + CHATML)
        with pytest.raises(DataError, match=":1: the chat template refuses the row"):
            examples_of(task)


def test_a_process_that_ends_is_no_silence(tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "CHUNK_SECONDS", 0.05)
    with pytest.raises(DataError, match=r"cannot be encoded: its process|could not be loaded"):
        examples_of(task_of(rows_file(tmp_path, MIXED), folder()))


def test_a_file_of_the_current_folder_stands_in_for_no_library(
    tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert len(examples_of(task_of(rows_file(tmp_path, MIXED[:3]), folder()))) == 3


def test_a_template_is_computed_when_it_is_rendered_and_not_before(tmp_path: Path, folder: Folder) -> None:
    for text in ("{% if false %}{{ 'x' * 8 * 10**9 }}{% endif %}", "{% if false %}{{ 10**10**8 }}{% endif %}"):
        assert len(examples_of(task_of(rows_file(tmp_path, MIXED[1:3]), folder(), template=text + CHATML))) == 2
    nested = "{% for m in messages %}" * 30 + "{% endfor %}" * 30
    with pytest.raises(UnsupportedError, match="The chat template is none"):
        examples_of(task_of(rows_file(tmp_path, MIXED[1:3]), folder(), template=nested))


@pytest.mark.parametrize("text", ["abc", "0", "-1", "inf", "nan", ""])
def test_a_time_limit_that_is_none_is_refused(
    tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("FORETUNE_RENDER_SECONDS", text)
    with pytest.raises(ConfigError, match="FORETUNE_RENDER_SECONDS is"):
        examples_of(task_of(rows_file(tmp_path, MIXED[:2]), folder()))


def test_a_process_that_cannot_start_is_told(tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(DataError, match="No process could be started to encode the rows"):
        examples_of(task_of(rows_file(tmp_path, MIXED[:2]), folder()))


def test_the_first_wrong_row_is_told_before_ten_others() -> None:
    lines = [chat("a", "two\nlines"), *["{"] * 12, chat("b", "two\nmore")]
    found = encode_chunk(1, "\n".join(lines).encode(), made("words", "joins_lines"), ANSWERS, 0)
    assert [line for line, _, _ in found["problems"]] == list(range(1, 11))


def test_a_row_of_eight_mebibytes_is_encoded(tmp_path: Path, folder: Folder) -> None:
    row = json.dumps({"instruction": "a", "output": "a b " * (2 << 20)})
    (example,) = examples_of(task_of(rows_file(tmp_path, [row]), folder()))
    assert len(example.ids) > 4 << 20


def test_a_tokenizer_that_cannot_be_loaded_says_why(tmp_path: Path, folder: Folder) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="The tokenizer of made cannot be loaded"):
        examples_of(task_of(rows_file(tmp_path, MIXED[:3]), tmp_path / "bad"))
    with pytest.raises(UnsupportedError, match="The chat template is none"):
        examples_of(task_of(rows_file(tmp_path, MIXED[:3]), folder(), template="{% for %}"))


def test_conversations_need_a_template_and_instructions_do_not(tmp_path: Path, folder: Folder) -> None:
    plain = folder("words", None)
    assert len(examples_of(task_of(rows_file(tmp_path, MIXED[:1]), plain))) == 1
    with pytest.raises(DataError, match=":2: the tokenizer has no chat template"):
        examples_of(task_of(rows_file(tmp_path, MIXED[:2]), plain))


def test_the_day_that_a_template_is_told_is_fixed(tmp_path: Path, folder: Folder) -> None:
    template = "{{ strftime_now('%Y-%m-%d') }} " + CHATML
    file = rows_file(tmp_path, [chat("a", "b")])
    days = {
        day: next(encode_file(task_of(file, folder(), template=template, template_date=day), workers=1, num_details=1))
        for day in (date(2024, 2, 29), date(2030, 12, 31))
    }
    assert {day: chunk.details[0].text[:10] for day, chunk in days.items()} == {day: str(day) for day in days}


def test_the_process_imports_no_torch(tmp_path: Path, folder: Folder) -> None:
    """A torch that breaks when it is imported stands first on the path."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("import os; os._exit(7)")
    code = (
        "import os, sys\n"
        f"os.environ['PYTHONPATH'] = {str(broken)!r}\n"
        f"sys.path[:0] = [{str(Path(encoding.__file__).parents[2])!r}, {str(Path(__file__).parents[1])!r}]\n"
        "from runtime.test_encoding import MIXED, examples_of, rows_file, task_of\n"
        "from pathlib import Path\n"
        f"task = task_of({rows_file(tmp_path, MIXED)!r}, Path({str(folder())!r}))\n"
        "print(len(examples_of(task)), sys.modules.get('torch') is not None)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout.split() == ["400", "False"], ran.stderr


def damaged(rng: random.Random) -> bytes:
    """Return a row of random texts, or one with a random damage; the texts hold what templates and tokenizers mind."""
    parts = (
        "a",
        " ",
        "\n",
        "😀",
        "<|im_end|>",
        "</think>",
        "<think>",
        "[INST]",
        "\ud83d\ude00",
        "\U00100000",
        "'",
        '"',
        "{{",
    )

    def text() -> str:
        return "".join(rng.choices(parts, k=rng.randint(0, 5)))

    line = (
        chat(text(), text()) if rng.random() < 0.7 else json.dumps({"instruction": text(), "output": text()})
    ).encode(errors="replace")
    place = rng.randrange(len(line))
    damage = rng.choice((b"", b"", b"\xff", b"[", b"}", b'"', b"\x00", b"NaN"))
    return line[:place] + damage + line[place:] if rng.random() < 0.5 else line


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=pytest.mark.full)])
def test_a_line_is_told_wrong_in_a_chunk_as_it_is_alone(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "MAX_PROBLEMS", count)
    rng, tokenizer = random.Random(3), made("words", "forgets_thinking")
    lines = [damaged(rng) for _ in range(count)]
    together = encode_chunk(1, b"\n".join(lines) + b"\n", tokenizer, ANSWERS, 0)
    alone = [encode_chunk(number, line, tokenizer, ANSWERS, 0) for number, line in enumerate(lines, 1)]
    assert together["problems"] == [problem for each in alone for problem in each["problems"]]
    assert together["rows"][2] == b"".join(each["rows"][2] for each in alone)
    assert count / 20 < len(together["problems"]) < count
    assert all(1 <= line <= count for line, _, _ in together["problems"])


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_no_process_outlives_the_command(tmp_path: Path, folder: Folder, name: str) -> None:
    """The first encoder is caught while it renders a row that takes ten seconds."""
    (tmp_path / "slow.jinja").write_text(LOOPS["a loop without end"])
    words = ["data", "check", rows_file(tmp_path, MIXED[1:3]), "--model", str(folder()), "--no-cache"]
    words += ["--chat-template", str(tmp_path / "slow.jinja")]
    command = [sys.executable, "-m", "foretune", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    encoders = until(lambda: children_of(process.pid))
    process.send_signal(signal.Signals[name])
    _, said = process.communicate(timeout=30)
    assert (process.returncode, "Interrupted" in said) == ((130, True) if name == "SIGINT" else (-9, False))
    until(lambda: not any(is_running(encoder) for encoder in encoders), seconds=15)


def children_of(process: int) -> list[str]:
    found: list[str] = []
    for thread in Path(f"/proc/{process}/task").iterdir():
        found += (thread / "children").read_text().split()
    return found


def is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], Any], seconds: float = 10) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    pytest.fail("it did not come to that in time")
