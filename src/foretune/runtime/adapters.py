"""LoRA by PEFT, as the contract asks for it: matrices in the dtype it names, no bias, no input gradients."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from foretune.contract import LoraSettings

__all__ = ["attach_adapters"]


def attach_adapters(
    model: nn.Module,
    lora: LoraSettings,
    target_names: list[str],
    *,
    dtype: torch.dtype = torch.float32,
    base_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Freeze the model and attach adapters of a dtype to the linear layers whose names end in these.

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
    with warnings.catch_warnings(), _created_in(base_dtype if dtype == torch.float32 else dtype):
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks Transformers by a name that it deprecates
        return get_peft_model(model, settings, autocast_adapter_dtype=dtype == torch.float32)


@contextmanager
def _created_in(dtype: torch.dtype) -> Iterator[None]:
    """Make new layers in a dtype; on meta PEFT would leave them in torch's default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
