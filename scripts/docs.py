"""Write the generated pages of docs/ and the answers in README.md; with --check, say which of them are stale.

    python scripts/docs.py [--check]

A page is a function that returns its text. A `console` block of README.md holds a command after `$ ` and below it
what the command prints.
"""

import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

import click
from docs_accuracy import accuracy_page
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
        parts.append(f"## {line}\n\n```text\n{printed(f'{line} --help')}```\n")
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


def readme() -> str:
    """Return README.md with the answers as the commands give them now."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"```console\n\$ ([^\n]+)\n.*?```", lambda match: _console(match[1]), text, flags=re.DOTALL)


def _console(line: str) -> str:
    return f"```console\n$ {line}\n{printed(line)}```"


PAGES: dict[str, Callable[[], str]] = {
    "docs/cli.md": cli_page,
    "docs/settings.md": settings_page,
    "docs/rules.md": rules_page,
    "docs/import.md": lambda: marked(import_page()),
    "docs/memory.md": lambda: marked(memory_page()),
    "docs/accuracy.md": lambda: marked(accuracy_page()),
    "README.md": readme,
}


def main() -> int:
    """Write the pages, or compare them. Returns 1 where --check finds a stale one."""
    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    stale = []
    for name, page in PAGES.items():
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
