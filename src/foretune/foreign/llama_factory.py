"""LLaMA-Factory's training arguments (YAML or JSON), as of 0.9.5.

Read off llamafactory/hparams/*.py and model/{adapter,patcher}.py.
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
from foretune.foreign.trainer import LAUNCH, TRAINING_ARGUMENTS
from foretune.memory import TRAINER

__all__ = ["LLAMA_FACTORY"]

_METHOD = "foretune trains full, LoRA and QLoRA."
_OPTIMIZER = "foretune has adamw, adamw_8bit, paged_adamw_8bit and sgd."
_LOSS = "foretune's loss is the cross-entropy."
_STAGE = "Read in another stage alone."
_IMAGES = "foretune trains on text."
_INFERENCE = "Not a part of training."
_TOKENS = "foretune trains with the tokenizer as it is."
_READING = "How rows are read, not which."

_KEYS: dict[str, Key] = {
    **TRAINING_ARGUMENTS,
    **LAUNCH,
    "stage": blocks("both", "foretune trains on labelled tokens (sft).", off=("sft",)),
    # -- the model
    "model_name_or_path": maps("model.id", "text"),
    "model_revision": part("text", "model.revision", default="main"),
    "flash_attn": part("text", "attention", default="auto"),
    "enable_liger_kernel": part("switch", "loss", default=False),
    "disable_gradient_checkpointing": part("switch", "gradient_checkpointing", default=False),
    "use_reentrant_gc": part("switch", about="The form of the program, not its result.", default=True),
    "pure_bf16": part("switch", "precision.dtype", default=False),
    "upcast_layernorm": part("switch", about="Norms in fp32; priced, and not done here.", default=False),
    # -- adapters and quantization
    "finetuning_type": part("text", "lora", default="lora"),
    "lora_rank": part("count", "lora.rank", default=8),
    "lora_alpha": part("number", "lora.alpha", about="Silent: twice the rank."),
    "lora_dropout": part("number", "lora.dropout", default=0.0),
    "lora_target": part("names", "lora.targets", default="all"),
    "additional_target": part("names", "lora.modules_to_save"),
    "use_rslora": part("switch", "lora.use_rslora", default=False),
    "use_dora": part("switch", "lora.use_dora", default=False),
    "quantization_bit": part("count", "quantization.scheme"),
    "quantization_method": part("text", "quantization.scheme", default="bnb"),
    "quantization_type": part("text", "quantization.scheme", default="nf4"),
    "double_quantization": part("switch", "quantization.double_quant", default=True),
    "quantization_device_map": ignored("Not for training."),
    # -- rows
    "cutoff_len": maps("batch.sequence_length", "count", default=2048),
    "template": part("text", about="foretune renders with the tokenizer's own chat template."),
    "dataset": part("any", "data.train"),
    "dataset_dir": part("text", "data.train", default="data"),
    "eval_dataset": part("any", "evaluation.data"),
    "val_size": part("number", "evaluation.split", default=0.0),
    "train_on_prompt": part("switch", "data.supervision", default=False),
    "packing": part("switch", "batch.packing", default=False),
    "neat_packing": part("switch", "batch.packing", default=False),
    "mask_history": blocks("result", "foretune trains on every answer of a conversation."),
    "streaming": blocks("result", "foretune reads the whole file, in an order of its own."),
    "mix_strategy": blocks("result", "foretune reads one file.", off=("concat",)),
    "interleave_probs": blocks("result", "foretune reads one file."),
    "max_samples": blocks("result", "foretune trains on every row of the file; shorten the file."),
    "ignore_pad_token_for_loss": part("switch", about="Padding carries no loss here.", default=True),
    "tool_format": blocks("result", "foretune refuses rows with tools."),
    "default_system": blocks("result", "foretune adds no system text; write it in the rows."),
    "enable_thinking": part("switch", about="How the template treats thinking.", default=True),
    "preserve_thinking": blocks("result", "foretune renders as the template does."),
    "tokenized_path": blocks("result", "foretune encodes rows itself."),
    "media_dir": ignored("Where images are."),
    "disable_shuffling": blocks("result", "foretune shuffles the rows of each epoch."),
    # -- no counterpart, and it matters
    "adapter_name_or_path": blocks("both", "foretune begins with new adapters."),
    "adapter_folder": blocks("both", "foretune begins with new adapters."),
    "create_new_adapter": blocks("both", "foretune begins with new adapters."),
    "pissa_init": blocks("result", "foretune's adapters begin as PEFT's do by default."),
    "loraplus_lr_ratio": blocks("result", "foretune has one learning rate."),
    "use_unsloth": blocks("both", "Unsloth's kernels are not here."),
    "use_unsloth_gc": blocks("memory", "foretune moves no activations to the host."),
    "use_galore": blocks("both", _OPTIMIZER),
    "use_apollo": blocks("both", _OPTIMIZER),
    "use_badam": blocks("both", _OPTIMIZER),
    "use_adam_mini": blocks("both", _OPTIMIZER),
    "use_muon": blocks("both", _OPTIMIZER),
    "use_mca": blocks("both", "Megatron's program is not here."),
    "use_kt": blocks("both", "KTransformers' program is not here."),
    "use_hyper_parallel": blocks("both", "One device does the work here (parallelism: single)."),
    "use_llama_pro": blocks("both", _METHOD),
    "use_dft_loss": blocks("result", _LOSS),
    "use_asft_loss": blocks("both", _LOSS),
    "use_eaft_loss": blocks("result", _LOSS),
    "shift_attn": blocks("both", "Shifted sparse attention is not here."),
    "mixture_of_depths": blocks("both", "foretune loads a model as its class has it."),
    "rope_scaling": blocks("result", "foretune takes the model's own positions."),
    "resize_vocab": blocks("both", _TOKENS),
    "add_tokens": blocks("both", _TOKENS),
    "add_special_tokens": blocks("both", _TOKENS),
    "new_special_tokens_config": blocks("both", _TOKENS),
    "split_special_tokens": blocks("result", _TOKENS),
    "moe_aux_loss_coef": blocks("result", "foretune takes the model's own coefficient."),
    "upcast_lmhead_output": blocks("memory", "foretune's head keeps its format."),
    "train_from_scratch": blocks("both", "foretune begins with published weights."),
    "freeze_vision_tower": blocks("both", _IMAGES, off=(True,)),
    "freeze_multi_modal_projector": blocks("both", _IMAGES, off=(True,)),
    "freeze_language_model": blocks("both", _IMAGES),
    "early_stopping_steps": blocks("result", "foretune runs as long as it is asked to."),
    "ray_num_workers": blocks("both", "One device does the work here.", off=(0, 1)),
    "ray_run_name": ignored("About Ray."),
    "ray_init_kwargs": ignored("About Ray."),
    "fp8_backend": ignored("Read with fp8 alone."),
    "fp8_enable_fsdp_float8_all_gather": ignored("Read with fp8 alone."),
    # -- no counterpart, and it does not matter
    "trust_remote_code": ignored("foretune runs no code of a model's repository."),
    "low_cpu_mem_usage": ignored("How weights are read."),
    "ref_model": ignored(_STAGE),
    "reward_model": ignored(_STAGE),
    **dict.fromkeys(
        ("pref_beta", "pref_ftx", "pref_bco_weight", "pref_loss", "dpo_label_smoothing", "kto_chosen_weight",
         "kto_rejected_weight", "simpo_gamma", "ppo_buffer_size", "ppo_epochs", "ppo_score_norm", "ppo_target",
         "ppo_whiten_rewards", "ref_model_adapters", "ref_model_quantization_bit", "reward_model_adapters",
         "reward_model_quantization_bit", "reward_model_type", "ld_alpha"),
        ignored(_STAGE),
    ),
    **dict.fromkeys(
        ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules", "module_dropout", "oft_rank",
         "oft_block_size", "oft_target", "pissa_iter", "pissa_convert", "loraplus_lr_embedding", "galore_target",
         "galore_rank", "galore_update_interval", "galore_scale", "galore_proj_type", "galore_layerwise",
         "apollo_target", "apollo_rank", "apollo_update_interval", "apollo_scale", "apollo_proj", "apollo_proj_type",
         "apollo_scale_type", "apollo_layerwise", "apollo_scale_front", "badam_mode", "badam_start_block",
         "badam_switch_mode", "badam_switch_interval", "badam_update_ratio", "badam_mask_mode", "badam_verbose",
         "asft_alpha", "eaft_alpha", "hyper_parallel_args", "kt_weight_path", "kt_expert_checkpoint_path",
         "kt_use_lora_experts", "kt_lora_expert_num", "kt_lora_expert_intermediate_size"),
        ignored("Read with another method or optimizer alone."),
    ),
    **dict.fromkeys(
        ("cache_dir", "hf_hub_token", "ms_hub_token", "om_hub_token", "offload_folder", "use_fast_tokenizer",
         "init_special_tokens", "buffer_size", "overwrite_cache", "preprocessing_batch_size",
         "preprocessing_num_workers", "data_shared_file_system", "eval_on_each_dataset", "eval_num_beams"),
        ignored(_READING),
    ),
    **dict.fromkeys(
        ("plot_loss", "compute_accuracy", "print_param_status", "include_effective_tokens_per_second", "use_swanlab",
         "swanlab_project", "swanlab_workspace", "swanlab_run_name", "swanlab_mode", "swanlab_api_key",
         "swanlab_logdir", "swanlab_lark_webhook_url", "swanlab_lark_secret", "enable_torch_profiler",
         "profiler_output_dir", "profiler_wait_steps", "profiler_warmup_steps", "profiler_active_steps",
         "profiler_repeat", "profiler_record_shapes", "profiler_profile_memory", "profiler_with_stack",
         "profile_modules", "ray_storage_path", "master_addr", "master_port"),
        ignored("Logging."),
    ),
    **dict.fromkeys(
        ("infer_backend", "infer_dtype", "use_kv_cache", "use_v1_kernels", "do_sample", "temperature", "top_p",
         "top_k", "num_beams", "max_length", "max_new_tokens", "repetition_penalty", "length_penalty",
         "skip_special_tokens", "predict_with_generate", "generation_max_length", "generation_num_beams",
         "generation_config", "sortish_sampler", "export_dir", "export_size", "export_device",
         "export_quantization_bit", "export_quantization_dataset", "export_quantization_nsamples",
         "export_quantization_maxlen", "export_legacy_format", "export_hub_model_id", "vllm_maxlen", "vllm_gpu_util",
         "vllm_enforce_eager", "vllm_max_lora_rank", "vllm_config", "sglang_maxlen", "sglang_mem_fraction",
         "sglang_tp_size", "sglang_config", "sglang_lora_backend"),
        ignored(_INFERENCE),
    ),
    **dict.fromkeys(
        ("image_max_pixels", "image_min_pixels", "image_do_pan_and_scan", "image_resolution", "crop_to_patches",
         "video_max_pixels", "video_min_pixels", "video_resolution", "video_fps", "video_maxlen", "use_audio_in_video",
         "audio_sampling_rate"),
        ignored("About images, video and sound, of which text has none."),
    ),
}  # fmt: skip
_ATTENTIONS = {"sdpa": "sdpa", "disabled": "eager", "fa2": "flash_attention_2"}


def _meaning(reading: Reading) -> None:
    if reading["model_revision"] != "main":
        reading.set("model.revision", reading["model_revision"], "model_revision")
    if reading["flash_attn"] != "auto":
        attention(reading, "flash_attn", _ATTENTIONS)
    else:
        reading.leave("Transformers chooses.", "flash_attn")
    is_full = reading["finetuning_type"] == "full"
    _method(reading, is_full=is_full)
    _quantization(reading)
    _precision(reading, is_full=is_full)
    _checkpointing(reading)
    if reading["enable_liger_kernel"] or reading["use_liger_kernel"]:
        liger(
            reading,
            "enable_liger_kernel",
            "use_liger_kernel",
            covers="LLaMA-Factory exchanges norms, rotary and MLP too.",
        )
    _rows(reading)
    trainer_arguments(reading, has_evaluation=_data(reading))
    reading.notes.append(accumulate(reading))


def _method(reading: Reading, *, is_full: bool) -> None:
    names = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "additional_target", "use_rslora", "use_dora")
    if is_full:
        reading.mean("Every weight is trained.", "finetuning_type")
        reading.leave("Every weight is trained.", *names)
        return
    if reading["finetuning_type"] != "lora":
        reading.block("finetuning_type", "both", _METHOD, field="lora")
        return
    rank, alpha = reading["lora_rank"], reading["lora_alpha"]
    reading.mean("Adapters are trained.", "finetuning_type")
    reading.set("lora.rank", rank, "lora_rank")
    note = None if alpha else "LLaMA-Factory takes twice the rank."
    reading.set("lora.alpha", float(alpha or 2 * rank), "lora_alpha", note=note)
    reading.set("lora.dropout", float(reading["lora_dropout"]), "lora_dropout")
    targets = reading["lora_target"]
    target_names(reading, targets if isinstance(targets, list) else [targets], "lora_target")
    if reading["additional_target"]:
        reading.set("lora.modules_to_save", tuple(reading["additional_target"]), "additional_target")
    for key, field in (("use_rslora", "lora.use_rslora"), ("use_dora", "lora.use_dora")):
        reading.set(field, bool(reading[key]), key)


def _quantization(reading: Reading) -> None:
    bits = reading["quantization_bit"]
    names = ("quantization_method", "quantization_type", "double_quantization")
    if bits is None:
        reading.leave("Read with quantization_bit alone.", *names)
        return
    if bits not in (4, 8) or reading["quantization_method"].lower() not in ("bnb", "bitsandbytes"):
        key = "quantization_bit" if bits not in (4, 8) else "quantization_method"
        reading.block(key, "both", "foretune holds bases in nf4 and int8 (bitsandbytes).", field="quantization.scheme")
    elif bits == 8:
        reading.set("quantization.scheme", "int8", "quantization_bit", "quantization_method")
        reading.leave("Options of 4 bits.", "quantization_type", "double_quantization")
    elif reading["quantization_type"] != "nf4":
        reading.block("quantization_type", "both", "foretune's 4 bits are nf4.", field="quantization.scheme")
    else:
        reading.set("quantization.scheme", "nf4", "quantization_bit", "quantization_method", "quantization_type")
        reading.set("quantization.double_quant", bool(reading["double_quantization"]), "double_quantization")
    if reading["upcast_layernorm"]:
        reading.stack = reading.stack.with_(kbit_upcast="norms")


def _precision(reading: Reading, *, is_full: bool) -> None:
    """Weights are loaded in the format of the computation; what is trained is made fp32 then, unless pure_bf16."""
    keys = ("bf16", "fp16", "pure_bf16")
    if reading["pure_bf16"]:
        hold(reading, "bf16", "bf16" if reading["bf16"] else None, "pure_bf16", "bf16", "fp16")
    elif reading["bf16"] or reading["fp16"]:
        computed: Dtype = "bf16" if reading["bf16"] else "fp16"
        hold(reading, "fp32" if is_full else computed, computed, *keys)
    else:
        message = "Neither bf16, fp16 nor pure_bf16 is true: the format is that of the checkpoint, if the card has it."
        reading.decide("precision.dtype", message, "bf16", *keys, changes="both")
        autocast(reading, None)
    if reading["upcast_layernorm"] and reading["quantization_bit"] is None:
        reading.block("upcast_layernorm", "both", "foretune's norms have the format of the weights.")
    elif reading["upcast_layernorm"]:
        reading.leave("Priced in the profile; foretune's norms have the format of the weights.", "upcast_layernorm")


def _checkpointing(reading: Reading) -> None:
    is_on = not reading["disable_gradient_checkpointing"]
    keys = ("disable_gradient_checkpointing", "use_reentrant_gc")
    recompute(reading, is_on, bool(reading["use_reentrant_gc"]), *keys)
    reading.leave("disable_gradient_checkpointing decides.", "gradient_checkpointing", "activation_checkpointing")


def _rows(reading: Reading) -> None:
    note = "LLaMA-Factory shares the cut between prompt and answer; foretune cuts at the end."
    reading.set("data.truncation", "right", "cutoff_len", note=note)
    supervision = "all_tokens" if reading["train_on_prompt"] else "assistant_only"
    reading.set("data.supervision", supervision, "train_on_prompt")
    if reading["neat_packing"]:
        reading.set("batch.packing", True, "neat_packing", "packing")
        packed_as_full_rows(reading)
    elif reading["packing"]:
        why = "Packed rows see one another there; foretune keeps them apart (neat_packing)."
        reading.block("packing", "result", why, field="batch.packing")
    if reading["template"] not in (None, "default", "empty"):
        why = "foretune renders with the tokenizer's own chat template; LLaMA-Factory's of this name may differ."
        reading.block("template", "result", why)
    if not reading["ignore_pad_token_for_loss"]:
        reading.block("ignore_pad_token_for_loss", "result", "Padding carries no loss here.")
    if not reading["enable_thinking"]:
        reading.block("enable_thinking", "result", "foretune renders as the template does.")


def _data(reading: Reading) -> bool:
    """Ask for files in the place of names in a registry. Returns whether there are rows to evaluate on."""
    named = reading["dataset"]
    shown = ", ".join(named) if isinstance(named, list) else named
    what = (
        "The file names no rows."
        if shown is None
        else f"The rows are {shown}, by name in {reading['dataset_dir']}/dataset_info.json."
    )
    reading.decide(
        "data.train",
        f"{what} foretune reads a JSONL file; `foretune data convert` makes it.",
        "FILE.jsonl",
        "dataset",
        "dataset_dir",
    )
    size = reading["val_size"]
    if reading.has("eval_dataset"):
        message = f"It evaluates on {reading['eval_dataset']}, a name in the registry."
        reading.decide("evaluation.data", message, "FILE.jsonl", "eval_dataset")
        return True
    if size >= 1:
        message = f"It holds out {size:g} rows; foretune a share of them."
        reading.decide("evaluation.split", message, "0.1", "val_size")
    elif size > 0:
        reading.set("evaluation.split", float(size), "val_size")
    return bool(size > 0)


LLAMA_FACTORY = Tool(
    name="llama-factory",
    title="LLaMA-Factory",
    version="0.9.5",
    keys=_KEYS,
    meaning=_meaning,
    stack=TRAINER.with_(
        transformers="5.6",
        peft="0.18",
        is_nearest=True,
        kbit_upcast="none",
        empties_cache=False,
        rotary_by_product=True,
    ),
    stack_notes=(
        "LLaMA-Factory runs Transformers' Trainer, up to 5.6 with PEFT 0.18.",
        "It upcasts what is trained to fp32 and leaves a quantized base as it is (no k-bit preparation).",
    ),
)
"""`llamafactory-cli train`."""
