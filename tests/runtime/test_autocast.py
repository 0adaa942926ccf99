"""Autocast on tensors without data, held against torch's own on the CPU where both have it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretune.runtime.trace.autocast import Autocast

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w),
    "matmul": lambda x, w: x @ w.t(),
    "torch.matmul": lambda x, w: torch.matmul(x, w.t()),
    "method": lambda x, w: x.matmul(w.t()),
    "bmm": lambda x, w: torch.bmm(x[None], w.t()[None]),
    "layer_norm": lambda x, w: F.layer_norm(x, (8,), w[0], w[1]),
    "cross_entropy": lambda x, w: F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device)),
    "softmax": lambda x, w: torch.softmax(x, -1),
    "softmax with a dtype": lambda x, w: torch.softmax(x, -1, dtype=torch.float64),
    "add": lambda x, w: x + w[:4],
    "silu": lambda x, w: F.silu(x),
    "power": lambda x, w: x**2,
}
CUDA = {
    "linear": torch.bfloat16,
    "matmul": torch.bfloat16,
    "torch.matmul": torch.bfloat16,
    "method": torch.bfloat16,
    "bmm": torch.bfloat16,
    "layer_norm": torch.float32,
    "cross_entropy": torch.float32,
    "softmax": torch.float32,
    "softmax with a dtype": torch.float64,
    "power": torch.float32,
}
"""What CUDA's lists say (aten/src/ATen/autocast_mode.h); everything else keeps its inputs' dtype."""


def tensors(dtype: torch.dtype, device: str = "meta") -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 8, dtype=dtype, device=device), torch.zeros(8, 8, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_function_runs_in_the_precision_of_cudas_lists(name: str, dtype: torch.dtype) -> None:
    x, w = tensors(dtype)
    with Autocast(torch.bfloat16):
        result = OPERATIONS[name](x, w)
    assert result.dtype == CUDA.get(name, dtype)


@pytest.mark.parametrize("name", ["linear", "matmul", "bmm", "add", "silu"])
def test_products_are_cast_as_torchs_own_autocast_casts_them(name: str) -> None:
    x, w = tensors(torch.float32, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        theirs = OPERATIONS[name](x, w)
    with Autocast(torch.bfloat16):
        ours = OPERATIONS[name](*tensors(torch.float32))
    assert ours.dtype == theirs.dtype


def test_a_trained_leaf_is_cast_once_until_the_outermost_block_ends() -> None:
    weight, frozen = nn.Parameter(tensors(torch.float32)[1]), tensors(torch.float32)[1]
    autocast = Autocast(torch.bfloat16)
    with autocast:
        with autocast:
            first = autocast.lowered(weight)
        assert autocast.lowered(weight) is first
        assert autocast.lowered(frozen) is not autocast.lowered(frozen)
    with autocast:
        assert autocast.lowered(weight) is not first


def test_nothing_of_it_outlives_an_exception() -> None:
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    x, w = tensors(torch.float32)

    def fail() -> None:
        with Autocast(torch.bfloat16):
            assert torch.is_autocast_enabled("cuda")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")) == before
    assert F.linear(x, w).dtype == torch.float32


def test_a_function_is_carried_out_of_the_block_or_left_out_of_it() -> None:
    autocast, (x, w) = Autocast(torch.bfloat16), tensors(torch.float32)
    plain = autocast.carried(F.linear)
    with autocast:
        carried = autocast.carried(F.linear)
        assert autocast.left_out(F.linear)(x, w).dtype == torch.float32
        assert F.linear(x, w).dtype == torch.bfloat16
    assert carried(x, w).dtype == torch.bfloat16
    assert plain(x, w).dtype == torch.float32
