"""Random models of real widths and ways to train them: what estimate and trace are compared on."""

import random
from typing import Any, NamedTuple

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec

__all__ = ["Run", "random_run"]

OPTIMIZERS: list[dict[str, Any]] = [
    {},
    {"implementation": "foreach"},
    {"implementation": "foreach", "max_grad_norm": None},
    {"max_grad_norm": None},
    {"name": "adamw_8bit"},
    {"name": "paged_adamw_8bit", "max_grad_norm": None},
    {"name": "sgd"},
    {"name": "sgd", "momentum": 0.9, "implementation": "foreach"},
    {"name": "sgd", "implementation": "foreach", "weight_decay": 0.1},
]
FAMILIES = (
    *("llama", "llama", "qwen2", "qwen2", "qwen3", "mistral", "smollm3", "gemma", "gemma2", "gemma3_text"),
    *("phi3", "olmo2", "gpt2", "gpt_neox", "falcon"),
)


class Run(NamedTuple):
    """One comparison."""

    seed: int
    model: dict[str, Any]
    config: TrainingConfig
    device: DeviceSpec


def random_run(seed: int) -> Run:
    """Draw a model, a configuration and a device; the same for the same seed."""
    draw = random.Random(seed)
    model = _model(draw)
    family = model["model_type"]
    method = draw.choice(["full", "lora", "qlora"])
    is_refused = family == "gpt2" or (family == "falcon" and model["bias"])
    if is_refused and method == "qlora":
        method = "lora"
    attention = "eager" if family == "gemma2" or (family != "falcon" and draw.random() < 0.25) else "sdpa"
    lengths = [64, 128, 333, 512, 1000, 1024, 2048, 4096]
    length = draw.choice(lengths[:6] if attention == "eager" else lengths)
    fields: dict[str, Any] = {
        "model": {"id": "test/model"},
        "precision": {"dtype": draw.choice(["bf16", "fp32"] if method == "full" else ["bf16", "bf16", "fp16", "fp32"])},
        "attention": attention,
        "gradient_checkpointing": draw.random() < 0.7,
        "loss": draw.choice(["stock", "stock", "chunked"]),
        "batch": {
            "micro_batch_size": draw.choice([1, 1, 1, 2, 3, 4]),
            "sequence_length": length,
            "accumulation_steps": draw.choice([1, 1, 2, 3]),
        },
        "optimizer": draw.choice(OPTIMIZERS),
    }
    if method != "full":
        targets = draw.choice(["all-linear", "attention", "mlp"])
        rank = draw.choice([1, 4, 8, 16, 32, 64])
        fields["lora"] = {"rank": rank, "targets": targets, "dropout": draw.choice([0.0, 0.0, 0.05])}
    if method == "qlora":
        fields["quantization"] = {"double_quant": draw.random() < 0.6}
    return Run(seed, model, TrainingConfig.create(**fields), _device(draw))


def _device(draw: random.Random) -> DeviceSpec:
    capability, platform = draw.choice(
        [("9.0", "linux"), ("8.9", "linux"), ("8.0", "linux"), ("8.6", "windows"), ("7.5", "linux")]
    )
    return DeviceSpec(
        name="test", total_bytes=1 << 40, total_is="given", compute_capability=capability, platform=platform
    )


def _model(draw: random.Random) -> dict[str, Any]:
    family = draw.choice(FAMILIES)
    if family == "gpt2":
        heads = draw.choice([12, 16, 20])
        sizes = {"n_embd": heads * 64, "n_head": heads, "n_layer": draw.choice([2, 3]), "n_positions": 4096}
        return {"model_type": family, "vocab_size": 50257, **sizes}
    if family in ("gpt_neox", "falcon"):
        return _classic(draw, family)
    model = _llama_like(draw, family)
    if family in ("qwen2", "smollm3", "phi3", "olmo2"):  # no head width of their own
        model["hidden_size"] = model["num_attention_heads"] * model.pop("head_dim")
    if family in ("gemma", "gemma2"):
        model["head_dim"] = draw.choice([128, 256])
    if family == "gemma3_text":
        model |= {"sliding_window": draw.choice([256, 1024]), "num_hidden_layers": draw.choice([2, 4])}
        model["layer_types"] = ["sliding_attention"] * model["num_hidden_layers"]
    if family == "mistral":
        model["sliding_window"] = draw.choice([None, 512])
    if family in ("phi3", "smollm3"):
        model["pad_token_id"] = 0
    if family == "phi3":
        model["sliding_window"] = None
    return model


def _llama_like(draw: random.Random, family: str) -> dict[str, Any]:
    width = draw.choice([64, 64, 128, 96, 80, 36, 100])
    heads = draw.choice([8, 12, 16, 24])
    return {
        "model_type": family,
        "hidden_size": heads * draw.choice([64, 96, 128]),
        "intermediate_size": draw.choice([1536, 2816, 4864, 8192]),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([k for k in (1, 2, 4, heads) if heads % k == 0]),
        "head_dim": width,
        "vocab_size": draw.choice([32000, 49152, 151936]),
        "num_hidden_layers": draw.choice([2, 3, 4]),
        "tie_word_embeddings": draw.random() < 0.5,
    }


def _classic(draw: random.Random, family: str) -> dict[str, Any]:
    heads, width = draw.choice([8, 12, 16]), draw.choice([64, 96, 128])
    model: dict[str, Any] = {
        "model_type": family,
        "hidden_size": heads * width,
        "num_attention_heads": heads,
        "num_hidden_layers": draw.choice([2, 3]),
        "vocab_size": 50304,
    }
    if family == "gpt_neox":
        parallel = draw.random() < 0.7
        rotary = draw.choice([0.25, 0.5, 1.0])
        return model | {"intermediate_size": 4 * heads * width, "rotary_pct": rotary, "use_parallel_residual": parallel}
    model |= {"alibi": False, "parallel_attn": True, "bias": draw.random() < 0.3}
    if draw.random() < 0.5:
        return model | {"new_decoder_architecture": True, "num_kv_heads": heads // 2}
    return model | {"new_decoder_architecture": False, "multi_query": True}
