"""What is trained on is what a second, slow encoder decides (`reference.py`), on made tokenizers and templates."""

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from data import made, reference
from data.reference import Claim
from hypothesis import given, settings
from hypothesis import strategies as st

from foretune.data import (
    Detail,
    EncodeSettings,
    Encoding,
    Example,
    InstructionRow,
    Message,
    MessagesRow,
    Rendering,
    Row,
    RowProblem,
    Tokenizer,
    TokenizerFacts,
    Trait,
    encode_prompt,
    encode_rows,
    format_instruction,
    turns,
)
from foretune.runtime.tokenizer import ModelTokenizer

ASSISTANT = EncodeSettings(supervision="assistant_only")
TAGS_ONLY = EncodeSettings(supervision="assistant_only", spans="template")
REWRITE = EncodeSettings(supervision="assistant_only", allow_template_rewrite=True)
TOKENIZERS = sorted(made.MAKERS)


class Encoded(NamedTuple):
    """What came of one row: an example, or a refusal."""

    example: Example | None
    detail: Detail | None
    problem: str

    @property
    def refused_message(self) -> int | None:
        found = re.match(r"line 7, message (\d+): ", self.problem)
        return int(found[1]) if found else None


def encoded(row: Row, tokenizer: Tokenizer, how: EncodeSettings = ASSISTANT) -> Encoded:
    try:
        [(example, detail)] = encode_rows([row], tokenizer, how)
    except RowProblem as problem:
        return Encoded(None, None, str(problem))
    return Encoded(example, detail, "")


def supervised(found: Encoded) -> list[str]:
    """Return the texts of the answer's tokens, as the rendering has them; EOS that stands after it is ''."""
    assert found.example is not None, found.problem
    assert found.detail is not None
    text, starts, ends = found.detail
    return [text[a:b] for a, b, is_answer in zip(starts, ends, found.example.answer, strict=True) if is_answer]


# -- the native call, and the reference


def native_rendering(tokenizer: str, template: str, messages: Sequence[Message]) -> str:
    """Render by Transformers' own call. Raises ValueError where the template refuses."""
    from jinja2 import TemplateError

    fast = made.made_tokenizer(tokenizer)
    listed = [message._asdict() for message in messages]
    try:
        return fast.apply_chat_template(listed, chat_template=made.frozen_twin(template), tokenize=False)
    except TemplateError as error:
        raise ValueError(str(error)) from error


def native_ids(tokenizer: str, template: str, messages: Sequence[Message]) -> list[int]:
    fast = made.made_tokenizer(tokenizer)
    listed = [message._asdict() for message in messages]
    text = made.frozen_twin(template)
    return fast.apply_chat_template(listed, chat_template=text, tokenize=True, return_dict=False)


def tagged_characters(tokenizer: str, template: str, messages: Sequence[Message]) -> frozenset[int] | None:
    if "{% generation %}" not in template:
        return None
    inside, depth, at = set(), 0, 0
    for character in native_rendering(tokenizer, made.marked_twin(template), messages):
        if character in "⟦⟧":
            depth += 1 if character == "⟦" else -1
            continue
        inside |= {at} if depth else set()
        at += 1
    return frozenset(inside)


def verdict_on(tokenizer: str, template: str, messages: Sequence[Message]) -> reference.Verdict | None:
    """Return what the reference decides; None where the template refuses the conversation."""
    special_texts = made.made(tokenizer, template).facts.special_texts
    source = made.TEMPLATES[template]
    try:
        return reference.judge(
            messages,
            lambda changed: native_rendering(tokenizer, source, changed),
            special_texts,
            tagged=tagged_characters(tokenizer, source, messages),
        )
    except ValueError:
        return None


@functools.cache
def made_verdict(template: str, conversation: str, is_plain: bool) -> reference.Verdict | None:
    """Return the reference's verdict, which is one for all tokenizers that know the same control tokens."""
    return verdict_on("plain" if is_plain else "words", template, made.CONVERSATIONS[conversation])


def learns_no_text(
    messages: Sequence[Message], verdict: reference.Verdict, characters: list[frozenset[int]], claims: list[Claim]
) -> bool:
    """Say whether no token of an answer's own text is certain to be supervised: what closes it teaches nothing."""
    places = (place for place, message in zip(verdict.places, messages, strict=True) if message.role == "assistant")
    said = frozenset().union(*(place.owned for place in places))
    tokens = zip(characters[1:], claims[1:], strict=True)
    return not any(claim is Claim.ANSWER and own & said for own, claim in tokens)


def spelled_out(tokenizer: str, template: str, messages: Sequence[Message], text: str) -> list[frozenset[int]]:
    ids = native_ids(tokenizer, made.TEMPLATES[template], messages)
    characters = reference.token_characters(text, ids, made.made_tokenizer(tokenizer).backend_tokenizer)
    assert characters is not None, "the tokens cannot be spelled out"
    return characters


def mask_claims(tokenizer: str, template: str, messages: Sequence[Message], verdict: reference.Verdict) -> list[Claim]:
    return reference.token_claims(spelled_out(tokenizer, template, messages, verdict.text), verdict.claims)


def disagreement(tokenizer: str, template: str, messages: Sequence[Message], verdict: reference.Verdict | None) -> str:
    """Say in what the encoder and the reference differ on one conversation; '' where they do not."""
    found = encoded(MessagesRow(7, tuple(messages)), made.made(tokenizer, template))
    if verdict is None:
        is_whole_row = found.example is None and found.refused_message is None
        return "" if is_whole_row else "the template's refusal is not told"
    if verdict.culprits:
        number = found.refused_message
        is_named = number in verdict.culprits or (number and verdict.places[number - 1].state == "unsure")
        return "" if is_named else f"one of messages {sorted(verdict.culprits)} is lost: {found.problem or 'accepted'}"
    characters = spelled_out(tokenizer, template, messages, verdict.text)
    claims = reference.token_claims(characters, verdict.claims)
    if found.example is None or found.detail is None:
        is_told = "no token of the answer" in found.problem
        nothing_to_learn = is_told and learns_no_text(messages, verdict, characters, claims)
        return "" if nothing_to_learn or not verdict.sure else f"nothing is lost: {found.problem}"
    if list(found.example.ids) != native_ids(tokenizer, made.TEMPLATES[template], messages):
        return "the ids are not the native ones"
    if found.detail.text != verdict.text:
        return "the rendering is not the native one"
    wrong = [
        (token, claim.value)
        for token, (claim, is_answer) in enumerate(zip(claims, found.example.answer, strict=True))
        if claim is not Claim.OPEN and (claim is Claim.ANSWER) != bool(is_answer)
    ]
    return f"tokens {wrong}" if wrong else ""


LEFT_OUT = {"looks_at_ends": {"spaces"}, "joins_lines": {"spaces"}}
"""Where the reference knows more: white space before an answer that no mark proves to be the turn's own is masked."""

PAIRS = [
    (template, conversation)
    for template in made.TEMPLATES
    for conversation in made.CONVERSATIONS
    if conversation not in LEFT_OUT.get(template, ())
]


@pytest.mark.parametrize("template", made.TEMPLATES)
def test_ids_and_answers_are_the_references(template: str) -> None:
    differences = {}
    for turn, conversation in enumerate(name for of, name in PAIRS if of == template):
        tokenizer = TOKENIZERS[(turn + list(made.TEMPLATES).index(template)) % len(TOKENIZERS)]
        verdict = made_verdict(template, conversation, tokenizer == "plain")
        differences[conversation, tokenizer] = disagreement(
            tokenizer, template, made.CONVERSATIONS[conversation], verdict
        )
    assert not {case: difference for case, difference in differences.items() if difference}


@pytest.mark.full
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("template", made.TEMPLATES)
def test_ids_and_answers_are_the_references_with_every_tokenizer(template: str, tokenizer: str) -> None:
    differences = {}
    for conversation in (name for of, name in PAIRS if of == template):
        verdict = made_verdict(template, conversation, tokenizer == "plain")
        differences[conversation] = disagreement(tokenizer, template, made.CONVERSATIONS[conversation], verdict)
    assert not {case: difference for case, difference in differences.items() if difference}


def test_the_reference_decides_nearly_everything() -> None:
    verdicts = [made_verdict(template, conversation, False) for template, conversation in PAIRS]
    decided = [verdict for verdict in verdicts if verdict is None or verdict.sure]
    assert len(decided) > 0.9 * len(verdicts)


# -- properties

WORDS = ["a", "4", " ", "\n", "\t", "answer", "http:", "//", "user", "assistant", "STOP", '"', "\\n", "{{", "/no_think"]
SIGNS = ["😀", "👩\u200d👩\u200d👧", "e\u0301", "你好", "\u200d", "\xa0", "\U00100000"]
MARKS = ["<think>", "</think>", "<|im_end|>", "<|im_start|>", "</s>", "[INST]"]
PIECES = st.sampled_from([*WORDS, *SIGNS, *MARKS])
TEXTS = st.lists(PIECES, max_size=7).map("".join)
SAYINGS = TEXTS.filter(str.strip)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    head = [Message("system", draw(TEXTS))] if draw(st.booleans()) else []
    turns = [
        (Message("user", draw(TEXTS)), Message("assistant", draw(SAYINGS))) for _ in range(draw(st.integers(1, 3)))
    ]
    return (*head, *(message for pair in turns for message in pair))


SEPARATED = sorted(set(made.TEMPLATES) - {"no_seams"})


@pytest.mark.parametrize("how", [ASSISTANT, REWRITE], ids=["strict", "rewrite"])
@settings(max_examples=60, deadline=None)
@given(conversations(), st.sampled_from(SEPARATED), st.sampled_from(TOKENIZERS))
def test_nothing_of_a_user_or_system_turn_is_ever_supervised(
    how: EncodeSettings, messages: tuple[Message, ...], template: str, tokenizer: str
) -> None:
    found = encoded(MessagesRow(7, messages), made.made(tokenizer, template), how)
    if found.example is None:
        assert found.problem.startswith("line 7")
        return
    verdict = verdict_on(tokenizer, template, messages)
    assert verdict is not None
    claims = mask_claims(tokenizer, template, messages, verdict)
    taught = {claim for claim, is_answer in zip(claims, found.example.answer, strict=True) if is_answer}
    assert Claim.OTHER not in taught


@settings(max_examples=60, deadline=None)
@given(conversations(), st.sampled_from(["markup", "trims", "begins", "tags", "default_system"]))
def test_every_answer_is_supervised_to_its_last_character(messages: tuple[Message, ...], template: str) -> None:
    assert not disagreement("words", template, messages, verdict_on("words", template, messages))


@settings(max_examples=60, deadline=None)
@given(conversations(), st.sampled_from(SEPARATED), st.sampled_from(TOKENIZERS))
def test_ids_and_text_do_not_depend_on_supervision(
    messages: tuple[Message, ...], template: str, tokenizer: str
) -> None:
    row = MessagesRow(7, messages)
    taught = encoded(row, made.made(tokenizer, template))
    whole = encoded(row, made.made(tokenizer, template), EncodeSettings())
    if taught.example is not None:
        assert whole.example is not None
        assert (whole.example.ids, whole.detail) == (taught.example.ids, taught.detail)
    else:
        assert whole.example is not None or whole.problem.startswith("line 7")


@settings(max_examples=100, deadline=None)
@given(TEXTS.filter(str.strip), TEXTS, SAYINGS, st.sampled_from(sorted(set(TOKENIZERS) - {"plain"})))
def test_an_instructions_answer_is_its_output_and_one_eos(
    instruction: str, about: str, output: str, tokenizer: str
) -> None:
    fast = made.made_tokenizer(tokenizer)
    about_part = f"### Input:\n{about}\n\n" if about else ""
    prompt = f"### Instruction:\n{instruction}\n\n{about_part}### Response:\n"
    text = prompt + output
    found = encoded(InstructionRow(7, instruction, about, output), made.made(tokenizer, "markup"))
    ids = fast(text, add_special_tokens=False)["input_ids"]
    characters = reference.token_characters(text, ids, fast.backend_tokenizer)
    assert characters is not None
    claims = [Claim.ANSWER if at >= len(prompt) else Claim.OTHER for at in range(len(text))]
    wanted = reference.token_claims(characters, claims)
    if Claim.ANSWER not in wanted[1:]:  # only EOS could be learnt, and the row would teach nothing else
        assert "no token of the answer can be supervised" in found.problem
        return
    if ids[-1] != fast.eos_token_id:  # an output may end in EOS by itself
        ids, wanted = [*ids, fast.eos_token_id], [*wanted, Claim.ANSWER]
    assert found.example is not None
    assert list(found.example.ids) == ids
    assert all(
        claim is Claim.OPEN or (claim is Claim.ANSWER) == bool(is_answer)
        for claim, is_answer in zip(wanted, found.example.answer, strict=True)
    )


# -- instruction rows


@pytest.mark.parametrize("tokenizer", ["words", "puts_eos", "puts_bos", "metaspace_always", "trimmed"])
def test_an_instruction_ends_in_exactly_one_eos(tokenizer: str) -> None:
    found = encoded(InstructionRow(7, "Add.", "1 + 1", "2"), made.made(tokenizer, "markup"))
    eos = made.made_tokenizer(tokenizer).eos_token_id
    assert found.example is not None
    assert list(found.example.ids).count(eos) == 1
    assert found.example.ids[-1] == eos
    assert found.example.answer[-1] == 1


@pytest.mark.parametrize("tokenizer", ["puts_bos", "puts_eos"])
def test_an_instruction_has_no_bos(tokenizer: str) -> None:
    found = encoded(InstructionRow(7, "Add.", "", "2"), made.made(tokenizer, "markup"))
    assert found.example is not None
    assert made.made_tokenizer(tokenizer).bos_token_id not in found.example.ids


def test_a_token_across_prompt_and_answer_is_masked() -> None:
    found = encoded(InstructionRow(7, "Do", "", "http://a"), made.made("across", "markup"))
    assert found.detail is not None
    seam = len(format_instruction("Do"))
    assert any(a < seam < b for a, b in zip(found.detail.starts, found.detail.ends, strict=True))
    assert all(a >= seam for a, b in _supervised_spans(found))


def _supervised_spans(found: Encoded) -> list[tuple[int, int]]:
    assert found.example is not None
    assert found.detail is not None
    spans = zip(found.detail.starts, found.detail.ends, strict=True)
    return [span for span, is_answer in zip(spans, found.example.answer, strict=True) if is_answer]


@pytest.mark.parametrize("tokenizer", ["words", "metaspace_never", "trimmed"])
def test_all_bytes_of_an_answers_first_character_are_supervised(tokenizer: str) -> None:
    found = encoded(InstructionRow(7, "Smile", "", "🦖"), made.made(tokenizer, "trims"))
    assert found.example is not None
    assert sum(found.example.answer) >= 3


def test_without_input_there_is_no_heading_for_it() -> None:
    assert format_instruction("Add.") == "### Instruction:\nAdd.\n\n### Response:\n"


def test_an_instruction_needs_an_eos_token() -> None:
    found = encoded(InstructionRow(7, "Add.", "", "2"), made.made("plain", "markup"))
    assert "no EOS" in found.problem


def test_an_answer_that_one_token_joins_to_its_prompt_is_refused() -> None:
    problem = encoded(MessagesRow(7, (Message("user", "http:"), Message("assistant", "//"))), JoinedSeam()).problem
    assert problem.startswith("line 7: no token of the answer can be supervised")


# -- refusals name the turn

REFUSALS = {
    ("drops_system", "system"): 1,
    ("forgets_thinking", "thinking"): 2,
    ("never_thinks", "thinks_last"): 5,
    ("never_thinks", "thinking"): 2,
    ("shouts", "plain"): 1,
    ("replaces", "plain"): 1,
    ("replaces", "url"): 2,
    ("replaces", "three"): 6,
    ("escapes", "code"): 1,
    ("drops_first_user", "plain"): 1,
    ("drops_first_user", "system"): 2,
    ("sanitizes", "control"): 2,
    ("cuts_switch", "switch"): 2,
    ("tags_short", "plain"): 2,
    ("tags_user", "plain"): 1,
    ("tags_user", "system"): 1,
    ("tags_last", "three"): 2,
}


@pytest.mark.parametrize(("template", "conversation"), REFUSALS)
def test_a_refusal_names_the_first_message_that_is_altered(template: str, conversation: str) -> None:
    found = encoded(made.row_of(conversation), made.made("words", template))
    assert found.refused_message == REFUSALS[template, conversation], found.problem


@pytest.mark.parametrize(("template", "conversation"), [("answers_first", "three"), ("system_last", "system")])
def test_a_moved_turn_is_refused_as_out_of_order(template: str, conversation: str) -> None:
    found = encoded(made.row_of(conversation), made.made("words", template))
    assert "out of order" in found.problem
    assert found.refused_message is not None


@pytest.mark.parametrize("how", [EncodeSettings(), ASSISTANT])
def test_an_altered_turn_is_refused_under_each_supervision(how: EncodeSettings) -> None:
    assert encoded(made.row_of("thinking"), made.made("words", "never_thinks"), how).refused_message == 2


def test_the_templates_own_words_are_told() -> None:
    problem = encoded(made.row_of("system"), made.made("words", "raises_on_system")).problem
    assert problem.startswith("line 7: ")
    assert "No system text, please" in problem


def test_a_later_row_is_refused_by_its_own_line() -> None:
    rows = [made.row_of("plain", 1), made.row_of("system", 4)]
    rest = encode_rows(rows, made.made("words", "drops_system"), ASSISTANT)
    with pytest.raises(RowProblem, match=r"^line 4, message 1: "):
        list(rest)


@pytest.mark.parametrize("conversation", ["thinking", "thinks_last"])
def test_an_allowed_rewrite_is_counted_and_what_is_left_is_supervised(conversation: str) -> None:
    found = encoded(made.row_of(conversation), made.made("words", "never_thinks"), REWRITE)
    assert found.example is not None
    assert found.example.traits & Trait.REWRITTEN
    assert "".join(supervised(found)) == "2<|im_end|>4<|im_end|>"


# -- what an answer is

ANSWERS = {
    ("markup", "system"): "Hi.<|im_end|>Over there, on the left.<|im_end|>",
    ("markup", "short"): "4<|im_end|>4<|im_end|>",
    ("trims", "spaces"): "4<|im_end|>Hello there<|im_end|>",
    ("closes_last_otherwise", "three"): "123 answers</s>",
    ("closes_nothing", "system"): "Hi.Over there, on the left.",
    ("closes_by_word", "system"): "Hi.\nSTOPOver there, on the left.\nSTOP",
    ("closes_by_words", "system"): "Hi.Over there, on the left.",
    ("closes_after_space", "system"): "Hi. \n<|eot_id|>Over there, on the left. \n<|eot_id|>",
    ("closes_by_header", "system"): "Hi.<|user|>Over there, on the left.<|user|>",
    ("closed_by_header", "system"): "Hi.Over there, on the left.",
    ("merges_system", "system"): "Hi. </s>Over there, on the left. </s>",
    ("adds_empty_thinking", "plain"): "The answer is here.<|im_end|>",
    ("adds_empty_thinking", "thinks_last"): "2<|im_end|><think>\nI add.\n</think>\n\n4<|im_end|>",
    ("respaces_thinking", "thinks_tightly"): "Hello<|im_end|><think>\nI add.\n</think>\n\n4<|im_end|>",
    ("default_system", "plain"): "The answer is here.<|im_end|>",
    ("tags", "system"): "Hi.<|im_end|>Over there, on the left.<|im_end|>",
    ("tags_trimmed", "system"): "Hi.Over there, on the left.",
    ("tags_with_header", "plain"): "<|im_start|>assistant\nThe answer is here.<|im_end|>\n",
    ("markup", "control_first"): "<|im_end|><|im_end|><|im_start|>user\nhi<|im_end|>\n<|im_end|>",
}


@pytest.mark.parametrize(("template", "conversation"), ANSWERS)
def test_an_answer_is_the_turns_text_and_what_closes_it(template: str, conversation: str) -> None:
    found = encoded(made.row_of(conversation), made.made("digits", template))
    whole = ANSWERS[template, conversation]
    taught = "".join(supervised(found))
    assert taught == whole


def test_without_control_tokens_a_word_closes_an_answer() -> None:
    found = encoded(made.row_of("system"), made.made("plain", "closes_last_otherwise"))
    taught = "".join(supervised(found))
    assert taught.endswith("Over there, on the left.</s>")
    assert "<|eot_id|>" not in taught


def test_white_space_that_the_template_keeps_is_the_answers() -> None:
    assert "".join(supervised(encoded(made.row_of("spaces"), made.made("digits", "markup")))) == (
        "  4 \n<|im_end|> \n\nHello there\t <|im_end|>"
    )


TRAITS = [
    ("markup", "plain", Trait.MESSAGES),
    ("trims", "spaces", Trait.MESSAGES | Trait.RESPACED),
    ("respaces_thinking", "thinks_tightly", Trait.MESSAGES | Trait.RESPACED),
    ("closes_nothing", "plain", Trait.MESSAGES | Trait.UNCLOSED | Trait.STRADDLED),
    ("closed_by_header", "plain", Trait.MESSAGES | Trait.UNCLOSED),
    ("markup", "control", Trait.MESSAGES | Trait.CONTROL_TEXT),
    ("tags", "plain", Trait.MESSAGES | Trait.TAGGED),
    ("begins", "plain", Trait.MESSAGES | Trait.BOS),
]


@pytest.mark.parametrize(("template", "conversation", "traits"), TRAITS)
def test_what_is_remarkable_is_counted(template: str, conversation: str, traits: int) -> None:
    found = encoded(made.row_of(conversation), made.made("words", template))
    assert found.example is not None
    assert found.example.traits == traits


# -- generation tags


@pytest.mark.parametrize("template", ["tags_short", "tags_user", "tags_last"])
@pytest.mark.parametrize("tokenizer", ["words", "across", "metaspace_first"])
def test_with_template_spans_the_tags_alone_are_the_answer(template: str, tokenizer: str) -> None:
    messages = made.CONVERSATIONS["three"]
    found = encoded(made.row_of("three"), made.made(tokenizer, template), TAGS_ONLY)
    tagged = tagged_characters(tokenizer, made.TEMPLATES[template], messages)
    assert found.example is not None
    assert found.detail is not None
    assert tagged is not None
    claims = [Claim.ANSWER if at in tagged else Claim.OTHER for at in range(len(found.detail.text))]
    backend = made.made_tokenizer(tokenizer).backend_tokenizer
    characters = reference.token_characters(found.detail.text, found.example.ids, backend)
    assert characters is not None
    wanted = reference.token_claims(characters, claims)
    assert [
        is_answer for is_answer, claim in zip(found.example.answer, wanted, strict=True) if claim != Claim.OPEN
    ] == [int(claim is Claim.ANSWER) for claim in wanted if claim != Claim.OPEN]


@pytest.mark.parametrize("template", ["tags_short", "tags_user", "tags_last"])
def test_without_supervision_wrong_tags_harm_nothing(template: str) -> None:
    whole = encoded(made.row_of("three"), made.made("words", template), EncodeSettings())
    assert whole.example is not None
    assert not whole.example.traits & Trait.TAGGED


def test_template_spans_need_tags() -> None:
    assert "no generation spans" in encoded(made.row_of("plain"), made.made("words", "markup"), TAGS_ONLY).problem


# -- prompts


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_prompt_for_an_answer_begins_what_is_trained(tokenizer: str) -> None:
    messages = made.CONVERSATIONS["system"]
    prompt = list(encode_prompt(messages[:-1], made.made(tokenizer, "markup")))
    found = encoded(made.row_of("system"), made.made(tokenizer, "markup"))
    assert found.example is not None
    kept = len(prompt) - 1
    assert prompt[:kept] == list(found.example.ids[:kept])


# -- offsets that say nothing


class Stub:
    """A tokenizer that splits at words, and a template that marks turns by lines; subclasses spoil one thing."""

    facts = TokenizerFacts(
        name="stub 1.0",
        eos_id=1,
        eos_text="<end>",
        pad_id=None,
        bos_id=None,
        special_texts=("<end>",),
        special_ids=frozenset({1}),
        has_template=True,
        has_generation_tags=False,
    )

    def spans(self, text: str) -> list[tuple[int, int]]:
        return [match.span() for match in re.finditer(r"<end>| ?\w+|\W", text)]

    def encode(self, texts: Sequence[str]) -> list[Encoding]:
        return [Encoding([2 + at % 9 for at, _ in enumerate(self.spans(text))], self.spans(text)) for text in texts]

    def render(self, messages: Sequence[Message], **options: Any) -> Rendering:
        return Rendering("".join(f"[{message.role}]\n{message.content}<end>" for message in messages))

    def render_own(self, messages: Sequence[Message]) -> str | None:
        return None

    def is_dummy(self, token_id: int) -> bool:
        return False


class JoinedSeam(Stub):
    def spans(self, text: str) -> list[tuple[int, int]]:
        return [match.span() for match in re.finditer(r"\n//<end>|\S+|\s", text)]


class ZeroWidth(Stub):
    def spans(self, text: str) -> list[tuple[int, int]]:
        return [(a, a) for a, _ in super().spans(text)]


class OneZeroWidth(Stub):
    def spans(self, text: str) -> list[tuple[int, int]]:
        return [(a, a if text[a:b] == " wise" else b) for a, b in super().spans(text)]


class Unordered(Stub):
    def spans(self, text: str) -> list[tuple[int, int]]:
        first, second, *rest = super().spans(text)
        return [second, first, *rest]


class Gap(Stub):
    def spans(self, text: str) -> list[tuple[int, int]]:
        return [span for span in super().spans(text) if text[slice(*span)] != " wise"]


class Short(Stub):
    def spans(self, text: str) -> list[tuple[int, int]]:
        return super().spans(text)[:-1]


class Beyond(Stub):
    def spans(self, text: str) -> list[tuple[int, int]]:
        *rest, (start, end) = super().spans(text)
        return [*rest, (start, end + 3)]


class Given(Stub):
    def __init__(self, spans: list[tuple[int, int]]) -> None:
        self.given = spans

    def spans(self, text: str) -> list[tuple[int, int]]:
        return self.given


WISE = MessagesRow(7, (Message("user", "Be wise now"), Message("assistant", "I am wise now")))


def test_a_stub_with_good_offsets_is_encoded() -> None:
    assert "".join(supervised(encoded(WISE, Stub()))) == "I am wise now<end>"


@pytest.mark.parametrize("kind", [ZeroWidth, OneZeroWidth, Unordered, Gap, Short, Beyond])
@pytest.mark.parametrize("how", [ASSISTANT, EncodeSettings()])
def test_unusable_offsets_are_refused_with_the_tokenizers_name(kind: type[Stub], how: EncodeSettings) -> None:
    problem = encoded(WISE, kind(), how).problem
    assert problem.startswith("line 7: unusable offsets of stub 1.0")


SHORT = MessagesRow(
    7, (Message("user", "a"), Message("assistant", "b c"), Message("user", "d"), Message("assistant", "e"))
)
SHORT_TEXT = Stub().render(SHORT.messages).text


STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7)), max_size=30)


def covering(steps: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return offsets in order that cover a text; tokens may share characters, and the last one takes the rest."""
    found, start, end = [], 0, 0
    for back, forth in [*steps, (0, len(SHORT_TEXT))]:
        start = max(start, end - back)
        end = min(max(end, start + 1) + forth, len(SHORT_TEXT))
        found += [(start, end)] if start < end else []
    return found


@settings(max_examples=300, deadline=None)
@given(STEPS.map(covering))
def test_whatever_tokens_cover_they_are_masked_by_their_characters(spans: list[tuple[int, int]]) -> None:
    verdict = reference.judge(SHORT.messages, lambda changed: Stub().render(changed).text, Stub.facts.special_texts)
    characters = [frozenset(range(start, end)) for start, end in spans]
    wanted = reference.token_claims(characters, verdict.claims)
    found = encoded(SHORT, Given(spans))
    if found.example is None:
        assert "no token of the answer" in found.problem or len(spans) == 1
        assert learns_no_text(SHORT.messages, verdict, characters, wanted)
    else:
        assert list(found.example.answer) == [int(claim is Claim.ANSWER) for claim in wanted]


# -- private-use characters


def test_a_template_may_write_private_use_characters() -> None:
    found = encoded(made.row_of("system"), made.made("words", "private"))
    taught = "".join(supervised(found))
    assert taught.startswith("Hi.")
    assert "Over there, on the left." in taught


@pytest.mark.parametrize("first", [0xE000, 0xF0000, 0x100000, 0x10FF00])
def test_data_may_hold_private_use_characters(first: int) -> None:
    letters = "".join(chr(first + step) for step in range(200))
    row = MessagesRow(7, (Message("user", letters), Message("assistant", f"{letters[:9]}a{letters[-9:]}")))
    taught = "".join(supervised(encoded(row, made.made("digits", "markup"))))
    assert set(taught) == set(f"{row.messages[1].content}<|im_end|>")


# -- what the reference found -------------------------------------------------------------------------------------


def encoded_by(
    tokenizer: str, template: str, *turns: str, how: EncodeSettings = ASSISTANT, system: str = ""
) -> Encoded:
    head = (Message("system", system),) if system else ()
    messages = (*head, *(Message("assistant" if k % 2 else "user", text) for k, text in enumerate(turns)))
    wrapped = ModelTokenizer(made.made_tokenizer(tokenizer), template=template, template_date=made.DAY)
    return encoded(MessagesRow(7, messages), wrapped, how)


def test_a_users_text_never_closes_an_answer() -> None:
    bare = "{% for m in messages %}{{ m.content }}{% if loop.last %}{{ '</s>' }}{% endif %}{% endfor %}"
    assert "".join(supervised(encoded_by("words", bare, "a", "b", "</s> c", "d"))) == "bd</s>"


@pytest.mark.parametrize("last", ["{{ messages[0].content }}", "{{ messages[0].content | upper }}"])
def test_a_text_that_was_not_found_never_closes_an_answer(last: str) -> None:
    turns = "{% for m in messages[1:] %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
    before = "{{ messages[0].content }}\n" if "upper" not in last else ""
    allowed = ASSISTANT._replace(allow_template_rewrite=True)
    found = encoded_by("plain", before + turns + last, "Hi", "Hello, all of you!", how=allowed, system="Brief.")
    assert "of you" in "".join(supervised(found))
    assert "rief" not in "".join(supervised(found)).lower()
    control = encoded_by("words", turns + last, "Hi", "Well,\nhello", how=allowed, system="</s>")
    assert "".join(supervised(control)).endswith("hello")


def test_a_turn_that_is_written_twice_is_told_as_such() -> None:
    found = encoded(made.row_of("system"), made.made("words", "system_twice"))
    assert "message 1: the chat template writes this turn's text more than once" in found.problem


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
@pytest.mark.parametrize(
    "text", ["cafe\u0301 au lait", "\u1112\u1161\u11ab", "a\u0323\u0301", "\u304b\u3099", "e\u0301"]
)
def test_characters_that_a_normalizer_joins_belong_to_one_token(form: str, text: str) -> None:
    from tokenizers import Tokenizer, normalizers

    backend = Tokenizer.from_str(made.made_tokenizer("words").backend_tokenizer.to_str())
    backend.normalizer = getattr(normalizers, form)()
    fast = type(made.made_tokenizer("words"))(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    wrapped = ModelTokenizer(fast, template=made.TEMPLATES["markup"], template_date=made.DAY)
    found = encoded(MessagesRow(7, (Message("user", text), Message("assistant", text))), wrapped)
    assert found.example is not None, found.problem
    assert found.detail is not None
    ends = [end for end, is_answer in zip(found.detail.ends, found.example.answer, strict=True) if is_answer]
    starts = [start for start, is_answer in zip(found.detail.starts, found.example.answer, strict=True) if is_answer]
    assert found.detail.text[min(starts) : max(ends)] == f"{text}<|im_end|>"


@pytest.mark.parametrize(
    ("template", "answer", "kept"),
    [
        ("trims_newlines", "x \n", "x <|im_end|>"),
        ("trims_newlines", "\n x", " x<|im_end|>"),
        ("trims_newlines", "\n\t x\t \n\n", "\t x\t <|im_end|>"),
        ("tightens_thinking", "<think>\n\n</think>\n\nb", "<think></think>b<|im_end|>"),
        ("tightens_thinking", "<think>\nx\n</think>\n\nb", "<think>x</think>b<|im_end|>"),
        ("respaces_thinking", " x</think>b", "x\n</think>\n\nb<|im_end|>"),
        ("cuts", "a text of twenty-seven signs", "a text of twenty-seven signs<|im_end|>"),
    ],
)
def test_white_space_at_the_ends_is_the_turns_as_far_as_it_is_kept(template: str, answer: str, kept: str) -> None:
    found = encoded_by("words", made.TEMPLATES[template], "hi", answer)
    assert "".join(supervised(found)) == kept


def test_a_switch_at_the_end_of_a_turn_is_no_obstacle() -> None:
    for question in ("a /no_think", "a longer_wordxx /no_think"):
        assert encoded_by("words", made.TEMPLATES["looks_at_ends"], question, "b").problem == ""


@pytest.mark.parametrize(
    "answer", ["\n" * 300_000 + "x" + "\n" * 300_000, "x" + " " * 600_000, "<think>" + " " * 300_000]
)
def test_white_space_without_end_is_encoded_in_no_time_to_speak_of(answer: str) -> None:
    found = encoded_by("words", made.TEMPLATES["trims"], "hi", answer)
    assert "".join(supervised(found)) == answer.strip() + "<|im_end|>"


def test_fewer_offsets_than_tokens_are_unusable() -> None:
    class Few(Stub):
        def encode(self, texts: Sequence[str]) -> list[Encoding]:
            return [Encoding(each.ids, each.offsets[:-1]) for each in super().encode(texts)]

    assert "unusable offsets" in encoded(InstructionRow(7, "a", "", "b"), Few()).problem


@pytest.mark.parametrize("template", ["trims", "markup", "tags"])
def test_a_conversation_of_very_many_turns_is_followed(template: str) -> None:
    texts = [text for number in range(2_600) for text in (f"ask {number}", f"answer {number}\n")]
    found = encoded_by("words", made.TEMPLATES[template], *texts)
    assert "answer 2599" in "".join(supervised(found))


def test_a_conversation_that_would_take_too_many_renderings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MOST_RENDERINGS", 40)
    texts = [text for number in range(60) for text in ("ask", f"<think>a</think>{number}")]
    found = encoded_by("words", made.TEMPLATES["forgets_thinking"], *texts)
    assert "line 7, message 2: the chat template changes this turn's text" in found.problem
    monkeypatch.setattr(turns, "MOST_RENDERINGS", 4)
    found = encoded_by("words", made.TEMPLATES["forgets_thinking"], *texts)
    assert "message 2: the chat template cannot be followed to this turn" in found.problem


def test_tags_without_end_are_looked_at_in_no_time_to_speak_of() -> None:
    answer = "</" + "think" * 60_000 + " and more"
    assert encoded_by("words", made.TEMPLATES["trims"], "hi", answer).problem == ""


def test_a_rendering_that_tags_change_is_refused_with_the_first_token() -> None:
    class Watched(ModelTokenizer):
        def render(self, messages: Sequence[Message], *, with_tags: bool = False, **options: Any) -> Rendering:
            found = super().render(messages, with_tags=with_tags, **options)
            return found._replace(text=found.text.replace("\n", " \n")) if with_tags else found

    wrapped = Watched(made.made_tokenizer("words"), template=made.TEMPLATES["tags"], template_date=made.DAY)
    for how in (ASSISTANT, TAGS_ONLY, REWRITE):
        found = encoded(made.row_of("plain"), wrapped, how)
        assert re.match(
            r"line 7: the rendering with generation tags differs at token \d+ from the ordinary", found.problem
        )
