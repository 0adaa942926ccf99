"""Every block of code of every page does what the page says (tests/house/pages.py has the rules)."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from house.faults import FAULTS
from house.pages import (
    LANGUAGES,
    ROOT,
    Answer,
    Block,
    Reader,
    agrees,
    blocks,
    page_names,
    prepare,
    reading,
    run_console,
    stray_code,
    work_through,
)

from foretune.contract import load_config
from foretune.data import read_rows

NOTES = {"file", "folder", "text", "output", "fragment", "not run", "with", "prepares"}
DRAWINGS = {"docs/architecture.md": "rooms, lines of calls and a tree of classes, by indentation"}
NEEDS_A_REASON = {"text", "fragment", "not run"}


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.fixture
def reader() -> Iterator[Reader]:
    with reading() as one:
        yield one


@pytest.mark.parametrize("page", page_names())
def test_every_block_is_declared(page: str) -> None:
    text = read(page)
    assert page in DRAWINGS or not stray_code(text), "code stands in a block between fences at the margin"
    for block in blocks(text):
        place = f"{page}:{block.line}"
        assert block.language in LANGUAGES, place
        assert set(block.notes) <= NOTES, place
        assert all(block.notes[note] for note in NEEDS_A_REASON & set(block.notes)), f"{place}: say why"
        assert block.notes.get("with", next(iter(FAULTS))) in FAULTS, place
        if block.language == "text":
            assert {"text", "output", "file"} & set(block.notes), f"{place}: a text block says what it is"
        if block.language == "console":
            assert "not run" not in block.notes, f"{place}: what a console shows is real"


def differs(answer: Answer) -> str:
    return f"line {answer.block.line}: `{answer.command.line}` prints now (`make docs` writes it):\n{answer.printed}"


def check(reader: Reader, block: Block) -> None:
    """Do with a block what its language asks for."""
    work_through(reader, block)
    if block.language == "console":
        wrong = [answer for answer in run_console(reader, block) if not answer.is_right]
        assert not wrong, "\n".join(map(differs, wrong))
    elif block.language == "sh" and "not run" not in block.notes:
        assert reader.code == 0, f"line {block.line}"
    elif block.language == "json":
        json.loads(block.text)
    elif block.language == "jsonl":
        file = Path("block.jsonl")
        file.write_text(block.text, encoding="utf-8")
        assert len(list(read_rows(file))) == len(block.text.splitlines())
        file.unlink()
    elif block.language == "yaml" and "fragment" not in block.notes:
        file = Path("block.yaml")
        file.write_text(block.text, encoding="utf-8")
        load_config(file)
        file.unlink()
    elif "output" in block.notes:
        assert agrees(block.text, reader.printed), f"line {block.line}: the program prints\n{reader.printed}"


@pytest.mark.parametrize("page", [page for page in page_names() if blocks(read(page))])
def test_every_block_does_what_the_page_says(page: str, reader: Reader) -> None:
    text = read(page)
    prepare(reader, text)
    for block in blocks(text):
        check(reader, block)


def test_readme_has_an_answer() -> None:
    assert re.search(r"^\$ foretune estimate .*\nFits: needs ", read("README.md"), re.MULTILINE)


def test_troubleshooting_shows_every_exit_code_by_a_command(call) -> None:
    documented = {row["exit_code"] for row in call("help", "exit-codes", "--json").document["exit_codes"]}
    shown = re.findall(r"^\$ .*(?:echo \$\?|PIPESTATUS.*)\n(\d+)$", read("docs/troubleshooting.md"), re.MULTILINE)
    assert {int(code) for code in shown} == documented - {0}


# -- the rules themselves


@pytest.mark.parametrize(
    ("shown", "printed", "agree"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\n", "a\nb\n", False),
        ("a\n...\nd\n", "a\nb\nc\nd\n", True),
        ("a\n...\n", "a\n", True),
        ("...\nc\n", "a\nb\n", False),
        ("a . b\n", "a x b\n", False),
        ("9,023 tokens/s\n", "17 tokens/s\n", True),
        ("22.68 GiB are.\n", "3.1 GiB are.\n", True),
        ("needs 22.68 GiB.\n", "needs 3.1 GiB.\n", False),
        ("loss 6.06\n", "loss nan\n", False),
        (
            "  load                   780.0 KiB              32.4 MiB\n",
            "  load    1.5 MiB              32.4 MiB\n",
            True,
        ),
        (
            "  load                   780.0 KiB              32.4 MiB\n",
            "  load    1.5 MiB              32.5 MiB\n",
            False,
        ),
        ("  load  780.0 KiB  1.0 MiB\n", "  load  781.0 KiB  1.0 MiB\n", False),
    ],
)
def test_an_answer_is_compared_line_by_line(shown: str, printed: str, agree: bool) -> None:
    assert agrees(shown, printed) == agree


def test_code_outside_of_fences_is_found() -> None:
    assert stray_code("Text:\n\n    code\n\n- item\n\n    more of the item\n\n  ```sh\n") == [3, 9]
    assert stray_code("```text\n    inside\n```\n") == []


def test_an_exit_code_that_the_page_does_not_ask_for_is_an_error(reader: Reader) -> None:
    (block,) = blocks("```console\n$ foretune estimate --model nothing --offline\n...\n```\n")
    with pytest.raises(AssertionError, match="exits with 4"):
        list(run_console(reader, block))
