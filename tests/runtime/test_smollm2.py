"""A real small model, with its own tokenizer and chat template, passes through the rooms (made by tests/smollm2.py)."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from smollm2 import PROMPT, digest_tensor, load_model, logits_of, record_of

from foretune.data import Message
from foretune.models import resolve_model
from foretune.runtime.tokenizer import load_tokenizer

pytestmark = pytest.mark.full

PARAMETERS = 134_515_008
"""HuggingFaceTB/SmolLM2-135M in tests/models/counts.jsonl: Transformers' own count of the published config."""
ANSWERS = ["The capital of France is Paris.", "Seven.", "Also 7: 16 − 9 = 7."]
ROWS = [
    {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": ANSWERS[0]}]},
    {
        "messages": [
            {"role": "system", "content": "You are terse."},
            {"role": "user", "content": "What is 3 + 4?"},
            {"role": "assistant", "content": ANSWERS[1]},
            {"role": "user", "content": "And 16 - 9?"},
            {"role": "assistant", "content": ANSWERS[2]},
        ]
    },
]


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Any:
    return load_model(smollm2)


def test_parameters_are_those_of_the_config_name_by_name(smollm2: Path, model: Any) -> None:
    shape = resolve_model(str(smollm2), offline=True)
    counted = {f"{shape.layer_prefix}{n}.{p.name}" if n is not None else p.name: p.shape for n, p in shape.parameters()}
    assert counted == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shape.total_params == sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS


def test_logits_are_finite_and_those_of_the_gguf_file_to_the_bit(smollm2: Path, model: Any) -> None:
    record = record_of(smollm2)
    logits = logits_of(model, record["ids"])
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()
    kernels = torch.backends.cpu.get_cpu_capability()
    assert (kernels, digest_tensor(logits)) == (record["kernels"], record["logits_sha256"])


def test_ids_are_those_of_the_gguf_files_tokenizer_and_of_transformers(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2, template_date=date(2025, 1, 2), name="smollm2")
    text = tokenizer.render([Message(turn["role"], turn["content"]) for turn in PROMPT]).text
    [encoding] = tokenizer.encode([text])
    assert list(encoding.ids) == record_of(smollm2)["ids"]


def test_conversations_learn_their_answers_alone(call: Any, smollm2: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    how = ("--supervision", "assistant_only", "--workers", "1", "--json", "--rows")
    called = call("data", "check", str(rows), "--model", str(smollm2), *how)
    assert (called.code, called.err) == (0, "")
    found = called.document
    assert (found["stats"]["num_rows"], found["stats"]["dropped_rows"]) == (2, 0)
    assert [piece for row in found["rows"] for piece in row["supervised"]] == [f"{each}<|im_end|>" for each in ANSWERS]
