"""Models with a language model inside: the decoder from `text_config`, everything else counted in one number."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from foretune.errors import ConfigError
from foretune.models.families import tower_lists, towers
from foretune.models.families.dense import dense_traits, pre_norms
from foretune.models.families.fields import Fields, class_defaults, fields_of
from foretune.models.families.parts import (
    Decoder,
    Params,
    Whole,
    attention,
    decoder,
    embedding,
    gated_mlp,
    heads,
    norm,
    plain,
    stack,
)
from foretune.models.families.registry import LANGUAGE_MODELS, family
from foretune.models.shape import ParameterSpec, Tower

__all__ = ["FAMILIES", "MULTIMODAL", "build_multimodal"]


def mllama_text(c: Fields) -> Decoder:
    """mllama_text_model: gated cross-attention layers in between; the embedding is 8 rows longer than the head."""
    h, hidden, count = heads(c, stated_dim=False), c.size("hidden_size"), c.num_layers()
    crossing = set(c.integers("cross_attention_layers") or (3, 8, 13, 18, 23, 28, 33, 38))
    mlp = gated_mlp("mlp", hidden, c.size("intermediate_size"))

    def layer(crosses: bool) -> Params:
        if not crosses:
            return attention(c, h) + mlp + pre_norms(hidden)
        return (
            *plain("cross_attn_attn_gate", 1),
            *plain("cross_attn_mlp_gate", 1),
            *attention(c, h, name="cross_attn"),
            *norm("cross_attn.q_norm", h.dim),
            *norm("cross_attn.k_norm", h.dim),
            *norm("input_layernorm", hidden),
            *mlp,
            *norm("post_attention_layernorm", hidden),
        )

    kinds = stack([i in crossing for i in range(count)], layer)
    built = decoder(c, kinds, dense_traits(c, h), final=norm("model.norm", hidden))
    return built._replace(before=embedding("model.embed_tokens", c.size("vocab_size") + 8, hidden))


FAMILIES: dict[str, Callable[[Fields], Decoder]] = {"mllama_text_model": mllama_text}


class _Kind(NamedTuple):
    text_type: str
    vision_type: str
    tower: Callable[[Fields, Fields, int], int]
    prefix: str = "model.language_model."
    is_flat: bool = False
    """The text keys may stand at the top level (Qwen2-VL's first configs)."""
    text_defaults: bool = False
    """Without a text_config the class builds its default one."""


def _of_vision(count: Callable[[Fields, int], int]) -> Callable[[Fields, Fields, int], int]:
    return lambda _top, vision, width: count(vision, width)


MULTIMODAL: dict[str, _Kind] = {
    "gemma3": _Kind("gemma3_text", "siglip_vision_model", _of_vision(towers.gemma3_tower)),
    "gemma4": _Kind("gemma4_text", "gemma4_vision", lambda top, vision, width: 0),
    "idefics3": _Kind("llama", "idefics3_vision", towers.idefics3_tower, "model.text_model."),
    "kimi_k25": _Kind("deepseek_v3", "kimi_k25_vision", towers.kimi_k25_tower),
    "llama4": _Kind(
        "llama4_text",
        "llama4_vision_model",
        _of_vision(towers.llama4_tower),
        "language_model.model.",
    ),
    "mistral3": _Kind("mistral", "pixtral", towers.mistral3_tower),
    "mllama": _Kind("mllama_text_model", "mllama_vision_model", _of_vision(towers.mllama_tower)),
    "paligemma": _Kind("gemma", "siglip_vision_model", towers.paligemma_tower),
    "qwen2_5_vl": _Kind("qwen2_5_vl_text", "qwen2_5_vl_vision", _of_vision(towers.qwen2_5_vl_tower), is_flat=True),
    "qwen2_vl": _Kind("qwen2_vl_text", "qwen2_vl_vision", _of_vision(towers.qwen2_vl_tower), is_flat=True),
    "qwen3_5": _Kind("qwen3_5_text", "qwen3_5_vision", _of_vision(towers.qwen3_5_tower)),
    "qwen3_5_moe": _Kind("qwen3_5_moe_text", "qwen3_5_moe_vision", _of_vision(towers.qwen3_5_tower)),
    "qwen3_vl": _Kind("qwen3_vl_text", "qwen3_vl_vision", _of_vision(towers.qwen3_vl_tower)),
    "qwen3_vl_moe": _Kind("qwen3_vl_moe_text", "qwen3_vl_moe_vision", _of_vision(towers.qwen3_vl_tower)),
    "smolvlm": _Kind("llama", "smolvlm_vision", towers.idefics3_tower, "model.text_model."),
    "step3p7": _Kind("step3p5", "step3p5_vision", towers.step3p7_tower, text_defaults=True),
}
_LOAD_TEXT_ALONE = frozenset({"llama4", "mllama", "qwen3_5", "qwen3_5_moe"})
"""Those for which Transformers' AutoModelForCausalLM builds the language model alone (models/auto/modeling_auto.py)."""
_TEXT_TYPES = {"kimi_k2": "deepseek_v3", "step3p7": "step3p5", "step3p7_text": "step3p5"}


def build_multimodal(config: Mapping[str, Any], model_type: str, *, place: str) -> Whole:
    """Build the decoder from `text_config` and count the towers. Raises ConfigError."""
    kind = MULTIMODAL[model_type]
    top = Fields(config, class_defaults(model_type), place=place)
    notes: list[str] = []
    text_type, text = _text_fields(top, config, kind, notes, place)
    built = family(text_type)(text)
    built = _retied(top, text, built)
    built = built.moved("model.", kind.prefix)
    if model_type == "llama4":
        built = built._replace(after=_head_inside(built.after))
    width = built.traits.hidden_size
    listed: tuple[Tower, ...] = ()
    if model_type == "gemma4":
        vision, audio = _optional(top, "vision_config", "gemma4_vision"), _optional(top, "audio_config", "gemma4_audio")
        count = towers.gemma4_towers(vision, audio, width)
        listed = tower_lists.gemma4_towers(vision, audio, width)
    else:
        vision = top.nested("vision_config", kind.vision_type)
        count = kind.tower(top, vision, width)
        if model_type == "gemma3":
            listed = tower_lists.gemma3_towers(vision, width)
    return Whole(text_type, built, count, tuple(notes), model_type, model_type in _LOAD_TEXT_ALONE, listed)


def _head_inside(params: Params) -> Params:
    """Llama4's `language_model` is a whole causal model, its head included."""
    return tuple(
        ParameterSpec(name=f"language_model.{p.name}", shape=p.shape, role=p.role) if p.role == "head" else p
        for p in params
    )


def _optional(top: Fields, key: str, model_type: str) -> Fields | None:
    return top.nested(key, model_type) if top.raw(key) is not None else None


def _text_fields(
    top: Fields, config: Mapping[str, Any], kind: _Kind, notes: list[str], place: str
) -> tuple[str, Fields]:
    section = top.section_of("text_config")
    if not section and kind.is_flat:
        return kind.text_type, fields_of(config, kind.text_type, place=place)
    if not section and kind.text_defaults and top.raw("text_config") is None:
        notes.append("The config has no text_config; as Transformers does, its class's default one is counted.")
        return kind.text_type, Fields({}, class_defaults(kind.text_type), place=place, section="text_config.")
    if not section:
        raise ConfigError(
            "text_config is missing, and the language model's sizes stand there.",
            hint="Use the complete config.json of the model.",
            place=place,
            field="text_config",
        )
    stated = section.get("model_type", kind.text_type)
    text_type = _TEXT_TYPES.get(stated, stated) if isinstance(stated, str) else None
    if text_type not in LANGUAGE_MODELS:
        raise top.error(
            "text_config.model_type", stated, "a language model foretune does not know", "Check the config."
        )
    fields = fields_of(section, text_type, place=place, section="text_config.")
    for key in fields.missing_core():
        notes.append(f"text_config does not state {key}; its class's default {fields.raw(key)} counts.")
    return text_type, fields


def _retied(top: Fields, text: Fields, built: Decoder) -> Decoder:
    """Tie by the outer config where it says something, or its class does; else by the text config."""
    model_type = top.raw("model_type")
    if model_type == "llama4":  # the language model is a whole causal model, tied by its own config
        return built
    outer = top.raw("tie_word_embeddings")
    is_tied = built.tied if outer is None else top.flag("tie_word_embeddings")
    if model_type in ("qwen2_vl", "qwen2_5_vl"):
        is_tied = is_tied or built.tied
    if model_type == "mllama":  # its embedding is longer than its head, and the class ties nothing
        is_tied = False
    if is_tied == built.tied:
        return built
    head_name = "lm_head.weight"
    without = tuple(p for p in built.after if p.name != head_name)
    head = () if is_tied else plain(head_name, text.size("vocab_size"), built.traits.hidden_size, role="head")
    return built._replace(tied=is_tied, after=without + head)
