"""Write src/foretune/models/defaults.json: what Transformers' configuration classes say about the keys we read.

Run with an interpreter that has transformers 5.24 (the package itself never imports it):

    python scripts/catalogue_defaults.py > src/foretune/models/defaults.json
"""

import dataclasses
import json
import re
import sys
from pathlib import Path

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig, Step3p7VisionConfig

FAMILIES = Path(__file__).parent.parent / "src" / "foretune" / "models" / "families"
BY_HAND = {"step3p5": Step3p7TextConfig, "step3p5_vision": Step3p7VisionConfig}


def keys_that_are_read() -> set[str]:
    """Return every quoted lower-case word of the families' source."""
    sources = [path.read_text() for path in FAMILIES.glob("*.py") if path.name != "refusals.py"]
    return {word for source in sources for word in re.findall(r'"([a-z_][a-z0-9_]*)"', source)}


def defaults_of(config_class: type, keys: set[str]) -> dict[str, object]:
    """Return the class's defaults of these keys, and its aliases between them."""
    keys = keys | {name for alias, name in config_class.attribute_map.items() if alias in keys}
    values = {}
    for field in dataclasses.fields(config_class):
        if field.name not in keys or field.name in (
            "text_config",
            "vision_config",
            "audio_config",
            "model_type",
            "architectures",
            "is_encoder_decoder",
            "rope_parameters",
        ):
            continue
        if field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
    for alias, name in config_class.attribute_map.items():
        if alias in values and name not in values:
            values[name] = values.pop(alias)
    aliases = {alias: name for alias, name in config_class.attribute_map.items() if name in keys or alias in keys}
    return {"d": values, **({"a": aliases} if aliases else {})}


def main() -> None:
    """Print one object, one line for each model type."""
    keys = keys_that_are_read()
    types = sorted(word for word in keys if word in CONFIG_MAPPING or word in BY_HAND)
    lines = []
    for model_type in types:
        config_class = BY_HAND.get(model_type) or CONFIG_MAPPING[model_type]
        entry = json.dumps(defaults_of(config_class, keys), separators=(",", ":"), sort_keys=True)
        lines.append(f'"{model_type}":{entry}')
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
