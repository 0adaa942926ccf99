"""The decoder families whose layers are written, by Transformers' model_type."""

from foretune.memory.decoder import Decoder
from foretune.memory.families.classic import Gpt2Decoder, GptNeoxDecoder
from foretune.memory.families.classic_more import CodeGenDecoder, GptBigCodeDecoder, GptjDecoder, PersimmonDecoder
from foretune.memory.families.deepseek_v2 import DeepseekV2Decoder
from foretune.memory.families.delta import Qwen3NextDecoder, Qwen35Decoder
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
from foretune.memory.families.gemma3n import Gemma3nDecoder
from foretune.memory.families.gemma_more import Gemma4Decoder, VaultGemmaDecoder
from foretune.memory.families.gpt_oss import GptOssDecoder
from foretune.memory.families.granite_swa import GraniteSwaDecoder
from foretune.memory.families.hybrid import Lfm2Decoder, Lfm2MoeDecoder
from foretune.memory.families.indexed import DeepseekV32Decoder, GlmMoeDsaDecoder
from foretune.memory.families.latent import DeepseekV3Decoder, MiniCpm3Decoder, YoutuDecoder
from foretune.memory.families.litgpt import LitGptDecoder
from foretune.memory.families.llama import (
    LlamaDecoder,
    MistralDecoder,
    Olmo2Decoder,
    Phi3Decoder,
    Qwen2Decoder,
    Qwen3Decoder,
)
from foretune.memory.families.llama4 import Llama4Decoder
from foretune.memory.families.mamba2_only import Mamba2Decoder
from foretune.memory.families.mimo import MimoDecoder
from foretune.memory.families.minimax import MiniMaxDecoder
from foretune.memory.families.moe import (
    FlexOlmoDecoder,
    MiniMaxM2Decoder,
    MixtralDecoder,
    OlmoeDecoder,
    Qwen2MoeDecoder,
    Qwen3MoeDecoder,
)
from foretune.memory.families.moe_more import (
    Ernie45MoeDecoder,
    GraniteMoeDecoder,
    GraniteMoeSharedDecoder,
    HunYuanMoeDecoder,
)
from foretune.memory.families.moe_shared import Dots1Decoder, ExaoneMoeDecoder, Glm4MoeDecoder, SolarOpenDecoder
from foretune.memory.families.multimodal import Gemma3Whole, Gemma4Whole, MllamaDecoder
from foretune.memory.families.nemotron_h import NemotronHDecoder
from foretune.memory.families.phimoe import PhimoeDecoder
from foretune.memory.families.remote import BaichuanDecoder, ChatGlmDecoder, QwenDecoder
from foretune.memory.families.scores import BloomDecoder, GptNeoDecoder, MptDecoder
from foretune.memory.families.statespace import BambaDecoder, FalconH1Decoder, GraniteHybridDecoder
from foretune.models import REMOTE_CODE_TYPES, ModelShape

__all__ = ["DECODERS", "decoder_of", "find_decoder"]

DECODERS: dict[str, type[Decoder]] = {
    "apertus": ApertusDecoder,
    "arcee": ArceeDecoder,
    "bamba": BambaDecoder,
    "baichuan": BaichuanDecoder,
    "bitnet": BitNetDecoder,
    "bloom": BloomDecoder,
    "chatglm": ChatGlmDecoder,
    "codegen": CodeGenDecoder,
    "cohere": CohereDecoder,
    "cohere2": Cohere2Decoder,
    "cwm": CwmDecoder,
    "deepseek_v2": DeepseekV2Decoder,
    "deepseek_v3": DeepseekV3Decoder,
    "deepseek_v32": DeepseekV32Decoder,
    "dots1": Dots1Decoder,
    "ernie4_5": Ernie45Decoder,
    "ernie4_5_moe": Ernie45MoeDecoder,
    "exaone": LlamaDecoder,
    "exaone4": Exaone4Decoder,
    "exaone_moe": ExaoneMoeDecoder,
    "falcon": FalconDecoder,
    "falcon_h1": FalconH1Decoder,
    "flex_olmo": FlexOlmoDecoder,
    "gemma": GemmaDecoder,
    "gemma2": Gemma2Decoder,
    "gemma3": Gemma3Whole,
    "gemma3_text": Gemma3Decoder,
    "gemma3n_text": Gemma3nDecoder,
    "gemma4": Gemma4Whole,
    "gemma4_text": Gemma4Decoder,
    "glm": GlmDecoder,
    "glm4": Glm4Decoder,
    "glm_moe_dsa": GlmMoeDsaDecoder,
    "glm4_moe_lite": DeepseekV3Decoder,
    "glm4_moe": Glm4MoeDecoder,
    "gpt2": Gpt2Decoder,
    "gpt_bigcode": GptBigCodeDecoder,
    "gpt_neo": GptNeoDecoder,
    "gpt_neox": GptNeoxDecoder,
    "gptj": GptjDecoder,
    "gpt_oss": GptOssDecoder,
    "granite": GraniteDecoder,
    "granitemoehybrid": GraniteHybridDecoder,
    "lfm2": Lfm2Decoder,
    "lfm2_moe": Lfm2MoeDecoder,
    "granitemoe": GraniteMoeDecoder,
    "granitemoeshared": GraniteMoeSharedDecoder,
    "granite_swa": GraniteSwaDecoder,
    "helium": HeliumDecoder,
    "hunyuan_v1_dense": HunYuanDecoder,
    "hunyuan_v1_moe": HunYuanMoeDecoder,
    "hyperclovax": HyperClovaXDecoder,
    "internlm3": LlamaDecoder,
    "jais2": Jais2Decoder,
    "llama": LlamaDecoder,
    "minicpm3": MiniCpm3Decoder,
    "llama4_text": Llama4Decoder,
    "mimo_v2_flash": MimoDecoder,
    "mamba2": Mamba2Decoder,
    "minimax": MiniMaxDecoder,
    "minimax_m2": MiniMaxM2Decoder,
    "mllama_text_model": MllamaDecoder,
    "ministral": MinistralDecoder,
    "ministral3": Ministral3Decoder,
    "mistral": MistralDecoder,
    "mixtral": MixtralDecoder,
    "mpt": MptDecoder,
    "nanochat": NanoChatDecoder,
    "nemotron": NemotronDecoder,
    "nemotron_h": NemotronHDecoder,
    "olmo": OlmoDecoder,
    "olmo2": Olmo2Decoder,
    "olmo3": Olmo3Decoder,
    "olmoe": OlmoeDecoder,
    "opt": OptDecoder,
    "persimmon": PersimmonDecoder,
    "phi": PhiDecoder,
    "phi3": Phi3Decoder,
    "phimoe": PhimoeDecoder,
    "qwen": QwenDecoder,
    "qwen2": Qwen2Decoder,
    "qwen2_moe": Qwen2MoeDecoder,
    "qwen3": Qwen3Decoder,
    "qwen3_5_moe_text": Qwen35Decoder,
    "qwen3_5_text": Qwen35Decoder,
    "qwen3_next": Qwen3NextDecoder,
    "qwen3_moe": Qwen3MoeDecoder,
    "seed_oss": SeedOssDecoder,
    "smollm3": Qwen2Decoder,
    "vaultgemma": VaultGemmaDecoder,
    "youtu": YoutuDecoder,
    "solar_open": SolarOpenDecoder,
    "stablelm": StableLmDecoder,
    "starcoder2": Starcoder2Decoder,
    "xglm": XglmDecoder,
}
"""A family that is not listed has no program and is refused by name."""

DECODERS.update({remote: DECODERS[known] for remote, known in REMOTE_CODE_TYPES.items() if known in DECODERS})


def decoder_of(shape: ModelShape) -> type[Decoder]:
    """Return the decoder of a model in the modules that its shape is described in. Raises KeyError without one."""
    found = find_decoder(shape)
    if found is None:
        raise KeyError(shape.outer_type or shape.model_type)
    return found


def find_decoder(shape: ModelShape) -> type[Decoder] | None:
    """Return the decoder of the whole, where what is beside the language model is loaded with it, else of the language
    model; None where there is none."""
    if shape.code == "litgpt":
        return LitGptDecoder
    if shape.outer_type is None or shape.loads_text_alone:
        return DECODERS.get(shape.model_type)
    return DECODERS.get(shape.outer_type)
