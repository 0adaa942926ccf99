"""Build configs with Transformers on the meta device and print what the tests compare with.

Needs an interpreter with torch and transformers 5.24. Reads JSON lines `{"key": ..., "config": {...}}` from stdin and
writes `{"key", "total", "digest"}` for each that Transformers builds: the digest is over the names and shapes of the
language model's parameters, in `named_parameters` order.

    python scripts/catalogue_golden.py < configs.jsonl > golden.jsonl
"""

import hashlib
import json
import sys
from math import prod

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

PREFIXES = ("model.language_model.", "language_model.", "model.text_model.")


def digest(parameters: list[tuple[str, list[int]]]) -> str:
    """Hash names and shapes; of a multimodal model, those of the language model."""
    prefix = next((p for p in PREFIXES if any(name.startswith(p) for name, _ in parameters)), "")
    kept = [(name, shape) for name, shape in parameters if name.startswith((prefix, "lm_head"))]
    text = "".join(f"{name} {shape}\n" for name, shape in kept)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> None:
    """Print one line for each config that can be built."""
    for line in sys.stdin:
        row = json.loads(line)
        config = dict(row["config"])
        try:
            built = CONFIG_MAPPING[config["model_type"]].from_dict(config)
            nested = "text_config" in config or config["model_type"] == "step3p7"
            auto = AutoModelForImageTextToText if nested else AutoModelForCausalLM
            with torch.device("meta"):
                model = auto.from_config(built)
            model.tie_weights()
        except Exception as error:  # a config that Transformers itself refuses is no golden fact
            print(f"{row['key']}: {type(error).__name__}", file=sys.stderr)
            continue
        parameters = [(name, list(p.shape)) for name, p in model.named_parameters()]
        total = sum(prod(shape) for _, shape in parameters)
        print(json.dumps({"key": row["key"], "total": total, "digest": digest(parameters)}), flush=True)


if __name__ == "__main__":
    main()
