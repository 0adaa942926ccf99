"""Copies of safetensors files in which some tensors have other values: same names, formats, shapes and places.

One tensor is in memory at a time; all other bytes are those of the source.
"""

import errno
from collections.abc import Callable, Collection
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from foretune.durable import at
from foretune.errors import SaveError
from foretune.models import StoredTensor, read_safetensors_header

__all__ = ["compare_patched", "write_patched"]

CHUNK_BYTES = 16 << 20


def write_patched(
    source: Path, target: Path, changed: Collection[str], make: Callable[[str], Tensor]
) -> dict[str, str]:
    """Copy a file with some tensors made anew, in the order in which they lie in it; return their SHA-256.

    `make` gives a tensor of the stored format and shape. Raises OSError.
    """
    header = read_safetensors_header(source)
    places = sorted((header[name].start, name) for name in changed if name in header)
    digests, done = {}, 0
    at(f"write {target.name}")
    with source.open("rb") as original, target.open("xb") as copy:
        for start, name in places:
            _copy(original, copy, start - done)
            data = _bytes_of(make(name), header[name])
            digests[name] = sha256(data).hexdigest()
            at(f"write a tensor of {target.name}")
            copy.write(data)
            done = start + header[name].num_bytes
            original.seek(done)
        _copy(original, copy, source.stat().st_size - done)
    return digests


def compare_patched(source: Path, target: Path, digests: dict[str, str]) -> None:
    """Read a copy back: tensors made anew as they were made, everything else as in the source. Raises SaveError."""
    if source.stat().st_size != target.stat().st_size:
        raise _other(target, "its size")
    header = read_safetensors_header(source)
    places = sorted((header[name].start, name) for name in digests)
    done = 0
    with source.open("rb") as original, target.open("rb") as copy:
        for start, name in places:
            _require_equal(original, copy, start - done, target)
            done = start + header[name].num_bytes
            original.seek(done)
            if sha256(copy.read(header[name].num_bytes)).hexdigest() != digests[name]:
                raise _other(target, name)
        _require_equal(original, copy, source.stat().st_size - done, target)


def _copy(source: BinaryIO, target: BinaryIO, num_bytes: int) -> None:
    while num_bytes > 0:
        data = source.read(min(num_bytes, CHUNK_BYTES))
        if not data:
            raise OSError(errno.EIO, f"{source.name} became shorter while it was read")
        target.write(data)
        num_bytes -= len(data)


def _require_equal(source: BinaryIO, target: BinaryIO, num_bytes: int, path: Path) -> None:
    while num_bytes > 0:
        size = min(num_bytes, CHUNK_BYTES)
        data = source.read(size)
        if not data or target.read(size) != data:
            raise _other(path, "a tensor that was only copied")
        num_bytes -= len(data)


def _bytes_of(tensor: Tensor, entry: StoredTensor) -> memoryview:
    data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    assert (tuple(tensor.shape), len(data)) == (entry.shape, entry.num_bytes)
    return data


def _other(path: Path, what: str) -> SaveError:
    return SaveError(
        f"{path.name} is not what was merged: {what} differs after writing.",
        hint="Nothing was handed over. Check the disk; if it is sound, please report this.",
    )
