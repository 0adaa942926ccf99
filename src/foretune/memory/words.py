"""An answer in words: what its figures are called, and the sentence that says what is needed and whether it fits."""

from typing import NamedTuple

from foretune.memory.answer import ByteRange, Fit, MemoryEstimate
from foretune.units import format_bytes

__all__ = ["DEVICE_WORDS", "HOST_WORDS", "Words", "interval_text", "need_sentence", "short_line", "words_of"]


class Words(NamedTuple):
    """What the figures are called."""

    at_the_peak: str
    allocated: str
    reserved: str
    held: str
    must_be_free: str


DEVICE_WORDS = Words("Allocated", "allocated", "reserved", "held by the allocator", "Must be free")
HOST_WORDS = Words(
    "Tensors", "tensors", "process", "what the process grows by after imports", "Must be free on the host"
)


def words_of(needed: MemoryEstimate) -> Words:
    """Return the words for a card, or for a run on a CPU, which has no caching allocator."""
    return HOST_WORDS if needed.is_of_host else DEVICE_WORDS


def interval_text(bounds: ByteRange) -> str:
    """Write an interval: `90 %: 7.55 to 7.68 GiB`."""
    low, high = format_bytes(bounds.low_bytes), format_bytes(bounds.high_bytes)
    number, unit = low.split()
    return f"90 %: {number if high.endswith(unit) else low} to {high}"


def need_sentence(needed: MemoryEstimate, fit: Fit | None) -> str:
    """Say what is needed, of what there is, and of which kind the figures are. Foreign names are as they are."""
    basis = f"({needed.kind}; stack {needed.stack})"
    need = format_bytes(needed.need_bytes)
    if fit is None:
        return f"Needs {need}{' of host memory' if needed.is_of_host else ''} {basis}."
    needs = "may run; to be sure it needs" if fit.verdict == "tight" else "needs"
    return f"{fit.verdict[0].upper()}{fit.verdict[1:]}: {needs} {need} of {_budget(fit)} {basis}."


def short_line(needed: MemoryEstimate, fit: Fit | None) -> str:
    """Say it in a few words, for one line of a shell."""
    words = words_of(needed)
    figures = (
        f"{format_bytes(needed.allocated_bytes)} {words.allocated}, "
        f"{format_bytes(needed.reserved_bytes)} {words.reserved}, {needed.kind}"
    )
    head = f"needs {format_bytes(needed.need_bytes)}"
    return f"{head} ({figures})" if fit is None else f"{fit.verdict}, {head} of {_budget(fit)} ({figures})"


def _budget(fit: Fit) -> str:
    free = " free now" if fit.budget_is == "free now" else ""
    return f"{format_bytes(fit.budget_bytes)}{free} on {fit.device.name}"
