"""Fingerprints of tensors: a quick one that stays on the device, and SHA-256 for what is recorded."""

from collections.abc import Iterable
from hashlib import sha256

import torch
from torch import Tensor

__all__ = ["digest", "sha256_of"]

CHUNK = 1 << 20
"""Numbers at once, so that little memory is needed beside the tensor."""
MODULUS = 1 << 64
FACTOR = 0x9E3779B97F4A7C15


def digest(tensor: Tensor) -> int:
    """Return a 64-bit fingerprint of a tensor's bits; a change of any element, or of two at once, changes it.

    Each element is multiplied by an odd number of its place. It tells accidents, not attacks.
    """
    bits = tensor.detach().reshape(-1).view(torch.uint8)
    if bits.numel() % 4 == 0:
        bits = bits.view(torch.int32)
    places = 2 * torch.arange(min(CHUNK, bits.numel()), device=bits.device) + 1
    total = bits.numel()
    for chunk in bits.split(CHUNK):
        total = (total * FACTOR + int((chunk.long() * places[: chunk.numel()]).sum().item())) % MODULUS
    return total


def sha256_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a SHA-256 of names, dtypes, shapes and bits."""
    found = sha256()
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        data = tensor.detach().reshape(-1).view(torch.uint8).cpu()
        for chunk in data.split(CHUNK):
            found.update(chunk.numpy().tobytes())
    return found.hexdigest()
