"""A configuration as YAML that a person reads, and that loads as the same configuration."""

import os
import re
from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from foretune.contract.config import TrainingConfig
from foretune.contract.fields import Leaf, Section, field_tree
from foretune.contract.paths import make_portable
from foretune.contract.scalars import BadScalar, read_plain

__all__ = ["SCHEMA_FILE", "dump_config", "write_value"]

SCHEMA_FILE = "foretune.schema.json"
"""Name under which the modeline looks for the schema (`foretune config schema` writes it)."""

_PLAIN = re.compile(r"[A-Za-z0-9_./~][A-Za-z0-9_./~+@-]*")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def dump_config(
    config: TrainingConfig,
    *,
    comments: bool = False,
    folder: str | os.PathLike[str] | None = None,
    schema: str = SCHEMA_FILE,
) -> str:
    """Write every setting as YAML. With `comments`, each has its text above it, and editors are told the schema.

    `folder` is where the text will stand: paths inside it are written relative to it, others as they are (absolute,
    where the configuration was loaded). `load(dump(c)) == c`.

        Path("run.yaml").write_text(dump_config(config, comments=True))
    """
    if folder is not None:
        config = make_portable(config, os.fspath(folder))
    lines = [f"# yaml-language-server: $schema={schema}"] if comments else []
    lines += _section_lines(field_tree(), config.to_dict(), _docs() if comments else {}, depth=0)
    return "\n".join(lines) + "\n"


def _docs() -> dict[str, str]:
    from foretune.contract.schema import field_docs

    return field_docs()


def _section_lines(section: Section, data: dict[str, Any], docs: dict[str, str], *, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, part in section.parts.items():
        if docs:
            if depth == 0:
                yield ""
            yield from (f"{indent}# {line}" for line in wrap(docs[part.path], 100 - len(indent)))
        value = data[name]
        if isinstance(part, Leaf) or value is None:
            yield f"{indent}{name}: {write_value(value)}"
        else:
            yield f"{indent}{name}:"
            yield from _section_lines(part, value, docs, depth=depth + 1)


def write_value(value: Any) -> str:
    """Write one value so that `read_plain` or a quoted string gives it back.

    >>> write_value(1e-08), write_value("no"), write_value("12"), write_value(["q_proj"])
    ('1.0e-08', 'no', '"12"', '[q_proj]')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return _write_float(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(write_value(item) for item in value)}]"
    return write_text(value) if isinstance(value, str) else str(value)


def _write_float(value: float) -> str:
    """Write the shortest text that gives the number back, with a point, so that YAML 1.1 reads a number as well."""
    mantissa, e, exponent = repr(value).partition("e")
    return mantissa + ("" if "." in mantissa else ".0") + e + exponent


def write_text(text: str) -> str:
    """Write text plainly where every reader of YAML takes it as text, else in double quotes."""
    if _PLAIN.fullmatch(text) and _is_text(text):
        return text
    return '"' + "".join(map(_escape, text)) + '"'


def _is_text(text: str) -> bool:
    try:
        return read_plain(text) == text
    except BadScalar:
        return False


def _escape(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"
