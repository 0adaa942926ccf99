"""What a micro batch holds: token ids, labels, positions, and where one example ends and the next begins.

A label stands at the place of its token, as Transformers wants it; the loss compares it with what the model says one
place before (the causal shift), so the first label of a row never counts. In a packed row the first token of a later
example is no label either: it would be predicted from the last token of its neighbour.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from foretune.data.encode import Example, Supervision
from foretune.data.rows import RowProblem

__all__ = ["IGNORED", "Batch", "Truncated", "labels_of", "make_batch", "truncate"]

IGNORED = -100
"""The label of a token that is not learnt: `ignore_index` of torch's cross-entropy."""
SIGNED = "q"
"""Eight bytes with a sign, as torch's int64."""


class Batch(NamedTuple):
    """A micro batch: its arrays are rows of the device, all of one width, padded on the right."""

    input_ids: "tuple[array[int], ...]"
    labels: "tuple[array[int], ...]"
    """The token's id where it is learnt, else IGNORED."""
    position_ids: "tuple[array[int], ...]"
    """From 0 for each example, and from 0 again for the padding: see `make_batch`."""
    row_lengths: tuple[tuple[int, ...], ...]
    """Tokens of each example in each row, without the padding: their running sums are `cu_seqlens`."""
    num_supervised: int
    """Labels that count after the causal shift. The loss of an update is divided by their sum over its batches."""
    num_tokens: int
    """Tokens of all examples, without the padding."""


class Truncated(NamedTuple):
    """An example that fits, and what it lost."""

    example: Example
    is_cut: bool
    loses_answer: bool
    """A token of an answer was cut, so the end of the last answer too: the model does not learn there where to end."""


def truncate(example: Example, limit: int, truncation: Literal["error", "right"]) -> Truncated:
    """Make an example fit `batch.sequence_length` as `data.truncation` says: refuse it, or keep its first tokens.

    No EOS is put where it is cut: the text does not end there. Whatever the supervision, a token of the answer has to
    stay after the first position, or the row would teach its prompt alone. What fits is returned as it is.
    Raises RowProblem.
    """
    num_tokens = len(example.ids)
    if num_tokens <= limit:
        return Truncated(example, is_cut=False, loses_answer=False)
    if truncation == "error":
        message = f"{num_tokens:,} tokens, more than batch.sequence_length, {limit:,}."
        hint = "Raise batch.sequence_length (--seq-len), shorten the row, or set data.truncation (--truncation): right."
        raise RowProblem(example.line, message, hint=hint)
    kept, lost = example.answer[:limit], example.answer[limit:]
    if not any(kept[1:]):
        message = (
            f"it loses its whole answer: of its {num_tokens:,} tokens the first {limit:,} (batch.sequence_length) "
            "stay, and after the first of all none of them belongs to an answer."
        )
        raise RowProblem(example.line, message, hint="Raise batch.sequence_length, or shorten the prompt.")
    return Truncated(example._replace(ids=example.ids[:limit], answer=kept), is_cut=True, loses_answer=any(lost))


def make_batch(
    rows: Sequence[Sequence[Example]], *, supervision: Supervision, padding_id: int, width: int | None
) -> Batch:
    """Lay out rows of the device, each of one or several examples, padded to `width` tokens (None: to the longest).

    `padding_id` only fills: what is padding is known by its place, so an EOS with the same id keeps its label.
    The padding counts its positions from 0, as an example of its own. Where packed rows are told apart by their
    positions it so is a sequence by itself, which no example sees and in which each place sees at least itself: no
    row of the attention is empty, which would be NaN. Going on from the last example would make it part of that one,
    and zeros throughout would be a sequence for each place.
    """
    row_lengths = tuple(tuple(len(example.ids) for example in row) for row in rows)
    longest = max(map(sum, row_lengths))
    width = longest if width is None else width
    assert longest <= width, "rows are cut and packed before they are laid out"
    return Batch(
        input_ids=tuple(_padded((array(SIGNED, example.ids) for example in row), padding_id, width) for row in rows),
        labels=tuple(_padded(_labels(row, supervision), IGNORED, width) for row in rows),
        position_ids=tuple(_positions(lengths, width) for lengths in row_lengths),
        row_lengths=row_lengths,
        num_supervised=sum(_num_supervised(example, supervision) for row in rows for example in row),
        num_tokens=sum(map(sum, row_lengths)),
    )


def _padded(parts: "Iterable[array[int]]", filler: int, width: int) -> "array[int]":
    row = array(SIGNED)
    for part in parts:
        row.extend(part)
    row.extend([filler] * (width - len(row)))
    return row


def _labels(row: Sequence[Example], supervision: Supervision) -> Iterator["array[int]"]:
    for number, example in enumerate(row):
        labels = labels_of(example, supervision)
        if number:
            labels[0] = IGNORED
        yield labels


def labels_of(example: Example, supervision: Supervision) -> "array[int]":
    """Return the id of each token that carries loss, IGNORED of the others, before the causal shift."""
    if supervision == "all_tokens":
        return array(SIGNED, example.ids)
    is_learnt = zip(example.ids, example.answer, strict=True)
    return array(SIGNED, (token if is_answer else IGNORED for token, is_answer in is_learnt))


def _num_supervised(example: Example, supervision: Supervision) -> int:
    return len(example.ids) - 1 if supervision == "all_tokens" else example.answer.count(1, 1)


def _positions(lengths: Sequence[int], width: int) -> "array[int]":
    row = array(SIGNED)
    for length in (*lengths, width - sum(lengths)):
        row.extend(range(length))
    return row
