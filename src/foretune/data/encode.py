"""From rows to token ids and the tokens of the answer: what a model sees, and what it may learn from.

A token belongs to the answer where all of its characters do. One that straddles prompt and answer does not, and
neither do tokens that share a character with it.
"""

import re
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import groupby
from operator import eq
from typing import Literal, NamedTuple
from unicodedata import normalize

from foretune.data.rows import InstructionRow, Message, MessagesRow, Row, RowProblem
from foretune.data.tokenizer import Encoding, Rendering, TemplateProblem, Tokenizer, TokenizerFacts
from foretune.data.turns import Span, Turn, locate_turns

__all__ = [
    "Detail",
    "EncodeSettings",
    "Example",
    "Trait",
    "encode_prompt",
    "encode_rows",
    "format_instruction",
    "require_template",
    "runs_of",
]

GROUP = 64
"""Rows that are tokenized at once."""

Supervision = Literal["all_tokens", "assistant_only"]


class Trait:
    """Bits that say what is remarkable about an example; the statistics count them."""

    MESSAGES = 1
    """A conversation; else an instruction."""
    REWRITTEN = 2
    """The template changed, dropped or moved a turn, which was allowed."""
    RESPACED = 4
    """The template changed white space at the ends of a turn or around its thinking."""
    UNCLOSED = 8
    """No token or text of the template closes the last answer."""
    CONTROL_TEXT = 16
    """A text holds what the tokenizer takes for one of its control tokens."""
    TAGGED = 32
    """The template's generation tags say what the answer is."""
    BOS = 64
    """It begins with BOS."""
    STRADDLED = 128
    """Of an answer a token is masked because it stands for characters of the prompt too."""


class EncodeSettings(NamedTuple):
    """What decides about ids and answers, beside row, tokenizer and template."""

    supervision: Supervision = "all_tokens"
    spans: Literal["verified", "template"] = "verified"
    allow_template_rewrite: bool = False


class Example(NamedTuple):
    """A row as tokens, whole: nothing is cut or padded yet."""

    line: int
    ids: "array[int]"
    answer: bytes
    """A byte for each token: 1 where it belongs to an answer."""
    traits: int


class Detail(NamedTuple):
    """An example as a person looks at it."""

    text: str
    starts: Sequence[int]
    """Where each token begins in the text; a token begins where the one before ends."""
    ends: Sequence[int]


class _Text(NamedTuple):
    """A row as one text, before it is tokenized."""

    text: str
    answers: tuple[Span, ...]
    """What belongs to answers, with what closes them."""
    spoken: tuple[Span, ...]
    """The texts of the answers alone."""
    traits: int


def encode_rows(
    rows: Sequence[Row], tokenizer: Tokenizer, settings: EncodeSettings
) -> Iterator[tuple[Example, Detail]]:
    """Encode rows in order. Raises RowProblem at the first that cannot be trained as it stands.

    While some rows are tokenized, which needs no Python, the next ones are rendered.
    """
    with ThreadPoolExecutor(1) as pool:
        waiting: deque[tuple[Sequence[Row], list[_Text], Future[Sequence[Encoding]]]] = deque()
        problem: RowProblem | None = None
        for start in range(0, len(rows), GROUP):
            group, texts, problem = _texts_of(rows[start : start + GROUP], tokenizer, settings)
            waiting.append((group, texts, pool.submit(tokenizer.encode, [each.text for each in texts])))
            if problem is not None:
                break
            if len(waiting) > 1:
                yield from _examples(*waiting.popleft(), tokenizer, settings)
        while waiting:
            yield from _examples(*waiting.popleft(), tokenizer, settings)
        if problem is not None:
            raise problem


def _texts_of(
    rows: Sequence[Row], tokenizer: Tokenizer, settings: EncodeSettings
) -> tuple[Sequence[Row], list[_Text], RowProblem | None]:
    """Write rows as texts, up to the first that cannot be."""
    texts: list[_Text] = []
    for row in rows:
        try:
            texts.append(_text_of(row, tokenizer, settings))
        except RowProblem as problem:
            return rows[: len(texts)], texts, problem
    return rows, texts, None


def _examples(
    rows: Sequence[Row],
    texts: Sequence[_Text],
    encodings: "Future[Sequence[Encoding]]",
    tokenizer: Tokenizer,
    settings: EncodeSettings,
) -> Iterator[tuple[Example, Detail]]:
    for row, text, encoding in zip(rows, texts, encodings.result(), strict=True):
        yield _example(row, text, encoding, tokenizer, settings)


def _text_of(row: Row, tokenizer: Tokenizer, settings: EncodeSettings) -> _Text:
    if isinstance(row, InstructionRow):
        return _instruction_text(row, tokenizer.facts)
    return _conversation_text(row, tokenizer, settings)


# -- instructions


def format_instruction(instruction: str, input: str = "") -> str:
    """Write the prompt of an instruction row; the answer follows without anything between.

    >>> format_instruction("Add.", "1 + 1")
    '### Instruction:\\nAdd.\\n\\n### Input:\\n1 + 1\\n\\n### Response:\\n'
    """
    given = f"### Input:\n{input}\n\n" if input else ""
    return f"### Instruction:\n{instruction}\n\n{given}### Response:\n"


def _instruction_text(row: InstructionRow, facts: TokenizerFacts) -> _Text:
    if facts.eos_id is None:
        hint = "Set eos_token in the tokenizer's config, or pass conversations."
        message = "the tokenizer has no EOS token, with which an instruction row ends."
        raise RowProblem(row.line, message, hint=hint, is_of_all=True)
    prompt = format_instruction(row.instruction, row.input)
    traits = _control_trait((row.instruction, row.input, row.output), facts)
    answers = ((len(prompt), len(prompt) + len(row.output)),)
    return _Text(prompt + row.output, answers, answers, traits)


# -- conversations


def require_template(facts: TokenizerFacts, settings: EncodeSettings) -> str | None:
    """Say why no conversation can be encoded, before a row is read; None: it can."""
    if not facts.has_template:
        return "the tokenizer has no chat template, so conversations cannot be written as the model expects them."
    if settings.supervision == "assistant_only" and settings.spans == "template" and not facts.has_generation_tags:
        return "the chat template has no generation spans, and data.spans is template."
    return None


def _conversation_text(row: MessagesRow, tokenizer: Tokenizer, settings: EncodeSettings) -> _Text:
    facts, line, messages = tokenizer.facts, row.line, row.messages
    reason = require_template(facts, settings)
    if reason is not None:
        hint = (
            "Use the tokenizer of a chat model; `foretune data check --chat-template FILE` tries a template."
            if not facts.has_template
            else "Set data.spans: verified."
        )
        raise RowProblem(line, reason, hint=hint, is_of_all=True)
    with_tags = facts.has_generation_tags and settings.supervision == "assistant_only"
    try:
        rendered = tokenizer.render(messages, with_tags=with_tags)
    except TemplateProblem as problem:
        hint = "The template decides what it takes; change the row, or choose another model."
        message = f"the chat template refuses the row: {problem}"
        raise RowProblem(line, message, hint=hint, is_of_all=problem.is_of_all) from problem
    # The marked renderings are ordinary ones: each turn that they prove proves the rendering with tags equal to them.
    plain = rendered.text
    located = locate_turns(messages, plain, lambda marked: tokenizer.render(marked).text)
    if not all(turn.is_kept and turn.spans for turn in located.turns):
        _require_same(line, messages, rendered, tokenizer)
    traits = Trait.MESSAGES | _control_trait((message.content for message in messages), facts)
    for turn, found in enumerate(located.turns, 1):
        if not found.is_kept:
            _refuse_rewrite(line, turn, messages[turn - 1], found, settings)
            traits |= Trait.REWRITTEN
        elif found.state == "respaced":
            traits |= Trait.RESPACED
    spoken = tuple(
        span
        for message, found in zip(messages, located.turns, strict=True)
        for span in found.spans
        if message.role == "assistant"
    )
    if rendered.tagged is not None:
        _refuse_other_template(line, messages, plain, tokenizer, settings)
        answers = _merged(rendered.tagged)
        if settings.spans == "verified":
            _verify_tags(line, messages, located.turns, plain, answers)
        return _Text(plain, answers, spoken, traits | Trait.TAGGED)
    answers, is_closed = _answers(messages, located.turns, plain, facts)
    return _Text(plain, answers, spoken, traits if is_closed else traits | Trait.UNCLOSED)


def _require_same(line: int, messages: Sequence[Message], rendered: Rendering, tokenizer: Tokenizer) -> None:
    """Refuse a template that writes another text when it is asked again, or without looking at its tags."""
    try:
        again = tokenizer.render(messages).text
    except TemplateProblem:
        return
    if again == rendered.text:
        return
    if rendered.tagged is not None:
        raise _differs(line, "the rendering with generation tags", rendered.text, again, tokenizer)
    message = "the chat template writes the row otherwise each time it is asked."
    raise RowProblem(line, message, hint="Use a template without chance in it.")


def _refuse_rewrite(line: int, turn: int, message: Message, found: Turn, settings: EncodeSettings) -> None:
    if settings.allow_template_rewrite:
        return
    what = {
        "dropped": "does not write this turn's text",
        "rewritten": "changes this turn's text",
        "repeated": "writes this turn's text more than once",
        "moved": "writes this turn's text out of order",
        "unproved": "cannot be followed to this turn, of so many",
    }[found.state]
    if found.state == "rewritten" and found.spans:
        what = "changes this turn's text, of which it leaves out the thinking or the answer"
    hint = "Change the row, or accept and count such rows: data.allow_template_rewrite (--allow-template-rewrite)."
    raise RowProblem(line, f"the chat template {what} ({message.role}); altered by the template.", turn=turn, hint=hint)


def _differs(line: int, what: str, text: str, other: str, tokenizer: Tokenizer) -> RowProblem:
    """Name the first token in which two renderings of a row differ."""
    ids, others = (encoding.ids for encoding in tokenizer.encode([text, other]))
    first = next((k for k, (one, two) in enumerate(zip(ids, others, strict=False)) if one != two), None)
    token = min(len(ids), len(others)) if first is None else first
    hint = "Correct the template: with tags it has to write what the tokenizer's own writes without."
    return RowProblem(line, f"{what} differs at token {token + 1} from the ordinary one.", hint=hint)


def _refuse_other_template(
    line: int, messages: Sequence[Message], text: str, tokenizer: Tokenizer, settings: EncodeSettings
) -> None:
    """Hold a tagged template that is tried against the tokenizer's own, of which it may be a patched copy.

    With `spans: template` it has to write the same. Else one that differs in white space alone is taken for a copy
    that was patched wrongly, and one that differs in more for a template of its own.
    """
    try:
        own = tokenizer.render_own(messages)
    except TemplateProblem:
        return
    if own is None or own == text:
        return
    if settings.spans == "verified" and "".join(own.split()) != "".join(text.split()):
        return
    raise _differs(line, "the marked rendering", text, own, tokenizer)


def _verify_tags(
    line: int, messages: Sequence[Message], turns: Sequence[Turn], text: str, tagged: tuple[Span, ...]
) -> None:
    """Require that generation tags hold each answer whole, and nothing of another turn."""
    for turn, (message, found) in enumerate(zip(messages, turns, strict=True), 1):
        is_answer = message.role == "assistant"
        for start, stop in found.spans:
            before = bisect_right(tagged, (start, len(text)))
            is_inside = before > 0 and stop <= tagged[before - 1][1]
            is_outside = (before == 0 or tagged[before - 1][1] <= start) and (
                before == len(tagged) or stop <= tagged[before][0]
            )
            if (is_answer and is_inside) or (not is_answer and is_outside):
                continue
            what = "do not hold the whole answer" if is_answer else f"hold text of the {message.role}"
            hint = "Correct the template, or take its tags as they are with data.spans: template."
            raise RowProblem(line, f"the template's generation tags {what}.", turn=turn, hint=hint)


def _answers(
    messages: Sequence[Message], turns: Sequence[Turn], text: str, facts: TokenizerFacts
) -> tuple[tuple[Span, ...], bool]:
    """Return the answers with what closes them, and whether something closes the last one.

    What closes an answer is what the template writes after the last one: white space and a control token, or one
    word. After an earlier answer the same text counts, and nothing else. Text of another turn closes nothing.
    """
    spoken = [turn.spans for message, turn in zip(messages, turns, strict=True) if message.role == "assistant"]
    others = sorted(span for turn in turns for span in turn.spans)
    lost = [m.content for m, turn in zip(messages, turns, strict=True) if m.role != "assistant" and not turn.is_kept]
    closing = _closing(text[spoken[-1][-1][1] :], facts, lost) if spoken[-1] else ""
    answers: list[Span] = []
    is_closed = False
    for spans in spoken:
        if spans:
            *inner, (start, stop) = spans
            following = bisect_left(others, (stop, stop))
            end = others[following][0] if following < len(others) else len(text)
            is_closed = bool(closing) and text.startswith(closing, stop) and stop + len(closing) <= end
            answers += [*inner, (start, stop + len(closing) if is_closed else stop)]
    return _merged(answers), is_closed


def _closing(tail: str, facts: TokenizerFacts, lost: Sequence[str]) -> str:
    """Return the beginning of a tail that closes an answer.

    `lost` are texts of others that were not found in the rendering: what may be of them closes nothing.
    """
    match = _control_pattern(facts.special_texts).search(tail)
    if match is not None and not tail[: match.start()].strip():
        return "" if any(match.group() in text for text in lost) else tail[: match.end()]
    return tail.rstrip() if len(tail.split()) == 1 and not lost else ""


@lru_cache(maxsize=8)
def _control_pattern(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Match any of the control tokens, the longer before what it begins with."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _control_trait(texts: Iterable[str], facts: TokenizerFacts) -> int:
    pattern = _control_pattern(facts.special_texts)
    return Trait.CONTROL_TEXT if any(pattern.search(text) for text in texts) else 0


def _merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Join spans that touch."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        elif start < stop:
            merged.append((start, stop))
    return tuple(merged)


def encode_prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> Sequence[int]:
    """Encode what comes before an answer, as a conversation's next turn: for evaluation and generation."""
    text = tokenizer.render(messages, add_generation_prompt=True).text
    return tokenizer.encode([text])[0].ids


# -- tokens


def _example(
    row: Row, each: _Text, encoding: Encoding, tokenizer: Tokenizer, settings: EncodeSettings
) -> tuple[Example, Detail]:
    facts, ids = tokenizer.facts, array("I", encoding.ids)
    starts, ends = _checked_offsets(encoding, each.text, row.line, tokenizer)
    answer = _mask(each.answers, starts, ends)
    if isinstance(row, InstructionRow) and (not ids or ids[-1] != facts.eos_id):
        assert facts.eos_id is not None
        ids.append(facts.eos_id)
        starts, ends = [*starts, len(each.text)], [*ends, len(each.text)]
        answer.append(1)
    traits = each.traits | (Trait.BOS if ids and ids[0] == facts.bos_id else 0)
    if _is_straddled(each.spoken, answer, starts, ends):
        traits |= Trait.STRADDLED
    if len(ids) < 2:
        raise RowProblem(row.line, "it is a single token, before which nothing stands to predict it from.")
    if settings.supervision == "assistant_only":
        _require_learnt(row.line, each.spoken, answer, starts, ends)
    return Example(row.line, ids, bytes(answer), traits), Detail(each.text, starts, ends)


def _require_learnt(
    line: int, spoken: Iterable[Span], answer: bytes | bytearray, starts: Sequence[int], ends: Sequence[int]
) -> None:
    """Require that a token of an answer's own text is learnt, not only what closes it, and not only the first token."""
    for first, last in spoken:
        begin, stop = max(bisect_right(ends, first), 1), bisect_left(starts, last)
        if any(answer[begin:stop]):
            return
    message = "no token of the answer can be supervised: none lies wholly inside its text after the first position."
    hint = "Join it to longer text, use data.supervision: all_tokens, or a template that puts no space before answers."
    raise RowProblem(line, message, hint=hint)


def _is_straddled(spoken: Iterable[Span], answer: bytearray, starts: Sequence[int], ends: Sequence[int]) -> bool:
    """Whether a token that stands for a character of an answer's own text is no answer token."""
    for first, last in spoken:
        begin, stop = bisect_right(ends, first), bisect_left(starts, last)
        if not all(answer[begin:stop]):
            return True
    return False


def _mask(answers: Iterable[Span], starts: Sequence[int], ends: Sequence[int]) -> bytearray:
    """Mark the tokens that lie wholly inside a span and share no character with one that does not."""
    mask = bytearray(len(starts))
    for first, last in answers:
        begin = bisect_left(starts, first)
        if begin and ends[begin - 1] > first:
            begin = bisect_left(starts, ends[begin - 1])
        stop = bisect_right(ends, last)
        if stop < len(starts) and starts[stop] < last:
            stop = bisect_right(ends, starts[stop])
        if begin < stop:
            mask[begin:stop] = b"\1" * (stop - begin)
    return mask


def _checked_offsets(
    encoding: Encoding, text: str, line: int, tokenizer: Tokenizer
) -> tuple[Sequence[int], Sequence[int]]:
    """Return where tokens begin and end; they must be in order, cover the text and have a width."""
    if not encoding.offsets or len(encoding.offsets) != len(encoding.ids):
        number = f"{len(encoding.offsets)} offsets for {len(encoding.ids)} tokens"
        raise _unusable(line, "there is no token" if not encoding.ids else number, tokenizer)
    starts, ends = zip(*encoding.offsets, strict=True)
    is_tiling = starts[0] == 0 and ends[-1] == len(text) and starts[1:] == ends[:-1]
    if is_tiling and not any(map(eq, starts, ends)):
        return starts, ends
    return _repaired_offsets(encoding, text, line, tokenizer)


def _repaired_offsets(
    encoding: Encoding, text: str, line: int, tokenizer: Tokenizer
) -> tuple[Sequence[int], Sequence[int]]:
    """Give what no token covers to the one whose it is.

    White space between two tokens is the later one's, as byte-level tokenizers mean it that trim offsets. A character
    that a normalizer joins to the one before (e and an acute accent) is the earlier one's.
    """
    starts: list[int] = []
    ends: list[int] = []
    start = end = 0
    for index, (token, (first, last)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True)):
        if first == last and token not in tokenizer.facts.special_ids and not tokenizer.is_dummy(token):
            raise _unusable(line, f"token {index + 1} has no width", tokenizer)
        if first > end:
            _give_to_earlier(text, end, first, ends)
            if ends and ends[-1] < first and text[ends[-1] : first].strip():
                raise _unusable(line, f"no token covers {text[end:first][:20]!r}", tokenizer)
            first = ends[-1] if ends else _leading_space(text, first, line, tokenizer)
        if first < start or last < end or last > len(text):
            raise _unusable(line, f"token {index + 1} is out of order", tokenizer)
        start, end = first, last
        starts.append(first)
        ends.append(last)
    _give_to_earlier(text, end, len(text), ends)
    if text[ends[-1] :].strip():
        raise _unusable(line, f"no token covers {text[end:][:20]!r}", tokenizer)
    return starts, ends


def _leading_space(text: str, first: int, line: int, tokenizer: Tokenizer) -> int:
    if text[:first].strip():
        raise _unusable(line, f"no token covers {text[:first][:20]!r}", tokenizer)
    return 0


def _give_to_earlier(text: str, end: int, first: int, ends: list[int]) -> None:
    """Let the tokens that end at a place end after the characters that are joined to it."""
    joined = end
    while 0 < joined < first and len(normalize("NFKC", text[end - 1 : joined + 1])) <= len(
        normalize("NFKC", text[end - 1 : joined])
    ):
        joined += 1
    for index in range(len(ends) - 1, -1, -1):
        if ends[index] != end:
            break
        ends[index] = joined


def _unusable(line: int, why: str, tokenizer: Tokenizer) -> RowProblem:
    message = f"unusable offsets of {tokenizer.facts.name}: {why}."
    return RowProblem(line, message, hint="Use a version of the tokenizer whose offsets say where each token stands.")


def runs_of(mask: bytes, detail: Detail, eos_text: str | None = None) -> Iterator[tuple[str, bool]]:
    """Yield a row's text in runs of tokens that are supervised or are not, with EOS that was added by its name."""
    position, num_tokens = 0, len(mask)
    is_added = num_tokens > 0 and detail.starts[-1] == detail.ends[-1] == len(detail.text)
    for is_supervised, run in groupby(mask):
        stop = position + sum(1 for _ in run)
        text = detail.text[detail.starts[position] : detail.ends[stop - 1]]
        yield text + (eos_text or "") if is_added and stop == num_tokens else text, bool(is_supervised)
        position = stop
