"""Models with something beside the language model, trained on text: Gemma 3 and Gemma 4 as a whole, and Mllama.

Follows models/gemma3, gemma4 and mllama of transformers 5.24. Towers are loaded and not run, so they are weights alone;
what the class around the language model does with token ids, embeddings and masks is here.
"""

from typing import Any

from foretune.memory import ops
from foretune.memory.blocks import call
from foretune.memory.decoder import Layer, RunOptions
from foretune.memory.families.gemma import Gemma3Decoder
from foretune.memory.families.gemma_more import Gemma4Decoder
from foretune.memory.families.llama import LlamaAttention, LlamaDecoder
from foretune.memory.ops import transpose, unsqueeze, view
from foretune.memory.strided import select, where
from foretune.memory.tape import Tensor

__all__ = ["Gemma3Whole", "Gemma4Whole", "MllamaDecoder"]


def _masks(
    decoder: Gemma3Decoder, run: RunOptions, inputs_embeds: Tensor, *, has_positions: bool
) -> dict[str, Tensor | None]:
    """create_masks_for_generate: one for each kind of layer there is."""
    masks: dict[str, Tensor | None] = {}
    for kind in sorted({layer.mask_kind for layer in decoder.layers}):
        window = decoder.traits.sliding_window if kind == "sliding" else None
        masks[kind] = run.causal_mask(inputs_embeds, window, has_positions=has_positions)
    return masks


class Gemma3Whole(Gemma3Decoder):
    """Gemma3Model around Gemma3TextModel; Gemma3ForConditionalGeneration caps no logits."""

    caps_logits = False

    def __call__(  # type: ignore[override]
        self, input_ids: Tensor, run: RunOptions, inputs_embeds: Any = None
    ) -> tuple[Tensor, Any]:
        inputs_embeds = self.embed(input_ids)
        if run.embeddings_want_grad:
            inputs_embeds.needs_grad = True
        masks: dict[str, Tensor | None] = {}
        _mask_kwargs = {"inputs_embeds": inputs_embeds}
        masks = _masks(self, run, inputs_embeds, has_positions=run.positions is not None)
        outputs: tuple[Tensor, Any] = call(
            super().__call__, input_ids, run, attention_mask=masks, inputs_embeds=inputs_embeds
        )
        return outputs


class Gemma4Whole(Gemma4Decoder):
    """Gemma4Model around Gemma4TextModel: ids of images, videos and sounds are looked for, and padded over."""

    def __call__(  # type: ignore[override]
        self,
        input_ids: Tensor,
        run: RunOptions,
        position_ids: Any = None,
        inputs_embeds: Any = None,
        per_layer_inputs: Any = None,
    ) -> tuple[Tensor, Any]:
        image_mask, video_mask, audio_mask = self._placeholder_masks(input_ids)
        multimodal_mask = _or(_or(image_mask, video_mask), audio_mask)
        llm_input_ids = ops.clone(input_ids)
        llm_input_ids = where(multimodal_mask, None, llm_input_ids)
        inputs_embeds = self.embed(llm_input_ids)
        if run.embeddings_want_grad:
            inputs_embeds.needs_grad = True
        if self.has_per_layer_inputs:
            pad_embedding = select(self.embedding, 0)
            _llm_inputs_embeds = where(unsqueeze(multimodal_mask, 2), view(pad_embedding, 1, 1, -1), inputs_embeds)
            per_layer_inputs = self.get_per_layer_inputs(llm_input_ids)
        position_ids = self.positions_of(run)
        masks: dict[str, Tensor | None] = {}
        _mask_kwargs = {"inputs_embeds": inputs_embeds, "position_ids": position_ids}
        masks = _masks(self, run, inputs_embeds, has_positions=True)
        outputs: tuple[Tensor, Any] = call(
            super().__call__,
            input_ids,
            run,
            per_layer_inputs=per_layer_inputs,
            attention_mask=masks,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
        )
        return outputs

    @staticmethod
    def _placeholder_masks(input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        special_image_mask = ops.like(input_ids, "bool")
        special_video_mask = ops.like(input_ids, "bool")
        special_audio_mask = ops.like(input_ids, "bool")
        return special_image_mask, special_video_mask, special_audio_mask


def _or(a: Tensor, b: Tensor) -> Tensor:
    return ops.like(a)


# ------------------------------------------------------------------ Mllama
class _SkippedLayer(Layer):
    """A layer of cross-attention: without an image the loop passes it by."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states

    def checkpointed(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return hidden_states


class MllamaAttention(LlamaAttention):
    """MllamaTextSelfAttention: all three products come before the heads are split."""

    def project(self, hidden_states: Tensor, hidden_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        query_states = call(self.q_proj, hidden_states)
        key_states = call(self.k_proj, hidden_states)
        value_states = call(self.v_proj, hidden_states)
        query_states = transpose(view(query_states, *hidden_shape), 1, 2)
        key_states = transpose(view(key_states, *hidden_shape), 1, 2)
        value_states = transpose(view(value_states, *hidden_shape), 1, 2)
        return query_states, key_states, value_states


class MllamaDecoder(LlamaDecoder):
    """MllamaTextModel, which is what Transformers' causal class of mllama holds."""

    attention_class = MllamaAttention
    logits_in_32bit = True
    keyword_order = ("attention_mask", "position_ids", "cache", "position_embeddings")

    def make_layer(self, index: int) -> Layer:
        if self.modules.optional(f"{self.modules.prefix}{index}.cross_attn_attn_gate") is not None:
            return _SkippedLayer()
        return super().make_layer(index)
