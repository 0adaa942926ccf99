"""What a micro batch holds: labels by hand, padding by place, packed rows that count as their examples do; cutting."""

from array import array
from itertools import chain, pairwise
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretune.data import IGNORED, Batch, Example, RowProblem, make_batch, truncate

Supervision = Literal["all_tokens", "assistant_only"]
SUPERVISIONS = st.sampled_from(["all_tokens", "assistant_only"])
EOS = 2


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """Any token may be the one that pads; at least two of them, as `encode_rows` has it."""
    ids = draw(st.lists(st.integers(0, 5), min_size=2, max_size=12))
    answer = draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
    return Example(1, array("I", ids), bytes(answer), 0)


ROWS = st.lists(st.lists(examples(), min_size=1, max_size=4), min_size=1, max_size=4)


def example(ids: list[int], answer: list[int], line: int = 2) -> Example:
    return Example(line, array("I", ids), bytes(answer), 0)


def listed(rows: "tuple[array[int], ...]") -> list[list[int]]:
    return [row.tolist() for row in rows]


# -- by hand


@pytest.mark.parametrize(
    ("supervision", "labels", "num_supervised"),
    [("all_tokens", [10, 11, 12, 13, EOS], 4), ("assistant_only", [IGNORED, IGNORED, IGNORED, 13, EOS], 2)],
)
def test_labels_of_five_tokens_by_hand(supervision: Supervision, labels: list[int], num_supervised: int) -> None:
    # Tokens 10 11 12 are the prompt, 13 and EOS the answer. After the shift 12 predicts 13, and 13 predicts EOS;
    # with all tokens 10 predicts 11 and 11 predicts 12 too. Nothing predicts 10.
    batch = make_batch(
        [[example([10, 11, 12, 13, EOS], [0, 0, 0, 1, 1])]], supervision=supervision, padding_id=0, width=None
    )
    assert listed(batch.labels) == [labels]
    assert listed(batch.input_ids) == [[10, 11, 12, 13, EOS]]
    assert (batch.num_supervised, batch.num_tokens, batch.row_lengths) == (num_supervised, 5, ((5,),))


def test_two_rows_by_hand() -> None:
    """A packed row of three and two tokens, and a row of four, in a width of seven; EOS pads."""
    one, two, three = example([7, 8, EOS], [0, 1, 1]), example([9, EOS], [0, 1]), example([4, 5, 6, EOS], [0, 0, 1, 1])
    batch = make_batch([[one, two], [three]], supervision="assistant_only", padding_id=EOS, width=7)
    assert listed(batch.input_ids) == [[7, 8, EOS, 9, EOS, EOS, EOS], [4, 5, 6, EOS, EOS, EOS, EOS]]
    assert listed(batch.labels) == [[-100, 8, EOS, -100, EOS, -100, -100], [-100, -100, 6, EOS, -100, -100, -100]]
    assert listed(batch.position_ids) == [[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 0, 1, 2]]
    assert (batch.row_lengths, batch.num_supervised, batch.num_tokens) == (((3, 2), (4,)), 5, 9)


def test_an_answer_in_the_first_place_does_not_count_and_is_no_label_beside_a_neighbour() -> None:
    row = [example([5, 6, 7], [1, 0, 1]), example([8, 9], [1, 1])]
    batch = make_batch([row], supervision="assistant_only", padding_id=0, width=None)
    assert listed(batch.labels) == [[5, IGNORED, 7, IGNORED, 9]]
    assert batch.num_supervised == 2


def test_ids_of_all_32_bits_are_kept() -> None:
    batch = make_batch([[example([0, 2**32 - 1], [0, 1])]], supervision="all_tokens", padding_id=0, width=None)
    assert listed(batch.labels) == [[0, 2**32 - 1]]


# -- everywhere


@given(ROWS, SUPERVISIONS, st.integers(0, 5), st.integers(0, 9) | st.none())
def test_rows_are_of_one_width_and_padding_is_by_place(
    rows: list[list[Example]], supervision: Supervision, padding_id: int, more: int | None
) -> None:
    longest = max(sum(len(each.ids) for each in row) for row in rows)
    width = None if more is None else longest + more
    batch = make_batch(rows, supervision=supervision, padding_id=padding_id, width=width)
    for row, ids, labels, positions in zip(rows, batch.input_ids, batch.labels, batch.position_ids, strict=True):
        assert len(ids) == len(labels) == len(positions) == longest + (more or 0)
        real = list(chain.from_iterable(each.ids for each in row))
        assert ids.tolist() == real + [padding_id] * (len(ids) - len(real))
        assert set(labels[len(real) :]) <= {IGNORED}
        assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))


@given(ROWS, SUPERVISIONS)
def test_a_token_that_pads_keeps_its_label_where_it_is_real(
    rows: list[list[Example]], supervision: Supervision
) -> None:
    labels = [make_batch(rows, supervision=supervision, padding_id=pad, width=60).labels for pad in (0, 5, 99)]
    assert labels[0] == labels[1] == labels[2]


@given(ROWS, SUPERVISIONS)
def test_supervised_tokens_are_the_labels_after_the_shift(rows: list[list[Example]], supervision: Supervision) -> None:
    batch = make_batch(rows, supervision=supervision, padding_id=0, width=None)
    assert batch.num_supervised == sum(label != IGNORED for row in batch.labels for label in row[1:])
    assert batch.num_tokens == sum(len(each.ids) for row in rows for each in row) == sum(map(sum, batch.row_lengths))


@given(ROWS, SUPERVISIONS)
def test_a_packed_row_learns_what_its_examples_learn_alone(rows: list[list[Example]], supervision: Supervision) -> None:
    packed = make_batch(rows, supervision=supervision, padding_id=0, width=None)
    alone = make_batch([[each] for row in rows for each in row], supervision=supervision, padding_id=0, width=None)
    assert packed.num_supervised == alone.num_supervised

    def learnt(batch: Batch) -> list[tuple[int, int]]:
        """Pair each token that is learnt with the one before, from which the shift predicts it."""
        rows = zip(batch.input_ids, batch.labels, strict=True)
        pairs = chain.from_iterable(zip(ids, labels[1:], strict=False) for ids, labels in rows)
        return [pair for pair in pairs if pair[1] != IGNORED]

    assert learnt(packed) == learnt(alone)


@given(ROWS)
def test_positions_begin_again_at_each_example_and_at_the_padding(rows: list[list[Example]]) -> None:
    batch = make_batch(rows, supervision="all_tokens", padding_id=0, width=60)
    for lengths, positions in zip(batch.row_lengths, batch.position_ids, strict=True):
        begins = [place for place, position in enumerate(positions) if position == 0] + [len(positions)]
        found = [stop - start for start, stop in pairwise(begins)]
        padding = len(positions) - sum(lengths)
        assert found == [*lengths, *([padding] if padding else [])]
        assert all(after in (0, before + 1) for before, after in pairwise(positions))


def test_rows_wider_than_the_batch_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="before they are laid out"):
        make_batch([[example([5, 6, 7], [0, 1, 1])]], supervision="all_tokens", padding_id=0, width=2)


# -- cutting


@given(examples(), st.integers(0, 5), st.sampled_from(["error", "right"]))
def test_what_fits_is_not_touched(each: Example, more: int, truncation: Literal["error", "right"]) -> None:
    cut = truncate(each, len(each.ids) + more, truncation)
    assert cut.example is each
    assert (cut.is_cut, cut.loses_answer) == (False, False)


def test_a_row_that_is_too_long_is_refused_with_its_tokens_and_the_limit() -> None:
    with pytest.raises(RowProblem) as caught:
        truncate(example([5] * 1532, [0] * 1531 + [1]), 1024, "error")
    assert str(caught.value) == "line 2: 1,532 tokens, more than batch.sequence_length, 1,024."
    assert (caught.value.line, "data.truncation (--truncation): right" in str(caught.value.hint)) == (2, True)


@given(examples(), st.integers(1, 12))
def test_cutting_keeps_the_first_tokens_and_one_of_the_answer_or_refuses(each: Example, limit: int) -> None:
    if len(each.ids) <= limit:
        return
    if not any(each.answer[1:limit]):
        with pytest.raises(RowProblem, match=r"^line 1: it loses its whole answer: of its "):
            truncate(each, limit, "right")
        return
    cut = truncate(each, limit, "right")
    assert cut.example == Example(each.line, each.ids[:limit], each.answer[:limit], each.traits)
    assert (cut.is_cut, cut.loses_answer) == (True, 1 in each.answer[limit:])
    for supervision in ("all_tokens", "assistant_only"):
        assert make_batch([[cut.example]], supervision=supervision, padding_id=0, width=None).num_supervised >= 1


def test_an_answer_behind_a_long_prompt_is_refused() -> None:
    with pytest.raises(RowProblem) as caught:
        truncate(example([5] * 1532, [0] * 1024 + [1] * 508), 1024, "right")
    assert str(caught.value) == (
        "line 2: it loses its whole answer: of its 1,532 tokens the first 1,024 (batch.sequence_length) stay, and "
        "after the first of all none of them belongs to an answer."
    )
    assert caught.value.hint
    assert truncate(example([5] * 1532, [0] * 1023 + [1] * 509), 1024, "right").loses_answer


def test_an_answer_of_which_only_the_first_place_stays_is_refused() -> None:
    with pytest.raises(RowProblem, match="loses its whole answer"):
        truncate(example([5, 6, 7, 8], [1, 0, 0, 1]), 3, "right")
    with pytest.raises(RowProblem, match="loses its whole answer"):
        truncate(example([5, 6, 7, 8], [1, 1, 1, 1]), 1, "right")


def test_no_eos_is_put_where_a_row_is_cut() -> None:
    cut = truncate(example([5, 6, 7, 8, EOS], [0, 1, 1, 1, 1]), 3, "right").example
    assert cut.ids.tolist() == [5, 6, 7]


def test_an_answer_that_ends_before_the_cut_is_not_lost() -> None:
    cut = truncate(example([5, 6, EOS, 9, 9], [0, 1, 1, 0, 0]), 4, "right")
    assert (cut.is_cut, cut.loses_answer) == (True, False)
