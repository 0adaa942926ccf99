"""The pages as a reader meets them: their blocks of code, run in order in a folder of their own.

What stands in an HTML comment right before a block says how it is meant:

    file: NAME        the block is the content of a file, which the blocks after it find
    text: WHAT        a `text` block is no output but, for example, a picture
    output            a `text` block is what the `python` block before it prints
    fragment: WHAT    a `yaml` block is part of a configuration, or none of foretune's
    not run: WHY      a block that cannot be run here
    folder: PAGE      anywhere: the page's folder begins as the blocks of another one leave it, which say
    prepares          that they are for others too
    with: FAULT       the commands run while something fails (FAULTS)

In a `console` block each line after `$ ` is a command, and what follows is what a terminal shows of it, stdout and
stderr together. A line `...` stands for any lines. A command that does not exit with 0 is followed by `$ echo $?`.
In a `python` block the comment behind a `print` is what it prints; then all of the block's prints have one.
"""

import ast
import io
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from house.faults import FAULTS

from foretune.cli.app import run

ROOT = Path(__file__).parents[2]
SHOWN = "/home/ada/tuning"
"""The folder in which a reader works; the tests' own has as many characters, so that text wraps alike."""
LANGUAGES = ("console", "json", "jsonl", "python", "sh", "text", "yaml")
SHELL = re.compile(r"[|<>;&$`]")

VARIES: dict[str, str] = {
    r"\d[\d,]* tokens/s": "a speed",
    r"\d+ s left": "a time",
    r"[\d.,]+ [KMG]iB (?=are(;| free there|\.))": "free memory, and a free disk",
    r"(?<=[a-z)]) +[\d.]+ ([KMG]iB|B)(?= {8,}(-|[\d.]+ [KM]iB)$)": "how much a process grew",
    r"(?i)(?<=loss )\d+\.\d+|(?<=of the last )\d+\.\d+|(?<=: )\d+\.\d+(?= over )|(?<=perplexity )[\d.,]+": (
        "a loss: the kernels of two processors add in another order"
    ),
    r"\.py:\d+": "a line of a library's file",
    r"process \d+": "the number of a process",
    r"[0-9a-f]{12,64}": "a hash",
    r"\b\d+\.\d+\.\d+(\+cpu)?\b": "a version of a library",
    r"20\d\d-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?)?": "a day",
}
"""What is another on another machine or day, and why; it is compared as `#`."""


class Block(NamedTuple):
    """One fenced block."""

    line: int
    """Of its first fence, counted from 1."""
    language: str
    text: str
    notes: dict[str, str]


def page_names() -> list[str]:
    """Return the pages, as paths from the project's root."""
    return ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))]


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    found, notes, start = [], {}, None
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if start is not None:
            if line == "```":
                found.append(Block(start[0], start[1], "".join(f"{each}\n" for each in inside), notes))
                start, notes, inside = None, {}, []
            else:
                inside.append(line)
        elif line.startswith("```"):
            start = number, line.removeprefix("```")
        elif note := re.fullmatch(r"<!-- ([a-z ]+)(?:: (.+))? -->", line):
            notes[note[1]] = note[2] or ""
        elif line.strip():
            notes = {}
    assert start is None, f"line {start}: the block does not end"
    return found


def stray_code(text: str) -> list[int]:
    """Return the lines of code that no fence is around, or whose fence is not at the margin."""
    prose = re.sub(r"^```.*?^```$", lambda block: re.sub(".+", "", block[0]), text, flags=re.DOTALL | re.MULTILINE)
    lines, found = prose.splitlines(), []
    for number, line in enumerate(lines, 1):
        before = next((each for each in reversed(lines[: number - 1]) if each.strip()), "")
        in_list = re.match(r"\s*([-*]|\d+\.) |\s", before)
        if line.lstrip().startswith(("```", "~~~")) or (line.startswith("    ") and not in_list):
            found.append(number)
    return found


class Command(NamedTuple):
    """A command of a console block, and what stands below it."""

    written: str
    """As it stands in the page, over several lines where they end in a backslash."""
    shown: str

    @property
    def line(self) -> str:
        """As a shell takes it."""
        return self.written.replace("\\\n", " ")

    @property
    def is_shortened(self) -> bool:
        """Whether the page leaves lines out."""
        return "\n...\n" in f"\n{self.shown}"


def commands(block: Block) -> list[Command]:
    """Return the commands of a console block."""
    assert block.text.startswith("$ "), f"line {block.line}: a console block begins with `$ `"
    parts = re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE)
    return [Command(*part) for part in parts]


def normal(text: str) -> list[str]:
    """Return the lines of an output, with `#` where machines and days differ."""
    for pattern in VARIES:
        text = re.sub(pattern, "#", text, flags=re.MULTILINE)
    return text.splitlines()


def agrees(shown: str, printed: str) -> bool:
    """Whether a page shows what is printed."""
    kinds = (r"(?:.*\n)*?" if line == "..." else f"{re.escape(line)}\n" for line in normal(shown))
    return re.fullmatch("".join(kinds), "".join(f"{line}\n" for line in normal(printed))) is not None


class Reader:
    """Works through a page in a folder of its own."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.code = folder, 0
        self.names: dict[str, Any] = {"__name__": "__page__"}
        self.printed = ""
        programs = cache / "programs"
        programs.mkdir(parents=True)
        program = programs / "foretune"
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m foretune "$@"\n')
        program.chmod(0o755)
        search = os.pathsep.join(path for path in sys.path if path)
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in ("COLUMNS", "TERM", "FORCE_COLOR")},
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": search,
            "NO_COLOR": "1",
            "HF_HOME": str(cache / "hub"),
            "HF_HUB_OFFLINE": "1",
            "FORETUNE_CACHE": str(cache / "kept"),
        }

    def answer(self, line: str) -> str:
        """Run a command line and return what a terminal shows of it."""
        if line == "echo $?":
            told, self.code = f"{self.code}\n", 0
            return told
        told = self._in_process(line) if line.startswith("foretune ") and not SHELL.search(line) else self._shell(line)
        return told.replace(str(self.folder), SHOWN)

    def _in_process(self, line: str) -> str:
        stream = Both()
        with redirect_stdout(stream), redirect_stderr(stream):  # type: ignore[type-var]
            self.code = run(shlex.split(line.replace(SHOWN, str(self.folder)))[1:])
        return stream.text()

    def _shell(self, line: str) -> str:
        done = subprocess.run(
            ["bash", "-c", line], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=120
        )
        self.code = done.returncode
        return done.stdout

    def python(self, text: str) -> None:
        """Run a Python block in the page's namespace; what it prints is kept."""
        stream = Both()
        with redirect_stdout(stream), redirect_stderr(io.StringIO()):  # type: ignore[type-var]
            exec(compile(ast.parse(text), "<page>", "exec"), self.names)
        self.printed = stream.text()
        stated = re.findall(r"^\s*print\(.*\)  # (.*)$", text, re.MULTILINE)
        assert not stated or self.printed.splitlines() == stated, text


class Both(io.TextIOWrapper):
    """A pipe that takes stdout and stderr together."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", newline="\n", write_through=True)

    def text(self) -> str:
        """Return what was written."""
        self.flush()
        return self.buffer.getvalue().decode()  # type: ignore[attr-defined]


@contextmanager
def reading() -> Iterator[Reader]:
    """Work in a new folder, whose path is as long as the shown one, without network and colours."""
    folder = Path(f"/tmp/ft-{secrets.token_hex(4)}")
    assert len(str(folder)) == len(SHOWN)
    cache = folder.with_suffix(".cache")
    before, environment = Path.cwd(), dict(os.environ)
    folder.mkdir()
    try:
        reader = Reader(folder, cache)
        os.environ.clear()
        os.environ.update(reader.environment)
        os.chdir(folder)
        yield reader
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)
        shutil.rmtree(folder)
        shutil.rmtree(cache)


class Answer(NamedTuple):
    """A command of a page with what it printed now."""

    block: Block
    command: Command
    printed: str
    code: int

    @property
    def is_right(self) -> bool:
        """Whether the page shows it."""
        return agrees(self.command.shown, self.printed)


def run_console(reader: Reader, block: Block) -> Iterator[Answer]:
    """Run the commands of a console block. Raises AssertionError for an exit code that the page does not ask for."""
    asked = commands(block)
    with FAULTS[block.notes["with"]]() if "with" in block.notes else _nothing():
        for number, command in enumerate(asked):
            yield Answer(block, command, reader.answer(command.line), reader.code)
            is_asked = number + 1 < len(asked) and asked[number + 1].line == "echo $?"
            assert reader.code == 0 or is_asked, f"line {block.line}: `{command.line}` exits with {reader.code}"


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def prepare(reader: Reader, text: str) -> None:
    """Make the folder that a page begins in, where it says `<!-- folder: PAGE -->`: by that page's own blocks."""
    if made := re.search(r"^<!-- folder: (\w+) -->$", text, re.MULTILINE):
        for block in blocks((ROOT / f"docs/{made[1]}.md").read_text(encoding="utf-8")):
            if "prepares" in block.notes:
                work_through(reader, block)
        reader.names = {"__name__": "__page__"}


def work_through(reader: Reader, block: Block) -> None:
    """Write the file that a block is, or run its program."""
    if "file" in block.notes:
        Path(block.notes["file"]).write_text(block.text, encoding="utf-8")
    elif block.language == "python" and "not run" not in block.notes:
        reader.python(block.text)
    elif block.language == "sh" and "not run" not in block.notes:
        reader.answer(block.text)


def rewritten(text: str, told: Callable[[str], None]) -> str:
    """Return a page whose answers are those of now. Says which ones a person must shorten anew."""
    lines: list[str] = text.splitlines()
    changes: dict[int, tuple[Block, str]] = {}
    with reading() as reader:
        prepare(reader, text)
        for block in blocks(text):
            work_through(reader, block)
            if block.language == "console":
                changes[block.line] = block, _answered(block, list(run_console(reader, block)), told)
            elif "output" in block.notes and not agrees(block.text, reader.printed):
                changes[block.line] = block, reader.printed
    for block, new in reversed(changes.values()):
        lines[block.line : block.line + len(block.text.splitlines())] = new.splitlines()
    return "".join(f"{line}\n" for line in lines)


def _answered(block: Block, answers: list[Answer], told: Callable[[str], None]) -> str:
    """Return a console block with the answers of now."""
    for wrong in [answer for answer in answers if not answer.is_right and answer.command.is_shortened]:
        told(f"line {block.line}: `{wrong.command.line}` prints something else now:\n{wrong.printed}")
    return "".join(f"$ {answer.command.written}\n{_shown(answer)}" for answer in answers)


def _shown(answer: Answer) -> str:
    return answer.command.shown if answer.is_right or answer.command.is_shortened else answer.printed
