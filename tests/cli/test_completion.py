"""Shell completion: the scripts, and what they offer."""

import os
import subprocess
import sys

import pytest

from foretune.cli.completion import SHELLS


@pytest.mark.parametrize("shell", SHELLS)
def test_script_asks_the_program(call, shell: str) -> None:
    assert f"_FORETUNE_COMPLETE={shell}_complete" in call("completion", shell).out


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("mod", "models"),
        ("models sh", "show"),
        ("estimate --grad", "--gradient-checkpointing"),
        ("estimate --dtype fp1", "fp16"),
        ("estimate --method q", "qlora"),
        ("estimate --gpu 5090", "NVIDIA GeForce RTX 5090"),
        ("estimate --model qwen2.5-0.5", "Qwen/Qwen2.5-0.5B"),
        ("models show tinyllama", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        ("completion f", "fish"),
    ],
)
def test_completion_offers(words: str, offered: str) -> None:
    line = f"foretune {words}"
    environment = {
        **os.environ,
        "_FORETUNE_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    done = subprocess.run([sys.executable, "-m", "foretune"], env=environment, capture_output=True, text=True)
    assert f"plain,{offered}" in done.stdout.splitlines()
