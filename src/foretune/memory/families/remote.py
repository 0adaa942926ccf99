"""Qwen (the first generation), Baichuan 2 and ChatGLM 3, whose code is published with the checkpoints.

Each class follows that code (modeling_qwen.py, modeling_baichuan.py, modeling_chatglm.py) in its training path with
torch's attention; local names are theirs. No trace can be held against them: Transformers has no class for these.
"""

from typing import Any

from foretune.memory import blocks, ops
from foretune.memory.blocks import GatedMlp, Module, call
from foretune.memory.decoder import Decoder, Layer, Modules, RunOptions
from foretune.memory.families.llama import LlamaLayer
from foretune.memory.ops import add, cat_last, clone, contiguous, mul, narrow, reshape, scale, silu, to, transpose, view
from foretune.memory.scans import split
from foretune.memory.strided import permute
from foretune.memory.tape import Grads, Node, Tensor, attach, node_for

__all__ = ["BaichuanDecoder", "ChatGlmDecoder", "QwenDecoder"]


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    x1 = narrow(x, -1, half)
    x2 = narrow(x, -1, x.shape[-1] - half)
    return cat_last([scale(x2), x1])


# ------------------------------------------------------------------ Qwen
class QwenAttention:
    """QWenAttention: one projection, split; whole heads are rotated in fp32."""

    def __init__(self, modules: Modules, name: str) -> None:
        t = modules.traits
        assert t.num_heads is not None
        assert t.head_dim is not None
        self.modules, self.num_heads, self.head_dim = modules, t.num_heads, t.head_dim
        self.c_attn, self.c_proj = modules.linear(f"{name}.c_attn"), modules.linear(f"{name}.c_proj")

    def __call__(
        self, hidden_states: Tensor, rotary_pos_emb: Any, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        width = self.num_heads * self.head_dim
        mixed_x_layer = call(self.c_attn, hidden_states)
        query, key, value = ops.split_last(mixed_x_layer, [width] * 3)
        shape = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
        query, key, value = view(query, *shape), view(key, *shape), view(value, *shape)
        cos, sin = rotary_pos_emb
        query, key = self._rotate(query, cos, sin), self._rotate(key, cos, sin)
        q, k, v = transpose(query, 1, 2), transpose(key, 1, 2), transpose(value, 1, 2)
        attn_output = blocks.scaled_dot_product_attention(self.modules.kernels, q, k, v, attention_mask)
        context_layer = contiguous(transpose(attn_output, 1, 2))
        context_layer = view(context_layer, *hidden_states.shape[:-1], width)
        output: Tensor = call(self.c_proj, context_layer)
        return output

    @staticmethod
    def _rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = ops.unsqueeze(cos, 2), ops.unsqueeze(sin, 2)
        t_, t_pass_ = narrow(t, -1, cos.shape[-1]), narrow(t, -1, t.shape[-1] - cos.shape[-1])
        t_ = to(t_, "f32")
        t_pass_ = to(t_pass_, "f32")
        t_ = add(mul(t_, cos), mul(_rotate_half(t_), sin))
        return to(cat_last([t_, t_pass_]), t.dtype)


class QwenMlp:
    """QWenMLP: c_proj(w1(x) * silu(w2(x)))."""

    def __init__(self, w1: Module, w2: Module, c_proj: Module) -> None:
        self.w1, self.w2, self.c_proj = w1, w2, c_proj

    def __call__(self, hidden_states: Tensor) -> Any:
        a1 = call(self.w1, hidden_states)
        a2 = call(self.w2, hidden_states)
        intermediate_parallel = mul(a1, silu(a2))
        return call(self.c_proj, intermediate_parallel)


class QwenBlock(Layer):
    """QWenBlock."""

    def __init__(self, ln_1: Module, attn: Module, ln_2: Module, mlp: Module) -> None:
        self.ln_1, self.attn, self.ln_2, self.mlp = ln_1, attn, ln_2, mlp

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **kwargs: Any) -> Tensor:
        layernorm_output = call(self.ln_1, hidden_states)
        attn_output = call(self.attn, layernorm_output, position_embeddings)
        residual = hidden_states
        layernorm_input = add(attn_output, residual)
        layernorm_output = call(self.ln_2, layernorm_input)
        residual = layernorm_input
        mlp_output = call(self.mlp, layernorm_output)
        hidden_states = add(residual, mlp_output)
        return hidden_states  # noqa: RET504


class QwenDecoder(Decoder):
    """QWenModel. Its logn scaling acts in inference alone."""

    embedding_name = "transformer.wte.weight"
    final_norm_name = "transformer.ln_f"

    def make_layer(self, index: int) -> Layer:
        name, linear = f"{self.modules.prefix}{index}", self.modules.linear
        mlp = QwenMlp(*(linear(f"{name}.mlp.{n}") for n in ("w1", "w2", "c_proj")))
        attention = QwenAttention(self.modules, f"{name}.attn")
        return QwenBlock(self.make_norm(f"{name}.ln_1"), attention, self.make_norm(f"{name}.ln_2"), mlp)

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        return {"full": blocks.rotary_tables("f32", position_ids, self.traits.rotary_dim or 0)}


# ------------------------------------------------------------------ Baichuan
class BaichuanAttention:
    """Attention: W_pack unflattened into three; rotated in fp32, or alibi in the mask."""

    def __init__(self, modules: Modules, name: str) -> None:
        t = modules.traits
        assert t.num_heads is not None
        assert t.head_dim is not None
        self.modules, self.num_heads, self.head_dim = modules, t.num_heads, t.head_dim
        self.kernels = modules.kernels._replace(is_package=False)  # its class knows torch's kernels alone
        self.w_pack, self.o_proj = modules.linear(f"{name}.W_pack"), modules.linear(f"{name}.o_proj")

    def __call__(
        self, hidden_states: Tensor, attention_mask: Tensor | None, position_embeddings: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        bsz, q_len, _ = hidden_states.shape
        width = self.num_heads * self.head_dim
        proj = call(self.w_pack, hidden_states)
        proj = permute(view(proj, bsz, q_len, 3, width), 2, 0, 1, 3)
        parts = split(proj, (1, 1, 1), 0)
        shape = (bsz, q_len, self.num_heads, self.head_dim)
        query_states, key_states, value_states = (transpose(view(part, *shape), 1, 2) for part in parts)
        del parts
        if position_embeddings is not None:
            cos, sin = position_embeddings
            query_states = self._rotate(query_states, cos, sin)
            key_states = self._rotate(key_states, cos, sin)
        attn_output = blocks.scaled_dot_product_attention(
            self.kernels, query_states, key_states, value_states, attention_mask
        )
        attn_output = transpose(attn_output, 1, 2)
        attn_output = reshape(attn_output, (bsz, q_len, width))
        attn_output = call(self.o_proj, attn_output)
        return attn_output, None

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = ops.unsqueeze(cos, 1), ops.unsqueeze(sin, 1)
        return to(add(mul(to(x, "f32"), cos), mul(_rotate_half(to(x, "f32")), sin)), x.dtype)


class BaichuanDecoder(Decoder):
    """BaichuanModel: a mask in the stream's format for every row, or with alibi one for every head."""

    def make_layer(self, index: int) -> Layer:
        name, linear = f"{self.modules.prefix}{index}", self.modules.linear
        gate, up, down = (linear(f"{name}.mlp.{n}") for n in ("gate_proj", "up_proj", "down_proj"))
        return LlamaLayer(
            self.make_norm(f"{name}.input_layernorm"),
            BaichuanAttention(self.modules, f"{name}.self_attn"),
            self.make_norm(f"{name}.post_attention_layernorm"),
            GatedMlp(gate, up, down, silu),
        )

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        width = self.traits.rotary_dim
        return {"full": blocks.rotary_tables("f32", position_ids, width) if width else None}

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        s, dtype = run.sequence_length, inputs_embeds.dtype
        size = (run.micro_batch_size, 1, s, s) if self.traits.rotary_dim else (1, self.traits.num_heads or 1, s, s)
        return {"full": Tensor(size, dtype)}

    def head_weight(self, weight: Tensor) -> Tensor:
        """Baichuan 2's NormHead: the rows are brought to length 1 in every forward (normalize)."""
        return _normalized(weight)


def _normalized(weight: Tensor) -> Tensor:
    """weight / weight.norm(dim=1).clamp_min(eps).expand_as(weight): n*s, and two numbers a row."""
    rows = (weight.shape[0], 1)

    def formula(grads: Grads, node: Node, *saved: Tensor) -> Grads:
        grad = grads[0]
        assert grad is not None
        quotient, product_ = ops.like(grad), ops.like(grad)
        out = ops.like(product_)
        del quotient, product_
        return [out]

    node = node_for(formula, weight)
    length = Tensor(rows, weight.dtype)

    clamped = Tensor(rows, weight.dtype)
    if node:
        node.save(weight, clamped, length)
    return attach(node, Tensor(weight.shape, weight.dtype))


# ------------------------------------------------------------------ ChatGLM
class ChatGlmAttention:
    """SelfAttention with CoreAttention: grouped queries, keys and values repeated for every head, pairs of half a head
    rotated; [S, B, H] throughout."""

    def __init__(self, modules: Modules, name: str) -> None:
        t = modules.traits
        assert t.num_heads is not None
        assert t.num_kv_heads is not None
        assert t.head_dim is not None
        assert t.rotary_dim is not None
        self.modules, self.heads, self.groups, self.width = modules, t.num_heads, t.num_kv_heads, t.head_dim
        self.rot_dim = t.rotary_dim
        self.kernels = modules.kernels._replace(is_package=False)
        self.query_key_value, self.dense = modules.linear(f"{name}.query_key_value"), modules.linear(f"{name}.dense")

    def __call__(self, hidden_states: Tensor, rotary_pos_emb: Tensor) -> Tensor:
        s, b, _ = hidden_states.shape
        keys = self.groups * self.width
        mixed_x_layer = call(self.query_key_value, hidden_states)
        query_layer, key_layer, value_layer = ops.split_last(mixed_x_layer, [self.heads * self.width, keys, keys])
        query_layer = view(query_layer, s, b, self.heads, self.width)
        key_layer = view(key_layer, s, b, self.groups, self.width)
        value_layer = view(value_layer, s, b, self.groups, self.width)
        query_layer = self._rotate(query_layer, rotary_pos_emb)
        key_layer = self._rotate(key_layer, rotary_pos_emb)
        key_layer, value_layer = self._repeated(key_layer), self._repeated(value_layer)
        q, k, v = (permute(x, 1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
        context_layer = blocks.scaled_dot_product_attention(self.kernels, q, k, v, None)
        context_layer = permute(context_layer, 2, 0, 1, 3)
        context_layer = reshape(context_layer, (s, b, self.heads * self.width))
        output: Tensor = call(self.dense, context_layer)
        return output

    def _repeated(self, x: Tensor) -> Tensor:
        s, b, groups, width = x.shape
        each = self.heads // groups
        wide = clone(ops.expand(ops.unsqueeze(x, 3), (s, b, groups, each, width)))
        return view(wide, s, b, self.heads, width)

    def _rotate(self, x: Tensor, rope_cache: Tensor) -> Tensor:
        """apply_rotary_pos_emb: real and imaginary parts of pairs, stacked again."""
        rot, x_pass = narrow(x, -1, self.rot_dim), narrow(x, -1, x.shape[-1] - self.rot_dim)
        s, b, heads, _ = rot.shape
        xshaped = reshape(rot, (s, b, heads, self.rot_dim // 2, 2))
        even, odd = self._pair(xshaped), self._pair(xshaped)
        table = rope_cache
        first = add(mul(even, table), mul(odd, table))
        second = add(mul(odd, table), mul(even, table))
        x_out2 = cat_last([first, second])
        return cat_last([x_out2, x_pass])

    @staticmethod
    def _pair(x: Tensor) -> Tensor:
        """x[..., i]: a view; backward fills a tensor of x's shape."""
        full, dtype = x.shape, x.dtype
        node = node_for(lambda grads, node: (Tensor(full, dtype),), x)
        return attach(node, x.view_as(x.shape[:-1], x.strides[:-1]))


class ChatGlmMlp:
    """MLP: gate and up in one, chunked."""

    def __init__(self, up: Module, down: Module) -> None:
        self.dense_h_to_4h, self.dense_4h_to_h = up, down

    def __call__(self, hidden_states: Tensor) -> Any:
        intermediate_parallel = call(self.dense_h_to_4h, hidden_states)
        intermediate_parallel = call(self._swiglu, intermediate_parallel)
        return call(self.dense_4h_to_h, intermediate_parallel)

    @staticmethod
    def _swiglu(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        first, second = ops.split_last(x, [half, half])
        return mul(silu(first), second)


class ChatGlmBlock(Layer):
    """GLMBlock."""

    def __init__(self, first: Module, attention: Module, second: Module, mlp: Module) -> None:
        self.input_layernorm, self.self_attention = first, attention
        self.post_attention_layernorm, self.mlp = second, mlp

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **kwargs: Any) -> Tensor:
        layernorm_output = call(self.input_layernorm, hidden_states)
        attention_output = call(self.self_attention, layernorm_output, position_embeddings)
        layernorm_input = add(hidden_states, attention_output)
        layernorm_output = call(self.post_attention_layernorm, layernorm_input)
        mlp_output = call(self.mlp, layernorm_output)
        output = add(layernorm_input, mlp_output)
        return output  # noqa: RET504


class ChatGlmDecoder(Decoder):
    """ChatGLMModel: the stream is [S, B, H], which a batch of two and more copies."""

    embedding_name = "transformer.embedding.word_embeddings.weight"
    final_norm_name = "transformer.encoder.final_layernorm"

    def make_layer(self, index: int) -> Layer:
        name, linear = f"{self.modules.prefix}{index}", self.modules.linear
        return ChatGlmBlock(
            self.make_norm(f"{name}.input_layernorm"),
            ChatGlmAttention(self.modules, f"{name}.self_attention"),
            self.make_norm(f"{name}.post_attention_layernorm"),
            ChatGlmMlp(linear(f"{name}.mlp.dense_h_to_4h"), linear(f"{name}.mlp.dense_4h_to_h")),
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        return contiguous(transpose(super().embed(input_ids), 0, 1))

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        size = (hidden_states.shape[0], 1, 1, (self.traits.rotary_dim or 0) // 2)
        return {"full": Tensor(size, hidden_states.dtype)}

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        return {"full": None}

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        hidden_states, cache = super().__call__(*args, **kwargs)
        return contiguous(transpose(hidden_states, 0, 1)), cache
