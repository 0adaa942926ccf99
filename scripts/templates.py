"""Try chat templates on conversations and tokenizers: how many rows are accepted, what is refused and why.

    python scripts/templates.py TEMPLATES TOKENIZER... [--reference]

TEMPLATES is a folder of Jinja files; each TOKENIZER a folder. A row counts where the template itself takes it. Ids are
compared with Transformers' native call, and with --reference (minutes) masks with the slow encoder of the tests.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from foretune.data import EncodeSettings, Message, MessagesRow, RowProblem, encode_rows
from foretune.runtime.tokenizer import ModelTokenizer, without_torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

SETTINGS = {
    "all_tokens": EncodeSettings(),
    "assistant_only": EncodeSettings("assistant_only"),
    "assistant_only, rewrites allowed": EncodeSettings("assistant_only", allow_template_rewrite=True),
}


def talk(*texts: str, system: str | None = None) -> tuple[Message, ...]:
    """Write a conversation: user and assistant by turns, after a system text or none."""
    head = () if system is None else (Message("system", system),)
    return (*head, *(Message("assistant" if turn % 2 else "user", text) for turn, text in enumerate(texts)))


CONVERSATIONS = {
    "one exchange": talk("What is 2 + 2?", "It is 4."),
    "system": talk("Hi there", "Hello, friend", system="You are terse."),
    "three exchanges": talk("one", "first answer", "two", "second answer", "three", "third answer"),
    "system, two exchanges": talk("one", "first answer", "two", "second answer", system="Be kind."),
    "thinking, last turn": talk("1 + 1?", "<think>\none and one\n</think>\n\n2"),
    "thinking, every turn": talk("1?", "<think>\none\n</think>\n\n2", "2?", "<think>\ntwo\n</think>\n\n4"),
    "empty thinking": talk("2 + 2?", "<think>\n\n</think>\n\n4"),
    "white space at the ends": talk("  lead and trail  ", "  spaced answer \n"),
    "emoji and CJK": talk("🇯🇵 翻译 hello：", "😀 你好，世界 👩‍👩‍👧"),
    "control texts": talk("what do <|im_end|> and [/INST] mean?", "They end a turn: <|im_end|>, <|eot_id|>, </s>."),
    "code": talk("write python", '```python\nprint("hi")\n```'),
    "names of roles": talk("user", "assistant", "assistant", "user"),
}


class Outcome(NamedTuple):
    """What became of one row."""

    template: str
    tokenizer: str
    conversation: str
    settings: str
    problem: str | None
    """None: it was accepted."""
    difference: str = ""
    """In what an accepted row is not what it has to be."""


def outcomes(folder: Path, tokenizers: Sequence[str], *, with_reference: bool) -> Iterator[Outcome]:
    """Encode every conversation that a template takes."""
    from transformers import AutoTokenizer

    for place in tokenizers:
        base = AutoTokenizer.from_pretrained(place)
        for file in sorted(folder.glob("*.jinja")):
            template = file.read_text()
            tokenizer = ModelTokenizer(base, template=template, template_date=date.today())
            for name, messages in CONVERSATIONS.items():
                native = native_ids(base, template, messages)
                if native is None:
                    continue
                for settings_name, settings in SETTINGS.items():
                    found = one(messages, tokenizer, settings, native, with_reference=with_reference)
                    yield Outcome(file.stem, Path(place).name, name, settings_name, *found)


def native_ids(base: Any, template: str, messages: Sequence[Message]) -> list[int] | None:
    """Return the ids of the native call; None where the template refuses."""
    listed = [message._asdict() for message in messages]
    try:
        return list(base.apply_chat_template(listed, chat_template=template, tokenize=True, return_dict=False))
    except Exception:
        return None


def one(
    messages: Sequence[Message],
    tokenizer: ModelTokenizer,
    settings: EncodeSettings,
    native: list[int],
    *,
    with_reference: bool,
) -> tuple[str | None, str]:
    """Encode one conversation; return why it is refused, or in what it is wrong."""
    try:
        ((example, _),) = encode_rows([MessagesRow(1, tuple(messages))], tokenizer, settings)
    except RowProblem as problem:
        return str(problem).partition(": ")[2], ""
    if list(example.ids) != native:
        return None, "the ids are not the native ones"
    is_judged = with_reference and settings == SETTINGS["assistant_only"]
    return None, wrong_mask(messages, tokenizer, example.answer, native) if is_judged else ""


def wrong_mask(messages: Sequence[Message], tokenizer: ModelTokenizer, answer: bytes, native: list[int]) -> str:
    """Compare with the slow encoder; a template with generation tags is left to the tests."""
    from data import reference

    if tokenizer.facts.has_generation_tags:
        return ""

    def write(changed: Sequence[Message]) -> str:
        return tokenizer.render(changed).text

    verdict = reference.judge(messages, write, tokenizer.facts.special_texts)
    characters = reference.token_characters(verdict.text, native, tokenizer.backend)
    if characters is None:
        return ""
    claims = reference.token_claims(characters, verdict.claims)
    pairs = enumerate(zip(claims, answer, strict=True))
    wrong = [
        token
        for token, (claim, is_answer) in pairs
        if claim is not reference.Claim.OPEN and (claim is reference.Claim.ANSWER) != bool(is_answer)
    ]
    return f"tokens {wrong}" if wrong else ""


def main() -> int:
    """Print the table; the exit code is 1 where an accepted row is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("templates", type=Path)
    parser.add_argument("tokenizers", nargs="+")
    parser.add_argument("--reference", action="store_true")
    given = parser.parse_args()
    without_torch()
    found = list(outcomes(given.templates, given.tokenizers, with_reference=given.reference))
    for settings in SETTINGS:
        print(f"\n{settings}")
        mine = [each for each in found if each.settings == settings]
        accepted = sum(each.problem is None for each in mine)
        print(f"  accepted {accepted:,} of {len(mine):,}: {100 * accepted / len(mine):.1f} %")
        for name in CONVERSATIONS:
            of_it = [each for each in mine if each.conversation == name]
            print(f"    {name:24} {sum(each.problem is None for each in of_it):4} of {len(of_it)}")
        for reason, count in Counter(each.problem for each in mine if each.problem).most_common():
            templates = sorted({each.template for each in mine if each.problem == reason})
            print(f"  {count:4} refused: {reason}\n       {', '.join(templates)}")
    differences = [each for each in found if each.difference]
    print(f"\n{len(differences)} accepted rows differ from what they have to be")
    for each in differences:
        print(f"  {each}")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
