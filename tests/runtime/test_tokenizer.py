"""A model's tokenizer gives Transformers' own ids and renderings, and refuses what has no offsets or no end."""

import logging
import shutil
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from data import made
from tokenizers import Regex, Tokenizer, models, normalizers
from transformers import BatchEncoding, PreTrainedTokenizerFast

from foretune.data import EncodeSettings, Message, TemplateProblem, encode_prompt, encode_rows, require_template
from foretune.errors import UnsupportedError
from foretune.runtime.tokenizer import ModelTokenizer, load_tokenizer

CHAT = made.CONVERSATIONS["system"]
TEXTS = [message.content for messages in made.CONVERSATIONS.values() for message in messages if message.content]


def listed(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [message._asdict() for message in messages]


def native(tokenizer: Any, template: str, messages: Sequence[Message], **options: Any) -> str:
    return tokenizer.apply_chat_template(
        listed(messages), chat_template=made.frozen_twin(template), tokenize=False, **options
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=made.MAKERS["words"](), bos_token="<s>", eos_token="</s>")
    fast.chat_template = made.TEMPLATES["markup"]
    fast.save_pretrained(path)
    return path


def test_loading_leaves_what_transformers_says_as_it_was(folder: Path) -> None:
    logger = logging.getLogger("transformers")
    before = logger.level, logger.handlers[:], logger.propagate
    load_tokenizer(folder, template_date=made.DAY, name="t")
    assert (logger.level, logger.handlers, logger.propagate) == before


# -- rendering


@pytest.mark.parametrize("template", made.TEMPLATES)
def test_a_rendering_is_transformers_own(template: str) -> None:
    tokenizer = made.made("words", template)
    for messages in made.CONVERSATIONS.values():
        if template == "raises_on_system" and messages[0].role == "system":
            continue
        text = native(made.made_tokenizer("words"), made.TEMPLATES[template], messages)
        assert tokenizer.render(messages).text == text


def test_a_generation_prompt_is_transformers_own() -> None:
    tokenizer = made.made("words", "markup")
    text = native(made.made_tokenizer("words"), made.TEMPLATES["markup"], CHAT[:-1], add_generation_prompt=True)
    assert tokenizer.render(CHAT[:-1], add_generation_prompt=True).text == text
    assert text.endswith("assistant\n")


def test_a_prompt_for_generation_has_transformers_own_ids() -> None:
    fast = made.made_tokenizer("words")
    ids = fast.apply_chat_template(
        listed(CHAT[:-1]), chat_template=made.TEMPLATES["markup"], add_generation_prompt=True, return_dict=False
    )
    assert list(encode_prompt(CHAT[:-1], made.made("words", "markup"))) == ids


def test_the_templates_clock_stands_at_the_given_date() -> None:
    assert made.made("words", "dated").render(CHAT).text.startswith("Today: 02 Jan 2025\n")


def test_two_tokenizers_keep_their_own_dates() -> None:
    fast, template = made.made_tokenizer("words"), made.TEMPLATES["dated"]
    first, second = (ModelTokenizer(fast, template=template, template_date=date(2020 + n, 3, 4)) for n in range(2))
    assert [each.render(CHAT).text.split("\n")[0] for each in (first, second, first)] == [
        "Today: 04 Mar 2020",
        "Today: 04 Mar 2021",
        "Today: 04 Mar 2020",
    ]


def test_the_clock_of_transformers_goes_on() -> None:
    template = "{{ strftime_now('%Y') }}"
    fast = made.made_tokenizer("words")
    ModelTokenizer(fast, template=template, template_date=date(1999, 1, 1)).render(CHAT)
    assert native(fast, template, CHAT) != "1999"


def test_a_templates_complaint_is_a_template_problem() -> None:
    with pytest.raises(TemplateProblem, match="No system text, please"):
        made.made("words", "raises_on_system").render(CHAT)


@pytest.mark.parametrize(
    "template", ["{{ messages[99].content }}", "{{ 1 / 0 }}", "{{ none + 1 }}", "{{ messages.nothing() }}"]
)
def test_whatever_goes_wrong_in_a_template_is_a_template_problem(template: str) -> None:
    tokenizer = ModelTokenizer(made.made_tokenizer("words"), template=template, template_date=made.DAY)
    with pytest.raises(TemplateProblem):
        tokenizer.render(CHAT)


@pytest.mark.parametrize("template", ["{{ ''.__class__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}"])
def test_a_template_stays_in_its_sandbox(template: str) -> None:
    tokenizer = ModelTokenizer(made.made_tokenizer("words"), template=template, template_date=made.DAY)
    with pytest.raises(TemplateProblem):
        tokenizer.render(CHAT)


def test_a_template_that_writes_too_much_is_stopped() -> None:
    tokenizer = ModelTokenizer(made.made_tokenizer("words"), template="{{ 'a' * 67108865 }}", template_date=made.DAY)
    with pytest.raises(TemplateProblem, match="characters"):
        tokenizer.render(CHAT)


def test_a_template_that_is_too_large_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="larger than"):
        ModelTokenizer(made.made_tokenizer("words"), template="x" * (256 << 10) + "y", template_date=made.DAY)


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ messages | nothing }}", "{% if %}"])
def test_a_text_that_is_no_template_is_refused(template: str) -> None:
    with pytest.raises(UnsupportedError, match="template"):
        ModelTokenizer(made.made_tokenizer("words"), template=template, template_date=made.DAY)


@pytest.mark.parametrize("template", ["tags", "tags_trimmed", "tags_with_header", "tags_short", "tags_user"])
def test_tagged_characters_are_those_inside_the_tags(template: str) -> None:
    rendering = made.made("words", template).render(CHAT, with_tags=True)
    twin = native(made.made_tokenizer("words"), made.marked_twin(made.TEMPLATES[template]), CHAT)
    parts = [part.split("⟧")[0] for part in twin.split("⟦")[1:]]
    assert rendering.tagged is not None
    assert [rendering.text[a:b] for a, b in rendering.tagged] == parts


def test_tags_change_nothing_of_the_text() -> None:
    tokenizer = made.made("words", "tags")
    assert tokenizer.render(CHAT, with_tags=True).text == tokenizer.render(CHAT).text


@pytest.mark.parametrize("tag", ["{% generation %}", "{%- generation -%}", "{%generation%}"])
def test_generation_tags_are_seen_however_they_are_spaced(tag: str) -> None:
    template = f"{{% for m in messages %}}{tag}{{{{ m.content }}}}{{% endgeneration %}}{{% endfor %}}"
    tokenizer = ModelTokenizer(made.made_tokenizer("words"), template=template, template_date=made.DAY)
    assert tokenizer.facts.has_generation_tags


@pytest.mark.parametrize("template", ["markup", "tags"])
def test_asking_for_a_prompt_is_no_generation_tag(template: str) -> None:
    assert made.made("words", template).facts.has_generation_tags is (template == "tags")


# -- tokens


@pytest.mark.parametrize("name", sorted(made.MAKERS))
def test_ids_are_those_of_a_plain_call(name: str) -> None:
    fast, tokenizer = made.made_tokenizer(name), made.made(name, "markup")
    wanted = [fast(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert [list(encoding.ids) for encoding in tokenizer.encode(TEXTS)] == wanted


@pytest.mark.parametrize("name", ["puts_bos", "words"])
def test_bos_is_never_doubled(name: str) -> None:
    fast = made.made_tokenizer(name)
    [(example, _)] = encode_rows([made.row_of("system")], made.made(name, "begins"), EncodeSettings())
    assert list(example.ids).count(fast.bos_token_id) == 1
    assert example.ids[0] == fast.bos_token_id


def test_bos_is_not_added_where_the_template_has_none() -> None:
    fast = made.made_tokenizer("puts_bos")
    [(example, _)] = encode_rows([made.row_of("system")], made.made("puts_bos", "markup"), EncodeSettings())
    assert fast.bos_token_id not in example.ids


def test_a_call_that_returns_a_mapping_by_default_changes_nothing() -> None:
    class Mapping(PreTrainedTokenizerFast):
        def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
            found = super().apply_chat_template(*arguments, **{**options, "tokenize": True, "return_dict": True})
            assert isinstance(found, BatchEncoding)
            return found

    template = made.TEMPLATES["markup"]
    fast = Mapping(tokenizer_object=made.MAKERS["words"](), bos_token="<s>", eos_token="</s>")
    how = EncodeSettings(supervision="assistant_only")
    [(other, _)] = encode_rows(
        [made.row_of("system")], ModelTokenizer(fast, template=template, template_date=made.DAY), how
    )
    [(usual, _)] = encode_rows([made.row_of("system")], made.made("words", "markup"), how)
    assert (other.ids, other.answer) == (usual.ids, usual.answer)


def test_a_tokenizers_own_limit_cuts_nothing() -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=made.MAKERS["words"](), eos_token="</s>", model_max_length=4)
    fast.backend_tokenizer.enable_truncation(4)
    fast.backend_tokenizer.enable_padding(length=64)
    tokenizer = ModelTokenizer(fast, template=made.TEMPLATES["markup"], template_date=made.DAY)
    [encoding] = tokenizer.encode(["The answer is here, over there."])
    assert list(encoding.ids) == made.made_tokenizer("words")("The answer is here, over there.")["input_ids"]


def test_a_tokenizer_whose_offsets_are_empty_is_refused() -> None:
    backend = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    backend.normalizer = normalizers.Replace(Regex(r"[\s\S]"), "")
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    with pytest.raises(UnsupportedError, match="gives no offsets"):
        ModelTokenizer(fast, template=made.TEMPLATES["markup"], template_date=made.DAY)


def test_facts_are_the_tokenizers_own() -> None:
    fast, facts = made.made_tokenizer("words"), made.made("words", "markup").facts
    assert (facts.eos_id, facts.eos_text, facts.bos_id, facts.pad_id) == (
        fast.eos_token_id,
        "</s>",
        fast.bos_token_id,
        None,
    )
    assert set(facts.special_texts) == {"<s>", "</s>", *made.CONTROL}
    assert facts.padding_id == fast.eos_token_id


def test_a_word_boundary_may_be_a_dummy_and_a_word_may_not() -> None:
    tokenizer, fast = made.made("metaspace_always", "markup"), made.made_tokenizer("metaspace_always")
    assert tokenizer.is_dummy(fast.convert_tokens_to_ids("▁"))
    assert not tokenizer.is_dummy(fast.convert_tokens_to_ids("a"))


# -- folders


@pytest.mark.parametrize("name", sorted(made.MAKERS))
def test_a_saved_tokenizer_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    made.made_tokenizer(name).save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path, template=made.TEMPLATES["markup"], template_date=made.DAY, name="saved")
    how = EncodeSettings(supervision="assistant_only")
    rows = [made.row_of("system"), made.row_of("emoji"), made.row_of("spaces")]
    again = list(encode_rows(rows, loaded, how))
    assert again == list(encode_rows(rows, made.made(name, "markup"), how))


def test_a_folders_own_template_is_used(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, template_date=made.DAY, name="own")
    assert tokenizer.render(CHAT) == made.made("words", "markup").render(CHAT)
    assert tokenizer.render_own(CHAT) is None


def test_another_template_is_used_in_place_of_the_folders_own(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, template=made.TEMPLATES["trims"], template_date=made.DAY, name="other")
    spaces = made.CONVERSATIONS["spaces"]
    assert tokenizer.render(spaces).text == made.made("words", "trims").render(spaces).text
    assert tokenizer.render_own(spaces) == made.made("words", "markup").render(spaces).text


def test_of_several_templates_the_default_one_is_used() -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=made.MAKERS["words"](), eos_token="</s>")
    fast.chat_template = {"tool_use": made.TEMPLATES["shouts"], "default": made.TEMPLATES["markup"]}
    tokenizer = ModelTokenizer(fast, template_date=made.DAY)
    assert tokenizer.render(CHAT).text == fast.apply_chat_template(listed(CHAT), tokenize=False)


def test_of_two_control_tokens_the_longer_closes_an_answer() -> None:
    backend = made.MAKERS["words"]()
    backend.add_special_tokens(["<|end|>", "<|end|>!"])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    template = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content ~ '<|end|>!' }}{% endfor %}"
    how = EncodeSettings(supervision="assistant_only")
    [(example, _)] = encode_rows(
        [made.row_of("plain")], ModelTokenizer(fast, template=template, template_date=made.DAY), how
    )
    assert example.ids[-1] == fast.convert_tokens_to_ids("<|end|>!")
    assert example.answer[-1] == 1


def test_a_folder_without_a_template_has_none(tmp_path: Path) -> None:
    made.made_tokenizer("words").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, template_date=made.DAY, name="bare")
    assert not tokenizer.facts.has_template
    assert require_template(tokenizer.facts, EncodeSettings()) is not None
    with pytest.raises(ValueError, match="line 7"):
        list(encode_rows([made.row_of("plain")], tokenizer, EncodeSettings()))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot be loaded"):
        load_tokenizer(tmp_path, template_date=made.DAY, name="nothing")


def test_a_folder_with_broken_files_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(UnsupportedError, match="cannot be loaded"):
        load_tokenizer(tmp_path / "broken", template_date=made.DAY, name="broken")


def test_a_slow_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CanineTokenizer"}', encoding="utf-8")
    with pytest.raises(UnsupportedError, match="is a slow one"):
        load_tokenizer(tmp_path, template_date=made.DAY, name="slow")


def test_the_name_and_the_library_are_told_in_messages() -> None:
    facts = ModelTokenizer(
        made.made_tokenizer("words"), template=made.TEMPLATES["markup"], template_date=made.DAY, name="org/model"
    ).facts
    assert facts.name.startswith("org/model (")
    assert "tokenizers 0." in facts.name
