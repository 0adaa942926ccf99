"""How far a process grows in a fine-tune on a CPU, beside what the trace says: `python benchmarks/cpu_growth.py`.

Each run has a process of its own with one thread: imports, then a model loaded from safetensors by
`AutoModelForCausalLM.from_pretrained`, then foretune's own step on random tokens. The growth is the peak of the
resident set (VmHWM, reset by /proc/self/clear_refs) minus what was resident after imports. Linux only. Models are
random and of SmolLM2-135M's shape, or smaller with `--small`; they are written to a folder of `--cache`.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LORA: dict[str, Any] = {"lora": {"rank": 8}}
DROPOUT: dict[str, Any] = {"lora": {"rank": 16, "dropout": 0.05}}
KEPT: dict[str, Any] = {"gradient_checkpointing": False}
CHUNKED: dict[str, Any] = {"loss": "chunked"}
EAGER: dict[str, Any] = {"attention": "eager"}
SGD: dict[str, Any] = {"optimizer": {"name": "sgd"}}
FOREACH: dict[str, Any] = {"optimizer": {"implementation": "foreach"}}
ROWS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "lora 1x128": (1, 128, 1, LORA),
    "lora 2x256": (2, 256, 1, LORA),
    "lora 2x256 chunked": (2, 256, 1, {**LORA, **CHUNKED}),
    "lora 1x512 kept": (1, 512, 1, {**LORA, **KEPT}),
    "lora 1x512 kept eager": (1, 512, 1, {**LORA, **KEPT, **EAGER}),
    "lora 4x256 kept chunked": (4, 256, 1, {**LORA, **KEPT, **CHUNKED}),
    "lora 2x512 twice, dropout": (2, 512, 2, DROPOUT),
    "full 1x128": (1, 128, 1, {}),
    "full 2x256": (2, 256, 1, {}),
    "full 2x256 chunked": (2, 256, 1, CHUNKED),
    "full 2x256 sgd": (2, 256, 1, SGD),
    "full 1x256 kept sgd": (1, 256, 1, {**KEPT, **SGD}),
    "full 1x256 foreach": (1, 256, 1, FOREACH),
    "full 1x256 twice, eager": (1, 256, 2, EAGER),
    "full 1x512 kept chunked": (1, 512, 1, {**KEPT, **CHUNKED}),
}
"""Rows, tokens of each, microsteps, and settings."""
SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
SMALL = {**SMOLLM2, "num_hidden_layers": 8, "vocab_size": 16384}


def main() -> int:
    """Run each row in a process of its own and print a line of JSON for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="Rows to run; all where none is named.")
    parser.add_argument("--small", action="store_true", help="A model of eight layers.")
    parser.add_argument("--bf16", action="store_true", help="The checkpoint is in bfloat16.")
    parser.add_argument("--cache", type=Path, default=Path("build/cpu-growth"))
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(grow(**json.loads(given.child))))
        return 0
    folder = checkpoint(given.cache, SMALL if given.small else SMOLLM2, "bfloat16" if given.bf16 else "float32")
    for row in rows(folder, given.only or list(ROWS), given.updates):
        print(json.dumps(row), flush=True)
    return 0


def rows(folder: Path, names: list[str], updates: int) -> Iterator[dict[str, Any]]:
    """Yield each row's predicted and measured growth."""
    from foretune.api import build_config, trace
    from foretune.models import shape_from_config

    raw = json.loads((folder / "config.json").read_text())
    shape = shape_from_config(raw, id="random", source="file")
    for name in names:
        fields = fields_of(name)
        predicted = trace(build_config(fields).config, shape=shape, raw_config=raw).answer.estimate
        child = json.dumps({"folder": str(folder), "name": name, "updates": updates})
        command = [sys.executable, __file__, "--child", child]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        measured = json.loads(done.stdout.splitlines()[-1])["growth_bytes"]
        yield {
            "name": name,
            "tensor_bytes": predicted.allocated_bytes,
            "predicted_bytes": predicted.reserved_bytes,
            "measured_bytes": measured,
            "measured_is_percent_off": round(100 * (measured / predicted.reserved_bytes - 1), 1),
        }


def fields_of(name: str) -> dict[str, Any]:
    """Return a row's configuration."""
    micro_batch, length, microsteps, more = ROWS[name]
    batch = {"micro_batch_size": micro_batch, "sequence_length": length, "accumulation_steps": microsteps}
    return {"model": {"id": "random"}, "device": "cpu", "precision": {"dtype": "fp32"}, "batch": batch, **more}


def checkpoint(cache: Path, config: dict[str, Any], dtype: str) -> Path:
    """Write a random model once."""
    folder = cache / f"{config['num_hidden_layers']}-layers-{dtype}"
    if not (folder / "model.safetensors").exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        LlamaForCausalLM(LlamaConfig(**config)).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def grow(folder: str, name: str, updates: int) -> dict[str, int]:
    """Train in this process; return how far it grew."""
    import peft  # noqa: F401 - before the reading, as everything that is imported
    import torch
    from transformers import AutoModelForCausalLM

    from foretune.api import build_config
    from foretune.memory.figures import facts_of
    from foretune.models import shape_from_config
    from foretune.runtime.adapters import attach_adapters
    from foretune.runtime.checkpointing import enable_checkpointing
    from foretune.runtime.optimizer import make_optimizer
    from foretune.runtime.step import TrainingStep
    from foretune.runtime.update import Batch, run_update

    torch.set_num_threads(1)
    config = build_config(fields_of(name)).config
    shape = shape_from_config(json.loads(Path(folder, "config.json").read_text()), id="random", source="file")
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=config.attention, local_files_only=True
    )
    step = TrainingStep(model, model, is_chunked=config.loss == "chunked")
    if config.lora is not None:
        step.model = attach_adapters(model, config.lora, [part.name for part in facts_of(config, shape).adapted])
    if config.gradient_checkpointing:
        enable_checkpointing(model)
    step.train()
    trained = [parameter for parameter in step.model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(config.optimizer, trained)
    size = config.batch.micro_batch_size, config.batch.sequence_length
    for _ in range(updates):
        batches = (
            Batch(torch.randint(shape.vocab_size, size), torch.randint(shape.vocab_size, size))
            for _ in range(config.batch.accumulation_steps)
        )
        run_update(step, batches, size[0] * size[1], optimizer, config.optimizer, trained)
    return {"growth_bytes": resident("VmHWM") - before}


def resident(field: str) -> int:
    """Read a figure of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    sys.exit(main())
