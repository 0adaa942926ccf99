"""DoRA on a quantized base: PEFT dequantizes the weight, which it asks for by its type."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from foretune.contract import TrainingConfig

__all__ = ["dequantizing"]


@contextmanager
def dequantizing(config: TrainingConfig) -> Iterator[None]:
    """Let PEFT find the weights of traced layers (peft/utils/integrations.py, dequantize_module_weight)."""
    if config.quantization is None or config.lora is None or not config.lora.use_dora:
        yield
        return
    from peft.tuners.lora import dora

    original: Any = dora.dequantize_module_weight

    def dequantize(module: nn.Module) -> Tensor:
        dequantized: Any = getattr(module, "dequantized", None)
        weight: Tensor = original(module) if dequantized is None else dequantized()
        return weight

    with patch.object(dora, "dequantize_module_weight", dequantize):
        yield
