"""Published measurements as the files that they were run from: a row's facts in the keys of its tool.

The inverse of the tables, written apart from them: TRL's arguments for rows of Transformers' Trainer and of SFTTrainer
(fms-hf-tuning, ms-swift, Qwen's finetune.py), axolotl's for its own, and a recipe for canifinetune's.
"""

import json
from typing import Any, NamedTuple

from foretune.evidence import Observation

__all__ = ["File", "file_of"]

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
RECIPE_QUANTIZATION = {"none": "none", "nf4": "nf4", "nf4_double_quant": "nf4_double_quant", "int8": "int8"}


class File(NamedTuple):
    """A tool's file, and the fields in which it is another than the row."""

    name: str
    text: str
    other: tuple[str, ...] = ()
    """A recipe clips gradients where canifinetune's bench did not; a score takes sdpa for axolotl's flash attention;
    PEFT before 0.12 made adapters in the format of the base."""


def file_of(row: Observation) -> File | None:
    """Return the file of a row's tool; None where it had none, or ran what no key of it says."""
    driver = row.software.driver
    if row.source.name == "canifinetune":
        return _recipe(row)
    if driver == "axolotl":
        return _axolotl(row)
    if driver in ("fms_hf_tuning", "hf_trainer", "ms_swift", "qwen_finetune", "trl") and not row.software.kernels:
        return _trl(row)
    return None


def _recipe(row: Observation) -> File:
    training, lora = row.training, row.training.lora
    assert lora is not None
    keys = {
        "model_id": row.model.id,
        "method": training.method,
        "seq_len": training.seq_len,
        "micro_batch_size": training.micro_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "base_dtype": training.base_dtype,
        "quantization": RECIPE_QUANTIZATION[training.quantization],
        "lora_rank": lora.rank,
        "lora_alpha": int(lora.alpha or 0),
        "lora_dropout": lora.dropout,
        "target_modules": lora.target_modules,
        "optimizer": training.optimizer,
        "gradient_checkpointing": training.gradient_checkpointing != "none",
        "attention_implementation": training.attention,
        "training_backend": "transformers",
        "loss_backend": training.loss,
        "loss_mode": "all",
        "truncation": "error",
    }
    return File("config.yaml", json.dumps(keys, indent=2), ("optimizer.max_grad_norm",))


def _axolotl(row: Observation) -> File:
    training, lora = row.training, row.training.lora
    assert lora is not None
    keys: dict[str, Any] = {
        "base_model": row.model.id,
        "adapter": training.method,
        "load_in_4bit": training.quantization != "none",
        "bnb_config_kwargs": {"bnb_4bit_use_double_quant": training.quantization == "nf4_double_quant"},
        "lora_r": lora.rank,
        "lora_alpha": int(lora.alpha or 0),
        "lora_target_modules": list(lora.target_modules),
        "datasets": [{"path": "rows.jsonl", "type": "chat_template"}],
        "sequence_len": training.seq_len,
        "sample_packing": training.packing,
        "micro_batch_size": training.micro_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "optimizer": training.optimizer,
        "learning_rate": 2e-4,
        training.base_dtype: True,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": training.gradient_checkpointing == "reentrant"},
        "flash_attention": training.attention == "flash_attention_2",
        "cut_cross_entropy": training.loss == "cut_cross_entropy",
    }
    return File("axolotl.yml", json.dumps(keys), ("attention",))


def _trl(row: Observation) -> File:
    training, lora = row.training, row.training.lora
    keys: dict[str, Any] = {
        "model_name_or_path": row.model.id,
        "dtype": DTYPES[training.base_dtype],
        "bf16": training.autocast == "bf16",
        "fp16": training.autocast == "fp16",
        "attn_implementation": None if training.attention == "unknown" else training.attention,
        "max_length": training.seq_len,
        "per_device_train_batch_size": training.micro_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps or 1,
        "gradient_checkpointing": training.gradient_checkpointing != "none",
        "gradient_checkpointing_kwargs": {"use_reentrant": training.gradient_checkpointing == "reentrant"},
        "optim": training.optimizer,
        "packing": bool(training.packing),
        "completion_only_loss": False,
        "use_peft": lora is not None,
        "load_in_4bit": training.quantization.startswith("nf4"),
        "use_bnb_nested_quant": training.quantization == "nf4_double_quant",
        "load_in_8bit": training.quantization == "int8",
    }
    if isinstance(training.grad_clip, float):
        keys["max_grad_norm"] = training.grad_clip
    if lora is not None:
        keys |= {
            "lora_r": lora.rank, "lora_alpha": int(lora.alpha or 0), "lora_dropout": lora.dropout or 0.0,
            "lora_target_modules": list(lora.target_modules), "lora_modules_to_save": list(lora.modules_to_save),
        }  # fmt: skip
    other = ("precision.adapter_dtype",) if lora is not None and training.adapter_dtype != "fp32" else ()
    return File("sft.json", json.dumps(keys), other)
