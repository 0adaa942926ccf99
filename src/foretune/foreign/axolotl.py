"""axolotl's configuration, as of 0.19.

Read off axolotl/utils/schemas/*.py, core/builders/{base,causal}.py and loaders/model.py.
"""

from foretune.foreign.axolotl_keys import AXOLOTL_KEYS
from foretune.foreign.convert import shown
from foretune.foreign.meanings import (
    ATTENTIONS,
    accumulate,
    attention,
    autocast,
    checkpoints,
    evaluation,
    hold,
    length,
    liger,
    no_warmup,
    optimizer,
    packed_as_full_rows,
    recompute,
    shape,
    target_names,
    warmup,
)
from foretune.foreign.reading import Reading
from foretune.foreign.rules import Tool
from foretune.memory import FORETUNE, TRAINER

__all__ = ["AXOLOTL"]

_FLAGS = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "xformers_attention": "xformers",
    "flex_attention": "flex_attention",
    "sage_attention": "sage",
}
"""Older switches with the implementation that each stands for."""
_CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
"""On as soon as it is named, unless cut_cross_entropy is false."""
_PLUGINS = ("axolotl.integrations.liger.LigerPlugin", _CUT)
_PLAIN_ROWS: dict[str, tuple[object, ...]] = {
    "ds_type": ("json",),
    "type": ("chat_template",),
    "split": ("train",),
    "chat_template": ("tokenizer_default",),
    "field_messages": ("messages",),
    "message_field_role": ("role",),
    "message_field_content": ("content",),
    "message_property_mappings": ({"role": "role", "content": "content"},),
    "roles_to_train": (["assistant"],),
    "train_on_eos": ("turn",),
}
"""Keys of a dataset that say what foretune does as well."""
_OUTSIDE = frozenset({"embed_tokens", "embed_in", "embed_out", "lm_head", "wte", "word_embeddings"})
_LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear", "lora_modules_to_save",
         "peft_use_dora", "peft_use_rslora")  # fmt: skip


def _meaning(reading: Reading) -> None:
    _model(reading)
    ours = _attention(reading)
    _method(reading)
    _precision(reading)
    _batch(reading)
    _checkpointing(reading)
    _loss(reading)
    _rows(reading, ours)
    optimizer(reading, "optimizer")
    _schedule(reading)
    has_evaluation = _data(reading)
    steps = reading["eval_steps"]
    strategy = "steps" if steps else reading["eval_strategy"] or reading["evaluation_strategy"]
    keys = ("eval_steps", "eval_strategy", "evaluation_strategy", "evals_per_epoch")
    evaluation(reading, strategy, steps, has_evaluation, *keys)
    saving = "steps" if reading["save_steps"] else reading["save_strategy"] or "epoch"
    checkpoints(reading, saving, reading["save_steps"], "save_steps", "save_strategy", "saves_per_epoch")
    reading.notes.append(accumulate(reading))


def _model(reading: Reading) -> None:
    if not reading.has("learning_rate"):
        reading.decide("optimizer.learning_rate", "No learning rate is given, which axolotl asks for.", "2e-4")
    revision = reading["model_revision"] or reading["revision_of_model"]
    if revision is not None:
        reading.set("model.revision", revision, "model_revision", "revision_of_model")


def _attention(reading: Reading) -> str | None:
    if reading["attn_implementation"] is not None:
        reading.leave("attn_implementation decides.", *_FLAGS)
        return attention(reading, "attn_implementation")
    chosen = next((key for key in _FLAGS if reading[key]), None)
    reading.leave("Off.", *(key for key in _FLAGS if not reading[key]))
    if chosen is None:
        return None
    reading.leave(f"{chosen} decides.", *(key for key in _FLAGS if reading[key] and key != chosen))
    if _FLAGS[chosen] not in ATTENTIONS:
        reading.block(chosen, "memory", "foretune has sdpa, eager and flash_attention_2.", field="attention")
        return None
    reading.set("attention", ATTENTIONS[_FLAGS[chosen]], chosen)
    if chosen == "flash_attention":
        reading.stack = reading.stack.with_(has_flash_package=True)
    return ATTENTIONS[_FLAGS[chosen]]


def _method(reading: Reading) -> None:
    method = reading["adapter"]
    options = tuple(key for key in reading.matching("bnb_config_kwargs."))
    if method is None:
        reading.leave("Without an adapter every weight is trained.", *_LORA, "load_in_4bit", "load_in_8bit", *options)
        for key in ("load_in_4bit", "load_in_8bit"):
            if reading[key]:
                reading.block(key, "both", "A quantized base is trained through adapters alone.", field="quantization")
        return
    if method not in ("lora", "qlora"):
        reading.block("adapter", "both", "foretune's adapters are LoRA's.", field="lora")
        return
    reading.mean("Adapters are trained.", "adapter")
    _lora(reading)
    if method == "qlora" and reading["load_in_4bit"] is not False:
        _four_bits(reading)
    elif method == "lora" and reading["load_in_8bit"]:
        reading.set("quantization.scheme", "int8", "load_in_8bit", "adapter")
        reading.leave("Options of 4 bits.", *options)
    elif reading["load_in_4bit"] or reading["load_in_8bit"]:
        key = "load_in_4bit" if reading["load_in_4bit"] else "load_in_8bit"
        why = f"adapter is {method}: axolotl loads 4 bits with qlora and 8 with lora."
        reading.block(key, "both", why, field="quantization.scheme")
    reading.leave("Off.", "load_in_4bit", "load_in_8bit")


def _lora(reading: Reading) -> None:
    for key, field, example in (("lora_r", "lora.rank", "16"), ("lora_alpha", "lora.alpha", "32")):
        if reading[key] is None:
            reading.decide(field, f"{key} is not given.", example, changes="both")
        else:
            reading.set(field, reading[key] if key == "lora_r" else float(reading[key]), key)
    reading.set("lora.dropout", float(reading["lora_dropout"]), "lora_dropout")
    names = reading["lora_target_modules"]
    if reading["lora_target_linear"] and set(names or ()) & _OUTSIDE:
        why = "Beside all linear layers it names embeddings or the head, which foretune trains whole."
        reading.block("lora_target_modules", "both", why, field="lora.targets")
    if reading["lora_target_linear"]:
        reading.set("lora.targets", "all-linear", "lora_target_linear")
        reading.leave("lora_target_linear takes all linear layers.", "lora_target_modules")
    elif names:
        reading.leave("Off.", "lora_target_linear")
        target_names(reading, names, "lora_target_modules")
    else:
        reading.leave("Off.", "lora_target_linear")
        message = "Neither lora_target_modules nor lora_target_linear is given: PEFT chooses by the type of model."
        reading.decide("lora.targets", message, "[q_proj,v_proj]", changes="both")
    if reading["lora_modules_to_save"]:
        reading.set("lora.modules_to_save", tuple(reading["lora_modules_to_save"]), "lora_modules_to_save")
    for key, field in (("peft_use_dora", "lora.use_dora"), ("peft_use_rslora", "lora.use_rslora")):
        reading.set(field, bool(reading[key]), key)


def _four_bits(reading: Reading) -> None:
    kind, nested = "bnb_config_kwargs.bnb_4bit_quant_type", "bnb_config_kwargs.bnb_4bit_use_double_quant"
    if reading[kind] != "nf4":
        reading.block(kind, "both", "foretune's 4 bits are nf4.", field="quantization.scheme")
    reading.set("quantization.scheme", "nf4", "load_in_4bit", "adapter", kind)
    reading.set("quantization.double_quant", bool(reading[nested]), nested)


def _precision(reading: Reading) -> None:
    """bf16, then fp16, then fp32; with `auto` the card decides. `full` and float16 are without autocast."""
    keys = ("bf16", "bfloat16", "fp16", "float16", "float32", "load_in_8bit")
    bf16, fp16 = reading["bf16"], bool(reading["fp16"])
    word = str(bf16).lower()
    if word == "full":
        hold(reading, "bf16", None, *keys[:-1])
    elif word in ("true", "yes") or reading["bfloat16"]:
        hold(reading, "bf16", "bf16", *keys[:-1])
    elif fp16:
        hold(reading, "fp16", "fp16", *keys[:-1])
    elif word == "auto":
        chosen = reading.decided.get("precision.dtype")
        autocast(reading, "fp16" if chosen == "fp16" else "bf16")
        message = "bf16 is auto: bf16 on cards that have it (compute capability 8.0 and later), else fp16."
        reading.decide("precision.dtype", message, "bf16", *keys[:-1], changes="both")
    elif reading["float16"] or reading["load_in_8bit"]:
        hold(reading, "fp16", None, *keys)
    else:
        hold(reading, "fp32", None, *keys[:-1])


def _batch(reading: Reading) -> None:
    total, micro = reading["batch_size"], reading["micro_batch_size"]
    steps = reading["gradient_accumulation_steps"]
    if total and not reading.has("gradient_accumulation_steps"):
        reading.set("batch.accumulation_steps", max(total // micro, 1), "batch_size", "gradient_accumulation_steps")
    else:
        reading.set("batch.accumulation_steps", steps, "gradient_accumulation_steps")
        reading.leave("gradient_accumulation_steps decides.", "batch_size")
    if reading["group_by_length"]:
        note = "Rows of similar length come together; in which order differs."
        reading.set("batch.sort_by_length", True, "group_by_length", note=note)
    reading.leave("Off.", "group_by_length")


def _checkpointing(reading: Reading) -> None:
    form, way = "gradient_checkpointing_kwargs.use_reentrant", reading["gradient_checkpointing"]
    if str(way).lower() in ("offload", "offload_disk"):
        why = "foretune moves no activations to the host."
        reading.block("gradient_checkpointing", "memory", why, field="gradient_checkpointing")
        return
    recompute(reading, str(way).lower() in ("true", "yes"), bool(reading[form]), "gradient_checkpointing", form)


def _loss(reading: Reading) -> None:
    plugins = reading["plugins"] or []
    if any(name not in _PLUGINS for name in plugins):
        other = ", ".join(name for name in plugins if name not in _PLUGINS)
        reading.block("plugins", "both", f"What {other} does is not known here.")
    else:
        reading.leave("Each is asked for by keys of its own.", "plugins")
    if reading["liger_fused_linear_cross_entropy"]:
        liger(reading, "liger_fused_linear_cross_entropy", covers="other kernels of Liger have keys of their own.")
    is_cut = _CUT in plugins if reading["cut_cross_entropy"] is None else reading["cut_cross_entropy"]
    if is_cut:
        note = "The same loss without whole logits, by another program."
        reading.set("loss", "chunked", "cut_cross_entropy", "plugins", note=note)
        reading.stack = FORETUNE.with_(is_nearest=True)
        reading.stack_notes.append(
            "No profile has its cut cross-entropy: foretune's own, whose loss is in chunks, is nearest."
        )
    reading.leave("Off.", "liger_fused_linear_cross_entropy", "cut_cross_entropy")


def _rows(reading: Reading, ours: str | None) -> None:
    ways = {"truncate": "right", "raise": "error", "drop": "error", None: "error"}
    way = reading["excess_length_strategy"]
    if way in ways:
        is_dropped = way in (None, "drop")
        note = "axolotl leaves longer rows out; foretune stops at the first, and drops none." if is_dropped else None
        reading.set("data.truncation", ways[way], "excess_length_strategy", note=note)
        if way is None:
            reading.notes.append(f"excess_length_strategy is not given: {note}")
    else:
        reading.block("excess_length_strategy", "result", "It is drop, truncate or raise.", field="data.truncation")
    note = "In conversations roles_to_train decides, which is the assistant by default."
    supervision = "all_tokens" if reading["train_on_inputs"] else "assistant_only"
    reading.set("data.supervision", supervision, "train_on_inputs", note=note)
    if not reading["sample_packing"]:
        reading.leave("Off.", "sample_packing")
    elif ours is None and "attention" not in reading.settings:
        why = "Without a word on attention axolotl's packed rows see one another; foretune keeps them apart."
        reading.block("sample_packing", "result", why, field="batch.packing")
    else:
        reading.set("batch.packing", True, "sample_packing")
        packed_as_full_rows(reading)
    if reading["chat_template"] not in (None, "tokenizer_default"):
        why = "foretune renders with the tokenizer's own chat template; axolotl's of this name may differ."
        reading.block("chat_template", "result", why)
    reading.leave("The tokenizer's own.", "chat_template")


def _schedule(reading: Reading) -> None:
    num_updates = length(reading, "max_steps", "num_epochs")
    shape(reading, "lr_scheduler")
    if reading["lr_scheduler"] == "constant":
        no_warmup(reading)
    elif reading["warmup_steps"] is None and reading["warmup_ratio"] is None:
        _unsaid_warmup(reading, num_updates)
    else:
        warmup(reading, num_updates, _warmup)


def _unsaid_warmup(reading: Reading, updates: int | None) -> None:
    """Map axolotl's own warm-up: 3 % of the updates, at most 100."""
    if updates is None:
        message = (
            "No warm-up is given: axolotl takes 3 % of all updates, at most 100; their number follows from the rows."
        )
        reading.decide("schedule.warmup_updates", message, "N")
        return
    number = min(int(0.03 * updates), 100)
    reading.always("schedule.warmup_updates", 2 if number == 1 else number, "warmup_steps", "3 % of the updates")


def _warmup(share: float, num_updates: int) -> int:
    number = max(int(share * num_updates), 0)
    return 2 if number == 1 else number


def _data(reading: Reading) -> bool:
    """Map one local JSONL file, else ask for one. Returns whether there are rows to evaluate on."""
    keys = reading.matching("datasets")
    path = reading.values.get("datasets[0].data_files") or reading.values.get("datasets[0].path")
    path = path[0] if isinstance(path, list) and len(path) == 1 else path
    is_one = not any(key.startswith("datasets[1]") for key in keys)
    other = [key for key in keys if is_one and not _is_plain(key, reading.values.get(key))]
    if is_one and isinstance(path, str) and path.lower().endswith(".jsonl") and not other:
        note = (
            "Relative to where axolotl is started. `foretune data check` says whether its rows are what foretune reads."
        )
        reading.set("data.train", path, *keys, note=note)
    else:
        what = (
            "The file names no rows."
            if not keys
            else f"The rows are {path if is_one else 'several datasets'}, not one JSONL file."
        )
        if other:
            named = ", ".join(f"{key}: {shown(key, reading.values.get(key))}" for key in other)
            what = f"How axolotl reads its rows ({named}) has no like here."
        message = f"{what} `foretune data convert` makes rows of foretune's form."
        reading.decide("data.train", message, "FILE.jsonl", *keys)
    tests, share = reading.matching("test_datasets"), reading["val_set_size"] or 0
    if tests:
        message = "It evaluates on test_datasets; foretune on a JSONL file."
        reading.decide("evaluation.data", message, "FILE.jsonl", *tests)
        return True
    if share >= 1:
        message = f"It holds out {share:g} rows; foretune a share of them."
        reading.decide("evaluation.split", message, "0.1", "val_set_size")
    elif share > 0:
        reading.set("evaluation.split", float(share), "val_set_size")
    reading.leave("Nothing is held out.", "val_set_size")
    return bool(share > 0)


def _is_plain(key: str, value: object) -> bool:
    """Whether a key of a dataset says what foretune does as well: conversations by the tokenizer's template."""
    name = key.partition("].")[2]
    return name in ("path", "data_files") or value in (None, *_PLAIN_ROWS.get(name, ()))


AXOLOTL = Tool(
    name="axolotl",
    title="axolotl",
    version="0.19",
    keys=AXOLOTL_KEYS,
    meaning=_meaning,
    stack=TRAINER.with_(
        torch="2.11", transformers="5.16", peft="0.20", is_nearest=True, kbit_upcast="none", rotary_by_product=True
    ),
    stack_notes=(
        "axolotl runs Transformers' Trainer (5.16 with PEFT 0.20).",
        "It turns its own LoRA kernels on by itself where it can; they are priced as the stock ones.",
        "In a full fine-tune without flash attention its embeddings and norms are fp32, which is not priced.",
    ),
)
"""`axolotl train`."""
