"""Architecture metadata: what a model is made of, from its config alone.

`resolve_model` finds a config (path, catalogue, hub cache, hub) and makes a `ModelShape` of it; `resolve_targets`
says where a LoRA goes. Nothing here needs torch, Transformers or weights.
"""

from foretune.models.catalogue import ModelEntry, list_models
from foretune.models.families import WITHOUT_CLASS, known_model_types, shape_from_config
from foretune.models.families.registry import REMOTE_CODE_TYPES
from foretune.models.litgpt import LITGPT_TYPES, litgpt_shape
from foretune.models.resolve import resolve_config, resolve_model
from foretune.models.shape import (
    OUTSIDE,
    BufferSpec,
    DecoderTraits,
    LayerKind,
    ModelShape,
    ParameterSpec,
    Projection,
    Tower,
)
from foretune.models.targets import (
    SCOPES,
    adapted_params,
    lora_parameters,
    quantizable_params,
    resolve_saved_modules,
    resolve_targets,
)
from foretune.models.tokenizers import TokenizerFiles, resolve_tokenizer
from foretune.models.weights import StoredTensor, WeightFiles, fetch_weights, find_weights, read_safetensors_header

__all__ = [
    "LITGPT_TYPES",
    "OUTSIDE",
    "REMOTE_CODE_TYPES",
    "SCOPES",
    "WITHOUT_CLASS",
    "BufferSpec",
    "DecoderTraits",
    "LayerKind",
    "ModelEntry",
    "ModelShape",
    "ParameterSpec",
    "Projection",
    "StoredTensor",
    "TokenizerFiles",
    "Tower",
    "WeightFiles",
    "adapted_params",
    "fetch_weights",
    "find_weights",
    "known_model_types",
    "list_models",
    "litgpt_shape",
    "lora_parameters",
    "quantizable_params",
    "read_safetensors_header",
    "resolve_config",
    "resolve_model",
    "resolve_saved_modules",
    "resolve_targets",
    "resolve_tokenizer",
    "shape_from_config",
]
