"""Rows on which users of other tools trained the wrong tokens, asked of the command line and of the encoder.

The numbers are those of the cases; docs/cases.md lists every case and who holds it.
"""

import json
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from data.made import DAY, TEMPLATES, made, made_tokenizer

from foretune.data import (
    EncodeSettings,
    Encoding,
    Example,
    InstructionRow,
    Message,
    MessagesRow,
    RowProblem,
    encode_prompt,
    encode_rows,
    format_instruction,
    make_batch,
    truncate,
)
from foretune.data.encode import runs_of
from foretune.errors import UnsupportedError
from foretune.runtime.tokenizer import ModelTokenizer

MARKUP = TEMPLATES["markup"]
ANSWERS = EncodeSettings("assistant_only")
ALL = EncodeSettings()


class Checked(NamedTuple):
    """What `data check --json --rows` says."""

    code: int
    document: dict[str, Any]

    @property
    def error(self) -> str:
        found = self.document["error"]
        return " ".join(f"{p['place']} {p['message']} {p['hint']}" for p in found["problems"])


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a made tokenizer with a chat template."""
    folders: dict[str, Path] = {}

    def save(template: str) -> Path:
        if template not in folders:
            folders[template] = tmp_path_factory.mktemp("tokenizer")
            made_tokenizer("words").save_pretrained(folders[template])
            (folders[template] / "chat_template.jinja").write_text(template)
        return folders[template]

    return save


@pytest.fixture
def check(call, tmp_path: Path, tokenizer_folder: Callable[[str], Path]) -> Callable[..., Checked]:
    """Check rows given as text or bytes, with the made tokenizer and a template."""

    def run(rows: str | bytes, *words: str, template: str = MARKUP) -> Checked:
        file = tmp_path / "rows.jsonl"
        file.write_bytes(rows if isinstance(rows, bytes) else rows.encode())
        folder = str(tokenizer_folder(template))
        called = call("data", "check", str(file), "--model", folder, "--json", "--rows", "--workers", "1", *words)
        return Checked(called.code, called.document)

    return run


def asked(instruction: str, output: str, input: str = "") -> str:
    return json.dumps({"instruction": instruction, "input": input, "output": output}, ensure_ascii=False) + "\n"


def chat(*turns: tuple[str, str]) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    return json.dumps({"messages": messages}, ensure_ascii=False) + "\n"


def one(row: InstructionRow | MessagesRow, tokenizer: ModelTokenizer, settings: EncodeSettings) -> Example:
    ((example, _),) = encode_rows([row], tokenizer, settings)
    return example


def answer_ids(example: Example) -> list[int]:
    return [token for token, is_answer in zip(example.ids, example.answer, strict=True) if is_answer]


def talk(*texts: str) -> MessagesRow:
    return MessagesRow(1, tuple(Message("assistant" if k % 2 else "user", text) for k, text in enumerate(texts)))


# -- ends and seams ----------------------------------------------------------------------------------------------


def test_case_043_pad_equal_to_eos_needs_no_new_token() -> None:
    tokenizer = made("words", "markup")
    eos, size = tokenizer.facts.eos_id, len(made_tokenizer("words"))
    assert tokenizer.facts.padding_id == eos
    example = one(InstructionRow(1, "Say hi.", "", "Hi!"), tokenizer, ANSWERS)
    batch = make_batch([[example]], supervision="assistant_only", padding_id=eos or 0, width=len(example.ids) + 3)
    assert list(batch.input_ids[0])[-4:] == [eos] * 4
    assert list(batch.labels[0])[-4:] == [eos, -100, -100, -100]
    assert len(made_tokenizer("words")) == size


@pytest.mark.parametrize("name", ["words", "puts_eos", "puts_bos", "metaspace_first"])
def test_case_044_an_instruction_row_ends_in_one_eos(name: str) -> None:
    tokenizer = made(name, "markup")
    for row in (InstructionRow(1, "Say hi.", "", "Hi!"), InstructionRow(2, "Say bye.", "", "Bye!</s>")):
        example = one(row, tokenizer, ANSWERS)
        assert example.ids[-1] == tokenizer.facts.eos_id
        assert example.ids[-2] != tokenizer.facts.eos_id
        assert tokenizer.facts.bos_id not in example.ids


def test_case_046_the_token_across_the_seam_is_masked_and_nothing_else_shifts() -> None:
    # A template that puts nothing between prompt and answer, and a tokenizer that merges `://` across it.
    tokenizer = made("across", "no_seams")
    row = talk("Finish the address: http:", "//example.org is the address")
    ((example, detail),) = encode_rows([row], tokenizer, ANSWERS)
    seam = len("Finish the address: http:")
    across = [k for k, (a, b) in enumerate(zip(detail.starts, detail.ends, strict=True)) if a < seam < b]
    assert across
    assert all(not example.answer[k] for k in across)
    learnt = [text for text, is_learnt in runs_of(example.answer, detail) if is_learnt]
    assert len(learnt) == 1
    assert (row.messages[1].content + "</s>").endswith(learnt[0])


class Stub:
    """A tokenizer whose tokens are words, with offsets that a test chooses."""

    def __init__(self, offsets: Sequence[tuple[int, int]] | None) -> None:
        self.facts = made("words", "markup").facts._replace(name="Stub (tokenizers 0.0)", special_ids=frozenset())
        self._offsets = offsets

    def encode(self, texts: Sequence[str]) -> list[Encoding]:
        return [Encoding(list(range(len(self._offsets or ()))), self._offsets or ()) for _ in texts]

    def is_dummy(self, token_id: int) -> bool:
        return False


@pytest.mark.parametrize(
    ("offsets", "why"),
    [
        ([(0, 0), (3, 3), (7, 7), (10, 10)], "token 1 has no width"),
        ([(0, 5), (5, 30), (3, 52)], "token 3 is out of order"),
        ([(0, 5), (9, 52)], "no token covers"),
        ([(0, 5)], "no token covers"),
        ([], "there is no token"),
        ([(0, 900)], "token 1 is out of order"),
    ],
)
def test_case_048_offsets_of_no_use_are_refused_with_tokenizer_and_version(
    offsets: list[tuple[int, int]], why: str
) -> None:
    row = InstructionRow(1, "are you ok?", "", "yes I am")
    with pytest.raises(RowProblem, match=f"line 1: unusable offsets of Stub .tokenizers 0.0.: {why}"):
        one(row, Stub(offsets), ANSWERS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("question", "answer"), [("React:", "😀 great"), ("翻译 hello：", "你好"), ("Flag of Japan:", "🇯🇵")]
)
@pytest.mark.parametrize("name", ["words", "across", "metaspace_first"])
def test_case_049_all_tokens_of_a_character_are_learnt_together(name: str, question: str, answer: str) -> None:
    tokenizer = made(name, "markup")
    example = one(InstructionRow(1, question, "", answer), tokenizer, ANSWERS)
    assert made_tokenizer(name).decode(answer_ids(example)[:-1]).strip() == answer
    assert answer_ids(example)[-1] == tokenizer.facts.eos_id


def test_case_049_an_answer_of_which_only_the_end_could_be_learnt_is_refused() -> None:
    # This tokenizer gives all bytes of neighbours that it does not know one span, the prompt's line feed included.
    with pytest.raises(RowProblem, match="line 4: no token of the answer can be supervised"):
        one(InstructionRow(4, "Flag of Japan:", "", "🇯🇵"), made("unigram", "markup"), ANSWERS)


# -- templates ---------------------------------------------------------------------------------------------------


def test_case_050_a_template_without_tags_is_refused_where_tags_are_asked_for(check) -> None:
    row = chat(("user", "hello"), ("assistant", "world"))
    strict = ("--supervision", "assistant_only", "--spans", "template")
    refused = check(row, *strict)
    assert refused.code == 5
    assert "the chat template has no generation spans" in refused.error
    tagged = check(row, *strict, template=TEMPLATES["tags"])
    assert tagged.code == 0
    assert tagged.document["stats"]["num_supervised_tokens"] > 0
    assert check(row).code == 0
    verified = check(row, "--supervision", "assistant_only")
    assert verified.document["rows"][0]["supervised"] == tagged.document["rows"][0]["supervised"] == ["world<|im_end|>"]


def test_case_051_a_marked_template_that_renders_otherwise_is_refused(check, tmp_path: Path) -> None:
    row = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    good, moved = tmp_path / "good.jinja", tmp_path / "moved.jinja"
    good.write_text(TEMPLATES["tags"])
    moved.write_text(TEMPLATES["tags"].replace("{{ '\n' }}{% else %}", "{{ '\n\n' }}{% else %}"))
    assert good.read_text() != moved.read_text()
    words = ("--supervision", "assistant_only", "--chat-template")
    assert check(row, *words, str(good)).code == 0
    for strict in ((), ("--spans", "template")):
        refused = check(row, *words, str(moved), *strict)
        assert refused.code == 5
        assert ":1 the marked rendering differs at token" in refused.error


def test_case_052_what_transformers_returns_by_default_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, row = made("words", "markup"), talk("hi", "hello there")
    before = one(row, tokenizer, ANSWERS)
    monkeypatch.setattr(type(made_tokenizer("words")), "apply_chat_template", lambda *_, **__: {"input_ids": [1, 2]})
    assert one(row, tokenizer, ANSWERS) == before


@pytest.mark.parametrize("name", ["words", "puts_bos"])
def test_case_053_one_bos_in_rows_and_in_prompts(name: str) -> None:
    tokenizer = ModelTokenizer(
        made_tokenizer(name), template="{{ bos_token }}" + MARKUP, template_date=DAY, name="begins"
    )
    row = talk("hi", "hello")
    example, bos = one(row, tokenizer, ALL), tokenizer.facts.bos_id
    prompt = list(encode_prompt(row.messages[:1], tokenizer))
    assert (example.ids[0], list(example.ids).count(bos)) == (bos, 1)
    assert (prompt[0], prompt.count(bos)) == (bos, 1)
    assert prompt == list(example.ids)[: len(prompt)]


def test_case_054_no_bos_where_the_template_writes_none_and_it_is_counted(check) -> None:
    row = chat(("user", "hi"), ("assistant", "hello"))
    assert check(row).document["stats"]["rows_with_bos"] == 0
    assert check(row, template=TEMPLATES["begins"]).document["stats"]["rows_with_bos"] == 1
    tokenizer = made("puts_bos", "markup")
    assert tokenizer.facts.bos_id not in one(talk("hi", "hello"), tokenizer, ALL).ids


def test_case_055_the_templates_own_refusal_comes_with_its_line(check) -> None:
    rows = chat(("user", "hi"), ("assistant", "hello"))
    rows += chat(("system", "Be brief."), ("user", "hi"), ("assistant", "hello"))
    refused = check(rows, template=TEMPLATES["raises_on_system"])
    assert refused.code == 5
    assert "rows.jsonl:2 the chat template refuses the row: No system text, please" in refused.error


def test_case_059_thinking_that_a_template_drops_is_named(check) -> None:
    turns = ("1+1?", "<think>one and one</think>2", "2+2?", "<think>two and two</think>4")
    row = chat(*(("assistant" if k % 2 else "user", text) for k, text in enumerate(turns)))
    refused = check(row, template=TEMPLATES["forgets_thinking"])
    assert refused.code == 5
    assert ":1 message 2: the chat template changes this turn's text, of which it leaves out the" in refused.error
    words = ("--allow-template-rewrite", "--supervision", "assistant_only")
    allowed = check(row, *words, template=TEMPLATES["forgets_thinking"])
    assert allowed.code == 0
    assert allowed.document["stats"]["rewritten_rows"] == 1
    pieces = allowed.document["rows"][0]["supervised"]
    assert pieces == ["2<|im_end|>", "<think>\ntwo and two\n</think>\n\n4<|im_end|>"]


def test_case_060_what_a_template_adds_before_an_answer_is_not_learnt(check) -> None:
    row = chat(("user", "2+2?"), ("assistant", "4"))
    words = ("--supervision", "assistant_only")
    found = check(row, *words, template=TEMPLATES["adds_empty_thinking"]).document["rows"][0]
    assert "<think>\n\n</think>" in found["text"]
    assert found["supervised"] == ["4<|im_end|>"]


# -- rows that are refused ---------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str | bytes, list[str]]] = {
    "056": (chat(("user", "a"), ("user", "b"), ("assistant", "c")), [":1 message 2: expected assistant"]),
    "061": (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "reasoning_content": "b"}]}',
        [":1 message 2", "reasoning_content"],
    ),
    "062": (
        '{"messages": [{"role": "user", "content": "w?"}, {"role": "assistant", "content": "", "tool_calls": [{}]}]}',
        [":1 message 2", "tool_calls is not supported"],
    ),
    "063": (
        '{"tools": "[{}]", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
        [":1 ", "tools"],
    ),
    "072": (b'{"instruction":"a","input":"","output":"b"}\r\n\r\n{"instruction":"c","output":}\r\n', [":3 "]),
    "076": (asked("a", "b") + '{"instruction":"c","output":null}\n', [":2 output must be a string, got null"]),
    "077": (
        '{"instruction":"Translate","input":null,"output":"ok"}\n',
        [":1 input must be a string, got null"],
    ),
    "079": (
        '{"messages":[{"role":"user","content":null},{"role":"assistant","content":"b"}]}\n',
        [":1 message 1: content must be a string"],
    ),
    "082": ('{"instruction": "a", "output": "b", "messages": [{"role": "user", "content": "c"}]}\n', [":1 "]),
    "084": ('{"instruction":"a","input":"","output":NaN}\n', [":1 ", "NaN"]),
    "085": ('{"instruction":"a","output":"right","input":"","output":"wrong"}\n', [":1 duplicate key 'output'"]),
    "093": (
        '{"messages":[{"role":"user","content":[{"type":"text","text":"hi"}]},{"role":"assistant","content":"b"}]}\n',
        [":1 message 1", "multimodal input is not supported"],
    ),
    "094": (b"\n  \n\n", ["There are no rows in it (3 blank lines)"]),
    "096": (chat(("human", "hi"), ("gpt", "hello")), [":1 message 1", "'human'", "system, user and assistant"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_cases_056_to_096_rows_are_refused_with_line_and_cause(check, case: str) -> None:
    rows, words = REFUSED[case]
    refused = check(rows)
    assert refused.code == 5
    assert [word for word in words if word not in refused.error] == []


def test_case_058_empty_answers_each_fail_with_their_line(check) -> None:
    rows = [asked("Q1", ""), asked("Q2", "  \n"), chat(("user", "Q3"), ("assistant", ""))]
    for row in rows:
        refused = check(row)
        assert refused.code == 5
        assert ":1 " in refused.error
    together = check("".join(rows))
    assert [f":{k} " in together.error for k in (1, 2, 3)] == [True] * 3


# -- length ------------------------------------------------------------------------------------------------------


def test_case_064_a_row_that_would_lose_its_answer_fails_either_way(check) -> None:
    rows = asked("short", "ok") + asked("word " * 300, "yes")
    error = check(rows, "--seq-len", "64")
    assert error.code == 5
    assert ":2 " in error.error
    assert "more than batch.sequence_length, 64" in error.error
    for supervision in ("all_tokens", "assistant_only"):
        cut = check(rows, "--seq-len", "64", "--truncation", "right", "--supervision", supervision)
        assert cut.code == 5
        assert ":2 it loses its whole answer" in cut.error


def test_case_065_a_label_at_the_first_place_alone_is_none() -> None:
    example = Example(3, array("I", [7, 8, 9, 10]), b"\1\0\0\0", 0)
    with pytest.raises(RowProblem, match="line 3: it loses its whole answer"):
        truncate(example, 3, "right")


def test_case_067_an_answer_that_is_cut_is_counted_and_gets_no_eos(check) -> None:
    rows = asked("Write a long poem.", "line of the poem, " * 60)
    found = check(rows, "--seq-len", "100", "--truncation", "right").document
    assert (found["stats"]["truncated_rows"], found["stats"]["cut_answers"]) == (1, 1)
    assert len(found["rows"][0]["ids"]) == 100
    assert found["rows"][0]["labels"][-1] not in (-100, made("words", "markup").facts.eos_id)


def test_case_068_no_setting_searches_for_a_marker(call, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("model: {id: ./m}\nprecision: {dtype: bf16}\ndata:\n  response_template: '### Response:'\n")
    called = call("config", "validate", str(config))
    assert called.code == 2
    assert "response_template" in called.err


def test_case_071_line_separators_inside_a_text_are_text(check) -> None:
    rows = asked("a\u2028b", "x\u0085y\u2029z") + asked("c", "d")
    found = check(rows).document
    assert (found["stats"]["num_rows"], len(rows.splitlines()) > 2) == (2, True)
    assert found["rows"][0]["text"].endswith("x\u0085y\u2029z")


def test_case_072_carriage_returns_are_no_text_and_blank_lines_are_counted(check) -> None:
    found = check(b'{"instruction":"a","input":"","output":"b"}\r\n\r\n').document
    assert (found["stats"]["num_rows"], found["stats"]["num_blank_lines"]) == (1, 1)
    assert "\r" not in found["rows"][0]["text"]


def test_case_077_the_word_none_is_a_word(check) -> None:
    found = check(asked("Which element is missing?", "None")).document
    assert found["rows"][0]["text"].count("None") == 1


def test_case_086_a_line_of_a_megabyte_is_read_and_its_length_named(check) -> None:
    rows = asked("a", "b") + asked("big", "lorem ipsum " * 100_000)
    refused = check(rows, "--seq-len", "2048")
    assert refused.code == 5
    assert ":2 " in refused.error
    assert "tokens, more than batch.sequence_length, 2,048" in refused.error


def test_case_095_the_scope_of_the_loss_is_said(check, call, tmp_path: Path) -> None:
    found = check(asked("a", "b")).document["stats"]
    assert found["supervision"] == "all_tokens"
    assert found["num_supervised_tokens"] == found["num_tokens"] - 1
    (tmp_path / "one.jsonl").write_text(asked("a", "b"))


def test_case_023_and_139_the_longest_row_is_named_with_its_line(check) -> None:
    rows = "".join(asked(f"q{k}", "short answer") for k in range(20)) + asked("last", "long answer " * 90)
    found = check(rows).document["stats"]
    assert found["longest_line"] == 21
    assert found["lengths"]["longest"] > 10 * found["lengths"]["p95"]


def test_an_instruction_is_written_in_one_form() -> None:
    assert format_instruction("Add.") == "### Instruction:\nAdd.\n\n### Response:\n"
    assert format_instruction("Add.", "1 + 1") == "### Instruction:\nAdd.\n\n### Input:\n1 + 1\n\n### Response:\n"


def test_case_090_packed_examples_do_not_see_each_other() -> None:
    """The loss of a packed row is that of its examples alone, and of padded rows that of rows alone."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=600, **sizes)).train()
    tokenizer = made("words", "markup")
    rows = [talk("Where?", "Over there."), talk("Hello", "Hi"), talk("One more", "The answer is 4")]
    examples = [one(row, tokenizer, ANSWERS) for row in rows]

    def loss_of(*parts: list[Example]) -> float:
        batch = make_batch(parts, supervision="assistant_only", padding_id=0, width=None)
        ids, labels, positions = (
            torch.tensor([list(row) for row in each]) for each in (batch.input_ids, batch.labels, batch.position_ids)
        )
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        return float(loss.detach())

    alone = sum(loss_of([example]) for example in examples)
    assert loss_of(examples) == pytest.approx(alone, rel=1e-5)
    assert loss_of(*([example] for example in examples)) == pytest.approx(alone, rel=1e-5)


# -- tokenizers --------------------------------------------------------------------------------------------------


def test_case_112_a_tokenizer_without_pad_pads_with_eos() -> None:
    tokenizer = made("words", "markup")
    assert tokenizer.facts.pad_id is None
    assert tokenizer.facts.padding_id == tokenizer.facts.eos_id
    assert tokenizer.facts._replace(pad_id=5).padding_id == 5
    assert tokenizer.facts._replace(eos_id=None).padding_id is None


def test_case_117_a_tokenizer_without_offsets_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_offsets(_: object, texts: Sequence[str]) -> list[Encoding]:
        return [Encoding([1, 2], [(0, 0), (0, 0)]) for _ in texts]

    monkeypatch.setattr(ModelTokenizer, "encode", without_offsets)
    with pytest.raises(UnsupportedError, match=r"slow-ish .*gives no offsets"):
        ModelTokenizer(made_tokenizer("words"), template=None, template_date=DAY, name="slow-ish")
