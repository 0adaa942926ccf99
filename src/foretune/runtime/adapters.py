"""LoRA by PEFT, as the contract asks for it; fp32 matrices, no bias, no input gradients."""

import warnings

from torch import nn

from foretune.contract import LoraSettings

__all__ = ["attach_adapters"]


def attach_adapters(model: nn.Module, lora: LoraSettings, target_names: list[str]) -> nn.Module:
    """Freeze the model and attach adapters to the linear layers whose names end in these.

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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks Transformers by a name that it deprecates
        return get_peft_model(model, settings)
