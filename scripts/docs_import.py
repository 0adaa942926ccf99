"""The page on configurations of other tools, made from the tables by which they are read."""

from docs_table import markdown_table

from foretune.foreign import TOOLS
from foretune.foreign.convert import shown
from foretune.foreign.rules import Key, Tool

__all__ = ["import_page"]

HEAD = """# Configurations of other tools

`foretune config import FILE` reads a configuration of axolotl, LLaMA-Factory, TRL or canifinetune and accounts for each
of its keys: what maps, what has no counterpart, and what only you can decide. `foretune estimate --import FILE` prices
it as that tool runs it, on the stack profile that stands below its name.

- A tool is told by its keys, or by the command (`trl sft ...`, `accelerate launch sft.py ...` in a text file);
  `--tool NAME` says it.
- Where the file is silent the tool's own default counts, and is listed where it is not foretune's.
- What has no counterpart and changes what is trained or the memory is refused by key. `--set KEY=VALUE` decides a field
  of foretune, `--without KEY` leaves the key out: then the run is another one than the file's.
- `--output FILE` writes the configuration once nothing is open. An estimate asks only for what changes memory.
- Keys that the tool does not have are refused with the nearest that it has.
- YAML is read as the tools read it (1.1, as PyYAML): `yes` is true, `010` is eight, and `1e-4`, which is text there, is
  made a number as the tool makes it one. Anchors, tags and keys that stand twice are refused.
- One process on one device is taken. Values of tokens and keys of services are not shown.
"""
READS = {
    "any": "anything", "count": "a whole number", "number": "a number", "switch": "true or false", "text": "text",
    "names": "names",
}  # fmt: skip
CHANGES = {"result": "what is trained", "memory": "the memory", "both": "both"}


def import_page() -> str:
    """Write the tables of every tool."""
    return HEAD + "".join(map(_tool, TOOLS.values()))


def _tool(tool: Tool) -> str:
    rows = list(tool.keys.items())
    mapped = [
        (f"`{key}`", READS[row.reads], _fields(row), _default(key, row), row.about)
        for key, row in rows
        if row.kind in ("maps", "part")
    ]
    blocked = [(keys, CHANGES[row.changes], row.about) for keys, row in _grouped(rows, "blocks")]
    ignored = [(keys, row.about) for keys, row in _grouped(rows, "ignored")]
    notes = "".join(f"- {note}\n" for note in tool.stack_notes)
    head = f"Keys and defaults of {tool.title} {tool.version}. Priced on {tool.stack.description}."
    return (
        f"\n## {tool.title}\n\n{head}\n\n{notes}"
        f"\n### What maps\n\n{markdown_table(('key', 'is', 'becomes', 'default there', 'remark'), mapped)}"
        f"\n### Refused unless you decide\n\n{markdown_table(('keys', 'changes', 'because'), blocked)}"
        f"\n### Without effect\n\n{markdown_table(('keys', 'about'), ignored)}"
    )


def _fields(row: Key) -> str:
    return ", ".join(f"`{field}`" for field in row.fields)


def _default(key: str, row: Key) -> str:
    return "" if row.default is None else f"`{shown(key, row.default)}`"


def _grouped(rows: list[tuple[str, Key]], kind: str) -> list[tuple[str, Key]]:
    """Join the keys of which the same is said."""
    groups: dict[Key, list[str]] = {}
    for key, row in rows:
        if row.kind == kind:
            groups.setdefault(row._replace(off=(), default=None), []).append(f"`{key}`")
    return [(", ".join(keys), row) for row, keys in groups.items()]
