"""The text of docs/memory.md: formulas, operations, allocator, profiles and families, from the code's docstrings."""

import inspect

from foretune.memory import PROFILES, StackProfile, allocator, ops
from foretune.memory.components import FORMULAS
from foretune.memory.families import DECODERS
from foretune.memory.overhead import context_bytes, host_need, safety_margin
from foretune.memory.qualify import REFUSED_SETTINGS

__all__ = ["memory_page"]

INTRODUCTION = """# How memory is estimated

An estimate runs the fine-tune on a *tape*: tensors without data that remember shape, strides, dtype and who holds
them. Each layer is written as its model writes it in Transformers; what a tensor's last holder lets go of is freed at
that moment, as in the real program. The list of allocations and frees, from loading to the second update, is then
replayed through a model of PyTorch's caching allocator. Nothing is fitted: each figure is the program's own.

Figures are *estimated*. Bytes are powers of two: 1 GiB = 2^30 B.
"""


def memory_page() -> str:
    """Put the page together."""
    parts = [INTRODUCTION, _components(), _need(), _allocator(), _operations(), _families(), _profiles(), _refused()]
    return "\n".join(parts)


def _text(thing: object) -> str:
    return inspect.getdoc(thing) or ""


def _components() -> str:
    lines = ["## Components of the allocated peak\n"]
    for name, function in FORMULAS.items():
        lines.append(
            f"### {name}\n\n{_text(function)}\n".replace("Formula: ", "*Formula.* ").replace("Source: ", "*Source.* ")
        )
    return "\n".join(lines)


def _need() -> str:
    lines = ["## Beside the allocator\n"]
    titles = ("CUDA context", "Safety margin", "Host and disk")
    for title, function in zip(titles, (context_bytes, safety_margin, host_need), strict=True):
        lines.append(f"### {title}\n\n{_text(function)}\n")
    return "\n".join(lines)


def _allocator() -> str:
    return f"## The allocator\n\n{_text(allocator)}\n"


def _operations() -> str:
    rows = []
    for name in ops.__all__:
        text = " ".join(_text(getattr(ops, name)).split()).replace("|", "\\|")
        rows.append(f"| `{name}` | {text} |")
    title = "## Operations\n\nn: elements of the result; s: bytes of one.\n"
    head = f"{title}\n| operation | allocates, saves, allocates in backward |\n| --- | --- |"
    return "\n".join([head, *rows, ""])


def _families() -> str:
    rows = [f"| `{name}` | {' '.join(_text(DECODERS[name]).split())} |" for name in sorted(DECODERS)]
    return "\n".join(["## Families with an estimate\n", "| model type | follows |", "| --- | --- |", *rows, ""])


def _profiles() -> str:
    names = list(PROFILES)
    fields = [field for field in StackProfile.__struct_fields__ if field != "name"]
    rows = []
    for field in fields:
        values = " | ".join(f"`{getattr(PROFILES[name], field)}`" for name in names)
        rows.append(f"| `{field}` | {values} |")
    head = f"## Stack profiles\n\n| | {' | '.join(names)} |\n|{' --- |' * (len(names) + 1)}"
    return "\n".join([head, *rows, ""])


def _refused() -> str:
    rows = [f"| `{r.field}: {str(r.value).lower()}` | {r.what} | {r.instead} |" for r in REFUSED_SETTINGS]
    rows.append("| `lora.modules_to_save` | a module trained whole beside adapters | Leave it empty. |")
    return "\n".join(
        [
            "## Refused by name\n",
            "| setting | not estimated or traced yet | instead |",
            "| --- | --- | --- |",
            *rows,
            "",
        ]
    )
