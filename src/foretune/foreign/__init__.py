"""Configurations of other tools in our words: what maps, what has no counterpart, and what only the user can say."""

from foretune.foreign.imports import TOOLS, build_imported, import_config
from foretune.foreign.values import Decision, Entry, ImportedConfig, Setting, ToolName

__all__ = [
    "TOOLS",
    "Decision",
    "Entry",
    "ImportedConfig",
    "Setting",
    "ToolName",
    "build_imported",
    "import_config",
]
