"""What the data room asks of a tokenizer and its chat template; the one implementation is the runtime's."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from foretune.data.rows import Message

__all__ = ["MAX_TEMPLATE_BYTES", "Encoding", "Rendering", "TemplateProblem", "Tokenizer", "TokenizerFacts"]

MAX_TEMPLATE_BYTES = 256 << 10
"""Of a chat template."""


class TemplateProblem(ValueError):
    """What a chat template said when it was rendered, or that it took too long or grew too large."""

    def __init__(self, message: str, *, is_of_all: bool = False) -> None:
        super().__init__(message)
        self.is_of_all = is_of_all
        """It took so much that no other row is tried."""


class Encoding(NamedTuple):
    """A text as tokens."""

    ids: Sequence[int]
    offsets: Sequence[tuple[int, int]]
    """First character of each token and the one after its last, in the text that was given."""


class Rendering(NamedTuple):
    """A conversation as the chat template writes it."""

    text: str
    tagged: tuple[tuple[int, int], ...] | None = None
    """Characters inside the template's generation tags; None where it has none, or none were asked for."""


class TokenizerFacts(NamedTuple):
    """What is known of a tokenizer without a text."""

    name: str
    """What it is called in messages: its model, class and library."""
    eos_id: int | None
    eos_text: str | None
    pad_id: int | None
    bos_id: int | None
    special_texts: tuple[str, ...]
    """Texts that become one control token wherever they stand."""
    special_ids: frozenset[int]
    """Added tokens, control tokens or not: they may stand for no character."""
    has_template: bool
    has_generation_tags: bool
    asks_for_date: bool = False
    """Whether its chat template may ask for today's date."""

    @property
    def padding_id(self) -> int | None:
        """The id that fills a row: PAD, else EOS; padding is masked by position, so no token is added."""
        return self.eos_id if self.pad_id is None else self.pad_id


class Tokenizer(Protocol):
    """Texts to tokens, conversations to texts; neither adds a token that the text does not hold."""

    facts: TokenizerFacts

    def encode(self, texts: Sequence[str]) -> Sequence[Encoding]:
        """Tokenize each text as it stands, without special tokens around it."""

    def render(
        self, messages: Sequence[Message], *, with_tags: bool = False, add_generation_prompt: bool = False
    ) -> Rendering:
        """Write a conversation by the chat template. Raises TemplateProblem."""

    def render_own(self, messages: Sequence[Message]) -> str | None:
        """Write a conversation by the tokenizer's own template where another is tried; None where there is none."""

    def is_dummy(self, token_id: int) -> bool:
        """Whether a token may stand for no character: a mere word boundary that the tokenizer puts in front."""
