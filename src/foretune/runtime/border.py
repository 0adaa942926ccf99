"""The border to torch, Transformers and PEFT: what they raise becomes our errors, what they say is kept.

Nothing here imports them, so that a failing import is caught too.
"""

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from traceback import extract_tb

from foretune.errors import ForetuneError, MissingDependencyError, UnsupportedError
from foretune.runtime.libraries import INSTALL_LINE

__all__ = ["LIBRARIES", "foreign_border", "foreign_place", "quietly"]

_FOREIGN = ("transformers", "peft", "bitsandbytes")
LIBRARIES = (*_FOREIGN, "torch", "safetensors", "tokenizers", "accelerate", "huggingface_hub")
_LONGEST = 300


class _Listener(logging.Handler):
    """Keeps each message once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split()).removeprefix("[transformers] ")[:_LONGEST]
        if text not in self.messages:
            self.messages.append(text)


@contextmanager
def foreign_border(model: str, attention: str) -> Iterator[list[str]]:
    """Run foreign code quietly. Yields the list that Transformers' warnings are put in.

    Raises MissingDependencyError for a library that cannot be imported, UnsupportedError for what a model's own code
    raises when it is built or run without data. Our own mistakes pass.
    """
    try:
        with quietly() as said:
            yield said
    except ForetuneError as error:
        if "does not support an attention implementation" not in error.message:
            raise
        raise UnsupportedError(
            f"attention is {attention}, which {model} does not have in Transformers.",
            hint="Set attention: eager.",
            field="attention",
        ) from error
    except ModuleNotFoundError as error:
        name = (error.name or "a library").partition(".")[0]
        raise MissingDependencyError(f"{name} cannot be imported.", hint=f"Run: {INSTALL_LINE}") from error
    except Exception as error:
        place = foreign_place(error)
        if place is None:
            raise
        reason = (str(error).strip().splitlines() or [""])[0][:_LONGEST]
        raise UnsupportedError(
            f"{model} cannot be run without data: {type(error).__name__}: {reason} ({place}).",
            hint="If Transformers trains this model, please report it with the config.json.",
        ) from error


@contextmanager
def quietly() -> Iterator[list[str]]:
    """Run foreign code without its talk. Yields the list that Transformers' warnings are put in."""
    said, silence = _Listener(), _Listener()
    with warnings.catch_warnings(), _heard("transformers", said), _heard("bitsandbytes", silence):
        warnings.simplefilter("ignore")
        yield said.messages


@contextmanager
def _heard(library: str, listener: logging.Handler) -> Iterator[None]:
    """Give a library's messages to a listener instead of stderr, and put its logger back.

    A library that is imported for the first time meanwhile sets its logger up: its handler (Transformers': stderr)
    waits until afterwards, and what it says of passing messages on stands then.
    """
    logger = logging.getLogger(library)
    handlers, propagate, add = logger.handlers[:], logger.propagate, logger.addHandler
    waiting: list[logging.Handler] = []
    logger.handlers, logger.propagate, logger.addHandler = [listener], False, waiting.append
    try:
        yield
    finally:
        logger.handlers, logger.addHandler = handlers, add
        for handler in waiting:
            add(handler)  # where borders lie in one another, it waits for the outer one too
        if not waiting:
            logger.propagate = propagate


def foreign_place(error: BaseException, libraries: Sequence[str] = _FOREIGN) -> str | None:
    """Return file and line of the innermost frame in libraries' code (a model's own); None where there is none."""
    for frame in reversed(extract_tb(error.__traceback__)):
        parts = frame.filename.replace(os.sep, "/").split("/site-packages/")
        if len(parts) == 2 and parts[1].split("/")[0] in libraries:
            return f"{parts[1]}:{frame.lineno}"
    return None
