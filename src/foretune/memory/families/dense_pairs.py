"""Decoders that rotate pairs of neighbours: Cohere, Cohere 2, GLM, GLM-4, Ernie 4.5 and Helium.

Each class follows models/<family>/modeling_<family>.py of transformers 5.24; local names are theirs.
"""

from typing import Any, ClassVar

from foretune.memory import blocks, interleaved
from foretune.memory.blocks import Module, call
from foretune.memory.decoder import Layer, Modules
from foretune.memory.families.dense_more import MinistralDecoder
from foretune.memory.families.gemma import Gemma2Layer
from foretune.memory.families.llama import LlamaAttention, LlamaDecoder, Phi3Mlp
from foretune.memory.norms import CohereNorm, HeliumNorm
from foretune.memory.ops import add, transpose, view
from foretune.memory.tape import Tensor

__all__ = ["Cohere2Decoder", "CohereDecoder", "Ernie45Decoder", "Glm4Decoder", "GlmDecoder", "HeliumDecoder"]


class CohereAttention(LlamaAttention):
    """models/cohere: norms on queries and keys, apart for every head, where the config asks for them."""

    rotate = staticmethod(interleaved.apply_rotary_cohere)

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        weights = [modules.optional(f"{name}.{n}.weight") for n in ("q_norm", "k_norm")]
        self.norms = [CohereNorm(weight) for weight in weights if weight is not None]

    def project(self, hidden_states: Tensor, hidden_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        query_states = view(call(self.q_proj, hidden_states), *hidden_shape)
        key_states = view(call(self.k_proj, hidden_states), *hidden_shape)
        value_states = view(call(self.v_proj, hidden_states), *hidden_shape)
        if self.norms:
            query_states = call(self.norms[0], query_states)
            key_states = call(self.norms[1], key_states)
        query_states = transpose(query_states, 1, 2)
        key_states = transpose(key_states, 1, 2)
        value_states = transpose(value_states, 1, 2)
        return query_states, key_states, value_states


class Cohere2Attention(LlamaAttention):
    """models/cohere2: only windowed layers are rotated."""

    rotate = staticmethod(interleaved.apply_rotary_cohere)

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        sliding = modules.traits.sliding_layers
        self.has_rotary = bool(sliding) and sliding[index]


class CohereLayer(Layer):
    """models/cohere: attention and MLP read the same normed input."""

    def __init__(self, input_layernorm: Module, self_attn: Module, mlp: Module) -> None:
        self.input_layernorm, self.self_attn, self.mlp = input_layernorm, self_attn, mlp

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
        hidden_states_attention, _ = call(
            self.self_attn,
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            position_embeddings=position_embeddings,
        )
        hidden_states_mlp = call(self.mlp, hidden_states)
        hidden_states = add(add(residual, hidden_states_attention), hidden_states_mlp)
        return hidden_states  # noqa: RET504


class CohereDecoder(LlamaDecoder):
    """models/cohere: parallel residuals, scaled logits."""

    attention_class: ClassVar[type[LlamaAttention]] = CohereAttention

    def make_norm(self, name: str) -> Module:
        return CohereNorm(self.modules.weight(f"{name}.weight"))

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        return CohereLayer(
            self.make_norm(f"{name}.input_layernorm"),
            self.attention_class(self.modules, f"{name}.self_attn", index),
            self.make_mlp(f"{name}.mlp"),
        )


class Cohere2Decoder(CohereDecoder):
    """models/cohere2: windows."""

    attention_class = Cohere2Attention
    keyword_order = ("attention_mask", "position_embeddings", "cache", "position_ids")
    mask_kwargs = True
    masks = MinistralDecoder.masks

    def make_layer(self, index: int) -> Layer:
        layer = super().make_layer(index)
        if self.traits.sliding_layers and self.traits.sliding_layers[index]:
            layer.mask_kind = "sliding"
        return layer


class GlmAttention(LlamaAttention):
    """models/glm, glm4."""

    rotate = staticmethod(interleaved.apply_rotary_glm)


class GlmDecoder(LlamaDecoder):
    """models/glm: gate and up in one projection, part of each head rotated."""

    attention_class = GlmAttention

    def make_mlp(self, name: str) -> Module:
        linear, act = self.modules.linear, blocks.ACTIVATIONS[self.traits.activation or "silu"]
        return Phi3Mlp(linear(f"{name}.gate_up_proj"), linear(f"{name}.down_proj"), act)


class Glm4Decoder(GlmDecoder):
    """models/glm4: norms after attention and MLP too."""

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        order = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
        norms = [self.make_norm(f"{name}.{n}") for n in order]
        attention = self.attention_class(self.modules, f"{name}.self_attn", index)
        return Gemma2Layer(norms, attention, self.make_mlp(f"{name}.mlp"))


class ErnieAttention(LlamaAttention):
    """models/ernie4_5."""

    rotate = staticmethod(interleaved.apply_rotary_ernie)


class Ernie45Decoder(LlamaDecoder):
    """models/ernie4_5: fp32 tables."""

    attention_class = ErnieAttention

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        assert self.traits.rotary_dim
        return {"full": blocks.rotary_tables("f32", position_ids, self.traits.rotary_dim)}


class HeliumAttention(LlamaAttention):
    """models/helium."""

    rotate = staticmethod(interleaved.apply_rotary_helium)


class HeliumDecoder(LlamaDecoder):
    """models/helium: norms whose weight is cast too."""

    attention_class = HeliumAttention

    def make_norm(self, name: str) -> Module:
        return HeliumNorm(self.modules.weight(f"{name}.weight"))
