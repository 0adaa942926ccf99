"""What the runtime does not run yet, refused by name before anything is imported or built."""

from typing import NamedTuple

from foretune.contract import TrainingConfig
from foretune.errors import Problem, UnsupportedError
from foretune.memory.stack import FORETUNE, StackProfile

__all__ = ["require_runnable"]


class _Refusal(NamedTuple):
    """A setting that the runtime has no code for."""

    field: str
    value: object
    why: str
    instead: str


_REFUSED = (
    _Refusal("device", "cpu", "the memory of a run on the CPU is not traced", "Set device: cuda."),
    _Refusal("quantization.scheme", "int8", "an 8-bit base is not traced yet", "Set quantization.scheme: nf4."),
    _Refusal("attention", "flash_attention_2", "the flash-attn package is not traced yet", "Set attention: sdpa."),
    _Refusal("loss", "liger", "Liger's kernels are not traced yet", "Set loss: chunked."),
    _Refusal("batch.packing", True, "packed rows are not traced yet", "Set batch.packing: false."),
)

_LOOP = (
    "has_warmup_block",
    "load_order",
    "kbit_upcast",
    "embeddings_want_grad",
    "keeps_cache",
    "passes_mask",
    "loss",
    "holds_outputs",
    "keeps_batch",
    "zeroes_grads_first",
    "scales_every_loss",
)
"""Fields of a profile that describe another program than the runtime's."""


def require_runnable(config: TrainingConfig, stack: StackProfile) -> None:
    """Raise UnsupportedError for every setting and stack that the runtime has no code for, all at once."""
    problems = [
        Problem(f"{r.field} is {str(r.value).lower()}: {r.why}.", r.instead, None, r.field)
        for r in _REFUSED
        if _value_at(config, r.field) == r.value
    ]
    if any(getattr(stack, name) != getattr(FORETUNE, name) for name in _LOOP):
        text = f"The stack {stack.name} is another training loop, and a trace runs foretune's own."
        problems.append(Problem(text, "Take --stack foretune or installed; `foretune estimate` knows this one."))
    if problems:
        raise UnsupportedError.of(problems)


def _value_at(config: TrainingConfig, field: str) -> object:
    value: object = config
    for name in field.split("."):
        value = getattr(value, name, None)
    return value
