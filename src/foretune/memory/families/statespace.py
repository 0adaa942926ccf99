"""Mamba 2 beside attention: granitemoehybrid, bamba, falcon_h1, nemotron_h (models/<family> of transformers 5.24).

Local names are the files' own.
"""

from typing import Any, ClassVar

from foretune.memory import blocks
from foretune.memory.blocks import Module, call
from foretune.memory.decoder import Layer, Modules, RunOptions
from foretune.memory.families.llama import LlamaAttention, LlamaDecoder, SlidingDecoder
from foretune.memory.families.mamba2 import Mamba2Mixer
from foretune.memory.families.moe import make_experts
from foretune.memory.families.moe_more import GraniteMoeMoE, GraniteMoeRouter, GraniteSharedMlp
from foretune.memory.ops import (
    add,
    add_scalar,
    mean_last,
    mul,
    rsqrt,
    scale,
    silu,
    square,
    to,
    transpose,
    view,
)
from foretune.memory.tape import Tensor
from foretune.models import DecoderTraits

__all__ = ["BambaDecoder", "FalconH1Decoder", "GraniteHybridDecoder"]


class HybridAttention(LlamaAttention):
    """Attention that goes without rotary embedding where the config asks for none."""

    def __init__(self, modules: Modules, name: str, index: int) -> None:
        super().__init__(modules, name, index)
        self.has_rotary = modules.traits.rotary_dim is not None


# ------------------------------------------------------------------ Granite 4
class GraniteHybridLayer(Layer):
    """GraniteMoeHybridDecoderLayer: a shared MLP, beside experts where the config has some."""

    def __init__(
        self,
        input_layernorm: Module,
        mixer: Module,
        post_attention_layernorm: Module,
        shared_mlp: Module,
        moe: Module | None,
    ) -> None:
        self.input_layernorm, self.mixer = input_layernorm, mixer
        self.post_attention_layernorm, self.shared_mlp, self.block_sparse_moe = (
            post_attention_layernorm,
            shared_mlp,
            moe,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, cache: Any = None, position_embeddings: Any = None
    ) -> Tensor:
        residual = hidden_states
        hidden_states = call(self.input_layernorm, hidden_states)
        if self.mask_kind == "linear":
            hidden_states = call(self.mixer, hidden_states=hidden_states, cache=cache, attention_mask=attention_mask)
        else:
            hidden_states, _ = call(
                self.mixer,
                hidden_states=hidden_states,
                attention_mask=attention_mask,
                cache=cache,
                position_embeddings=position_embeddings,
            )
        hidden_states = add(residual, scale(hidden_states))
        residual = hidden_states
        hidden_states = call(self.post_attention_layernorm, hidden_states)
        if self.block_sparse_moe is not None:
            moe_hidden_states = call(self.block_sparse_moe, hidden_states)
            hidden_states = add(moe_hidden_states, call(self.shared_mlp, hidden_states))
        else:
            hidden_states = call(self.shared_mlp, hidden_states)
        hidden_states = add(residual, scale(hidden_states))
        return hidden_states  # noqa: RET504


class GraniteHybridDecoder(LlamaDecoder):
    """GraniteMoeHybridModel: scaled embeddings, branches and logits."""

    kernel_packages = "mamba-ssm and causal-conv1d"
    keyword_order = ("attention_mask", "cache", "position_embeddings")
    scales_logits = True

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        is_linear = self.modules.optional(f"{name}.mamba.A_log") is not None
        act = self.traits.activation or "silu"
        mixer: Module
        if is_linear:
            mixer = Mamba2Mixer(self.modules, f"{name}.mamba", act)
        else:
            mixer = HybridAttention(self.modules, f"{name}.self_attn", index)
        layer = GraniteHybridLayer(
            self.make_norm(f"{name}.input_layernorm"),
            mixer,
            self.make_norm(f"{name}.post_attention_layernorm"),
            GraniteSharedMlp(
                self.modules.linear(f"{name}.shared_mlp.input_linear"),
                self.modules.linear(f"{name}.shared_mlp.output_linear"),
                blocks.ACTIVATIONS[act],
            ),
            self._make_moe(f"{name}.block_sparse_moe"),
        )
        if is_linear:
            layer.mask_kind = "linear"
        return layer

    def _make_moe(self, name: str) -> Module | None:
        if self.modules.optional(f"{name}.router.weight") is None:
            return None
        return GraniteMoeMoE(
            GraniteMoeRouter(self.modules, f"{name}.router"), make_experts(self.modules, f"{name}.experts")
        )

    def after_embedding(self, inputs_embeds: Tensor) -> Tensor:
        return scale(inputs_embeds)

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        masks = {"full": run.causal_mask(inputs_embeds, None, has_positions=False), "linear": None}
        run.ask_whether_padded()
        return masks


# ------------------------------------------------------------------ Bamba
class BambaAttention(LlamaAttention):
    """BambaAttention: part of a head is rotated."""

    rotate = staticmethod(blocks.apply_rotary_neox)


class BambaLayer(Layer):
    """BambaDecoderLayer, which hands its attention's weights back."""

    def __init__(self, input_layernorm: Module, mixer: Module, pre_ff_layernorm: Module, feed_forward: Module) -> None:
        self.input_layernorm, self.mixer = input_layernorm, mixer
        self.pre_ff_layernorm, self.feed_forward = pre_ff_layernorm, feed_forward

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        position_embeddings: Any = None,
    ) -> tuple[Tensor, Any]:
        residual = hidden_states
        hidden_states = call(self.input_layernorm, hidden_states)
        if self.mask_kind == "linear":
            hidden_states = call(self.mixer, hidden_states=hidden_states, cache=cache, attention_mask=attention_mask)
            self_attn_weights = None
        else:
            hidden_states, self_attn_weights = call(
                self.mixer,
                hidden_states=hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                position_embeddings=position_embeddings,
            )
        hidden_states = add(residual, hidden_states)
        residual = hidden_states
        hidden_states = call(self.pre_ff_layernorm, hidden_states)
        hidden_states = call(self.feed_forward, hidden_states)
        hidden_states = add(residual, hidden_states)
        return hidden_states, self_attn_weights


class BambaDecoder(SlidingDecoder):
    """BambaModel: Mamba 2, attention in some layers."""

    kernel_packages = "mamba-ssm and causal-conv1d"
    keyword_order: ClassVar[tuple[str, ...]] = ("attention_mask", "position_ids", "cache", "position_embeddings")
    final_norm_name = "model.final_layernorm"

    def count_positions(self, length: int) -> Tensor:
        """arange alone."""
        return Tensor((length,), "i64")

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        is_linear = self.modules.optional(f"{name}.mamba.A_log") is not None
        mixer: Module
        if is_linear:
            mixer = Mamba2Mixer(self.modules, f"{name}.mamba", self.traits.activation or "silu")
        else:
            mixer = BambaAttention(self.modules, f"{name}.self_attn", index)
        layer = BambaLayer(
            self.make_norm(f"{name}.input_layernorm"),
            mixer,
            self.make_norm(f"{name}.pre_ff_layernorm"),
            self.make_mlp(f"{name}.feed_forward"),
        )
        if is_linear:
            layer.mask_kind = "linear"
        return layer

    def masks(self, run: RunOptions, inputs_embeds: Tensor) -> dict[str, Tensor | None]:
        masks = {"full": run.causal_mask(inputs_embeds, None), "linear": None}
        run.ask_whether_padded()
        return masks


# ------------------------------------------------------------------ Falcon H1
class FalconH1Norm:
    """FalconH1RMSNormGated: each group of channels, the gate before or after the norm."""

    def __init__(self, weight: Tensor, num_groups: int, *, is_before_gate: bool) -> None:
        self.weight, self.n_groups, self.norm_before_gate = weight, num_groups, is_before_gate

    def __call__(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        if not self.norm_before_gate:
            hidden_states = mul(hidden_states, silu(to(gate, "f32")))
        batch_size, seq_len, dim = hidden_states.shape
        hidden_states = to(hidden_states, "f32")
        hidden_states = view(hidden_states, batch_size, seq_len, self.n_groups, dim // self.n_groups)
        variance = mean_last(square(hidden_states))
        hidden_states = mul(hidden_states, rsqrt(add_scalar(variance)))
        hidden_states = mul(view(self.weight, self.n_groups, dim // self.n_groups), hidden_states)
        hidden_states = view(hidden_states, batch_size, seq_len, dim)
        if self.norm_before_gate:
            hidden_states = mul(hidden_states, silu(to(gate, "f32")))
        return to(hidden_states, input_dtype)


class FalconH1Mixer(Mamba2Mixer):
    """FalconH1Mixer: inputs and projections are scaled, the norm is optional."""

    def __init__(self, modules: Modules, name: str, activation: str) -> None:
        super().__init__(modules, name, activation)
        self.mup_vector = modules.buffer(f"{name}.mup_vector")

    def make_norm(self, modules: Modules, name: str) -> Module | None:
        weight, is_before_gate = modules.optional(name), modules.traits.norms_before_gate
        return None if weight is None else FalconH1Norm(weight, self.n_groups, is_before_gate=is_before_gate)

    def scale_input(self, hidden_states: Tensor) -> Tensor:
        return scale(hidden_states)

    def scale_projection(self, projected_states: Tensor) -> Tensor:
        return mul(projected_states, self.mup_vector)

    def finish(self, scan_output: Tensor, gate: Tensor) -> Any:
        if self.norm is None:
            return mul(scan_output, silu(gate))
        return call(self.norm, scan_output, gate)


class FalconH1Attention(LlamaAttention):
    """FalconH1Attention: keys are scaled."""

    def project(self, hidden_states: Tensor, hidden_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        query_states = transpose(view(call(self.q_proj, hidden_states), *hidden_shape), 1, 2)
        key_states = scale(transpose(view(call(self.k_proj, hidden_states), *hidden_shape), 1, 2))
        value_states = transpose(view(call(self.v_proj, hidden_states), *hidden_shape), 1, 2)
        return query_states, key_states, value_states


class FalconH1Mlp:
    """FalconH1MLP: gate and output are scaled."""

    def __init__(self, gate_proj: Module, up_proj: Module, down_proj: Module, act: Module) -> None:
        self.gate_proj, self.up_proj, self.down_proj, self.act = gate_proj, up_proj, down_proj, act

    def __call__(self, x: Tensor) -> Tensor:
        y = mul(call(self.up_proj, x), call(self.act, scale(call(self.gate_proj, x))))
        y = scale(call(self.down_proj, y))
        return y  # noqa: RET504


class FalconH1Layer(Layer):
    """FalconH1DecoderLayer: a mixer and attention side by side."""

    def __init__(
        self, feed_forward: Module, mamba: Module, self_attn: Module, input_norm: Module, pre_ff_norm: Module
    ) -> None:
        self.feed_forward, self.mamba, self.self_attn = feed_forward, mamba, self_attn
        self.input_layernorm, self.pre_ff_layernorm = input_norm, pre_ff_norm

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
        mamba_hidden_states = call(self.mamba, hidden_states=hidden_states, cache=cache)
        mamba_hidden_states = scale(mamba_hidden_states)
        attention_hidden_states, _ = call(
            self.self_attn,
            hidden_states=scale(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            position_embeddings=position_embeddings,
        )
        attention_hidden_states = scale(attention_hidden_states)
        hidden_states = add(mamba_hidden_states, attention_hidden_states)
        hidden_states = add(residual, hidden_states)
        residual = hidden_states
        hidden_states = call(self.pre_ff_layernorm, hidden_states)
        hidden_states = call(self.feed_forward, hidden_states)
        hidden_states = add(residual, hidden_states)
        return hidden_states  # noqa: RET504


class FalconH1Decoder(BambaDecoder):
    """FalconH1Model: scaled embeddings, branches and logits."""

    keeps_outputs = True
    scales_logits = True

    count_positions = LlamaDecoder.count_positions

    @classmethod
    def layer_buffers(
        cls, traits: DecoderTraits, parameters: frozenset[str], dtype: str
    ) -> list[tuple[str, tuple[int, ...], str]]:
        assert traits.mixer_projection is not None
        return [("mamba.mup_vector", (1, 1, traits.mixer_projection), dtype)]

    def make_layer(self, index: int) -> Layer:
        name = f"{self.modules.prefix}{index}"
        act, linear = self.traits.activation or "silu", self.modules.linear
        mlp = f"{name}.feed_forward"
        return FalconH1Layer(
            FalconH1Mlp(
                linear(f"{mlp}.gate_proj"),
                linear(f"{mlp}.up_proj"),
                linear(f"{mlp}.down_proj"),
                blocks.ACTIVATIONS[act],
            ),
            FalconH1Mixer(self.modules, f"{name}.mamba", act),
            FalconH1Attention(self.modules, f"{name}.self_attn", index),
            self.make_norm(f"{name}.input_layernorm"),
            self.make_norm(f"{name}.pre_ff_layernorm"),
        )

    def after_embedding(self, inputs_embeds: Tensor) -> Tensor:
        return scale(inputs_embeds)
