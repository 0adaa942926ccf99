"""A model's own tokenizer and chat template, through Transformers and without torch.

Importing Transformers where torch is installed imports torch as well. In a process that only tokenizes (`encoder.py`)
`without_torch` hides it first.
"""

import re
import sys
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from foretune.data import MAX_TEMPLATE_BYTES, Encoding, Message, Rendering, TemplateProblem, TokenizerFacts
from foretune.errors import UnsupportedError
from foretune.runtime.border import quietly

__all__ = ["ModelTokenizer", "load_tokenizer", "without_torch"]

MAX_RENDERED = 64 << 20
"""Characters of one rendering: four times the longest line."""
PROBE = "Probe: a b\n\n  ccc 1234, é 你好 😀!"
"""A text whose offsets show whether a tokenizer gives any."""
WORD_BOUNDARY = "▁"
_TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def without_torch() -> None:
    """Hide torch from this process, which has not imported it yet: two seconds and 200 MiB that tokenizing can save."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # find_spec and import then say that there is none


class ModelTokenizer:
    """A fast tokenizer with a chat template, as `foretune.data.Tokenizer` asks for it."""

    def __init__(
        self, tokenizer: Any, *, template: str | None = None, template_date: date, name: str = "the tokenizer"
    ) -> None:
        self._tokenizer = tokenizer
        self._own_template = _template_of(tokenizer)
        self._template = self._own_template if template is None else template
        templates = {text for text in (self._template, self._own_template) if text is not None}
        self._programs = {text: _compiled(text, template_date) for text in templates}
        self.library = f"{type(tokenizer).__name__}, tokenizers {version('tokenizers')}"
        """Class and library with its version."""
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._boundaries = {
            token_id for text in (WORD_BOUNDARY, "Ġ", " ") if (token_id := self._backend.token_to_id(text)) is not None
        }
        self.facts = self._facts(name)
        self._refuse_backend()

    def _facts(self, name: str) -> TokenizerFacts:
        tokenizer = self._tokenizer
        added = self._backend.get_added_tokens_decoder()
        named = (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token)
        control = dict.fromkeys(token.content for token in added.values() if token.special or token.content in named)
        return TokenizerFacts(
            name=f"{name} ({self.library})",
            eos_id=tokenizer.eos_token_id,
            eos_text=tokenizer.eos_token,
            pad_id=tokenizer.pad_token_id,
            bos_id=tokenizer.bos_token_id,
            special_texts=tuple(text for text in control if text.strip()),
            special_ids=frozenset(added),
            has_template=self._template is not None,
            has_generation_tags=self._template is not None and _TAGS.search(self._template) is not None,
            asks_for_date=self._template is not None and "strftime_now" in self._template,
        )

    def _refuse_backend(self) -> None:
        """Refuse a tokenizer whose offsets are of no use, on a text that every tokenizer has to cope with."""
        offsets = self.encode([PROBE])[0].offsets
        if not offsets or not any(last > first for first, last in offsets):
            raise UnsupportedError(
                f"{self.facts.name} gives no offsets, without which no answer can be told from its prompt.",
                hint="Use a model with a tokenizer.json (a fast tokenizer).",
            )

    @property
    def template(self) -> str | None:
        """The chat template's text."""
        return self._template

    @property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer` behind it."""
        return self._backend

    def encode(self, texts: Sequence[str]) -> list[Encoding]:
        """Tokenize each text as it stands; texts are tokenized in parallel."""
        found = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [Encoding(encoding.ids, encoding.offsets) for encoding in found]

    def render(
        self, messages: Sequence[Message], *, with_tags: bool = False, add_generation_prompt: bool = False
    ) -> Rendering:
        """Write a conversation by the chat template, in Transformers' sandbox. Raises TemplateProblem."""
        return self._render(self._template, messages, with_tags=with_tags, add_generation_prompt=add_generation_prompt)

    def render_own(self, messages: Sequence[Message]) -> str | None:
        """Write it by the tokenizer's own template where another is tried; None where there is no other."""
        if self._own_template is None or self._own_template == self._template:
            return None
        return self._render(self._own_template, messages, with_tags=False, add_generation_prompt=False).text

    def _render(
        self, template: str | None, messages: Sequence[Message], *, with_tags: bool, add_generation_prompt: bool
    ) -> Rendering:
        from transformers.utils.chat_template_utils import _render_with_assistant_indices

        assert template is not None
        program, tagged = self._programs[template], None
        variables = {
            "messages": [message._asdict() for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._tokenizer.special_tokens_map,
        }
        try:
            if with_tags:
                text, tagged = _render_with_assistant_indices(program, **variables)
            else:
                text = program.render(**variables)
        except (KeyboardInterrupt, SystemExit):
            raise
        except MemoryError:
            raise TemplateProblem("it needs more memory than a template may have.", is_of_all=True) from None
        except TimeoutError as error:
            raise TemplateProblem(str(error), is_of_all=True) from None
        except Exception as error:  # whatever a foreign program may raise is its answer
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            raise TemplateProblem(reason) from error
        if len(text) > MAX_RENDERED:
            raise TemplateProblem(f"it writes more than {MAX_RENDERED:,} characters.", is_of_all=True)
        return Rendering(text, None if tagged is None else tuple((int(a), int(b)) for a, b in tagged))

    def is_dummy(self, token_id: int) -> bool:
        """Whether a token is a mere word boundary, which may be put in front of a text."""
        return token_id in self._boundaries


def load_tokenizer(folder: Path, *, template: str | None = None, template_date: date, name: str) -> ModelTokenizer:
    """Load the tokenizer of a folder: files only, no code of a repository, no question.

    Raises UnsupportedError for a tokenizer without offsets and for a template that is too large.
    """
    with quietly():
        from transformers import AutoTokenizer
    try:
        with quietly():
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise UnsupportedError(
            f"The tokenizer of {name} cannot be loaded: {reason}",
            hint="The folder needs tokenizer.json and tokenizer_config.json, as save_pretrained writes them.",
        ) from error
    if not tokenizer.is_fast:
        raise UnsupportedError(
            f"The tokenizer of {name} ({type(tokenizer).__name__}) is a slow one, whose tokens have no offsets.",
            hint="Use a model with a tokenizer.json (a fast tokenizer).",
        )
    return ModelTokenizer(tokenizer, template=template, template_date=template_date, name=name)


def _template_of(tokenizer: Any) -> str | None:
    """Return the tokenizer's own template; of several the one named `default`."""
    own = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    return own if isinstance(own, str) and own else None


def _compiled(template: str, day: date) -> Any:
    """Compile a template in Transformers' own sandbox, for us alone, with the clock that it may ask stopped.

    Nothing of it is computed before it is rendered, where time is limited. Raises UnsupportedError for a text that is
    no template.
    """
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import _cached_compile_jinja_template

    if len(template.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
        raise UnsupportedError(
            f"The chat template is larger than {MAX_TEMPLATE_BYTES:,} bytes.", hint="Use a model with a smaller one."
        )
    environment = _cached_compile_jinja_template("").environment
    environment.optimized = False
    environment.globals["strftime_now"] = _frozen(day)
    try:
        return environment.from_string(template)
    except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise UnsupportedError(f"The chat template is none: {reason}", hint="Correct it.") from error


def _frozen(day: date) -> Callable[[str], str]:
    moment = datetime.combine(day, time(12))

    def strftime_now(format: str) -> str:
        return moment.strftime(format)

    return strftime_now
