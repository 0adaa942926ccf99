"""canifinetune's recipes (config.yaml of `canifinetune recipe`), as of 0.4.

Read off canifinetune/configuration.py and training/runtime.py, which runs them in Transformers' Trainer.
"""

from foretune.foreign.meanings import accumulate, hold, liger, optimizer, recompute, target_names
from foretune.foreign.reading import Reading
from foretune.foreign.rules import Key, Tool, blocks, ignored, maps, part
from foretune.memory import TRAINER

__all__ = ["CANIFINETUNE", "is_before_04"]

_KEYS: dict[str, Key] = {
    "model_id": maps("model.id", "text"),
    "revision": part("text", "model.revision", default="main"),
    "method": part("text", "lora", "quantization", default="qlora"),
    "seq_len": maps(
        "batch.sequence_length", "count", "Rows are padded to it there, here to the longest.", default=2048
    ),
    "micro_batch_size": maps("batch.micro_batch_size", "count", default=1),
    "gradient_accumulation_steps": maps("batch.accumulation_steps", "count", default=1),
    "base_dtype": part("text", "precision.dtype", default="bf16"),
    "quantization": part("text", "quantization.scheme", "quantization.double_quant", default="nf4_double_quant"),
    "lora_rank": part("count", "lora.rank", default=16),
    "lora_alpha": part("number", "lora.alpha", default=32),
    "lora_dropout": part("number", "lora.dropout", default=0.05),
    "lora_target_scope": part("text", "lora.targets", default="attention"),
    "target_modules": part("names", "lora.targets"),
    "optimizer": part("text", "optimizer.name", "optimizer.implementation", default="paged_adamw_8bit"),
    "gradient_checkpointing": part("switch", "gradient_checkpointing", default=True),
    "attention_implementation": maps("attention", "text", default="sdpa"),
    "training_backend": blocks("both", "foretune runs its own loop.", off=("transformers",)),
    "loss_backend": part("text", "loss", default="stock"),
    "use_liger_kernel": part("switch", "loss", default=False),
    "loss_mode": part("text", "data.supervision", default="all"),
    "truncation": maps("data.truncation", "text", default="error"),
    "local_files_only": ignored("--offline says it here."),
    "output_dir": part("text", "output", default="output"),
    "dataset_path": part("text", "data.train", default="data/sample.jsonl"),
    "learning_rate": maps("optimizer.learning_rate", "number", default=2e-4),
    "max_steps": maps("schedule.updates", "count", default=50),
    "logging_steps": ignored("Logging."),
    "seed": maps("seed", "count", "The same seed gives another order of rows here.", default=42),
    "device": maps("device", "text", default="cuda"),
    # -- of recipes before 0.4
    "save_steps": blocks("result", "The recipe is of a release before 0.4, which trained otherwise."),
}
_SCOPES = {"attention": "attention", "all_linear": "all-linear"}
_FOUR_BITS = {"nf4": False, "nf4_double_quant": True}


def is_before_04(keys: object) -> bool:
    """Whether a recipe is of a release before 0.4: it says how often to save, and not which rows carry loss."""
    names = set(keys)  # type: ignore[call-overload]
    return "save_steps" in names or not names & {"loss_mode", "lora_target_scope", "training_backend", "truncation"}


def _meaning(reading: Reading) -> None:
    if reading["revision"] != "main":
        reading.set("model.revision", reading["revision"], "revision")
    reading.leave("The default branch.", "revision")
    _method(reading)
    held = reading["base_dtype"]
    if held in ("bf16", "fp16", "fp32"):
        hold(reading, held, None if held == "fp32" else held, "base_dtype")
    else:
        reading.block("base_dtype", "both", "It is bf16, fp16 or fp32.", field="precision.dtype")
    optimizer(reading, "optimizer")
    reading.always("schedule.shape", "linear", "(lr_scheduler_type)", "linear, the Trainer's")
    recompute(reading, reading["gradient_checkpointing"], False, "gradient_checkpointing")
    if reading["use_liger_kernel"] or reading["loss_backend"] == "liger":
        liger(reading, "use_liger_kernel", "loss_backend", covers="the Trainer exchanges norms, rotary and MLP too.")
    if reading["attention_implementation"] == "flash_attention_2":
        reading.stack = reading.stack.with_(has_flash_package=True)
    supervision = {"all": "all_tokens", "assistant": "assistant_only"}.get(reading["loss_mode"])
    if supervision is None:
        reading.block("loss_mode", "result", "It is all or assistant.", field="data.supervision")
    else:
        reading.set("data.supervision", supervision, "loss_mode")
    for key, field in (("dataset_path", "data.train"), ("output_dir", "output")):
        reading.set(field, reading[key], key, note="Relative to the recipe.")
    reading.notes.append(accumulate(reading))


def _method(reading: Reading) -> None:
    names = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_scope", "target_modules")
    if reading["method"] != "qlora":
        reading.leave("Read with method: qlora alone.", "quantization")
    if reading["method"] == "full":
        reading.mean("Every weight is trained.", "method")
        reading.leave("Every weight is trained.", *names)
        return
    reading.mean("Adapters are trained.", "method")
    reading.set("lora.rank", reading["lora_rank"], "lora_rank")
    reading.set("lora.alpha", float(reading["lora_alpha"]), "lora_alpha")
    reading.set("lora.dropout", float(reading["lora_dropout"]), "lora_dropout")
    if reading["target_modules"]:
        target_names(reading, reading["target_modules"], "target_modules")
        reading.leave("target_modules decides.", "lora_target_scope")
    elif reading["lora_target_scope"] in _SCOPES:
        reading.set("lora.targets", _SCOPES[reading["lora_target_scope"]], "lora_target_scope")
    else:
        why = "Which layers these are depends on the type of model; name them."
        reading.block("lora_target_scope", "both", why, field="lora.targets")
    if reading["method"] == "qlora":
        _quantization(reading)


def _quantization(reading: Reading) -> None:
    scheme = reading["quantization"]
    if scheme == "int8":
        reading.set("quantization.scheme", "int8", "quantization", "method")
    elif scheme in _FOUR_BITS:
        reading.set("quantization.scheme", "nf4", "quantization", "method")
        reading.set("quantization.double_quant", _FOUR_BITS[scheme], "quantization")
    else:
        reading.block("quantization", "both", "foretune's 4 bits are nf4.", field="quantization.scheme")


CANIFINETUNE = Tool(
    name="canifinetune",
    title="canifinetune",
    version="0.4",
    keys=_KEYS,
    meaning=_meaning,
    stack=TRAINER.with_(
        torch="2.6",
        transformers="5.8",
        peft="0.19",
        bitsandbytes="0.49",
        is_nearest=True,
        copies_code_tables=False,
        empties_cache=False,
        has_gemm_4bit=False,
        rotary_by_product=True,
        has_safe_softmax=False,
        prefers_cudnn=False,
    ),
    stack_notes=(
        "The Trainer by the rules of the newest versions that canifinetune 0.4 allows.",
        "No row of its runtime was measured.",
    ),
    paths="file",
)
"""A recipe's config.yaml."""
