"""What the statistics count, by hand and in any order of chunks."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from foretune.data import Example, StatsCounter, Trait, supervised_mask


def example(line: int, ids: list[int], answer: list[int], traits: int = 0) -> Example:
    return Example(line, array("I", ids), bytes(answer), traits)


ONE = example(1, [9, 5, 6, 2], [0, 0, 1, 1])
TWO = example(4, [8, 7, 7], [0, 1, 1], Trait.MESSAGES | Trait.RESPACED | Trait.BOS)


def counted(*examples: Example, supervision: str = "assistant_only") -> StatsCounter:
    counter = StatsCounter(supervision)  # type: ignore[arg-type]
    for each in examples:
        counter.add(each, full_length=len(each.ids), is_answer_cut=False)
    return counter


def test_two_rows_by_hand() -> None:
    stats = counted(ONE, TWO).stats(2)
    assert (stats.num_rows, stats.num_instruction_rows, stats.num_message_rows) == (2, 1, 1)
    assert (stats.num_blank_lines, stats.dropped_rows) == (2, 0)
    assert (stats.num_tokens, stats.num_supervised_tokens, stats.num_answer_tokens) == (7, 4, 4)
    assert (stats.supervised_share, stats.longest_line, stats.lengths.longest) == (4 / 7, 1, 4)
    assert (stats.rows_with_bos, stats.respaced_rows, stats.rewritten_rows) == (1, 1, 0)


def test_all_tokens_carry_loss_but_the_first_of_a_row() -> None:
    stats = counted(ONE, TWO, supervision="all_tokens").stats(0)
    assert stats.num_supervised_tokens == 3 + 2
    assert supervised_mask(ONE, "all_tokens") == b"\1\1\1\1"
    assert supervised_mask(ONE, "assistant_only") == b"\0\0\1\1"


def test_lengths_are_those_before_truncation() -> None:
    counter = StatsCounter("all_tokens")
    counter.add(ONE, full_length=100, is_answer_cut=True)
    counter.add(TWO, full_length=3, is_answer_cut=False)
    stats = counter.stats(0)
    assert (stats.truncated_rows, stats.cut_answers, stats.num_tokens) == (1, 1, 7)
    assert (stats.lengths.longest, counter.lengths().tokens) == (100, (3, 100))


EXAMPLES = st.builds(
    lambda tokens: example(1, [i for i, _ in tokens], [a for _, a in tokens]),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), min_size=2, max_size=6),
)


@given(st.lists(EXAMPLES, min_size=2, max_size=5))
def test_the_hash_tells_ids_labels_order_and_where_rows_end_apart(rows: list[Example]) -> None:
    digest = counted(*rows).stats(0).sha256
    assert digest == counted(*rows).stats(5).sha256
    others = [
        [*rows[1:], rows[0]],
        rows[1:],
        [example(1, [*rows[0].ids, *rows[1].ids], [*rows[0].answer, *rows[1].answer]), *rows[2:]],
        [example(1, [*rows[0].ids[:-1], rows[0].ids[-1] + 1], list(rows[0].answer)), *rows[1:]],
        [example(1, list(rows[0].ids), [1 - rows[0].answer[0], *rows[0].answer[1:]]), *rows[1:]],
    ]
    for other in others:
        same = [(each.ids, each.answer) for each in other] == [(each.ids, each.answer) for each in rows]
        assert (counted(*other).stats(0).sha256 == digest) == same
