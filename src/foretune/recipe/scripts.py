"""The entry scripts of a recipe. They name files and call the package."""

__all__ = ["CONFIG_FILE", "scripts"]

CONFIG_FILE = "config.yaml"

TRAIN = '''"""Run this recipe. What may be added: python train.py --help (for example --dry-run, or --resume)."""

import sys
from pathlib import Path

from foretune.cli import main

if __name__ == "__main__":
    main(["train", str(Path(__file__).with_name("config.yaml")), *sys.argv[1:]])
'''

EVALUATE = '''"""Reload what was trained. What may be added: python evaluate.py --help (for example --prompt TEXT)."""

import sys
from pathlib import Path

from foretune.cli import main

if __name__ == "__main__":
    main(["evaluate", str(Path(__file__).with_name("config.yaml")), *sys.argv[1:]])
'''

SHELL = """#!/bin/sh
# Installs what the recipe needs beside it (once), trains, and proves that the artifact reloads.
# What is added to the call goes to train.py, for example: sh train.sh --resume
set -eu
cd "$(dirname "$0")"
if [ ! -e .venv/ready ]; then
    "${PYTHON:-python3}" -m venv .venv
    .venv/bin/python -m pip install -r requirements.txt
    touch .venv/ready
fi
.venv/bin/python train.py "$@"
case " $* " in *" --dry-run "* | *" --help "* | *" -h "*) exit 0 ;; esac
.venv/bin/python evaluate.py
"""


def scripts() -> dict[str, str]:
    """Return the scripts by their names."""
    return {"train.py": TRAIN, "evaluate.py": EVALUATE, "train.sh": SHELL}
