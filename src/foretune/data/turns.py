"""Where each turn of a conversation stands in what a chat template makes of it, proved on every row.

A template may trim a text, drop it, strip its thinking, or put it elsewhere, so a text cannot merely be searched for.
The conversation is rendered a second time with a private-use character before and after each text. If that
rendering without these characters equals the first, they show where the texts are; what stands between them is
compared with the text. Where a template looks at the ends of a text (it trims, or splits at `</think>`), the
characters stand further inside. Nothing is known of any family's template.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from foretune.data.rows import Message
from foretune.data.tokenizer import TemplateProblem

__all__ = ["Located", "Span", "Turn", "locate_turns"]

Span = tuple[int, int]
"""First character and the one after the last."""
State = Literal["unchanged", "respaced", "rewritten", "dropped", "moved", "blank"]
Render = Callable[[Sequence[Message]], str]

FIRST_MARK, LAST_MARK = 0x100000, 0x10FFFD
"""Plane 16 is for private use: no character of it has a meaning, and hardly a text has one."""
BLOCK_OF_MARKS = 0x1000

_THINKING = re.compile(
    r"(?P<before>\s*(?:<(?P<tag>[a-z:_]*think[a-z]*|reasoning|thought)>|\[THINK\])\s*)?(?P<thought>.*?)"
    r"\s*(?P<close></(?(tag)(?P=tag)|[a-z:_]*think[a-z]*)>|\[/THINK\])(?P<space>\s*)(?P<answer>.*)",
    re.DOTALL,
)
"""Thinking before an answer, with or without the opening tag (which some generation prompts write)."""


class Turn(NamedTuple):
    """Where one message stands in a rendering, and what has become of it."""

    spans: tuple[Span, ...]
    """Its text in the rendering; what is left of it where it was rewritten."""
    state: State
    """`respaced`: white space at its ends, or around its thinking tags, is not as it was. `blank`: there is no text."""

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
    contents = [message.content for message in messages]
    turns: list[Turn | None] = [None if content.strip() else Turn((), "blank") for content in contents]
    # First all at once; then without outer white space, which settles the texts that have none; then one by one.
    for ways in ([_ends(content) for content in contents], [_core(content) for content in contents]):
        marked = [() if turn else way for turn, way in zip(turns, ways, strict=True)]
        for index, spans in enumerate(_mark(messages, marked, text, render) or ()):
            if spans and marked[index] == _ends(contents[index]):
                turn = _read(contents[index], marked[index], spans, text)
                turns[index] = turn if turn.is_kept else None
        if None not in turns:
            break
    every = (turn or _locate_alone(messages, index, text, render) for index, turn in enumerate(turns))
    return Located(text, tuple(_in_order(every)))


def _in_order(turns: Iterable[Turn]) -> Iterable[Turn]:
    end = 0
    for turn in turns:
        if turn.spans:
            if turn.spans[0][0] < end:
                turn = Turn((), "moved")
            else:
                end = turn.spans[-1][1]
        yield turn


# -- marks


Intervals = tuple[Span, ...]
"""Parts of a content that are marked at both ends."""


def _mark(
    messages: Sequence[Message], marked: Sequence[Intervals], text: str, render: Render
) -> list[tuple[Span, ...] | None] | None:
    """Return where the marked parts of each message are. None: the marks change the rendering, or cannot be set.

    None of one message: a part of it is missing, stands twice or in another order.
    """
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
        found.append(tuple(zip(once[::2], once[1::2], strict=True)) if is_whole else None)
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


def _locate_alone(messages: Sequence[Message], index: int, text: str, render: Render) -> Turn:
    """Mark one message alone: at its ends, then further inside, until its text is found whole."""
    content = messages[index].content
    partial = Turn((), "dropped")
    for intervals in _ways(content):
        marked: list[Intervals] = [()] * len(messages)
        marked[index] = intervals
        found = _mark(messages, marked, text, render)
        spans = None if found is None else found[index]
        if spans is None:
            continue
        turn = _read(content, intervals, spans, text)
        if turn.is_kept:
            return turn
        if len(turn.spans) >= len(partial.spans):
            partial = turn
    for part in _parts(content):
        marked = [()] * len(messages)
        marked[index] = (part,)
        found = _mark(messages, marked, text, render)
        spans = None if found is None else found[index]
        if not partial.spans and spans and text[spans[0][0] : spans[0][1]] == content[slice(*part)]:
            partial = Turn(spans, "rewritten")
    return partial


def _ends(content: str) -> Intervals:
    return ((0, len(content)),) if content.strip() else ()


def _core(content: str) -> Intervals:
    lead, end = len(content) - len(content.lstrip()), len(content.rstrip())
    return ((lead, end),) if lead < end else ()


def _ways(content: str) -> Iterable[Intervals]:
    """Yield where to mark a content: at its ends, inside of its outer white space, at its thinking, in its middle."""
    lead, end = len(content) - len(content.lstrip()), len(content.rstrip())
    ways: dict[Intervals, None] = {}
    for start in (0, lead):
        for stop in (len(content), end):
            ways[((start, stop),)] = None
    parts = _parts(content)
    if parts:
        ways[(*parts[:-1], (parts[-1][0], len(content)))] = None
        ways[parts] = None
    ways[(_middle(content),)] = None
    return ways


def _parts(content: str) -> Intervals:
    """Return the thinking and the answer, without white space at their ends; () where there is no thinking."""
    match = _THINKING.fullmatch(content)
    if match is None:
        return ()
    thought, answer = match.span("thought"), match.span("answer")
    end = answer[0] + len(match["answer"].rstrip())
    return tuple(part for part in (thought, (answer[0], end)) if part[0] < part[1])


def _middle(content: str) -> Span:
    """Return one character inside the longest word, where a template that compares or splits does not look."""
    longest = max(re.finditer(r"\w+|\S+", content), key=lambda match: len(match.group()))
    place = longest.start() + len(longest.group()) // 2
    return place, place + 1


def _read(content: str, intervals: Intervals, spans: tuple[Span, ...], text: str) -> Turn:
    """Compare what stands at the marks, and around them, with the content."""
    for (start, stop), (first, last) in zip(intervals, spans, strict=True):
        if text[first:last] != content[start:stop]:
            return Turn((), "rewritten")
    lead, end = len(content) - len(content.lstrip()), len(content.rstrip())
    start, stop = intervals[0][0], intervals[-1][1]
    if len(intervals) == 1 and start <= lead and stop >= end:
        return Turn(spans, "unchanged" if (start, stop) == (0, len(content)) else "respaced")
    core = content[lead : max(end, stop)]
    place = spans[0][0] - (start - lead)
    if place >= 0 and text.startswith(core, place) and spans[-1][1] == place + stop - lead:
        return Turn(((place, place + len(core)),), "unchanged" if core == content else "respaced")
    around = _around(content, intervals, spans, text) if _marks_thinking(content, intervals) else None
    return Turn(spans, "rewritten") if around is None else Turn((around,), "respaced")


def _marks_thinking(content: str, intervals: Intervals) -> bool:
    """Whether the marked parts are the thinking and the answer, so that what is left out are tags and white space."""
    parts = _parts(content)
    return bool(parts) and (intervals[:-1], intervals[-1][0]) == (parts[:-1], parts[-1][0])


def _around(content: str, intervals: Intervals, spans: tuple[Span, ...], text: str) -> Span | None:
    """Return the span of the whole content where it differs in white space around its marked parts alone."""
    for (_, before), (after, _), (_, left), (right, _) in zip(intervals, intervals[1:], spans, spans[1:], strict=False):
        if content[before:after].split() != text[left:right].split():
            return None
    prefix, suffix = content[: intervals[0][0]], content[intervals[-1][1] :]
    first = _loose(prefix, r"\Z").search(text[: spans[0][0]]) if prefix.strip() else None
    if prefix.strip() and first is None:
        return None
    last = _loose(suffix, "", before=r"\s*").match(text, spans[-1][1]) if suffix.strip() else None
    if suffix.strip() and last is None:
        return None
    return (first.start() if first else spans[0][0], last.end() if last else spans[-1][1])


def _loose(part: str, after: str, before: str = "") -> re.Pattern[str]:
    """Match the words of a part with any white space between them."""
    words = r"\s+".join(map(re.escape, part.split()))
    return re.compile(f"{before}{words}" + (rf"\s*{after}" if after else ""))
