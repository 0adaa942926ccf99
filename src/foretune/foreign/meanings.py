"""Meanings that several tools share: optimizer, schedule, precision, attention, checkpoints, evaluation."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Literal

from foretune.foreign.reading import Reading

__all__ = [
    "ATTENTIONS",
    "Dtype",
    "accumulate",
    "attention",
    "autocast",
    "base_model",
    "checkpoints",
    "evaluation",
    "hold",
    "length",
    "liger",
    "no_warmup",
    "optimizer",
    "packed_as_full_rows",
    "recompute",
    "shape",
    "target_names",
    "trainer_arguments",
    "trainer_warmup",
    "warmup",
]

Dtype = Literal["bf16", "fp16", "fp32"]

_QUANTIZED_NAME = r"(?i)[-_.](gptq|awq|aqlm|hqq|gguf|exl2|bnb|fp8|[348]bit|int[48])([-_.]|$)"
OPTIMIZERS: Mapping[str, tuple[str, str | None]] = {
    "adamw": ("adamw", "foreach"),
    "adamw_torch": ("adamw", "foreach"),
    "adamw_torch_fused": ("adamw", "fused"),
    "adamw_8bit": ("adamw_8bit", None),
    "adamw_bnb_8bit": ("adamw_8bit", None),
    "paged_adamw_8bit": ("paged_adamw_8bit", None),
    "sgd": ("sgd", "foreach"),
}
"""The Trainer's names, with ours and torch's kernel (without a word torch takes foreach)."""
SHAPES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
ATTENTIONS: Mapping[str, str] = {
    "sdpa": "sdpa",
    "eager": "eager",
    "flash_attention_2": "flash_attention_2",
    "kernels-community/flash-attn": "flash_attention_2",
    "kernels-community/flash-attn2": "flash_attention_2",
}
"""Transformers' names with ours."""


def base_model(reading: Reading) -> None:
    """Ask for a model where none is named, or where its name says that it is published quantized alone."""
    named = reading.settings.get("model.id")
    if named is None:
        reading.decide("model.id", "The file names no model.", "ID", changes="both")
    elif re.search(_QUANTIZED_NAME, str(named.value)):
        key = next(key for key, row in reading.rules.items() if row is not None and row.fields == ("model.id",))
        why = "Its name says that it is published quantized; foretune quantizes a base itself."
        reading.block(key, "both", why, field="model.id")


def optimizer(reading: Reading, key: str) -> None:
    """Map the optimizer with its constants."""
    known = OPTIMIZERS.get(reading[key])
    if known is None:
        why = "foretune has adamw, adamw_8bit, paged_adamw_8bit and sgd."
        reading.block(key, "both", why, field="optimizer.name")
    else:
        name, kernel = known
        note = "torch's kernel without a word is foreach." if kernel == "foreach" else None
        reading.set("optimizer.name", name, key)
        if kernel is not None:
            reading.set("optimizer.implementation", kernel, key, note=note)
    names = {"adam_beta1": "optimizer.beta1", "adam_beta2": "optimizer.beta2", "adam_epsilon": "optimizer.epsilon"}
    for constant, field in names.items():
        if known is not None and known[0] == "sgd":
            reading.leave("A constant of AdamW.", constant)
        elif reading.get(constant) is not None:
            reading.set(field, float(reading[constant]), constant)
    if reading.get("max_grad_norm") is not None:
        clip = float(reading["max_grad_norm"])
        reading.set("optimizer.max_grad_norm", clip if clip > 0 else None, "max_grad_norm")


def length(reading: Reading, updates: str, epochs: str) -> int | None:
    """Map the length of the run. Returns the number of updates, where it is known."""
    given = reading.decided.get("schedule.updates")
    limit = given if isinstance(given, int) else reading[updates]
    if limit is not None and limit > 0:
        reading.set("schedule.updates", limit, updates)
        reading.leave(f"{updates} decides the length.", epochs)
        return int(limit)
    reading.leave("No limit.", updates)
    reading.set("schedule.epochs", float(reading[epochs]), epochs)
    return None


def shape(reading: Reading, key: str) -> None:
    """Map the learning rate's course."""
    ours = SHAPES.get(reading[key])
    if ours is None:
        why = "foretune's learning rate is constant, linear or cosine after its warm-up."
        reading.block(key, "result", why, field="schedule.shape")
    else:
        reading.set("schedule.shape", ours, key)


def warmup(reading: Reading, num_updates: int | None, share_to_updates: Callable[[float, int], int]) -> None:
    """Map the warm-up; a share of all updates needs their number."""
    steps, share = reading["warmup_steps"], reading["warmup_ratio"]
    used = "warmup_steps" if steps else "warmup_ratio"
    if steps:
        reading.leave("warmup_steps decides.", "warmup_ratio")
    if steps and steps >= 1:
        reading.set("schedule.warmup_updates", int(steps), used)
        return
    share = steps or share
    if not share:
        reading.leave("No warm-up.", "warmup_steps", "warmup_ratio")
    elif num_updates is not None:
        note = f"{share:g} of {num_updates} updates."
        reading.set("schedule.warmup_updates", share_to_updates(share, num_updates), used, note=note)
    else:
        message = f"The warm-up is {share:g} of all updates, and their number follows from the rows."
        reading.decide("schedule.warmup_updates", message, "N", used)


def no_warmup(reading: Reading) -> None:
    """Leave a warm-up that the schedule `constant` does not make."""
    reading.leave("The schedule constant has no warm-up.", "warmup_steps", "warmup_ratio")


def trainer_warmup(share: float, num_updates: int) -> int:
    """Return the Trainer's number of warm-up updates (get_warmup_steps)."""
    return math.ceil(share * num_updates)


def autocast(reading: Reading, computed: Dtype | None) -> None:
    """Give the profile the format of the computation; None: that of the weights."""
    if computed is None:
        reading.stack = reading.stack.with_(autocast="none", converts_outputs=False)
    elif computed != reading.stack.autocast:
        reading.stack = reading.stack.with_(autocast=computed, converts_outputs=True)


def hold(reading: Reading, held: Dtype, computed: Dtype | None, *keys: str) -> None:
    """Map the formats of the weights and of the computation (autocast; None: that of the weights).

    Weights in fp32 under autocast have no like here: foretune multiplies in the format that it holds.
    """
    autocast(reading, computed)
    if computed is None or computed == held:
        reading.set("precision.dtype", held, *keys)
        return
    message = (
        f"{reading.tool.title} would hold weights in {held} and multiply in {computed} (autocast); foretune multiplies "
        f"in the format that it holds: {computed} needs less memory, {held} is slower."
    )
    reading.decide("precision.dtype", message, computed, *keys, changes="result")
    reading.price("precision.dtype", held)


def attention(reading: Reading, key: str, names: Mapping[str, str] = ATTENTIONS) -> str | None:
    """Map the attention. Returns ours; None where the file leaves it to Transformers."""
    given = reading[key]
    if given is None:
        return None
    ours = names.get(given)
    if ours is None:
        reading.block(key, "memory", "foretune has sdpa, eager and flash_attention_2.", field="attention")
        return None
    reading.set("attention", ours, key)
    if ours == "flash_attention_2":
        reading.stack = reading.stack.with_(has_flash_package=True)
    return ours


def liger(reading: Reading, *keys: str, covers: str) -> None:
    """Map Liger's loss; in the tool's own program it stands in the place of the stock loss."""
    reading.set("loss", "liger", *keys, note=f"foretune takes Liger's loss alone; {covers}")
    reading.price("loss", "stock")
    reading.stack = reading.stack.with_(loss_kernel="liger")
    reading.stack_notes.append("Liger's other kernels (norms, rotary, MLP) are priced as the stock ones.")


def packed_as_full_rows(reading: Reading) -> None:
    """Price packed rows as full rows; what keeps their examples apart is known of flash attention alone: nothing."""
    reading.price("batch.packing", False)
    attention_of = reading.settings.get("attention")
    if attention_of is None or attention_of.value != "flash_attention_2":
        reading.stack_notes.append("What keeps the examples of a packed row apart (a mask) is not priced.")


def recompute(reading: Reading, is_on: bool, is_reentrant: bool, *keys: str) -> None:
    """Map activation checkpointing, and its form in the profile."""
    reading.set("gradient_checkpointing", is_on, *keys)
    if is_on and is_reentrant:
        reading.stack = reading.stack.with_(checkpoint_form="reentrant")


def evaluation(reading: Reading, strategy: str | None, steps: float | None, has_rows: bool, *keys: str) -> None:
    """Map how often there is an evaluation; `steps` below 1 is a share of all updates."""
    given = [key for key in keys if reading.has(key)]
    if strategy == "no" or not has_rows:
        reading.leave("Nothing is evaluated." if strategy == "no" else "There are no rows to evaluate on.", *given)
    elif strategy == "steps" and steps is not None and steps >= 1:
        reading.set("evaluation.every_updates", int(steps), *given)
    else:
        reading.leave("foretune evaluates by updates (evaluation.every_updates) or at the end.", *given)


def checkpoints(reading: Reading, strategy: str, steps: float | None, *keys: str) -> None:
    """Map how often the run can be resumed from; it changes nothing of what is trained."""
    given = [key for key in keys if reading.has(key)]
    if strategy == "steps" and steps is not None and steps >= 1:
        reading.set("checkpoint.every_updates", int(steps), *(given or keys))
        limit = reading["save_total_limit"]
        if limit is not None and limit >= 1:
            reading.set("checkpoint.keep", min(limit, 1000), "save_total_limit")
        else:
            reading.leave("foretune keeps the newest (checkpoint.keep).", "save_total_limit")
    else:
        reading.leave("foretune saves by updates or minutes (checkpoint).", *given, "save_total_limit")


def target_names(reading: Reading, names: list[str], *keys: str) -> None:
    """Map the names of adapted layers; what is no name is a pattern of PEFT's, which we have not."""
    if names in (["all-linear"], ["all"]):
        reading.set("lora.targets", "all-linear", *keys)
    elif all(name.replace("_", "").replace(".", "").isalnum() for name in names):
        reading.set("lora.targets", tuple(names), *keys)
    else:
        reading.block(keys[0], "both", "A pattern of layers; foretune takes their names.", field="lora.targets")


def trainer_arguments(reading: Reading, *, has_evaluation: bool) -> None:
    """Map what TrainingArguments say, but for precision and checkpointing, which each tool treats its own way."""
    optimizer(reading, "optim")
    num_updates = length(reading, "max_steps", "num_train_epochs")
    shape(reading, "lr_scheduler_type")
    if reading["lr_scheduler_type"] == "constant":
        no_warmup(reading)
    else:
        warmup(reading, num_updates, trainer_warmup)
    older = reading.has("evaluation_strategy") and not reading.has("eval_strategy")
    strategy = reading["evaluation_strategy" if older else "eval_strategy"]
    evaluation(
        reading, strategy, reading["eval_steps"], has_evaluation, "eval_strategy", "evaluation_strategy", "eval_steps"
    )
    checkpoints(reading, reading["save_strategy"], reading["save_steps"], "save_steps", "save_strategy")
    _sampling(reading)
    _evaluated_rows(reading, has_evaluation=has_evaluation)
    cards = str(reading["env.CUDA_VISIBLE_DEVICES"] or "")
    if "," in cards:
        reading.block("env.CUDA_VISIBLE_DEVICES", "both", "One device does the work here.")
    reading.leave("Which card is taken.", "env.CUDA_VISIBLE_DEVICES")
    if reading["use_cpu"] or reading["no_cuda"]:
        reading.set("device", "cpu", "use_cpu", "no_cuda")


def _evaluated_rows(reading: Reading, *, has_evaluation: bool) -> None:
    """Say where an evaluation has more rows at once than training: it may make the peak, and is not priced."""
    rows, micro = reading["per_device_eval_batch_size"], reading.settings.get("batch.micro_batch_size")
    if has_evaluation and micro is not None and isinstance(micro.value, int) and rows > micro.value:
        reading.stack_notes.append(f"Its evaluation has {rows} rows at once, which is not priced.")
    reading.leave("foretune evaluates in micro batches.", "per_device_eval_batch_size")


def _sampling(reading: Reading) -> None:
    way = reading["train_sampling_strategy"]
    if way == "group_by_length" or reading["group_by_length"]:
        note = "Rows of similar length come together; in which order differs."
        reading.set("batch.sort_by_length", True, "train_sampling_strategy", "group_by_length", note=note)
    elif way != "random":
        reading.block("train_sampling_strategy", "result", "foretune shuffles the rows of each epoch.")


def accumulate(reading: Reading) -> str:
    """State how many rows an update has."""
    micro = reading.settings.get("batch.micro_batch_size")
    steps = reading.settings.get("batch.accumulation_steps")
    if micro is None or steps is None:
        return "One process on one device is taken; several would multiply the rows of an update."
    assert isinstance(micro.value, int)
    assert isinstance(steps.value, int)
    rows = micro.value * steps.value
    return f"One process on one device is taken: {rows} rows an update ({micro.value} x {steps.value})."
