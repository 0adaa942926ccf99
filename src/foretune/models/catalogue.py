"""The catalogue: models whose architecture is known without a download.

`catalogue.jsonl` holds one model a line (made by scripts/catalogue_build.py): the keys of its config that matter,
where they come from, and the ids with the same architecture. It is read once, and only when a model is looked up.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from foretune.errors import ConfigError
from foretune.models.families import shape_from_config
from foretune.models.shape import ModelShape
from foretune.values import Value

__all__ = [
    "CatalogueMatch",
    "ModelEntry",
    "catalogue_config",
    "catalogue_shape",
    "find_catalogue",
    "list_models",
    "near_matches",
]


class ModelEntry(Value, frozen=True, kw_only=True):
    """One line of `models list`."""

    id: str
    aliases: tuple[str, ...]
    """Ids of the same organisation and architecture; their context length and tokenizer may differ."""
    model_type: str
    total_params: int
    context_length: int | None
    licence: str | None
    gated: str | None
    """`likely` or `no`, inferred; None: not known."""
    published_only_as: str | None
    """The quantization in which alone it is published; what is described is the unquantized architecture."""
    source: str
    """Where the config comes from, and whether it is a copy (`verified`, `vendored`) or written from dimensions."""


class _Row(msgspec.Struct, frozen=True):
    id: str
    model_type: str
    total_params: int
    source: str
    config: msgspec.Raw
    aliases: tuple[str, ...] = ()
    context_length: int | None = None
    licence: str | None = None
    gated: str | None = None
    published_only_as: str | None = None


class CatalogueMatch(NamedTuple):
    """A model that was found, and the id it was found under, in the catalogue's spelling."""

    row: _Row
    id: str


class _Index(NamedTuple):
    rows: tuple[_Row, ...]
    by_id: Mapping[str, CatalogueMatch]
    by_name: Mapping[str, tuple[CatalogueMatch, ...]]
    """Without the organisation."""


@cache
def _index() -> _Index:
    text = (Path(__file__).parent / "catalogue.jsonl").read_bytes()
    rows = tuple(msgspec.json.Decoder(_Row).decode_lines(text))
    by_id: dict[str, CatalogueMatch] = {}
    by_name: dict[str, tuple[CatalogueMatch, ...]] = {}
    for row in rows:
        for id in (row.id, *_full_aliases(row)):
            match = CatalogueMatch(row, id)
            by_id[id.lower()] = match
            name = id.rpartition("/")[2].lower()
            by_name[name] = (*by_name.get(name, ()), match)
    return _Index(rows, by_id, by_name)


def _full_aliases(row: _Row) -> tuple[str, ...]:
    """Spell aliases out: those of the model's own organisation are stored without it."""
    organisation = row.id.rpartition("/")[0]
    return tuple(alias if "/" in alias else f"{organisation}/{alias}" for alias in row.aliases)


def list_models() -> tuple[ModelEntry, ...]:
    """List the catalogue, sorted by id.

    [entry.id for entry in list_models()]
    """
    return tuple(
        ModelEntry(
            id=row.id,
            aliases=_full_aliases(row),
            model_type=row.model_type,
            total_params=row.total_params,
            context_length=row.context_length,
            licence=row.licence,
            gated=row.gated,
            published_only_as=row.published_only_as,
            source=row.source,
        )
        for row in _index().rows
    )


def find_catalogue(id: str) -> CatalogueMatch | None:
    """Find a model by id or alias, in any case, with its organisation or, where that is clear, without.

    Raises ConfigError when a name without organisation means several models.
    """
    index = _index()
    wanted = id.lower()
    if wanted in index.by_id:
        return index.by_id[wanted]
    matches = index.by_name.get(wanted, ())
    if len({match.row.id for match in matches}) > 1:
        names = ", ".join(match.id for match in matches)
        raise ConfigError(
            f"{id!r} means several models: {names}.", hint="Write it with its organisation.", field="model"
        )
    return matches[0] if matches else None


def near_matches(id: str, limit: int = 3) -> tuple[str, ...]:
    """List the catalogue's ids that look most like this one."""
    import difflib  # loaded only for the message

    index = _index()
    wanted = id.lower()
    full = difflib.get_close_matches(wanted, index.by_id, n=limit, cutoff=0.6)
    short = difflib.get_close_matches(wanted.rpartition("/")[2], index.by_name, n=limit, cutoff=0.6)
    begins = [name for name in index.by_name if name.startswith(wanted.rpartition("/")[2])][:limit]
    found = [index.by_id[name].id for name in full] + [index.by_name[name][0].id for name in (*short, *begins)]
    return tuple(dict.fromkeys(found))[:limit]


def catalogue_config(match: CatalogueMatch) -> dict[str, Any]:
    """Return the keys of the model's config.json that matter."""
    config: dict[str, Any] = msgspec.json.decode(match.row.config)
    return config


def catalogue_shape(match: CatalogueMatch, *, notes: tuple[str, ...] = ()) -> ModelShape:
    """Describe a model of the catalogue; an alias keeps its own id, and its context length counts as unknown."""
    row = match.row
    shape = shape_from_config(
        catalogue_config(match),
        id=match.id,
        source="catalogue",
        place=f"the catalogue's config of {row.id}",
        published_only_as=row.published_only_as,
        notes=(*notes, *_notes(match)),
    )
    positions = shape.max_positions or row.context_length
    if match.id != row.id and not _has_position_table(shape):
        positions = None
    return ModelShape(**{**_fields(shape), "max_positions": positions})


def _fields(shape: ModelShape) -> dict[str, Any]:
    return {name: getattr(shape, name) for name in shape.__struct_fields__}


def _has_position_table(shape: ModelShape) -> bool:
    """Say whether the context length is a dimension of a parameter."""
    return any("wpe" in parameter.name or "embed_positions" in parameter.name for parameter in shape.before)


def _notes(match: CatalogueMatch) -> tuple[str, ...]:
    row = match.row
    notes = [f"The catalogue has its config from: {row.source}."]
    if match.id != row.id:
        notes.append(f"Described as {row.id}, whose architecture it shares; its context length may differ.")
    if row.published_only_as:
        notes.append(f"It is published only as {row.published_only_as}; what is described is the unquantized model.")
    return tuple(notes)
