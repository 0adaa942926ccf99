"""What the tests of this room share: golden rows as configurations, and recordings of all layers."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec
from foretune.memory.estimate import record
from foretune.memory.figures import facts_of, kernels_for
from foretune.memory.program import record_tape
from foretune.memory.stack import FORETUNE, PROFILES, StackProfile
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
            "packing": run.get("packing", False),
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


def templated(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None = None, stack: StackProfile = FORETUNE
) -> Recording:
    return record(config, shape, device, stack)[0]


def canonical(tape: Tape) -> list[list[int]]:
    """The tape's events with births numbered in order; emptying the cache is not an allocation."""
    names: dict[int, int] = {}
    out = []
    for slot, num_bytes in tape.events:
        if num_bytes == -2:
            continue
        if num_bytes >= 0:
            names[slot] = len(names)
        out.append([names[slot], num_bytes if num_bytes >= 0 else -1])
    return out


class StackRun(NamedTuple):
    """One way to train on one stack."""

    name: str
    stack: StackProfile
    settings: dict[str, Any]
    model: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def model_of(self, num_layers: int) -> dict[str, Any]:
        if "n_layer" in self.model:
            return {**self.model, "n_layer": num_layers}
        return {**SMALL, **self.model, "num_hidden_layers": num_layers}

    @property
    def config(self) -> TrainingConfig:
        fields: dict[str, Any] = {"batch": {"micro_batch_size": 2, "sequence_length": 96}, **self.settings}
        optimizer = {"max_grad_norm": None, **fields.pop("optimizer", {})}
        precision = {"dtype": "bf16", **fields.pop("precision", {})}
        return TrainingConfig.create(model={"id": "test/model"}, optimizer=optimizer, precision=precision, **fields)


LORA: dict[str, Any] = {"lora": {"rank": 4, "dropout": 0.1}}
QLORA: dict[str, Any] = {**LORA, "quantization": {"compute_dtype": "bf16"}}
IN_FP32: dict[str, Any] = {"precision": {"dtype": "fp32"}}
FMS, FMS_OLD, PLAIN_TRAINER, LOOP = (PROFILES[name] for name in ("fms-4.48", "fms-4.45", "trainer", "manual-loop"))
AUTOCAST = FMS.with_(autocast="bf16")
GEMMA2: dict[str, Any] = {"model_type": "gemma2", "head_dim": 64, "sliding_window": 32}
FALCON: dict[str, Any] = {"model_type": "falcon", "bias": False, "alibi": False, "new_decoder_architecture": False}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 256, "n_head": 4, "n_layer": 3, "vocab_size": 2000}

STACK_RUNS = (
    StackRun("reentrant", FMS, LORA),
    StackRun("reentrant, all weights", FMS, {}),
    StackRun("reentrant, a layer that returns a pair", FMS, LORA, FALCON),
    StackRun("autocast of bf16 weights", AUTOCAST, LORA),
    StackRun("autocast of fp32 weights", AUTOCAST, IN_FP32),
    StackRun("autocast without checkpointing", AUTOCAST, {**IN_FP32, **LORA, "gradient_checkpointing": False}),
    StackRun("autocast, not reentrant", AUTOCAST.with_(checkpoint_form="non-reentrant"), {**IN_FP32, **LORA}),
    StackRun("autocast of 4-bit weights", AUTOCAST.with_(converts_outputs=True), QLORA),
    StackRun("norms in fp32", AUTOCAST.with_(kbit_upcast="norms"), QLORA),
    StackRun("autocast of layer norms", AUTOCAST, LORA, GPT2),
    StackRun("a cache kept though checkpointed", FMS.with_(caches_though_checkpointed=("gpt2",)), LORA, GPT2),
    StackRun("flash-attn", FMS_OLD.with_(autocast="bf16"), {**LORA, "attention": "flash_attention_2"}),
    StackRun("flash-attn repeats heads", FMS_OLD, {"attention": "flash_attention_2"}, {"model_type": "mistral"}),
    StackRun("the loss up to 4.45", FMS_OLD, {}),
    StackRun("Triton's loss", AUTOCAST.with_(loss_kernel="triton"), LORA),
    StackRun("Liger's loss", AUTOCAST.with_(loss_kernel="liger"), {}),
    StackRun("fused norms and rotary", AUTOCAST.with_(fused=("rmsnorm", "rope")), LORA),
    StackRun("fused adapters", AUTOCAST.with_(fused=("rmsnorm", "rope", "lora"), kbit_upcast="norms"), QLORA),
    StackRun("Trainer", PLAIN_TRAINER, LORA),
    StackRun(
        "Trainer, two groups",
        PLAIN_TRAINER,
        {"optimizer": {"implementation": "foreach", "max_grad_norm": 1.0}, "batch": {"accumulation_steps": 4}},
    ),
    StackRun("Trainer, 8-bit", PLAIN_TRAINER, {"optimizer": {"name": "adamw_8bit"}}),
    StackRun("Trainer, eager", PLAIN_TRAINER, {**LORA, "attention": "eager"}, GEMMA2),
    StackRun("Trainer, another name", PLAIN_TRAINER, {}, GPT2),
    StackRun("TRL", PROFILES["trl"], QLORA),
    StackRun("TRL in fp32", PROFILES["trl"], IN_FP32),
    StackRun("TRL without Triton", PROFILES["trl"].with_(has_triton=False), {**LORA, "attention": "eager"}, GEMMA2),
    StackRun("own step with Liger", FORETUNE, {"loss": "liger"}),
    StackRun("own step with flash-attn", FORETUNE, {**LORA, "attention": "flash_attention_2"}),
    StackRun("a plain loop under autocast", LOOP.with_(autocast="bf16"), IN_FP32),
)
"""What the loops of others do, each once."""
