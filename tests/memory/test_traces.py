"""The torch-free program against the events of the real one."""

import hashlib
import json
import random
from typing import Any

import pytest
from memory.runs import all_layers, canonical, config_of, device_for, golden, shape_of, templated

from foretune.contract import TrainingConfig, build_config
from foretune.memory import estimate_memory
from foretune.memory.templates import Recording
from foretune.models import ModelShape, shape_from_config

ROWS = golden("traces.jsonl")
BLIND = [row for row in ROWS if row["name"].startswith("rand")]
SYSTEMATIC = [row for row in ROWS if not row["name"].startswith("rand")]


def check(row: dict[str, Any]) -> None:
    config, shape, device = config_of(row["run"]), shape_of(row["config"]), device_for(row["run"])
    events = canonical(all_layers(config, shape, device)[0])
    assert len(events) == row["num_events"]
    if not row.get("order_varies"):
        digest = hashlib.sha256(json.dumps(events, separators=(",", ":")).encode()).hexdigest()[:16]
        assert digest == row["digest"]
    estimate = estimate_memory(config, shape, device)
    assert (estimate.allocated_bytes, estimate.reserved_bytes) == (row["allocated_bytes"], row["reserved_bytes"])


@pytest.mark.parametrize("row", BLIND, ids=lambda row: row["name"])
def test_blind_configurations_have_the_events_of_the_real_program(row: dict[str, Any]) -> None:
    check(row)


@pytest.mark.parametrize("row", SYSTEMATIC[::6], ids=lambda row: row["name"])
def test_every_family_has_the_events_of_the_real_program(row: dict[str, Any]) -> None:
    check(row)


@pytest.mark.full
@pytest.mark.parametrize("row", SYSTEMATIC, ids=lambda row: row["name"])
def test_every_family_and_every_way_to_train_has_the_events_of_the_real_program(row: dict[str, Any]) -> None:
    check(row)


@pytest.mark.parametrize("layers", [4, 5, 9, 14])
@pytest.mark.parametrize("row", SYSTEMATIC[::17], ids=lambda row: row["name"])
def test_templates_emit_what_recording_every_layer_does(row: dict[str, Any], layers: int) -> None:
    key = "n_layer" if "n_layer" in row["config"] else "num_hidden_layers"
    config, shape = config_of(row["run"]), shape_of(row["config"], **{key: layers})
    device = device_for(row["run"])
    whole = Recording.of(*all_layers(config, shape, device))
    short = templated(config, shape, device)
    assert short.expand() == whole.expand()
    assert short.requested_peak() == whole.requested_peak()


IRREGULAR: list[tuple[str, str]] = [
    ("qwen3", "SFFFSFFFFSSSSS"),
    ("qwen2", "FFSFSSSFFFSFSFFFSSFS"),
    ("gemma3_text", "SSSSSFSSSSSFSSSSSFSSSSSFSS"),
    ("gemma2", "SFSFSFSFSFSFSFSFSFSFSFSFSF"),
    ("smollm3", "FFFNFFFNFFFNFFNNNFNF"),
    ("olmo2", "F" * 26),
]


def irregular(model_type: str, kinds: str, method: str) -> tuple[ModelShape, TrainingConfig]:
    """S: sliding window, F: full attention, N: no rotary embedding. Clipped: one tensor holds the norms of all."""
    raw = {
        "model_type": model_type,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "num_hidden_layers": len(kinds),
        "sliding_window": 8,
    }
    if model_type == "smollm3":
        raw["no_rope_layers"] = [int(kind != "N") for kind in kinds]
    elif model_type != "olmo2":
        raw["layer_types"] = ["sliding_attention" if kind == "S" else "full_attention" for kind in kinds]
    shape = shape_from_config(raw, id="a/model", source="file")
    overrides = ["batch.accumulation_steps=3", "batch.sequence_length=64", "attention=eager"]
    return shape, build_config({"model.id": "a/model"}, overrides=overrides, method=method).config


@pytest.mark.parametrize("method", ["full", "qlora"])
@pytest.mark.parametrize(("model_type", "kinds"), IRREGULAR)
def test_a_layer_stands_only_for_layers_between_the_same_neighbours(model_type: str, kinds: str, method: str) -> None:
    shape, config = irregular(model_type, kinds, method)
    short, whole = templated(config, shape), Recording.of(*all_layers(config, shape))
    assert short.expand() == whole.expand()
    assert short.walk() == whole.walk()
    assert len(short.stand_ins.recorded) < len(kinds)


def test_a_shorter_stack_of_the_same_contexts_is_a_program_too() -> None:
    """Every death has its birth, whichever layers were cut; a layer may then be the last of its kind."""
    for seed in range(3):
        kinds = "".join(random.Random(seed).choices("SF", k=120))
        shape, config = irregular("gemma3_text", kinds, "lora")
        whole = templated(config, shape)
        for num_layers in (60, 20, 12):
            fewer = whole._replace(stand_ins=whole.stand_ins.shortened(num_layers))
            born: set[int] = set()
            for slot, size in fewer.expand().events:
                if size > 0:
                    born.add(slot)
                elif size == 0:
                    born.remove(slot)
            assert fewer.num_layers < whole.num_layers
            assert fewer.walk().peak < whole.walk().peak
