"""VaultGemma and Gemma 4 (models/vaultgemma, gemma4 of transformers 5.24)."""

from typing import Any

from foretune.memory import blocks, ops
from foretune.memory.blocks import Module, call
from foretune.memory.decoder import Cache, Layer, Modules, RunOptions
from foretune.memory.experts import divide_in_place, gather_rows, sum_over, top_k
from foretune.memory.families.gemma import Gemma2Decoder
from foretune.memory.families.gemma_shared import (
    PowerRmsNorm,
    SharedStates,
    SharingAttention,
    SharingDecoder,
    SharingLayer,
    rotate_one,
)
from foretune.memory.families.llama import LlamaLayer
from foretune.memory.families.moe import make_experts
from foretune.memory.layout import numel
from foretune.memory.ops import add, contiguous, mul, reshape, scale, transpose, view
from foretune.memory.routers import Routing
from foretune.memory.strided import mul_in_place, select
from foretune.memory.tape import Tensor, current
from foretune.models import DecoderTraits

__all__ = ["Gemma4Decoder", "VaultGemmaDecoder"]


class VaultGemmaDecoder(Gemma2Decoder):
    """models/vaultgemma: gemma2 without the norms after attention and MLP."""

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        layer = LlamaLayer(
            self.make_norm(f"{name}.input_layernorm"),
            self.attention_class(self.modules, f"{name}.self_attn", index),
            self.make_norm(f"{name}.pre_feedforward_layernorm"),
            self.make_mlp(f"{name}.mlp"),
        )
        if self.is_sliding(index):
            layer.mask_kind = layer.table_kind = "sliding"
        return layer


# ------------------------------------------------------------------ Gemma 4
class Gemma4Attention(SharingAttention):
    """Gemma4TextAttention: in layers without a window, keys may serve as values."""

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        shared_kv_states: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        cos, sin = position_embeddings
        query_states = view(call(self.q_proj, hidden_states), *hidden_shape)
        query_states = call(self.q_norm, query_states)
        query_states = rotate_one(query_states, cos, sin)
        query_states = transpose(query_states, 1, 2)
        if self.is_kv_shared_layer:
            key_states, value_states = shared_kv_states[self.layer_type]
        else:
            key_states = view(call(self.k_proj, hidden_states), *hidden_shape)
            value_states = key_states if self.v_proj is None else view(call(self.v_proj, hidden_states), *hidden_shape)
            key_states = call(self.k_norm, key_states)
            key_states = rotate_one(key_states, cos, sin)
            key_states = transpose(key_states, 1, 2)
            value_states = call(self.v_norm, value_states)
            value_states = transpose(value_states, 1, 2)
            if cache is not None:
                key_states, value_states = cache.update(key_states, value_states)
        if self.store_full_length_kv:
            shared_kv_states[self.layer_type] = key_states, value_states
        attn_output, attn_weights = self.attend(query_states, key_states, value_states, attention_mask)
        attn_output = contiguous(reshape(attn_output, (*input_shape, numel(attn_output.shape[2:]))))
        attn_output = call(self.o_proj, attn_output)
        return attn_output, attn_weights


class _Router:
    """Gemma4TextRouter."""

    def __init__(self, modules: Modules, name: str) -> None:
        assert modules.traits.experts_per_token is not None
        self.top_k, self.norm, self.proj = (
            modules.traits.experts_per_token,
            PowerRmsNorm(None),
            modules.linear(f"{name}.proj"),
        )
        self.scale, self.per_expert_scale = modules.weight(f"{name}.scale"), modules.weight(f"{name}.per_expert_scale")

    def __call__(self, hidden_states: Tensor) -> Routing:
        hidden_states = call(self.norm, hidden_states)
        hidden_states = scale(mul(hidden_states, self.scale))
        expert_scores = call(self.proj, hidden_states)
        router_probabilities = blocks.softmax_f32(expert_scores)
        top_k_weights, top_k_index = top_k(router_probabilities, self.top_k)
        top_k_weights = divide_in_place(top_k_weights, sum_over(top_k_weights, -1, keepdim=True))
        top_k_weights = mul(top_k_weights, gather_rows(self.per_expert_scale, top_k_index))
        return router_probabilities, top_k_weights, top_k_index


class Gemma4Layer(SharingLayer):
    """Gemma4TextDecoderLayer."""

    def __init__(self, modules: Modules, name: str, attention: Module, mlp: Module, act: Module) -> None:
        self.self_attn, self.mlp, self.act_fn = attention, mlp, act
        self.input_layernorm, self.post_attention_layernorm, self.pre_feedforward_layernorm, *last = (
            PowerRmsNorm(modules.weight(f"{name}.{n}.weight"))
            for n in (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            )
        )
        self.post_feedforward_layernorm = last[0]
        self.has_experts = "enable_moe_block" in modules.traits.flags
        if self.has_experts:
            self.router = _Router(modules, f"{name}.router")
            self.experts = make_experts(modules, f"{name}.experts")
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2, self.pre_feedforward_layernorm_2 = (
                PowerRmsNorm(modules.weight(f"{name}.{n}.weight"))
                for n in (
                    "post_feedforward_layernorm_1",
                    "post_feedforward_layernorm_2",
                    "pre_feedforward_layernorm_2",
                )
            )
        self.layer_scalar = modules.buffer(f"{name}.layer_scalar")
        weight = modules.optional(f"{name}.post_per_layer_input_norm.weight")
        self.has_per_layer_input = weight is not None
        if weight is not None:
            self.post_per_layer_input_norm = PowerRmsNorm(weight)
            self.per_layer_input_gate = modules.linear(f"{name}.per_layer_input_gate")
            self.per_layer_projection = modules.linear(f"{name}.per_layer_projection")

    def forward(
        self,
        hidden_states: Tensor,
        per_layer_input: Any = None,
        shared_kv_states: Any = None,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
    ) -> Tensor:
        residual = hidden_states
        hidden_states = call(self.input_layernorm, hidden_states)
        hidden_states, _ = call(
            self.self_attn,
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            shared_kv_states=shared_kv_states,
            position_ids=position_ids,
            cache=cache,
        )
        hidden_states = call(self.post_attention_layernorm, hidden_states)
        hidden_states = add(residual, hidden_states)
        residual = hidden_states
        hidden_states = call(self.pre_feedforward_layernorm, hidden_states)
        hidden_states = call(self.mlp, hidden_states)
        if self.has_experts:
            hidden_states_1 = call(self.post_feedforward_layernorm_1, hidden_states)
            hidden_states_flat = reshape(residual, (numel(residual.shape[:-1]), residual.shape[-1]))
            _, top_k_weights, top_k_index = call(self.router, hidden_states_flat)
            hidden_states_2 = call(self.pre_feedforward_layernorm_2, hidden_states_flat)
            hidden_states_2 = call(self.experts, hidden_states_2, top_k_index, top_k_weights)
            hidden_states_2 = reshape(hidden_states_2, residual.shape)
            hidden_states_2 = call(self.post_feedforward_layernorm_2, hidden_states_2)
            hidden_states = add(hidden_states_1, hidden_states_2)
        hidden_states = call(self.post_feedforward_layernorm, hidden_states)
        hidden_states = add(residual, hidden_states)
        if self.has_per_layer_input:
            residual = hidden_states
            hidden_states = call(self.per_layer_input_gate, hidden_states)
            hidden_states = call(self.act_fn, hidden_states)
            hidden_states = mul(hidden_states, per_layer_input)
            hidden_states = call(self.per_layer_projection, hidden_states)
            hidden_states = call(self.post_per_layer_input_norm, hidden_states)
            hidden_states = add(residual, hidden_states)
        hidden_states = mul_in_place(hidden_states, self.layer_scalar)
        return hidden_states  # noqa: RET504


class Gemma4Decoder(SharingDecoder):
    """Gemma4TextModel: layers without a window have heads of another width."""

    @classmethod
    def buffers(cls, traits: DecoderTraits, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        """Frequencies of two widths."""
        scale, *rotary = super().buffers(traits, dtype)
        wide = traits.global_rotary_dim or traits.rotary_dim or 0
        rotary = [(name, (wide // 2,), "f32") if name.startswith("full") else (name, s, d) for name, s, d in rotary]
        has_inputs = "hidden_size_per_layer_input" in traits.flags
        return [scale, *rotary, *([("per_layer_embed_scale", (), dtype)] if has_inputs else [])]

    @classmethod
    def layer_buffers(
        cls, traits: DecoderTraits, parameters: frozenset[str], dtype: str
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """A scale of the whole layer. As long as the embedding's, which comes first, so their order does not show."""
        return [("layer_scalar", (1,), dtype)]

    def make_layer(self, index: int) -> Layer:
        name, act = f"{self.modules.prefix}{index}", blocks.ACTIVATIONS[self.traits.activation or "gelu_pytorch_tanh"]
        kind = "sliding" if self.is_sliding(index) else "full"
        attention = Gemma4Attention(self.modules, f"{name}.self_attn", kind=kind, stores=self.stores(index))
        layer = Gemma4Layer(self.modules, name, attention, self.make_mlp(f"{name}.mlp"), act)
        layer.mask_kind = layer.table_kind = kind
        layer.is_shared = attention.is_kv_shared_layer
        return layer

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        wide, width = self.traits.global_rotary_dim, self.traits.rotary_dim
        assert width
        kinds = sorted({layer.table_kind for layer in self.layers})
        return {
            kind: blocks.rotary_tables(hidden_states.dtype, position_ids, width if kind == "sliding" else wide or width)
            for kind in kinds
        }

    def __call__(  # type: ignore[override]
        self,
        input_ids: Tensor,
        run: RunOptions,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        inputs_embeds: Any = None,
        per_layer_inputs: Any = None,
    ) -> tuple[Tensor, Any]:
        tape = current()
        if inputs_embeds is None:
            inputs_embeds = self.embed(input_ids)
        if run.embeddings_want_grad:
            inputs_embeds.needs_grad = True
        if self.has_per_layer_inputs:
            if per_layer_inputs is None:
                per_layer_inputs = self.get_per_layer_inputs(input_ids)
            per_layer_inputs = self.project_per_layer_inputs(inputs_embeds, per_layer_inputs)
        cache = Cache() if run.keeps_cache else None
        if position_ids is None:
            position_ids = self.positions_of(run)
        masks = attention_mask
        if masks is None:
            _mask_kwargs = {"inputs_embeds": inputs_embeds, "position_ids": position_ids}
            masks = self.masks(run, inputs_embeds)
        hidden_states = inputs_embeds
        position_embeddings = self.position_tables(hidden_states, position_ids)
        shared_kv_states = SharedStates()
        is_sliced = False
        for i, layer in enumerate(self.layers):
            tape.segment("forward", i)
            if getattr(layer, "is_shared", False) and not is_sliced:
                is_sliced = True
                hidden_states, per_layer_inputs, position_embeddings, masks = self._slice_shared_inputs(
                    hidden_states, per_layer_inputs, position_embeddings, masks
                )
            per_layer_input = select(per_layer_inputs, 2) if per_layer_inputs is not None else None
            step = layer.checkpointed if run.is_checkpointed else layer.forward
            hidden_states = call(
                step,
                hidden_states,
                per_layer_input,
                shared_kv_states=shared_kv_states,
                position_embeddings=position_embeddings[layer.table_kind],
                attention_mask=masks[layer.mask_kind],
                position_ids=position_ids,
                cache=cache,
            )
            run.end_layer(i)
        tape.segment("head")
        hidden_states = call(self.norm, hidden_states)
        return hidden_states, cache

    def _slice_shared_inputs(
        self, hidden_states: Tensor, per_layer_inputs: Any, position_embeddings: Any, causal_mask_mapping: Any
    ) -> tuple[Tensor, Any, Any, Any]:
        """_maybe_slice_kv_shared_inputs: slices of everything, which are aliases."""
        hidden_states = _whole(hidden_states)
        per_layer_inputs = _whole(per_layer_inputs)
        position_embeddings = {k: (_whole(cos), _whole(sin)) for k, (cos, sin) in position_embeddings.items()}
        causal_mask_mapping = {k: v if v is None else _whole(v) for k, v in causal_mask_mapping.items()}
        return hidden_states, per_layer_inputs, position_embeddings, causal_mask_mapping

    def get_per_layer_inputs(self, input_ids: Tensor) -> Tensor:
        """The rows of the second embedding."""
        return self.by_layer(call(self.embed_per_layer, input_ids))

    def project_per_layer_inputs(self, inputs_embeds: Tensor, per_layer_inputs: Tensor) -> Tensor:
        """Add the projected first embedding to the second."""
        per_layer_projection = scale(call(self.per_layer_model_projection, inputs_embeds))
        per_layer_projection = self.by_layer(per_layer_projection)
        per_layer_projection = call(self.per_layer_projection_norm, per_layer_projection)
        return scale(add(per_layer_projection, per_layer_inputs))


def _whole(t: Tensor) -> Tensor:
    return ops.narrow(t, 1, t.shape[1])
