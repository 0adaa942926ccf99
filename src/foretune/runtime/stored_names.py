"""Under which names the files of a checkpoint hold the tensors of a model."""

from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["stored_names"]


def stored_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """Return the stored name of each tensor of a built model that the files hold as it is.

    Left out is what Transformers makes of several stored tensors, or of a part of one, when it loads. By its own rules
    and in its own order (core_model_loading.py, convert_and_load_state_dict_in_model).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    built: Any = model
    mapping, state, prefix = get_model_conversion_mapping(built), built.state_dict(), built.base_model_prefix
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    found: dict[str, str] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=state)
        if pattern is None and target in state:
            found[target] = name
    return found
