"""Which model classes keep the examples of a packed row apart, and why the others do not.

Packed rows come with positions that begin at 0 for each example, without mask and cache. A class keeps examples apart
if it hands these positions to Transformers' masks (masking_utils.py) and nothing else in it looks beyond a token.
Known of Transformers 5.24: small models of each type were run, and each example's logits compared with those of the
example alone (tests/runtime/test_packing.py).
"""

from typing import NamedTuple

from foretune.contract import TrainingConfig
from foretune.errors import Problem
from foretune.memory.stack import StackProfile
from foretune.models import ModelShape

__all__ = ["KEEP_APART", "LEAKS", "Leak", "leaks_because", "packed_model_problems", "packed_setting_problems"]

_FIELD, _OFF = "batch.packing", "Set batch.packing: false."

# fmt: off
KEEP_APART = frozenset(
    {
        "apertus", "arcee", "bitnet", "codegen", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3",
        "deepseek_v32", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "falcon", "flex_olmo",
        "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite",
        "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite", "granite_swa", "granitemoe",
        "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "internlm3", "jais2",
        "llama", "llama4_text", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral",
        "mixtral", "mllama_text_model", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi",
        "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm",
        "starcoder2", "vaultgemma", "youtu",
    }
)
"""Types of language models whose classes were found to; falcon without linear biases alone (`leaks_because`)."""
# fmt: on


class Leak(NamedTuple):
    """Types of language models whose examples see one another, for one reason."""

    families: tuple[str, ...]
    because: str


LEAKS = (
    Leak(
        (
            *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "mamba", "mamba2", "minimax"),
            *("nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma"),
        ),
        "its layers carry a state from token to token, over the ends of examples",
    ),
    Leak(("lfm2", "lfm2_moe"), "its convolutions reach over the ends of examples"),
    Leak(("deepseek_v4",), "its compressed keys and values are made of blocks that reach over the ends of examples"),
    Leak(
        ("gpt_oss", "opt", "xglm"), "its class does not hand positions to its masks, so that examples see one another"
    ),
    Leak(("bloom", "mpt"), "its class takes no positions: linear biases count the tokens of the whole row"),
)
"""Why the classes of other types do not keep examples apart."""

_BIASED = "its linear biases count the tokens of the whole row, in 16 bits"


def leaks_because(shape: ModelShape) -> str | None:
    """Say why a model's class does not keep packed examples apart, or that nobody looked; None: it does."""
    family = shape.model_type
    if family == "falcon" and shape.traits.rotary_dim is None:
        return _BIASED
    if family in KEEP_APART:
        return None
    found = (leak.because for leak in LEAKS if family in leak.families)
    return next(found, f"nobody has checked that the class of {family} keeps examples apart")


def packed_model_problems(config: TrainingConfig, shape: ModelShape) -> list[Problem]:
    """Say where the examples of packed rows would see one another; estimate, trace and run ask this."""
    because = leaks_because(shape) if config.batch.packing else None
    if because is None:
        return []
    return [Problem(f"batch.packing is true, but {shape.id} is a {shape.model_type}: {because}.", _OFF, None, _FIELD)]


def packed_setting_problems(config: TrainingConfig, stack: StackProfile, verb: str) -> list[Problem]:
    """Say which settings packed rows are not known with; `verb` says what is not done: estimated, traced."""
    if not config.batch.packing:
        return []
    problems = []
    if stack.loss != "own":
        text = f"batch.packing is true: how the stack {stack.name} keeps packed examples apart is not {verb} yet."
        problems.append(Problem(text, "Take the stack foretune, or set batch.packing: false.", None, _FIELD))
    if config.attention == "flash_attention_2":
        # transformers/modeling_flash_attention_utils.py, _is_packed_sequence
        text = (
            "batch.packing is true: under flash_attention_2 Transformers keeps examples apart in batches of one row "
            f"alone, by a kernel that is not {verb} yet."
        )
        problems.append(Problem(text, "Set attention: sdpa, or batch.packing: false.", None, _FIELD))
    return problems
