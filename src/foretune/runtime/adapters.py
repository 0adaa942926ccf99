"""LoRA by PEFT, as the contract asks for it: matrices in the dtype it names, no bias, no input gradients."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import nn

from foretune.contract import LoraSettings
from foretune.models import ModelShape, Projection

__all__ = ["adapted_names", "attach_adapters", "freeze_towers"]


def adapted_names(model: nn.Module, shape: ModelShape, adapted: Sequence[Projection]) -> list[str]:
    """Return the full names of the linear layers that get an adapter, as the built model spells them.

    The causal class of a model for text and images has its layers under another name than the checkpoint.
    """
    prefix = _layer_prefix(model, shape, {projection.name for projection in adapted})
    return [f"{prefix}{layer}.{projection.name}" for projection in adapted for layer in projection.layers]


def _layer_prefix(model: nn.Module, shape: ModelShape, wanted: set[str]) -> str:
    last = shape.layer_prefix.rstrip(".").rpartition(".")[2]
    found = set()
    for name, _ in model.named_modules():
        before, _, after = name.partition(f"{last}.0.")
        if after in wanted:
            found.add(f"{before}{last}.")
    return shape.layer_prefix if shape.layer_prefix in found or len(found) != 1 else found.pop()


def freeze_towers(model: nn.Module, shape: ModelShape) -> None:
    """Freeze what stands beside the language model, which is loaded and not trained, and what its class leaves out.

    Transformers forgets the latter when it loads: every floating point parameter wants gradients then
    (core_model_loading.py, set_param_for_module), though none comes.
    """
    frozen = {spec.name for tower in shape.towers for spec in tower.parameters}
    left_out = tuple(f".{spec.name}" for _, spec in shape.parameters() if spec.is_frozen)
    for name, parameter in model.named_parameters():
        if name in frozen or f".{name}".endswith(left_out):
            parameter.requires_grad_(False)


def attach_adapters(
    model: nn.Module,
    lora: LoraSettings,
    target_names: list[str],
    *,
    dtype: torch.dtype = torch.float32,
    base_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Freeze the model and attach adapters of a dtype to the linear layers whose names end in these, to nothing else.

    PEFT makes them in the base's dtype and then casts them to fp32, unless it is told to leave them.

    Give full names: a bare `q_proj` would reach a vision tower's too. Returns PEFT's wrapper; the model itself is
    changed in place. Gradient checkpointing must still be off: PEFT would make the embeddings' output want gradients,
    which the non-reentrant form does not need.
    """
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=target_names,
        modules_to_save=list(lora.modules_to_save) or None,
        use_dora=lora.use_dora,
        use_rslora=lora.use_rslora,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        bias="none",
        task_type="CAUSAL_LM",
    )
    made_in = base_dtype if dtype == torch.float32 else dtype
    with warnings.catch_warnings(), _created_in(made_in), _named_layers_only():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks Transformers by a name that it deprecates
        return get_peft_model(model, settings, autocast_adapter_dtype=dtype == torch.float32)


@contextmanager
def _named_layers_only() -> Iterator[None]:
    """Keep PEFT from reading names as those of Transformers 4, where experts and routers were linear layers.

    It takes a name that ends in `gate_proj` (a shared expert's, a dense layer's) for the experts' of old, and
    adapts the stacked parameters that they have become (peft/utils/transformers_weight_conversion.py). Adapters go to
    linear layers here, and the names are those of Transformers 5.
    """
    from peft.utils import transformers_weight_conversion

    with patch.object(transformers_weight_conversion, "convert_peft_config_for_transformers", _as_it_is):
        yield


def _as_it_is(peft_config: object, **_: object) -> None:
    """Convert nothing."""


@contextmanager
def _created_in(dtype: torch.dtype) -> Iterator[None]:
    """Make new layers in a dtype; on meta PEFT would leave them in torch's default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
