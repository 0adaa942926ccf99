"""Mixtures of experts with routers of their own: granitemoe, granitemoeshared, ernie4_5_moe, hunyuan_v1_moe.

Each class follows transformers 5.24's models/<family>/modeling_<family>.py; local names are theirs.
"""

from typing import Any, ClassVar

from foretune.memory import blocks
from foretune.memory.blocks import Module, call, softmax_f32
from foretune.memory.decoder import Layer, Modules
from foretune.memory.experts import divide, divide_in_place, gather_last, sum_over, top_k
from foretune.memory.families.dense import GraniteLayer
from foretune.memory.families.dense_more import HunYuanAttention
from foretune.memory.families.dense_pairs import Ernie45Decoder
from foretune.memory.families.llama import LlamaDecoder
from foretune.memory.families.moe import make_experts
from foretune.memory.ops import add, linear, mul, reshape, scale, softmax, split_last, to, view
from foretune.memory.pointwise import clamp
from foretune.memory.routers import Routing
from foretune.memory.tape import Tensor

__all__ = ["Ernie45MoeDecoder", "GraniteMoeDecoder", "GraniteMoeSharedDecoder", "HunYuanMoeDecoder"]

_KEYWORD_ORDER = ("position_embeddings", "attention_mask", "position_ids", "cache")


# ------------------------------------------------------------------ granitemoe
class GraniteMoeRouter:
    """GraniteMoeTopKRouter: the k largest logits, softmax over them alone."""

    def __init__(self, modules: Modules, name: str) -> None:
        assert modules.traits.experts_per_token is not None
        self.top_k, self.weight = modules.traits.experts_per_token, modules.weight(f"{name}.weight")

    def __call__(self, hidden_states: Tensor) -> Routing:
        router_logits = to(linear(hidden_states, self.weight), "f32")
        top_k_logits, top_k_index = top_k(router_logits, self.top_k)
        top_k_weights = to(softmax(top_k_logits), hidden_states.dtype)
        return router_logits, top_k_weights, top_k_index


class GraniteMoeMoE:
    """GraniteMoeMoE."""

    def __init__(self, router: Module, experts: Module) -> None:
        self.router, self.experts = router, experts

    def __call__(self, layer_input: Tensor) -> Tensor:
        shape = layer_input.shape
        hidden_states = view(layer_input, -1, shape[-1])
        _, top_k_weights, top_k_index = call(self.router, hidden_states)
        layer_output = call(self.experts, hidden_states, top_k_index, top_k_weights)
        return view(layer_output, *shape)


class GraniteSharedMlp:
    """GraniteMoeSharedMLP: gate and up in one projection."""

    def __init__(self, input_linear: Module, output_linear: Module, activation: Module) -> None:
        self.input_linear, self.output_linear, self.activation = input_linear, output_linear, activation

    def __call__(self, hidden_states: Tensor) -> Tensor:
        hidden_states = call(self.input_linear, hidden_states)
        width = hidden_states.shape[-1] // 2
        chunked_hidden_states = split_last(hidden_states, [width, width])
        hidden_states = mul(call(self.activation, chunked_hidden_states[0]), chunked_hidden_states[1])
        hidden_states = call(self.output_linear, hidden_states)
        return hidden_states  # noqa: RET504


class GraniteMoeSharedLayer(GraniteLayer):
    """models/granitemoeshared: what enters the residual stream is scaled; a shared MLP where the config has one."""

    shared_mlp: Module | None = None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        position_embeddings: Any = None,
    ) -> Tensor:
        residual = hidden_states
        hidden_states = call(self.input_layernorm, hidden_states)
        hidden_states, _ = call(
            self.self_attn,
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            position_embeddings=position_embeddings,
        )
        hidden_states = add(residual, scale(hidden_states))
        residual = hidden_states
        hidden_states = call(self.post_attention_layernorm, hidden_states)
        moe_hidden_states = call(self.mlp, hidden_states)
        if self.shared_mlp is None:
            hidden_states = moe_hidden_states
        else:
            hidden_states = add(moe_hidden_states, call(self.shared_mlp, hidden_states))
        hidden_states = add(residual, scale(hidden_states))
        return hidden_states  # noqa: RET504


class GraniteMoeDecoder(LlamaDecoder):
    """models/granitemoe: embeddings are scaled once the mask is there; the experts' module has another name."""

    keyword_order = _KEYWORD_ORDER
    layer_class = GraniteLayer
    scales_logits = True

    def rescaled(self, inputs_embeds: Tensor) -> Tensor:
        return scale(inputs_embeds)

    def make_mlp(self, name: str) -> Module:
        name = f"{name.removesuffix('mlp')}block_sparse_moe"
        router = GraniteMoeRouter(self.modules, f"{name}.router")
        return GraniteMoeMoE(router, make_experts(self.modules, f"{name}.experts"))


class GraniteMoeSharedDecoder(GraniteMoeDecoder):
    """models/granitemoeshared."""

    layer_class = GraniteMoeSharedLayer

    def make_layer(self, index: int) -> Layer:
        layer = super().make_layer(index)
        assert isinstance(layer, GraniteMoeSharedLayer)
        name = f"{self.modules.prefix}{index}.shared_mlp"
        if self.modules.has(f"{name}.input_linear"):
            linear, act = self.modules.linear, blocks.ACTIVATIONS[self.traits.activation or "silu"]
            layer.shared_mlp = GraniteSharedMlp(linear(f"{name}.input_linear"), linear(f"{name}.output_linear"), act)
        return layer


# ------------------------------------------------------------------ ernie4_5_moe
class ErnieMoeRouter:
    """Ernie4_5_MoeTopKRouter: softmax in fp32; a correction decides the choice alone."""

    def __init__(self, modules: Modules, name: str) -> None:
        assert modules.traits.experts_per_token is not None
        self.top_k, self.weight = modules.traits.experts_per_token, modules.weight(f"{name}.weight")
        self.e_score_correction_bias = modules.weight(f"{name}.moe_statics.e_score_correction_bias")

    def moe_statics(self, hidden_states: Tensor) -> Tensor:
        """Ernie4_5_MoeStatics."""
        return add(hidden_states, view(self.e_score_correction_bias, -1))

    def __call__(self, hidden_states: Tensor) -> Routing:
        router_logits = linear(to(hidden_states, "f32"), to(self.weight, "f32"))
        routing_weights = softmax_f32(router_logits)
        _, selected_experts = top_k(call(self.moe_statics, routing_weights), self.top_k)
        routing_weights = gather_last(routing_weights, selected_experts)
        routing_weights = divide(routing_weights, clamp(sum_over(routing_weights, -1, keepdim=True)))
        routing_weights = to(routing_weights, hidden_states.dtype)
        return router_logits, routing_weights, selected_experts


class ErnieMoeBlock:
    """Ernie4_5_MoeSparseMoeBlock."""

    def __init__(self, gate: Module, experts: Module, shared_experts: Module | None) -> None:
        self.gate, self.experts, self.shared_experts = gate, experts, shared_experts

    def __call__(self, hidden_states: Tensor) -> Tensor:
        batch_size, sequence_length, _ = hidden_states.shape
        hidden_states = view(hidden_states, -1, hidden_states.shape[-1])
        if self.shared_experts is not None:
            shared_output = call(self.shared_experts, hidden_states)
        _, top_k_weights, top_k_index = call(self.gate, hidden_states)
        final_hidden_states = call(self.experts, hidden_states, top_k_index, top_k_weights)
        if self.shared_experts is not None:
            final_hidden_states = add(final_hidden_states, shared_output)
        final_hidden_states = reshape(final_hidden_states, (batch_size, sequence_length, hidden_states.shape[-1]))
        return to(final_hidden_states, hidden_states.dtype)


class Ernie45MoeDecoder(Ernie45Decoder):
    """models/ernie4_5_moe: a layer without a router is dense."""

    keyword_order = _KEYWORD_ORDER
    parameters_in_32bit: ClassVar[frozenset[str]] = frozenset(
        {"mlp.gate.weight", "mlp.gate.moe_statics.e_score_correction_bias"}
    )

    def make_mlp(self, name: str) -> Module:
        if self.modules.optional(f"{name}.gate.weight") is None:
            return super().make_mlp(name)
        has_shared = self.modules.has(f"{name}.shared_experts.up_proj")
        return ErnieMoeBlock(
            ErnieMoeRouter(self.modules, f"{name}.gate"),
            make_experts(self.modules, f"{name}.experts"),
            super().make_mlp(f"{name}.shared_experts") if has_shared else None,
        )


# ------------------------------------------------------------------ hunyuan_v1_moe
def _dtype_of_weight(module: Any) -> str:
    """wg.weight.dtype, through an adapter; a 4-bit weight is packed into bytes."""
    weight = getattr(module, "base", module).weight
    return weight.dtype if isinstance(weight, Tensor) else "u8"


class HunYuanMoeGate:
    """HunYuanMoEV1Gate: a linear layer in fp32, softmax, the k largest divided by their sum."""

    def __init__(self, modules: Modules, name: str) -> None:
        assert modules.traits.experts_per_token is not None
        self.top_k, self.wg = modules.traits.experts_per_token, modules.linear(f"{name}.wg")

    def __call__(self, hidden_states: Tensor) -> Routing:
        hidden_states = view(hidden_states, -1, hidden_states.shape[-1])
        if _dtype_of_weight(self.wg) == "f32":
            hidden_states = to(hidden_states, "f32")
        router_logits = call(self.wg, hidden_states)
        routing_weights = softmax_f32(router_logits)
        routing_weights, selected_experts = top_k(routing_weights, self.top_k)
        routing_weights = divide_in_place(routing_weights, sum_over(routing_weights, -1, keepdim=True))
        return router_logits, to(routing_weights, router_logits.dtype), selected_experts


class HunYuanMoe:
    """HunYuanMoEV1Moe."""

    def __init__(self, gate: Module, experts: Module, shared_mlp: Module) -> None:
        self.gate, self.experts, self.shared_mlp = gate, experts, shared_mlp

    def __call__(self, hidden_states: Tensor) -> Tensor:
        shape = hidden_states.shape
        hidden_states_mlp = call(self.shared_mlp, hidden_states)
        hidden_states = view(hidden_states, -1, shape[-1])
        _, routing_weights, selected_experts = call(self.gate, hidden_states)
        final_hidden_states = reshape(call(self.experts, hidden_states, selected_experts, routing_weights), shape)
        return add(final_hidden_states, hidden_states_mlp)


class HunYuanMoeDecoder(LlamaDecoder):
    """models/hunyuan_v1_moe."""

    attention_class = HunYuanAttention
    keyword_order = _KEYWORD_ORDER
    parameters_in_32bit: ClassVar[frozenset[str]] = frozenset({"mlp.gate.wg.weight"})

    def make_mlp(self, name: str) -> Module:
        return HunYuanMoe(
            HunYuanMoeGate(self.modules, f"{name}.gate"),
            make_experts(self.modules, f"{name}.experts"),
            super().make_mlp(f"{name}.shared_mlp"),
        )
