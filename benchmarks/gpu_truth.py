"""The real training step on a real GPU beside its trace: peaks by phase, and the allocator's events one by one.

    python benchmarks/gpu_truth.py [--out DIR] [--budget SECONDS] [--only NAME,NAME]
    python benchmarks/gpu_truth.py --dry-run [--capability 9.0] [--only NAME,NAME]

Each configuration runs two updates in a process of its own (gpu_truth_run.py), on random weights; the trace of the
same stack runs beside it without the GPU. Without a GPU this says so and ends. `--dry-run` prints the traces alone.
Needs torch, transformers, peft, msgspec and, for nf4, bitsandbytes; foretune is imported from src/.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

from gpu_truth_events import compare  # noqa: E402

from foretune.errors import ForetuneError  # noqa: E402
from foretune.runtime.libraries import TESTED, require_libraries  # noqa: E402

__all__ = ["CASES", "MODELS", "Case", "main"]

QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 4,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
WIDE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma2",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 256000,
}
PYTHIA: dict[str, Any] = {
    "model_type": "gpt_neox",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "vocab_size": 50304,
    "max_position_embeddings": 8192,
}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
}
MOONLIGHT: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 11264,
    "vocab_size": 163840,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
}
GRANITE_H: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "hidden_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "shared_intermediate_size": 2048,
    "vocab_size": 100352,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 48,
    "mamba_d_state": 128,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
}
LFM2: dict[str, Any] = {
    "model_type": "lfm2",
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "intermediate_size": 6656,
    "vocab_size": 65536,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention"],
}
SEVEN: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
MODELS = {
    "qwen2.5-0.5b": QWEN,
    "llama-3.2-1b": LLAMA,
    "llama-3.1-8b": WIDE,
    "gemma-2-2b": GEMMA,
    "pythia-1.4b": PYTHIA,
    "qwen3-30b-a3b": QWEN3_MOE,
    "moonlight-16b-a3b": MOONLIGHT,
    "granite-4.0-h-350m": GRANITE_H,
    "lfm2-350m": LFM2,
    "qwen2.5-7b": SEVEN,
}
"""The published widths with two or four layers: large-pool segments are exercised, and it stays short; one is whole."""


class Case(NamedTuple):
    """A configuration: settings by name of the contract."""

    name: str
    model: str
    dtype: str
    fields: dict[str, Any]
    is_padded: bool = False
    """The model is called with a mask of ones and zeros, as the stock Trainer calls it."""
    is_expandable: bool = False
    """The allocator has expandable segments."""
    accumulation_steps: int = 1
    needs: str | None = None
    """A library beside torch, transformers and peft."""
    tokens: int = 1024
    """In each of the two rows."""
    run: int = 1
    """In which of this script's runs it was measured first."""


LORA: dict[str, Any] = {"lora": {"rank": 16}}
KEPT: dict[str, Any] = {"gradient_checkpointing": False}
CASES = [
    Case("lora", "qwen2.5-0.5b", "bf16", LORA),
    Case("lora-kept", "llama-3.2-1b", "bf16", {**LORA, **KEPT}),
    Case("full-foreach", "qwen2.5-0.5b", "bf16", {"optimizer": {"implementation": "foreach"}}),
    Case("full-fused", "llama-3.2-1b", "bf16", {"optimizer": {"implementation": "fused"}}),
    Case("lora-padded", "llama-3.2-1b", "bf16", LORA, is_padded=True),
    Case("lora-chunked", "llama-3.1-8b", "bf16", {**LORA, "loss": "chunked"}),
    Case("qlora", "llama-3.1-8b", "bf16", {**LORA, "quantization": {"scheme": "nf4"}}, needs="bitsandbytes"),
    Case("lora-expandable", "qwen2.5-0.5b", "bf16", LORA, is_expandable=True),
    Case("lora-eager", "gemma-2-2b", "bf16", {**LORA, "attention": "eager"}),
    Case("full-fp32", "llama-3.2-1b", "fp32", {}),
    Case("lora-accumulated", "qwen2.5-0.5b", "bf16", {"lora": {"rank": 16, "dropout": 0.1}}, accumulation_steps=2),
    Case("lora-fp16", "llama-3.2-1b", "fp16", LORA),
    Case("lora-wide", "llama-3.1-8b", "bf16", LORA),
    Case("moe-lora", "qwen3-30b-a3b", "bf16", LORA, run=2),
    Case("hybrid-lora", "granite-4.0-h-350m", "bf16", LORA, run=2),
    Case("norms-full", "pythia-1.4b", "bf16", {}, run=2),
    Case("latent-lora", "moonlight-16b-a3b", "bf16", LORA, run=2),
    Case("moe-full", "qwen3-30b-a3b", "bf16", {}, run=2),
    Case(
        "moe-qlora", "qwen3-30b-a3b", "bf16", {**LORA, "quantization": {"scheme": "nf4"}}, needs="bitsandbytes", run=2
    ),
    Case("full-long", "qwen2.5-0.5b", "bf16", {}, tokens=2048, run=2),
    Case("full-8bit", "llama-3.2-1b", "bf16", {"optimizer": {"name": "adamw_8bit"}}, needs="bitsandbytes", run=2),
    Case("dora", "llama-3.2-1b", "bf16", {"lora": {"rank": 16, "use_dora": True}}, run=2),
    Case("saved-head", "llama-3.1-8b", "bf16", {"lora": {"rank": 16, "modules_to_save": ["lm_head"]}}, run=2),
    Case("conv-lora", "lfm2-350m", "bf16", LORA, run=2),
    Case("hybrid-full", "granite-4.0-h-350m", "bf16", {}, run=2),
    Case("whole-qlora", "qwen2.5-7b", "bf16", {**LORA, "quantization": {"scheme": "nf4"}}, needs="bitsandbytes", run=2),
    Case("whole-lora", "qwen2.5-7b", "bf16", {**LORA, "loss": "chunked"}, run=2),
]
"""In the order of what is missed most where time runs out."""

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
SHORTEST_SECONDS = 10.0
"""With less left no further configuration is begun."""
MIB = 1 << 20


class Arguments(argparse.Namespace):
    """The command line."""

    out: Path | None
    budget: float
    limit: float
    only: str | None
    dry_run: bool
    capability: str


def parse(arguments: Sequence[str] | None) -> Arguments:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for results.jsonl and summary.txt; without it only print")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds in all (default 300)")
    parser.add_argument("--limit", type=float, default=75.0, help="seconds for one configuration (default 75)")
    parser.add_argument("--only", help=f"names, comma-separated: {', '.join(case.name for case in CASES)}")
    parser.add_argument("--dry-run", action="store_true", help="trace only, without a GPU")
    parser.add_argument("--capability", default="9.0", help="compute capability of a dry run (default 9.0)")
    return parser.parse_args(arguments, Arguments())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 1 where a configuration failed."""
    asked = parse(arguments)
    names = {name.strip() for name in asked.only.split(",")} if asked.only else {case.name for case in CASES}
    unknown = names - {case.name for case in CASES}
    if unknown:
        sys.exit(f"There is no configuration {', '.join(sorted(unknown))}.")
    cases = [case for case in CASES if case.name in names]
    deadline = time.monotonic() + asked.budget
    with tempfile.TemporaryDirectory() as folder:
        if asked.dry_run:
            device = {"name": "a GPU", "compute_capability": asked.capability, "total_bytes": 80 << 30}
            return dry_run(cases, device, Path(folder), deadline)
        machine = probe(Path(folder))
        if "device" not in machine:
            print(f"No GPU: {machine['because']}. Nothing is measured; --dry-run traces without one.")
            return 0
        return measure_all(cases, machine, asked, Path(folder), deadline)


# -- processes
def child(words: Iterable[str], log: Path, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start gpu_truth_run.py; what it says goes to a file."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **variables}
    with log.open("ab") as stream:
        command = [sys.executable, str(HERE / "gpu_truth_run.py"), *words]
        return subprocess.Popen(command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, env=environment)


def wait(process: subprocess.Popen[bytes], seconds: float) -> str | None:
    """Wait for a child. Returns why it gave nothing; None where it ended well."""
    try:
        code = process.wait(max(seconds, 0.1))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"stopped after {seconds:.0f} s"
    return None if code == 0 else f"ended with {code}"


def tail(log: Path, num_characters: int = 3000) -> str:
    """The end of what a child said."""
    return log.read_text(errors="replace")[-num_characters:] if log.exists() else ""


def probe(folder: Path) -> dict[str, Any]:
    """Ask a child for the versions and the GPU; without one `because` says why."""
    found, log = folder / "probe.json", folder / "probe.log"
    failed = wait(child(["probe", "--out", str(found)], log, {}), 120)
    if failed or not found.exists():
        last = (tail(log).strip().splitlines() or ["it said nothing"])[-1]
        return {"because": f"the probe {failed or 'gave nothing'} ({last[:200]})"}
    machine: dict[str, Any] = json.loads(found.read_text())
    return machine


class Tracer:
    """A process without the GPU that traces one configuration after the other; a dead one is replaced."""

    def __init__(self, cases: list[Case], device: dict[str, Any], folder: Path) -> None:
        self.left = [case.name for case in cases]
        self.found: dict[str, dict[str, Any]] = {}
        self.device, self.lines, self.log = json.dumps(device), folder / "traces.jsonl", folder / "traces.log"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.lines.write_bytes(b"")
        words = ["trace", *self.left, "--device", self.device, "--out", str(self.lines)]
        return child(words, self.log, {"CUDA_VISIBLE_DEVICES": ""})

    def prediction(self, name: str, deadline: float) -> dict[str, Any]:
        """Wait for one; what failed has `error`."""
        while name not in self.found:
            has_ended = self.process.poll() is not None
            self._read()
            if name in self.found:
                break
            if time.monotonic() > deadline:
                return {"error": "not traced in time"}
            if has_ended and self.left:
                broken = self.left.pop(0)
                self.found[broken] = {"error": f"the tracer ended with {self.process.returncode}: {tail(self.log)}"}
                self.process = self._start()
            time.sleep(0.1)
        return self.found[name]

    def _read(self) -> None:
        for line in self.lines.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                made = json.loads(line)
                if made["name"] in self.left:
                    self.left.remove(made["name"])
                    self.found[made["name"]] = made

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


# -- the two runs
def dry_run(cases: list[Case], device: dict[str, Any], folder: Path, deadline: float) -> int:
    """Print a trace of each configuration."""
    print(f"Traced for compute capability {device['compute_capability']} on {stack_line()}")
    print(f"{'configuration':18}{'allocated':>12}{'reserved':>12}  MiB (traced)")
    tracer, num_failed = Tracer(cases, device, folder), 0
    try:
        for case in cases:
            if missing(case):
                print(f"{case.name:18}not run: {case.needs} is not installed")
                continue
            made = tracer.prediction(case.name, deadline)
            if "error" in made:
                num_failed += 1
                print(f"{case.name:18}failed: {made['error']}")
                continue
            figures = f"{mib(made['allocated_bytes']):>12}{mib(made['reserved_bytes']):>12}"
            print(f"{case.name:18}{figures}  {made['peak_phase']}; {made['attention_kernel']}", flush=True)
    finally:
        tracer.stop()
    return int(num_failed > 0)


def measure_all(cases: list[Case], machine: dict[str, Any], asked: Arguments, folder: Path, deadline: float) -> int:
    """Measure each configuration while the tracer works beside it; write each result at once."""
    machine["stack"], machine["remarks"] = stack_line(), outside_tested()
    say = Report(asked.out, machine)
    tracer, num_failed = Tracer([case for case in cases if not missing(case)], machine["device"], folder), 0
    try:
        for case in cases:
            left = deadline - time.monotonic()
            if missing(case) or left < SHORTEST_SECONDS:
                why = f"{case.needs} is not installed" if missing(case) else "no time left"
                say.row({"name": case.name, "not_run": why})
                continue
            row: dict[str, Any] = {
                "name": case.name,
                "model": MODELS[case.model],
                "case": case._asdict(),
                "machine": machine,
            }
            row["measured"] = measure(case, folder, min(asked.limit, left))
            # The trace began earlier and needs less time: this waits only where something is wrong.
            row["traced"] = tracer.prediction(case.name, min(deadline, time.monotonic() + 30))
            num_failed += "error" in row["measured"] or "error" in row["traced"]
            row["compared"] = compared(row)
            say.row(row)
    finally:
        tracer.stop()
    return int(num_failed > 0)


def measure(case: Case, folder: Path, seconds: float) -> dict[str, Any]:
    """Run one configuration on the GPU; what failed has `error`."""
    found, log = folder / f"{case.name}.json", folder / f"{case.name}.log"
    variables = {}
    if case.is_expandable:
        variables = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
    failed = wait(child(["measure", case.name, "--out", str(found)], log, variables), seconds)
    if failed or not found.exists():
        return {"error": f"{failed or 'gave nothing'}: {tail(log)}"}
    made: dict[str, Any] = json.loads(found.read_text())
    return made


def compared(row: dict[str, Any]) -> dict[str, Any] | None:
    """Hold the measured beside the traced; a mistake in here must not cost the measurement."""
    if "error" in row["measured"] or "error" in row["traced"]:
        return None
    try:
        return compare(row["measured"], row["traced"], is_expandable=row["case"]["is_expandable"])
    except Exception:
        return {"error": traceback.format_exc()}


# -- words
def missing(case: Case) -> bool:
    """Say whether a library that the configuration needs is not there."""
    from foretune.runtime.libraries import installed_versions

    return case.needs is not None and installed_versions()[case.needs] is None


def stack_line() -> str:
    """Name the libraries and their versions."""
    from foretune.runtime.libraries import installed_versions

    found = installed_versions()
    return ", ".join(f"{name} {found[name] or 'not installed'}" for name in LIBRARIES)


def outside_tested() -> list[str]:
    """Say which libraries foretune was not tested with; they are measured all the same."""
    remarks = []
    for name in LIBRARIES:
        try:
            require_libraries(name)
        except ForetuneError:
            remarks.append(f"{name} is missing or outside the tested range {TESTED[name]}")
    return remarks


def mib(num_bytes: float) -> str:
    """Bytes as MiB."""
    return f"{num_bytes / MIB:,.1f}"


class Report:
    """Prints as it goes, and writes both files anew with each row."""

    def __init__(self, out: Path | None, machine: dict[str, Any]) -> None:
        self.out, self.texts = out, [json.dumps(machine, indent=1)]
        self.details: list[str] = []
        heads = (
            "measured",
            "traced",
            "error",
            "measured",
            "traced",
            "error",
            "replayed",
            "context",
            "events",
            "differ",
        )
        title = f"{'configuration':18}" + "".join(f"{head:>11}" for head in heads) + "  first difference"
        self.texts += ["MiB: allocated (measured, traced), reserved (the same; replayed: the allocator's model on the"]
        self.texts += ["measured events), context outside the allocator; events that differ, of all that were measured"]
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / "results.jsonl").write_bytes(b"")
        self.add(title)
        print("\n".join(self.texts), flush=True)

    def add(self, text: str) -> None:
        """Keep a line of the table."""
        self.texts.append(text)
        if self.out is not None:
            (self.out / "summary.txt").write_text("\n".join([*self.texts, "", *self.details]) + "\n")

    def row(self, row: dict[str, Any]) -> None:
        """Print and write one configuration."""
        if self.out is not None:
            with (self.out / "results.jsonl").open("a") as stream:
                stream.write(json.dumps(row, separators=(",", ":")) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        self.details += details_of(row)
        line = line_of(row)
        self.add(line)
        print(line, flush=True)


def line_of(row: dict[str, Any]) -> str:
    """The table's line."""
    name = f"{row['name']:18}"
    if "not_run" in row:
        return f"{name}not run: {row['not_run']}"
    for side in ("measured", "traced"):
        if "error" in row[side]:
            words = row[side]["error"].strip().splitlines()
            return f"{name}{side} failed: {words[0][:80]} ... {words[-1][:160]}"
    result = row["compared"]
    if "error" in result:
        return f"{name}not compared: {result['error'].strip().splitlines()[-1][:160]}"
    cells = []
    for kind in ("allocated", "reserved"):
        measured, traced = result[f"measured_{kind}_bytes"], result[f"traced_{kind}_bytes"]
        cells += [mib(measured), mib(traced), f"{100 * (traced / measured - 1):+.3f}%"]
    cells += [mib(result["replayed_reserved_bytes"]), mib(result["context_bytes"])]
    cells += [f"{result['num_events']:,}", f"{result['num_different']:,}"]
    return name + "".join(f"{cell:>11}" for cell in cells) + f"  {result['first_difference'] or 'none'}"


def details_of(row: dict[str, Any]) -> list[str]:
    """Phases, the surroundings of the first difference, and the largest allocations that one side lacks."""
    lines = [f"== {row['name']}"]
    for side in ("measured", "traced"):
        if "error" in row.get(side, {}):
            lines += [f"{side} failed:", row[side]["error"]]
    result = row.get("compared")
    if not result:
        return lines
    if "error" in result:
        return [*lines, result["error"]]
    lines.append(f"attention: {row['measured']['attention']} (measured), {row['traced']['attention_kernel']} (traced)")
    lines.append(
        "phase (MiB, measured and traced: allocated peak, reserved peak, allocated at its end, reserved at its"
    )
    lines.append("end; then the reserved peak by the allocator's model on the measured events, and events that differ)")
    for phase in result["phases"]:
        pairs = (f"{mib(phase[key]):>11}" for key in phase if key.endswith("_bytes"))
        lines.append(f"{phase['phase']:20}" + "".join(pairs) + f"{phase['num_different']:>8}")
    lines += ["around the first difference (measured | traced):", *result["around"]]
    for key in ("lacking_in_trace", "lacking_in_measured"):
        lines += [f"{key}:", *(f"  {size:>14,} {phase}: {what}" for size, phase, what in result[key])]
    return lines


if __name__ == "__main__":
    sys.exit(main())
