"""Write what benchmarks/gpu_truth.py measured as observations, and what was traced beside it as predictions.

    python scripts/gpu_observations.py RESULTS.jsonl OBSERVATIONS.jsonl BLIND.jsonl

OBSERVATIONS has the public form (docs/observations.md); `scripts/observations.py` takes it beside other files. BLIND
holds the traces of the same process of measuring: they were made before anything was known of what they are held
against.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_truth import Case  # noqa: E402
from gpu_truth_run import config_of, shape_of  # noqa: E402

from foretune.contract import TrainingConfig  # noqa: E402
from foretune.models import resolve_targets  # noqa: E402

SOURCE = {
    "name": "foretune-gpu-truth",
    "where": "benchmarks/gpu_truth.py, first run, before any rule was changed by it",
    "licence": "Apache-2.0",
}
WHOSE = {
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "gemma-2-2b": "google/gemma-2-2b",
}
"""The checkpoint whose widths a model of the benchmark has."""
OPTIMIZERS = {("adamw", "foreach"): "adamw_torch", ("adamw", "fused"): "adamw_torch_fused"}
LOSSES = {"stock": "stock", "chunked": "foretune_chunked"}


def observation_of(result: dict[str, Any]) -> dict[str, Any]:
    """Return one result in the public form."""
    case = Case(**result["case"])
    config = config_of(case)
    layers = result["model"]["num_hidden_layers"]
    return {
        "id": row_id(case),
        "source": SOURCE,
        "grade": "A",
        "kind": "train_peak",
        "outcome": "ok",
        "group": f"foretune-gpu-truth|{case.name}",
        "model": {"id": f"{WHOSE[case.model]} ({layers} layers)", "config": result["model"]},
        "training": training_of(case, config),
        "software": software_of(case, result["machine"]),
        "device": device_of(result["machine"]["device"]),
        "measured": measured_of(result["measured"]),
        "assumed": [],
    }


def row_id(case: Case) -> str:
    """Name a configuration of the first run."""
    return f"foretune-gpu-truth-1-{case.name}"


def training_of(case: Case, config: TrainingConfig) -> dict[str, Any]:
    """Return a configuration's settings in the words of the public form."""
    optimizer, quantization = config.optimizer, config.quantization
    compute = config.precision.dtype if quantization is None else quantization.compute_dtype_for(config.precision)
    training: dict[str, Any] = {
        "method": config.method,
        "base_dtype": config.precision.dtype,
        "quantization": "none",
        "kbit_upcast": False,
        "compute_dtype": compute,
        "autocast": "none",
        "lora": None,
        "optimizer": OPTIMIZERS[optimizer.name, optimizer.kernel or ""],
        "optimizer_foreach": optimizer.kernel == "foreach",
        "grad_clip": optimizer.max_grad_norm,
        "seq_len": config.batch.sequence_length,
        "micro_batch_size": config.batch.micro_batch_size,
        "gradient_accumulation_steps": config.batch.accumulation_steps,
        "gradient_checkpointing": "non_reentrant" if config.gradient_checkpointing else "none",
        "attention": config.attention,
        "loss": LOSSES[config.loss],
        "packing": False,
        "parallel": {"strategy": "single", "world_size": 1, "cpu_offload": False},
    }
    if quantization is not None:
        training["quantization"] = "nf4_double_quant" if quantization.uses_double_quant else "nf4"
    if config.lora is not None:
        targets = [projection.name.rpartition(".")[2] for projection in resolve_targets(shape_of(case), "all-linear")]
        training["adapter_dtype"] = config.precision.adapter_dtype
        training["lora"] = {
            "rank": config.lora.rank,
            "alpha": config.lora.alpha,
            "dropout": config.lora.dropout,
            "target_modules": list(dict.fromkeys(targets)),
            "modules_to_save": [],
        }
    if case.is_padded:
        training["padding_mask"] = True
    return training


def software_of(case: Case, machine: dict[str, Any]) -> dict[str, Any]:
    """Name the training loop and the libraries."""
    versions = machine["versions"]
    software = {"driver": "foretune", "os": "linux"}
    software |= {name: versions[name] for name in ("torch", "transformers", "peft", "bitsandbytes")}
    software["torch"] += f"+cu{machine['cuda'].replace('.', '')}"
    if case.is_expandable:
        software["allocator_conf"] = "expandable_segments:True"
    return software


def device_of(device: dict[str, Any]) -> dict[str, Any]:
    """Name the GPU."""
    return {
        "name": device["name"],
        "count": 1,
        "memory_total_bytes": device["total_bytes"],
        "memory_source": "measured",
        "compute_capability": device["compute_capability"],
    }


def measured_of(measured: dict[str, Any]) -> dict[str, Any]:
    """Return the peaks over all and by phase, and what the device held outside the allocator."""
    phases: dict[str, int] = {}
    for phase in measured["phases"]:
        phases[phase["phase"]] = max(phases.get(phase["phase"], 0), phase["allocated_peak_bytes"])
    reserved = max(phase["reserved_peak_bytes"] for phase in measured["phases"])
    return {
        "peak_allocated_bytes": max(phases.values()),
        "peak_reserved_bytes": reserved,
        "process_bytes": reserved + measured["context_bytes"],
        "context_bytes": measured["context_bytes"],
        "scope": "load_and_train",
        "phases": phases,
        "phase_kind": "peak_within_phase",
    }


def blind_lines(results: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what was traced: a line about all, then one a configuration."""
    libraries = {name: results[0]["machine"]["versions"][name] for name in ("torch", "transformers", "peft")}
    yield {"engine": "traced", "where": SOURCE["where"], "libraries": libraries, "rows": len(results)}
    for result in results:
        figures = {key: result["traced"][key] for key in ("allocated_bytes", "reserved_bytes")}
        yield {"id": row_id(Case(**result["case"])), **figures}


def main() -> int:
    """Convert a file of results."""
    source, observations, blind = (Path(name) for name in sys.argv[1:4])
    results = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    results = [result for result in results if "not_run" not in result]
    for target, lines in ((observations, map(observation_of, results)), (blind, blind_lines(results))):
        target.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    print(f"{len(results)} configurations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
