"""What a data set is, counted while its rows pass by: nothing is kept but a histogram."""

from collections import Counter
from hashlib import sha256
from sys import byteorder
from typing import Annotated, Literal

from msgspec import Meta

from foretune.data.encode import Example, Supervision, Trait
from foretune.data.lengths import Lengths, LengthStats, describe_lengths
from foretune.values import Value

__all__ = ["DataStats", "StatsCounter", "supervised_mask"]

Count = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class DataStats(Value, frozen=True, kw_only=True):
    """Rows and tokens of a data set, and which of them are learnt from."""

    num_rows: Count
    num_instruction_rows: Count
    num_message_rows: Count
    num_blank_lines: Count
    dropped_rows: Literal[0]
    """No row is ever dropped: one that cannot be trained stops."""
    num_tokens: Count
    """After truncation."""
    supervision: Supervision
    """Which tokens carry loss."""
    num_supervised_tokens: Count
    """Labels after the causal shift: the first token of a row is predicted from nothing."""
    supervised_share: Share
    """Of all tokens."""
    num_answer_tokens: Count
    """Tokens of answers: with `assistant_only` those that carry loss, else those of the texts and what closes them."""
    truncated_rows: Count
    cut_answers: Count
    """Truncated rows that lost the end of their answer, and with it EOS or what closes a turn."""
    lengths: LengthStats
    """Tokens of a row before truncation."""
    longest_line: Count
    """The line of the longest row; the first of several."""
    rows_with_bos: Count
    """Rows that begin with BOS; an instruction row never does."""
    tagged_rows: Count
    """Answers found by the template's generation tags; else by verified marker rendering, or by offsets."""
    respaced_rows: Count
    """The template changed white space at the ends of a turn or around its thinking."""
    rewritten_rows: Count
    """The template changed, dropped or moved a turn; only with `data.allow_template_rewrite`."""
    unclosed_rows: Count
    """No token of the template closes the last answer, so a model does not learn from it to stop."""
    straddled_rows: Count
    """Of an answer a token is masked because it stands for characters of the prompt too, mostly the space before it."""
    control_text_rows: Count
    """A text holds what the tokenizer takes for one of its control tokens."""
    sha256: str
    """Of ids and labels in the order of the file: equal on every machine, with any number of workers."""


class StatsCounter:
    """Counts examples one by one."""

    def __init__(self, supervision: Supervision) -> None:
        self._supervision: Supervision = supervision
        self._lengths: Counter[int] = Counter()
        self._traits: Counter[int] = Counter()
        self._num_tokens = self._num_supervised = self._num_answer = 0
        self._truncated = self._cut = 0
        self._longest = (0, 0)
        self._digest = sha256()

    def add(self, example: Example, *, full_length: int, is_answer_cut: bool) -> None:
        """Count one example as it is trained; `full_length` is what it was before truncation."""
        num_tokens = len(example.ids)
        mask = supervised_mask(example, self._supervision)
        self._lengths[full_length] += 1
        self._traits[example.traits] += 1
        self._num_tokens += num_tokens
        self._num_supervised += mask.count(1, 1)
        self._num_answer += example.answer.count(1)
        self._truncated += full_length > num_tokens
        self._cut += is_answer_cut
        if full_length > self._longest[0]:
            self._longest = full_length, example.line
        self._digest.update(num_tokens.to_bytes(8, "little") + _little_endian(example) + mask)

    def lengths(self) -> Lengths:
        """Return the tokens of each row before truncation."""
        return Lengths.of(self._lengths)

    def stats(self, num_blank_lines: int) -> DataStats:
        """Return the statistics of at least one example."""

        def rows_with(trait: int) -> int:
            return sum(count for traits, count in self._traits.items() if traits & trait)

        num_rows = self._traits.total()
        return DataStats(
            num_rows=num_rows,
            num_instruction_rows=num_rows - rows_with(Trait.MESSAGES),
            num_message_rows=rows_with(Trait.MESSAGES),
            num_blank_lines=num_blank_lines,
            dropped_rows=0,
            num_tokens=self._num_tokens,
            supervision=self._supervision,
            num_supervised_tokens=self._num_supervised,
            supervised_share=self._num_supervised / self._num_tokens,
            num_answer_tokens=self._num_answer,
            truncated_rows=self._truncated,
            cut_answers=self._cut,
            lengths=describe_lengths(self.lengths()),
            longest_line=self._longest[1],
            rows_with_bos=rows_with(Trait.BOS),
            tagged_rows=rows_with(Trait.TAGGED),
            respaced_rows=rows_with(Trait.RESPACED),
            rewritten_rows=rows_with(Trait.REWRITTEN),
            unclosed_rows=rows_with(Trait.UNCLOSED),
            straddled_rows=rows_with(Trait.STRADDLED),
            control_text_rows=rows_with(Trait.CONTROL_TEXT),
            sha256=self._digest.hexdigest(),
        )


def supervised_mask(example: Example, supervision: Supervision) -> bytes:
    """Return a byte for each token: 1 where it carries loss, before the causal shift."""
    return b"\1" * len(example.ids) if supervision == "all_tokens" else example.answer


def _little_endian(example: Example) -> bytes:
    ids = example.ids
    if byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids.tobytes()
