"""A command in a text file (`trl sft --model_name_or_path ...`) as keys with their values and places."""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from foretune.contract.document import Node
from foretune.errors import ConfigError

__all__ = ["LAUNCHER", "read_command"]

LAUNCHER = "launcher"
"""Before the flags of what starts the program (`accelerate launch --num_processes 2`)."""
_VARIABLE = r"[A-Z][A-Z0-9_]*="
_LAUNCHERS = ("accelerate", "torchrun", "deepspeed")


class _Word(NamedTuple):
    text: str
    place: str


def read_command(text: str, name: str) -> tuple[str, dict[str, Node]]:
    """Return the program and its flags. Raises ConfigError for quotes that do not close, and for a second command."""
    words = list(_words(text.replace("\r\n", "\n"), name))
    number = next((i for i, word in enumerate(words) if not re.match(_VARIABLE, word.text)), len(words))
    env = {
        f"env.{variable}": Node(value, word.place)
        for word in words[:number]
        for variable, _, value in [word.text.partition("=")]
    }
    words = words[number:]
    program, launcher, flags = _split(words, name)
    keys = {f"{LAUNCHER}.{key}": node for key, node in _flags(launcher)}
    return program, {**env, **keys, **dict(_flags(flags))}


def _words(text: str, name: str) -> Iterator[_Word]:
    """Yield the words of the shell with line and column; a backslash at the end of a line goes on."""
    joined = re.sub(r"\\\n", "  ", text)
    for match in re.finditer(r"#[^\n]*|(?:[^\s\"'#\\]|\"(?:[^\"\\]|\\.)*\"|'[^']*'|\\.|(?<=\S)#)+|[\"']", joined):
        if match[0].startswith("#"):
            continue
        before = text[: match.start()]
        place = f"{name}:{before.count(chr(10)) + 1}:{match.start() - before.rfind(chr(10))}"
        try:
            parts = shlex.split(match[0])
        except ValueError as error:
            raise ConfigError("a quote is not closed.", hint="Close it.", place=place) from error
        if match[0] in (";", "&&", "|"):
            raise ConfigError("a second command follows.", hint="Keep one command in the file.", place=place)
        yield _Word("".join(parts), place)


def _split(words: list[_Word], name: str) -> tuple[str, list[_Word], list[_Word]]:
    """Divide into the program, the flags of its launcher and its own."""
    if words and words[0].text in _LAUNCHERS:
        for index, word in enumerate(words):
            start = 2 if words[0].text == "accelerate" else 1
            if word.text.endswith(".py"):
                return word.text, words[start:index], words[index + 1 :]
            if word.text in ("-m", "--module") and index + 1 < len(words):
                return words[index + 1].text, words[start:index], words[index + 2 :]
        raise ConfigError("no script is named.", hint="Name it, as in `accelerate launch sft.py ...`.", place=name)
    index = next((i for i, word in enumerate(words) if word.text.startswith("--")), len(words))
    program = " ".join(word.text for word in words[:index])
    if program.endswith((".yaml", ".yml", ".json")):
        file = words[index - 1]
        message = f"the command reads {file.text[:80]!r}, which is not read with it."
        raise ConfigError(message, hint="Import that file, and give what the flags say with --set.", place=file.place)
    return program, [], words[index:]


def _flags(words: list[_Word]) -> Iterator[tuple[str, Node]]:
    """Yield flags as HfArgumentParser takes them: `--a b`, `--a=b`, `--a b c` (a list), `--a`, `--no_a`."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.text.startswith("--"):
            raise ConfigError(f"{word.text[:60]!r} belongs to no flag.", hint="Check the line.", place=word.place)
        key, equals, value = word.text[2:].partition("=")
        values = [value] if equals else []
        while not equals and index < len(words) and not words[index].text.startswith("--"):
            values.append(words[index].text)
            index += 1
        yield from _flag(key.replace("-", "_"), values, word.place)


_NO_SWITCHES = frozenset({"no_cuda"})
"""Keys that begin like the switching off of another and are not."""


def _flag(key: str, values: list[str], place: str) -> Iterator[tuple[str, Node]]:
    if not values and key.startswith("no_") and key not in _NO_SWITCHES:
        yield key[3:], Node(False, place)
    elif len(values) > 1:
        yield key, Node([Node(value, place) for value in values], place)
    else:
        yield key, Node(values[0] if values else True, place)
