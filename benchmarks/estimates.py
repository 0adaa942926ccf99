"""Wall time of estimates in one process: recording, replay, the walk, and the slowest valid inputs.

    python benchmarks/estimates.py [REPEATS]

The ratio is to a fixed amount of work in pure Python in the same run, so that machines can be compared.
"""

import random
import sys
import time
from collections.abc import Callable
from typing import Any

from foretune.contract import TrainingConfig, build_config
from foretune.memory import FORETUNE, estimate_memory
from foretune.memory.estimate import record
from foretune.models import ModelShape, resolve_model, shape_from_config

DEEP: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 512,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LONG = ["batch.sequence_length=131072", "batch.accumulation_steps=8", "loss=chunked"]
EAGER = "attention=eager"
ACCUMULATED = ["batch.accumulation_steps=8"]
KINDS = random.Random(0).choices(["sliding_attention", "full_attention"], k=512)
IRREGULAR: dict[str, Any] = {**DEEP, "model_type": "qwen3", "sliding_window": 512, "layer_types": KINDS}
PER_FAMILY = {
    "gemma": "google/gemma-2b",
    "gemma2": "google/gemma-2-2b",
    "mistral": "mistralai/Mistral-7B-v0.3",
    "olmo2": "allenai/OLMo-2-1124-7B",
    "qwen2": "Qwen/Qwen2.5-7B",
    "qwen3": "Qwen/Qwen3-8B",
    "smollm3": "HuggingFaceTB/SmolLM3-3B",
}


def best_ms(function: Callable[[], object], repeats: int) -> float:
    """Return the smallest wall time of a call, in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def yardstick() -> int:
    """A million additions."""
    total = 0
    for number in range(1_000_000):
        total += number
    return total


def config(method: str, overrides: list[str]) -> TrainingConfig:
    """A configuration as the command line makes it."""
    return build_config({"model.id": "a/model"}, overrides=overrides, method=method).config


def main() -> None:
    """Print a row for each."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    unit = best_ms(yardstick, repeats)
    print(f"a million additions: {unit:.1f} ms (measured, smallest of {repeats})")
    llama = resolve_model("meta-llama/Llama-3.1-8B", offline=True)
    deep = shape_from_config(DEEP, id="512 layers", source="file")
    irregular = shape_from_config(IRREGULAR, id="512 irregular layers", source="file")
    gemma = resolve_model("google/gemma-3-1b-pt", offline=True)
    walk = record(config("lora", []), llama, None, FORETUNE)[0]
    rows: list[tuple[str, float, Callable[[], object]]] = [
        ("requested bytes of 32 layers, templates there", 2, walk.requested_peak),
        ("estimate, 32 layers, lora", 60, estimate(llama, "lora", [])),
        ("estimate, 32 layers, qlora", 60, estimate(llama, "qlora", [])),
        ("estimate, 26 layers in periods of six, lora", 500, estimate(gemma, "lora", [])),
        ("estimate, the same, qlora, eager, accumulated", 500, estimate(gemma, "qlora", [*ACCUMULATED, EAGER])),
        ("estimate, 512 layers of two kinds, lora", 500, estimate(irregular, "lora", [])),
        ("estimate, the same, qlora, accumulated", 500, estimate(irregular, "qlora", ACCUMULATED)),
        ("estimate, 32 layers, qlora, 131,072 tokens, chunked", 500, estimate(llama, "qlora", LONG)),
        ("estimate, 512 layers, full", 500, estimate(deep, "full", [])),
        ("estimate, 512 layers, qlora, 131,072 tokens, chunked", 500, estimate(deep, "qlora", LONG)),
    ]
    for name, model in PER_FAMILY.items():
        shape, overrides = resolve_model(model, offline=True), [EAGER] if name == "gemma2" else []
        for method in ("lora", "qlora"):
            rows.append(
                (f"estimate, {name}, {shape.num_layers} layers, {method}", 60, estimate(shape, method, overrides))
            )
    for name, budget, function in rows:
        took = best_ms(function, repeats)
        mark = "" if took <= budget else "  OVER BUDGET"
        print(f"{took:8.2f} ms  {took / unit:6.2f}x  {budget:4.0f} ms  {name}{mark}")


def estimate(shape: ModelShape, method: str, overrides: list[str]) -> Callable[[], object]:
    """An estimate to time."""
    request = config(method, overrides)
    return lambda: estimate_memory(request, shape)


if __name__ == "__main__":
    main()
