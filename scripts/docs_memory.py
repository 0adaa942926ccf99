"""The text of docs/memory.md: formulas, operations, allocator, profiles and families, from the code's docstrings."""

import ast
import inspect
import re
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import foretune
from foretune.memory import PROFILES, allocator, heap, host
from foretune.memory.components import FORMULAS
from foretune.memory.families import DECODERS
from foretune.memory.interval import error_classes, intervals_around
from foretune.memory.overhead import context_bytes, host_need
from foretune.memory.packing import KEEP_APART, LEAKS
from foretune.memory.qualify import REFUSED_SETTINGS
from foretune.units import format_bytes

__all__ = ["memory_page"]

INTRODUCTION = """# How memory is estimated

An estimate runs the fine-tune on a *tape*: tensors without data that remember shape, strides, dtype and who holds
them. Each layer is written as its model writes it in Transformers; what a tensor's last holder lets go of is freed at
that moment, as in the real program. The list of allocations and frees, from loading to the second update, is then
replayed through a model of PyTorch's caching allocator. Nothing is fitted: each figure is the program's own.

Figures are *estimated*. Bytes are powers of two: 1 GiB = 2^30 B.
"""

ROOT = Path(foretune.__file__).parent
RULE_FILES = {
    "kernels": "memory/kernels.py",
    "operators": "runtime/trace/rules.py",
    "paths": "runtime/trace/stand_ins.py",
    "4-bit, 8-bit": "runtime/trace/quantized.py",
    "autocast": "runtime/trace/autocast.py",
    "other loops": "runtime/trace/callers.py",
    "fused kernels": "runtime/trace/fused.py",
    "Trainer": "runtime/trace/trainer.py",
    "TRL": "runtime/trace/trl_head.py",
}
OPERATIONS = ("ops", "pointwise", "strided", "rare_ops", "scans", "einsum", "complex", "experts")
RULE_TEXT = """## Rules

What CUDA allocates and tensors without data do not show. The first group is read by estimate and trace alike; the
others are the trace's, and the estimate's blocks say the same of themselves. *Source*: the file of the library, or the
publication. *Learnt on*: the runs in which it was seen to hold; empty: the library's text alone. Rules that one stack
has and another has not are fields of the profiles, below.
"""
PROFILE_TEXT = """## Stack profiles

A profile says what one set of versions, a platform and a training loop do. It is keyed by these, never by a source of
measurements or by a row. `--stack NAME` takes one, `--stack installed` this machine's versions.
"""
INTERVALS = """Around allocated, reserved and process stands where the truth lies with 90 %: as far as published rows
of the same class were off. A class is the stack (described, or only the nearest) and how weights are loaded. Its range
is learnt by `scripts/intervals.py`: quantiles in which every group (source and model) weighs the same, each side scaled
so that groups that are left out are covered; up to one segment of the allocator is added on both sides. Beyond the
tokens and parameters that were seen, and on a path that no measurement has touched, it is twice as wide. What it rests
on stands in each answer; `docs/accuracy.md` has how well it covers.

*Fits*: the upper end of the process' interval is within what is free now (or the card's memory, where that is not
known). *Does not fit*: its lower end is not. *Tight*: between, or where the allocator gets by only when it empties its
cache. *Unknown*: no budget can be told. On Windows and WSL only the card's own memory counts.
"""
CPU_TEXT = """With `device: cpu` only `foretune trace` answers. *Tensors* are all tensors' bytes, as torch's profiler
counts them; *process* is what the process grows by, from after its imports to its peak, and stands where a GPU's answer
has reserved memory; there is no context. The need is the upper end of the growth's interval, to be held against what is
free of the host's memory (`--detect`). `python benchmarks/cpu_growth.py` runs real processes beside the trace.
"""
ADDING = """### Adding a version of a library

1. Install it, and run `python scripts/fingerprints.py --check`: every model type whose events moved is named, with the
   first event that differs. No difference: raise the upper bound in `runtime/libraries.py`, and that is all.
2. Read the library's source at that operator. If the trace runs it by itself (a class of Transformers, PEFT's layers),
   only the estimate has to follow: change its block, and `make full` says when all events are equal again.
3. If it is something that tensors without data do not show (a kernel's workspace, a loader, who holds what), it is a
   rule: a field of `StackProfile` with both values, its text naming the file and the version, read by both engines.
   The older profiles keep the older value.
4. Where a GPU is at hand, `python benchmarks/gpu_truth.py` compares every allocation with the device's own.
5. `python scripts/golden_traces.py`, `python scripts/fingerprints.py` and `python scripts/predictions.py` record what
   moved; say why in the commit, and raise `ESTIMATOR_VERSION`.
"""
PACKED_TEXT = """## Packed rows

With `batch.packing: true` the step passes positions that begin at 0 for each example, and neither a mask nor a cache.
Transformers then finds the examples in the positions and makes a mask of every row, [B, 1, S, S]: for sdpa of truth
values, which torch turns into one that is added, and for eager attention one that is added. Keys and values are
repeated for grouped heads, and a kernel that takes a mask runs: memory-efficient, cuDNN's or math, never flash. Both
engines have these events, and the trace's are those of torch's profiler on a CPU; on a GPU packed rows are measured
nowhere. A micro batch whose rows hold one example each makes no mask, and needs less.

Whether a class keeps examples apart was checked by running it: a small model's logits of packed examples against those
of the same examples alone, in fp32, to 1e-4. These do not, and are refused by name in estimate and trace, as is a type
that nobody has checked, Falcon with linear biases (they count the tokens of the whole row, in 16 bits),
`attention: flash_attention_2` (Transformers tells examples apart only in batches of one row, by a kernel that is not
estimated yet) and every stack but `foretune`.
"""


def memory_page() -> str:
    """Put the page together."""
    parts = [INTRODUCTION, _components(), _need(), _allocator(), _on_a_cpu(), _operations(), _families()]
    return "\n".join([*parts, _rules(), _profiles(), _packed(), _refused()])


def attribute_texts(path: Path, class_name: str) -> dict[str, str]:
    """Return each attribute of a class with the text below it, in order; `name` is left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    found: dict[str, str] = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id != "name":
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            found[node.target.id] = " ".join(str(after.value.value).split()) if is_text else ""
    return found


def function_texts(path: Path) -> dict[str, str]:
    """Return each function and class of a module that has a text, methods too."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            found[node.name] = " ".join((ast.get_docstring(node) or "").split()).replace("|", "\\|")
    return found


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
    for title, function in (("CUDA context", context_bytes), ("Host and disk", host_need)):
        lines.append(f"### {title}\n\n{_text(function)}\n")
    return "\n".join([*lines, _intervals()])


def _intervals() -> str:
    """The classes of errors, and how far each has been off."""
    rows = []
    for entry in error_classes().values():
        for metric in ("allocated", "reserved"):
            found = getattr(entry, metric)
            span = f"{found.low_percent:+.2f} to {found.high_percent:+.2f}"
            seen = f"{found.most_tokens:,} tokens, {found.most_params / 1e9:.1f}e9 parameters"
            rows.append(f"| {entry.name} | {metric} | {span} | {found.num_rows} | {found.num_groups} | {seen} |")
    head = f"## Intervals and verdicts\n\n{INTERVALS}\n{_text(intervals_around)}\n"
    columns = "| class | measure | percent of the prediction | rows | models and sources | seen up to |"
    return "\n".join([head, columns, f"|{' --- |' * 6}", *rows, ""])


def _allocator() -> str:
    return f"## The allocator\n\n{_text(allocator)}\n"


def _on_a_cpu() -> str:
    growth = _text(host.growth_bytes).replace("Formula: ", "*Formula.* ").replace("Source: ", "*Source.* ")
    terms = [
        f"- {name}, {format_bytes(value)}: {constant_text(ROOT / 'memory/host.py', constant)}"
        for name, constant, value in (
            ("Libraries", "LIBRARIES_BYTES", host.LIBRARIES_BYTES),
            ("Products", "PRODUCTS_BYTES", host.PRODUCTS_BYTES),
        )
    ]
    parts = ["## A run on the CPU", CPU_TEXT, growth, *terms, "", "### The heap\n", _text(heap)]
    return "\n".join([*parts[:1], "", parts[1], parts[2], "", "F has two parts:", "", *parts[3:], ""])


def constant_text(path: Path, name: str) -> str:
    """Return the text below a constant of a module."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for node, after in pairwise(body):
        is_it = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name
        if is_it and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            return " ".join(str(after.value.value).split())
    raise LookupError(name)


def _operations() -> str:
    rows = []
    for home in OPERATIONS:
        module = import_module(f"foretune.memory.{home}")
        for name in module.__all__:
            text = " ".join(_text(getattr(module, name)).split()).replace("|", "\\|")
            rows.append(f"| {home} | `{name}` | {text} |")
    title = "## Operations\n\nn: elements of the result; s: bytes of one.\n"
    head = f"{title}\n| in | operation | allocates, saves, allocates in backward |\n| --- | --- | --- |"
    return "\n".join([head, *rows, ""])


def _families() -> str:
    rows = [f"| `{name}` | {' '.join(_text(DECODERS[name]).split())} |" for name in sorted(DECODERS)]
    return "\n".join(["## Families with an estimate\n", "| model type | follows |", "| --- | --- |", *rows, ""])


def _profiles() -> str:
    """Every field with its meaning, foretune's own value, and where other profiles differ."""
    own, others = PROFILES["foretune"], [profile for name, profile in PROFILES.items() if name != "foretune"]
    rows = []
    for field, text in attribute_texts(ROOT / "memory" / "stack.py", "StackProfile").items():
        value = getattr(own, field)
        differing: dict[object, list[str]] = {}
        for profile in others:
            if getattr(profile, field) != value:
                differing.setdefault(getattr(profile, field), []).append(profile.name)
        elsewhere = "; ".join(f"`{_shown(other)}`: {', '.join(names)}" for other, names in differing.items())
        rows.append(f"| `{field}` | {text} | `{_shown(value)}` | {elsewhere} |")
    names = "\n".join(f"- `{profile.description}`" for profile in PROFILES.values())
    head = f"{PROFILE_TEXT}\n{names}\n\n| field | meaning | foretune | elsewhere |\n|{' --- |' * 4}"
    return "\n".join([head, *rows, "", ADDING])


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _rules() -> str:
    """What CUDA does and tensors without data do not show, with where it is read off."""
    rows = []
    for title, path in RULE_FILES.items():
        for name, text in function_texts(ROOT / path).items():
            what, source, learnt = (part.strip().rstrip(".") for part in _split(text))
            if source:
                rows.append(f"| {title} | `{name.lstrip('_')}` | {what} | {source} | {learnt} |")
    head = f"{RULE_TEXT}\n| of | rule | what it says | source | learnt on |\n|{' --- |' * 5}"
    return "\n".join([head, *rows, ""])


def _split(text: str) -> tuple[str, str, str]:
    """A rule's words, its source and what it was learnt on; a file in brackets counts as the source."""
    what, _, rest = text.partition("Source:")
    source, _, learnt = rest.partition("Learnt on:") if rest else ("", "", "")
    if not learnt:
        what, _, learnt = what.partition("Learnt on")
    found = re.search(r"\(([^()]*\.(?:py|cpp|cuh?|h)[^()]*)\)", what)
    return what, source or (found[1] if found else ""), learnt


def _packed() -> str:
    rows = [f"| {', '.join(f'`{name}`' for name in leak.families)} | {leak.because} |" for leak in LEAKS]
    kept = ", ".join(f"`{name}`" for name in sorted(KEEP_APART))
    return "\n".join(
        [PACKED_TEXT, "| types | why not |", "| --- | --- |", *rows, "", f"They are kept apart by {kept}.\n"]
    )


def _refused() -> str:
    rows = [f"| `{r.field}: {str(r.value).lower()}` | {r.what} | {r.instead} |" for r in REFUSED_SETTINGS]
    return "\n".join(
        [
            "## Refused by name\n",
            "| setting | not estimated yet | instead |",
            "| --- | --- | --- |",
            *rows,
            "",
        ]
    )
