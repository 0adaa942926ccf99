"""Hold the estimate's program against the trace's, event by event, on short models of real widths.

    python scripts/compare.py [TYPE...] [--method lora] [--batch 1] [--explain] [--set lora.use_dora=true]

Without a type all families that are estimated. A type's model is that of tests/golden/fingerprints.jsonl, else of
tests/models/variants.jsonl, else of --config FILE. Traces are kept in a folder (--cache) by what they were made from,
so that only the estimate runs again while it is written. A setting of lora or quantization counts for the methods that
have them.
"""

import argparse
import copy
import hashlib
import json
import pickle
import sys
import tempfile
import traceback
from collections.abc import Iterator
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from foretune.contract import TrainingConfig, build_config, fingerprint
from foretune.devices import DeviceSpec
from foretune.errors import ForetuneError
from foretune.memory import PROFILES, StackProfile, estimate_memory, tape
from foretune.memory.families import DECODERS
from foretune.memory.figures import facts_of, kernels_for
from foretune.memory.program import record_tape
from foretune.memory.templates import StandIns
from foretune.models import ModelShape, shape_from_config

ROOT = Path(__file__).parents[1]
MADE_FROM = [*sorted((ROOT / "src/foretune/runtime").rglob("*.py")), ROOT / "src/foretune/memory/stack.py"]


class Event(NamedTuple):
    """A birth (number, bytes) or a death (number, -1), in order of births, and what it is."""

    number: int
    num_bytes: int
    what: str


class Program(NamedTuple):
    """The events of one run and its peaks; or why there are none."""

    events: list[Event]
    allocated: int = 0
    reserved: int = 0
    refusal: str = ""


def configs(types: list[str], files: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield short models by type."""
    rows = [json.loads(line) for line in (ROOT / "tests/golden/fingerprints.jsonl").read_text().splitlines()[1:]]
    variants = [json.loads(line) for line in (ROOT / "tests/models/variants.jsonl").read_text().splitlines()]
    known = {row["model_type"]: row["base"] for row in variants} | {row["model_type"]: row["config"] for row in rows}
    for file in files:
        config = json.loads(Path(file).read_text())
        yield Path(file).stem, config
    for name in types or ([] if files else sorted(DECODERS)):
        if name in known:
            yield name, known[name]
        else:
            print(f"{name}: no model of it is known", file=sys.stderr)


def training(arguments: Any, method: str, batch: int, attention: str, stack: StackProfile) -> TrainingConfig:
    """One way to train."""
    is_clipped = any(setting.startswith("optimizer.max_grad_norm=") for setting in arguments.set)
    absent = {"full": ("lora.", "quantization."), "lora": ("quantization.",)}.get(method, ())
    overrides = [
        f"gradient_checkpointing={str(not arguments.keeps_activations).lower()}",
        f"attention={attention}",
        f"batch.micro_batch_size={batch}",
        f"batch.sequence_length={arguments.tokens}",
        *(["optimizer.max_grad_norm=null"] if stack.loss != "own" and not is_clipped else []),
        *(setting for setting in arguments.set if not setting.startswith(absent or "-")),
    ]
    return build_config({"model.id": "test/model"}, overrides=overrides, method=method).config


def varied(stack: StackProfile, changes: list[str]) -> StackProfile:
    """A profile with fields changed: `autocast=bf16`, `fused=["rope"]`."""
    fields: dict[str, Any] = {}
    for change in changes:
        name, _, text = change.partition("=")
        is_json = text[:1] in '["' or text in ("true", "false") or text.isdigit()
        fields[name] = json.loads(text) if is_json else text
    return stack.with_(**fields)


def estimated(config: TrainingConfig, shape: ModelShape, device: Any, stack: StackProfile, explain: bool) -> Program:
    """The torch-free program, all layers recorded."""
    answer = estimate_memory(config, shape, device, stack=stack)
    names: dict[int, str] = {}
    original = tape.Storage.__init__

    def named(self: tape.Storage, num_bytes: int) -> None:
        original(self, num_bytes)
        frames = traceback.extract_stack()[:-1][-7:]
        names[self.slot] = " < ".join(f"{f.name}:{f.lineno}" for f in reversed(frames) if f.name != "__call__")

    if explain:
        tape.Storage.__init__ = named  # type: ignore[method-assign]
    try:
        adapted, layers = facts_of(config, shape).adapted, StandIns.all_of(shape.num_layers)
        kernels = kernels_for(config, shape, device, stack)
        recorded = record_tape(config, shape, stack.on(device), kernels, adapted, layers)
    finally:
        tape.Storage.__init__ = original  # type: ignore[method-assign]
    phases = [(segment.position, segment.phase) for segment in recorded.segments]
    numbers: dict[int, int] = {}
    events, at = [], 0
    for position, (slot, num_bytes) in enumerate(recorded.events):
        while at + 1 < len(phases) and phases[at + 1][0] <= position:
            at += 1
        if num_bytes == -2:
            continue
        if num_bytes >= 0:
            numbers[slot] = len(numbers)
        what = f"[{phases[at][1]}] {names.get(slot, '')}"
        events.append(Event(numbers[slot], num_bytes if num_bytes >= 0 else -1, what))
    return Program(events, answer.allocated_bytes, answer.reserved_bytes)


def traced(config: TrainingConfig, shape: ModelShape, raw: dict[str, Any], device: Any, stack: StackProfile) -> Program:
    """The real program."""
    from bisect import bisect_right

    from foretune.runtime.border import foreign_border
    from foretune.runtime.trace import trace_memory

    try:
        with foreign_border("test/model", config.attention):
            trace = trace_memory(config, shape, copy.deepcopy(raw), device, stack=stack)
    except ForetuneError as error:
        return Program([], refusal=str(error).splitlines()[0][:150])
    numbers: dict[int, int] = {}
    events = []
    for position, (slot, size) in enumerate(trace.program.events):
        if size < 0:
            continue
        if size:
            numbers[slot] = len(numbers)
        birth = trace.births[slot]
        phase = trace.program.phases[bisect_right(trace.program.marks, position)]
        events.append(Event(numbers[slot], birth.num_bytes if size else -1, f"[{phase}] {birth.name}"))
    return Program(events, trace.estimate.allocated_bytes, trace.estimate.reserved_bytes)


def kept(cache: Path, key: str, make: Any) -> Program:
    """Read a trace that was made before, or make it."""
    file = cache / f"{key}.pickle"
    if file.exists():
        events, *rest = pickle.loads(file.read_bytes())  # our own file
        return Program([Event(*event) for event in events], *rest)
    made: Program = make()
    cache.mkdir(parents=True, exist_ok=True)
    file.write_bytes(pickle.dumps(([tuple(event) for event in made.events], *made[1:])))
    return made


def difference(ours: list[Event], theirs: list[Event], context: int) -> str | None:
    """Show where two lists differ first; None where they are equal."""
    for i, (a, b) in enumerate(zip_longest(ours, theirs)):
        if a is None or b is None or a[:2] != b[:2]:
            lines = [f"    first difference at {i:,} of {len(ours):,} estimated, {len(theirs):,} traced"]
            sizes = {number: num_bytes for number, num_bytes, _ in theirs if num_bytes >= 0}
            for j in range(max(i - context, 0), min(i + context + 1, max(len(ours), len(theirs)))):
                shown = []
                for name, events in (("traced   ", theirs), ("estimated", ours)):
                    if j < len(events):
                        number, num_bytes, what = events[j]
                        act = f"+{num_bytes:,}" if num_bytes >= 0 else f"free of {sizes.get(number, 0):,}"
                        shown.append((name, f"#{number} {act:>18} {what}"))
                if len(shown) == 2 and ours[j][:2] == theirs[j][:2]:
                    shown = [("  ", shown[0][1] + " | " + ours[j].what)]
                lines += [f"    {'>' if j == i else ' '} {name} {text}" for name, text in shown]
            return "\n".join(lines)
    return None


def main() -> int:
    """Compare, and say what is equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--config", action="append", default=[], help="a config.json (short: it is run as it is)")
    parser.add_argument("--method", nargs="+", default=["full", "lora", "qlora"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--attention", nargs="+", default=["sdpa"])
    parser.add_argument("--keeps-activations", action="store_true", help="no gradient checkpointing")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a setting; repeatable")
    parser.add_argument("--stack", default="foretune")
    parser.add_argument("--vary", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of the stack profile")
    parser.add_argument("--explain", action="store_true", help="name the tape's operations by their callers")
    parser.add_argument("--context", type=int, default=6)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "foretune-traces")
    arguments = parser.parse_args()
    made_from = hashlib.sha256(b"".join(path.read_bytes() for path in MADE_FROM)).hexdigest()[:12]
    device = DeviceSpec(
        name="test", total_bytes=1 << 42, total_is="given", compute_capability="8.9", has_bf16=True, platform="linux"
    )
    stack = varied(PROFILES[arguments.stack], arguments.vary)
    counts = {"equal": 0, "peaks equal": 0, "compared": 0}
    for name, raw in configs(arguments.types, arguments.config):
        shape = shape_from_config(raw, id="test/model", source="file")
        for attention, method, batch in product(arguments.attention, arguments.method, arguments.batch):
            config = training(arguments, method, batch, attention, stack)
            label = f"{name}: {method}, B = {batch}, {attention}"
            try:
                ours = estimated(config, shape, device, stack, arguments.explain)
            except ForetuneError as error:
                print(f"{label}: not estimated: {str(error).splitlines()[0]}")
                continue
            text = json.dumps([raw, stack.to_dict(), made_from, fingerprint(config)], sort_keys=True)
            key = hashlib.sha256(text.encode()).hexdigest()[:24]
            theirs = kept(arguments.cache, key, partial(traced, config, shape, raw, device, stack))
            if theirs.refusal:
                print(f"{label}: not traced: {theirs.refusal}")
                continue
            counts["compared"] += 1
            found = difference(ours.events, theirs.events, arguments.context)
            counts["equal"] += found is None
            off = [100 * (ours[i] / theirs[i] - 1) for i in (1, 2)]
            counts["peaks equal"] += off == [0, 0]
            if found is None and off == [0, 0]:
                print(f"{label}: equal ({len(ours.events):,} events)")
            else:
                print(f"{label}: DIFFERS; allocated {off[0]:+.4f} %, reserved {off[1]:+.4f} %\n{found}")
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return 0 if counts["equal"] == counts["compared"] else 1


if __name__ == "__main__":
    sys.exit(main())
