"""What the tests of this room share: golden rows as configurations, and recordings of all layers."""

import json
from pathlib import Path
from typing import Any

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec
from foretune.memory.estimate import record
from foretune.memory.figures import facts_of, kernels_for
from foretune.memory.program import record_tape
from foretune.memory.stack import FORETUNE, StackProfile
from foretune.memory.tape import Tape
from foretune.memory.templates import Recording, StandIns
from foretune.models import ModelShape, shape_from_config

GOLDEN = Path(__file__).parents[1] / "golden"

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
    "tie_word_embeddings": False,
}


def golden(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (GOLDEN / name).read_text().splitlines()]


def shape_of(config: dict[str, Any], **changes: Any) -> ModelShape:
    return shape_from_config({**config, **changes}, id="test/model", source="file")


def config_of(run: dict[str, Any]) -> TrainingConfig:
    """A row of traces.jsonl as a configuration."""
    fields: dict[str, Any] = {
        "model": {"id": "test/model"},
        "precision": {"dtype": run["dtype"]},
        "gradient_checkpointing": run["checkpointing"],
        "attention": run.get("attention", "sdpa"),
        "loss": run.get("loss", "stock"),
        "batch": {
            "micro_batch_size": run["B"],
            "sequence_length": run["S"],
            "accumulation_steps": run.get("accum", 1),
        },
        "optimizer": {"name": "adamw", "implementation": "foreach", "max_grad_norm": None},
    }
    if run["method"] != "full":
        fields["lora"] = {"rank": run["rank"], "targets": run["targets"], "dropout": run.get("dropout", 0.0)}
    if run["method"] == "qlora":
        fields["quantization"] = {"scheme": "nf4", "double_quant": run.get("double_quant", True)}
    return TrainingConfig.create(**fields)


def device_for(run: dict[str, Any]) -> DeviceSpec:
    capability = "8.9" if run.get("flash", True) else "8.9-windows"
    platform = "windows" if capability.endswith("windows") else "linux"
    return DeviceSpec(
        name="test", total_bytes=1 << 40, total_is="given", compute_capability="8.9", has_bf16=True, platform=platform
    )


def all_layers(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None = None, stack: StackProfile = FORETUNE
) -> tuple[Tape, StandIns]:
    """Record every layer, without templates."""
    adapted = facts_of(config, shape).adapted
    stand_ins = StandIns.all_of(shape.num_layers)
    return record_tape(
        config, shape, stack.on(device), kernels_for(config, shape, device, stack), adapted, stand_ins
    ), stand_ins


def templated(config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None = None) -> Recording:
    return record(config, shape, device, FORETUNE)[0]
