"""From a Hugging Face config.json to a ModelShape, without torch and without Transformers."""

from collections.abc import Mapping
from typing import Any

from foretune.errors import ConfigError, ForetuneError, Problem
from foretune.models.families.fields import fields_of
from foretune.models.families.parts import Whole
from foretune.models.families.refusals import refuse
from foretune.models.families.registry import (
    MULTIMODAL_TYPES,
    REMOTE_CODE_TYPES,
    WITHOUT_CLASS,
    family,
    known_model_types,
)
from foretune.models.shape import ModelShape, ParameterSpec

__all__ = ["WITHOUT_CLASS", "known_model_types", "shape_from_config"]

_LARGEST = 1 << 62


def shape_from_config(
    config: Mapping[str, Any],
    *,
    id: str,
    source: str,
    revision: str | None = None,
    place: str | None = None,
    published_only_as: str | None = None,
    notes: tuple[str, ...] = (),
) -> ModelShape:
    """Describe a model by its config: every parameter under its name in Transformers 5.24, in module order.

    `place` is what an error calls the config (a file name); without one, the id. Raises ConfigError for a value that
    is wrong or missing, UnsupportedError for what foretune does not train (quantized checkpoints, remote code,
    encoders, unknown types).

    >>> shape_from_config({"model_type": "gpt2", ...}, id="gpt2", source="file").total_params
    124439808
    """
    where = place or id
    model_type = refuse(config, place=where, known=known_model_types(), count=_count_or_none)
    whole = _whole(config, model_type, where)
    built = whole.decoder
    _refuse_absurd(whole, where)
    return ModelShape(
        id=id,
        model_type=whole.model_type,
        source=source,
        revision=revision,
        num_layers=built.num_layers,
        vocab_size=built.vocab_size,
        max_positions=built.max_positions,
        tied_embeddings=built.tied,
        traits=built.traits,
        layer_prefix=built.prefix,
        before=built.before,
        kinds=built.kinds,
        after=built.after,
        tower_params=whole.tower_params,
        outer_type=whole.outer_type,
        loads_text_alone=whole.loads_text_alone,
        towers=whole.towers,
        published_only_as=published_only_as,
        notes=(*notes, *whole.notes, *built.notes),
    )


def _whole(config: Mapping[str, Any], model_type: str, place: str) -> Whole:
    if model_type in MULTIMODAL_TYPES:
        from foretune.models.families.multimodal import build_multimodal  # loaded only where it is needed

        return build_multimodal(config, model_type, place=place)
    notes: tuple[str, ...] = ()
    shape_type = REMOTE_CODE_TYPES.get(model_type, model_type)
    if shape_type != model_type:
        same = f"it is counted as {shape_type}, whose parameters have the same shapes"
        notes += (f"Transformers has no class for {model_type}: {same}. The module names are not the real ones.",)
    if model_type in WITHOUT_CLASS:
        notes += (f"Transformers has no class for {model_type}: it is counted, and nothing here runs its code.",)
    elif config.get("auto_map"):
        notes += ("auto_map is ignored: Transformers has a class of its own, and remote code stays off.",)
    fields = fields_of(config, shape_type, place=place)
    return Whole(model_type, family(shape_type)(fields), 0, notes)


def _count_or_none(config: Mapping[str, Any]) -> int | None:
    """Count what a quantized checkpoint would hold unquantized, or None where that cannot be said."""
    try:
        return shape_from_config(config, id="", source="").total_params
    except ForetuneError:
        return None


def _refuse_absurd(whole: Whole, place: str) -> None:
    """Refuse sizes that make an empty parameter, or more parameters than a 62-bit number counts."""
    built = whole.decoder
    every = [*built.before, *built.after, *(p for kind in built.kinds for p in kind.parameters)]
    problems = [_problem(parameter, place) for parameter in every if _is_absurd(parameter)]
    outside = sum(parameter.num_elements for parameter in (*built.before, *built.after))
    layers = sum(len(kind.layers) * kind.num_parameters for kind in built.kinds)
    if not problems and outside + layers + whole.tower_params >= _LARGEST:
        problems = [Problem("The config describes more than 2^62 parameters.", "Check its sizes.", place)]
    if problems:
        raise ConfigError.of(problems[:5])


def _is_absurd(parameter: ParameterSpec) -> bool:
    return any(size < 1 for size in parameter.shape) or parameter.num_elements >= _LARGEST


def _problem(parameter: ParameterSpec, place: str) -> Problem:
    shape = " x ".join(str(size) for size in parameter.shape)
    return Problem(f"The config makes {parameter.name} a tensor of {shape}.", "Check its sizes.", place)
