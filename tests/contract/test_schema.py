"""The schema and the settings table follow from the types."""

import json
import subprocess
import sys

import jsonschema
import pytest

from foretune.contract import build_config, field_docs, json_schema, settings_table
from foretune.contract.fields import field_tree, leaves
from foretune.values import encode_json

EXAMPLES: list[dict[str, object]] = [
    {"model.id": "gpt2"},
    {"model.id": "gpt2", "lora": {}},
    {"model.id": "gpt2", "lora.targets": ["q_proj"], "quantization": {}, "schedule.updates": 3},
    {"model.id": "gpt2", "device": "cpu", "precision.dtype": "fp32", "evaluation.split": 0.1, "output": "out"},
]


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    schema = json_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_schema_accepts_every_example(validator: jsonschema.Draft7Validator, example: dict[str, object]) -> None:
    validator.validate(json.loads(encode_json(build_config(example).config)))


@pytest.mark.parametrize(
    "document",
    [
        {"model": {"id": "a"}},
        {"model": {"id": "a"}, "precision": {"dtype": "bf16"}, "extra": 1},
        {"model": {"id": "a"}, "precision": {"dtype": "bf16"}, "lora": {"rankk": 1}},
        {"model": {"id": "a"}, "precision": {"dtype": "bf16"}, "lora": {"rank": 0}},
        {"model": {"id": "a"}, "precision": {"dtype": "bf16"}, "lora": {"targets": "x"}},
        {"model": {"id": "a"}, "precision": {"dtype": "auto"}},
    ],
)
def test_the_schema_refuses_what_loading_refuses(
    validator: jsonschema.Draft7Validator, document: dict[str, object]
) -> None:
    assert not validator.is_valid(document)


def test_the_schema_is_draft_07_only() -> None:
    text = json.dumps(json_schema())
    assert json_schema()["$schema"] == "http://json-schema.org/draft-07/schema#"
    assert not [word for word in ("$defs", "prefixItems", "unevaluated", "dependentRequired") if word in text]


def test_every_property_has_its_text_beside_it() -> None:
    for definition in json_schema()["definitions"].values():
        for name, part in definition["properties"].items():
            assert part["description"], name
            assert "$ref" not in part, "draft-07 ignores what stands beside a $ref"


def test_every_field_has_a_text_and_a_row() -> None:
    docs = field_docs()
    rows = settings_table()
    assert [row.field for row in rows] == [leaf.path for leaf in leaves()]
    assert all(row.text == docs[row.field] and row.type and row.default for row in rows)
    assert set(field_tree().parts) <= set(docs)
    assert [row.field for row in rows if row.default == "required"] == ["model.id", "precision.dtype"]


def test_importing_the_contract_is_light() -> None:
    """msgspec itself may import `inspect`; what must not come with us is listed."""
    heavy = ("ruamel", "difflib", "hashlib", "pathlib", "json", "dataclasses", "torch", "numpy")
    code = (
        "import sys, msgspec; before = set(sys.modules); import foretune.contract as c; "
        "c.build_config({'model.id': 'gpt2'}, overrides=['lora.rank=8', 'lora.targets=[q_proj, v_proj]']); "
        f"print([name for name in {heavy!r} if name in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
