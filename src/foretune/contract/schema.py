"""The settings for editors and for the documentation: a draft-07 JSON Schema and a table, from the types alone."""

from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from foretune.contract import config as config_module
from foretune.contract.config import TrainingConfig
from foretune.contract.fields import Leaf, Section, describe_type, field_tree, leaves

__all__ = ["Setting", "field_docs", "json_schema", "settings_table"]

DRAFT = "http://json-schema.org/draft-07/schema#"


class Setting(NamedTuple):
    """A row of the settings page."""

    field: str
    type: str
    default: str
    text: str


@cache
def _class_docs() -> dict[str, dict[str, str]]:
    """Read the text under each field from the source of `config.py`, by class and field; None is YAML's null."""
    import ast
    import inspect

    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(config_module)).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = _texts_below(node.body)
    return found


def _texts_below(body: list[Any]) -> dict[str, str]:
    import ast

    texts = {}
    for field, below in pairwise(body):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if is_field and is_text:
            texts[field.target.id] = " ".join(below.value.value.split()).replace("None", "null")
    return texts


def field_docs() -> dict[str, str]:
    """Return the text of every setting and section, by dotted path."""
    found: dict[str, str] = {}
    _collect_docs(field_tree(), found)
    return found


def _collect_docs(section: Section, found: dict[str, str]) -> None:
    texts = _class_docs()[section.cls.__name__]
    for name, part in section.parts.items():
        found[part.path] = texts[name]
        if isinstance(part, Section):
            _collect_docs(part, found)


def settings_table() -> tuple[Setting, ...]:
    """Return every setting with what it may be, its default and its text, for the settings page."""
    docs = field_docs()
    return tuple(Setting(leaf.path, describe_type(leaf.type), _default(leaf), docs[leaf.path]) for leaf in leaves())


def _default(leaf: Leaf) -> str:
    from foretune.contract.dump import write_value

    return "required" if leaf.is_required else write_value(leaf.default)


def json_schema() -> dict[str, Any]:
    """Return the draft-07 JSON Schema of a configuration file, with the fields' texts.

    Path("foretune.schema.json").write_text(json.dumps(json_schema()))
    """
    (root,), components = msgspec.json.schema_components([TrainingConfig], ref_template="#/definitions/{name}")
    definitions = {name: _with_texts(name, part) for name, part in components.items()}
    reference = root["$ref"]
    return {
        "$schema": DRAFT,
        "title": "foretune configuration",
        "allOf": [{"$ref": reference}],
        "definitions": definitions,
    }


def _with_texts(class_name: str, schema: dict[str, Any]) -> dict[str, Any]:
    texts = _class_docs()[class_name]
    properties = {name: _described(part, texts[name]) for name, part in schema["properties"].items()}
    return {**schema, "properties": properties}


def _described(part: dict[str, Any], text: str) -> dict[str, Any]:
    """Put the text beside the type. In draft-07 a `$ref` hides its neighbours, so it goes into an `allOf`."""
    if "$ref" in part:
        rest = {key: value for key, value in part.items() if key != "$ref"}
        return {"description": text, "allOf": [{"$ref": part["$ref"]}], **rest}
    return {"description": text, **part}
