"""The trace of Transformers' Trainer against the real one: `train()` on a CPU, its bytes read off torch's profiler."""

import gc
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.test_cpu_truth import DROPOUT, LORA, Case, Measured, canonical, one_thread, read, shape_of
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from foretune.memory.figures import facts_of
from foretune.memory.kernels import NUM_UPDATES
from foretune.memory.stack import TRAINER
from foretune.runtime.adapters import attach_adapters
from foretune.runtime.load import build_model, model_config
from foretune.runtime.trace.cpu_paths import trace_on_cpu

FP32: dict[str, Any] = {"autocast": "none", "converts_outputs": False}
KEPT: dict[str, Any] = {"gradient_checkpointing": False}


class OnHost(UserDict[str, torch.Tensor]):
    """A batch made before the profiler looks; `to` copies it, as it would from a host to a GPU."""

    def to(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.data.items()}


def batch_of(case: Case) -> OnHost:
    """Random tokens and a mask of ones; the last third of each row carries no loss."""
    ids, labels = (torch.randint(1, 1000, (case.rows, case.length)) for _ in range(2))
    labels[:, case.length * 2 // 3 :] = -100
    return OnHost({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})


def model_of(case: Case) -> nn.Module:
    config = case.config
    torch.manual_seed(0)
    made = model_config(case.raw_config, attention=config.attention)
    base = build_model(made, dtype=torch.float32, device="cpu", attention=config.attention)
    if config.lora is None:
        return base
    return attach_adapters(base, config.lora, [p.name for p in facts_of(config, shape_of(case)).adapted])


def settings_of(case: Case, out: Path) -> dict[str, Any]:
    """What the case asks of TrainingArguments, and nothing else that would be written or logged."""
    optimizer = case.config.optimizer
    return {
        "output_dir": str(out),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": case.steps,
        "max_steps": NUM_UPDATES,
        "max_grad_norm": optimizer.max_grad_norm or 0.0,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    }


def trainer_of(case: Case, out: Path, batch: OnHost, **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    is_checkpointed = case.config.gradient_checkpointing
    arguments = TrainingArguments(activation_checkpointing=is_checkpointed, **settings_of(case, out), **more)
    data = [0] * (case.steps * NUM_UPDATES)
    return Trainer(model=model_of(case), args=arguments, train_dataset=data, data_collator=lambda _: batch)


def measure(case: Case, out: Path, make: Callable[..., Any], *, bf16: bool) -> Measured:
    from transformers import TrainerCallback

    class Marks(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            gc.collect()
            with record_function("begin"):
                pass

        def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == NUM_UPDATES:
                with record_function("end"):
                    pass

    batch = batch_of(case)
    gc.collect()
    with one_thread(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer = make(case, out, batch, bf16=bf16)
        trainer.add_callback(Marks())
        trainer.train()
    results: Any = profiler.profiler
    return read(results.kineto_results.experimental_event_tree())


@contextmanager
def without_onednn() -> Iterator[None]:
    torch.backends.mkldnn.set_flags(_enabled=False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=True)


CASES = [
    Case("llama", 2, 64, 1, {}),
    Case("llama", 2, 64, 1, KEPT),
    Case("llama", 2, 64, 3, KEPT),
    Case("llama", 1, 100, 3, {"lora": LORA}),
    Case("llama", 2, 100, 1, {"lora": LORA, **KEPT}),
    Case("qwen3", 2, 64, 3, {}),
    Case("qwen3", 4, 48, 1, {"lora": DROPOUT}),
    Case("gpt2", 2, 64, 1, {}),
    Case("gpt2", 2, 64, 3, KEPT),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_traced_peak_is_the_real_trainers_and_so_is_every_event(case: Case, tmp_path: Path) -> None:
    traced = trace_on_cpu(case.config, shape_of(case), case.raw_config, TRAINER.with_(**FP32))
    measured = measure(case, tmp_path, trainer_of, bf16=False)
    assert abs(traced.peak_bytes - measured.peak_bytes) <= 1e-3 * measured.peak_bytes
    assert canonical(traced.events) == canonical(measured.events)


@pytest.mark.parametrize("case", [case for case in CASES if case.model != "gpt2"], ids=str)
def test_the_traced_peak_under_bf16_autocast_is_the_real_trainers(case: Case, tmp_path: Path) -> None:
    """A CPU's autocast agrees with CUDA's on these models' functions. Not event by event: a CPU casts the factors of
    mixed products into temporaries. oneDNN is off, whose workspaces depend on the processor.
    """
    traced = trace_on_cpu(case.config, shape_of(case), case.raw_config, TRAINER)
    with without_onednn():
        measured = measure(case, tmp_path, trainer_of, bf16=True)
    assert abs(traced.peak_bytes - measured.peak_bytes) <= 1e-3 * measured.peak_bytes
