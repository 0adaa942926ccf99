"""Mixtures of experts whose layers are Llama's or OLMo2's: qwen3_moe, qwen2_moe, mixtral, olmoe, flex_olmo, minimax_m2.

Each class follows transformers 5.24's models/<family>/modeling_<family>.py; local names are theirs.
"""

from foretune.memory import blocks
from foretune.memory.blocks import Module, call
from foretune.memory.decoder import Modules, RunOptions
from foretune.memory.experts import Experts, divide_in_place, gated, gather_last, sum_over, top_k
from foretune.memory.families.llama import (
    LlamaDecoder,
    MistralDecoder,
    Olmo2Attention,
    Olmo2Decoder,
    Qwen2Decoder,
    Qwen3Attention,
)
from foretune.memory.ops import add, linear, mul, reshape, softmax, to, transpose, view
from foretune.memory.pointwise import clamp_in_place, sigmoid
from foretune.memory.routers import Routing, TopKRouter
from foretune.memory.tape import Tensor
from foretune.models import DecoderTraits

__all__ = [
    "FlexOlmoDecoder",
    "MiniMaxM2Decoder",
    "MixtralDecoder",
    "OlmoeDecoder",
    "Qwen2MoeDecoder",
    "Qwen3MoeDecoder",
    "make_experts",
]


def make_experts(modules: Modules, name: str) -> Experts:
    """Build the stacked gated experts of a name."""
    act = blocks.ACTIVATIONS[modules.traits.activation or "silu"]
    return Experts(modules.weight(f"{name}.gate_up_proj"), modules.weight(f"{name}.down_proj"), gated(act))


# ------------------------------------------------------------------ qwen3_moe
class Qwen3MoeSparseMoeBlock:
    """Qwen3MoeSparseMoeBlock."""

    def __init__(self, gate: Module, experts: Module) -> None:
        self.gate, self.experts = gate, experts

    def __call__(self, hidden_states: Tensor) -> Tensor:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states_reshaped = view(hidden_states, -1, hidden_dim)
        _, routing_weights, selected_experts = call(self.gate, hidden_states_reshaped)
        final_hidden_states = call(self.experts, hidden_states_reshaped, selected_experts, routing_weights)
        return reshape(final_hidden_states, (batch_size, sequence_length, hidden_dim))


class Qwen3MoeDecoder(MistralDecoder):
    """models/qwen3_moe (qwen3_vl_moe_text's layers too): a layer without a router is dense."""

    attention_class = Qwen3Attention

    def make_mlp(self, name: str) -> Module:
        if self.modules.optional(f"{name}.gate.weight") is None:
            return super().make_mlp(name)
        gate = TopKRouter(self.modules, f"{name}.gate")
        return Qwen3MoeSparseMoeBlock(gate, make_experts(self.modules, f"{name}.experts"))


# ------------------------------------------------------------------ qwen2_moe
class Qwen2MoeSparseMoeBlock:
    """Qwen2MoeSparseMoeBlock: a shared expert with a gate of its own."""

    def __init__(self, gate: Module, experts: Module, shared_expert: Module, shared_expert_gate: Module) -> None:
        self.gate, self.experts = gate, experts
        self.shared_expert, self.shared_expert_gate = shared_expert, shared_expert_gate

    def __call__(self, hidden_states: Tensor) -> Tensor:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states_reshaped = view(hidden_states, -1, hidden_dim)
        shared_expert_output = call(self.shared_expert, hidden_states_reshaped)
        _, routing_weights, selected_experts = call(self.gate, hidden_states_reshaped)
        expert_output = call(self.experts, hidden_states_reshaped, selected_experts, routing_weights)
        shared_expert_output = mul(sigmoid(call(self.shared_expert_gate, hidden_states_reshaped)), shared_expert_output)
        expert_output = add(expert_output, shared_expert_output)
        expert_output = reshape(expert_output, (batch_size, sequence_length, hidden_dim))
        return expert_output  # noqa: RET504


class Qwen2MoeDecoder(Qwen2Decoder):
    """models/qwen2_moe: both masks are made, of a window of 0 where none is used."""

    keyword_order = MistralDecoder.keyword_order

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        return {
            "full": run.causal_mask(inputs_embeds, None),
            "sliding": run.causal_mask(inputs_embeds, self.traits.sliding_window or 0),
        }

    def make_mlp(self, name: str) -> Module:
        if self.modules.optional(f"{name}.gate.weight") is None:
            return super().make_mlp(name)
        return Qwen2MoeSparseMoeBlock(
            TopKRouter(self.modules, f"{name}.gate"),
            make_experts(self.modules, f"{name}.experts"),
            super().make_mlp(f"{name}.shared_expert"),
            self.modules.linear(f"{name}.shared_expert_gate"),
        )


# ------------------------------------------------------------------ mixtral, olmoe, flex_olmo
class MixtralRouter:
    """MixtralTopKRouter: weights stay fp32."""

    def __init__(self, modules: Modules, name: str) -> None:
        assert modules.traits.experts_per_token is not None
        self.top_k, self.weight = modules.traits.experts_per_token, modules.weight(f"{name}.weight")

    def __call__(self, hidden_states: Tensor) -> Routing:
        hidden_states = view(hidden_states, -1, hidden_states.shape[-1])
        router_logits = linear(hidden_states, self.weight)
        router_probs = softmax(to(router_logits, "f32"))
        router_top_value, router_indices = top_k(router_probs, self.top_k)
        router_top_value = divide_in_place(router_top_value, sum_over(router_top_value, -1, keepdim=True))
        router_scores = router_top_value
        return router_logits, router_scores, router_indices


class MixtralSparseMoeBlock:
    """MixtralSparseMoeBlock without jitter, and those of olmoe, flex_olmo and minimax_m2."""

    def __init__(self, gate: Module, experts: Module) -> None:
        self.gate, self.experts = gate, experts

    def __call__(self, hidden_states: Tensor) -> Tensor:
        shape = hidden_states.shape
        hidden_states = view(hidden_states, -1, shape[-1])
        _, top_k_weights, top_k_index = call(self.gate, hidden_states)
        hidden_states = call(self.experts, hidden_states, top_k_index, top_k_weights)
        hidden_states = reshape(hidden_states, shape)
        return hidden_states  # noqa: RET504


class OlmoeSparseMoeBlock(MixtralSparseMoeBlock):
    """OlmoeSparseMoeBlock."""

    def __call__(self, hidden_states: Tensor) -> Tensor:
        shape = hidden_states.shape
        hidden_states = view(hidden_states, -1, shape[-1])
        _, top_k_weights, top_k_index = call(self.gate, hidden_states)
        final_hidden_states = reshape(call(self.experts, hidden_states, top_k_index, top_k_weights), shape)
        return final_hidden_states  # noqa: RET504


class MixtralDecoder(MistralDecoder):
    """models/mixtral."""

    def make_mlp(self, name: str) -> Module:
        gate = MixtralRouter(self.modules, f"{name}.gate")
        return MixtralSparseMoeBlock(gate, make_experts(self.modules, f"{name}.experts"))


class OlmoeAttention(Olmo2Attention):
    """models/olmoe: olmo2's, but norms and rotary embedding are Llama's."""

    norm_spelling = "llama"
    rotate = staticmethod(blocks.apply_rotary)

    def project(self, hidden_states: Tensor, hidden_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        query_states = call(self.q_norm, call(self.q_proj, hidden_states))
        key_states = call(self.k_norm, call(self.k_proj, hidden_states))
        value_states = call(self.v_proj, hidden_states)
        if self.modules.traits.clips_projections:
            query_states = clamp_in_place(query_states)
            key_states = clamp_in_place(key_states)
            value_states = clamp_in_place(value_states)
        query_states = transpose(view(query_states, *hidden_shape), 1, 2)
        key_states = transpose(view(key_states, *hidden_shape), 1, 2)
        value_states = transpose(view(value_states, *hidden_shape), 1, 2)
        return query_states, key_states, value_states


class OlmoeDecoder(LlamaDecoder):
    """models/olmoe."""

    attention_class = OlmoeAttention
    keyword_order = ("position_embeddings", "attention_mask", "position_ids", "cache")

    def make_mlp(self, name: str) -> Module:
        gate = TopKRouter(self.modules, f"{name}.gate")
        return OlmoeSparseMoeBlock(gate, make_experts(self.modules, f"{name}.experts"))


class FlexOlmoDecoder(Olmo2Decoder):
    """models/flex_olmo."""

    keyword_order = OlmoeDecoder.keyword_order
    make_mlp = OlmoeDecoder.make_mlp


# ------------------------------------------------------------------ minimax_m2
class MiniMaxM2Router(MixtralRouter):
    """MiniMaxM2TopKRouter: sigmoid scores; a correction decides the choice alone."""

    def __call__(self, hidden_states: Tensor, e_score_correction_bias: Tensor) -> Routing:  # type: ignore[override]
        hidden_states = view(hidden_states, -1, hidden_states.shape[-1])
        router_logits = linear(to(hidden_states, self.weight.dtype), self.weight)
        routing_weights = sigmoid(to(router_logits, "f32"))
        scores_for_choice = add(routing_weights, e_score_correction_bias)
        _, top_k_index = top_k(scores_for_choice, self.top_k)
        top_k_weights = gather_last(routing_weights, top_k_index)
        top_k_weights = divide_in_place(top_k_weights, sum_over(top_k_weights, -1, keepdim=True))
        router_scores = top_k_weights
        return router_logits, router_scores, top_k_index


class MiniMaxM2SparseMoeBlock:
    """MiniMaxM2SparseMoeBlock without jitter."""

    def __init__(self, gate: Module, experts: Module, e_score_correction_bias: Tensor) -> None:
        self.gate, self.experts, self.e_score_correction_bias = gate, experts, e_score_correction_bias

    def __call__(self, hidden_states: Tensor) -> Tensor:
        shape = hidden_states.shape
        hidden_states = view(hidden_states, -1, shape[-1])
        _, top_k_weights, top_k_index = call(self.gate, hidden_states, self.e_score_correction_bias)
        hidden_states = call(self.experts, hidden_states, top_k_index, top_k_weights)
        hidden_states = reshape(hidden_states, shape)
        return hidden_states  # noqa: RET504


class MiniMaxM2Attention(OlmoeAttention):
    """models/minimax_m2: whole projections are normed, part of a head is rotated."""

    rotate = staticmethod(blocks.apply_rotary_neox)


class MiniMaxM2Decoder(LlamaDecoder):
    """models/minimax_m2."""

    attention_class = MiniMaxM2Attention
    keyword_order = MistralDecoder.keyword_order

    @classmethod
    def layer_buffers(
        cls, traits: DecoderTraits, parameters: frozenset[str], dtype: str
    ) -> list[tuple[str, tuple[int, ...], str]]:
        assert traits.num_experts is not None
        return [("mlp.e_score_correction_bias", (traits.num_experts,), dtype)]

    def make_mlp(self, name: str) -> Module:
        return MiniMaxM2SparseMoeBlock(
            MiniMaxM2Router(self.modules, f"{name}.gate"),
            make_experts(self.modules, f"{name}.experts"),
            self.modules.buffer(f"{name}.e_score_correction_bias"),
        )
