"""CPU time of a start over that of a bare interpreter, beside two published estimators in the same run.

    python benchmarks/startup.py [REPEATS]

Each command runs REPEATS times; the smallest is given, because other work on the machine only ever adds. The peers
(canifinetune 0.4.1, vramcalc 0.1.2; `pip install foretune[bench]`) are left out where they are not installed.
"""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

BUDGETS_MS = {
    ("--help",): 60.0,
    ("--version",): 60.0,
    ("estimate", "--model", "Qwen/Qwen2.5-7B", "--gpu", "RTX 3090", "--offline"): 150.0,
    ("models", "show", "Qwen/Qwen2.5-7B", "--offline"): 150.0,
}

# What the peers need to answer the same question without network: LoRA of rank 16 on Qwen2.5-7B, 24 GB.
CONFIG = """{"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": false}"""
PEERS = {
    "canifinetune": "estimate --model Qwen/Qwen2.5-7B-Instruct --gpu-vram-gb 24 --method lora --offline --json",
    "vramcalc": "estimate CONFIG --train --lora 16 --seq 1024 --gpu 24 --json",
}

# Compiled modules count as there, as they are after an installation (each command runs once before it is timed).
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def cpu_ms(arguments: list[str], repeats: int) -> float:
    """Return the smallest CPU time (user and system) of a child process, in milliseconds."""
    _once(arguments)
    return min(_once(arguments) for _ in range(repeats))


def _once(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(arguments, check=False, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main() -> None:
    """Print a row for each command."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    bare = cpu_ms([sys.executable, "-c", "pass"], repeats)
    print(f"bare interpreter: {bare:.1f} ms CPU (measured, smallest of {repeats})")
    print(f"{'over it':>9}  {'ratio':>6}  {'budget':>7}  command")
    for words, budget in BUDGETS_MS.items():
        over = cpu_ms([sys.executable, "-m", "foretune", *words], repeats) - bare
        mark = "" if over <= budget else "  OVER BUDGET"
        print(f"{over:6.1f} ms  {(over + bare) / bare:5.1f}x  {budget:4.0f} ms  foretune {' '.join(words)}{mark}")
    for name, over in peers(repeats, bare).items():
        print(f"{over:6.1f} ms  {(over + bare) / bare:5.1f}x           {name} {PEERS[name]}")


def peers(repeats: int, bare: float) -> dict[str, float]:
    """Measure the peers that are installed beside this interpreter, over a bare interpreter, in milliseconds."""
    folder = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as temporary:
        config = Path(temporary) / "config.json"
        config.write_text(CONFIG)
        commands = {
            name: [str(folder / name), *(str(config) if word == "CONFIG" else word for word in line.split())]
            for name, line in PEERS.items()
            if (folder / name).exists()
        }
        return {name: cpu_ms(command, repeats) - bare for name, command in commands.items()}


if __name__ == "__main__":
    main()
