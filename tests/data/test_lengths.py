"""How long rows are: what the reader takes and refuses, percentiles, padded micro batches, packed rows."""

import json
import math
import random
import tracemalloc
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretune.data import (
    Lengths,
    describe_lengths,
    find_long_rows,
    length_files,
    pack_rows,
    pad_rows,
    read_lengths,
)
from foretune.errors import DataError

ROWS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def lengths_of(rows: Iterable[int]) -> Lengths:
    counted: dict[int, int] = {}
    for row in rows:
        counted[row] = counted.get(row, 0) + 1
    return Lengths.of(counted)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("lengths.jsonl")


# -- the reader


@pytest.mark.parametrize(
    "text",
    [
        "64\n512\n64\n",
        "64\n512\n64",
        "\r\n64\r\n\n  512 \r\n64\r\n",
        '{"tokens": 64}\n{"tokens":512}\n{"length": 64}\n',
        '{"length": 64, "count": 2}\n{"count": 1, "length": 512}\n',
        '{"tokens": 64, "count": 2}\n512\n',
        '{"64": 2, "512": 1}',
        '\n{\n  "512": 1,\n  "64": 2\n}\n',
        "\ufeff64\n64\n512\n",
        '\ufeff{"64": 2, "512": 1}',
        '{"l\\u0065ngth": 64, "count": 2}\n512\n',
    ],
)
def test_all_forms_say_the_same(file: Path, text: str) -> None:
    file.write_bytes(text.encode())
    assert read_lengths(file) == Lengths((64, 512), (2, 1))


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("64\n0\n", 2, "The line is 0, and no whole number from 1 to 1,073,741,824."),
        ("64\n\n-5\n", 3, "The line is -5,"),
        ("1073741825", 1, "The line is 1073741825,"),
        ("9" * 400, 1, "A number of 400 digits is too large."),
        ("9" * 4096, 1, "A number of 4,096 digits is too large."),
        ("9" * 4097, 1, "longer than 4,096 bytes"),
        ("007", 1, "It is not JSON"),
        ("64\n+5", 2, "It is not JSON"),
        ("512.0", 1, "The line is 512.0,"),
        ("1e3", 1, "The line is 1000.0,"),
        ("NaN", 1, "NaN is no number."),
        ("-Infinity", 1, "-Infinity is no number."),
        ("true", 1, "The line is true,"),
        ("null", 1, "The line is null,"),
        ('"512"', 1, 'The line is "512",'),
        ("[512]", 1, "The line is a list,"),
        ("512 64", 1, "It is not JSON"),
        ("64\u2028512", 1, "It is not JSON"),
        ("64\x0c", 1, "It is not JSON"),
        ("{", 1, "It is not JSON"),
        ("{}", 1, "either tokens or length"),
        ('{"count": 3}', 1, "either tokens or length"),
        ('{"tokens": 3, "length": 3}', 1, "either tokens or length"),
        ('64\n{"tokens": 3, "id": 7}', 2, "The key 'id' is not known."),
        ('{"length": 3, "counts": 7}', 1, "The key 'counts' is not known."),
        ('{"length": 3, "length": 4}', 1, "Duplicate key 'length'"),
        ('{"tokens": NaN}', 1, "NaN is no number."),
        ('{"tokens": 1.5}', 1, "tokens is 1.5,"),
        ('{"tokens": {}}', 1, "tokens is an object,"),
        ('{"length": 5, "count": 0}', 1, "count is 0,"),
        ('{"length": 5, "count": 1099511627777}', 1, "count is 1099511627777,"),
        ("[" * 4000, 1, "nested more than 64 deep"),
        ('{"512": 0}', 1, "The count of 512 is 0,"),
        ('{\n"512": 3,\n"64": true\n}', 3, "The count of 64 is true,"),
        ('{\n"512": 3,\n"-64": 1\n}', 3, "The key '-64' is no number from 1 to 1,073,741,824."),
        ('{\n"512": 3,\n"064": 1\n}', 3, "The key '064'"),
        ('{\n"512": 3,\n"1073741825": 1\n}', 3, "The key '1073741825'"),
        ('{\n"512": 3,\n"length": 1\n}', 3, "The key 'length'"),
        ('{\n"512": 3,\n"64": 1,\n"512": 3}', 4, "Duplicate key '512'"),
        ('{\n"512": 3,\n"64": }', 3, "It is not JSON"),
        ('{"512": 3}\n{"64": 1}', 2, "It is not JSON: Extra data (column 1)."),
        ('{"512": ' + "[" * 100_000, 1, "nested more than 64 deep"),
    ],
)
def test_what_is_no_length_is_refused_with_its_line(file: Path, text: str, line: int, why: str) -> None:
    file.write_bytes(text.encode())
    with pytest.raises(DataError) as caught:
        read_lengths(file)
    (problem,) = caught.value.problems
    assert problem.place == f"{file}:{line}"
    assert why in problem.message
    assert problem.hint


@pytest.mark.parametrize(
    ("data", "line"),
    [(b"64\n\xff\xfe\n", 2), (b'64\n{"tok\xc3": 5}', 2), ("64\n".encode("utf-16"), 1), (b'{\n"5": 1,\n"\xff": 1}', 3)],
)
def test_what_is_not_utf_8_is_refused_with_its_line(file: Path, data: bytes, line: int) -> None:
    file.write_bytes(data)
    with pytest.raises(DataError, match=f"^{file}:{line}: It is not (UTF-8|JSON)"):
        read_lengths(file)


@pytest.mark.parametrize("data", [b"", b"\n\n  \r\n", b"\xef\xbb\xbf"])
def test_file_without_a_length_is_refused(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"^lengths\.jsonl: There is no length in it\."):
        read_lengths(file)


@pytest.mark.parametrize("path", ["nowhere.jsonl", ".", "a\x00b", "x" * 5000])
def test_file_that_cannot_be_read_is_refused(file: Path, path: str) -> None:
    with pytest.raises(DataError, match=r"The (lengths cannot be read: |file does not exist)") as caught:
        read_lengths(path)
    assert (caught.value.exit_code, caught.value.code) == (5, "data")


def test_more_tokens_than_a_json_number_holds_are_refused(file: Path) -> None:
    file.write_text('{"length": 1073741824, "count": 1099511627776}\n' * 4)
    with pytest.raises(DataError, match=r"2\^62 tokens or more in all"):
        read_lengths(file)


def test_an_endless_line_is_refused() -> None:
    with pytest.raises(DataError, match=r"^/dev/zero:1: The line is longer"):
        read_lengths("/dev/zero")


@pytest.mark.parametrize("form", ["{}\n", '{{"length": {}}}\n'])
def test_lines_are_counted_across_blocks(file: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(length_files, "BLOCK", 7)
    rows = [random.Random(1).randrange(1, 300) for _ in range(200)]
    file.write_text("".join(form.format(row) for row in rows))
    assert read_lengths(file) == lengths_of(rows)
    file.write_text("".join(form.format(row) for row in [*rows, "x", *rows]))
    with pytest.raises(DataError, match=r":201: It is not JSON"):
        read_lengths(file)


def test_the_first_wrong_line_is_named(file: Path) -> None:
    file.write_text("5\n-1\n5\n-2\n-1\n")
    with pytest.raises(DataError, match=r":2: The line is -1"):
        read_lengths(file)


def test_too_many_different_lengths_are_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_files, "MAX_DISTINCT", 3)
    file.write_text("5\n6\n7\n5\n6\n")
    assert read_lengths(file).num_rows == 5
    file.write_text("5\n6\n7\n5\n8\n")
    with pytest.raises(DataError, match=r":5: It has more than 3 different lengths\."):
        read_lengths(file)
    file.write_text('{"5": 1, "6": 1,\n"7": 1,\n"8": 1}')
    with pytest.raises(DataError, match=r":3: It has more than 3 different lengths\."):
        read_lengths(file)


def test_an_object_that_is_too_long_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_files, "MAX_OBJECT", 20)
    file.write_text('{"5": 1, "6": 1, "7": 1, "8": 1}')
    with pytest.raises(DataError, match="longer than 20 bytes"):
        read_lengths(file)


def test_memory_does_not_grow_with_the_rows(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_files, "BLOCK", 1 << 16)
    peaks = []
    for times in (1, 8):
        file.write_text("".join(f"{row}\n" for row in range(1, 2000)) * 20 * times)
        tracemalloc.start()
        assert read_lengths(file).num_rows == 1999 * 20 * times
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]


@given(rows=ROWS, form=st.sampled_from(["line", "tokens", "length", "histogram", "object"]))
def test_a_histogram_is_its_list(rows: list[int], form: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    file, counts = tmp_path_factory.mktemp("x") / "f", {row: rows.count(row) for row in rows}
    texts: dict[str, Any] = {
        "line": rows,
        "tokens": [{"tokens": row} for row in rows],
        "length": [{"length": row} for row in rows],
        "histogram": [{"length": row, "count": count} for row, count in counts.items()],
        "object": [{str(row): count for row, count in counts.items()}],
    }
    file.write_text("\n".join(map(json.dumps, texts[form])))
    assert read_lengths(file) == lengths_of(rows)


# -- the arithmetic


def test_percentiles_of_a_table_by_hand() -> None:
    """Ten rows: the ranks are 5 for p50 and 10 for p95 (9.5 rounded up)."""
    lengths = lengths_of([10, 20, 30, 40, 50, 60, 70, 80, 90, 100])
    stats = describe_lengths(lengths)
    assert (stats.p50, stats.p95, stats.longest, stats.shortest) == (50, 100, 100, 10)
    assert (stats.num_rows, stats.num_tokens, stats.mean_tokens) == (10, 550, 55.0)
    assert [lengths.percentile(percent) for percent in (0, 1, 10, 11, 51, 90, 91, 100)] == [
        10, 10, 10, 20, 60, 90, 100, 100,
    ]  # fmt: skip
    assert lengths_of([7]).percentile(50) == lengths_of([7]).percentile(95) == 7
    assert lengths_of(range(1, 101)).percentile(95) == 95
    assert Lengths((1, 2), (10**12, 10**12)).percentile(50) == 1


def test_padding_of_three_rows_by_hand() -> None:
    """Rows of 10, 20 and 60: of the pairs two have 60 as the longest and one 20."""
    padding = pad_rows(lengths_of([10, 20, 60]), 2)
    assert padding.mean_tokens == pytest.approx((60 + 60 + 20) / 3)
    assert (padding.worst_tokens, padding.order) == (60, "random")
    assert padding.real_share == pytest.approx(30 / (140 / 3))
    ordered = pad_rows(lengths_of([10, 20, 60]), 2, is_sorted=True)
    assert (ordered.mean_tokens, ordered.worst_tokens) == ((20 + 20 + 60) / 3, 60)
    assert (ordered.order, ordered.real_share) == ("sorted by length", pytest.approx(0.9))


def test_packing_of_six_rows_by_hand() -> None:
    """Room for 10: 8+2, 7+3, 5+5; and for 12: 8+3, 7+5, 5+2."""
    rows = lengths_of([8, 7, 5, 5, 3, 2])
    assert (pack_rows(rows, 10).num_rows, pack_rows(rows, 10).real_share) == (3, 1.0)
    assert (pack_rows(rows, 12).num_rows, pack_rows(rows, 12).real_share) == (3, 30 / 36)
    assert pack_rows(Lengths((3,), (10**9,)), 10).num_rows == math.ceil(10**9 / 3)


def test_long_rows_by_hand() -> None:
    found = find_long_rows(lengths_of([5, 10, 11, 30]), 10)
    assert (found.num_rows, found.share, found.tokens_beyond) == (2, 0.5, 21)


@given(ROWS, st.integers(0, 100))
def test_percentile_is_that_of_the_sorted_list(rows: list[int], percent: int) -> None:
    ordered = sorted(rows)
    least = next(row for row in ordered if 100 * sum(other <= row for other in ordered) >= percent * len(ordered))
    assert lengths_of(rows).percentile(percent) == least


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 12))
def test_mean_longest_is_that_of_all_draws(rows: list[int], size: int) -> None:
    draws = combinations(rows, min(size, len(rows)))
    assert pad_rows(lengths_of(rows), size).mean_tokens == pytest.approx(fmean(map(max, draws)))


@given(ROWS, st.integers(1, 50))
def test_sorted_micro_batches_are_those_of_the_sorted_list(rows: list[int], size: int) -> None:
    ordered = sorted(rows)
    batches = [ordered[i : i + size] for i in range(0, len(rows), size)]
    padded = sum(len(batch) * batch[-1] for batch in batches)
    padding = pad_rows(lengths_of(rows), size, is_sorted=True)
    assert padding.mean_tokens == pytest.approx(padded / len(rows))
    assert padding.real_share == pytest.approx(sum(rows) / padded)


@given(ROWS, st.integers(1, 50))
def test_padding_lies_between_the_mean_and_the_longest_row(rows: list[int], size: int) -> None:
    lengths = lengths_of(rows)
    random_order, ordered = pad_rows(lengths, size), pad_rows(lengths, size, is_sorted=True)
    assert fmean(rows) <= random_order.mean_tokens * (1 + 1e-12)
    assert random_order.mean_tokens <= max(rows) * (1 + 1e-12)
    assert 0 < random_order.real_share <= ordered.real_share * (1 + 1e-12) <= 1 + 1e-12 or len(rows) % size
    assert random_order.worst_tokens == ordered.worst_tokens == max(rows)


@given(ROWS, st.integers(60, 200))
def test_packing_is_best_fit_decreasing_row_by_row(rows: list[int], row_tokens: int) -> None:
    room: list[int] = []
    for row in sorted(rows, reverse=True):
        fitting = [size for size in room if size >= row]
        if fitting:
            room.remove(min(fitting))
        room.append((min(fitting) if fitting else row_tokens) - row)
    packing = pack_rows(lengths_of(rows), row_tokens)
    assert packing.num_rows == len(room)
    assert packing.real_share == pytest.approx(sum(rows) / (len(room) * row_tokens))


@given(ROWS, st.integers(1, 70))
def test_cutting_is_that_of_the_list(rows: list[int], limit: int) -> None:
    lengths = lengths_of(rows)
    assert lengths.cut(limit) == lengths_of(min(row, limit) for row in rows)
    found = find_long_rows(lengths, limit)
    assert found.num_rows == sum(row > limit for row in rows)
    assert found.tokens_beyond == sum(max(row - limit, 0) for row in rows)


def test_a_billion_rows_cost_no_more_than_their_lengths() -> None:
    lengths = Lengths(tuple(range(1, 2001)), (10**9,) * 2000)
    assert pad_rows(lengths, 1).mean_tokens == 1000.5
    assert pad_rows(lengths, 1 << 20).mean_tokens == pytest.approx(2000)
    # Drawn from so many, two rows are as good as independent: the mean of the larger is (4n - 1)(n + 1) / 6n.
    assert pad_rows(lengths, 2).mean_tokens == pytest.approx(7999 * 2001 / 12000, rel=1e-6)
    assert pack_rows(lengths, 2000).real_share == pytest.approx(1, abs=1e-3)
