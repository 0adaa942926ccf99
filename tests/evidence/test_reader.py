"""Reading observations: both forms, unknown and missing keys, and what is wrong with a file."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest
from evidence.rows import ABSENT, CONFIG, observation, public_row, write_rows

from foretune.errors import EvidenceError
from foretune.evidence import OWN_OBSERVATIONS, compact_lines, parse_observation, read_observations, request_of


def test_a_row_is_read_into_values() -> None:
    row = observation()
    assert (row.source.name, row.model.id, row.training.lora.rank) == ("made-up", "made-up/small", 4)  # type: ignore[union-attr]
    assert (row.measured.peak_allocated_bytes, row.measured.scope) == (20_000_000, "load_and_train")
    assert json.loads(row.model.config or "") == CONFIG
    assert hash(row) == hash(observation())


def test_unknown_keys_are_passed_over() -> None:
    plain = observation()
    assert observation(weather="fine", training__mood="good", training__lora__colour=1, measured__joules=3) == plain


def test_missing_keys_are_unknown_and_not_zero() -> None:
    row = parse_observation(
        {"id": "a", "source": {"name": "s"}, "model": {"id": "m"}, "training": {"method": "full"}}, place="test"
    )
    assert row.measured.peak_allocated_bytes is None
    assert row.device.memory_total_bytes is None
    assert row.training.seq_len is None
    assert row.training.grad_clip is msgspec.UNSET
    assert row.software.driver == row.training.optimizer == "unknown"


def test_null_says_no_more_than_a_key_that_is_left_out() -> None:
    nothing = observation(training__autocast=None, training__optimizer=None, software=None, measured__scope=None)
    left_out = observation(training__optimizer=ABSENT, software=ABSENT, measured__scope=ABSENT)
    assert nothing == left_out


def test_no_clipping_differs_from_not_known() -> None:
    assert observation().training.grad_clip is None
    assert observation(training__grad_clip=ABSENT).training.grad_clip is msgspec.UNSET


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"id": ABSENT}, "the field `id` is missing"),
        ({"id": 7}, "id: expected `str`"),
        ({"training": ABSENT}, "the field `training` is missing"),
        ({"training": None}, "the field `training` is missing"),
        ({"training": 3}, "training: expected `object`, got `int`"),
        ({"training__method": ABSENT}, "training: the field `method` is missing"),
        ({"training__seq_len": 0}, "training.seq_len: expected `int` >= 1"),
        ({"training__seq_len": "1024"}, "training.seq_len: expected `int | null`, got `str`"),
        ({"training__lora__target_modules": "q_proj"}, "training.lora.target_modules: expected `array`"),
        ({"measured__peak_allocated_bytes": 0}, "measured.peak_allocated_bytes: expected `int` >= 1"),
        ({"measured__process_bytes": 1.5}, "measured.process_bytes: expected `int | null`, got `float`"),
        ({"device__compute_capability": "new"}, "device.compute_capability: expected `str` matching"),
        ({"model__config": "llama"}, "model.config is no object"),
    ],
)
def test_a_wrong_row_is_refused_with_file_line_and_cause(tmp_path: Path, change: dict[str, Any], cause: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [public_row(), public_row(**{"id": "made-up-2", **change})])
    with pytest.raises(EvidenceError) as caught:
        list(read_observations(path))
    assert cause in str(caught.value).replace("Object", "object")
    assert caught.value.problems[0].place == f"{path}:2"
    assert caught.value.exit_code == 9


@pytest.mark.parametrize(
    "line", [b"nonsense", b"[]", b"7", b'{"id": NaN}', b'{"id": "a"', b"\xff\xfe", b"[" * 100_000], ids=repr
)
def test_what_is_no_object_is_refused_with_its_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(public_row()).encode() + b"\n\n" + line + b"\n")
    rows = read_observations(path)
    assert next(rows).id == "made-up-1"
    with pytest.raises(EvidenceError) as caught:
        next(rows)
    assert caught.value.problems[0].place == f"{path}:3"


def test_an_id_stands_once(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"rows.jsonl:2: The id 'made-up-1' stands in line 1 already"):
        list(read_observations(write_rows(tmp_path / "rows.jsonl", [public_row(), public_row()])))


@pytest.mark.parametrize("text", ["", "\n \n", '{"form":"foretune.observations/1","tables":{}}\n'])
def test_a_file_without_a_row_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(EvidenceError, match="no observation"):
        list(read_observations(path))


@pytest.mark.parametrize("name", ["none.jsonl", ".", "a\0b"])
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = f"{tmp_path}/{name}"
    with pytest.raises(EvidenceError, match=r"does not exist|cannot be read") as caught:
        list(read_observations(path))
    assert caught.value.problems[0].place == path


def test_rows_are_read_one_at_a_time(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [public_row(), {"id": "broken"}])
    assert next(read_observations(path)).id == "made-up-1"


# -- the compact form


def in_both_forms(folder: Path, rows: list[Any]) -> tuple[Path, Path]:
    compact = folder / "compact.jsonl"
    compact.write_bytes(b"".join(compact_lines(rows)))
    return write_rows(folder / "public.jsonl", rows), compact


def test_a_public_row_and_its_compact_form_ask_the_same(tmp_path: Path) -> None:
    rows = [
        public_row(),
        public_row(id="b", training__seq_len=32, training__grad_clip=ABSENT, training__kbit_upcast=None),
        public_row(id="c", training__method="full", training__lora=None, software__driver="litgpt"),
        public_row(id="d", kind="after_forward", outcome="oom", repeat_of="b", training__seq_len=None),
    ]
    public, compact = (list(read_observations(path)) for path in in_both_forms(tmp_path, rows))
    assert public == compact
    assert [request_of(row) for row in public[:3]] == [request_of(row) for row in compact[:3]]


def test_what_rows_share_stands_once(tmp_path: Path) -> None:
    rows = [public_row(id=str(number), training__seq_len=number + 1) for number in range(100)]
    public, compact = in_both_forms(tmp_path, rows)
    assert public.stat().st_size > 4 * compact.stat().st_size
    assert compact.read_text().count('"hidden_size"') == 1
    assert "Made up." not in compact.read_text()


@pytest.mark.parametrize(
    ("header", "cause"),
    [
        ({"form": "foretune.observations/2", "tables": {}}, "is not known"),
        ({"form": "foretune.observations/1"}, "is not known"),
        ({"form": "foretune.observations/1", "tables": {"model": 3}}, "is not known"),
        ({"form": "foretune.observations/1", "tables": {"model": []}}, "model: 0 is none of the 0"),
    ],
)
def test_a_broken_compact_file_is_refused(tmp_path: Path, header: dict[str, Any], cause: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [header, public_row(model=0)])
    with pytest.raises(EvidenceError, match=cause):
        list(read_observations(path))


def test_the_projects_rows_are_in_the_package_with_their_sources() -> None:
    assert files("foretune.evidence").joinpath("data/observations.jsonl").is_file()
    assert OWN_OBSERVATIONS.stat().st_size < 1 << 20
    rows = list(read_observations())
    assert len(rows) == 701 + 13
    assert all(row.source.where != "unknown" and row.source.licence for row in rows)
    assert {row.outcome for row in rows} == {"ok", "oom"}
