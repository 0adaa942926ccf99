"""Write the generated pages of docs/; with --check, say which of them are stale.

    python scripts/docs.py [--check]

A page is a function that returns its text. Without --check the answers to the commands in the other pages are written
too; tests/house/test_pages.py holds them.
"""

import functools
import io
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

import click
from docs_accuracy import accuracy_page
from docs_evidence import evidence_page
from docs_import import import_page
from docs_memory import memory_page
from docs_table import markdown_table

from foretune.cli.app import root, run
from foretune.contract import RULES, settings_table

ROOT = Path(__file__).resolve().parents[1]
MADE = "<!-- Made by scripts/docs.py (`make docs`); do not edit. -->"


def printed(line: str) -> str:
    """Return what a command prints in a plain terminal of 80 columns."""
    out = io.StringIO()
    with redirect_stdout(out):
        run(shlex.split(line)[1:])
    return out.getvalue()


def commands(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the words of a command and of all below it."""
    yield words
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=words[-1])
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, (*words, name))


def cli_page() -> str:
    """Write the help of every command."""
    parts = [f"# Commands\n\n{MADE}\n"]
    for words in commands(root, ("foretune",)):
        line = " ".join(words)
        parts.append(f"## {line}\n\n```console\n$ {line} --help\n{printed(f'{line} --help')}```\n")
    return "\n".join(parts)


def settings_page() -> str:
    """Write every field of a configuration."""
    rows = [(f"`{row.field}`", row.type, f"`{row.default}`", row.text) for row in settings_table()]
    head = (
        f"# Settings\n\n{MADE}\n\nEvery field of a configuration file, and of `--set KEY=VALUE`. "
        "`foretune config init` writes them all.\n"
    )
    return f"{head}\n{markdown_table(('field', 'may be', 'default', 'meaning'), rows)}"


def rules_page() -> str:
    """Write what may not stand together."""
    rows = [
        (rule.name, rule.claim, ", ".join(f"`{field}`" for field in rule.fields), _kind(rule.is_about_qualification))
        for rule in RULES
    ]
    head = f"# Rules\n\n{MADE}\n\nWhat every configuration keeps. A broken rule is an error with its line.\n"
    return f"{head}\n{markdown_table(('rule', 'claim', 'fields', 'broken, it is'), rows)}"


def _kind(is_about_qualification: bool) -> str:
    return "not supported" if is_about_qualification else "a contradiction"


def marked(page: str) -> str:
    """Say below a page's title that it is made."""
    return page.replace("\n", f"\n\n{MADE}\n", 1)


def answers(page: str) -> str:
    """Return a page with the answers that its commands give now (tests/house/pages.py)."""
    sys.path.insert(0, str(ROOT / "tests"))
    from house.pages import rewritten

    text = (ROOT / page).read_text(encoding="utf-8")
    return rewritten(text, lambda problem: print(f"{page}: {problem}"))


PAGES: dict[str, Callable[[], str]] = {
    "docs/cli.md": cli_page,
    "docs/settings.md": settings_page,
    "docs/rules.md": rules_page,
    "docs/import.md": lambda: marked(import_page()),
    "docs/memory.md": lambda: marked(memory_page()),
    "docs/accuracy.md": lambda: marked(accuracy_page()),
    "docs/evidence.md": lambda: marked(evidence_page()),
}


def main() -> int:
    """Write the pages, or compare them. Returns 1 where --check finds a stale one."""
    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    stale = []
    pages = dict(PAGES)
    if "--check" not in sys.argv:
        by_hand = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        names = [path.relative_to(ROOT).as_posix() for path in by_hand]
        pages |= {name: functools.partial(answers, name) for name in names if name not in PAGES}
    for name, page in pages.items():
        path, text = ROOT / name, page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    verb = "stale (run `make docs`)" if "--check" in sys.argv else "written"
    for name in stale:
        print(f"{name}: {verb}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
