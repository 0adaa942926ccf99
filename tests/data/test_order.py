"""Which rows stand together: the same everywhere and for ever, each row once in an epoch, no packed row too full."""

import os
import random
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretune.contract import BatchSettings
from foretune.data import (
    EpochPlan,
    Lengths,
    MicroBatch,
    num_batches,
    pack_rows,
    pad_rows,
    plan_batches,
    shuffled,
    split_rows,
)
from foretune.errors import ConfigError

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=60)
SEEDS = st.integers(0, 2**32 - 1)
EPOCHS = st.integers(0, 1000)
FORMS = st.sampled_from([{}, {"sort_by_length": True}, {"packing": True}])
SETTINGS = st.builds(
    lambda size, tokens, form: BatchSettings(micro_batch_size=size, sequence_length=tokens, **form),
    st.integers(1, 9),
    st.integers(60, 200),
    FORMS,
)
SHUFFLED = BatchSettings(micro_batch_size=4)
SORTED = BatchSettings(micro_batch_size=4, sort_by_length=True)
PACKED = BatchSettings(micro_batch_size=4, sequence_length=100, packing=True)
MANY = [1 + (37 * row) % 60 for row in range(600)]


def rows_of(plan: Iterable[Iterable[Iterable[int]]]) -> list[int]:
    return list(chain.from_iterable(chain.from_iterable(plan)))


def histogram(lengths: Iterable[int]) -> Lengths:
    return Lengths.of(Counter(lengths))


def rooms_by_brute_force(lengths: list[int], row_tokens: int) -> list[int]:
    """Best-fit decreasing by trying every packed row for every row: the room that is left in each."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [place for place, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda place: rooms[place])] -= length
        else:
            rooms.append(row_tokens - length)
    return rooms


# -- the order of rows


@given(st.integers(0, 300), SEEDS, EPOCHS)
def test_an_order_has_each_row_once(num_rows: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(num_rows, seed, epoch)) == list(range(num_rows))


def test_orders_stay_what_they_were() -> None:
    """No golden numbers but a seal: if they change, a run that was interrupted goes on in another order."""
    assert shuffled(20, 0, 0).tolist() == [14, 11, 17, 10, 2, 19, 4, 9, 1, 18, 3, 13, 8, 5, 16, 7, 15, 12, 0, 6]
    assert shuffled(20, 0, 1).tolist() == [12, 7, 8, 16, 18, 9, 19, 1, 4, 2, 5, 11, 10, 0, 3, 14, 17, 15, 13, 6]
    assert shuffled(20, 2**32 - 1, 0).tolist() == [3, 14, 8, 1, 13, 7, 0, 15, 6, 11, 16, 10, 12, 19, 4, 9, 5, 17, 18, 2]
    assert shuffled(10**5, 7, 3)[:8].tolist() == [15223, 94179, 98413, 92023, 19589, 96419, 20003, 3548]
    assert [part.tolist() for part in split_rows(12, 0.25, 0)] == [[0, 1, 3, 4, 5, 6, 8, 9, 11], [2, 7, 10]]


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        (SHUFFLED, ((354,), (0,), (537,), (219,))),
        (SORTED, ((418,), (58,), (551,), (131,))),
        (PACKED, ((515, 95, 591), (301, 121, 299), (530, 324), (526, 346, 391, 586, 466))),
    ],
)
def test_plans_stay_what_they_were(settings: BatchSettings, first: MicroBatch) -> None:
    """A seal too: of the first micro batch."""
    assert plan_batches(MANY, settings, seed=5, epoch=2)[0] == first


def test_seeds_and_epochs_that_read_alike_are_told_apart() -> None:
    assert len({tuple(shuffled(50, seed, epoch)) for seed in range(12) for epoch in range(12)}) == 144


def test_each_place_is_as_likely_for_each_row() -> None:
    """Of 6 rows in 3,000 epochs; a fair count lies within five standard deviations of 500."""
    placed = Counter(chain.from_iterable(enumerate(shuffled(6, 1, epoch)) for epoch in range(3000)))
    assert len(placed) == 36
    assert all(abs(count - 500) < 5 * (3000 * 5 / 36) ** 0.5 for count in placed.values())


def test_an_order_needs_little_more_memory_than_its_array() -> None:
    tracemalloc.start()
    order = shuffled(300_000, 1, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.2 * len(order) * order.itemsize


# -- held-out rows


@given(st.integers(2, 300), st.floats(0.001, 0.999), SEEDS)
def test_a_split_has_each_row_on_one_side(num_rows: int, share: float, seed: int) -> None:
    if not 0 < round(num_rows * share) < num_rows:
        return
    train, held_out = split_rows(num_rows, share, seed)
    assert sorted([*train, *held_out]) == list(range(num_rows))
    assert list(train) == sorted(train)
    assert list(held_out) == sorted(held_out)
    assert abs(len(held_out) - num_rows * share) <= 0.5


def test_the_seed_chooses_what_is_held_out() -> None:
    assert split_rows(100, 0.1, 1) == split_rows(100, 0.1, 1)
    assert len({tuple(split_rows(100, 0.1, seed)[1]) for seed in range(20)}) == 20


@pytest.mark.parametrize(
    ("num_rows", "share", "why"),
    [
        (4, 0.1, "evaluation.split is 0.1: of 4 rows none is held out."),
        (1, 0.4, "evaluation.split is 0.4: of 1 row none is held out."),
        (0, 0.5, "evaluation.split is 0.5: of 0 rows none is held out."),
        (1, 0.6, "evaluation.split is 0.6: of 1 row none is left to train on."),
        (40, 0.99, "evaluation.split is 0.99: of 40 rows none is left to train on."),
    ],
)
def test_a_side_without_a_row_is_refused(num_rows: int, share: float, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_rows(num_rows, share, 0)
    (problem,) = caught.value.problems
    assert (problem.message, problem.field) == (why, "evaluation.split")
    assert problem.hint


# -- micro batches


@given(LENGTHS, SETTINGS, SEEDS, EPOCHS)
def test_each_row_stands_once_in_an_epoch(lengths: list[int], settings: BatchSettings, seed: int, epoch: int) -> None:
    plan = plan_batches(lengths, settings, seed=seed, epoch=epoch)
    assert sorted(rows_of(plan)) == list(range(len(lengths)))


@given(LENGTHS, SETTINGS, SEEDS, EPOCHS)
def test_number_of_micro_batches_follows_from_the_lengths_alone(
    lengths: list[int], settings: BatchSettings, seed: int, epoch: int
) -> None:
    plan = plan_batches(lengths, settings, seed=seed, epoch=epoch)
    assert len(plan) == len(list(plan)) == num_batches(histogram(lengths), settings)


@given(LENGTHS, SETTINGS, SEEDS, EPOCHS)
def test_all_micro_batches_but_one_are_full(lengths: list[int], settings: BatchSettings, seed: int, epoch: int) -> None:
    sizes = sorted(len(batch) for batch in plan_batches(lengths, settings, seed=seed, epoch=epoch))
    assert 1 <= sizes[0] <= settings.micro_batch_size
    assert all(size == settings.micro_batch_size for size in sizes[1:])


@given(LENGTHS, SETTINGS, SEEDS, EPOCHS)
def test_a_micro_batch_can_be_had_by_its_number(
    lengths: list[int], settings: BatchSettings, seed: int, epoch: int
) -> None:
    plan = plan_batches(lengths, settings, seed=seed, epoch=epoch)
    assert [plan[index] for index in range(len(plan))] == list(plan)
    for index in (-1, len(plan)):
        with pytest.raises(IndexError, match=f"There is no micro batch {index}"):
            plan[index]


@pytest.mark.parametrize("settings", [SHUFFLED, SORTED, PACKED])
def test_a_plan_is_that_of_its_seed_and_epoch(settings: BatchSettings) -> None:
    def plan(seed: int, epoch: int) -> EpochPlan:
        return plan_batches(MANY, settings, seed=seed, epoch=epoch)

    assert plan(3, 4) == plan(3, 4)
    plans = [plan(seed, epoch) for seed in range(4) for epoch in range(4)]
    assert all(one != other for number, one in enumerate(plans) for other in plans[:number])
    assert len({frozenset(frozenset(rows_of([batch])) for batch in each) for each in plans}) == 16


PROGRAM = """
from foretune.contract import BatchSettings
from foretune.data import plan_batches, split_rows
lengths = [1 + (37 * row) % 60 for row in range(600)]
for form in ({}, {"sort_by_length": True}, {"packing": True}):
    settings = BatchSettings(micro_batch_size=4, sequence_length=100, **form)
    print(list(plan_batches(lengths, settings, seed=3, epoch=4)))
print([list(part) for part in split_rows(50, 0.2, 3)])
"""


def test_a_plan_is_the_same_in_processes_that_hash_otherwise() -> None:
    said = set()
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        said.add(done.stdout)
    assert len(said) == 1


@given(LENGTHS, st.integers(1, 9), SEEDS, EPOCHS)
def test_by_default_the_shuffled_rows_are_cut_in_groups(lengths: list[int], size: int, seed: int, epoch: int) -> None:
    plan = plan_batches(lengths, BatchSettings(micro_batch_size=size), seed=seed, epoch=epoch)
    assert rows_of(plan) == shuffled(len(lengths), seed, epoch).tolist()
    assert [len(batch) for batch in plan][:-1] == [size] * (len(plan) - 1)


@given(LENGTHS, st.integers(1, 9), SEEDS, EPOCHS)
def test_sorted_micro_batches_are_neighbours_in_length(lengths: list[int], size: int, seed: int, epoch: int) -> None:
    settings = BatchSettings(micro_batch_size=size, sort_by_length=True)
    plan = list(plan_batches(lengths, settings, seed=seed, epoch=epoch))
    found = sorted([lengths[row] for row in rows_of([batch])] for batch in plan)
    ordered = sorted(lengths)
    assert found == sorted(ordered[start : start + size] for start in range(0, len(ordered), size))
    padded = sum(len(batch) * max(lengths[row] for (row,) in batch) for batch in plan)
    assert padded / len(lengths) == pytest.approx(pad_rows(histogram(lengths), size, is_sorted=True).mean_tokens)


def test_sorted_micro_batches_come_in_another_order_each_epoch() -> None:
    orders = {tuple(len(rows_of([batch])) * MANY[batch[0][0]] for batch in plan_batches(MANY, SORTED, seed=0, epoch=e))
              for e in range(10)}  # fmt: skip
    assert len(orders) == 10
    assert all(list(order) != sorted(order) for order in orders)


# -- packed rows


@given(LENGTHS, st.integers(60, 200), SEEDS, EPOCHS)
def test_packing_is_best_fit_decreasing(lengths: list[int], row_tokens: int, seed: int, epoch: int) -> None:
    settings = BatchSettings(sequence_length=row_tokens, packing=True)
    plan = plan_batches(lengths, settings, seed=seed, epoch=epoch)
    rooms = [row_tokens - sum(lengths[row] for row in packed) for batch in plan for packed in batch]
    assert min(rooms) >= 0
    assert sorted(rooms) == sorted(rooms_by_brute_force(lengths, row_tokens))
    assert len(rooms) == pack_rows(histogram(lengths), row_tokens).num_rows


@given(SEEDS)
def test_packing_of_many_rows_is_as_good_as_was_said(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [min(1 + int(draw.lognormvariate(5, 1)), 1024) for _ in range(2000)]
    settings = BatchSettings(micro_batch_size=2, sequence_length=1024, packing=True)
    plan = plan_batches(lengths, settings, seed=seed, epoch=0)
    packed = [row for batch in plan for row in batch]
    assert max(sum(lengths[row] for row in each) for each in packed) <= 1024
    assert len(packed) == pack_rows(histogram(lengths), 1024).num_rows


def test_who_shares_a_packed_row_changes_from_epoch_to_epoch() -> None:
    def together(epoch: int) -> set[tuple[int, ...]]:
        plan = plan_batches(MANY, PACKED, seed=0, epoch=epoch)
        return {tuple(sorted(packed)) for batch in plan for packed in batch}

    first, second = together(0), together(1)
    assert len(first & second) < 0.1 * len(first)


def test_rows_that_are_too_long_to_pack_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="cut before they are packed"):
        plan_batches([101], PACKED, seed=0, epoch=0)
