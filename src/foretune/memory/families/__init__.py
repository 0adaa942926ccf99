"""The decoder families whose layers are written, by Transformers' model_type."""

from foretune.memory.decoder import Decoder
from foretune.memory.families.classic import Gpt2Decoder, GptNeoxDecoder
from foretune.memory.families.classic_more import CodeGenDecoder, GptBigCodeDecoder, GptjDecoder, PersimmonDecoder
from foretune.memory.families.dense import (
    GraniteDecoder,
    HyperClovaXDecoder,
    PhiDecoder,
    StableLmDecoder,
    Starcoder2Decoder,
)
from foretune.memory.families.dense_more import (
    ApertusDecoder,
    ArceeDecoder,
    BitNetDecoder,
    CwmDecoder,
    Exaone4Decoder,
    HunYuanDecoder,
    Jais2Decoder,
    Ministral3Decoder,
    MinistralDecoder,
    NanoChatDecoder,
    NemotronDecoder,
    Olmo3Decoder,
    OlmoDecoder,
    SeedOssDecoder,
)
from foretune.memory.families.dense_pairs import (
    Cohere2Decoder,
    CohereDecoder,
    Ernie45Decoder,
    Glm4Decoder,
    GlmDecoder,
    HeliumDecoder,
)
from foretune.memory.families.fairseq import OptDecoder, XglmDecoder
from foretune.memory.families.falcon import FalconDecoder
from foretune.memory.families.gemma import Gemma2Decoder, Gemma3Decoder, GemmaDecoder
from foretune.memory.families.granite_swa import GraniteSwaDecoder
from foretune.memory.families.llama import (
    LlamaDecoder,
    MistralDecoder,
    Olmo2Decoder,
    Phi3Decoder,
    Qwen2Decoder,
    Qwen3Decoder,
)
from foretune.memory.families.scores import BloomDecoder, GptNeoDecoder, MptDecoder
from foretune.models import REMOTE_CODE_TYPES

__all__ = ["DECODERS"]

DECODERS: dict[str, type[Decoder]] = {
    "apertus": ApertusDecoder,
    "arcee": ArceeDecoder,
    "bitnet": BitNetDecoder,
    "bloom": BloomDecoder,
    "codegen": CodeGenDecoder,
    "cohere": CohereDecoder,
    "cohere2": Cohere2Decoder,
    "cwm": CwmDecoder,
    "ernie4_5": Ernie45Decoder,
    "exaone": LlamaDecoder,
    "exaone4": Exaone4Decoder,
    "falcon": FalconDecoder,
    "gemma": GemmaDecoder,
    "gemma2": Gemma2Decoder,
    "gemma3_text": Gemma3Decoder,
    "glm": GlmDecoder,
    "glm4": Glm4Decoder,
    "gpt2": Gpt2Decoder,
    "gpt_bigcode": GptBigCodeDecoder,
    "gpt_neo": GptNeoDecoder,
    "gpt_neox": GptNeoxDecoder,
    "gptj": GptjDecoder,
    "granite": GraniteDecoder,
    "granite_swa": GraniteSwaDecoder,
    "helium": HeliumDecoder,
    "hunyuan_v1_dense": HunYuanDecoder,
    "hyperclovax": HyperClovaXDecoder,
    "internlm3": LlamaDecoder,
    "jais2": Jais2Decoder,
    "llama": LlamaDecoder,
    "ministral": MinistralDecoder,
    "ministral3": Ministral3Decoder,
    "mistral": MistralDecoder,
    "mpt": MptDecoder,
    "nanochat": NanoChatDecoder,
    "nemotron": NemotronDecoder,
    "olmo": OlmoDecoder,
    "olmo2": Olmo2Decoder,
    "olmo3": Olmo3Decoder,
    "opt": OptDecoder,
    "persimmon": PersimmonDecoder,
    "phi": PhiDecoder,
    "phi3": Phi3Decoder,
    "qwen2": Qwen2Decoder,
    "qwen3": Qwen3Decoder,
    "seed_oss": SeedOssDecoder,
    "smollm3": Qwen2Decoder,
    "stablelm": StableLmDecoder,
    "starcoder2": Starcoder2Decoder,
    "xglm": XglmDecoder,
}
"""A family that is not listed has no program and is refused by name."""

DECODERS.update({remote: DECODERS[known] for remote, known in REMOTE_CODE_TYPES.items() if known in DECODERS})
