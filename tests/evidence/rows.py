"""Rows of the public schema, made up for the tests: a small model, and figures that nobody measured."""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from foretune.evidence import Observation, parse_observation

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
}

ROW: dict[str, Any] = {
    "id": "made-up-1",
    "source": {"name": "made-up", "where": "tests/evidence/rows.py", "licence": "Apache-2.0"},
    "grade": "A",
    "kind": "train_peak",
    "outcome": "ok",
    "group": "made-up|small",
    "repeat_of": None,
    "model": {"id": "made-up/small", "config": CONFIG, "normalized": {"hidden_size": 64}, "total_params": 1},
    "training": {
        "method": "lora",
        "base_dtype": "fp16",
        "quantization": "none",
        "kbit_upcast": False,
        "compute_dtype": "fp16",
        "autocast": "none",
        "adapter_dtype": "fp32",
        "lora": {
            "rank": 4,
            "alpha": 8.0,
            "dropout": 0.0,
            "target_modules": ["q_proj", "v_proj"],
            "modules_to_save": [],
            "module_naming": "hf",
        },
        "optimizer": "adamw_torch",
        "optimizer_foreach": True,
        "grad_clip": None,
        "seq_len": 64,
        "seq_len_kind": "exact",
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": "non_reentrant",
        "attention": "sdpa",
        "loss": "stock",
        "packing": False,
        "parallel": {"strategy": "single", "world_size": 1, "cpu_offload": False},
    },
    "software": {
        "driver": "manual_loop",
        "os": "linux",
        "torch": "2.14.0+cu130",
        "transformers": "5.17.0",
        "peft": "0.20.0",
    },
    "device": {
        "name": "Tesla T4",
        "count": 1,
        "memory_total_bytes": 15_636_365_312,
        "memory_source": "measured",
        "compute_capability": "7.5",
    },
    "measured": {
        "peak_allocated_bytes": 20_000_000,
        "peak_reserved_bytes": 40_000_000,
        "process_bytes": 200_000_000,
        "scope": "load_and_train",
    },
    "assumed": [],
    "notes": "Made up.",
}

ABSENT = object()
"""Stands for a key that is left out."""


def public_row(**changes: Any) -> dict[str, Any]:
    """The row with changes: `training__lora__rank=8` sets what lies three deep."""
    row = deepcopy(ROW)
    for path, value in changes.items():
        *outer, key = path.split("__")
        part = row
        for name in outer:
            part = part[name]
        if value is ABSENT:
            del part[key]
        else:
            part[key] = value
    return row


def observation(**changes: Any) -> Observation:
    return parse_observation(public_row(**changes), place="test")


def write_rows(path: Path, rows: list[Mapping[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path
