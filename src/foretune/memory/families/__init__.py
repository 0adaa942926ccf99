"""The decoder families whose layers are written, by Transformers' model_type."""

from foretune.memory.decoder import Decoder
from foretune.memory.families.classic import FalconDecoder, Gpt2Decoder, GptNeoxDecoder
from foretune.memory.families.gemma import Gemma2Decoder, Gemma3Decoder, GemmaDecoder
from foretune.memory.families.litgpt import LitGptDecoder
from foretune.memory.families.llama import (
    LlamaDecoder,
    MistralDecoder,
    Olmo2Decoder,
    Phi3Decoder,
    Qwen2Decoder,
    Qwen3Decoder,
)
from foretune.memory.families.remote import BaichuanDecoder, ChatGlmDecoder, QwenDecoder
from foretune.models import ModelShape

__all__ = ["DECODERS", "decoder_of"]

DECODERS: dict[str, type[Decoder]] = {
    "baichuan": BaichuanDecoder,
    "chatglm": ChatGlmDecoder,
    "falcon": FalconDecoder,
    "gemma": GemmaDecoder,
    "gemma2": Gemma2Decoder,
    "gemma3_text": Gemma3Decoder,
    "gpt2": Gpt2Decoder,
    "gpt_neox": GptNeoxDecoder,
    "llama": LlamaDecoder,
    "mistral": MistralDecoder,
    "olmo2": Olmo2Decoder,
    "phi3": Phi3Decoder,
    "qwen": QwenDecoder,
    "qwen2": Qwen2Decoder,
    "qwen3": Qwen3Decoder,
    "smollm3": Qwen2Decoder,
}
"""A family that is not listed has no program and is refused by name."""


def decoder_of(shape: ModelShape) -> type[Decoder]:
    """Return the decoder of a model in the modules that its shape is described in."""
    return LitGptDecoder if shape.code == "litgpt" else DECODERS[shape.model_type]
