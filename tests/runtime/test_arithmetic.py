"""Sums whose result is known; the card itself is looked at where there is one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretune.errors import VerificationError
from foretune.runtime import arithmetic
from foretune.runtime.arithmetic import check_allocator, check_matmul, check_nf4


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_narrow_product_is_the_exact_one_but_for_rounding(dtype: Any) -> None:
    assert 0 < check_matmul("cpu", dtype) < arithmetic.TOLERANCES[dtype]


@pytest.mark.parametrize("planted", [float("nan"), 1.0])
def test_a_product_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch, planted: float) -> None:
    within = arithmetic._within
    monkeypatch.setattr(arithmetic, "_within", lambda found, *rest: within(found + 30 * planted, *rest))
    with pytest.raises(VerificationError, match="largest error"):
        check_matmul("cpu", "bf16")


def test_a_four_bit_layer_is_near_the_exact_one() -> None:
    assert 0.01 < check_nf4("cpu") < arithmetic.NF4_TOLERANCE


class Card:
    """A card whose driver and allocator see what a test plants."""

    def __init__(self, *, leaks: int = 0, unseen: int = 0) -> None:
        self.held, self.leaks, self.unseen = 0, leaks, unseen

    def take(self, size: int, **_: Any) -> Any:
        self.held = size
        return SimpleNamespace()

    def memory_allocated(self) -> int:
        return self.held

    def mem_get_info(self) -> tuple[int, int]:
        return (1 << 40) - max(self.held - self.unseen, 0), 1 << 40

    def empty_cache(self) -> None:
        self.held = min(self.held, self.leaks)


@pytest.mark.parametrize(("changes", "passes"), [({}, True), ({"leaks": 9}, False), ({"unseen": 1}, False)])
def test_memory_that_does_not_come_and_go_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], passes: bool
) -> None:
    card = Card(**changes)
    monkeypatch.setattr(torch, "empty", card.take)
    for name in ("memory_allocated", "mem_get_info", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, getattr(card, name))
    if passes:
        assert check_allocator() == arithmetic.PROBE_BYTES
    else:
        with pytest.raises(VerificationError, match="bytes torch counted"):
            check_allocator()


@pytest.mark.gpu
def test_a_card_computes_and_gives_memory_back() -> None:
    assert check_allocator() >= arithmetic.PROBE_BYTES
    assert check_matmul("cuda", "fp16") < arithmetic.TOLERANCES["fp16"]
    assert check_nf4("cuda") < arithmetic.NF4_TOLERANCE
