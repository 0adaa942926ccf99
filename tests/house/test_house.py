"""The house: versions agree, values are frozen and keyword-only, rooms list their public names."""

import importlib
import pkgutil
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import foretune
from foretune.values import Value

ROOT = Path(__file__).parents[2]
ROOMS = (
    "foretune",
    "foretune.api",
    "foretune.cli",
    "foretune.contract",
    "foretune.data",
    "foretune.devices",
    "foretune.durable",
    "foretune.errors",
    "foretune.evidence",
    "foretune.foreign",
    "foretune.machine",
    "foretune.memory",
    "foretune.models",
    "foretune.pictures",
    "foretune.planner",
    "foretune.needs",
    "foretune.recipe",
    "foretune.runtime",
    "foretune.texts",
    "foretune.traces",
    "foretune.units",
    "foretune.values",
)


def modules() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(foretune.__path__, "foretune."):
        if not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def values() -> list[type[Value]]:
    list(modules())
    found: list[type[Value]] = [Value]
    for cls in found:
        found += cls.__subclasses__()
    return [cls for cls in found[1:] if cls.__module__.startswith("foretune.")]


def test_version_is_the_packages_and_the_changelogs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert foretune.__version__ == project["version"] == newest[1]


def test_rooms_are_those_that_there_are() -> None:
    found = {f"foretune.{path.stem}" for path in (ROOT / "src/foretune").iterdir() if not path.name.startswith("_")}
    assert {name for name in found if name != "foretune.py"} == set(ROOMS) - {"foretune"}


# The runtime lists nothing: its modules are imported one by one, torch only by those that need it.
@pytest.mark.parametrize("room", [room for room in ROOMS if room != "foretune.runtime"])
def test_public_names_are_listed_and_sorted(room: str) -> None:
    module = importlib.import_module(room)
    names = module.__all__
    # As ruff sorts them: constants, classes, functions.
    assert len(set(names)) == len(names)
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[:1].isupper(), name))
    assert all(hasattr(module, name) for name in names)


@pytest.mark.parametrize("module", list(modules()), ids=lambda module: module.__name__)
def test_module_has_a_docstring_and_a_readable_length(module: ModuleType) -> None:
    assert module.__doc__
    assert module.__file__ is not None
    assert len(Path(module.__file__).read_text().splitlines()) <= 700


@pytest.mark.parametrize("cls", values(), ids=lambda cls: cls.__name__)
def test_value_is_frozen_keyword_only_and_strict(cls: type[Value]) -> None:
    config = cls.__struct_config__
    assert config.frozen
    assert config.forbid_unknown_fields
    with pytest.raises(TypeError, match="positional"):
        cls(*range(len(cls.__struct_fields__)))


def test_pages_name_only_what_exists() -> None:
    readme = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", readme):
        assert (ROOT / target).exists() or target.startswith("http"), target
