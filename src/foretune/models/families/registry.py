"""Which module writes down which model type; a module is loaded when a config first needs it (imports take time)."""

from collections.abc import Callable
from functools import cache
from importlib import import_module

from foretune.models.families.fields import Fields
from foretune.models.families.parts import Decoder

__all__ = ["LANGUAGE_MODELS", "MULTIMODAL_TYPES", "REMOTE_CODE_TYPES", "WITHOUT_CLASS", "family", "known_model_types"]

_MODULES = {
    "classic": """
        bloom codegen falcon gpt2 gpt_bigcode gpt_neo gpt_neox gptj mpt persimmon phi
    """,
    "dense": """
        arcee bitnet cohere cohere2 ernie4_5 exaone exaone4 glm glm4 granite helium hunyuan_v1_dense
        internlm3 llama ministral ministral3 mistral nemotron olmo olmo2 olmo3 phi3 qwen2
        qwen2_5_vl_text qwen2_vl_text qwen3 qwen3_vl_text seed_oss smollm3
    """,
    "dense_more": """
        apertus cwm granite_swa hyperclovax jais2 nanochat stablelm starcoder2
    """,
    "gemma": """
        gemma gemma2 gemma3_text gemma3n_text gemma4_text vaultgemma
    """,
    "hybrid": """
        lfm2 lfm2_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma
    """,
    "latent": """
        deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 glm4_moe_lite glm_moe_dsa kimi_linear
        minicpm3 youtu
    """,
    "moe": """
        dots1 exaone_moe flex_olmo glm4_moe granitemoe granitemoeshared hunyuan_v1_moe minimax_m2
        mixtral olmoe qwen2_moe qwen3_moe qwen3_vl_moe_text solar_open
    """,
    "moe_special": """
        ernie4_5_moe gpt_oss llama4_text mimo_v2_flash minimax phimoe step3p5
    """,
    "statespace": """
        bamba falcon_h1 falcon_mamba granitemoehybrid jamba mamba mamba2 nemotron_h
    """,
    "zamba": """
        zamba2
    """,
    "fairseq": """
        opt xglm
    """,
    "multimodal": """
        mllama_text_model
    """,
    "remote": """
        baichuan chatglm qwen
    """,
}
LANGUAGE_MODELS = {model_type: module for module, types in _MODULES.items() for model_type in types.split()}
"""Every language model that foretune can write down, and the module that does."""
MULTIMODAL_TYPES = frozenset(
    """
        gemma3 gemma4 idefics3 kimi_k25 llama4 mistral3 mllama paligemma qwen2_5_vl qwen2_vl qwen3_5
        qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm step3p7
    """.split()  # noqa: SIM905 - as in the table above
)
"""Types with a language model in `text_config` and something outside it."""
WITHOUT_CLASS = frozenset({"baichuan", "chatglm", "qwen"})
"""Types written down from their published code: Transformers has no class for them, nor one of the same shapes."""
REMOTE_CODE_TYPES = {
    "internlm2": "llama",
    "kimi_k2": "deepseek_v3",
    "mimo": "qwen2",
    "minicpm": "llama",
}
"""Types without a class in Transformers whose parameters have the shapes of another class."""


@cache
def family(model_type: str) -> Callable[[Fields], Decoder]:
    """Return the function that writes this language model down. Raises KeyError for another type."""
    module = import_module(f"foretune.models.families.{LANGUAGE_MODELS[model_type]}")
    table: dict[str, Callable[[Fields], Decoder]] = module.FAMILIES
    return table[model_type]


@cache
def known_model_types() -> tuple[str, ...]:
    """List the model types that can be counted, sorted."""
    return tuple(sorted({*LANGUAGE_MODELS, *MULTIMODAL_TYPES, *REMOTE_CODE_TYPES}))
