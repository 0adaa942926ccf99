"""Mixtures of experts with shared experts and DeepSeek's router: glm4_moe, dots1, solar_open, exaone_moe.

Each class follows transformers 5.24's models/<family>/modeling_<family>.py; local names are theirs.
"""

from typing import Any, ClassVar

from foretune.memory import blocks
from foretune.memory.blocks import Module, RmsNorm, call
from foretune.memory.decoder import Modules, RunOptions
from foretune.memory.families.llama import LlamaAttention, LlamaDecoder, Qwen3Attention, SlidingDecoder
from foretune.memory.families.moe import make_experts
from foretune.memory.ops import add, transpose, view
from foretune.memory.routers import GroupedRouter
from foretune.memory.tape import Tensor
from foretune.models import DecoderTraits

__all__ = ["Dots1Decoder", "ExaoneMoeDecoder", "Glm4MoeDecoder", "SharedExpertsDecoder", "SolarOpenDecoder"]


class SharedExpertsBlock:
    """Glm4MoeMoE: routed experts, and shared ones that every token passes."""

    def __init__(self, gate: Module, experts: Module, shared_experts: Module) -> None:
        self.gate, self.experts, self.shared_experts = gate, experts, shared_experts

    def __call__(self, hidden_states: Tensor) -> Tensor:
        residuals = hidden_states
        orig_shape = hidden_states.shape
        _, topk_weights, topk_indices = call(self.gate, hidden_states)
        hidden_states = view(hidden_states, -1, hidden_states.shape[-1])
        hidden_states = view(call(self.experts, hidden_states, topk_indices, topk_weights), *orig_shape)
        hidden_states = add(hidden_states, call(self.shared_experts, residuals))
        return hidden_states  # noqa: RET504


class SharedExpertsDecoder(LlamaDecoder):
    """A decoder whose sparse layers have DeepSeek's router; a layer without one is dense."""

    parameters_in_32bit: ClassVar[frozenset[str]] = frozenset({"mlp.gate.weight"})
    router_class: ClassVar[type[Any]] = GroupedRouter

    @classmethod
    def layer_buffers(
        cls, traits: DecoderTraits, parameters: frozenset[str], dtype: str
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """The correction of a router's scores, fp32."""
        if "mlp.gate.weight" not in parameters:
            return []
        assert traits.num_experts is not None
        return [("mlp.gate.e_score_correction_bias", (traits.num_experts,), "f32")]

    def make_mlp(self, name: str) -> Module:
        if self.modules.optional(f"{name}.gate.weight") is None:
            return super().make_mlp(name)
        return SharedExpertsBlock(
            self.router_class(self.modules, f"{name}.gate"),
            make_experts(self.modules, f"{name}.experts"),
            super().make_mlp(f"{name}.shared_experts"),
        )


class Glm4MoeAttention(LlamaAttention):
    """models/glm4_moe: heads are normed by choice, then transposed; half of a head is rotated."""

    rotate = staticmethod(blocks.apply_rotary_neox)

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        self.q_norm, self.k_norm = (
            RmsNorm(modules.weight(f"{name}.{n}.weight")) if modules.traits.qk_norm else None
            for n in ("q_norm", "k_norm")
        )

    def project(self, hidden_states: Tensor, hidden_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        query_states = view(call(self.q_proj, hidden_states), *hidden_shape)
        key_states = view(call(self.k_proj, hidden_states), *hidden_shape)
        value_states = view(call(self.v_proj, hidden_states), *hidden_shape)
        if self.q_norm is not None and self.k_norm is not None:
            query_states = call(self.q_norm, query_states)
            key_states = call(self.k_norm, key_states)
        query_states = transpose(query_states, 1, 2)
        key_states = transpose(key_states, 1, 2)
        value_states = transpose(value_states, 1, 2)
        return query_states, key_states, value_states


class Glm4MoeDecoder(SharedExpertsDecoder):
    """models/glm4_moe."""

    attention_class = Glm4MoeAttention
    keyword_order = ("position_embeddings", "attention_mask", "position_ids", "cache")


class SolarOpenDecoder(SharedExpertsDecoder):
    """models/solar_open."""

    keyword_order = Glm4MoeDecoder.keyword_order


class Dots1Decoder(SharedExpertsDecoder, SlidingDecoder):
    """models/dots1: only the masks that its layers need are made."""

    masks_are_lazy = True

    attention_class: ClassVar[type[LlamaAttention]] = Qwen3Attention

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        masks: dict[str, Tensor | None] = {}
        sliding = self.traits.sliding_layers
        if not all(sliding) or not sliding:
            masks["full"] = run.causal_mask(inputs_embeds, None)
        if any(sliding):
            masks["sliding"] = run.causal_mask(inputs_embeds, self.traits.sliding_window)
        return masks


class ExaoneMoeAttention(LlamaAttention):
    """models/exaone_moe: heads are normed after they are transposed; full attention goes without rotary embedding."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        self.q_norm, self.k_norm = (RmsNorm(modules.weight(f"{name}.{n}.weight")) for n in ("q_norm", "k_norm"))

    def project(self, hidden_states: Tensor, hidden_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        query_states, key_states, value_states = super().project(hidden_states, hidden_shape)
        query_states = call(self.q_norm, query_states)
        key_states = call(self.k_norm, key_states)
        return query_states, key_states, value_states


class ExaoneMoeDecoder(Dots1Decoder):
    """models/exaone_moe."""

    attention_class = ExaoneMoeAttention
