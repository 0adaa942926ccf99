"""The page on configurations of other tools, made from the tables by which they are read."""

from docs_table import markdown_table

from foretune.foreign import TOOLS
from foretune.foreign.convert import shown
from foretune.foreign.rules import Key, Tool
from foretune.foreign.trainer import LAUNCH, TRAINING_ARGUMENTS

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
    "listed": "a list of names",
}  # fmt: skip
CHANGES = {"result": "what is trained", "memory": "the memory", "both": "both"}


def import_page() -> str:
    """Write the tables of every tool, and once what two of them share."""
    shared = {**TRAINING_ARGUMENTS, **LAUNCH}
    text = "What TRL and LLaMA-Factory have in common, as of Transformers 5.24; older names stand beside newer."
    parts = [HEAD, *map(_tool, TOOLS.values())]
    parts.append(f"\n## Transformers' TrainingArguments\n\n{text}\n{_tables(list(shared.items()))}")
    return "".join(parts)


def _tool(tool: Tool) -> str:
    shared = {**TRAINING_ARGUMENTS, **LAUNCH}
    rows = [(key, row) for key, row in tool.keys.items() if shared.get(key) is not row]
    more = f" {len(tool.keys) - len(rows)} more are TrainingArguments." if len(rows) < len(tool.keys) else ""
    head = f"Keys and defaults of {tool.title} {tool.version}.{more} Priced on {tool.stack.description}."
    notes = "".join(f"- {note}\n" for note in tool.stack_notes)
    return f"\n## {tool.title}\n\n{head}\n\n{notes}{_tables(rows)}"


def _tables(rows: list[tuple[str, Key]]) -> str:
    mapped = [
        (keys, READS[row.reads], ", ".join(f"`{field}`" for field in row.fields), _default(keys, row), row.about)
        for keys, row in _grouped(rows, "maps", "part")
    ]
    blocked = [(keys, CHANGES[row.changes], row.about) for keys, row in _grouped(rows, "blocks")]
    ignored = [(keys, row.about) for keys, row in _grouped(rows, "ignored")]
    return (
        f"\n### What maps\n\n{markdown_table(('key', 'is', 'becomes', 'default there', 'remark'), mapped)}"
        f"\n### Refused unless you decide\n\n{markdown_table(('keys', 'changes', 'because'), blocked)}"
        f"\n### Without effect\n\n{markdown_table(('keys', 'about'), ignored)}"
    )


def _default(keys: str, row: Key) -> str:
    return "" if row.default is None else f"`{shown(keys, row.default)}`"


def _grouped(rows: list[tuple[str, Key]], *kinds: str) -> list[tuple[str, Key]]:
    """Join the keys of which the same is said."""
    groups: dict[Key, list[str]] = {}
    for key, row in rows:
        if row.kind in kinds:
            same = row if row.kind in ("maps", "part") else row._replace(off=(), default=None)
            groups.setdefault(same, []).append(f"`{key}`")
    return [(", ".join(keys), row) for row, keys in groups.items()]
