"""Where each turn of a conversation stands in what a chat template makes of it, proved on every row.

A template may trim a text, drop it, strip its thinking, or put it elsewhere, so a text cannot merely be searched for.
The conversation is rendered a second time with a private-use character before and after each text. If that
rendering without these characters equals the first, they show where the texts are; what stands between them is
compared with the text. Where a template looks at the ends of a text (it trims, or splits at `</think>`), the
characters stand further inside, or one takes the place of a letter. Nothing is known of any family's template.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from foretune.data.rows import Message
from foretune.data.tokenizer import TemplateProblem

__all__ = ["Located", "Span", "Turn", "locate_turns"]

Span = tuple[int, int]
"""First character and the one after the last."""
Intervals = tuple[Span, ...]
"""Parts of a content that are marked at both ends."""
State = Literal["unchanged", "respaced", "rewritten", "dropped", "repeated", "moved", "unproved", "blank"]
Render = Callable[[Sequence[Message]], str]

FIRST_MARK, LAST_MARK = 0x100000, 0x10FFFD
"""Plane 16 is for private use: no character of it has a meaning, and hardly a text has one."""
BLOCK_OF_MARKS = 0x1000
MOST_MARKED = 4096
"""Parts that are marked at once; a message has at most two."""
MOST_TRIES = 6
"""Places in white space, or words, that are tried of one text."""

MOST_RENDERINGS = 4096
"""Of one conversation; then its turns count as not to be followed."""

_OPENING = re.compile(r"<([a-z:_]{1,32})>|\[THINK\]")
_CLOSING = re.compile(r"</([a-z:_]{1,32})>|\[/THINK\]")


class Turn(NamedTuple):
    """Where one message stands in a rendering, and what has become of it."""

    spans: tuple[Span, ...]
    """Its text in the rendering; what is left of it where it was rewritten."""
    state: State
    """`respaced`: white space at its ends, or around its thinking tags, is not as it was. `unproved`: there are too
    many turns to follow. `blank`: there is no text."""

    @property
    def is_kept(self) -> bool:
        """Whether the whole text is there, white space at its ends and around thinking tags aside."""
        return self.state in ("unchanged", "respaced", "blank")


class Located(NamedTuple):
    """A rendering and where the turns stand in it."""

    text: str
    turns: tuple[Turn, ...]


def locate_turns(messages: Sequence[Message], text: str, render: Render) -> Located:
    """Find the turns of a conversation in its rendering `text`, with a second rendering, or more where that fails.

    >>> chat = (Message("user", "Hi"), Message("assistant", "Hello"))
    >>> write = lambda messages: "".join(f"[{m.role}]{m.content}" for m in messages)
    >>> locate_turns(chat, write(chat), write).turns[1]
    Turn(spans=((19, 24),), state='unchanged')
    """
    render = _Counted(render)
    turns = _located_together(messages, text, render)
    every = [turn or _located_alone(messages, index, text, render) for index, turn in enumerate(turns)]
    return Located(text, tuple(_in_order(every)))


class _Counted:
    """A rendering that gives up after so many calls."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.num_left = MOST_RENDERINGS

    def __call__(self, messages: Sequence[Message]) -> str:
        if self.num_left == 0:
            raise TemplateProblem("it was rendered too often.")
        self.num_left -= 1
        return self._render(messages)


def _located_alone(messages: Sequence[Message], index: int, text: str, render: _Counted) -> Turn:
    turn = _Alone(messages, index, text, render).locate()
    return turn if turn.is_kept or render.num_left else Turn((), "unproved")


def _located_together(messages: Sequence[Message], text: str, render: Render) -> list[Turn | None]:
    """Mark all messages at once; None for those that have to be looked for alone.

    First at their ends. Then inside of their outer white space, which settles those that have none, and those beside
    which the rendering has none of it; then as far outside as their white space stands in the rendering too.
    """
    contents = [message.content for message in messages]
    turns: list[Turn | None] = [None if content.strip() else Turn((), "blank") for content in contents]

    def settle(ways: Sequence[Intervals], *, is_last: bool) -> list[tuple[Span, ...] | None]:
        marked = [() if turn else way for turn, way in zip(turns, ways, strict=True)]
        places: list[tuple[Span, ...] | None] = [None] * len(messages)
        for index, found in enumerate(_mark(messages, marked, text, render) or ()):
            if not found.spans:
                continue
            places[index] = found.spans
            turn = _read(contents[index], marked[index], found.spans, text)
            if turn.is_kept and (is_last or marked[index] == _ends(contents[index])):
                turns[index] = turn
        return places

    settle([_ends(content) for content in contents], is_last=False)
    if None in turns:
        cores = [_core(content) for content in contents]
        places = settle(cores, is_last=False)
        wide = [
            _wider(content, core, spans, text) if spans else core
            for content, core, spans in zip(contents, cores, places, strict=True)
        ]
        for index, spans in enumerate(places):
            if turns[index] is None and spans and wide[index] == cores[index]:
                turn = _read(contents[index], cores[index], spans, text)
                turns[index] = turn if turn.is_kept else None
        if None in turns:
            settle([way if spans else () for way, spans in zip(wide, places, strict=True)], is_last=True)
    return turns


def _wider(content: str, core: Intervals, spans: tuple[Span, ...], text: str) -> Intervals:
    """Return the core with as much white space around it as stands in the rendering too."""
    ((start, stop),), ((first, last),) = core, spans
    before = _common(content, start - 1, text, first - 1, -1)
    return ((start - before, stop + _common(content, stop, text, last, 1)),)


def _in_order(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Call those turns moved that are not among the most that stand in order."""
    ends: list[int] = []
    chain: list[tuple[int, int | None]] = []
    last: list[int] = []
    for index, turn in enumerate(turns):
        if turn.spans:
            length = bisect_right(ends, turn.spans[0][0])
            chain.append((index, last[length - 1] if length else None))
            ends[length : length + 1] = [turn.spans[-1][1]]
            last[length : length + 1] = [len(chain) - 1]
    kept = set()
    link = last[-1] if last else None
    while link is not None:
        index, link = chain[link]
        kept.add(index)
    for index, turn in enumerate(turns):
        yield Turn((), "moved") if turn.spans and index not in kept else turn


# -- marks


class _Found(NamedTuple):
    """The marked parts of one message in a rendering."""

    spans: tuple[Span, ...] | None
    """None: a part is missing, stands more than once or in another order."""
    is_repeated: bool


def _mark(messages: Sequence[Message], marked: Sequence[Intervals], text: str, render: Render) -> list[_Found] | None:
    """Return where the marked parts of each message are. None: the marks change the rendering, or cannot be set.

    Where there are more parts than marks, some are marked at a time.
    """
    if sum(map(len, marked)) > MOST_MARKED:
        return _mark_by_blocks(messages, marked, text, render)
    base = _unused_block(messages, text, 2 * sum(map(len, marked)))
    if base is None:
        return None
    code, marked_messages = base, []
    for message, intervals in zip(messages, marked, strict=True):
        marked_messages.append(Message(message.role, _with_marks(message.content, intervals, code)))
        code += 2 * len(intervals)
    try:
        rendered = render(marked_messages)
    except TemplateProblem:
        return None
    places: dict[int, list[int]] = {}
    marks = re.compile(f"[{chr(base)}-{chr(max(code - 1, base))}]")
    for number, match in enumerate(marks.finditer(rendered)):
        places.setdefault(ord(match.group()), []).append(match.start() - number)
    if marks.sub("", rendered) != text:
        return None
    code, found = base, []
    for intervals in marked:
        listed = [places.get(code + i, []) for i in range(2 * len(intervals))]
        code += 2 * len(intervals)
        once = [place[0] for place in listed if len(place) == 1]
        is_whole = len(once) == len(listed) and once == sorted(once)
        spans = tuple(zip(once[::2], once[1::2], strict=True)) if is_whole else None
        found.append(_Found(spans, any(len(place) > 1 for place in listed)))
    return found


def _mark_by_blocks(
    messages: Sequence[Message], marked: Sequence[Intervals], text: str, render: Render
) -> list[_Found] | None:
    found: list[_Found] = []
    for start in range(0, len(marked), MOST_MARKED // 2):
        stop = start + MOST_MARKED // 2
        block = [way if start <= index < stop else () for index, way in enumerate(marked)]
        part = _mark(messages, block, text, render)
        if part is None:
            return None
        found += part[start:stop]
    return found


def _unused_block(messages: Sequence[Message], text: str, needed: int) -> int | None:
    """Return the first of so many private-use characters that stand nowhere; None: all of them are in use."""
    parts = [text, *(message.content for message in messages)]
    if all(part.isascii() or max(part) < chr(FIRST_MARK) for part in parts):
        return FIRST_MARK if needed <= LAST_MARK - FIRST_MARK else None
    used = {ord(c) for part in parts for c in part if ord(c) >= FIRST_MARK}
    for base in range(FIRST_MARK, LAST_MARK - needed, max(needed, BLOCK_OF_MARKS)):
        if not any(base <= code < base + needed for code in used):
            return base
    return None


def _with_marks(content: str, intervals: Intervals, code: int) -> str:
    parts, end = [], 0
    for start, stop in intervals:
        parts += [content[end:start], chr(code), content[start:stop], chr(code + 1)]
        code, end = code + 2, stop
    return "".join([*parts, content[end:]])


# -- one message


class _Alone:
    """One message, marked alone: at its ends, inside of its outer white space, at its thinking, inside a word."""

    def __init__(self, messages: Sequence[Message], index: int, text: str, render: Render) -> None:
        self._messages, self._index, self._text, self._render = messages, index, text, render
        self._content = messages[index].content
        self._is_repeated = False

    def locate(self) -> Turn:
        """Return where the message is, or what has become of it."""
        found: list[Turn] = []
        for intervals in (_ends(self._content), _core(self._content), _parts(self._content)):
            spans = self._spans(intervals) if intervals else None
            if spans is not None:
                found.append(self._widened(intervals, spans))
                if found[-1].is_kept:
                    return found[-1]
        inside = self._inside()
        if inside is not None:
            return inside
        left = self._left()
        if self._is_repeated:
            return Turn((), "repeated")
        if left:
            return Turn(left, "rewritten")
        return found[0] if found else Turn((), "dropped")

    def _spans(self, intervals: Intervals) -> tuple[Span, ...] | None:
        marked: list[Intervals] = [()] * len(self._messages)
        marked[self._index] = intervals
        found = _mark(self._messages, marked, self._text, self._render)
        if found is None:
            return None
        self._is_repeated |= found[self._index].is_repeated
        return found[self._index].spans

    def _widened(self, intervals: Intervals, spans: tuple[Span, ...]) -> Turn:
        """Take in the outer white space that the template keeps: as far as marks further outside change nothing."""
        turn = _read(self._content, intervals, spans, self._text)
        if not turn.is_kept:
            return turn
        for stop in self._kept_after(intervals[-1][1], spans[-1][1]):
            wider = (*intervals[:-1], (intervals[-1][0], stop))
            found = self._spans(wider)
            if found is not None:
                intervals, spans = wider, found
                break
        for start in self._kept_before(intervals[0][0], spans[0][0]) if len(intervals) == 1 else ():
            wider = ((start, intervals[0][1]),)
            found = self._spans(wider)
            if found is not None:
                intervals, spans = wider, found
                break
        return _read(self._content, intervals, spans, self._text)

    def _kept_after(self, stop: int, place: int) -> Iterator[int]:
        """Yield where kept white space may end, the farthest first: as far as it stands in the rendering too."""
        length = _common(self._content, stop, self._text, place, 1)
        yield from islice(_turns_of_kind(self._content, stop, length, 1), MOST_TRIES)

    def _kept_before(self, start: int, place: int) -> Iterator[int]:
        length = _common(self._content, start - 1, self._text, place - 1, -1)
        yield from islice(_turns_of_kind(self._content, start, length, -1), MOST_TRIES)

    def _inside(self) -> Turn | None:
        """Find the text by one of its characters, whose place another takes: length and ends stay as they are."""
        for place in islice(_word_places(self._content), MOST_TRIES):
            at = self._place_of(place)
            if at is None:
                continue
            lead, end = _outer(self._content)
            start = at - (place - lead)
            if start >= 0 and self._text.startswith(self._content[lead:end], start):
                core = (start, start + end - lead)
                return Turn((core,), "unchanged" if (lead, end) == (0, len(self._content)) else "respaced")
        return None

    def _place_of(self, place: int) -> int | None:
        base = _unused_block(self._messages, self._text, 1)
        if base is None:
            return None
        changed = list(self._messages)
        content = self._content[:place] + chr(base) + self._content[place + 1 :]
        changed[self._index] = changed[self._index]._replace(content=content)
        try:
            rendered = self._render(changed)
        except TemplateProblem:
            return None
        self._is_repeated |= rendered.count(chr(base)) > 1
        if rendered.count(chr(base)) != 1 or rendered.replace(chr(base), self._content[place]) != self._text:
            return None
        return rendered.index(chr(base))

    def _left(self) -> tuple[Span, ...]:
        """Return what is left of a thinking answer: its thinking or its answer, unchanged."""
        for part in _parts(self._content):
            spans = self._spans((part,))
            if spans and self._text[slice(*spans[0])] == self._content[slice(*part)]:
                return spans
        return ()


def _outer(content: str) -> Span:
    """Return where a text begins and ends without its outer white space."""
    return len(content) - len(content.lstrip()), len(content.rstrip())


def _ends(content: str) -> Intervals:
    return ((0, len(content)),) if content.strip() else ()


def _core(content: str) -> Intervals:
    return (_outer(content),) if content.strip() else ()


def _parts(content: str) -> Intervals:
    """Return thinking and answer, without white space at their ends; () where there is no thinking.

    The opening tag may be missing: some generation prompts write it.
    """
    closing = next(filter(_is_thinking, _CLOSING.finditer(content)), None)
    if closing is None:
        return ()
    opening = _OPENING.match(content, len(content) - len(content.lstrip()))
    first = opening.end() if opening and _is_thinking(opening) else 0
    found = []
    for start, stop in ((first, closing.start()), (closing.end(), len(content))):
        lead, end = _outer(content[start:stop])
        if lead < end:
            found.append((start + lead, start + end))
    return tuple(found)


def _is_thinking(tag: re.Match[str]) -> bool:
    name = tag[1] or "think"
    return "think" in name or name in ("reasoning", "thought")


def _common(content: str, at: int, text: str, place: int, step: int) -> int:
    """Count the characters from here on (or back) that are the same white space in both."""
    length = 0
    while 0 <= at < len(content) and 0 <= place < len(text) and content[at] == text[place] and content[at].isspace():
        at, place, length = at + step, place + step, length + 1
    return length


def _turns_of_kind(content: str, start: int, length: int, step: int) -> Iterator[int]:
    """Yield the farthest end of a run of white space, then nearer places where its kind changes."""
    inside = content[start : start + length] if step > 0 else content[start - length : start][::-1]
    for taken in range(length, 0, -1):
        if taken == length or inside[taken] != inside[taken - 1]:
            yield start + step * taken


def _word_places(content: str) -> Iterator[int]:
    """Yield a character in the midst of each of the longest words, where a template that compares does not look."""
    words = sorted(islice(re.finditer(r"\w+|[^\w\s]+", content), 1000), key=lambda word: -len(word.group()))
    for word in words:
        yield word.start() + len(word.group()) // 2


def _read(content: str, intervals: Intervals, spans: tuple[Span, ...], text: str) -> Turn:
    """Compare what stands at the marks, and around them, with the content."""
    for (start, stop), (first, last) in zip(intervals, spans, strict=True):
        if text[first:last] != content[start:stop]:
            return Turn((), "rewritten")
    lead, end = _outer(content)
    start, stop = intervals[0][0], intervals[-1][1]
    if len(intervals) == 1 and start <= lead and stop >= end:
        return Turn(spans, "unchanged" if (start, stop) == (0, len(content)) else "respaced")
    core = content[lead : max(end, stop)]
    place = spans[0][0] - (start - lead)
    if place >= 0 and text.startswith(core, place) and spans[-1][1] == place + stop - lead:
        return Turn(((place, place + len(core)),), "unchanged" if core == content else "respaced")
    around = _around(content, intervals, spans, text)
    return Turn(spans, "rewritten") if around is None else Turn((around,), "respaced")


def _around(content: str, intervals: Intervals, spans: tuple[Span, ...], text: str) -> Span | None:
    """Return the span of the whole content where it differs in white space around thinking and answer alone."""
    for (_, before), (after, _), (_, left), (right, _) in zip(intervals, intervals[1:], spans, spans[1:], strict=False):
        if content[before:after].split() != text[left:right].split():
            return None
    first = _tags_before(content[: intervals[0][0]], text, spans[0][0])
    last = _tags_after(content[intervals[-1][1] :], text, spans[-1][1])
    return None if first is None or last is None else (first, last)


def _tags(part: str) -> list[str] | None:
    """Return the thinking tags of which a part consists, white space aside; None where it has another text."""
    found = [tag.group() for pattern in (_OPENING, _CLOSING) for tag in pattern.finditer(part) if _is_thinking(tag)]
    return found if "".join(found) == "".join(part.split()) else None


def _tags_before(part: str, text: str, end: int) -> int | None:
    """Return where tags begin that stand before a place; None where they do not."""
    tags = _tags(part)
    for tag in reversed(tags or ()):
        end = len(text[:end].rstrip())
        if not text.endswith(tag, 0, end):
            return None
        end -= len(tag)
    return None if tags is None else end


def _tags_after(part: str, text: str, start: int) -> int | None:
    """Return where tags end that stand after a place; None where they do not."""
    tags = _tags(part)
    for tag in tags or ():
        start += len(text[start:]) - len(text[start:].lstrip())
        if not text.startswith(tag, start):
            return None
        start += len(tag)
    return None if tags is None else start
