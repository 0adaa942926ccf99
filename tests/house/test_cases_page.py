"""docs/cases.md accounts for every case once, and names only tests and parts that exist or are planned."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIT = (1, 4, 6, 7, 8, 9, 10, 12, 14, 15, 17, 18, 21, 22, 23, 24, 25, 27, 29, 30, 31, 33, 34, 35, 36, 39, 40)
DATA = (
    *(43, 44, 46, 48, 49, 50, 51, 52, 53, 54, 55, 56, 58, 59, 60, 61, 62, 63, 64, 65, 67, 68, 71, 72, 76, 77, 79, 82),
    *(84, 85, 86, 90, 93, 94, 95, 96),
)
LOADING = (100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 112, 115, 117, 118, 121, 122)
RUNS = (125, 126, 127, 128, 130, 131, 133, 135, 136, 137, 138, 139, 144, 145, 146, 147)
PLANNING = (149, 150, 151, 152, 153, 154, 156, 158, 159, 160, 164, 165)
IDS = [f"{number:03}" for number in (*FIT, *DATA, *LOADING, *RUNS, *PLANNING)]
OWNERS = {"calibrate", "evidence", "several devices"}

PAGE = (ROOT / "docs/cases.md").read_text(encoding="utf-8")
ROWS = {row[0]: row for row in re.findall(r"^\| (\d{3}) \| (.+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)}
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def test_every_case_has_one_row_in_order() -> None:
    assert re.findall(r"^\| (\d{3}) ", PAGE, re.MULTILINE) == IDS
    assert list(ROWS) == IDS


@pytest.mark.parametrize("case", ROWS)
def test_row_is_held_by_a_test_or_has_an_owner(case: str) -> None:
    tests, _, owners = ROWS[case][3].partition("*to come:* ")
    assert "`tests/" in tests or owners
    assert set(owners.split(", ")) - {""} <= OWNERS


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)), ids=lambda text: text[-60:])
def test_named_test_exists(file: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), (file, name)


def test_every_test_of_a_case_stands_in_its_row() -> None:
    files = (("test_cases", 25), ("test_data_cases", 28), ("test_planning_cases", 14), ("test_run_cases", 29))
    for file, least in ((f"tests/journeys/{name}.py", least) for name, least in files):
        text = (ROOT / file).read_text(encoding="utf-8")
        names = re.findall(r"^def (test_case_(\d{3})_\w+)\(", text, re.MULTILINE)
        assert len(names) >= least
        assert [name for name, case in names if f"`{file}::{name}`" not in ROWS[case][3]] == []
