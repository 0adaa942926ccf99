"""What foretune refuses by name before it counts anything, and why.

A refusal is an UnsupportedError whose message names the cause and whose hint says what to take instead.
"""

from collections.abc import Callable, Mapping
from typing import Any

from foretune.errors import ConfigError, UnsupportedError
from foretune.models.families.registry import REMOTE_CODE_TYPES
from foretune.units import format_bytes

__all__ = ["refuse"]

# fmt: off
_ENCODERS = frozenset(
    {
        "albert", "altclip", "beit", "bert", "big_bird", "blip", "camembert", "chinese_clip", "clip",
        "clip_text_model", "convbert", "convnext", "data2vec-text", "deberta", "deberta-v2", "deit", "dinov2",
        "distilbert", "electra", "ernie", "esm", "eurobert", "flava", "fnet", "funnel", "gte", "hubert",
        "ibert", "jina_embeddings_v3", "layoutlm", "layoutlmv2", "layoutlmv3", "longformer", "lxmert",
        "megatron-bert", "mobilebert", "modernbert", "mpnet", "mra", "nomic_bert", "nystromformer", "perceiver",
        "rembert", "roberta", "roberta-prelayernorm", "roformer", "siglip", "siglip2", "splinter",
        "squeezebert", "swin", "vit", "wav2vec2", "wavlm", "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso",
    }
)
# fmt: on
# fmt: off
_ENCODER_DECODERS = frozenset(
    {
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "florence2", "fsmt",
        "led", "longt5", "m2m_100", "marian", "mbart", "moonshine", "mt5", "mvp", "nllb-moe", "nougat",
        "pegasus", "pegasus_x", "plbart", "prophetnet", "seamless_m4t", "seamless_m4t_v2", "speech_to_text",
        "speecht5", "switch_transformers", "t5", "t5gemma", "t5gemma2", "umt5", "vision-encoder-decoder",
        "whisper",
    }
)
# fmt: on
_ENCODER_HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_ENCODER_DECODER_HEADS = ("ForSeq2SeqLM", "ForSpeechSeq2Seq")
_QUALIFIED = "foretune fine-tunes decoder-only language models (Llama, Qwen, Mistral, Gemma, Phi and others)."
_BY_NAME = {
    "gemma3n": (
        "its vision and audio towers come from timm, whose sizes are not in the config",
        "Its text decoder is known: write the text_config as a config of its own (model_type gemma3n_text).",
    ),
    "gemma4_unified": ("its towers are not counted yet", "Take another Gemma 4, for example google/gemma-4-E2B."),
    "phi4_multimodal": ("its adapters and towers are not counted yet", "Take microsoft/Phi-4-mini-instruct."),
    "minimax_m3": ("Transformers 5.24 has no class for it", "Take another model."),
    "kimi_k3": ("Transformers 5.24 has no class for it", "Take another model."),
    "nemotron-nas": ("its layers are pruned one by one, in remote code", "Take another model."),
    "deci": ("its layers are pruned one by one, in remote code", "Take another model."),
}


def refuse(
    config: Mapping[str, Any],
    *,
    place: str,
    known: tuple[str, ...],
    count: Callable[[Mapping[str, Any]], int | None],
) -> str:
    """Return the config's model type, or raise ConfigError or UnsupportedError.

    `count` counts the unquantized model for the message of a pre-quantized checkpoint.
    """
    model_type = _model_type(config, place)
    _refuse_internals(config, place)
    _refuse_quantized(config, place, count)
    _refuse_encoders(config, model_type, place)
    if model_type in _BY_NAME:
        cause, remedy = _BY_NAME[model_type]
        raise UnsupportedError(
            f"model_type {model_type} is not supported: {cause}.", hint=remedy, place=place, field="model_type"
        )
    is_native = model_type in known and model_type not in REMOTE_CODE_TYPES
    if config.get("auto_map") and not is_native:
        raise UnsupportedError(
            f"auto_map asks for remote code to build model_type {model_type!r}, and foretune never runs remote code.",
            hint="Take a model that Transformers supports with a class of its own.",
            place=place,
            field="auto_map",
        )
    if model_type not in known:
        raise _unknown(model_type, place, known)
    return model_type


def _model_type(config: Mapping[str, Any], place: str) -> str:
    model_type = config.get("model_type")
    if model_type is None:
        raise ConfigError(
            "model_type is missing, so nothing says which architecture this is.",
            hint="Use the model's config.json (an adapter_config.json or tokenizer_config.json has none).",
            place=place,
            field="model_type",
        )
    if not isinstance(model_type, str) or not 0 < len(model_type) <= 100:
        raise ConfigError(
            f"model_type is {str(model_type)[:40]!r}, not the name of an architecture.",
            hint='Write for example "llama".',
            place=place,
            field="model_type",
        )
    return model_type


def _sections(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    nested = [(f"{key}.", value) for key, value in config.items() if isinstance(value, Mapping)]
    return [("", config), *nested]


def _refuse_internals(config: Mapping[str, Any], place: str) -> None:
    """Keys with which a config could swap kernels or code behind the user's back."""
    for section, values in _sections(config):
        for key in values:
            is_internal = key.startswith(("_attn", "_experts")) and key.endswith("internal")
            if key == "trust_remote_code" or is_internal:
                raise UnsupportedError(
                    f"{section}{key} is set: it makes Transformers run other code than was asked for.",
                    hint="Remove the key, and choose the attention in the training config.",
                    place=place,
                    field=f"{section}{key}",
                )


def _refuse_quantized(config: Mapping[str, Any], place: str, count: Callable[[Mapping[str, Any]], int | None]) -> None:
    for section, values in _sections(config):
        for key in ("quantization_config", "compression_config"):
            if values.get(key) is None:
                continue
            method = _method(values[key])
            raise UnsupportedError(
                f"The checkpoint is already quantized ({method}), and its own {section}{key} could override the "
                "quantization that was asked for.",
                hint=_unquantized(count(_without_quantization(config))),
                place=place,
                field=section + key,
            )


def _method(settings: Any) -> str:
    if not isinstance(settings, Mapping):
        return "method not stated"
    for key, name in (("load_in_4bit", "bitsandbytes 4-bit"), ("load_in_8bit", "bitsandbytes 8-bit")):
        if settings.get(key) is True:
            return name
    method = settings.get("quant_method") or settings.get("quant_type") or settings.get("quant_algo")
    return method[:40] if isinstance(method, str) else "method not stated"


def _unquantized(num_parameters: int | None) -> str:
    advice = "Take the unquantized base model"
    if num_parameters is None:
        return f"{advice} and let foretune quantize it."
    size = format_bytes(2 * num_parameters)
    return f"{advice} ({num_parameters:,} parameters, {size} in bf16) and let foretune quantize it."


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    gone = ("quantization_config", "compression_config")
    return {
        key: {k: v for k, v in value.items() if k not in gone} if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in gone
    }


def _refuse_encoders(config: Mapping[str, Any], model_type: str, place: str) -> None:
    names = config.get("architectures")
    heads = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if (
        model_type in _ENCODER_DECODERS
        or config.get("is_encoder_decoder") is True
        or any(name.endswith(_ENCODER_DECODER_HEADS) for name in heads)
    ):
        kind = "an encoder-decoder"
    elif model_type in _ENCODERS or any(name.endswith(_ENCODER_HEADS) for name in heads):
        kind = "an encoder or a classifier"
    else:
        return
    raise UnsupportedError(
        f"model_type {model_type} is {kind}, not a causal language model.",
        hint=_QUALIFIED,
        place=place,
        field="model_type",
    )


def _unknown(model_type: str, place: str, known: tuple[str, ...]) -> UnsupportedError:
    import difflib  # loaded only for the message

    near = difflib.get_close_matches(model_type.lower(), known, n=3, cutoff=0.6)
    nearest = f" Nearest known types: {', '.join(near)}." if near else ""
    return UnsupportedError(
        f"model_type {model_type!r} is not one of the {len(known)} that foretune can count.",
        hint=f"Take a model of a supported type (`foretune models list`).{nearest}",
        place=place,
        field="model_type",
    )
