"""TRL's SFT: the arguments of `trl sft` (SFTConfig, ModelConfig, ScriptArguments), as of 1.16.

Read off trl/trainer/sft_config.py, base_config.py, model_config.py and scripts/utils.py.
"""

from foretune.foreign.meanings import (
    Dtype,
    accumulate,
    attention,
    autocast,
    hold,
    liger,
    packed_as_full_rows,
    recompute,
    target_names,
    trainer_arguments,
)
from foretune.foreign.reading import Reading
from foretune.foreign.rules import Key, Tool, blocks, ignored, maps, part
from foretune.foreign.trainer import LAUNCH, OLDER_ARGUMENTS, TRAINING_ARGUMENTS
from foretune.memory import TRAINER
from foretune.memory import TRL as TRL_STACK

__all__ = ["TRL"]

_DATASET = "How rows are found; foretune reads a JSONL file (data.train)."
_EVALUATION = "foretune evaluates on evaluation.data or evaluation.split."
_KEYS: dict[str, Key] = {
    **TRAINING_ARGUMENTS,
    # -- TRL's own defaults
    "learning_rate": maps("optimizer.learning_rate", "number", default=2e-5),
    "gradient_checkpointing": part("switch", "gradient_checkpointing", default=True),
    "bf16": part("switch", "precision.dtype", about="Silent: true unless fp16 is."),
    # -- the model
    "model_name_or_path": maps("model.id", "text"),
    "model_revision": part("text", "model.revision", default="main"),
    "dtype": part("text", "precision.dtype", "quantization.compute_dtype", default="float32"),
    "torch_dtype": part("text", "precision.dtype", about="The older name of dtype."),
    "attn_implementation": part("text", "attention"),
    "model_init_kwargs.dtype": part("text", "precision.dtype"),
    "model_init_kwargs.torch_dtype": part("text", "precision.dtype"),
    "model_init_kwargs.attn_implementation": part("text", "attention"),
    "model_init_kwargs.revision": part("text", "model.revision"),
    "model_init_kwargs.trust_remote_code": ignored("foretune runs no code of a model's repository."),
    "model_init_kwargs.use_cache": ignored("foretune trains without a cache."),
    "model_init_kwargs.device_map": ignored("One device is taken."),
    "model_init_kwargs.*": blocks("both", "foretune loads a model as its class has it."),
    "trust_remote_code": ignored("foretune runs no code of a model's repository."),
    "ignore_bias_buffers": ignored("About several processes; one is taken."),
    # -- adapters and quantization
    "use_peft": part("switch", "lora", default=False),
    "lora_r": part("count", "lora.rank", default=16),
    "lora_alpha": part("number", "lora.alpha", default=32),
    "lora_dropout": part("number", "lora.dropout", default=0.05),
    "lora_target_modules": part("listed", "lora.targets", about="Silent: PEFT's choice for the type of model."),
    "lora_modules_to_save": part("listed", "lora.modules_to_save"),
    "use_rslora": part("switch", "lora.use_rslora", default=False),
    "use_dora": part("switch", "lora.use_dora", default=False),
    "load_in_4bit": part("switch", "quantization.scheme", default=False),
    "load_in_8bit": part("switch", "quantization.scheme", default=False),
    "bnb_4bit_quant_type": part("text", "quantization.scheme", default="nf4"),
    "use_bnb_nested_quant": part("switch", "quantization.double_quant", default=False),
    "bnb_4bit_quant_storage": ignored("The same bytes under another type."),
    "lora_target_parameters": blocks("both", "foretune adapts linear layers."),
    "lora_task_type": blocks("both", "foretune trains language models.", off=("CAUSAL_LM",)),
    # -- rows
    "max_length": part("count", "batch.sequence_length", default=1024, takes_null=True),
    "max_seq_length": part("count", "batch.sequence_length", about="The older name of max_length.", takes_null=True),
    "truncation_mode": part("text", "data.truncation", default="keep_start"),
    "packing": part("switch", "batch.packing", default=False),
    "packing_strategy": part("text", "batch.packing", default="bfd"),
    "padding_free": part("switch", "batch.packing", default=False),
    "assistant_only_loss": part("switch", "data.supervision", default=False),
    "completion_only_loss": part("switch", "data.supervision"),
    "loss_type": part("text", "loss", default="nll"),
    "dataset_name": part("text", "data.train"),
    "dataset_config": part("text", "data.train"),
    "dataset_train_split": part("text", "data.train"),
    "dataset_test_split": part("text", "evaluation.data"),
    "datasets": part("any", "data.train"),
    "dataset_text_field": part("text", "data.train"),
    "dataset_kwargs": part("any", "data.train"),
    "test_split_size": part("number", "evaluation.split"),
    "dataset_streaming": blocks("result", "foretune reads the whole file, in an order of its own."),
    "streaming": blocks("result", "foretune reads the whole file, in an order of its own."),
    "shuffle_dataset": ignored("foretune shuffles each epoch."),
    "dataset_num_proc": ignored("How rows are read, not which."),
    "dataset_batch_size": ignored("How rows are read, not which."),
    "eval_packing": ignored("About evaluation alone."),
    "pad_to_multiple_of": ignored("A few tokens of padding.", default="auto"),
    "chat_template_path": blocks("result", "foretune renders with the tokenizer's own template."),
    "eos_token": blocks("result", "foretune ends rows as the tokenizer and its template do.", off=("<EOS_TOKEN>",)),
    "pad_token": ignored("Padding carries no loss."),
    "activation_offloading": blocks("memory", "foretune moves no activations to the host."),
    "router_aux_loss_coef": blocks("result", "foretune takes the model's own coefficient."),
    # -- around it
    "config": blocks("both", "What that file holds is not read: import it, and decide the rest with --set."),
    **LAUNCH,
}
_DTYPES: dict[str, Dtype] = {
    "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "float32": "fp32", "fp32": "fp32",
}  # fmt: skip
_ISOLATES = ("bfd", "bfd_split", "bfd-requeue", "ffd")


def _meaning(reading: Reading) -> None:
    _model(reading)
    is_quantized = _quantization(reading)
    _lora(reading, is_quantized=is_quantized)
    _precision(reading, is_quantized=is_quantized)
    _rows(reading)
    _data(reading)
    is_on = bool(reading["gradient_checkpointing"] if reading["activation_checkpointing"] is None else True)
    forms = ("gradient_checkpointing_kwargs.use_reentrant", "activation_checkpointing_kwargs.use_reentrant")
    keys = ("gradient_checkpointing", "activation_checkpointing", *forms)
    recompute(reading, is_on, any(reading[form] for form in forms), *keys)
    trainer_arguments(reading, has_evaluation=_evaluation(reading))
    if reading["use_liger_kernel"]:
        liger(reading, "use_liger_kernel", covers="use_liger_kernel exchanges norms, rotary and MLP too.")
    if reading["loss_type"] not in ("nll", "chunked_nll"):
        reading.block("loss_type", "result", "foretune's loss is the cross-entropy.")
    _older(reading)
    reading.remark("On Transformers 5.24, which has no such key, `trl sft` leaves it out unsaid.", *OLDER_ARGUMENTS)
    reading.notes.append(accumulate(reading))


def _older(reading: Reading) -> None:
    """Price a file of an older release on the Trainer: its loss had whole logits, not tiles."""
    older = [key for key in ("max_seq_length", "torch_dtype", "dataset_batch_size") if reading.has(key)]
    if not older:
        return
    changes = {"name": TRAINER.name, "is_nearest": True, "casts_adapters": False, "loads_onto_device": False}
    kernel = {} if reading.stack.loss_kernel == "liger" else {"loss_kernel": "none"}
    reading.stack = reading.stack.with_(kbit_upcast="all", **changes, **kernel)
    reading.stack_notes = [
        f"{older[0]} is a key of TRL before 1.0: the Trainer's profile, whose loss has whole logits, is nearest.",
        "The file's release is not told; with TRL 1.16 it needs less (--stack trl).",
    ]


def _model(reading: Reading) -> None:
    revision = reading["model_init_kwargs.revision"] or reading["model_revision"]
    if revision not in (None, "main"):
        reading.set("model.revision", revision, "model_revision", "model_init_kwargs.revision")
    kind = "model_init_kwargs.attn_implementation"
    attention(reading, kind if reading.has(kind) else "attn_implementation")


def _quantization(reading: Reading) -> bool:
    if reading["load_in_8bit"]:
        reading.set("quantization.scheme", "int8", "load_in_8bit")
        return True
    if not reading["load_in_4bit"]:
        return False
    if reading["bnb_4bit_quant_type"] != "nf4":
        reading.block("bnb_4bit_quant_type", "both", "foretune's 4 bits are nf4.", field="quantization.scheme")
    reading.set("quantization.scheme", "nf4", "load_in_4bit", "bnb_4bit_quant_type")
    reading.set("quantization.double_quant", reading["use_bnb_nested_quant"], "use_bnb_nested_quant")
    return True


def _lora(reading: Reading, *, is_quantized: bool) -> None:
    names = (
        "lora_r",
        "lora_alpha",
        "lora_dropout",
        "lora_target_modules",
        "lora_modules_to_save",
        "use_rslora",
        "use_dora",
    )
    if not reading["use_peft"]:
        reading.leave("Without use_peft every weight is trained.", *names)
        return
    reading.mean("Adapters are trained.", "use_peft")
    reading.set("lora.rank", reading["lora_r"], "lora_r")
    reading.set("lora.alpha", float(reading["lora_alpha"]), "lora_alpha")
    reading.set("lora.dropout", float(reading["lora_dropout"]), "lora_dropout")
    for key, field in (("use_rslora", "lora.use_rslora"), ("use_dora", "lora.use_dora")):
        if reading[key] or reading.has(key):
            reading.set(field, reading[key], key)
    if reading["lora_modules_to_save"]:
        reading.set("lora.modules_to_save", tuple(reading["lora_modules_to_save"]), "lora_modules_to_save")
    if reading["lora_target_modules"]:
        target_names(reading, reading["lora_target_modules"], "lora_target_modules")
    else:
        message = "lora_target_modules is not given: PEFT chooses by the type of model (of Llama q_proj and v_proj)."
        reading.decide("lora.targets", message, "[q_proj,v_proj]", changes="both")
    if is_quantized:
        note = "TRL casts the adapters of a quantized base to bf16."
        reading.set("precision.adapter_dtype", "bf16", "use_peft", note=note)
        reading.price("precision.adapter_dtype", "fp32")  # the profile makes them so, and casts them


def _precision(reading: Reading, *, is_quantized: bool) -> None:
    keys = ("model_init_kwargs.dtype", "model_init_kwargs.torch_dtype", "torch_dtype", "dtype")
    key = next((one for one in keys if reading.has(one)), "dtype")
    held = _DTYPES.get(reading[key].removeprefix("torch."))
    is_fp16 = bool(reading["fp16"])
    is_bf16 = not is_fp16 if reading["bf16"] is None else bool(reading["bf16"])
    computed: Dtype | None = "bf16" if is_bf16 else "fp16" if is_fp16 else None
    if held is None:
        autocast(reading, computed)
        message = f"{key} is {reading[key]}: the format is that of the checkpoint, which the file does not say."
        reading.decide("precision.dtype", message, "bf16", key, "bf16", "fp16", changes="both")
        return
    hold(reading, held, computed, key, "bf16", "fp16")


def _rows(reading: Reading) -> None:
    key = "max_seq_length" if reading.has("max_seq_length") else "max_length"
    if reading[key] is None:
        message = f"{key} is null: no row is cut, and the longest decides the memory (`foretune data check` shows it)."
        reading.decide("batch.sequence_length", message, "N", key, changes="both")
    else:
        reading.set("batch.sequence_length", reading[key], key)
    if reading["truncation_mode"] == "keep_start":
        reading.set("data.truncation", "right", "truncation_mode", note="TRL cuts longer rows without a word.")
    else:
        reading.block("truncation_mode", "result", "foretune cuts at the end, or stops.", field="data.truncation")
    _packing(reading)
    if reading["assistant_only_loss"] or reading["completion_only_loss"]:
        keys = ("assistant_only_loss", "completion_only_loss")
        reading.set("data.supervision", "assistant_only", *keys)
    elif reading["completion_only_loss"] is False:
        reading.set("data.supervision", "all_tokens", "completion_only_loss", "assistant_only_loss")
    else:
        message = (
            "completion_only_loss is not given: TRL trains on the completion of prompt-completion rows "
            "(assistant_only), and on all tokens of texts and conversations."
        )
        reading.decide("data.supervision", message, "all_tokens", "assistant_only_loss")


def _packing(reading: Reading) -> None:
    if not reading["packing"]:
        reading.leave("Nothing is packed.", "packing", "packing_strategy")
        if reading["padding_free"]:
            reading.block("padding_free", "memory", "foretune pads the rows of a micro batch.")
        return
    reading.leave("Packed rows have no padding.", "padding_free")
    way = reading["packing_strategy"]
    if way not in _ISOLATES:
        why = "Rows are cut anywhere and see one another; foretune packs whole rows, apart from each other."
        reading.block(
            "packing_strategy" if reading.has("packing_strategy") else "packing", "result", why, field="batch.packing"
        )
    elif reading.settings.get("attention") is None or reading.settings["attention"].value != "flash_attention_2":
        why = "Without flash attention TRL's packed rows see one another; foretune keeps them apart."
        reading.block("packing", "result", why, field="batch.packing")
        reading.price("batch.packing", False)  # no mask keeps them apart
    else:
        reading.set("batch.packing", True, "packing", "packing_strategy")
        packed_as_full_rows(reading)


def _data(reading: Reading) -> None:
    names = (
        "dataset_name",
        "datasets",
        "dataset_config",
        "dataset_train_split",
        "dataset_text_field",
        "dataset_kwargs",
    )
    shown = reading["dataset_name"] or ("datasets" if reading.has("datasets") else None)
    what = "The file names no rows." if shown is None else f"The rows are a dataset ({shown}), not a file."
    message = f"{what} foretune reads JSONL; `foretune data convert` makes it."
    reading.decide("data.train", message, "FILE.jsonl", *names)


def _evaluation(reading: Reading) -> bool:
    is_on = (reading["evaluation_strategy"] or reading["eval_strategy"]) != "no"
    if not is_on:
        reading.leave("Nothing is evaluated.", "dataset_test_split", "test_split_size")
        return False
    if reading.has("test_split_size"):
        reading.set("evaluation.split", float(reading["test_split_size"]), "test_split_size")
        return True
    message = "It evaluates on a split of the dataset; foretune on a file, or on a share of the rows."
    reading.decide(
        "evaluation.data", message, "FILE.jsonl", "dataset_test_split", "eval_strategy", "evaluation_strategy"
    )
    return True


TRL = Tool(
    name="trl",
    title="TRL",
    version="1.16",
    keys=_KEYS,
    meaning=_meaning,
    stack=TRL_STACK,
    stack_notes=(
        "The profile is of TRL 1.16 on Transformers 5.24 and PEFT 0.21.",
        "Releases whose loss has whole logits need more (--stack trainer).",
    ),
)
"""SFTTrainer by `trl sft`."""
