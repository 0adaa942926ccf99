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
from foretune.memory.families.moe import (
    FlexOlmoDecoder,
    MiniMaxM2Decoder,
    MixtralDecoder,
    OlmoeDecoder,
    Qwen2MoeDecoder,
    Qwen3MoeDecoder,
)
from foretune.memory.families.moe_shared import Dots1Decoder, ExaoneMoeDecoder, Glm4MoeDecoder, SolarOpenDecoder

__all__ = ["DECODERS"]

DECODERS: dict[str, type[Decoder]] = {
    "dots1": Dots1Decoder,
    "exaone_moe": ExaoneMoeDecoder,
    "falcon": FalconDecoder,
    "flex_olmo": FlexOlmoDecoder,
    "gemma": GemmaDecoder,
    "gemma2": Gemma2Decoder,
    "gemma3_text": Gemma3Decoder,
    "gemma3n_text": Gemma3nDecoder,
    "gemma4_text": Gemma4Decoder,
    "glm4_moe": Glm4MoeDecoder,
    "gpt2": Gpt2Decoder,
    "gpt_neox": GptNeoxDecoder,
    "llama": LlamaDecoder,
    "mistral": MistralDecoder,
    "minimax_m2": MiniMaxM2Decoder,
    "mixtral": MixtralDecoder,
    "olmo2": Olmo2Decoder,
    "olmoe": OlmoeDecoder,
    "phi3": Phi3Decoder,
    "qwen2": Qwen2Decoder,
    "qwen2_moe": Qwen2MoeDecoder,
    "qwen3": Qwen3Decoder,
    "qwen3_moe": Qwen3MoeDecoder,
    "smollm3": Qwen2Decoder,
    "vaultgemma": VaultGemmaDecoder,
    "solar_open": SolarOpenDecoder,
}
"""A family that is not listed has no program and is refused by name."""
