"""`foretune score`: the table, each row, the JSON document, what is refused, progress."""

import json
from pathlib import Path
from typing import Any

import pytest
from evidence.rows import public_row, write_rows

SUMMARY = {"source", "metric", "n", "median_abs_pct", "mean_abs_pct", "p90_abs_pct", "max_abs_pct", "foreign"}
PREDICTION = {
    "id", "allocated_bytes", "reserved_bytes", "process_bytes", "interval", "verdict", "stack", "foreign",
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> str:
    rows: list[Any] = [
        public_row(),
        public_row(id="made-up-2", software__driver="torchtune", measured={"peak_reserved_bytes": 30_000_000}),
        public_row(id="made-up-3", outcome="failed", measured={}),
        public_row(id="made-up-4", measured={}),
    ]
    return str(write_rows(tmp_path / "rows.jsonl", rows))


def test_json_has_the_promised_keys(call, file: str) -> None:
    called = call("score", file, "--rows", "--json")
    document = called.document
    assert called.code == 0
    assert (document["schema"], document["engine"], document["rows"]) == ("foretune.score/1", "estimated", 4)
    assert document["estimator_version"]
    assert [(row["id"], row["reason"]) for row in document["refused"]] == [
        ("made-up-3", "The run failed (outcome: failed).")
    ]
    assert all(set(line) >= SUMMARY for line in document["summary"])
    assert [row["id"] for row in document["predictions"]] == ["made-up-1", "made-up-2", "made-up-4"]
    for row in document["predictions"]:
        assert set(row) >= PREDICTION
        assert set(row["interval"]) == {"allocated", "reserved", "process"}
        assert all(low <= row[f"{metric}_bytes"] <= high for metric, (low, high) in row["interval"].items())
    assert [row["foreign"] for row in document["predictions"]] == [False, True, False]


def test_summary_has_lines_by_source_and_for_all(call, file: str) -> None:
    summary = call("score", file, "--json").document["summary"]
    assert [(line["source"], line["metric"], line["foreign"], line["n"]) for line in summary] == [
        (source, metric, foreign, 1)
        for source in ("made-up", "ALL")
        for metric, foreign in [("allocated", False), ("reserved", False), ("process", False), ("reserved", True)]
    ]


def test_predictions_stand_in_the_document_only_with_rows(call, file: str) -> None:
    assert "predictions" not in call("score", file, "--json").document


def test_table_for_a_person(call, file: str) -> None:
    out = call("score", file).out
    assert out.startswith("4 rows: 3 predicted, 1 refused\n")
    assert "estimated against measured" in out
    lines = out.splitlines()
    assert any(line.split()[:4] == ["ALL", "foreign", "reserved", "1"] for line in lines)
    assert "     1  The run failed (outcome: failed)." in lines
    assert max(map(len, lines)) <= 80


def test_rows_have_a_line_each(call, file: str) -> None:
    lines = call("score", file, "--rows").out.splitlines()
    rows = [line for line in lines if line.startswith("made-up-")]
    assert [line.split()[0] for line in rows] == ["made-up-1", "made-up-2", "made-up-4", "made-up-3"]
    assert "allocated" in rows[0]
    assert rows[0].endswith(" %)  manual-loop")
    assert rows[1].endswith(" %)  foretune, foreign")
    assert rows[2].endswith("not measured  manual-loop")
    assert rows[3].endswith("refused: The run failed (outcome: failed).")


def test_nothing_that_is_predicted_is_an_answer(call, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [public_row(outcome="failed")])
    called = call("score", str(file))
    assert called.code == 0
    assert "No row is both predicted and measured." in called.out
    assert call("score", str(file), "--json").document["summary"] == []


def test_terminal_counts_the_rows(call, file: str) -> None:
    assert "4 rows" in call("score", file, terminal=True).err
    assert call("score", file).err == ""


def test_broken_files_fail_with_place_and_cause(call, tmp_path: Path) -> None:
    missing = call("score", str(tmp_path / "none.jsonl"))
    assert (missing.code, missing.out) == (9, "")
    assert "none.jsonl: The file does not exist." in missing.err
    broken = tmp_path / "rows.jsonl"
    broken.write_text(json.dumps(public_row()) + "\nnonsense\n")
    error = call("score", str(broken), "--json").document["error"]
    assert (error["code"], error["exit_code"]) == ("evidence", 9)
    assert error["problems"][0]["place"] == f"{broken}:2"
    broken.write_text("")
    assert "There is no observation in it." in call("score", str(broken)).err


@pytest.mark.parametrize("words", [("--engine", "guessed"), ("--workers", "0"), ("a", "b")])
def test_wrong_arguments_are_refused(call, words: tuple[str, ...]) -> None:
    assert call("score", *words).code == 2
