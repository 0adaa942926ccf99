"""Mamba 2 alone (models/mamba2 of transformers 5.24; local names are its own)."""

from typing import Any

from foretune.memory.blocks import RmsNorm, call
from foretune.memory.decoder import Decoder, Layer, RunOptions
from foretune.memory.families.mamba2 import Mamba2Mixer
from foretune.memory.ops import add, to
from foretune.memory.tape import Tensor

__all__ = ["Mamba2Decoder"]


class Mamba2Layer(Layer):
    """Mamba2Block: a norm and a mixer; the residual stream may be fp32."""

    def __init__(self, norm: RmsNorm, mixer: Mamba2Mixer, *, residual_in_32bit: bool) -> None:
        self.norm, self.mixer, self.residual_in_fp32 = norm, mixer, residual_in_32bit

    def forward(self, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None) -> Tensor:
        residual = hidden_states
        hidden_states = call(self.norm, to(hidden_states, self.norm.weight.dtype))
        if self.residual_in_fp32:
            residual = to(residual, "f32")
        hidden_states = call(self.mixer, hidden_states, cache=cache, attention_mask=attention_mask)
        hidden_states = add(residual, hidden_states)
        return hidden_states  # noqa: RET504


class Mamba2Decoder(Decoder):
    """Mamba2Model: without positions and without a causal mask."""

    kernel_packages = "mamba-ssm and causal-conv1d"
    keyword_order = ("cache", "attention_mask")
    logits_in_32bit = True
    embedding_name = "backbone.embeddings.weight"
    final_norm_name = "backbone.norm_f"

    def count_positions(self, length: int) -> Tensor:
        """There are none."""
        return Tensor((0,), "i64")

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        return Mamba2Layer(
            RmsNorm(self.modules.weight(f"{name}.norm.weight")),
            Mamba2Mixer(self.modules, f"{name}.mixer", self.traits.activation or "silu"),
            residual_in_32bit=self.traits.residual_in_32bit,
        )

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        run.ask_whether_padded()
        return {"full": None}
