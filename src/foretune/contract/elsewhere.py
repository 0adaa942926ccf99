"""Files of other tools, told by their keys: so that one is recognised before each of its keys is refused."""

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

__all__ = ["MARKS", "Recognised", "is_command", "rank_tools", "recognise"]


class Recognised(NamedTuple):
    """A tool, and the keys by which its file is told."""

    tool: str
    title: str
    keys: tuple[str, ...]


# fmt: off
MARKS: dict[str, tuple[str, frozenset[str]]] = {
    "axolotl": ("axolotl", frozenset({
        "adapter", "base_model", "bnb_config_kwargs", "datasets", "dataset_prepared_path", "eval_sample_packing",
        "evals_per_epoch", "flash_attention", "lora_modules_to_save", "lora_target_linear", "lr_scheduler",
        "micro_batch_size", "num_epochs", "optimizer", "pad_to_sequence_len", "sample_packing", "saves_per_epoch",
        "sequence_len", "special_tokens", "train_on_inputs", "val_set_size", "wandb_project",
    })),
    "llama-factory": ("LLaMA-Factory", frozenset({
        "additional_target", "cutoff_len", "dataset", "dataset_dir", "double_quantization", "enable_liger_kernel",
        "finetuning_type", "flash_attn", "lora_rank", "lora_target", "model_name_or_path", "neat_packing",
        "overwrite_cache", "plot_loss", "preprocessing_num_workers", "pure_bf16", "quantization_bit",
        "quantization_method", "stage", "template", "train_on_prompt", "upcast_layernorm", "val_size",
    })),
    "trl": ("TRL", frozenset({
        "assistant_only_loss", "attn_implementation", "bnb_4bit_quant_type", "completion_only_loss",
        "dataset_config", "dataset_name", "dataset_num_proc", "dataset_test_split", "dataset_text_field",
        "dataset_train_split", "datasets", "dtype", "eos_token", "lora_modules_to_save", "lora_r",
        "lora_target_modules", "lora_task_type", "max_length", "max_seq_length", "model_init_kwargs",
        "model_name_or_path", "model_revision", "packing", "packing_strategy", "padding_free", "torch_dtype",
        "use_bnb_nested_quant", "use_peft",
    })),
    "canifinetune": ("canifinetune", frozenset({
        "attention_implementation", "base_dtype", "dataset_path", "local_files_only", "lora_target_scope",
        "loss_backend", "loss_mode", "method", "micro_batch_size", "model_id", "quantization", "save_steps", "seq_len",
        "target_modules", "training_backend", "truncation",
    })),
}
"""For each tool what it is called and keys that tell its files."""
_SHARED = frozenset({
    "bf16", "fp16", "gradient_accumulation_steps", "learning_rate", "lr_scheduler_type", "max_steps", "optim",
    "num_train_epochs", "output_dir", "per_device_train_batch_size", "warmup_ratio", "warmup_steps",
})
"""Keys that many tools have: they tell that a file is another's, not whose."""
# fmt: on
_OWN = frozenset({"model", "precision", "lora", "batch", "schedule"})
"""Sections of ours: with one of them a file is meant for us, however many of its keys are mistaken."""
FEWEST = 3


_COMMAND = r"(?:[A-Z][A-Z0-9_]*=\S* +)*(?:trl|accelerate|llamafactory-cli|torchrun|deepspeed|python3?)\s+(.*)"
_SCRIPT = r"\S*sft\S*|train\b|launch\b"


def is_command(text: str) -> bool:
    """Whether the first line that says something starts a training: a program, then its flags."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    match = re.match(_COMMAND, first)
    return match is not None and re.search(_SCRIPT, match[1]) is not None


def rank_tools(keys: Iterable[str]) -> list[Recognised]:
    """Return the tools that know some of the keys, the best first."""
    names = list(dict.fromkeys(keys))
    found = [
        Recognised(tool, title, tuple(name for name in names if name in marks))
        for tool, (title, marks) in MARKS.items()
    ]
    return sorted((one for one in found if one.keys), key=lambda one: -len(one.keys))


def recognise(keys: Collection[str]) -> Recognised | None:
    """Return the tool whose file this is; None where it is ours, nobody's, or might be of two."""
    ranked = rank_tools(keys)
    if not ranked or _OWN & set(keys):
        return None
    best = ranked[0]
    if len(best.keys) + len(_SHARED & set(keys)) < FEWEST:
        return None
    is_unique = len(ranked) == 1 or len(ranked[1].keys) < len(best.keys)
    return best if is_unique else None
