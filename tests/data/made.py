"""Tokenizers, chat templates and conversations made for tests; each stands for one behaviour seen in published ones."""

import functools
import json
import re
from collections.abc import Iterable
from datetime import date
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from foretune.data import Message, MessagesRow
from foretune.runtime.tokenizer import ModelTokenizer

DAY = date(2025, 1, 2)

# -- tokenizers

CONTROL = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|user|>", "<|assistant|>", "[INST]", "[/INST]"]
SEAMS = [
    "http://example.org/a answer: the answer is 4.\n",
    "### Instruction:\nSee http://a.b\n\n### Response:\nhttp://c.d // The answer\n\n",
    "user\nassistant\nsystem\nThe answer, the answer; 4\n4 answers:\nYes.\n<think>\n</think>\n\n",
    "你好 😀 👩‍👩‍👧 naïve café\n",
] * 8


def _byte_level(*, control: Iterable[str | AddedToken], regex: bool, trim_offsets: bool = False) -> Tokenizer:
    """Train a byte-level BPE; without the regular expression its merges cross every seam."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets, add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    texts = SEAMS if regex else [part for text in SEAMS for part in re.findall("(?s).{1,9}", text)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(control))
    return tokenizer


BYTES = [f"<0x{value:02X}>" for value in range(256)]


def _pieces() -> Tokenizer:
    """Train the merges of a SentencePiece-like tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=160, limit_alphabet=60, show_progress=False)
    tokenizer.train_from_iterator([text.replace("\n", " ") for text in SEAMS], trainer)
    return tokenizer


def _metaspace_bpe(scheme: str) -> Tokenizer:
    """Make a BPE with byte fallback; `normalizer` writes the boundary by a normalizer, as Llama 2 does."""
    state = json.loads(_pieces().to_str())["model"]
    words = ["<unk>", "<s>", "</s>", *BYTES, *[word for word in state["vocab"] if word not in ("<unk>", "<s>", "</s>")]]
    vocab = {word: index for index, word in enumerate(dict.fromkeys(words))}
    merges = [tuple(merge) for merge in state["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if scheme == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *CONTROL])
    return tokenizer


def _unigram() -> Tokenizer:
    """Make a Unigram with byte fallback."""
    pieces = ["▁", *sorted(set(_pieces().get_vocab()) - {"▁"})]
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *[(byte, -9.0) for byte in BYTES]]
    vocab += [(piece, -6.0 + 0.5 * min(len(piece), 8)) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *CONTROL])
    return tokenizer


def _digits() -> Tokenizer:
    """Make a byte-level BPE that splits digits and words first, as tiktoken's do."""
    tokenizer = _byte_level(control=[], regex=False)
    split = Regex(r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|[^\r\n\p{L}\p{N}]?\p{L}+|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>", *CONTROL])
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def _around(tokenizer: Tokenizer, form: str) -> Tokenizer:
    """Let a tokenizer put BOS or EOS around every text by itself."""
    special = [(text, tokenizer.token_to_id(text)) for text in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=form, special_tokens=special)
    return tokenizer


def _wide_tokens() -> list[AddedToken]:
    """Control tokens that swallow the white space beside them."""
    wide = {"<|im_end|>": {"rstrip": True}, "<|assistant|>": {"rstrip": True}, "[INST]": {"lstrip": True}}
    return [
        AddedToken(text, special=True, normalized=False, **wide.get(text, {})) for text in ["<s>", "</s>", *CONTROL]
    ]


MAKERS = {
    "across": lambda: _byte_level(control=["<s>", "</s>", *CONTROL], regex=False),
    "words": lambda: _byte_level(control=["<s>", "</s>", *CONTROL], regex=True),
    "trimmed": lambda: _byte_level(control=["<s>", "</s>", *CONTROL], regex=True, trim_offsets=True),
    "digits": _digits,
    "swallowing": lambda: _byte_level(control=_wide_tokens(), regex=False),
    "metaspace_always": lambda: _metaspace_bpe("always"),
    "metaspace_first": lambda: _metaspace_bpe("first"),
    "metaspace_never": lambda: _metaspace_bpe("never"),
    "metaspace_normalizer": lambda: _metaspace_bpe("normalizer"),
    "unigram": _unigram,
    "puts_bos": lambda: _around(_metaspace_bpe("first"), "<s> $A"),
    "puts_eos": lambda: _around(_byte_level(control=["<s>", "</s>", *CONTROL], regex=True), "$A </s>"),
    "plain": lambda: _byte_level(control=[], regex=False),
}
"""How each tokenizer is made; `plain` knows no control token at all."""


@functools.cache
def made_tokenizer(name: str) -> Any:
    """Return a made tokenizer as Transformers wraps it."""
    known = {} if name == "plain" else {"bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=MAKERS[name](), **known)


@functools.cache
def made(tokenizer: str, template: str) -> ModelTokenizer:
    """Return a made tokenizer with a made template."""
    return ModelTokenizer(made_tokenizer(tokenizer), template=TEMPLATES[template], template_date=DAY, name=tokenizer)


# -- templates


def _each(body: str, before: str = "", after: str = "") -> str:
    return f"{before}{{% for m in messages %}}{body}{{% endfor %}}{after}"


OPEN = "{{ '<|im_start|>' ~ m.role ~ '\n' }}"
CLOSE = "{{ '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
ANSWER = "{% if m.role == 'assistant' %}"
HAS_SYSTEM = "{% if messages[0].role == 'system' %}"

_SPLIT_THINKING = (
    "{% set thought = '' %}{% set said = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set said = m.content.split('</think>')[-1] %}{% endif %}"
)

TEMPLATES = {
    "markup": _each(OPEN + "{{ m.content }}" + CLOSE, after=PROMPT),
    "trims": _each(OPEN + "{{ m.content | trim }}" + CLOSE),
    "trims_right": _each(OPEN + "{{ m.content.rstrip() }}" + CLOSE),
    "trims_newlines": _each(OPEN + "{{ m.content.strip('\n') }}" + CLOSE),
    "trims_answers": _each(OPEN + "{{ m.content | trim if m.role == 'assistant' else m.content }}" + CLOSE),
    "drops_system": _each(
        "{% if m.role == 'user' %}{{ '[INST] ' }}{% if loop.last and messages[0].role == 'system' %}"
        "{{ messages[0].content ~ '\n\n' }}{% endif %}{{ m.content ~ '[/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' ~ m.content ~ '</s>' }}{% endif %}"
    ),
    "merges_system": _each(
        "{% if m.role == 'user' %}{{ '[INST] ' }}{% if loop.index0 == 1 and messages[0].role == 'system' %}"
        "{{ '<<SYS>>\n' ~ messages[0].content ~ '\n<</SYS>>\n\n' }}{% endif %}{{ m.content ~ ' [/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' ~ m.content ~ ' </s>' }}{% endif %}"
    ),
    "merges_trimmed": _each(
        "{% if m.role != 'system' %}{{ '<s>[INST] ' if m.role == 'user' else ' ' }}"
        "{% if loop.index0 == 1 and messages[0].role == 'system' %}{{ messages[0].content | trim ~ '\n\n' }}{% endif %}"
        "{{ m.content | trim ~ (' [/INST]' if m.role == 'user' else ' </s>') }}{% endif %}"
    ),
    "raises_on_system": HAS_SYSTEM
    + "{{ raise_exception('No system text, please') }}{% endif %}"
    + _each(OPEN + "{{ m.content | trim }}" + CLOSE),
    "wants_turns": HAS_SYSTEM
    + "{% set rest = messages[1:] %}{{ messages[0].content ~ '\n' }}{% else %}{% set rest = messages %}{% endif %}"
    + "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    + "{{ raise_exception('Turns must alternate') }}{% endif %}"
    + "{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ '</s>\n' }}{% endfor %}",
    "forgets_thinking": _each(
        _SPLIT_THINKING
        + OPEN
        + "{% if thought and loop.last %}{{ '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' ~ said.lstrip('\n') }}"
        + "{% else %}{{ said.lstrip('\n') }}{% endif %}"
        + CLOSE
    ),
    "never_thinks": _each(
        OPEN
        + "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
        + CLOSE
    ),
    "respaces_thinking": _each(
        _SPLIT_THINKING
        + OPEN
        + "{% if '</think>' in m.content and m.role == 'assistant' %}"
        + "{{ '<think>\n' ~ thought | trim ~ '\n</think>\n\n' ~ said | trim }}"
        + "{% else %}{{ said }}{% endif %}"
        + CLOSE
    ),
    "tightens_thinking": _each(
        _SPLIT_THINKING
        + OPEN
        + "{% if '</think>' in m.content and m.role == 'assistant' %}"
        + "{{ '<think>' ~ thought | trim ~ '</think>' ~ said | trim }}"
        + "{% else %}{{ said | trim }}{% endif %}"
        + CLOSE
    ),
    "adds_empty_thinking": _each(
        OPEN
        + "{% if m.role == 'assistant' and loop.last and '</think>' not in m.content %}"
        + "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content }}"
        + CLOSE
    ),
    "closes_last_otherwise": _each(
        OPEN + "{{ m.content }}{% if loop.last %}{{ '</s>' }}{% else %}{{ '<|eot_id|>\n' }}{% endif %}"
    ),
    "closes_nothing": _each("{{ m.role ~ ': ' ~ m.content ~ '\n' }}"),
    "closes_by_word": _each("{{ m.role ~ ': ' ~ m.content ~ '\nSTOP\n' }}"),
    "closes_by_words": _each("{{ m.role ~ ': ' ~ m.content ~ '\nThat was it.\n' }}"),
    "closes_after_space": _each(OPEN + "{{ m.content ~ ' \n<|eot_id|>' }}"),
    "closes_by_header": _each("{{ '<|' ~ m.role ~ '|>' ~ m.content }}", after="{{ '<|user|>' }}"),
    "closed_by_header": _each("{{ '<|' ~ m.role ~ '|>' ~ m.content }}"),
    "no_seams": _each("{{ m.content }}{% if loop.last %}{{ '</s>' }}{% endif %}"),
    "spaces_only": _each("{{ ' ' ~ m.content }}", after="{{ ' [END]' }}"),
    "tags": _each(
        OPEN + ANSWER + "{% generation %}{{ m.content ~ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ m.content }}" + CLOSE + "{% endif %}"
    ),
    "tags_trimmed": _each(
        OPEN + ANSWER + "{% generation %}{{ m.content | trim }}{% endgeneration %}{{ '<|im_end|>\n' }}"
        "{% else %}{{ m.content | trim }}" + CLOSE + "{% endif %}"
    ),
    "tags_with_header": _each(
        ANSWER + "{% generation %}" + OPEN + "{{ m.content }}" + CLOSE + "{% endgeneration %}"
        "{% else %}" + OPEN + "{{ m.content }}" + CLOSE + "{% endif %}"
    ),
    "tags_short": _each(
        OPEN + ANSWER + "{% generation %}{{ m.content.rstrip()[:-1] }}{% endgeneration %}"
        "{{ m.content.rstrip()[-1:] }}" + CLOSE + "{% else %}{{ m.content }}" + CLOSE + "{% endif %}"
    ),
    "tags_user": _each(OPEN + "{% generation %}{{ m.content }}" + CLOSE + "{% endgeneration %}"),
    "tags_last": _each(
        OPEN + "{% if loop.last %}{% generation %}{{ m.content }}" + CLOSE + "{% endgeneration %}"
        "{% else %}{{ m.content }}" + CLOSE + "{% endif %}"
    ),
    "dated": _each(OPEN + "{{ m.content }}" + CLOSE, before="{{ 'Today: ' ~ strftime_now('%d %b %Y') ~ '\n' }}"),
    "begins": _each(OPEN + "{{ m.content }}" + CLOSE, before="{{ bos_token }}"),
    "system_twice": HAS_SYSTEM
    + "{{ messages[0].content ~ '\n' }}{% endif %}"
    + _each(OPEN + "{{ m.content }}" + CLOSE),
    "quotes_user": _each(
        OPEN + "{{ m.content }}" + CLOSE + "{% if m.role == 'user' %}{{ '> ' ~ m.content ~ '\n' }}{% endif %}"
    ),
    "answers_first": _each(ANSWER + OPEN + "{{ m.content }}" + CLOSE + "{% endif %}")
    + _each("{% if m.role != 'assistant' %}" + OPEN + "{{ m.content }}" + CLOSE + "{% endif %}"),
    "system_last": _each("{% if m.role != 'system' %}" + OPEN + "{{ m.content }}" + CLOSE + "{% endif %}")
    + HAS_SYSTEM
    + "{{ '<|im_start|>system\n' ~ messages[0].content ~ '<|im_end|>' }}{% endif %}",
    "shouts": _each(OPEN + "{{ m.content | upper }}" + CLOSE),
    "replaces": _each(OPEN + "{{ m.content | replace('answer', 'reply') }}" + CLOSE),
    "sanitizes": _each(OPEN + "{{ m.content | replace('<|im_end|>', '') }}" + CLOSE),
    "escapes": _each(OPEN + "{{ m.content | tojson }}" + CLOSE),
    "looks_at_ends": _each(
        OPEN
        + "{% if m.content.startswith(' ') %}{{ '(indented) ' }}{% endif %}"
        + "{% if m.content.endswith('/no_think') %}{{ '(quick) ' }}{% endif %}"
        + "{{ m.content }}{% if not m.content.endswith('\n') %}{{ '\n' }}{% endif %}"
        + CLOSE
    ),
    "cuts_switch": _each(
        OPEN
        + "{% if m.role == 'user' and m.content.endswith('/no_think') %}{{ m.content[:-9] }}"
        + "{% else %}{{ m.content }}{% endif %}"
        + CLOSE
    ),
    "default_system": "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nBe kind. answer<|im_end|>\n' }}{% endif %}" + _each(OPEN + "{{ m.content }}" + CLOSE),
    "skips_blank": _each("{% if m.content %}" + OPEN + "{{ m.content }}" + CLOSE + "{% endif %}"),
    "cuts": _each(OPEN + "{{ m.content[:28] }}" + CLOSE),
    "private": _each("{{ '\ue000' ~ m.role ~ '\ue001' ~ m.content ~ '\U00100000<|im_end|>\U0010fffd' }}"),
    "joins_lines": _each(OPEN + "{{ m.content.split('\n') | join(' ') }}" + CLOSE),
    "drops_first_user": _each(
        "{% if not (m.role == 'user' and loop.index0 < 2) %}" + OPEN + "{{ m.content }}" + CLOSE + "{% endif %}"
    ),
}


def marked_twin(template: str) -> str:
    """Write generation tags as visible brackets, so that a plain rendering shows where they stand."""
    return template.replace("{% generation %}", "{{ '⟦' }}").replace("{% endgeneration %}", "{{ '⟧' }}")


# -- conversations


def _chat(*texts: str, system: str | None = None) -> tuple[Message, ...]:
    head = () if system is None else (Message("system", system),)
    turns = (Message("assistant" if turn % 2 else "user", text) for turn, text in enumerate(texts))  # type: ignore[arg-type]
    return (*head, *turns)


CONVERSATIONS = {
    "plain": _chat("Where is the answer?", "The answer is here."),
    "system": _chat("Hello", "Hi.", "Where?", "Over there, on the left.", system="You are brief."),
    "three": _chat("One?", "1", "Two?", "2", "Three?", "3 answers"),
    "thinking": _chat("1 + 1?", "<think>\nI add.\n</think>\n\n2", "2 + 2?", "<think>\nAgain.\n</think>\n\n4"),
    "thinks_last": _chat("1 + 1?", "2", "2 + 2?", "<think>\nI add.\n</think>\n\n4", system="Think."),
    "thinks_tightly": _chat("Hi", "Hello", "2 + 2?", "<think>I add.</think>4"),
    "thinks_not": _chat("Hi", "<think>\n\n</think>\n\nHello", "2 + 2?", "<think>\n\n</think>\n\nFour"),
    "half_thoughts": _chat("Hi", "so</think>Hello", "2 + 2?", "<think>I add"),
    "user_thinks": _chat("<think>am I</think>me?", "You are.", "</think>", "Yes.", system="Use <think> and </think>."),
    "spaces": _chat("  Hi \n", "  4 \n", "\n\nMore\t", " \n\nHello there\t ", system=" Be brief.\n"),
    "newlines": _chat("\nHi\n", "\n4\n", "\nMore\n\n", "\n\nHello\n\n"),
    "wide_spaces": _chat("\u3000何?\u2003", "\u3000四\xa0", "x\u2028", "\x85y\x1c"),
    "emoji": _chat("😀?", "👩‍👩‍👧‍👦 e\u0301 你好😀", "你", "\u0301é", "‍", "🇩🇪"),
    "control": _chat(
        "<|im_end|>\n<|im_start|>assistant\nno",
        "say <|im_end|> twice </s>",
        "</s> please",
        "[/INST] <|eot_id|>",
        system="</s>",
    ),
    "control_first": _chat("<|im_start|>", "<|im_end|>", "<|im_end|>\n", "<|im_start|>user\nhi<|im_end|>\n"),
    "roles": _chat("assistant", "user", "user", "assistant", system="system"),
    "short": _chat("4", "4", "4", "4"),
    "repeated": _chat("Yes.", "Yes.", "Yes.", "Yes.", "Yes.", "Yes.", system="Yes."),
    "nested": _chat("The answer is 4", "4", "is", "The answer is 4, is", system="The"),
    "code": _chat("Write f.", "```python\ndef f(x):\n    return x  # user\n\n```\nDone", system='{"a": "b\\n"}'),
    "switch": _chat("What? /no_think", "That. /no_think", "And? /no_think", "This.", system="Be. /no_think"),
    "url": _chat("http:", "//example.org answer", "a :", "// answer"),
    "jinja": _chat("{{ messages }} {% raw %}", "{% endfor %}{{ '<|im_end|>' }} {# not #}", system="{{ bos_token }}"),
    "private_use": _chat("\U00100000a\U00100001\U0010fffd", "\ue000\U00100002b\U0010fffc", system="\uf8ff\U00100000"),
    "empty_user": _chat("", "Fine.", " \n", "Fine!", system=""),
    "quotes": _chat('say "hi" <b>&amp;</b>', "\"hi\" \\ 'ho' &lt; \\n"),
    "line_ends": _chat("a\r\nb\rc", "d\r\ne\ufeff\0f", "\r\n", "\rg\r"),
    "stop": _chat("STOP\nSTOP", "STOP", "assistant: STOP", "no STOP\nuser: "),
}


def row_of(name: str, line: int = 7) -> MessagesRow:
    """Return a made conversation as the row of a line."""
    return MessagesRow(line, CONVERSATIONS[name])


def frozen_twin(template: str) -> str:
    """Write the made date into a template, in place of the clock."""
    return template.replace("strftime_now('%d %b %Y')", f"'{DAY:%d %b %Y}'")
