"""Mamba 2 beside attention: granitemoehybrid (models/<family> of transformers 5.24; local names are theirs)."""

from typing import Any

from foretune.memory import blocks
from foretune.memory.blocks import Module, call
from foretune.memory.decoder import Layer, Modules, RunOptions
from foretune.memory.families.llama import LlamaAttention, LlamaDecoder
from foretune.memory.families.mamba2 import Mamba2Mixer
from foretune.memory.ops import add, mul, scale
from foretune.memory.scans import split
from foretune.memory.tape import Tensor

__all__ = ["GraniteHybridDecoder"]


class HybridAttention(LlamaAttention):
    """Attention that goes without rotary embedding where the config asks for none."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        self.has_rotary = modules.traits.rotary_dim is not None


# ------------------------------------------------------------------ Granite 4
class GraniteHybridMlp:
    """GraniteMoeHybridMLP: gate and up in one projection."""

    def __init__(self, input_linear: Module, output_linear: Module, act: Module) -> None:
        self.input_linear, self.output_linear, self.act = input_linear, output_linear, act

    def __call__(self, hidden_states: Tensor) -> Any:
        hidden_states = call(self.input_linear, hidden_states)
        chunked_hidden_states = split(hidden_states, [hidden_states.shape[-1] // 2] * 2, -1)
        hidden_states = mul(call(self.act, chunked_hidden_states[0]), chunked_hidden_states[1])
        hidden_states = call(self.output_linear, hidden_states)
        return hidden_states  # noqa: RET504


class GraniteHybridLayer(Layer):
    """GraniteMoeHybridDecoderLayer without experts."""

    def __init__(self, input_layernorm: Module, mixer: Module, post_attention_layernorm: Module, mlp: Module) -> None:
        self.input_layernorm, self.mixer = input_layernorm, mixer
        self.post_attention_layernorm, self.shared_mlp = post_attention_layernorm, mlp

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, cache: Any = None, position_embeddings: Any = None
    ) -> Tensor:
        residual = hidden_states
        hidden_states = call(self.input_layernorm, hidden_states)
        if self.mask_kind == "linear":
            hidden_states = call(self.mixer, hidden_states=hidden_states, cache=cache, attention_mask=attention_mask)
        else:
            hidden_states, _ = call(
                self.mixer,
                hidden_states=hidden_states,
                attention_mask=attention_mask,
                cache=cache,
                position_embeddings=position_embeddings,
            )
        hidden_states = add(residual, scale(hidden_states))
        residual = hidden_states
        hidden_states = call(self.post_attention_layernorm, hidden_states)
        hidden_states = call(self.shared_mlp, hidden_states)
        hidden_states = add(residual, scale(hidden_states))
        return hidden_states  # noqa: RET504


class GraniteHybridDecoder(LlamaDecoder):
    """GraniteMoeHybridModel: scaled embeddings, branches and logits."""

    keyword_order = ("attention_mask", "cache", "position_embeddings")
    scales_logits = True

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        is_linear = self.modules.optional(f"{name}.mamba.A_log") is not None
        act = self.traits.activation or "silu"
        mixer: Module
        if is_linear:
            mixer = Mamba2Mixer(self.modules, f"{name}.mamba", act)
        else:
            mixer = HybridAttention(self.modules, f"{name}.self_attn", index)
        layer = GraniteHybridLayer(
            self.make_norm(f"{name}.input_layernorm"),
            mixer,
            self.make_norm(f"{name}.post_attention_layernorm"),
            GraniteHybridMlp(
                self.modules.linear(f"{name}.shared_mlp.input_linear"),
                self.modules.linear(f"{name}.shared_mlp.output_linear"),
                blocks.ACTIVATIONS[act],
            ),
        )
        if is_linear:
            layer.mask_kind = "linear"
        return layer

    def after_embedding(self, inputs_embeds: Tensor) -> Tensor:
        return scale(inputs_embeds)

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        masks = {"full": run.causal_mask(inputs_embeds, None, has_positions=False), "linear": None}
        run.ask_whether_padded()
        return masks
