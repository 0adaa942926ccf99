"""litgpt's GPT class on the tape: one decoder for all the models that it has.

Follows litgpt's model.py and lora.py, of 0.2.0, 0.4.13 and 0.5.0 where they differ (`code`); local names are theirs.
Under a quantized base all linear layers are bitsandbytes' (lightning/fabric/plugins/precision/bitsandbytes.py), the
head too.
"""

from typing import Any

from foretune.memory import blocks, ops
from foretune.memory.adapters import Adapter
from foretune.memory.blocks import LayerNorm, Module, call
from foretune.memory.decoder import Decoder, Layer, Modules, RunOptions
from foretune.memory.families.litgpt_ops import convolve, index_copy, index_copy_in_place
from foretune.memory.layout import numel
from foretune.memory.ops import (
    add,
    add_scalar,
    cat_last,
    dropout,
    fold_mm,
    gelu,
    linear,
    matmul4,
    mul,
    narrow,
    reshape,
    rsqrt,
    scale,
    silu,
    tanh,
    to,
    transpose,
    transposed,
    unsqueeze,
    view,
)
from foretune.memory.scans import cat, split
from foretune.memory.strided import permute
from foretune.memory.tape import Tensor, current
from foretune.models import DecoderTraits

__all__ = ["LitGptAdapter", "LitGptDecoder", "LitGptLora", "LitGptQkvLora"]


_PLAIN_MLP = ("falcon", "gpt_neox", "phi")
"""Model types with GptNeoxMLP, which has no gate."""


# ------------------------------------------------------------------ adapters
class LitGptLora:
    """LoRALinear: products with the transposed matrices, in the format of the weights."""

    def __init__(self, linear: Module, a: Tensor, b: Tensor, probability: float) -> None:
        self.linear, self.lora_a, self.lora_b, self.probability = linear, a, b, probability

    def __call__(self, x: Tensor) -> Tensor:
        pretrained = call(self.linear, x)
        lora = scale(self._product(self._product(call(dropout, x, self.probability), self.lora_a), self.lora_b))
        return add(pretrained, lora)

    @staticmethod
    def _product(x: Tensor, matrix: Tensor) -> Tensor:
        return fold_mm(x, transposed(matrix), x.shape[:-1])


class LitGptQkvLora:
    """LoRAQKVLinear: one A for the enabled parts, a convolution for B, and zeros where a part is not enabled."""

    def __init__(
        self,
        linear: Module,
        a: Tensor,
        b: Tensor,
        probability: float,
        *,
        parts: tuple[int, ...],
        out_features: int,
        is_grouped: bool,
        code: str,
    ) -> None:
        self.linear, self.lora_a, self.lora_b, self.probability = linear, a, b, probability
        self.parts, self.out_features, self.is_grouped = parts, out_features, is_grouped
        self.makes_index = code == "litgpt 0.2"
        self.index: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        pretrained = call(self.linear, x)
        after_a = linear(call(dropout, x, self.probability), self.lora_a)
        after_b = transpose(self._conv1d(transpose(after_a, -2, -1), unsqueeze(self.lora_b, 2)), -2, -1)
        lora = scale(call(self._zero_pad, after_b))
        return add(pretrained, lora)

    def _conv1d(self, input: Tensor, weight: Tensor) -> Tensor:
        if not self.is_grouped:
            return convolve(input, weight)
        rank = weight.shape[1]
        input_splitted = split(input, [rank] * len(self.parts), 1)
        weight_splitted = split(weight, self.parts, 0)
        return cat([convolve(a, b) for a, b in zip(input_splitted, weight_splitted, strict=True)], 1)

    def _zero_pad(self, x: Tensor) -> Tensor:
        if len(self.parts) == 3:
            return x
        return self._pad_copied(x) if self.makes_index else self._pad_in_place(x)

    def _pad_copied(self, x: Tensor) -> Tensor:
        x = transpose(x, 0, 1)
        rows = x.shape[:-1]
        result = Tensor((*rows, self.out_features), x.dtype)
        result = view(result, -1, self.out_features)
        index = Tensor((sum(self.parts),), "i64")
        result = index_copy(result, index, reshape(x, (numel(rows), sum(self.parts))))
        return transpose(view(result, *rows, self.out_features), 0, 1)

    def _pad_in_place(self, x: Tensor) -> Tensor:
        result = Tensor((*x.shape[:-1], self.out_features), x.dtype)
        if self.index is None:
            self.index = Tensor((sum(self.parts),), "i64")
        return index_copy_in_place(result, self.index, x)


class LitGptAdapter(Adapter):
    """The matrices of one linear layer: A has `rank` rows for each enabled part, B the rows of all of them."""

    def __init__(self, in_features: int, parts: tuple[int, ...], rank: int, dtype: str, *, is_fused: bool) -> None:
        self.parts, self.is_fused, self.magnitude = parts, is_fused, None
        self.lora_a = Tensor((rank * len(parts), in_features), dtype, needs_grad=True)
        self.lora_b = Tensor((sum(parts), rank), dtype, needs_grad=True)

    def around(self, linear: Module, probability: float, traits: DecoderTraits, code: str) -> Module:
        """Put the adapter around its linear layer."""
        if not self.is_fused:
            return LitGptLora(linear, self.lora_a, self.lora_b, probability)
        assert traits.num_heads is not None
        assert traits.num_kv_heads is not None
        assert traits.head_dim is not None
        return LitGptQkvLora(
            linear,
            self.lora_a,
            self.lora_b,
            probability,
            parts=self.parts,
            out_features=(traits.num_heads + 2 * traits.num_kv_heads) * traits.head_dim,
            is_grouped=traits.num_heads != traits.num_kv_heads,
            code=code,
        )


# ------------------------------------------------------------------ modules
class LitGptRmsNorm:
    """RMSNorm; 0.2 casts before it scales, later releases scale in fp32; Gemma's scale is 1 + weight."""

    def __init__(self, weight: Tensor, *, add_unit_offset: bool, code: str) -> None:
        self.weight, self.add_unit_offset, self.casts_first = weight, add_unit_offset, code == "litgpt 0.2"

    def __call__(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = to(x, "f32")
        norm_x = ops.mean_last(mul(x, x))
        x_normed = mul(x, rsqrt(add_scalar(norm_x)))
        if self.casts_first:
            x_normed = to(x_normed, dtype)
            if self.add_unit_offset:
                return mul(x_normed, add_scalar(self.weight))
            return mul(x_normed, self.weight)
        weight = add_scalar(self.weight) if self.add_unit_offset else self.weight
        return to(mul(x_normed, to(weight, "f32")), dtype)


def _apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Tables in fp32: they are made anew for the longest sequence, outside the format of the weights."""
    half = x.shape[-1] // 2
    x1 = narrow(x, -1, half)
    x2 = narrow(x, -1, x.shape[-1] - half)
    rotated = cat_last([scale(x2), x1])
    roped = add(mul(x, cos), mul(rotated, sin))
    return to(roped, x.dtype)


class LitGptAttention:
    """CausalSelfAttention: a fused projection by groups, keys and values repeated, part of a head rotated."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        t = modules.traits
        assert t.num_heads is not None
        assert t.num_kv_heads is not None
        assert t.head_dim is not None
        self.kernels, self.head_size, self.n_query_groups = modules.kernels, t.head_dim, t.num_kv_heads
        self.q_per_kv, self.rope_n_elem = t.num_heads // t.num_kv_heads, t.rotary_dim or 0
        self.softcap = t.attention_softcap
        self.slides = bool(self.softcap) and t.sliding_window is not None and index % 2 == 0
        self.attn, self.proj = modules.linear(f"{name}.attn"), modules.linear(f"{name}.proj")

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        b, t, _ = x.shape
        qkv = call(self.attn, x)
        total_qkv = self.q_per_kv + 2
        qkv = view(qkv, b, t, self.n_query_groups, total_qkv, self.head_size)
        qkv = permute(qkv, 0, 2, 3, 1, 4)
        q, k, v = split(qkv, (self.q_per_kv, 1, 1), 2)
        if self.q_per_kv != 1:
            k = ops.expand(k, (b, self.n_query_groups, self.q_per_kv, t, self.head_size))
            v = ops.expand(v, (b, self.n_query_groups, self.q_per_kv, t, self.head_size))
        heads = (b, self.n_query_groups * self.q_per_kv, t, self.head_size)
        q = reshape(q, heads)
        k = reshape(k, heads)
        v = reshape(v, heads)
        rest = self.head_size - self.rope_n_elem
        q_roped = _apply_rope(narrow(q, -1, self.rope_n_elem), cos, sin)
        k_roped = _apply_rope(narrow(k, -1, self.rope_n_elem), cos, sin)
        q = cat_last([q_roped, narrow(q, -1, rest)])
        k = cat_last([k_roped, narrow(k, -1, rest)])
        if self.slides:
            mask, _sliding_window_bias = self._window(q)
        y = call(self._attend, q, k, v, mask)
        y = reshape(y, (b, t, heads[1] * self.head_size))
        output: Tensor = call(self.proj, y)
        return output

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if self.softcap is None:
            y = blocks.scaled_dot_product_attention(self.kernels, q, k, v, mask)
            return transpose(y, 1, 2)
        scores = scale(matmul4(q, transpose(k, -2, -1)))
        scores = scale(tanh(scale(scores)))
        if mask is None:
            mask = self._triangle(q)
        scores = add(scores, mask)
        scores = to(blocks.softmax_f32(scores), q.dtype)
        y = matmul4(scores, v)
        return transpose(y, 1, 2)

    @staticmethod
    def _triangle(q: Tensor) -> Tensor:
        """ones(T, T).triu(1), filled where it is 1."""
        ones = Tensor((q.shape[2], q.shape[2]), q.dtype)
        mask = Tensor(ones.shape, q.dtype)
        del ones
        current().temporaries(numel(mask.shape))
        return mask

    def _window(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The triangle, and a second one of what lies too far back, added to it in place and kept by a local."""
        mask = self._triangle(q)
        ones = Tensor(mask.shape, q.dtype)
        bias = Tensor(mask.shape, q.dtype)
        del ones
        current().temporaries(numel(mask.shape))
        return mask, bias


class LitGptMlp:
    """GptNeoxMLP, LLaMAMLP and GemmaMLP."""

    def __init__(self, modules: Modules, name: str, *, is_gated: bool, gate: Module) -> None:
        ups = ("fc_1", "fc_2") if is_gated else ("fc",)
        self.ups, self.gate = [modules.linear(f"{name}.{up}") for up in ups], gate
        self.proj = modules.linear(f"{name}.proj")

    def __call__(self, x: Tensor) -> Any:
        if len(self.ups) == 1:
            x = call(self.ups[0], x)
            x = gelu(x)
            return call(self.proj, x)
        x_fc_1 = call(self.ups[0], x)
        x_fc_2 = call(self.ups[1], x)
        x = mul(self.gate(x_fc_1), x_fc_2)
        return call(self.proj, x)


class LitGptBlock(Layer):
    """Block: parallel or in sequence, one norm for both branches or two, norms after the branches (Gemma 2)."""

    def __init__(self, norms: dict[str, Module], attn: Module, mlp: Module, *, is_parallel: bool) -> None:
        self.norms, self.attn, self.mlp, self.is_parallel = norms, attn, mlp, is_parallel

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        norms = self.norms
        x_normed = call(norms["norm_1"], x)
        attention_output = call(self.attn, x_normed, cos, sin)
        if "post_attention_norm" in norms:
            attention_output = call(norms["post_attention_norm"], attention_output)
        if self.is_parallel:
            x_normed = call(norms["norm_2"], x) if "norm_2" in norms else x_normed
            x = add(add(call(self.mlp, x_normed), attention_output), x)
        else:
            x = add(attention_output, x)
            x = add(self._mlp(x), x)
        return x

    def _mlp(self, x: Tensor) -> Tensor:
        output: Tensor = call(self.mlp, call(self.norms["norm_2"], x))
        if "post_mlp_norm" in self.norms:
            output = call(self.norms["post_mlp_norm"], output)
        return output


class LitGptDecoder(Decoder):
    """GPT: embeddings, blocks, ln_f; its head is in `heads`."""

    embedding_name = "transformer.wte.weight"
    final_norm_name = "transformer.ln_f"

    def __init__(self, modules: Modules) -> None:
        self.is_gemma = modules.model_type.startswith("gemma")
        self.tables: tuple[Tensor, Tensor] | None = None
        super().__init__(modules)
        self.embedding_norm = self._stable_embedding()

    def _stable_embedding(self) -> Module | None:
        """0.5, under a quantized base: a new embedding with a norm after it, which nothing freezes, while the optimizer
        holds the old one (bitsandbytes/nn/modules.py, StableEmbedding; finetune/lora.py)."""
        if not self.modules.is_quantized or self.modules.code != "litgpt 0.5":
            return None
        old, tape = self.embedding, current()
        with tape.counted_as("weights"):
            width, dtype = old.shape[1], old.dtype
            norm = Tensor((width,), dtype, needs_grad=True), Tensor((width,), dtype, needs_grad=True)
            self.old_embedding, self.embedding = old, Tensor(old.shape, dtype, needs_grad=True)
        return LayerNorm(*norm)

    @classmethod
    def buffers(cls, traits: DecoderTraits, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        """None: the tables are made for the longest sequence, before the first step."""
        return []

    def make_norm(self, name: str) -> Module:
        weight, bias = self.modules.weight(f"{name}.weight"), self.modules.optional(f"{name}.bias")
        if bias is not None:
            return LayerNorm(weight, bias)
        return LitGptRmsNorm(weight, add_unit_offset=self.is_gemma, code=self.modules.code)

    def make_layer(self, index: int) -> Layer:
        modules, name = self.modules, f"{self.modules.prefix}{index}"
        names = ("norm_1", "post_attention_norm", "norm_2", "post_mlp_norm")
        is_gated = modules.model_type not in _PLAIN_MLP
        present = [n for n in names if modules.optional(f"{name}.{n}.weight") is not None]
        return LitGptBlock(
            {n: self.make_norm(f"{name}.{n}") for n in present},
            LitGptAttention(modules, f"{name}.attn", index),
            LitGptMlp(modules, f"{name}.mlp", is_gated=is_gated, gate=gelu if self.is_gemma else silu),
            is_parallel=self.traits.has_parallel_residual,
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        x = ops.embedding(self.embedding, input_ids)
        if self.embedding_norm is not None:
            x = call(self.embedding_norm, x)
        return x

    def __call__(self, input_ids: Tensor, run: RunOptions, *_: Any) -> tuple[Tensor, Any]:
        tape = current()
        if self.tables is None:
            size = run.sequence_length, self.traits.rotary_dim or 0
            self.tables = Tensor(size, "f32"), Tensor(size, "f32")
        cos, sin = self.tables
        x = self.embed(input_ids)
        if self.is_gemma:
            x = scale(x)
        for i, block in enumerate(self.layers):
            tape.segment("forward", i)
            x = call(block.forward, x, cos, sin)
            run.end_layer(i)
        tape.segment("head")
        x = call(self.norm, x)
        return x, None
