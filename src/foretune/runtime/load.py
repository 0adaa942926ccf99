"""From a config to a model: the class of Transformers, in one dtype, with one attention implementation.

Nothing of a config can run code: keys that swap internals are refused, remote code is off, and the attention is given
explicitly.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from foretune.contract import PrecisionSettings, QuantizationSettings
from foretune.errors import ConfigError, UnsupportedError

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "Loaded",
    "build_model",
    "decoder_linears",
    "eight_bit_layers",
    "fix_compute_dtype",
    "four_bit_layers",
    "load_model",
    "model_config",
]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_TIED_BY_THE_WHOLE = frozenset({"qwen3_5", "qwen3_5_moe"})
"""Types whose causal class is the language model's alone, while the config of the whole says whether its head is the
embedding's weight, as it is in the checkpoint."""

_PRODUCTS = ("Linear", "FalconLinear")
"""Classes that are a product with a weight and no more."""
_LEFT_OUT = frozenset(
    {
        *("architectures", "auto_map", "dtype", "quantization_config", "torch_dtype", "transformers_version"),
        *("attn_implementation", "experts_implementation"),
    }
)
"""What is ours to set, or of no meaning to a class. A kernel that a config names could be code of the hub."""
_FIELDS = frozenset({"_remove_final_layer_norm"})
"""Fields of a class that begin as internals do (OPT)."""


def model_config(config: Mapping[str, Any], *, attention: str) -> PretrainedConfig:
    """Build Transformers' config from a config.json; quantization and dtype are ours to set.

    Raises UnsupportedError for keys that could run code and for types without a class, ConfigError where
    Transformers refuses the values.
    """
    refused = _refused_keys(config)
    if refused:
        raise UnsupportedError(
            f"The config sets {', '.join(sorted(refused))}, which can swap internals or run code.",
            hint="Remove these keys.",
        )
    fields = {key: value for key, value in _without_bookkeeping(config).items() if key not in _LEFT_OUT}
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


def _refused_keys(config: Mapping[str, Any], place: str = "") -> list[str]:
    """Return the keys, at any depth, that swap a model's internals or run code (CVE-2026-4372).

    What else begins with `_` is Transformers' bookkeeping, and is left out. `auto_map` is left out as well, but refused
    inside a part, where no published config has it.
    """
    found = []
    for key, value in config.items():
        is_internal = key.startswith("_") and key.endswith(("_internal", "_implementation"))
        if is_internal or key == "trust_remote_code" or (place and key == "auto_map"):
            found.append(place + key)
        elif isinstance(value, Mapping):
            found += _refused_keys(value, f"{place}{key}.")
    return found


def _without_bookkeeping(part: Any) -> Any:
    """Leave out what begins with `_` and is no field, and read the floats that Transformers writes as objects."""
    if isinstance(part, list):
        return [_without_bookkeeping(value) for value in part]
    if not isinstance(part, Mapping):
        return part
    if part.keys() == {"__float__"} and part["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(part["__float__"])
    kept = {key: value for key, value in part.items() if not str(key).startswith("_") or key in _FIELDS}
    return {key: _without_bookkeeping(value) for key, value in kept.items()}


class Loaded(NamedTuple):
    """A base model with its weights."""

    model: nn.Module
    unused: tuple[str, ...]
    """Names in the files that the class has no place for."""


def load_model(
    raw_config: Mapping[str, Any],
    folder: Path,
    *,
    precision: PrecisionSettings,
    quantization: QuantizationSettings | None,
    attention: str,
    device: str,
) -> Loaded:
    """Load a causal model from safetensors: no remote code, no network, each setting given and none tried twice.

    Raises UnsupportedError where the files lack a weight of the class, RunError for what the loader says.
    """
    dtype = DTYPES[precision.dtype]
    options: dict[str, Any] = {} if device == "cpu" else {"device_map": {"": torch.device(device, 0)}}
    if quantization is not None:
        options |= {"quantization_config": _quantization(quantization, precision), "device_map": {"": device}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        disable_progress_bar()
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=model_config(raw_config, attention=attention),
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    model, told = loaded
    missing = sorted(told["missing_keys"])
    if missing:
        raise UnsupportedError(
            f"The files have no weights for {len(missing):,} of the model's tensors, so they would be random: "
            f"{', '.join(missing[:3])}{' ...' * (len(missing) > 3)}",
            hint="Check that config.json and the weights belong together.",
            field="model.id",
        )
    if quantization is not None:
        fix_compute_dtype(model, DTYPES[quantization.compute_dtype_for(precision)])
    model.config.use_cache = False
    return Loaded(model, tuple(sorted(told["unexpected_keys"])))


def _quantization(settings: QuantizationSettings, precision: PrecisionSettings) -> Any:
    from transformers import BitsAndBytesConfig

    if settings.scheme == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=settings.uses_double_quant,
        bnb_4bit_compute_dtype=DTYPES[settings.compute_dtype_for(precision)],
    )


def fix_compute_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Set the dtype in which 4-bit layers multiply, so that their first input does not choose it.

    Also keeps a CPU with AVX512-BF16 from repacking weights in an evaluation, after which gradients are wrong.
    """
    for _, layer in four_bit_layers(model):
        layer.compute_dtype = dtype
        layer.compute_type_is_set = True
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


def four_bit_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the layers whose weights are held in 4 bits."""
    return _bitsandbytes_layers(model, "Linear4bit")


def eight_bit_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the layers whose weights are held in 8 bits."""
    return _bitsandbytes_layers(model, "Linear8bitLt")


def _bitsandbytes_layers(model: nn.Module, kind: str) -> list[tuple[str, Any]]:
    """By class name and library: PEFT has wrappers of the same names."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__ == kind and type(module).__module__.startswith("bitsandbytes")
    ]


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
