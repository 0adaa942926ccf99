"""Transformers' TrainingArguments, which TRL and LLaMA-Factory extend, as of 5.24; older names stand beside newer.

Read off transformers/training_args.py.
"""

from foretune.foreign.rules import Key, blocks, ignored, maps, part

__all__ = ["LAUNCH", "OLDER_ARGUMENTS", "TRAINING_ARGUMENTS"]

OLDER_ARGUMENTS = (
    "adafactor", "dispatch_batches", "evaluation_strategy", "group_by_length", "no_cuda", "split_batches", "tp_size",
    "warmup_ratio",
)  # fmt: skip
"""Keys of earlier releases that 5.24 has no more, and that mean something."""

_LOGGING = "Logging."
_NAMES = "Where it is kept, not what is trained."
_READING = "How rows are read, not which."
_MEASURES = "About evaluation alone."
_ONE = "About several processes; one is taken."

TRAINING_ARGUMENTS: dict[str, Key] = {
    "output_dir": maps("output", "text"),
    "per_device_train_batch_size": maps("batch.micro_batch_size", "count", default=8),
    "gradient_accumulation_steps": maps("batch.accumulation_steps", "count", default=1),
    "learning_rate": maps("optimizer.learning_rate", "number", default=5e-5),
    "weight_decay": maps("optimizer.weight_decay", "number", "Norms and biases are left undecayed."),
    "seed": maps("seed", "count", "The same seed gives another order of rows here.", default=42),
    # -- decided together
    "num_train_epochs": part("number", "schedule.epochs", default=3.0),
    "max_steps": part("count", "schedule.updates", default=-1),
    "lr_scheduler_type": part("text", "schedule.shape", default="linear"),
    "warmup_steps": part("number", "schedule.warmup_updates", about="Below 1 it is a share of all updates.", default=0),
    "warmup_ratio": part("number", "schedule.warmup_updates", about="A share of all updates."),
    "optim": part("text", "optimizer.name", "optimizer.implementation", default="adamw_torch_fused"),
    "adam_beta1": part("number", "optimizer.beta1", default=0.9),
    "adam_beta2": part("number", "optimizer.beta2", default=0.999),
    "adam_epsilon": part("number", "optimizer.epsilon", default=1e-8),
    "max_grad_norm": part("number", "optimizer.max_grad_norm", about="0 clips nothing.", default=1.0),
    "bf16": part("switch", "precision.dtype", default=False),
    "fp16": part("switch", "precision.dtype", default=False),
    "gradient_checkpointing": part("switch", "gradient_checkpointing", default=False),
    "activation_checkpointing": part("switch", "gradient_checkpointing"),
    "gradient_checkpointing_kwargs.use_reentrant": part("switch", about="The form of the program, not its result."),
    "activation_checkpointing_kwargs.use_reentrant": part("switch", about="The form of the program, not its result."),
    "gradient_checkpointing_kwargs.*": blocks("memory", "foretune recomputes whole layers."),
    "activation_checkpointing_kwargs.*": blocks("memory", "foretune recomputes whole layers."),
    "eval_strategy": part("text", "evaluation.every_updates", default="no"),
    "evaluation_strategy": part("text", "evaluation.every_updates"),
    "eval_steps": part("number", "evaluation.every_updates"),
    "save_strategy": part("text", "checkpoint.every_updates", default="steps"),
    "save_steps": part("number", "checkpoint.every_updates", default=500),
    "save_total_limit": part("count", "checkpoint.keep"),
    "use_liger_kernel": part("switch", "loss", default=False),
    "train_sampling_strategy": part("text", "batch.sort_by_length", default="random"),
    "group_by_length": part("switch", "batch.sort_by_length", default=False),
    "use_cpu": part("switch", "device", default=False),
    "no_cuda": part("switch", "device"),
    # -- no counterpart, and it matters
    "lr_scheduler_kwargs": blocks("result", "foretune's schedules take no options.", field="schedule.shape"),
    "optim_args": blocks("both", "foretune's optimizers take no options of others.", field="optimizer.name"),
    "optim_target_modules": blocks("both", "Optimizers of low rank are not here."),
    "adafactor": blocks("both", "foretune has adamw, adamw_8bit, paged_adamw_8bit and sgd.", field="optimizer.name"),
    "label_smoothing_factor": blocks("result", "foretune smooths no labels.", off=(0, 0.0)),
    "neftune_noise_alpha": blocks("result", "foretune adds no noise to embeddings."),
    "torch_compile": blocks("memory", "foretune compiles nothing."),
    "torch_compile_backend": blocks("memory", "foretune compiles nothing."),
    "torch_compile_mode": blocks("memory", "foretune compiles nothing."),
    "torch_empty_cache_steps": blocks("memory", "foretune does not empty the cache between updates."),
    "use_cache": blocks("memory", "foretune trains without a cache of keys and values."),
    "auto_find_batch_size": blocks("both", "foretune runs the batch that is asked for, or says that it does not fit."),
    "liger_kernel_config": blocks("memory", "foretune has Liger's loss alone (loss: liger)."),
    "deepspeed": blocks("both", "One device does the work here (parallelism: single).", off=("",)),
    "fsdp": blocks("both", "One device does the work here (parallelism: single).", off=("",)),
    "fsdp_config": blocks("both", "One device does the work here (parallelism: single)."),
    "fsdp_config.min_num_params": blocks("both", "One device does the work here (parallelism: single).", off=(0,)),
    "fsdp_config.*": blocks("both", "One device does the work here (parallelism: single)."),
    "fsdp_transformer_layer_cls_to_wrap": blocks("both", "One device does the work here (parallelism: single)."),
    "fsdp_min_num_params": blocks("both", "One device does the work here (parallelism: single).", off=(0,)),
    "parallelism_config": blocks("both", "One device does the work here (parallelism: single)."),
    "tp_size": blocks("both", "One device does the work here (parallelism: single).", off=(0, 1)),
    "accelerator_config": blocks("result", "foretune divides its own batches."),
    "accelerator_config.even_batches": ignored(_ONE),
    "accelerator_config.use_seedable_sampler": ignored("The same seed gives another order of rows here."),
    "accelerator_config.*": blocks("result", "foretune divides its own batches."),
    "split_batches": blocks("result", "foretune divides its own batches."),
    "dispatch_batches": blocks("result", "foretune divides its own batches."),
    "dataloader_drop_last": blocks("result", "foretune trains on every row of an epoch."),
    "load_best_model_at_end": blocks("result", "foretune hands over the last update's weights."),
    "resume_from_checkpoint": blocks("result", "Another tool's checkpoint cannot be resumed."),
    "ignore_data_skip": blocks("result", "A resumed run goes on with the next row."),
    "past_index": blocks("both", "foretune trains without a cache of keys and values.", off=(-1,)),
    "fp8": blocks("both", "foretune computes in bf16, fp16 or fp32."),
    "debug": ignored("Messages.", default=""),
    # -- no counterpart, and it does not matter
    "data_seed": ignored("One seed decides here; no two tools shuffle alike."),
    "tf32": ignored("Products of fp32 may be rounded otherwise."),
    "do_train": ignored("A run trains."),
    "do_eval": ignored("foretune evaluates where it has rows for it."),
    "do_predict": ignored("Not a part of training."),
    "per_device_eval_batch_size": part("count", about="foretune evaluates in micro batches.", default=8),
    "average_tokens_across_devices": ignored(_ONE),
    "full_determinism": ignored("foretune's runs repeat on one machine."),
    "remove_unused_columns": ignored(_READING),
    "label_names": ignored(_READING),
    "length_column_name": ignored(_READING),
    "skip_memory_metrics": ignored(_LOGGING),
    "overwrite_output_dir": ignored("foretune never overwrites."),
    "jit_mode_eval": ignored(_MEASURES),
    "torchdynamo": blocks("memory", "foretune compiles nothing."),
    "half_precision_backend": ignored("Autocast is torch's."),
    "fp16_backend": ignored("Autocast is torch's."),
    "fp16_opt_level": ignored("An option of Apex."),
    "use_ipex": blocks("memory", "foretune is for NVIDIA cards and CPUs."),
    "use_mps_device": blocks("memory", "foretune is for NVIDIA cards and CPUs."),
    "tpu_num_cores": blocks("memory", "foretune is for NVIDIA cards and CPUs."),
    "tpu_metrics_debug": ignored(_LOGGING),
    "mp_parameters": ignored(_ONE),
    "local_rank": ignored(_ONE),
    "ray_scope": ignored(_MEASURES),
    "enable_jit_checkpoint": ignored("About when a checkpoint is written."),
    "restore_callback_states_from_checkpoint": ignored("About callbacks."),
    **dict.fromkeys(
        ("ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph",
         "ddp_timeout", "log_on_each_node", "save_on_each_node"),
        ignored(_ONE),
    ),
    **dict.fromkeys(
        ("dataloader_in_order", "dataloader_multiprocessing_context", "dataloader_num_workers",
         "dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_prefetch_factor"),
        ignored(_READING),
    ),
    **dict.fromkeys(
        ("batch_eval_metrics", "bf16_full_eval", "eval_accumulation_steps", "eval_delay", "eval_do_concat_batches",
         "eval_on_start", "eval_use_gather_object", "fp16_full_eval", "greater_is_better", "include_for_metrics",
         "include_inputs_for_metrics", "metric_for_best_model", "prediction_loss_only"),
        ignored(_MEASURES),
    ),
    **dict.fromkeys(
        ("disable_tqdm", "include_num_input_tokens_seen", "include_tokens_per_second", "log_level", "log_level_replica",
         "logging_dir", "logging_first_step", "logging_nan_inf_filter", "logging_steps", "logging_strategy", "project",
         "report_to", "run_name", "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id"),
        ignored(_LOGGING),
    ),
    **dict.fromkeys(
        ("hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy", "hub_token",
         "push_to_hub", "push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token", "save_only_model",
         "save_safetensors"),
        ignored(_NAMES),
    ),
}  # fmt: skip
"""What a key means, for every tool whose arguments are these."""

# fmt: off
LAUNCH: dict[str, Key] = {
    "env.PYTORCH_CUDA_ALLOC_CONF": blocks("memory", "The allocator is priced with its defaults."),
    "env.PYTORCH_ALLOC_CONF": blocks("memory", "The allocator is priced with its defaults."),
    "env.CUDA_VISIBLE_DEVICES": part("text", about="Several cards are several processes."),
    "env.*": ignored("The environment of the process."),
    "launcher.num_processes": blocks("both", "One device does the work here.", off=("1", 1)),
    "launcher.nproc_per_node": blocks("both", "One device does the work here.", off=("1", 1)),
    "launcher.num_machines": blocks("both", "One device does the work here.", off=("1", 1)),
    "launcher.config_file": blocks("both", "What it holds cannot be seen from here; foretune takes one process."),
    "launcher.use_deepspeed": blocks("both", "One device does the work here."),
    "launcher.use_fsdp": blocks("both", "One device does the work here."),
    "launcher.multi_gpu": blocks("both", "One device does the work here."),
    "launcher.mixed_precision": ignored("The arguments of the script decide."),
    "launcher.nnodes": blocks("both", "One device does the work here.", off=("1", 1)),
    "launcher.dynamo_backend": blocks("memory", "foretune compiles nothing.", off=("no", "NO")),
    **dict.fromkeys(
        ("launcher.main_process_port", "launcher.main_process_ip", "launcher.machine_rank", "launcher.master_addr",
         "launcher.master_port", "launcher.node_rank", "launcher.num_cpu_threads_per_process",
         "launcher.rdzv_backend", "launcher.rdzv_endpoint", "launcher.rdzv_id", "launcher.standalone"),
        ignored("How processes meet."),
    ),
    "launcher.gpu_ids": ignored("Which card is taken."),
}
# fmt: on
"""What stands around the arguments in a command: the environment, and the flags of what launches it."""
