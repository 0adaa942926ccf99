"""CPU time of a start over that of a bare interpreter, and what is imported on the way.

    python benchmarks/startup.py [REPEATS]

Each command runs REPEATS times; the smallest is given, because other work on the machine only ever adds.
"""

import os
import resource
import subprocess
import sys

BUDGETS_MS = {
    ("--help",): 60.0,
    ("--version",): 60.0,
    ("estimate", "--model", "Qwen/Qwen2.5-7B", "--gpu", "RTX 3090", "--offline"): 150.0,
    ("models", "show", "Qwen/Qwen2.5-7B", "--offline"): 150.0,
}


# Compiled modules count as there, as they are after an installation (each command runs once before it is timed).
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def cpu_ms(arguments: list[str], repeats: int) -> float:
    """Return the smallest CPU time (user and system) of a child process, in milliseconds."""
    _once(arguments)
    return min(_once(arguments) for _ in range(repeats))


def _once(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
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


if __name__ == "__main__":
    main()
