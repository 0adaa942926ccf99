"""Encoded rows on disk: what was written is what is read, whole or not at all; and the cache that keeps them."""

import os
import time
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretune.data import (
    EncodedRows,
    Example,
    StoreWriter,
    cache_folder,
    digest_file,
    open_store,
    prune_stores,
    store_place,
)
from foretune.errors import DataError


def example(line: int, ids: list[int], answer: list[int], traits: int = 0) -> Example:
    return Example(line, array("I", ids), bytes(answer), traits)


TOKENS = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 1))
EXAMPLES = st.lists(
    st.builds(
        lambda line, tokens, traits: example(line, [i for i, _ in tokens], [a for _, a in tokens], traits),
        st.integers(1, 2**40),
        st.lists(TOKENS, min_size=1, max_size=20),
        st.integers(0, 255),
    ),
    max_size=12,
)


def write(folder: Path, parts: list[list[Example]], **meta: object) -> None:
    with StoreWriter(folder.parent) as writer:
        for part in parts:
            writer.append(EncodedRows.of(part))
        writer.publish(folder, meta)


@given(EXAMPLES)
def test_rows_travel_as_they_are(examples: list[Example]) -> None:
    packed = EncodedRows.of(examples)
    assert list(EncodedRows.from_wire(packed.to_wire()).examples()) == examples


@given(st.lists(EXAMPLES, max_size=4))
def test_a_store_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[Example]]
) -> None:
    folder = tmp_path_factory.mktemp("stores") / "rows"
    write(folder, parts, blanks=3)
    store = open_store(folder)
    assert store is not None
    examples = [each for part in parts for each in part]
    assert list(store.examples()) == examples
    assert [store.example(index) for index in range(len(store))] == examples
    assert list(store.lengths()) == [len(each.ids) for each in examples]
    assert [store.length(index) for index in range(len(store))] == [len(each.ids) for each in examples]
    assert store.meta["blanks"] == 3


def interrupted(folder: Path) -> None:
    with StoreWriter(folder.parent) as writer:
        writer.append(EncodedRows.of([example(1, [5, 6], [0, 1])]))
        raise KeyboardInterrupt


def test_a_store_that_is_not_published_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "tokens" / "rows")
    assert list((tmp_path / "tokens").iterdir()) == []


def test_the_first_of_two_writers_stays(tmp_path: Path) -> None:
    one, two = [example(1, [1, 2], [0, 1])], [example(1, [3, 4], [0, 1])]
    with StoreWriter(tmp_path) as writer:
        writer.append(EncodedRows.of(two))
        write(tmp_path / "rows", [one])
        writer.publish(tmp_path / "rows", {})
    store = open_store(tmp_path / "rows")
    assert store is not None
    assert list(store.examples()) == one
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


@pytest.mark.parametrize("name", ["ids.u32", "answers.u8", "rows.u64", "traits.u8", "meta.json"])
@pytest.mark.parametrize("damage", ["missing", "short", "long", "one bit"])
def test_a_damaged_store_is_none_and_makes_room_for_a_whole_one(tmp_path: Path, name: str, damage: str) -> None:
    rows = [example(1, [1, 2], [0, 1]), example(3, [4, 5, 6], [0, 0, 1])]
    write(tmp_path / "rows", [rows])
    file = tmp_path / "rows" / name
    data = file.read_bytes()
    file.unlink()
    flipped = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:] if len(data) > 2 else bytes([data[0] ^ 1]) + data[1:]
    if damage != "missing":
        file.write_bytes({"short": data[:-1], "long": data + data, "one bit": flipped}[damage])
    assert open_store(tmp_path / "rows") is None
    write(tmp_path / "rows", [rows])
    store = open_store(tmp_path / "rows")
    assert store is not None
    assert list(store.examples()) == rows


def test_a_folder_without_a_store_is_none(tmp_path: Path) -> None:
    assert open_store(tmp_path / "rows") is None


# -- cache


def test_the_place_follows_from_all_of_the_identity(tmp_path: Path) -> None:
    places = {store_place(tmp_path, identity) for identity in (["a", 1], ["a", 2], ["a", None], {"a": 1}, {"b": 1})}
    assert len(places) == 5
    assert store_place(tmp_path, {"a": 1, "b": 2}) == store_place(tmp_path, {"b": 2, "a": 1})


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "middle", "old")):
        folder = tmp_path / "tokens" / name
        write(folder, [[example(1, [1] * 1000, [1] * 1000)]])
        os.utime(folder / "meta.json", (1_000_000 - age, 1_000_000 - age))
    for name, age in ((".draft-of-another", 0), (".draft-of-old", 200_000)):
        (tmp_path / "tokens" / name).mkdir()
        os.utime(tmp_path / "tokens" / name, (time.time() - age, time.time() - age))
    assert open_store(tmp_path / "tokens" / "old") is not None  # and so it was used now
    prune_stores(tmp_path, max_bytes=12_000)
    assert {path.name for path in (tmp_path / "tokens").iterdir()} == {"new", "old", ".draft-of-another"}
    prune_stores(tmp_path / "nowhere")


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FORETUNE_CACHE", raising=False)
    assert cache_folder() == tmp_path / "foretune"
    monkeypatch.setenv("FORETUNE_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


def test_a_file_that_cannot_be_digested_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        digest_file(str(tmp_path / "missing"))


def test_a_pipe_is_refused_because_rows_are_read_twice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="the rows are read more than once"):
        digest_file(str(tmp_path / "pipe"))
