"""What each file of configs/ means, worked out by hand from the documentation and source of its tool."""

from dataclasses import dataclass, field
from typing import Any

__all__ = ["EXPECTED", "Expected"]

ALL_SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Expected:
    """Settings that the file gives, those that the tool's defaults give, and what is open, by key or field."""

    settings: dict[str, Any]
    defaults: dict[str, Any] = field(default_factory=dict)
    open: frozenset[str] = frozenset()
    stack: dict[str, Any] = field(default_factory=dict)


EXPECTED: dict[str, Expected] = {
    "axolotl/qlora_packed.yml": Expected(
        {
            "model.id": "meta-llama/Llama-3.1-8B", "quantization.scheme": "nf4", "lora.rank": 32, "lora.alpha": 16.0,
            "lora.dropout": 0.05, "lora.targets": "all-linear", "data.train": "data/train.jsonl",
            "evaluation.split": 0.05, "output": "./outputs/qlora", "batch.sequence_length": 4096,
            "batch.packing": True, "batch.accumulation_steps": 4, "batch.micro_batch_size": 2, "schedule.epochs": 3.0,
            "optimizer.name": "paged_adamw_8bit", "schedule.shape": "cosine", "optimizer.learning_rate": 2e-4,
            "precision.dtype": "bf16", "gradient_checkpointing": True, "attention": "flash_attention_2",
            "schedule.warmup_updates": 10, "optimizer.weight_decay": 0.0,
        },
        {"seed": 42, "data.supervision": "assistant_only", "quantization.double_quant": True},
        stack={"checkpoint_form": "reentrant", "kbit_upcast": "none", "autocast": "bf16", "has_flash_package": True},
    ),
    "axolotl/full_bf16.yml": Expected(
        {
            "data.truncation": "right", "schedule.updates": 1000, "schedule.warmup_updates": 50,
            "optimizer.name": "adamw", "optimizer.implementation": "fused", "optimizer.learning_rate": 1e-5,
            "optimizer.weight_decay": 0.01, "checkpoint.every_updates": 100, "checkpoint.keep": 2,
            "attention": "sdpa", "data.train": "rows/support.jsonl",
        },
        {"data.supervision": "assistant_only"},
    ),
    "axolotl/auto_precision.yml": Expected(
        {
            "quantization.scheme": "int8", "lora.targets": ("q_proj", "v_proj", "k_proj", "o_proj"),
            "optimizer.name": "adamw_8bit", "schedule.shape": "linear", "schedule.warmup_updates": 20,
        },
        {"output": "./model-out"},
        frozenset({"precision.dtype", "data.train"}),
    ),
    "axolotl/deepspeed.yml": Expected(
        {"optimizer.implementation": "foreach", "batch.packing": True},
        {},
        frozenset({
            "deepspeed", "neftune_noise_alpha", "special_tokens.eos_token", "schedule.warmup_updates", "data.train",
        }),
    ),
    "axolotl/preference.yml": Expected(
        {"lora.rank": 8}, {"gradient_checkpointing": False}, frozenset({"rl", "schedule.warmup_updates", "data.train"})
    ),
    "axolotl/dora_fp16.yml": Expected(
        {
            "precision.dtype": "fp16", "lora.use_dora": True, "lora.use_rslora": True, "attention": "eager",
            "lora.modules_to_save": ("lm_head",), "batch.sort_by_length": True, "schedule.shape": "constant",
        },
        {"gradient_checkpointing": False},
        frozenset({"lora.modules_to_save"}),
        {"autocast": "fp16"},
    ),
    "axolotl/liger_unknown.yml": Expected(
        {"loss": "liger", "precision.dtype": "bf16"},
        {"batch.sequence_length": 512},
        frozenset({"liger_rms_norm", "lora_rank", "sequence_length", "schedule.warmup_updates"}),
        {"loss_kernel": "liger", "autocast": "none"},
    ),
    "axolotl/cut_cross_entropy.yml": Expected(
        {"loss": "chunked", "quantization.double_quant": False, "schedule.updates": 200},
        {"schedule.warmup_updates": 6},
        stack={"name": "foretune", "is_nearest": True},
    ),
    "axolotl/offload.yml": Expected(
        {"quantization.scheme": "nf4"},
        {},
        frozenset({"gradient_checkpointing", "batch.packing", "chat_template", "optimizer.name", "schedule.shape"}),
    ),
    "llama_factory/lora_chat.yaml": Expected(
        {
            "model.id": "Qwen/Qwen2.5-7B-Instruct", "lora.targets": "all-linear", "lora.rank": 16,
            "batch.sequence_length": 4096, "data.truncation": "right", "checkpoint.every_updates": 200,
            "precision.dtype": "bf16", "schedule.shape": "cosine",
        },
        {"lora.alpha": 32.0, "data.supervision": "assistant_only"},
        frozenset({"data.train", "template", "schedule.warmup_updates"}),
        {"kbit_upcast": "none", "checkpoint_form": "reentrant", "autocast": "bf16"},
    ),
    "llama_factory/qlora.yaml": Expected(
        {
            "quantization.scheme": "nf4", "quantization.double_quant": False, "lora.targets": ("q_proj", "v_proj"),
            "lora.alpha": 16.0, "optimizer.name": "paged_adamw_8bit", "evaluation.split": 0.1,
            "evaluation.every_updates": 50, "schedule.warmup_updates": 40, "attention": "sdpa",
        },
        {"checkpoint.every_updates": 500},
        frozenset({"data.train"}),
        {"kbit_upcast": "norms"},
    ),
    "llama_factory/full.yaml": Expected(
        {"data.supervision": "all_tokens", "schedule.epochs": 1.0},
        {"schedule.shape": "linear"},
        frozenset({"precision.dtype", "batch.packing", "data.train"}),
    ),
    "llama_factory/pure_bf16.yaml": Expected(
        {
            "precision.dtype": "bf16", "batch.packing": True, "attention": "flash_attention_2", "loss": "liger",
            "gradient_checkpointing": False, "optimizer.implementation": "foreach",
        },
        {},
        frozenset({"data.train"}),
        {"autocast": "none", "loss_kernel": "liger", "has_flash_package": True},
    ),
    "llama_factory/reward.yaml": Expected(
        {}, {"lora.rank": 8, "lora.alpha": 16.0}, frozenset({"stage", "deepspeed", "template", "data.train"})
    ),
    "llama_factory/galore.yaml": Expected({"precision.dtype": "bf16"}, {}, frozenset({"use_galore", "data.train"})),
    "llama_factory/freeze.yaml": Expected(
        {}, {"batch.micro_batch_size": 8}, frozenset({"neftune_noise_alpha", "max_samples", "lora", "data.train"})
    ),
    "llama_factory/gptq_hqq.json": Expected(
        {"precision.dtype": "bf16", "lora.use_dora": True, "lora.modules_to_save": ("embed_tokens", "lm_head")},
        {"optimizer.learning_rate": 5e-5},
        frozenset({"use_unsloth", "quantization.scheme", "lora_ranks", "data.train"}),
        {"autocast": "bf16"},
    ),
    "llama_factory/no_precision.yaml": Expected(
        {"lora.use_rslora": True, "lora.targets": ("c_attn",), "schedule.warmup_updates": 100},
        {"schedule.epochs": 3.0},
        frozenset({"loraplus_lr_ratio", "precision.dtype", "data.train", "evaluation.data", "schedule.shape"}),
        {"autocast": "none"},
    ),
    "trl/full_default.yaml": Expected(
        {"output": "out"},
        {
            "batch.micro_batch_size": 8, "optimizer.learning_rate": 2e-5, "data.truncation": "right",
            "schedule.epochs": 3.0, "schedule.shape": "linear", "checkpoint.every_updates": 500, "seed": 42,
        },
        frozenset({"precision.dtype", "data.supervision", "data.train"}),
        {"name": "trl", "is_nearest": False, "loss_kernel": "trl"},
    ),
    "trl/dumped_arguments.json": Expected(
        {
            "precision.dtype": "bf16", "attention": "sdpa", "schedule.epochs": 1.0, "schedule.shape": "cosine",
            "data.supervision": "all_tokens",
        },
        {},
        frozenset({"model.id", "schedule.warmup_updates", "data.train"}),
    ),
    "trl/lora.yaml": Expected(
        {
            "precision.dtype": "bf16", "lora.targets": "all-linear", "batch.sequence_length": 2048,
            "schedule.updates": 500, "schedule.warmup_updates": 15, "data.supervision": "assistant_only",
            "optimizer.learning_rate": 2e-4,
        },
        {"lora.dropout": 0.05},
        frozenset({"data.train"}),
    ),
    "trl/qlora.yaml": Expected(
        {
            "model.revision": "d04e592bb4f6aa9cfee91e2e20afa771667e1d4b", "quantization.double_quant": True,
            "precision.adapter_dtype": "bf16", "optimizer.max_grad_norm": 0.3, "batch.sort_by_length": True,
            "schedule.shape": "constant", "data.supervision": "assistant_only",
        },
        {},
        frozenset({"data.train", "evaluation.data"}),
    ),
    "trl/packing_wrapped.yaml": Expected(
        {"data.supervision": "all_tokens"}, {}, frozenset({"batch.packing", "data.train"})
    ),
    "trl/packing_flash.yaml": Expected(
        {
            "batch.packing": True, "lora.targets": ALL_SEVEN, "lora.modules_to_save": ("lm_head",), "loss": "liger",
            "lora.use_dora": True, "gradient_checkpointing": True,
        },
        {},
        frozenset({"data.train"}),
        {"checkpoint_form": "reentrant", "loss_kernel": "liger"},
    ),
    "trl/int8_auto.json": Expected(
        {"quantization.scheme": "int8", "batch.sequence_length": 256},
        {},
        frozenset({
            "neftune_noise_alpha", "lora.targets", "precision.dtype", "data.supervision", "data.train", "loss_type",
        }),
    ),
    "trl/command.txt": Expected(
        {
            "lora.targets": ATTENTION, "quantization.double_quant": True, "gradient_checkpointing": False,
            "batch.sequence_length": 512, "data.supervision": "all_tokens", "output": "out/llama one",
        },
        {},
        frozenset({"data.train", "optimizer.name"}),
    ),
    "trl/sharded.txt": Expected(
        {"precision.dtype": "bf16", "optimizer.learning_rate": 2e-5},
        {"batch.sequence_length": 1024},
        frozenset({
            "launcher.config_file", "launcher.num_processes", "activation_offloading", "eos_token", "batch.packing",
            "data.supervision", "data.train",
        }),
        {"name": "trainer", "is_nearest": True, "loss_kernel": "none"},
    ),
    "trl/unknown.yaml": Expected(
        {"precision.dtype": "fp16", "optimizer.weight_decay": 0.1, "optimizer.implementation": "foreach"},
        {},
        frozenset({
            "lora.targets", "lora_rank", "batch.sequence_length", "data.truncation", "dataset_streaming", "data.train",
        }),
        {"autocast": "fp16"},
    ),
    "canifinetune/qlora.yaml": Expected(
        {
            "model.id": "Qwen/Qwen2.5-0.5B", "quantization.scheme": "nf4", "quantization.double_quant": True,
            "lora.targets": ATTENTION, "data.supervision": "assistant_only", "data.truncation": "right",
            "schedule.updates": 200, "device": "cuda",
        },
        {"seed": 42, "schedule.shape": "linear"},
        stack={"torch": "2.6", "kbit_upcast": "all", "autocast": "bf16"},
    ),
    "canifinetune/full_fp32_cpu.yaml": Expected(
        {"device": "cpu", "precision.dtype": "fp32", "optimizer.implementation": "foreach", "schedule.updates": 5},
        stack={"autocast": "none"},
    ),
    "canifinetune/lora_fused.yaml": Expected(
        {"lora.targets": ALL_SEVEN, "optimizer.implementation": "fused", "data.supervision": "assistant_only"}
    ),
    "canifinetune/int8.yaml": Expected({"quantization.scheme": "int8", "gradient_checkpointing": False}),
    "canifinetune/fp4.yaml": Expected({"precision.dtype": "bf16"}, {}, frozenset({"quantization.scheme"})),
    "canifinetune/fp16_liger.yaml": Expected(
        {
            "precision.dtype": "fp16", "quantization.double_quant": False, "loss": "liger", "optimizer.name": "sgd",
            "attention": "flash_attention_2",
        },
        stack={"autocast": "fp16", "loss_kernel": "liger"},
    ),
    "canifinetune/scope_left_open.yaml": Expected(
        {"model.revision": "a1b2c3", "optimizer.name": "adamw"}, {}, frozenset({"lora.targets"})
    ),
    "canifinetune/full_bf16_eager.yaml": Expected(
        {"attention": "eager", "data.truncation": "right", "optimizer.learning_rate": 1e-5}
    ),
}  # fmt: skip
"""By file."""
