"""minimax: lightning attention, block by block, in turn with full attention (models/minimax of transformers 5.24)."""

from collections.abc import Sequence
from typing import Any

from foretune.errors import UnsupportedError
from foretune.memory import blocks
from foretune.memory.blocks import Module, call
from foretune.memory.decoder import Cache, Layer, Modules, RunOptions
from foretune.memory.families.llama import LlamaLayer, MistralDecoder
from foretune.memory.families.moe import MixtralDecoder
from foretune.memory.ops import add, like, matmul4, mul, narrow, reshape, scale, split_last, transpose, widened
from foretune.memory.pointwise import sigmoid
from foretune.memory.tape import Grads, Node, Tensor, attach, node_for
from foretune.models import DecoderTraits

__all__ = ["MiniMaxDecoder"]


def _cat_rows(parts: Sequence[Tensor]) -> Tensor:
    """cat(dim=-2): n*s, contiguous; gradients are views."""
    rows = [part.shape[-2] for part in parts]

    def formula(grads: Grads, node: Node) -> Grads:
        grad = grads[0]
        assert grad is not None
        return [grad.view_as((*grad.shape[:-2], count, grad.shape[-1]), grad.strides) for count in rows]

    shape = (*parts[0].shape[:-2], sum(rows), parts[0].shape[-1])
    return attach(node_for(formula, *parts), Tensor(shape, parts[0].dtype))


def _exp(t: Tensor) -> Tensor:
    return like(widened(t))


class MiniMaxLightningAttention:
    """MiniMaxLightningAttention without a cache."""

    def __init__(self, modules: Modules, name: str, make_norm: Module) -> None:
        t = modules.traits
        assert t.head_dim is not None
        assert t.num_heads is not None
        assert t.mixer_chunk is not None
        self.head_dim, self.num_attention_heads, self.block_size = t.head_dim, t.num_heads, t.mixer_chunk
        self.act_fn, self.norm = blocks.ACTIVATIONS[t.activation or "silu"], make_norm(f"{name}.norm")
        self.qkv_proj, self.out_proj, self.output_gate = (
            modules.linear(f"{name}.{n}") for n in ("qkv_proj", "out_proj", "output_gate")
        )
        self.slope_rate, self.query_decay, self.key_decay, self.diagonal_decay = (
            modules.buffer(f"{name}.{n}") for n in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
        )

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        if cache is not None:
            raise UnsupportedError(
                "MiniMax's own cache is not estimated yet.",
                hint="Set gradient_checkpointing: true, or trace it.",
            )
        batch_size, seq_len, _hidden_size = hidden_states.shape
        num_blocks = (seq_len + self.block_size - 1) // self.block_size
        qkv_states = call(self.act_fn, call(self.qkv_proj, hidden_states))
        qkv_states = reshape(qkv_states, (batch_size, seq_len, self.num_attention_heads, 3 * self.head_dim))
        query_states, key_states, value_states = split_last(qkv_states, [self.head_dim] * 3)
        query_states = transpose(query_states, 1, 2)
        key_states = transpose(key_states, 1, 2)
        value_states = transpose(value_states, 1, 2)
        attn_weights_inter = Tensor(
            (batch_size, self.num_attention_heads, self.head_dim, self.head_dim), value_states.dtype
        )
        attn_output: Any = []
        for i in range(num_blocks):
            current_block_size = min(self.block_size, seq_len - i * self.block_size)
            current_query_states = narrow(query_states, 2, current_block_size)
            current_key_states = narrow(key_states, 2, current_block_size)
            current_value_states = narrow(value_states, 2, current_block_size)
            current_query_decay = narrow(self.query_decay, 1, current_block_size)
            current_key_decay = narrow(self.key_decay, 1, current_block_size)
            current_diagonal_decay = narrow(narrow(self.diagonal_decay, 2, current_block_size), 3, current_block_size)
            block_decay = _exp(scale(scale(self.slope_rate)))
            attn_weights_intra = matmul4(current_query_states, transpose(current_key_states, 2, 3))
            attn_output_intra = matmul4(mul(attn_weights_intra, current_diagonal_decay), current_value_states)
            attn_output_inter = matmul4(mul(current_query_states, current_query_decay), attn_weights_inter)
            current_attn_output = add(attn_output_inter, attn_output_intra)
            attn_output.append(current_attn_output)
            next_attn_weights_inter = matmul4(
                transpose(mul(current_key_states, current_key_decay), 2, 3), current_value_states
            )
            attn_weights_inter = add(mul(attn_weights_inter, block_decay), next_attn_weights_inter)
        attn_output = _cat_rows(attn_output)
        attn_output = transpose(attn_output, 1, 2)
        attn_output = reshape(attn_output, (batch_size, seq_len, self.num_attention_heads * self.head_dim))
        attn_output = call(self.norm, attn_output)
        attn_output = mul(sigmoid(call(self.output_gate, hidden_states)), attn_output)
        attn_output = call(self.out_proj, attn_output)
        return attn_output, attn_weights_inter


class MiniMaxLayer(LlamaLayer):
    """MiniMaxDecoderLayer: what is normed is the residual, and both branches are scaled."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        position_embeddings: Any = None,
    ) -> Tensor:
        hidden_states = call(self.input_layernorm, hidden_states)
        residual = hidden_states
        hidden_states, _ = call(
            self.self_attn,
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
        )
        hidden_states = add(scale(residual), scale(hidden_states))
        hidden_states = call(self.post_attention_layernorm, hidden_states)
        residual = hidden_states
        hidden_states = call(self.mlp, hidden_states)
        hidden_states = add(scale(residual), scale(hidden_states))
        return hidden_states  # noqa: RET504


class MiniMaxDecoder(MixtralDecoder):
    """MiniMaxModel."""

    layer_class = MiniMaxLayer
    keyword_order = ("attention_mask", "position_embeddings", "position_ids", "cache")
    mask_kwargs = True

    @classmethod
    def layer_buffers(
        cls, traits: DecoderTraits, parameters: frozenset[str], dtype: str
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """Decays of lightning attention."""
        if "self_attn.qkv_proj.weight" not in parameters:
            return []
        heads, block = traits.num_heads, traits.mixer_chunk
        assert heads is not None
        assert block is not None
        return [
            ("self_attn.slope_rate", (heads, 1, 1), dtype),
            ("self_attn.query_decay", (heads, block, 1), dtype),
            ("self_attn.key_decay", (heads, block, 1), dtype),
            ("self_attn.diagonal_decay", (1, heads, block, block), dtype),
        ]

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        if not self.modules.has(f"{name}.self_attn.qkv_proj"):
            return super().make_layer(index)
        layer = MiniMaxLayer(
            self.make_norm(f"{name}.input_layernorm"),
            MiniMaxLightningAttention(self.modules, f"{name}.self_attn", self.make_norm),
            self.make_norm(f"{name}.post_attention_layernorm"),
            self.make_mlp(f"{name}.mlp"),
        )
        layer.mask_kind = "linear"
        return layer

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        masks = {"full": MistralDecoder.masks(self, run, inputs_embeds)["full"], "linear": None}
        run.ask_whether_padded()
        return masks
