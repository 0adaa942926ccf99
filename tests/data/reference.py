"""A second encoder that shares nothing with the first: slow, and simple enough to be believed.

Whose is a character of a rendering? Change one character of one turn, render again, and see which characters of the
rendering change. A character that cannot be changed alone (a letter of `<think>`, at which a template looks) belongs to
its turn where its neighbours do and the text between them stands as it was. Which characters does a token stand for?
Spell the tokens out, byte by byte, along the text. Where either cannot be decided, nothing is demanded, except that
what is another turn's is never the answer's.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from foretune.data import Message

Render = Callable[[Sequence[Message]], str]


class Claim(Enum):
    """What is known of a character or a token."""

    ANSWER = "it is the answer's"
    OTHER = "it is not the answer's"
    OPEN = "undecided"


class Place(NamedTuple):
    """Where one turn stands in a rendering, by what changes with it."""

    owned: frozenset[int]
    """Characters of the rendering that change with one of the turn's, and hold what it holds."""
    first: int | None
    """First character of its text without outer white space; None: blank, or not to be found."""
    last: int | None
    state: str
    """`kept`, `blank`, `lost` (dropped, rewritten or moved), or `unsure`."""
    loose: frozenset[int]
    """White space of which it cannot be told whether it is the turn's own."""


class Verdict(NamedTuple):
    """What the contract demands of a conversation in a rendering."""

    text: str
    claims: tuple[Claim, ...]
    """One for each character."""
    culprits: frozenset[int]
    """Numbers of messages that are not kept: one of them must be refused. Empty: nothing is lost for certain."""
    sure: bool
    """Whether it is decided that the row is accepted or refused."""
    places: tuple[Place, ...]


# -- whose a character is


def others_like(character: str) -> Iterator[str]:
    """Yield characters of the same kind, to put in its place."""
    if character.isspace():
        kind = "\t \n\u2003"
    elif character.isdigit():
        kind = "0579"
    elif character.islower():
        kind = "qvzj"
    elif character.isupper():
        kind = "QVZJ"
    else:
        kind = "~`q^"
    yield from (other for other in kind if other != character)


def _with_change(messages: Sequence[Message], turn: int, index: int, other: str) -> list[Message]:
    content = messages[turn].content
    changed = messages[turn]._replace(content=content[:index] + other + content[index + 1 :])
    return [*messages[:turn], changed, *messages[turn + 1 :]]


def changes(messages: Sequence[Message], turn: int, index: int, text: str, render: Render) -> set[int] | None:
    """Return which characters change with one of a turn's; None: the rendering changes in another way, or is none."""
    found: list[set[int]] = []
    for other in others_like(messages[turn].content[index]):
        try:
            changed = render(_with_change(messages, turn, index, other))
        except ValueError:
            return None
        if len(changed) != len(text):
            return None
        differing = {at for at, (a, b) in enumerate(zip(text, changed, strict=True)) if a != b}
        if len(differing) == 1 and changed[min(differing)] == other:
            return differing
        found.append(differing)
    return found[0] if all(each == found[0] for each in found) else None


TAGS = re.compile(r"\s*(</?think>)\s*")


def without_outer_space(text: str) -> str:
    """Drop the white space that a template may change: at the ends and around thinking tags."""
    return TAGS.sub(r"\1", text).strip()


def place_of(messages: Sequence[Message], turn: int, text: str, render: Render) -> Place:
    """Find one turn in a rendering by changing each of its characters."""
    content = messages[turn].content
    core = [index for index, character in enumerate(content) if not character.isspace()]
    moves = [changes(messages, turn, index, text, render) for index in range(len(content))]
    owned = {at for index, move in enumerate(moves) for at in move or () if text[at] == content[index]}
    altered = [move is None or any(text[at] != content[index] for at in move) for index, move in enumerate(moves)]
    if not core:
        return Place(frozenset(owned), None, None, "blank", frozenset())
    anchors = [(index, min(move)) for index in core if (move := moves[index]) is not None and len(move) == 1]
    dropped = [index for index in core if moves[index] == set()]
    if len(dropped) == len(core):
        return Place(frozenset(owned), None, None, "lost", frozenset())
    if any(move is not None and len(move) > 1 for move in moves) or not anchors:
        return Place(frozenset(owned), None, None, "unsure", frozenset())
    if [at for _, at in anchors] != sorted(at for _, at in anchors):
        return Place(frozenset(owned), None, None, "lost", frozenset())
    first = _walk(content[core[0] : anchors[0][0]], text, anchors[0][1], -1)
    last = _walk(content[anchors[-1][0] + 1 : core[-1] + 1], text, anchors[-1][1], 1)
    kept = content[core[0] : core[-1] + 1]
    if (
        first is None
        or last is None
        or any(text[at] != content[index] for index, at in anchors)
        or without_outer_space(text[first : last + 1]) != without_outer_space(kept)
    ):
        return Place(frozenset(owned), None, None, "lost", frozenset())
    edges = [(core[0], anchors[0][0]), (anchors[-1][0] + 1, core[-1] + 1)]
    if dropped or any(_is_rewritten_alike(messages, turn, edge, text, render) for edge in edges):
        return Place(frozenset(owned), None, None, "unsure", frozenset())
    owned |= set(range(first, last + 1))
    loose = set()
    if any(altered[: core[0]]) or kept.startswith(("<think>", "</think>")):
        loose |= _spaces_beside(text, first - 1, -1, owned)
    if any(altered[core[-1] + 1 :]) or kept.endswith(("<think>", "</think>")):
        loose |= _spaces_beside(text, last + 1, 1, owned)
    return Place(frozenset(owned), first, last, "kept", frozenset(loose))


def _is_rewritten_alike(
    messages: Sequence[Message], turn: int, edge: tuple[int, int], text: str, render: Render
) -> bool:
    """Say whether a template writes the same without one end of a turn: then it dropped it, and wrote it by itself."""
    start, end = edge
    content = messages[turn].content
    shorter = messages[turn]._replace(content=content[:start] + content[end:])
    try:
        return start < end and render([*messages[:turn], shorter, *messages[turn + 1 :]]) == text
    except ValueError:
        return False


def _walk(part: str, text: str, at: int, step: int) -> int | None:
    """Follow a part from a known character, white space aside; None where it does not stand there."""
    for character in part if step > 0 else reversed(part):
        if character.isspace():
            continue
        at += step
        while 0 <= at < len(text) and text[at].isspace():
            at += step
        if not 0 <= at < len(text) or text[at] != character:
            return None
    return at


def _spaces_beside(text: str, at: int, step: int, owned: set[int]) -> set[int]:
    found = set()
    while 0 <= at < len(text) and text[at].isspace():
        found |= {at} - owned
        at += step
    return found


# -- what a row must become


def judge(
    messages: Sequence[Message], render: Render, special_texts: Sequence[str], *, tagged: frozenset[int] | None = None
) -> Verdict:
    """Decide what the contract demands of a conversation; `tagged` are the characters inside of generation tags."""
    text = render(messages)
    places = tuple(place_of(messages, turn, text, render) for turn in range(len(messages)))
    culprits = {turn + 1 for turn, place in enumerate(places) if place.state == "lost"} | _inversions(places)
    answers = [turn for turn, message in enumerate(messages) if message.role == "assistant"]
    others = frozenset().union(*(places[turn].owned for turn in range(len(messages)) if turn not in answers))
    sure = bool(culprits) or all(place.state in ("kept", "blank") for place in places)
    claims = [Claim.OPEN] * len(text)
    if tagged is not None:
        claims = [Claim.ANSWER if at in tagged else Claim.OTHER for at in range(len(text))]
        culprits |= _missed(messages, places, tagged)
    elif sure and not culprits:
        claims = _claims(text, [places[turn] for turn in answers], special_texts)
        claims = [Claim.OTHER if at in others else claim for at, claim in enumerate(claims)]
    else:
        claims = [Claim.OTHER if at in others else Claim.OPEN for at in range(len(text))]
    return Verdict(text, tuple(claims), frozenset(culprits), sure or bool(culprits), places)


def _inversions(places: Sequence[Place]) -> set[int]:
    """Return the numbers of messages that stand before an earlier one, and of those."""
    known = [(turn + 1, place.first) for turn, place in enumerate(places) if place.first is not None]
    return {number for a, at in known for b, after in known if a < b and after < at for number in (a, b)}


def _missed(messages: Sequence[Message], places: Sequence[Place], tagged: frozenset[int]) -> set[int]:
    """Return the numbers of messages that generation tags hold wrongly."""
    found = set()
    for turn, (message, place) in enumerate(zip(messages, places, strict=True)):
        if place.first is None or place.last is None:
            continue
        whole = set(range(place.first, place.last + 1))
        if not whole <= tagged if message.role == "assistant" else whole & tagged:
            found.add(turn + 1)
    return found


def _claims(text: str, answers: Sequence[Place], special_texts: Sequence[str]) -> list[Claim]:
    claims = [Claim.OTHER] * len(text)
    ends = []
    for place in answers:
        assert place.last is not None
        end = place.last + 1
        while end in place.owned:
            end += 1
        ends.append(end)
        for at in place.owned:
            claims[at] = Claim.ANSWER
        for at in place.loose:
            claims[at] = Claim.OPEN
    closing = _closing(text[ends[-1] :], special_texts)
    if closing is None:
        for end in ends:
            claims[end:] = [claim if claim is Claim.ANSWER else Claim.OPEN for claim in claims[end:]]
        return claims
    for end, place in zip(ends, answers, strict=True):
        unsure = bool(place.loose or answers[-1].loose)
        if text.startswith(closing, end):
            claims[end : end + len(closing)] = [Claim.OPEN if unsure else Claim.ANSWER] * len(closing)
        elif unsure:
            claims[end : end + len(closing) + 9] = [Claim.OPEN] * len(claims[end : end + len(closing) + 9])
    return claims


def _closing(tail: str, special_texts: Sequence[str]) -> str | None:
    """Return what closes the last answer: white space and a control token, or one word; None where it is unclear."""
    rest = tail.lstrip()
    for special in sorted(special_texts, key=len, reverse=True):
        if rest.startswith(special):
            return tail[: len(tail) - len(rest)] + special
    words = rest.split()
    if len(words) > 1:
        return None
    return tail[: len(tail) - len(rest)] + words[0] if words else ""


# -- which characters a token stands for


def byte_alphabet() -> dict[str, int]:
    """Return the printable character by which byte-level tokenizers write each byte (GPT-2's `bytes_to_unicode`)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [value for value in range(256) if value not in shown]
    return {chr(value): value for value in shown} | {chr(256 + index): value for index, value in enumerate(hidden)}


ALPHABET = byte_alphabet()


def spelled(token: str, *, byte_level: bool) -> bytes:
    """Return the bytes that a token of the vocabulary stands for."""
    if byte_level:
        return bytes(ALPHABET[character] for character in token)
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def token_characters(text: str, ids: Sequence[int], backend: Any) -> list[frozenset[int]] | None:
    """Return the characters of each token by spelling the tokens along the text; None where there is no one way."""
    added = backend.get_added_tokens_decoder()
    byte_level = "ByteLevel" in str(backend.pre_tokenizer)
    data = text.encode()
    owner = [at for at, character in enumerate(text) for _ in character.encode()]
    ways: list[tuple[int, list[tuple[int, int]]]] = [(0, [])]
    begins = True
    for number in ids:
        token = added.get(number)
        piece = token.content.encode() if token else spelled(backend.id_to_token(number), byte_level=byte_level)
        longer = []
        for at, spans in ways:
            ends = _swallowed(token, data, at) if token else _ends_of(piece, data, at, dummy=begins and not byte_level)
            longer += [(end, [*spans, (at, end)]) for end in ends]
        ways, begins = longer, token is not None
    whole = [spans for end, spans in ways if end == len(data)]
    if len(whole) != 1:
        return None
    found = [frozenset(owner[start:end]) for start, end in whole[0]]
    return _fused(found, ids, backend) if "Unigram" in str(backend.model) else found


def _ends_of(piece: bytes, data: bytes, at: int, *, dummy: bool) -> set[int]:
    """Return where a token may end that begins at a byte; its word boundary may stand for nothing."""
    ends = {at + len(piece)} if data.startswith(piece, at) else set()
    if dummy and piece.startswith(b" ") and data.startswith(piece[1:], at):
        ends.add(at + len(piece) - 1)
    return ends


def _swallowed(token: Any, data: bytes, at: int) -> set[int]:
    """Return where a control token ends that begins at a byte, with the white space that it takes with it."""
    rest = data[at:].decode()
    before = len(rest) - len(rest.lstrip()) if token.lstrip else 0
    if not rest.startswith(token.content, before):
        return set()
    end = before + len(token.content)
    after = len(rest[end:]) - len(rest[end:].lstrip()) if token.rstrip else 0
    return {at + len(rest[: end + after].encode())}


def _fused(characters: Sequence[frozenset[int]], ids: Sequence[int], backend: Any) -> list[frozenset[int]]:
    """Give each byte of an unknown piece all of its characters: Unigram makes a run of unknown ones a single piece."""
    is_byte = [re.fullmatch("<0x[0-9A-F]{2}>", backend.id_to_token(number)) is not None for number in ids]
    found = list(characters)
    for token in range(len(ids)):
        first = last = token
        while is_byte[token] and first > 0 and is_byte[first - 1]:
            first -= 1
        while is_byte[token] and last + 1 < len(ids) and is_byte[last + 1]:
            last += 1
        found[token] = frozenset().union(*characters[first : last + 1])
    return found


def token_claims(characters: Sequence[frozenset[int]], claims: Sequence[Claim]) -> list[Claim]:
    """Decide each token: the answer's, where all of its characters are and none is shared with one that is not."""
    alone = [_claim_of(own, claims) for own in characters]
    found = []
    for token, own in enumerate(characters):
        shared = [alone[other] for other, theirs in enumerate(characters) if own & theirs]
        found.append(_worst(shared) if shared else _dummy(token, characters, claims))
    return found


def _claim_of(own: frozenset[int], claims: Sequence[Claim]) -> Claim:
    return _worst([claims[at] for at in own]) if own else Claim.OPEN


def _worst(claims: Sequence[Claim]) -> Claim:
    if Claim.OTHER in claims:
        return Claim.OTHER
    return Claim.OPEN if Claim.OPEN in claims else Claim.ANSWER


def _dummy(token: int, characters: Sequence[frozenset[int]], claims: Sequence[Claim]) -> Claim:
    """Demand of a token without characters only that it stands beside an answer, if it is the answer's."""
    before = max((at for own in characters[:token] for at in own), default=None)
    beside = [at for at in (before, 0 if before is None else before + 1) if at is not None and at < len(claims)]
    return Claim.OTHER if all(claims[at] is Claim.OTHER for at in beside) else Claim.OPEN
