"""Whatever is typed: one JSON document, a documented exit code, and never a mistake of ours."""

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretune.cli.app import run
from foretune.cli.topics import EXIT_CODES

WORDS = [
    "estimate", "models", "devices", "config", "completion", "help", "list", "show", "detect", "validate", "schema",
    "exit-codes", "--model", "--revision", "--method", "--rank", "--alpha", "--targets", "--dtype", "--optimizer",
    "--seq-len", "--micro-batch", "--accumulation", "--attention", "--loss", "--no-gradient-checkpointing", "--gpu",
    "--vram", "--free", "--stack", "--config", "--set", "--check", "--accept", "--explain", "--search", "--origin",
    "--color", "--debug", "--help", "--version", "--", "-", "gpt2", "qwen2.5-0.5b", "full", "qlora", "3090", "8",
    "0", "-1", "1e400", "nan", "null", "[]", "{}", "lora.rank=8", "quantization={}", "seed=", "=", "a=b", "sgd",
    "--lengths", "fp32", "tight", "bash", "run.yaml", ".", "..", "/", "~", "\x00", "\x1b[2J", "\u202e", "\udc80", "é",
    "", "data", "convert", "--from", "alpaca", "--drop", "check",
    "--truncation", "--supervision", "--spans", "--no-cache", "--preview",
]  # fmt: skip


def stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n", write_through=True)


def text_of(written: io.TextIOWrapper) -> str:
    return written.buffer.getvalue().decode()  # type: ignore[attr-defined]


@given(st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=6)), max_size=8))
@settings(max_examples=200, deadline=None)
def test_any_words_give_one_json_document(words: list[str]) -> None:
    out, err = stream(), stream()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("sys.stdout", out)
        patch.setattr("sys.stderr", err)
        code = run(["--json", *words])
    document = json.loads(text_of(out), parse_constant=lambda name: pytest.fail(name))
    assert code in {code for code, _ in EXIT_CODES} - {1}
    assert document["version"]
    assert text_of(err) == ""


@given(st.lists(st.sampled_from(WORDS[12:]), max_size=8))
@settings(max_examples=200, deadline=None)
def test_any_flags_of_estimate_give_json_documents(words: list[str]) -> None:
    out, err = stream(), stream()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("sys.stdout", out)
        patch.setattr("sys.stderr", err)
        code = run(["estimate", "--json", "--model", "gpt2", *words])
    lines = text_of(out)
    documents = [json.loads(lines)] if lines.startswith("{\n") else [json.loads(line) for line in lines.splitlines()]
    assert documents
    assert code != 1
    assert text_of(err) == ""
