"""Small sums on a device whose result is known: does it compute, give memory back, and hold 4-bit weights."""

from typing import Any, Literal

from foretune.errors import VerificationError
from foretune.units import MIB

__all__ = ["check_allocator", "check_matmul", "check_nf4"]

WIDTH = 512
TOLERANCES = {"bf16": 0.02, "fp16": 0.004}
"""Of the largest element: four roundings of the result's dtype (2^-8 and 2^-11 each)."""
NF4_TOLERANCE = 0.15
"""Of the largest element: 4-bit weights are rounded to 16 values a block; far less is usual, noise alone gives more."""
PROBE_BYTES = 256 * MIB


def check_matmul(device: str, dtype: Literal["bf16", "fp16"]) -> float:
    """Multiply in 16 bits and in fp32, and return the largest difference as a share of the largest element.

    Raises VerificationError where it is more than rounding.
    """
    import torch

    one, two = _operands(device)
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    exact = one.to(narrow).float() @ two.to(narrow).float()
    found = (one.to(narrow) @ two.to(narrow)).float()
    return _within(found, exact, TOLERANCES[dtype], f"a {dtype} product on {device}")


def check_nf4(device: str) -> float:
    """Run a 4-bit layer beside the same one in fp32; returns as `check_matmul`. Raises VerificationError."""
    import torch
    from bitsandbytes.nn import Linear4bit

    weights, rows = _operands(device)
    layer: Any = Linear4bit(WIDTH, WIDTH, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer.weight.data = weights.cpu().clone()
    layer = layer.to(device)  # here it is quantized
    with torch.no_grad():
        found = layer(rows)
    return _within(found.float(), rows @ weights.T, NF4_TOLERANCE, f"an nf4 layer on {device}")


def check_allocator() -> int:
    """Take a quarter of a GiB on the first card and give it back; returns the bytes that the driver saw go.

    Raises VerificationError where torch or the driver did not see it come and go.
    """
    import torch

    torch.cuda.empty_cache()
    before, free_before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    block = torch.empty(PROBE_BYTES, dtype=torch.uint8, device="cuda")
    taken, seen = torch.cuda.memory_allocated() - before, free_before - torch.cuda.mem_get_info()[0]
    del block
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated() - before
    if taken < PROBE_BYTES or seen < PROBE_BYTES or left != 0:
        raise VerificationError(
            f"Of {PROBE_BYTES} bytes torch counted {taken}, the driver {seen}, and {left} stayed behind.",
            hint="Another program may have changed the card's memory meanwhile: try again.",
        )
    return seen


def _operands(device: str) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, generator=generator).to(device) for _ in range(2)]


def _within(found: Any, exact: Any, tolerance: float, what: str) -> float:
    difference = float((found - exact).abs().max() / exact.abs().max())
    if not difference <= tolerance:  # NaN too
        raise VerificationError(
            f"Of {what} the largest error is {difference:.3g} of the largest element; rounding explains {tolerance:g}.",
            hint="The card, its driver or the build of torch does not compute as it should.",
        )
    return difference
