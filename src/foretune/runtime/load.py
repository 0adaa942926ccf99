"""From a config to a model: the class of Transformers, in one dtype, with one attention implementation.

Nothing of a config can run code: keys that swap internals are refused, remote code is off, and the attention is given
explicitly.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from foretune.errors import ConfigError, UnsupportedError

__all__ = ["DTYPES", "build_model", "decoder_linears", "model_config"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_TIED_BY_THE_WHOLE = frozenset({"qwen3_5", "qwen3_5_moe"})
"""Types whose causal class is the language model's alone, while the config of the whole says whether its head is the
embedding's weight, as it is in the checkpoint."""

_PRODUCTS = ("Linear", "FalconLinear")
"""Classes that are a product with a weight and no more."""
_LEFT_OUT = frozenset(
    {"architectures", "auto_map", "dtype", "quantization_config", "torch_dtype", "transformers_version"}
)


def model_config(config: Mapping[str, Any], *, attention: str) -> PretrainedConfig:
    """Build Transformers' config from a config.json; quantization and dtype are ours to set.

    Raises UnsupportedError for keys that could run code and for types without a class, ConfigError where
    Transformers refuses the values.
    """
    refused = [key for key in config if key.startswith("_") or key == "trust_remote_code"]
    if refused:
        raise UnsupportedError(
            f"The config sets {', '.join(sorted(refused))}, which can swap internals or run code.",
            hint="Remove these keys.",
        )
    fields = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    model_type = str(fields.pop("model_type", ""))
    try:
        made = AutoConfig.for_model(model_type, **fields)
    except ValueError as error:
        reason = str(error).strip().splitlines()[-1][:300]
        raise ConfigError(f"Transformers refuses this {model_type} config: {reason}") from error
    except Exception as error:  # Transformers' strict configs raise a type of the hub's own
        if type(error).__module__.split(".")[0] not in ("huggingface_hub", "transformers"):
            raise
        reason = str(error.__cause__ or error).strip().splitlines()[-1][:300]
        raise ConfigError(f"Transformers refuses this {model_type} config: {reason}") from error
    if model_type in _TIED_BY_THE_WHOLE and "tie_word_embeddings" in fields:
        made.get_text_config().tie_word_embeddings = made.tie_word_embeddings
    made._attn_implementation = attention
    return made


def build_model(config: PretrainedConfig, *, dtype: torch.dtype, device: str, attention: str) -> nn.Module:
    """Build the causal model with untrained weights (on `meta`: without data). Raises UnsupportedError."""
    with torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
        except ValueError as error:
            reason = str(error).strip().splitlines()[0][:300]
            raise UnsupportedError(f"Transformers cannot build this model: {reason}") from error
    model.config.use_cache = False
    return model


def decoder_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers below a numbered layer: what quantization and adapters may reach.

    Classes over `nn.Linear` that do more than its product are none of them (routers of llama4 and phimoe, the grouped
    projection of deepseek_v4); Transformers passes them over too (integrations/bitsandbytes.py).
    """
    found = {}
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) and type(module).__name__ in _PRODUCTS
        if is_linear and any(part.isdigit() for part in name.split(".")):
            found[name] = module
    return found
