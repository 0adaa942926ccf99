"""Encoded rows: in memory as they come from an encoder, and on disk, where a data set of any size can be kept.

A store is a folder of four files: the ids of all rows one after another (4 bytes each), a byte for each of them that
says whether it is an answer's, for each row its line and where its tokens end (8 bytes each) and its traits (a byte);
and a description with the SHA-256 of each. They are read through memory maps, so a row costs what it holds. A store is
written beside its place and gets its name last: it is there whole or not at all.
"""

import mmap
import os
import shutil
import sys
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import file_digest, sha256
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, BinaryIO, NamedTuple, Self

import msgspec

from foretune.data.encode import Example

__all__ = ["STORE_FORMAT", "EncodedRows", "StoreWriter", "TokenStore", "open_store"]

STORE_FORMAT = 1
IDS, ANSWERS, ROWS, TRAITS, META = "ids.u32", "answers.u8", "rows.u64", "traits.u8", "meta.json"
PARTS = (IDS, ANSWERS, ROWS, TRAITS)
DRAFT = ".draft-"


class EncodedRows(NamedTuple):
    """Some rows in their order, packed: what travels between processes."""

    lines: "array[int]"
    lengths: "array[int]"
    """Tokens of each row."""
    ids: "array[int]"
    """Those of all rows, one after another."""
    answers: bytes
    """A byte for each id: 1 where it belongs to an answer."""
    traits: bytes
    """A byte for each row: the bits of `Trait`."""

    @classmethod
    def of(cls, examples: Iterable[Example]) -> "EncodedRows":
        """Pack examples."""
        lines, lengths, ids, answers, traits = array("Q"), array("I"), array("I"), bytearray(), bytearray()
        for example in examples:
            lines.append(example.line)
            lengths.append(len(example.ids))
            ids.extend(example.ids)
            answers += example.answer
            traits.append(example.traits)
        return cls(lines, lengths, ids, bytes(answers), bytes(traits))

    def examples(self) -> Iterator[Example]:
        """Unpack them."""
        start = 0
        for line, length, traits in zip(self.lines, self.lengths, self.traits, strict=True):
            stop = start + length
            yield Example(line, self.ids[start:stop], self.answers[start:stop], traits)
            start = stop

    def to_wire(self) -> tuple[bytes, ...]:
        """Return bytes that `from_wire` of this machine reads."""
        return (self.lines.tobytes(), self.lengths.tobytes(), self.ids.tobytes(), self.answers, self.traits)

    @classmethod
    def from_wire(cls, parts: Iterable[bytes]) -> "EncodedRows":
        """Read what `to_wire` gave."""
        lines, lengths, ids, answers, traits = parts
        return cls(array("Q", lines), array("I", lengths), array("I", ids), answers, traits)


class StoreWriter:
    """Writes a store beside its place; `publish` gives it its name, leaving without removes it."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._num_tokens = self._num_rows = 0
        self._digests = {name: sha256() for name in PARTS}

    def __enter__(self) -> Self:
        self._parent.mkdir(parents=True, exist_ok=True)
        self._draft = Path(mkdtemp(prefix=DRAFT, dir=self._parent))
        self._files: dict[str, BinaryIO] = {name: (self._draft / name).open("xb") for name in PARTS}
        return self

    def append(self, rows: EncodedRows) -> None:
        """Add rows. Raises OSError where the disk does not take them."""
        places = array("Q")
        for line, length in zip(rows.lines, rows.lengths, strict=True):
            self._num_tokens += length
            places.extend((line, self._num_tokens))
        self._num_rows += len(rows.lines)
        for name, data in ((IDS, rows.ids), (ANSWERS, rows.answers), (ROWS, places), (TRAITS, rows.traits)):
            self._files[name].write(data)
            self._digests[name].update(data)

    def publish(self, place: Path, meta: dict[str, Any]) -> None:
        """Finish the store under its name; a whole one that has come to be meanwhile stays. Raises OSError."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        described = {
            "format": STORE_FORMAT,
            "byteorder": sys.byteorder,
            "rows": self._num_rows,
            "tokens": self._num_tokens,
            "sha256": {name: digest.hexdigest() for name, digest in self._digests.items()},
            "meta": meta,
        }
        text = msgspec.json.encode({"described": described, "sha256": _digest_of(described)})
        (self._draft / META).write_bytes(text)
        if place.exists() and open_store(place) is None:
            shutil.rmtree(place, ignore_errors=True)
        with suppress(OSError):  # a folder that is not empty cannot be replaced: another process was first
            self._draft.rename(place)

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            with suppress(OSError):
                file.close()
        shutil.rmtree(self._draft, ignore_errors=True)


def _digest_of(described: Any) -> str:
    return sha256(msgspec.json.encode(described, order="sorted")).hexdigest()


class TokenStore:
    """A store that is there, read through memory maps."""

    def __init__(self, folder: Path, described: dict[str, Any]) -> None:
        self.folder = folder
        self.meta: dict[str, Any] = described["meta"]
        """What was written beside the rows."""
        self._maps: list[mmap.mmap] = []
        self._ids = self._view(folder / IDS).cast("I")
        self._answers = self._view(folder / ANSWERS)
        self._rows = self._view(folder / ROWS).cast("Q")
        self._traits = self._view(folder / TRAITS)
        sizes = (len(self._ids), len(self._answers), len(self._rows), len(self._traits))
        rows, tokens = described["rows"], described["tokens"]
        if sizes != (tokens, tokens, 2 * rows, rows):
            raise ValueError("the files of the store do not fit together")

    def _view(self, path: Path) -> memoryview:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return memoryview(b"")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._maps.append(mapped)
        return memoryview(mapped)

    def __len__(self) -> int:
        return len(self._traits)

    def length(self, index: int) -> int:
        """Return the tokens of a row."""
        return int(self._rows[2 * index + 1] - (self._rows[2 * index - 1] if index else 0))

    def lengths(self) -> "array[int]":
        """Return the tokens of every row, 4 bytes each."""
        ends = self._rows[1::2]
        return array("I", (stop - start for start, stop in pairwise((0, *ends)))) if len(ends) else array("I")

    def example(self, index: int) -> Example:
        """Return a row. Raises IndexError."""
        start = self._rows[2 * index - 1] if index else 0
        stop = self._rows[2 * index + 1]
        ids = array("I", self._ids[start:stop].tobytes())
        return Example(self._rows[2 * index], ids, bytes(self._answers[start:stop]), self._traits[index])

    def examples(self) -> Iterator[Example]:
        """Yield all rows in the order of the file."""
        return map(self.example, range(len(self)))


def open_store(folder: Path) -> TokenStore | None:
    """Open a store, and note that it is used; None where there is none that is whole and that this version can read."""
    try:
        found = msgspec.json.decode((folder / META).read_bytes(), type=dict[str, Any])
        described = found["described"]
        if found["sha256"] != _digest_of(described):
            return None
        if described["format"] != STORE_FORMAT or described["byteorder"] != sys.byteorder:
            return None
        for name in PARTS:
            with (folder / name).open("rb") as file:
                if file_digest(file, "sha256").hexdigest() != described["sha256"][name]:
                    return None
        store = TokenStore(folder, described)
    except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError):
        return None
    with suppress(OSError):
        os.utime(folder / META)
    return store
