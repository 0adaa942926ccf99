"""Granite, HyperCLOVA X, StarCoder2, Phi and StableLM (models/<family> of transformers 5.24).

Each class follows models/<family>/modeling_<family>.py; local names are theirs.
"""

from typing import Any

from foretune.memory import blocks
from foretune.memory.blocks import LayerNorm, Module, PlainMlp, call
from foretune.memory.decoder import Cache, Layer, Modules
from foretune.memory.families.classic import LayerNormDecoder
from foretune.memory.families.llama import LlamaAttention, LlamaDecoder, LlamaLayer, MistralDecoder
from foretune.memory.layout import numel
from foretune.memory.norms import NormPerHead
from foretune.memory.ops import add, cat_last, contiguous, dropout, narrow, reshape, scale, transpose, view
from foretune.memory.tape import Tensor

__all__ = ["GraniteDecoder", "GraniteLayer", "HyperClovaXDecoder", "PhiDecoder", "StableLmDecoder", "Starcoder2Decoder"]


class GraniteLayer(LlamaLayer):
    """models/granite, minicpm3: what enters the residual stream is scaled."""

    def scaled(self, hidden_states: Tensor) -> Tensor:
        return scale(hidden_states)


class GraniteDecoder(LlamaDecoder):
    """models/granite: scaled embeddings, branches and logits."""

    keyword_order = MistralDecoder.keyword_order
    layer_class = GraniteLayer

    def after_embedding(self, inputs_embeds: Tensor) -> Tensor:
        return scale(inputs_embeds)


class Starcoder2Attention(LlamaAttention):
    """models/starcoder2: dropout after the output projection."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        self.residual_dropout = modules.traits.residual_dropout


class HyperClovaXLayer(GraniteLayer):
    """models/hyperclovax: norms after attention and MLP too, where the config asks for them."""

    def __init__(self, *modules: Module, post_norms: tuple[Module, Module]) -> None:
        super().__init__(*modules)
        self.post_norm1, self.post_norm2 = post_norms

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
        hidden_states = call(self.post_norm1, hidden_states)
        hidden_states = add(residual, scale(hidden_states))
        residual = hidden_states
        hidden_states = call(self.post_attention_layernorm, hidden_states)
        hidden_states = call(self.mlp, hidden_states)
        hidden_states = call(self.post_norm2, hidden_states)
        hidden_states = add(residual, scale(hidden_states))
        return hidden_states  # noqa: RET504


class HyperClovaXDecoder(GraniteDecoder):
    """models/hyperclovax."""

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        if self.modules.optional(f"{name}.post_norm1.weight") is None:
            return super().make_layer(index)
        return HyperClovaXLayer(
            self.make_norm(f"{name}.input_layernorm"),
            self.attention_class(self.modules, f"{name}.self_attn", index),
            self.make_norm(f"{name}.post_attention_layernorm"),
            self.make_mlp(f"{name}.mlp"),
            post_norms=(self.make_norm(f"{name}.post_norm1"), self.make_norm(f"{name}.post_norm2")),
        )


class Starcoder2Decoder(LayerNormDecoder, MistralDecoder):
    """models/starcoder2: norms with bias, an MLP without a gate."""

    attention_class = Starcoder2Attention

    def make_mlp(self, name: str) -> Module:
        linear, act = self.modules.linear, blocks.ACTIVATIONS[self.traits.activation or "gelu_pytorch_tanh"]
        return PlainMlp(linear(f"{name}.c_fc"), linear(f"{name}.c_proj"), act, self.traits.residual_dropout)

    def after_masks(self, hidden_states: Tensor) -> Tensor:
        return dropout(hidden_states, self.traits.embedding_dropout)


class PhiAttention(LlamaAttention):
    """models/phi: part of each head is rotated; the unrotated queries and keys live until the call ends."""

    def __init__(self, modules: Modules, name: str) -> None:
        t = modules.traits
        assert t.head_dim is not None
        assert t.num_heads is not None
        assert t.num_kv_heads is not None
        assert t.rotary_dim is not None
        self.head_dim, self.groups, self.modules = t.head_dim, t.num_heads // t.num_kv_heads, modules
        self.softcap, self.probability, self.rotary_ndims = None, t.attention_dropout, t.rotary_dim
        self.q_proj, self.k_proj, self.v_proj, self.dense = (
            modules.linear(f"{name}.{n}") for n in ("q_proj", "k_proj", "v_proj", self.output_name)
        )
        self.norms = self._norms(modules, name) if t.qk_norm else []

    output_name = "dense"

    def _norms(self, modules: Modules, name: str) -> list[Module]:
        """Norms on queries and keys."""
        names = [f"{name}.{n}" for n in ("q_layernorm", "k_layernorm")]
        return [LayerNorm(modules.weight(f"{n}.weight"), modules.weight(f"{n}.bias")) for n in names]

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query_states, key_states, value_states = self.project(hidden_states, hidden_shape)
        if self.norms:
            query_states = call(self.norms[0], query_states)
            key_states = call(self.norms[1], key_states)
        cos, sin = position_embeddings
        rest = self.head_dim - self.rotary_ndims
        query_rot, query_pass = narrow(query_states, -1, self.rotary_ndims), narrow(query_states, -1, rest)
        key_rot, key_pass = narrow(key_states, -1, self.rotary_ndims), narrow(key_states, -1, rest)
        query_rot, key_rot = blocks.apply_rotary(query_rot, key_rot, cos, sin)
        query_states = cat_last([query_rot, query_pass])
        key_states = cat_last([key_rot, key_pass])
        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states)
        attn_output, attn_weights = self.attend(query_states, key_states, value_states, attention_mask)
        attn_output = contiguous(reshape(attn_output, (*input_shape, numel(attn_output.shape[2:]))))
        attn_output = call(self.dense, attn_output)
        return attn_output, attn_weights


class PhiLayer(Layer):
    """models/phi: attention and MLP read the same normed input."""

    def __init__(self, input_layernorm: Module, self_attn: Module, mlp: Module, resid_dropout: float) -> None:
        self.input_layernorm, self.self_attn, self.mlp = input_layernorm, self_attn, mlp
        self.resid_dropout = resid_dropout

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
        attn_outputs, _ = call(
            self.self_attn,
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            position_embeddings=position_embeddings,
        )
        attn_outputs = call(dropout, attn_outputs, self.resid_dropout)
        feed_forward_hidden_states = call(dropout, call(self.mlp, hidden_states), self.resid_dropout)
        hidden_states = add(add(attn_outputs, feed_forward_hidden_states), residual)
        return hidden_states  # noqa: RET504


class PhiDecoder(Starcoder2Decoder):
    """models/phi."""

    final_norm_name = "model.final_layernorm"
    rebinds_embeddings = True

    def make_layer(self, index: int) -> Layer:
        name, linear = f"{self.modules.prefix}{index}", self.modules.linear
        act = blocks.ACTIVATIONS[self.traits.activation or "gelu_new"]
        mlp = PlainMlp(linear(f"{name}.mlp.fc1"), linear(f"{name}.mlp.fc2"), act)
        attention = PhiAttention(self.modules, f"{name}.self_attn")
        return PhiLayer(self.make_norm(f"{name}.input_layernorm"), attention, mlp, self.traits.residual_dropout)


class StableLmAttention(PhiAttention):
    """models/stablelm: phi's, with a norm of its own for each head where the config asks for norms."""

    output_name = "o_proj"

    def _norms(self, modules: Modules, name: str) -> list[Module]:
        t = modules.traits
        norms: list[Module] = []
        for n, count in (("q_layernorm", t.num_heads), ("k_layernorm", t.num_kv_heads)):
            weights = [modules.weight(f"{name}.{n}.norms.{i}.weight") for i in range(count or 0)]
            norms.append(NormPerHead([LayerNorm(weight, None) for weight in weights]))
        return norms

    def project(self, hidden_states: Tensor, hidden_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        query_states = call(self.q_proj, hidden_states)
        key_states = call(self.k_proj, hidden_states)
        value_states = call(self.v_proj, hidden_states)
        query_states = transpose(view(query_states, *hidden_shape), 1, 2)
        key_states = transpose(view(key_states, *hidden_shape), 1, 2)
        value_states = transpose(view(value_states, *hidden_shape), 1, 2)
        return query_states, key_states, value_states


class StableLmLayer(Layer):
    """models/stablelm: attention and MLP in sequence, or both from the same normed input."""

    def __init__(
        self, input_layernorm: Module, self_attn: Module, post_layernorm: Module | None, mlp: Module, probability: float
    ) -> None:
        self.input_layernorm, self.self_attn, self.mlp = input_layernorm, self_attn, mlp
        self.post_attention_layernorm, self.probability = post_layernorm, probability

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
        self_attn_output, _ = call(
            self.self_attn,
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            position_embeddings=position_embeddings,
        )
        if self.post_attention_layernorm is None:
            mlp_output = call(self.mlp, hidden_states)
            mlp_output = call(dropout, mlp_output, self.probability)
            hidden_states = add(add(residual, self_attn_output), mlp_output)
        else:
            residual = add(residual, self_attn_output)
            mlp_output = call(self.mlp, call(self.post_attention_layernorm, residual))
            mlp_output = call(dropout, mlp_output, self.probability)
            hidden_states = add(residual, mlp_output)
        return hidden_states


class StableLmDecoder(LayerNormDecoder, LlamaDecoder):
    """models/stablelm."""

    keyword_order = MistralDecoder.keyword_order

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        post_layernorm = None
        if not self.traits.has_parallel_residual:
            post_layernorm = self.make_norm(f"{name}.post_attention_layernorm")
        return StableLmLayer(
            self.make_norm(f"{name}.input_layernorm"),
            StableLmAttention(self.modules, f"{name}.self_attn"),
            post_layernorm,
            self.make_mlp(f"{name}.mlp"),
            self.traits.residual_dropout,
        )
