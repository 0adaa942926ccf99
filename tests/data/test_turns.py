"""Each turn is found where it stands, whatever a template does around it; and what a template did to it is told."""

import re
from collections.abc import Callable, Sequence

import pytest
from data import made, reference
from hypothesis import given, settings
from hypothesis import strategies as st

from foretune.data import Message, locate_turns

Write = Callable[[Sequence[Message]], str]


def tags(messages: Sequence[Message]) -> str:
    return "".join(f"<{message.role}>\n{message.content}</{message.role}>\n" for message in messages)


def found(messages: Sequence[Message], write: Write) -> list[tuple[str, ...]]:
    """Return the texts that turns are found to have."""
    located = locate_turns(messages, write(messages), write)
    return [tuple(located.text[a:b] for a, b in turn.spans) for turn in located.turns]


def states(messages: Sequence[Message], write: Write) -> list[str]:
    return [turn.state for turn in locate_turns(messages, write(messages), write).turns]


def chat(*texts: str) -> list[Message]:
    return [Message("assistant" if turn % 2 else "user", text) for turn, text in enumerate(texts)]


TEXTS = st.text(st.sampled_from("ab 4\n<>/user😀你\u0301\u200d\U00100000\ue000"), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=5))
def test_a_turn_that_is_written_as_it_is_is_found_as_it_is(texts: list[str]) -> None:
    messages = chat(*texts)
    located = locate_turns(messages, tags(messages), tags)
    text, at = tags(messages), 0
    for turn, message in zip(located.turns, messages, strict=True):
        start = at + len(f"<{message.role}>\n")
        if turn.state != "blank":
            assert turn.spans == ((start, start + len(message.content)),)
        at = start + len(message.content) + len(f"</{message.role}>\n")
    assert at == len(text)


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=5))
def test_a_turn_that_is_trimmed_keeps_its_words(texts: list[str]) -> None:
    messages = chat(*texts)

    def write(turns: Sequence[Message]) -> str:
        return tags([turn._replace(content=turn.content.strip()) for turn in turns])

    for kept, state, message in zip(found(messages, write), states(messages, write), messages, strict=True):
        if message.content.strip():
            assert [part.strip() for part in kept] == [message.content.strip()]
            assert state in ("unchanged", "respaced")


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS.filter(str.strip), min_size=2, max_size=5), st.data())
def test_a_turn_that_is_dropped_is_not_found(texts: list[str], data: st.DataObject) -> None:
    messages = chat(*texts)
    dropped = data.draw(st.integers(0, len(messages) - 1))

    def write(turns: Sequence[Message]) -> str:
        return tags([turn for at, turn in enumerate(turns) if at != dropped])

    located = locate_turns(messages, write(messages), write)
    assert not located.turns[dropped].is_kept
    assert all(turn.is_kept for at, turn in enumerate(located.turns) if at != dropped)


@pytest.mark.parametrize("template", made.TEMPLATES)
def test_what_is_found_of_a_turn_belongs_to_no_other(template: str) -> None:
    tokenizer = made.made("words", template)

    def write(messages: Sequence[Message]) -> str:
        return tokenizer.render(messages).text

    for messages in made.CONVERSATIONS.values():
        if template == "raises_on_system" and messages[0].role == "system":
            continue
        located = locate_turns(messages, write(messages), write)
        places = [reference.place_of(messages, turn, located.text, write) for turn in range(len(messages))]
        for turn, each in enumerate(located.turns):
            own = {at for start, end in each.spans for at in range(start, end)}
            others = set().union(*(place.owned for other, place in enumerate(places) if other != turn))
            assert not own & (others - places[turn].owned)


# -- what a template did to a turn


def replaced(old: str, new: str) -> Write:
    return lambda messages: tags([turn._replace(content=turn.content.replace(old, new)) for turn in messages])


def test_a_replaced_word_is_no_unchanged_turn() -> None:
    located = locate_turns(chat("a b", "c d"), replaced("d", "e")(chat("a b", "c d")), replaced("d", "e"))
    assert [turn.is_kept for turn in located.turns] == [True, False]


def test_one_turn_dropped_among_equal_ones_is_the_one_that_is_missed() -> None:
    messages = chat("Yes.", "Yes.", "Yes.", "Yes.")

    def write(turns: Sequence[Message]) -> str:
        return tags([turn for at, turn in enumerate(turns) if at != 2])

    located = locate_turns(messages, write(messages), write)
    assert [turn.is_kept for turn in located.turns] == [True, True, False, True]


def test_equal_turns_that_change_places_are_not_in_order() -> None:
    messages = chat("Yes.", "Yes.", "Yes.")

    def write(turns: Sequence[Message]) -> str:
        return tags([turns[1], turns[0], *turns[2:]])

    assert not all(turn.is_kept for turn in locate_turns(messages, write(messages), write).turns)


@pytest.mark.parametrize(
    ("content", "written"),
    [
        ("<think>a</think>b", "<think>\na\n</think>\n\nb"),
        ("<think>\na\n</think>\n\nb", "<think>a</think>b"),
        (" <think> a </think> b ", "<think>\na\n</think>\n\nb"),
    ],
)
def test_white_space_around_thinking_may_change(content: str, written: str) -> None:
    def write(turns: Sequence[Message]) -> str:
        def respaced(text: str) -> str:
            thought, tag, said = text.partition("</think>")
            if not tag:
                return text
            thought = thought.partition("<think>")[2].strip()
            newline = "\n" if "\n" in written else ""
            return f"<think>{newline}{thought}{newline}</think>{newline * 2}{said.strip()}"

        return tags([turn._replace(content=respaced(turn.content)) for turn in turns])

    messages = chat("1", content)
    assert found(messages, write)[1] == (written,)
    assert states(messages, write)[1] == "respaced"


def test_thinking_that_is_stripped_leaves_an_answer_that_is_not_the_turns() -> None:
    def write(turns: Sequence[Message]) -> str:
        return tags([turn._replace(content=turn.content.split("</think>")[-1].strip()) for turn in turns])

    messages = chat("1", "<think>\nso\n</think>\n\nb c")
    located = locate_turns(messages, write(messages), write)
    assert not located.turns[1].is_kept
    assert found(messages, write)[1] in ((), ("b c",))


def test_an_empty_turn_is_blank_and_nothing_of_it_is_missed() -> None:
    located = locate_turns(chat("", "a"), tags(chat("", "a")), tags)
    assert located.turns[0].state == "blank"
    assert all(turn.is_kept for turn in located.turns)


def test_a_turn_in_a_templates_words_is_found_where_it_was_put() -> None:
    messages = chat("user", "assistant", "</user>", "<assistant>")
    assert found(messages, tags) == [(message.content,) for message in messages]


def test_a_template_that_writes_every_private_use_plane_is_read_all_the_same() -> None:
    def write(turns: Sequence[Message]) -> str:
        return "\ue000\U000f0000\U00100000" + tags(turns) + "\U0010fffd"

    messages = chat("a", "b c")
    assert found(messages, write) == [("a",), ("b c",)]


def test_a_template_that_drops_private_use_characters_proves_nothing_false() -> None:
    def write(turns: Sequence[Message]) -> str:
        return tags(
            [turn._replace(content=re.sub("[\U00100000-\U0010fffd\ue000-\uf8ff]", "", turn.content)) for turn in turns]
        )

    messages = chat("a", "b c")
    located = locate_turns(messages, write(messages), write)
    for turn, message in zip(located.turns, messages, strict=True):
        texts = [located.text[a:b] for a, b in turn.spans]
        assert (not turn.is_kept) or texts == [message.content]
