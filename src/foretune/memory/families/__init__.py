"""The decoder families whose layers are written, by Transformers' model_type."""

from foretune.memory.decoder import Decoder
from foretune.memory.families.classic import FalconDecoder, Gpt2Decoder, GptNeoxDecoder
from foretune.memory.families.gemma import Gemma2Decoder, Gemma3Decoder, GemmaDecoder
from foretune.memory.families.gemma3n import Gemma3nDecoder
from foretune.memory.families.gemma_more import Gemma4Decoder, VaultGemmaDecoder
from foretune.memory.families.llama import (
    LlamaDecoder,
    MistralDecoder,
    Olmo2Decoder,
    Phi3Decoder,
    Qwen2Decoder,
    Qwen3Decoder,
)

__all__ = ["DECODERS"]

DECODERS: dict[str, type[Decoder]] = {
    "falcon": FalconDecoder,
    "gemma": GemmaDecoder,
    "gemma2": Gemma2Decoder,
    "gemma3_text": Gemma3Decoder,
    "gemma3n_text": Gemma3nDecoder,
    "gemma4_text": Gemma4Decoder,
    "gpt2": Gpt2Decoder,
    "gpt_neox": GptNeoxDecoder,
    "llama": LlamaDecoder,
    "mistral": MistralDecoder,
    "olmo2": Olmo2Decoder,
    "phi3": Phi3Decoder,
    "qwen2": Qwen2Decoder,
    "qwen3": Qwen3Decoder,
    "smollm3": Qwen2Decoder,
    "vaultgemma": VaultGemmaDecoder,
}
"""A family that is not listed has no program and is refused by name."""
