"""What a fine-tune is: the configuration, its files, its rules, its schema.

Importing this costs msgspec and little more: YAML, near matches, hashing and source texts are imported when used.
"""

from typing import TYPE_CHECKING, Any

from foretune.contract.config import (
    BatchSettings,
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    LoraSettings,
    ModelSource,
    OptimizerSettings,
    PrecisionSettings,
    QuantizationSettings,
    ScheduleSettings,
    TrainingConfig,
)

# At once, because the name is the module's as well: a later import of the module would hide the function.
from foretune.contract.fingerprint import fingerprint
from foretune.contract.load import (
    LoadedConfig,
    Origin,
    build_config,
    check_config,
    load_config,
    parse_config,
)
from foretune.contract.overrides import Method, Override, parse_override

if TYPE_CHECKING:
    from foretune.contract.dump import dump_config
    from foretune.contract.rules import RULES, Rule, broken_rules, experimental_choices
    from foretune.contract.schema import Setting, field_docs, json_schema, settings_table

__all__ = [
    "RULES",
    "BatchSettings",
    "CheckpointSettings",
    "DataSettings",
    "EvaluationSettings",
    "LoadedConfig",
    "LoraSettings",
    "Method",
    "ModelSource",
    "OptimizerSettings",
    "Origin",
    "Override",
    "PrecisionSettings",
    "QuantizationSettings",
    "Rule",
    "ScheduleSettings",
    "Setting",
    "TrainingConfig",
    "broken_rules",
    "build_config",
    "check_config",
    "dump_config",
    "experimental_choices",
    "field_docs",
    "fingerprint",
    "json_schema",
    "load_config",
    "parse_config",
    "parse_override",
    "settings_table",
]

_LATER = {
    "dump_config": "dump",
    "RULES": "rules",
    "Rule": "rules",
    "broken_rules": "rules",
    "experimental_choices": "rules",
    "Setting": "schema",
    "field_docs": "schema",
    "json_schema": "schema",
    "settings_table": "schema",
}


def __getattr__(name: str) -> Any:
    """Import what only some commands use when it is first asked for."""
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{module}"), name)
