"""What Gemma 3n and Gemma 4 share: their norm, keys and values that later layers reuse, a second input of each layer.

Follows models/gemma3n and models/gemma4 of transformers 5.24.
"""

from typing import Any

from foretune.memory import blocks, ops
from foretune.memory.blocks import Linear, Module, call
from foretune.memory.decoder import Cache, Layer, Modules
from foretune.memory.families.gemma import Gemma3Decoder
from foretune.memory.layout import numel
from foretune.memory.ops import add, add_scalar, contiguous, mul, reshape, to, transpose, unsqueeze, view
from foretune.memory.strided import power
from foretune.memory.tape import Tensor, checkpoint, discard
from foretune.models import ModelShape

__all__ = ["PowerRmsNorm", "SharedStates", "SharingAttention", "SharingDecoder", "SharingLayer", "rotate_one"]


class PowerRmsNorm:
    """Gemma3nRMSNorm, Gemma4RMSNorm: the reciprocal root is a power of -0.5; the scale may be missing."""

    def __init__(self, weight: Tensor | None) -> None:
        self.weight = weight

    @staticmethod
    def _norm(hidden_states: Tensor) -> Tensor:
        mean_squared = add_scalar(ops.mean_last(ops.square(hidden_states)))
        return mul(hidden_states, power(mean_squared))

    def __call__(self, hidden_states: Tensor) -> Tensor:
        normed_output = self._norm(to(hidden_states, "f32"))
        if self.weight is not None:
            normed_output = mul(normed_output, to(self.weight, "f32"))
        return to(normed_output, hidden_states.dtype)


class SharedStates:
    """KVSharingDict. A layer that is recomputed puts its keys and values there anew, with a graph that nobody runs."""

    def __init__(self) -> None:
        self.data: dict[str, list[Tensor]] = {}

    def __getitem__(self, kind: str) -> list[Tensor]:
        return self.data[kind]

    def __setitem__(self, kind: str, states: tuple[Tensor, Tensor]) -> None:
        self.data[kind] = list(states)

    def __del__(self) -> None:
        while self.data:
            states = self.data.pop(next(iter(self.data)))
            while states:
                discard(states.pop())


def rotate_one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """apply_rotary_pos_emb of one tensor [B, S, heads, head_dim]."""
    cos = unsqueeze(cos, 2)
    sin = unsqueeze(sin, 2)
    return add(mul(x, cos), mul(blocks.rotate_half(x), sin))


class SharingAttention:
    """Gemma3nTextAttention, Gemma4TextAttention: heads are normed and rotated before they are transposed; the last
    layer of a kind with keys and values of its own lays them down for those without.
    """

    def __init__(self, modules: Modules, name: str, *, kind: str, stores: bool) -> None:
        self.modules, self.layer_type, self.store_full_length_kv = modules, kind, stores
        q_norm = modules.weight(f"{name}.q_norm.weight")
        self.head_dim, self.q_norm = q_norm.shape[0], PowerRmsNorm(q_norm)
        k_norm = modules.optional(f"{name}.k_norm.weight")
        self.is_kv_shared_layer = k_norm is None
        self.k_norm, self.v_norm = PowerRmsNorm(k_norm), PowerRmsNorm(None)
        self.q_proj, self.o_proj = modules.linear(f"{name}.q_proj"), modules.linear(f"{name}.o_proj")
        self.k_proj: Any = None
        self.v_proj: Any = None
        if k_norm is not None:
            self.k_proj = modules.linear(f"{name}.k_proj")
            if kind == "sliding" or "attention_k_eq_v" not in modules.traits.flags:
                self.v_proj = modules.linear(f"{name}.v_proj")

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
            key_states = call(self.k_norm, key_states)
            key_states = rotate_one(key_states, cos, sin)
            key_states = transpose(key_states, 1, 2)
            value_states = view(call(self.v_proj, hidden_states), *hidden_shape)
            value_states = call(self.v_norm, value_states)
            value_states = transpose(value_states, 1, 2)
        if cache is not None and not self.is_kv_shared_layer:
            key_states, value_states = cache.update(key_states, value_states)
        if self.store_full_length_kv:
            shared_kv_states[self.layer_type] = key_states, value_states
        attn_output, attn_weights = self.attend(query_states, key_states, value_states, attention_mask)
        attn_output = contiguous(reshape(attn_output, (*input_shape, numel(attn_output.shape[2:]))))
        attn_output = call(self.o_proj, attn_output)
        return attn_output, attn_weights

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        """The attention function that the configuration names."""
        groups = q.shape[1] // k.shape[1]
        if self.modules.attention == "eager":
            return blocks.eager_attention(groups, q, k, v, mask)
        return blocks.sdpa_attention(self.modules.kernels, groups, q, k, v, mask)


class SharingLayer(Layer):
    """A layer whose second input is passed by position, so that checkpointing keeps it."""

    is_shared = False
    """It has no keys and values of its own."""

    def checkpointed(self, *args: Any, **kwargs: Any) -> Any:
        def run(*args: Any) -> Any:
            return self.forward(*args, **kwargs)

        return checkpoint(run, *args)


class SharingDecoder(Gemma3Decoder):
    """Per-layer embeddings, and layers that know whether later ones reuse their keys and values."""

    def __init__(self, modules: Modules) -> None:
        super().__init__(modules)
        table = modules.optional("model.embed_tokens_per_layer.weight")
        self.has_per_layer_inputs = table is not None
        if table is None:
            return
        self.embed_tokens_per_layer = table
        self.per_layer_model_projection = Linear(modules.weight("model.per_layer_model_projection.weight"))
        weight = modules.weight("model.per_layer_projection_norm.weight")
        self.per_layer_width, self.per_layer_projection_norm = weight.shape[0], PowerRmsNorm(weight)

    @classmethod
    def layer_tags(cls, shape: ModelShape) -> list[object]:
        """The last two layers that reuse the keys and values of a kind stand for themselves alone: the first of their
        gradients may be a view, to which the second is added in a new tensor, and that one is added to in place. So
        does the layer before one whose keys and values are kept: where that one is recomputed, its input lives as long.
        """
        own = {i for kind in shape.kinds for i in kind.layers if any("k_norm" in p.name for p in kind.parameters)}
        sliding = shape.traits.sliding_layers or (False,) * shape.num_layers
        tags: list[object] = [None] * shape.num_layers
        seen = {False: 0, True: 0}
        for i in range(shape.num_layers - 1, -1, -1):
            if i not in own:
                tags[i] = min(seen[sliding[i]], 2)
                seen[sliding[i]] += 1
        for is_sliding in (False, True):
            keeper = max((i for i in own if sliding[i] == is_sliding), default=0)
            if keeper:
                tags[keeper - 1] = "feeds", is_sliding, tags[keeper - 1]
        return tags

    def make_norm(self, name: str) -> Module:
        return PowerRmsNorm(self.modules.weight(f"{name}.weight"))

    def stores(self, index: int) -> bool:
        """kv_sharing_modes: the last layer of its kind that has keys and values of its own."""
        own = [
            i for i in self.modules.layers if self.modules.optional(f"{self.modules.prefix}{i}.self_attn.k_norm.weight")
        ]
        return index == max((i for i in own if self.is_sliding(i) == self.is_sliding(index)), default=-1)

    def embed_per_layer(self, input_ids: Tensor) -> Tensor:
        """The scaled second embedding."""
        table, scale = self.embed_tokens_per_layer, self.modules.buffer("per_layer_embed_scale")
        return mul(ops.embedding(table, input_ids), to(scale, table.dtype))

    def by_layer(self, t: Tensor) -> Tensor:
        """[..., layers * width] as [..., layers, width]."""
        return reshape(t, (*t.shape[:-1], t.shape[-1] // self.per_layer_width, self.per_layer_width))
