"""The decoder families whose layers are written, by Transformers' model_type."""

from foretune.memory.decoder import Decoder
from foretune.memory.families.classic import FalconDecoder, Gpt2Decoder, GptNeoxDecoder
from foretune.memory.families.classic_more import GptBigCodeDecoder
from foretune.memory.families.delta import Qwen3NextDecoder, Qwen35Decoder
from foretune.memory.families.dense import GraniteDecoder, PhiDecoder, Starcoder2Decoder
from foretune.memory.families.gemma import Gemma2Decoder, Gemma3Decoder, GemmaDecoder
from foretune.memory.families.hybrid import Lfm2Decoder
from foretune.memory.families.llama import (
    LlamaDecoder,
    MistralDecoder,
    Olmo2Decoder,
    Phi3Decoder,
    Qwen2Decoder,
    Qwen3Decoder,
)
from foretune.memory.families.statespace import GraniteHybridDecoder

__all__ = ["DECODERS"]

DECODERS: dict[str, type[Decoder]] = {
    "falcon": FalconDecoder,
    "gemma": GemmaDecoder,
    "gemma2": Gemma2Decoder,
    "gemma3_text": Gemma3Decoder,
    "gpt2": Gpt2Decoder,
    "gpt_bigcode": GptBigCodeDecoder,
    "gpt_neox": GptNeoxDecoder,
    "granite": GraniteDecoder,
    "granitemoehybrid": GraniteHybridDecoder,
    "lfm2": Lfm2Decoder,
    "llama": LlamaDecoder,
    "mistral": MistralDecoder,
    "olmo2": Olmo2Decoder,
    "phi": PhiDecoder,
    "phi3": Phi3Decoder,
    "qwen2": Qwen2Decoder,
    "qwen3": Qwen3Decoder,
    "qwen3_5_text": Qwen35Decoder,
    "qwen3_next": Qwen3NextDecoder,
    "smollm3": Qwen2Decoder,
    "starcoder2": Starcoder2Decoder,
}
"""A family that is not listed has no program and is refused by name."""
