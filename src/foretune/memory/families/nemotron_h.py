"""Nemotron-H: each layer is one of Mamba 2, attention, an MLP or experts (models/nemotron_h of transformers 5.24)."""

from typing import Any

from foretune.memory import blocks
from foretune.memory.blocks import Module, call
from foretune.memory.decoder import Layer, Modules, RunOptions
from foretune.memory.experts import Experts
from foretune.memory.families.llama import LlamaAttention, LlamaDecoder
from foretune.memory.families.mamba2 import Mamba2Mixer
from foretune.memory.families.statespace import BambaDecoder
from foretune.memory.ops import add, add_scalar, mean_last, mul, rsqrt, square, to, view
from foretune.memory.routers import GroupedRouter
from foretune.memory.tape import Tensor
from foretune.models import DecoderTraits

__all__ = ["NemotronHDecoder"]


class NemotronHNorm:
    """NemotronHRMSNorm: the weight in fp32 too."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = to(hidden_states, "f32")
        variance = mean_last(square(hidden_states))
        hidden_states = mul(hidden_states, rsqrt(add_scalar(variance)))
        return to(mul(to(self.weight, "f32"), hidden_states), input_dtype)


class NemotronHAttention(LlamaAttention):
    """NemotronHAttention: no rotary embedding."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        self.has_rotary = False


class NemotronHMlp:
    """NemotronHMLP."""

    def __init__(self, up_proj: Module, down_proj: Module, act: Module) -> None:
        self.up_proj, self.down_proj, self.act = up_proj, down_proj, act

    def __call__(self, x: Tensor) -> Any:
        return call(self.down_proj, call(self.act, call(self.up_proj, x)))


class NemotronHMoe:
    """NemotronHMoE: experts without a gate, in a narrower space where the config asks for one, and shared ones."""

    def __init__(self, modules: Modules, name: str, act: Module) -> None:
        linear, weight = modules.linear, modules.weight
        self.experts = Experts(weight(f"{name}.experts.up_proj"), weight(f"{name}.experts.down_proj"), act)
        self.gate = GroupedRouter(modules, f"{name}.gate")
        shared = f"{name}.shared_experts"
        self.shared_experts = NemotronHMlp(linear(f"{shared}.up_proj"), linear(f"{shared}.down_proj"), act)
        is_latent = modules.has(f"{name}.fc1_latent_proj")
        self.fc1_latent_proj = linear(f"{name}.fc1_latent_proj") if is_latent else _same
        self.fc2_latent_proj = linear(f"{name}.fc2_latent_proj") if is_latent else _same

    def __call__(self, hidden_states: Tensor) -> Tensor:
        residuals = hidden_states
        orig_shape = hidden_states.shape
        _, topk_weights, topk_indices = call(self.gate, hidden_states)
        hidden_states = view(hidden_states, -1, hidden_states.shape[-1])
        hidden_states = call(self.fc1_latent_proj, hidden_states)
        hidden_states = call(self.experts, hidden_states, topk_indices, topk_weights)
        hidden_states = call(self.fc2_latent_proj, hidden_states)
        hidden_states = view(hidden_states, *orig_shape)
        hidden_states = add(hidden_states, call(self.shared_experts, residuals))
        return hidden_states  # noqa: RET504


def _same(input: Tensor) -> Tensor:
    """nn.Identity."""
    return input


class NemotronHLayer(Layer):
    """NemotronHBlock."""

    def __init__(self, norm: NemotronHNorm, mixer: Module) -> None:
        self.norm, self.mixer = norm, mixer

    def forward(
        self, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None, position_ids: Any = None
    ) -> Tensor:
        residual = hidden_states
        hidden_states = call(self.norm, to(hidden_states, self.norm.weight.dtype))
        if self.mask_kind == "linear":
            hidden_states = call(self.mixer, hidden_states, cache=cache, attention_mask=attention_mask)
        elif self.mask_kind == "full":
            hidden_states, _ = call(
                self.mixer,
                hidden_states=hidden_states,
                cache=cache,
                attention_mask=attention_mask,
                position_ids=position_ids,
                position_embeddings=None,
            )
        else:
            hidden_states = call(self.mixer, hidden_states)
        hidden_states = add(residual, hidden_states)
        return hidden_states  # noqa: RET504


class NemotronHDecoder(BambaDecoder):
    """NemotronHModel."""

    embedding_name = "model.embeddings.weight"
    final_norm_name = "model.norm_f"
    keyword_order = ("attention_mask", "position_ids", "cache")
    logits_in_32bit = True
    parameters_in_32bit = frozenset({"mixer.gate.weight"})

    count_positions = LlamaDecoder.count_positions

    @classmethod
    def layer_buffers(
        cls, traits: DecoderTraits, parameters: frozenset[str], dtype: str
    ) -> list[tuple[str, tuple[int, ...], str]]:
        if "mixer.gate.weight" not in parameters:
            return []
        assert traits.num_experts is not None
        return [("mixer.gate.e_score_correction_bias", (traits.num_experts,), "f32")]

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        return {**super().masks(run, inputs_embeds), "none": None}

    def make_norm(self, name: str) -> NemotronHNorm:
        return NemotronHNorm(self.modules.weight(f"{name}.weight"))

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        mixer, kind = self._make_mixer(f"{name}.mixer", index)
        layer = NemotronHLayer(self.make_norm(f"{name}.norm"), mixer)
        layer.mask_kind = kind
        return layer

    def _make_mixer(self, name: str, index: int) -> tuple[Module, str]:
        act, optional = blocks.ACTIVATIONS[self.traits.activation or "relu2"], self.modules.optional
        if optional(f"{name}.A_log") is not None:
            return Mamba2Mixer(self.modules, name), "linear"
        if optional(f"{name}.gate.weight") is not None:
            return NemotronHMoe(self.modules, name, act), "none"
        if self.modules.has(f"{name}.q_proj"):
            return NemotronHAttention(self.modules, name, index), "full"
        linear = self.modules.linear
        return NemotronHMlp(linear(f"{name}.up_proj"), linear(f"{name}.down_proj"), act), "none"
