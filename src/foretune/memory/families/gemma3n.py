"""Gemma 3n (models/gemma3n of transformers 5.24): AltUp's parallel streams, LAuReL, per-layer embeddings, and layers
that take keys and values from earlier ones.
"""

from typing import Any

from foretune.memory import blocks, ops
from foretune.memory.blocks import Linear, Module, call
from foretune.memory.decoder import Cache, Layer, Modules, RunOptions
from foretune.memory.experts import divide
from foretune.memory.families.gemma_shared import (
    PowerRmsNorm,
    SharedStates,
    SharingAttention,
    SharingDecoder,
    SharingLayer,
)
from foretune.memory.ops import add, add_scalar, clone, contiguous, mul, reshape, scale, to, unsqueeze
from foretune.memory.pointwise import clamp, subtract
from foretune.memory.strided import (
    add_to_rows,
    add_to_view,
    mean_first,
    mul_in_place,
    permute,
    permuted,
    power,
    repeat_first,
    select,
    sqrt,
    stack,
    std_last,
)
from foretune.memory.tape import Tensor, current
from foretune.models import DecoderTraits

__all__ = ["Gemma3nDecoder"]


class _Laurel:
    """Gemma3nTextLaurelBlock."""

    def __init__(self, modules: Modules, name: str) -> None:
        self.linear_left, self.linear_right = (modules.linear(f"{name}.{n}") for n in ("linear_left", "linear_right"))
        self.post_laurel_norm = PowerRmsNorm(modules.weight(f"{name}.post_laurel_norm.weight"))

    def __call__(self, hidden_states: Tensor) -> Tensor:
        laurel_hidden_states = call(self.linear_left, hidden_states)
        laurel_hidden_states = call(self.linear_right, laurel_hidden_states)
        normed_laurel_hidden_states = call(self.post_laurel_norm, laurel_hidden_states)
        return add(hidden_states, normed_laurel_hidden_states)


class _Mlp:
    """Gemma3nTextMLP: a sparse layer keeps what lies well above the mean of the gate."""

    def __init__(self, modules: Modules, name: str, act: Module, *, is_sparse: bool) -> None:
        self.gate_proj, self.up_proj, self.down_proj = (
            modules.linear(f"{name}.{n}") for n in ("gate_proj", "up_proj", "down_proj")
        )
        self.act_fn, self.is_sparse = act, is_sparse

    def __call__(self, hidden_states: Tensor) -> Any:
        gate_proj = call(self.gate_proj, hidden_states)
        if self.is_sparse:
            gate_proj = self._gaussian_topk(gate_proj)
        activations = call(self.act_fn, gate_proj)
        up_proj = call(self.up_proj, hidden_states)
        down_proj = call(self.down_proj, mul(activations, up_proj))
        return down_proj  # noqa: RET504

    @staticmethod
    def _gaussian_topk(inputs: Tensor) -> Tensor:
        target_sparsity_tensor = Tensor((), "f32")
        std_multiplier = _inverse_cumulative(target_sparsity_tensor)
        std_multiplier = to(std_multiplier, inputs.dtype)
        inputs_mean = ops.mean_last(inputs)
        inputs_std = std_last(inputs)
        cutoff_x = add(inputs_mean, mul(inputs_std, std_multiplier))
        return ops.relu(subtract(inputs, cutoff_x))


def _inverse_cumulative(value: Tensor) -> Tensor:
    """Normal(0, 1).icdf (torch/distributions/normal.py)."""
    return add_scalar(scale(scale(scale(add_scalar(scale(value))))))


class _AltUp:
    """Gemma3nTextAltUp."""

    def __init__(self, modules: Modules, name: str) -> None:
        self.flags = modules.traits.flags
        self.correct_output_scale = modules.weight(f"{name}.correct_output_scale")
        self.correction_coefs, self.prediction_coefs, self.modality_router = (
            modules.linear(f"{name}.{n}") for n in ("correction_coefs", "prediction_coefs", "modality_router")
        )
        self.correction_weight = modules.weight(f"{name}.correction_coefs.weight")
        self.num_inputs = self.correction_weight.shape[0]
        self.router_norm = PowerRmsNorm(modules.weight(f"{name}.router_norm.weight"))
        self.router_input_scale = modules.buffer(f"{name}.router_input_scale")

    def compute_router_modalities(self, x: Tensor) -> Tensor:
        router_inputs = mul(call(self.router_norm, x), self.router_input_scale)
        routed = call(self.modality_router, router_inputs)
        return to(ops.tanh(to(routed, "f32")), x.dtype)

    def predict(self, hidden_states: Tensor) -> Tensor:
        n = self.num_inputs
        modalities = self.compute_router_modalities(select(hidden_states, 0))
        all_coefs = permute(
            reshape(call(self.prediction_coefs, modalities), (*modalities.shape[:-1], n, n)), 0, 1, 3, 2
        )
        predictions = ops.matmul4(permute(hidden_states, 1, 2, 3, 0), all_coefs)
        predictions = add_to_view(predictions, permuted(predictions, (3, 0, 1, 2)), hidden_states)
        return to(contiguous(predictions), hidden_states.dtype)

    def correct(self, predictions: Tensor, activated: Tensor) -> Tensor:
        modalities = self.compute_router_modalities(activated)
        innovation = subtract(activated, select(predictions, 0))
        innovation = repeat_first(innovation, self.num_inputs)
        if current().is_training and "altup_coef_clip" in self.flags:
            weight = clamp(self.correction_weight, num_bounds=2)
            all_coefs = add_scalar(ops.linear(modalities, weight))
        else:
            all_coefs = add_scalar(call(self.correction_coefs, modalities))
        all_coefs = unsqueeze(permute(all_coefs, 2, 0, 1), 3)
        corrected = mul(innovation, all_coefs)
        corrected = ops.add_in_place(corrected, predictions)
        return to(contiguous(corrected), activated.dtype)

    def scale_corrected_output(self, corrected: Tensor) -> Tensor:
        return self.forward(corrected)

    def forward(self, corrected: Tensor) -> Tensor:
        """The first prediction times a weight; `type_as` casts nothing here."""
        dtype = self.correct_output_scale.dtype
        return to(mul(to(corrected, dtype), self.correct_output_scale), corrected.dtype)


class Gemma3nLayer(SharingLayer):
    """Gemma3nTextDecoderLayer."""

    def __init__(self, modules: Modules, name: str, attention: Module, mlp: Module, act: Module) -> None:
        self.self_attn, self.mlp, self.act_fn, self.flags = attention, mlp, act, modules.traits.flags
        norms = (
            PowerRmsNorm(modules.weight(f"{name}.{n}.weight"))
            for n in (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
                "post_per_layer_input_norm",
            )
        )
        self.input_layernorm, self.post_attention_layernorm, self.pre_feedforward_layernorm, *last = norms
        self.post_feedforward_layernorm, self.post_per_layer_input_norm = last
        self.altup, self.laurel = _AltUp(modules, f"{name}.altup"), _Laurel(modules, f"{name}.laurel")
        self.per_layer_input_gate = modules.linear(f"{name}.per_layer_input_gate")
        self.per_layer_projection = modules.linear(f"{name}.per_layer_projection")

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        per_layer_input: Any,
        shared_kv_states: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
    ) -> Tensor:
        predictions = self.altup.predict(hidden_states)
        active_prediction = select(predictions, 0)
        active_prediction_normed = call(self.input_layernorm, active_prediction)
        laurel_output = call(self.laurel, active_prediction_normed)
        attn, _ = call(
            self.self_attn,
            hidden_states=active_prediction_normed,
            attention_mask=attention_mask,
            shared_kv_states=shared_kv_states,
            position_ids=position_ids,
            position_embeddings=position_embeddings,
            cache=cache,
        )
        attn = call(self.post_attention_layernorm, attn)
        attn_gated = add(active_prediction, attn)
        attn_laurel = scale(add(attn_gated, laurel_output))
        attn_norm = call(self.pre_feedforward_layernorm, attn_laurel)
        attn_ffw = call(self.mlp, attn_norm)
        attn_ffw_norm = call(self.post_feedforward_layernorm, attn_ffw)
        attn_ffw_laurel_gated = add(attn_laurel, attn_ffw_norm)
        corrected_predictions = self.altup.correct(predictions, attn_ffw_laurel_gated)
        first_prediction = clone(select(corrected_predictions, 0))
        if "altup_correct_scale" in self.flags:
            first_prediction = self.altup.scale_corrected_output(first_prediction)
        first_prediction = call(self.per_layer_input_gate, first_prediction)
        first_prediction = call(self.act_fn, first_prediction)
        first_prediction = mul(first_prediction, per_layer_input)
        first_prediction = call(self.per_layer_projection, first_prediction)
        first_prediction = call(self.post_per_layer_input_norm, first_prediction)
        corrected_predictions = add_to_rows(corrected_predictions, first_prediction)
        return corrected_predictions  # noqa: RET504


class Gemma3nDecoder(SharingDecoder):
    """Gemma3nTextModel."""

    def __init__(self, modules: Modules) -> None:
        super().__init__(modules)
        self.altup_projections, self.altup_unembed_projections = (
            [Linear(w) for i in range(64) if (w := modules.optional(f"model.{name}.{i}.weight")) is not None]
            for name in ("altup_projections", "altup_unembed_projections")
        )

    @classmethod
    def buffers(cls, traits: DecoderTraits, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        """The model's own scales come first."""
        own = [("per_layer_projection_scale", (), dtype), ("per_layer_input_scale", (), dtype)]
        return [*own, *super().buffers(traits, dtype), ("per_layer_embed_scale", (), dtype)]

    @classmethod
    def layer_buffers(
        cls, traits: DecoderTraits, parameters: frozenset[str], dtype: str
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """The router's scale. As long as those before it, so their order does not show."""
        return [("altup.router_input_scale", (), dtype)]

    def make_layer(self, index: int) -> Layer:
        name, act = f"{self.modules.prefix}{index}", blocks.ACTIVATIONS[self.traits.activation or "gelu_pytorch_tanh"]
        kind = "sliding" if self.is_sliding(index) else "full"
        attention = SharingAttention(self.modules, f"{name}.self_attn", kind=kind, stores=self.stores(index))
        is_sparse = bool(self.traits.sparse_layers) and self.traits.sparse_layers[index]
        layer = Gemma3nLayer(
            self.modules, name, attention, _Mlp(self.modules, f"{name}.mlp", act, is_sparse=is_sparse), act
        )
        layer.mask_kind = layer.table_kind = kind
        return layer

    def __call__(  # type: ignore[override]
        self,
        input_ids: Tensor,
        run: RunOptions,
        per_layer_inputs: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        inputs_embeds: Any = None,
        attention_mask: Any = None,
    ) -> tuple[Tensor, Any]:
        tape = current()
        inputs_embeds = self.embed(input_ids)
        if run.embeddings_want_grad:
            inputs_embeds.needs_grad = True
        per_layer_inputs = self.get_per_layer_inputs(input_ids)
        per_layer_inputs = self.project_per_layer_inputs(inputs_embeds, per_layer_inputs)
        cache = Cache() if run.keeps_cache else None
        position_ids = self.positions_of(run)
        masks: dict[str, Tensor | None] = {}
        _mask_kwargs = {"inputs_embeds": inputs_embeds, "position_ids": position_ids}
        masks = self.masks(run, inputs_embeds)
        hidden_states_0 = inputs_embeds
        target_magnitude = power(ops.mean_last(ops.square(hidden_states_0)))
        temp_hidden_states = [hidden_states_0]
        for altup_projection in self.altup_projections:
            altup_proj = call(altup_projection, hidden_states_0)
            current_hidden_state = altup_proj
            new_magnitude = ops.mean_last(ops.square(current_hidden_state))
            new_magnitude = sqrt(clamp(new_magnitude))
            current_hidden_state = divide(mul(current_hidden_state, target_magnitude), new_magnitude)
            temp_hidden_states.append(current_hidden_state)
        hidden_states = stack(temp_hidden_states)
        position_embeddings = self.position_tables(hidden_states, position_ids)
        shared_kv_states = SharedStates()
        for i, layer in enumerate(self.layers):
            causal_mask = masks[layer.mask_kind]
            per_layer_input = select(per_layer_inputs, 2)
            step = layer.checkpointed if run.is_checkpointed else layer.forward
            tape.segment("forward", i)
            hidden_states = call(
                step,
                hidden_states,
                position_embeddings[layer.table_kind],
                per_layer_input,
                shared_kv_states=shared_kv_states,
                attention_mask=causal_mask,
                position_ids=position_ids,
                cache=cache,
            )
            run.end_layer(i)
        tape.segment("head")
        target_magnitude = power(ops.mean_last(ops.square(select(hidden_states, 0))))
        temp_hidden_states = [select(hidden_states, 0)]
        for altup_projection in self.altup_unembed_projections:
            altup_unemb_proj = call(altup_projection, select(hidden_states, 0))
            current_hidden_state = altup_unemb_proj
            new_magnitude = ops.mean_last(ops.square(current_hidden_state))
            new_magnitude = sqrt(clamp(new_magnitude))
            current_hidden_state = divide(mul(current_hidden_state, target_magnitude), new_magnitude)
            temp_hidden_states.append(current_hidden_state)
        hidden_states = stack(temp_hidden_states)
        hidden_states = mean_first(hidden_states)
        hidden_states = call(self.norm, hidden_states)
        return hidden_states, cache

    def get_per_layer_inputs(self, input_ids: Tensor) -> Tensor:
        in_table = _both(ops.like(input_ids, "bool"), ops.like(input_ids, "bool"))
        input_ids = _where_or_zero(in_table, input_ids)
        return self.by_layer(call(self.embed_per_layer, input_ids))

    def project_per_layer_inputs(self, inputs_embeds: Tensor, per_layer_inputs: Tensor) -> Tensor:
        per_layer_projection = call(self.per_layer_model_projection, inputs_embeds)
        per_layer_projection = mul_in_place(per_layer_projection, self.modules.buffer("per_layer_projection_scale"))
        per_layer_projection = self.by_layer(per_layer_projection)
        per_layer_projection = call(self.per_layer_projection_norm, per_layer_projection)
        return mul(add(per_layer_projection, per_layer_inputs), self.modules.buffer("per_layer_input_scale"))


def _where_or_zero(condition: Tensor, t: Tensor) -> Tensor:
    """where(condition, t, 0): the number is made a tensor first."""
    zero = Tensor((), t.dtype)
    out = ops.like(t)
    del zero
    return out


def _both(a: Tensor, b: Tensor) -> Tensor:
    """logical_and."""
    return ops.like(a)
