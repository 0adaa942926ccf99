"""What the runtime does not run yet, refused by name before anything is imported or built."""

from foretune.contract import TrainingConfig
from foretune.errors import Problem, UnsupportedError
from foretune.memory.qualify import setting_problems
from foretune.memory.stack import FORETUNE, StackProfile

__all__ = ["require_runnable"]


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
    problems = setting_problems(config, "traced")
    if any(getattr(stack, name) != getattr(FORETUNE, name) for name in _LOOP):
        text = f"The stack {stack.name} is another training loop, and a trace runs foretune's own."
        problems.append(Problem(text, "Take --stack foretune or installed; `foretune estimate` knows this one."))
    if problems:
        raise UnsupportedError.of(problems)
