"""What to do about a wrong key or value: the nearest right one, and names that other tools use for ours."""

from typing import Any

from foretune.contract.fields import Leaf, Section, choices, field_tree, find_field, leaves
from foretune.contract.scalars import echo

__all__ = [
    "ELSEWHERE",
    "KNOWN_VALUES",
    "blank_hint",
    "key_hint",
    "missing_hint",
    "name_hint",
    "nearest",
    "section_hint",
    "unqualified",
    "value_hint",
]

LONGEST_MATCHED = 64

ELSEWHERE = {
    "adapter": "lora (lora: {} for adapters, quantization: {} beside it for QLoRA)",
    "attn_implementation": "attention",
    "base_model": "model.id",
    "bf16": "precision.dtype: bf16",
    "compute_type": "precision.dtype",
    "cutoff_len": "batch.sequence_length",
    "dataset": "data.train",
    "deepspeed": "parallelism (of which only single is qualified)",
    "dtype": "precision.dtype",
    "fp16": "precision.dtype: fp16",
    "gradient_accumulation_steps": "batch.accumulation_steps",
    "learning_rate_scheduler": "schedule.shape",
    "load_in_4bit": "quantization.scheme: nf4",
    "load_in_8bit": "quantization.scheme: int8",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_target_modules": "lora.targets",
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "schedule.shape",
    "max_length": "batch.sequence_length",
    "max_seq_len": "batch.sequence_length",
    "max_seq_length": "batch.sequence_length",
    "max_steps": "schedule.updates",
    "method": "lora and quantization (the method follows from them; --method on the command line)",
    "micro_batch_size": "batch.micro_batch_size",
    "model_id": "model.id",
    "model_name": "model.id",
    "model_name_or_path": "model.id",
    "num_epochs": "schedule.epochs",
    "num_train_epochs": "schedule.epochs",
    "optim": "optimizer.name",
    "output_dir": "output",
    "per_device_train_batch_size": "batch.micro_batch_size",
    "quant": "quantization.scheme",
    "r": "lora.rank",
    "save_steps": "checkpoint.every_updates",
    "seq_len": "batch.sequence_length",
    "target_modules": "lora.targets",
    "torch_dtype": "precision.dtype",
    "warmup_steps": "schedule.warmup_updates",
}
"""Keys of other tools (and of older recipes) with ours."""

KNOWN_VALUES: dict[str, tuple[str, ...]] = {
    "optimizer.name": (
        "adafactor", "adam", "adam_8bit", "adamw_32bit", "adamw_bnb_8bit", "adamw_hf", "adamw_torch",
        "adamw_torch_fused", "apollo", "galore_adamw", "lion", "lion_8bit", "muon", "paged_adamw", "paged_adamw_32bit",
        "paged_lion_8bit", "prodigy", "rmsprop", "schedule_free_adamw", "sophia",
    ),
    "quantization.scheme": ("fp4", "int4", "gptq", "awq", "hqq", "mxfp4", "fp8", "aqlm", "eetq", "quanto"),
    "attention": ("flash_attention_3", "flex_attention", "xformers", "paged_attention"),
    "parallelism": ("dp", "tp", "pp", "deepspeed", "zero1", "zero2", "zero3", "fsdp2"),
    "precision.dtype": ("fp8", "tf32"),
    "schedule.shape": ("cosine_with_restarts", "polynomial", "constant_with_warmup", "inverse_sqrt", "wsd"),
}  # fmt: skip
"""Values that exist elsewhere and make sense, but for which foretune is not qualified."""

_QUALIFIED = {"parallelism": ("single",)}
"""What is qualified, where a rule refuses some of the field's own values."""

_OTHER_SPELLINGS = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "full": "fp32",
    "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32", "16": "bf16", "32": "fp32",
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_bnb_8bit": "adamw_8bit", "adamw_hf": "adamw",
    "flash": "flash_attention_2", "flash_attn": "flash_attention_2", "flash_attention": "flash_attention_2",
    "assistant": "assistant_only", "4bit": "nf4", "8bit": "int8", "int4": "nf4", "fp4": "nf4", "all": "all-linear",
    "all_linear": "all-linear", "constant_with_warmup": "constant",
}  # fmt: skip


def nearest(text: str, words: list[str] | tuple[str, ...]) -> str | None:
    """Return the word most like the text, or None where nothing is like it."""
    from difflib import get_close_matches

    folded = {word.lower(): word for word in words}
    found = get_close_matches(text[:LONGEST_MATCHED].lower(), list(folded), n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def key_hint(section: Section, name: str) -> str:
    """Say what a key that does not exist may have meant: in its section, elsewhere, or in another tool."""
    if "." in name and isinstance(find_field(name), Leaf):
        outer, inner = name.rsplit(".", 1)
        return f"Write `{outer}:` and below it, indented, `{inner}: ...`."
    ours = ELSEWHERE.get(name)
    if ours is not None:
        return f"Here it is {ours}."
    near = nearest(name, list(section.parts))
    if near is not None:
        return f"Did you mean {_join(section.path, near)}?"
    homes = [leaf.path for leaf in leaves() if leaf.path.rsplit(".", 1)[-1] == name]
    if homes:
        return f"Did you mean {' or '.join(homes)}?"
    near = nearest(_join(section.path, name), [leaf.path for leaf in leaves()])
    if near is not None:
        return f"Did you mean {near}?"
    shown = ", ".join(section.parts)
    return f"{section.path or 'The top level'} has {shown}."


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def value_hint(leaf: Leaf, value: Any) -> str:
    """Say what to write instead of a wrong value: what was likely meant, else how to do without."""
    return _meant(leaf, value) or _without(leaf)


def _without(leaf: Leaf) -> str:
    if leaf.is_required:
        return missing_hint(leaf)
    default = "null" if leaf.default is None else echo(leaf.default) if leaf.default != () else "[]"
    return f"Leave it out for the default, {default.strip(chr(39))}."


def missing_hint(leaf: Leaf) -> str:
    """Say what to write for a setting that has no default."""
    if leaf.path == "precision.dtype":
        return "The format is never inferred: say it, as in precision: {dtype: bf16} (or --set precision.dtype=bf16)."
    return "Name it, as in model: {id: Qwen/Qwen2.5-0.5B} (or --set model.id=Qwen/Qwen2.5-0.5B)."


def name_hint(value: Any) -> str:
    """Say what to write in place of an entry that is no name."""
    if isinstance(value, (bool, int, float)):
        return f'Put it in quotes if it is a name: "{echo(value)}".'
    return "Name a module as the model spells it, such as q_proj, or remove the entry."


def _meant(leaf: Leaf, value: Any) -> str | None:
    words = choices(leaf.type)
    if leaf.path.endswith("dtype") and value == "auto":
        return "The format is never inferred: say it, for example bf16."
    if isinstance(value, str) and words:
        near = _OTHER_SPELLINGS.get(value)
        near = near if near in words else nearest(value, words)
        return f"Did you mean {near}?" if near else None
    if isinstance(value, str):
        return _text_hint(leaf, value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return f"Write {int(value)}."
    if isinstance(value, (bool, int, float)) and _takes_text(leaf):
        return f'Put it in quotes: "{echo(value)}".'
    return None


def _takes_text(leaf: Leaf) -> bool:
    from foretune.contract.fields import describe_type

    return "text" in describe_type(leaf.type)


def _text_hint(leaf: Leaf, value: str) -> str | None:
    from foretune.contract.fields import describe_type

    accepted = describe_type(leaf.type)
    lowered = value.strip().lower()
    if "true or false" in accepted and lowered in ("yes", "on", "no", "off", "y", "n"):
        return f"Write {'true' if lowered in ('yes', 'on', 'y') else 'false'}."
    if "number" in accepted and lowered.replace("_", "").replace(",", "").isascii():
        digits = lowered.replace("_", "").replace(",", "")
        if digits.isdigit() and digits:
            return f"Write {digits[:20]}, without quotes or separators."
    if "list" in accepted:
        return "Write a list: [name, name]."
    return None


def unqualified(path: str, value: Any) -> str | None:
    """Say that a value is known but not qualified, and what is; None for a value that nobody knows."""
    if value not in KNOWN_VALUES.get(path, ()):
        return None
    part = find_field(path)
    if not isinstance(part, Leaf):
        return None
    qualified = ", ".join(_QUALIFIED.get(path) or choices(part.type))
    return f"{path} is {echo(value)}, for which foretune is not qualified; it is for {qualified}."


def blank_hint(path: str) -> str:
    """Say how to mean what a section with nothing in it may mean."""
    return f"Write `{path}: null` for none, or `{path}: {{}}` for the defaults."


def section_hint(path: str) -> str:
    """Say how a section is written, for someone who wrote something else in its place."""
    part = find_field(path) if path else field_tree()
    if not isinstance(part, Section):
        return "Write `key: value` lines."
    written = f"Write `{path}:` and below it, indented, `{next(iter(part.parts))}: ...`"
    if part.is_optional:
        return f"{written}; `null` for none."
    is_required = any(isinstance(inner, Leaf) and inner.is_required for inner in part.parts.values())
    return f"{written}." if is_required else f"{written}, or leave it out."
