"""Configurations of other tools: every key is accounted for once, and what the file means is what we take."""

from collections import Counter
from pathlib import Path

import pytest

from foretune.contract.document import read_document, read_text
from foretune.errors import ConfigError
from foretune.foreign import TOOLS, import_config
from foretune.foreign.reader import flatten, read_foreign
from foretune.foreign.yaml11 import read_yaml11

CONFIGS = Path(__file__).parent / "configs"
FILES = sorted(path for path in CONFIGS.glob("*/*") if path.is_file())
NAMES = [f"{path.parent.name}/{path.name}" for path in FILES]


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_every_key_is_accounted_for_once(file: Path) -> None:
    imported = import_config(file)
    found = read_foreign(file)
    keys = [key for key, _, _ in flatten(found.keys, TOOLS[imported.tool].keys)]
    told = Counter(entry.key for entry in imported.entries if entry.place is not None)
    assert told == Counter(keys)


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_tool_is_told_by_the_file(file: Path) -> None:
    assert import_config(file).tool == file.parent.name.replace("_", "-")


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_place_is_the_line_of_the_key(file: Path) -> None:
    lines = read_text(str(file)).splitlines()
    for entry in import_config(file).entries:
        if entry.place is not None:
            line = lines[int(entry.place.rsplit(":", 2)[1]) - 1]
            name = entry.key.rpartition(".")[2].removesuffix("]").partition("[")[0]
            assert name in line.replace("-", "_")


def test_yaml_is_read_as_pyyaml_reads_it() -> None:
    text = "a: yes\nb: 010\nc: 1e-4\nd: 1.0e-4\ne: 1_000\nf: 12:30:45\ng: 'yes'\nh: 0x1F\ni: off\nj: 1.5e3\n"
    root = read_document(text, "t", plain=read_yaml11).root
    assert root is not None
    assert root.plain() == {
        "a": True, "b": 8, "c": "1e-4", "d": 1e-4, "e": 1000, "f": 45045, "g": "yes", "h": 31, "i": False, "j": "1.5e3",
    }  # fmt: skip


def test_file_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("colour: red\nsize: 3\n")
    with pytest.raises(ConfigError, match="no key of it tells"):
        import_config(file)
