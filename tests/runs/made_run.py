"""Everything a run needs, made in a second: a tiny random model with a tokenizer, rows, a configuration."""

import functools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from data.made import TEMPLATES, made_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from foretune.contract import LoadedConfig, build_config, dump_config

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 440,
    "max_position_embeddings": 256,
}
ANSWERS = ("Yes.", "The answer is 4.", "Over there, behind the door.", "No. Perhaps tomorrow.")
QUESTIONS = ("Is it?", "What is 2 + 2?", "Where is the answer?", "Shall we go, and if so, when?")


@functools.cache
def model_folder(model_type: str = "llama", tokenizer: str = "words", **extra: Any) -> Path:
    """Return a folder with a tiny random model and a tokenizer; made once a process, to be read only."""
    folder = Path(tempfile.mkdtemp(prefix="foretune-test-model-"))
    torch.manual_seed(1)
    config = AutoConfig.for_model(model_type, **{**SIZES, "eos_token_id": 2, "pad_token_id": None, **extra})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    made_tokenizer(tokenizer).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATES["markup"])
    return folder


def conversation(number: int) -> dict[str, Any]:
    """Return a row of one turn or two; numbers give rows of different lengths."""
    question, answer = QUESTIONS[number % 4], ANSWERS[(number // 4 + number) % 4]
    messages = [{"role": "user", "content": f"{question} ({number})"}, {"role": "assistant", "content": answer}]
    if number % 3 == 0:
        messages += [{"role": "user", "content": "Again?"}, {"role": "assistant", "content": f"{answer} {answer}"}]
    return {"messages": messages}


def instruction(number: int) -> dict[str, Any]:
    """Return an instruction row."""
    return {"instruction": QUESTIONS[number % 4], "input": str(number), "output": ANSWERS[number % 4]}


def write_rows(path: Path, rows: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> Path:
    """Write rows as JSONL."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def settings(folder: Path, *, num_rows: int = 12, model: Path | None = None, **changes: Any) -> dict[str, Any]:
    """Return the fields of a small run below a folder, by dotted path; `changes` are written with `__` for a dot."""
    rows = folder / "rows.jsonl"
    if not rows.exists():
        write_rows(rows, [conversation(number) for number in range(num_rows)])
    fields: dict[str, Any] = {
        "model.id": str(model or model_folder()),
        "device": "cpu",
        "precision.dtype": "fp32",
        "data.train": str(rows),
        "data.supervision": "assistant_only",
        "batch.micro_batch_size": 2,
        "batch.sequence_length": 128,
        "optimizer.learning_rate": 0.01,
        "schedule.epochs": 2.0,
        "output": str(folder / "run"),
    }
    for name, value in changes.items():
        fields[name.replace("__", ".")] = value
    return {name: value for name, value in fields.items() if value is not ...}


def configured(folder: Path, **changes: Any) -> LoadedConfig:
    """Return a checked configuration of a small run: LoRA unless `lora` is given."""
    fields = settings(folder, **changes)
    if "lora" not in fields and not any(name.startswith("lora.") for name in fields):
        fields |= {"lora.rank": 4, "lora.alpha": 8.0}
    if fields.get("lora", "") is None:
        del fields["lora"]
    return build_config(fields)


def copy_model(folder: Path, source: Path | None = None) -> Path:
    """Return a copy of the tiny model that a test may change."""
    target = folder / "model"
    shutil.copytree(source or model_folder(), target)
    return target


def write_config(path: Path, folder: Path, **changes: Any) -> Path:
    """Write the configuration of a small run as a file; its output is `runs/first` beside it."""
    fields = settings(folder, **changes)
    if "lora" not in fields:
        fields = {"lora.rank": 4, "lora.alpha": 8.0, **fields}
    fields["output"] = "runs/first"
    path.write_text(dump_config(build_config(fields).config))
    return path
