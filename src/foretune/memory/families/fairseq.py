"""OPT and XGLM (models/opt, xglm of transformers 5.24)."""

from typing import Any

from foretune.memory import blocks, ops
from foretune.memory.blocks import Linear, Module, call
from foretune.memory.decoder import Cache, Layer, Modules, RunOptions
from foretune.memory.families.scoped import ScopedDecoder
from foretune.memory.layout import numel
from foretune.memory.ops import add, add_scalar, contiguous, dropout, like, mul, reshape, scale, to, transpose, view
from foretune.memory.rare_ops import maximum
from foretune.memory.tape import Tensor, checkpoint
from foretune.models import DecoderTraits

__all__ = ["OptDecoder", "XglmDecoder"]


# ------------------------------------------------------------------ OPT
class OptAttention:
    """OPTAttention: queries are scaled before they are split into heads."""

    def __init__(self, modules: Modules, name: str) -> None:
        t = modules.traits
        assert t.head_dim is not None
        assert t.num_heads is not None
        self.modules, self.num_heads, self.head_dim = modules, t.num_heads, t.head_dim
        self.probability = t.attention_dropout
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (
            modules.linear(f"{name}.{n}") for n in ("k_proj", "v_proj", "q_proj", "out_proj")
        )

    def __call__(
        self, hidden_states: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        bsz, tgt_len = hidden_states.shape[:2]
        query_states = scale(call(self.q_proj, hidden_states))
        query_states = transpose(view(query_states, bsz, -1, self.num_heads, self.head_dim), 1, 2)
        key_states = call(self.k_proj, hidden_states)
        value_states = call(self.v_proj, hidden_states)
        key_states = transpose(view(key_states, bsz, -1, self.num_heads, self.head_dim), 1, 2)
        value_states = transpose(view(value_states, bsz, -1, self.num_heads, self.head_dim), 1, 2)
        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states)
        attn_output, attn_weights = self._attend(query_states, key_states, value_states, attention_mask)
        attn_output = contiguous(reshape(attn_output, (bsz, tgt_len, numel(attn_output.shape[2:]))))
        attn_output = call(self.out_proj, attn_output)
        return attn_output, attn_weights

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        if self.modules.attention == "eager":
            return blocks.eager_attention(1, query, key, value, mask, probability=self.probability)
        return blocks.sdpa_attention(self.modules.kernels, 1, query, key, value, mask, probability=self.probability)


class OptLayer(Layer):
    """OPTDecoderLayer: norms before both halves, or after them; the second half on folded rows."""

    def __init__(self, norms: list[Module], self_attn: Module, linears: list[Module], act: Module) -> None:
        self.self_attn_layer_norm, self.final_layer_norm = norms
        self.self_attn, self.activation_fn = self_attn, act
        self.fc1, self.fc2 = linears
        self.norms_first, self.dropout = True, 0.0

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, cache: Any = None, position_ids: Any = None
    ) -> Tensor:
        residual = hidden_states
        if self.norms_first:
            hidden_states = call(self.self_attn_layer_norm, hidden_states)
        hidden_states, _ = call(
            self.self_attn,
            hidden_states=hidden_states,
            cache=cache,
            position_ids=position_ids,
            attention_mask=attention_mask,
        )
        hidden_states = dropout(hidden_states, self.dropout)
        hidden_states = add(residual, hidden_states)
        if not self.norms_first:
            hidden_states = call(self.self_attn_layer_norm, hidden_states)
        hidden_states_shape = hidden_states.shape
        hidden_states = reshape(hidden_states, (numel(hidden_states_shape[:-1]), hidden_states_shape[-1]))
        residual = hidden_states
        if self.norms_first:
            hidden_states = call(self.final_layer_norm, hidden_states)
        hidden_states = call(self.fc1, hidden_states)
        hidden_states = call(self.activation_fn, hidden_states)
        hidden_states = call(self.fc2, hidden_states)
        hidden_states = dropout(hidden_states, self.dropout)
        hidden_states = view(add(residual, hidden_states), *hidden_states_shape)
        if not self.norms_first:
            hidden_states = call(self.final_layer_norm, hidden_states)
        return hidden_states


class OptDecoder(ScopedDecoder):
    """OPTDecoder: learned positions, counted from a mask of ones; the embedding may be narrower than the model."""

    embedding_name = "model.decoder.embed_tokens.weight"
    final_norm_name = "model.decoder.final_layer_norm"
    keyword_order = ("attention_mask", "position_ids", "cache")
    num_last_alone = 2

    def __init__(self, modules: Modules) -> None:
        super().__init__(modules)
        self.positions = modules.weight("model.decoder.embed_positions.weight")
        self.last = [self.norm] if self.traits.has_final_norm else []
        projections = [modules.optional(f"model.decoder.project_{side}.weight") for side in ("in", "out")]
        self.project_in, project_out = (None if weight is None else Linear(weight) for weight in projections)
        if project_out is not None:
            self.last.append(project_out)

    def make_norm(self, name: str) -> Module:
        has_weight = self.modules.optional(f"{name}.weight") is not None
        return super().make_norm(name) if has_weight else BareNorm()

    def make_layer(self, index: int) -> Layer:
        name, linear = f"{self.modules.prefix}{index}", self.modules.linear
        layer = OptLayer(
            [self.make_norm(f"{name}.{n}") for n in ("self_attn_layer_norm", "final_layer_norm")],
            OptAttention(self.modules, f"{name}.self_attn"),
            [linear(f"{name}.fc1"), linear(f"{name}.fc2")],
            blocks.ACTIVATIONS[self.traits.activation or "relu"],
        )
        layer.norms_first, layer.dropout = not self.traits.norms_last, self.traits.residual_dropout
        return layer

    def prologue(self, input_ids: Tensor, run: RunOptions, cache: Cache | None) -> tuple[Tensor, dict[str, Any]]:
        inputs_embeds = self.embedded(input_ids, run)
        position_attention_mask = run.padding
        if position_attention_mask is None:
            position_attention_mask = Tensor((run.micro_batch_size, run.sequence_length), "f32")
        position_ids = like(position_attention_mask)
        position_ids = to(add_scalar(mul(position_ids, position_attention_mask)), "i64")
        causal_mask = run.causal_mask(inputs_embeds, None, has_positions=False)
        pos_embeds = call(self._embed_positions, position_ids)
        if self.project_in is not None:
            inputs_embeds = call(self.project_in, inputs_embeds)
        hidden_states = add(inputs_embeds, pos_embeds)
        return hidden_states, {
            "inputs_embeds": inputs_embeds,
            "position_ids": position_ids,
            "position_attention_mask": position_attention_mask,
            "attention_mask": causal_mask,
            "pos_embeds": pos_embeds,
        }

    def _embed_positions(self, position_ids: Tensor) -> Tensor:
        return ops.embedding(self.positions, add_scalar(position_ids))


class BareNorm:
    """nn.LayerNorm without parameters."""

    def __call__(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, None, None)


# ------------------------------------------------------------------ XGLM
class XglmAttention(OptAttention):
    """XGLMAttention: heads and rows as one batch, scores written out."""

    def __call__(
        self, hidden_states: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        bsz, tgt_len = hidden_states.shape[:2]
        query_states = scale(call(self.q_proj, hidden_states))
        key_states = call(self.k_proj, hidden_states)
        value_states = call(self.v_proj, hidden_states)
        key_states = transpose(view(key_states, bsz, tgt_len, -1, self.head_dim), 1, 2)
        value_states = transpose(view(value_states, bsz, tgt_len, -1, self.head_dim), 1, 2)
        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states)
        proj_shape = (bsz * self.num_heads, tgt_len, self.head_dim)
        query_states = transpose(view(query_states, bsz, tgt_len, self.num_heads, self.head_dim), 1, 2)
        query_states = reshape(query_states, proj_shape)
        key_states = reshape(key_states, proj_shape)
        value_states = reshape(value_states, proj_shape)
        attn_weights = ops.bmm(query_states, transpose(key_states, 1, 2))
        four = (bsz, self.num_heads, tgt_len, tgt_len)
        three = (bsz * self.num_heads, tgt_len, tgt_len)
        if attention_mask is not None:
            attn_weights = add(view(attn_weights, *four), attention_mask)
            attn_weights = maximum(attn_weights, Tensor((), "f32"))
            attn_weights = view(attn_weights, *three)
        if attn_weights.dtype == "f16":
            attn_weights = to(blocks.softmax_f32(attn_weights), "f16")
        else:
            attn_weights = ops.softmax(attn_weights)
        attn_weights_reshaped = view(attn_weights, *four)
        attn_weights = view(attn_weights_reshaped, *three)
        attn_probs = dropout(attn_weights, self.probability)
        attn_output = ops.bmm(attn_probs, value_states)
        attn_output = view(attn_output, bsz, self.num_heads, tgt_len, self.head_dim)
        attn_output = transpose(attn_output, 1, 2)
        attn_output = reshape(attn_output, (bsz, tgt_len, self.num_heads * self.head_dim))
        attn_output = call(self.out_proj, attn_output)
        return attn_output, attn_weights_reshaped


class XglmLayer(OptLayer):
    """XGLMDecoderLayer; the mask is passed by position, so it is one of the inputs that checkpointing keeps."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, cache: Any = None, position_ids: Any = None
    ) -> Tensor:
        residual = hidden_states
        hidden_states = call(self.self_attn_layer_norm, hidden_states)
        hidden_states, _ = call(self.self_attn, hidden_states, cache=cache, attention_mask=attention_mask)
        hidden_states = dropout(hidden_states, self.dropout)
        hidden_states = add(residual, hidden_states)
        residual = hidden_states
        hidden_states = call(self.final_layer_norm, hidden_states)
        hidden_states = call(self.activation_fn, call(self.fc1, hidden_states))
        hidden_states = dropout(hidden_states, self.activation_dropout)
        hidden_states = call(self.fc2, hidden_states)
        hidden_states = dropout(hidden_states, self.dropout)
        hidden_states = add(residual, hidden_states)
        return hidden_states  # noqa: RET504

    activation_dropout = 0.0

    def checkpointed(self, hidden_states: Tensor, attention_mask: Any = None, cache: Any = None, **kwargs: Any) -> Any:
        def run(hidden_states: Tensor, attention_mask: Any) -> Tensor:
            return self.forward(hidden_states, attention_mask, cache, **kwargs)

        return checkpoint(run, hidden_states, attention_mask)


class XglmDecoder(ScopedDecoder):
    """XGLMModel: scaled embeddings, sines from a buffer; its argument is rebound to the mask."""

    final_norm_name = "model.layer_norm"
    keyword_order = ("attention_mask", "cache")

    def __init__(self, modules: Modules) -> None:
        super().__init__(modules)
        self.sines = modules.buffer("embed_positions.weights")

    @classmethod
    def buffers(cls, traits: DecoderTraits, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        assert traits.table_positions is not None
        return [("embed_positions.weights", (traits.table_positions + 2, traits.hidden_size), dtype)]

    def make_layer(self, index: int) -> Layer:
        name, linear = f"{self.modules.prefix}{index}", self.modules.linear
        layer = XglmLayer(
            [self.make_norm(f"{name}.{n}") for n in ("self_attn_layer_norm", "final_layer_norm")],
            XglmAttention(self.modules, f"{name}.self_attn"),
            [linear(f"{name}.fc1"), linear(f"{name}.fc2")],
            blocks.ACTIVATIONS[self.traits.activation or "gelu"],
        )
        layer.dropout, layer.activation_dropout = self.traits.residual_dropout, self.traits.activation_dropout
        return layer

    def embed(self, input_ids: Tensor) -> Tensor:
        return scale(ops.embedding(self.embedding, input_ids))

    def prologue(self, input_ids: Tensor, run: RunOptions, cache: Cache | None) -> tuple[Tensor, dict[str, Any]]:
        inputs_embeds = self.embedded(input_ids, run)
        attention_mask = run.causal_mask(inputs_embeds, None, has_positions=False)
        position_ids = ops.unsqueeze(Tensor((run.sequence_length,), "i64"), 0)
        hidden_states = add(inputs_embeds, call(self._embed_positions, position_ids))
        hidden_states = dropout(hidden_states, self.traits.embedding_dropout)
        return hidden_states, {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }

    def _embed_positions(self, position_ids: Tensor) -> Tensor:
        position_ids = add_scalar(position_ids)
        return Tensor((1, position_ids.shape[1], self.traits.hidden_size), self.sines.dtype)
