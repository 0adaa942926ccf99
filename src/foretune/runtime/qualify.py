"""What the runtime does not run yet, refused by name before anything is imported or built."""

from foretune.contract import TrainingConfig
from foretune.errors import UnsupportedError
from foretune.memory.qualify import setting_problems
from foretune.memory.stack import StackProfile
from foretune.models import WITHOUT_CLASS, ModelShape

__all__ = ["require_runnable", "require_same_class"]


def require_runnable(config: TrainingConfig, stack: StackProfile) -> None:
    """Raise UnsupportedError for every setting that the runtime has no code for on this stack, all at once."""
    problems = setting_problems(config, stack, "traced")
    if problems:
        raise UnsupportedError.of(problems)


def require_same_class(shape: ModelShape, stack: StackProfile) -> None:
    """Raise UnsupportedError where a model's class was another one in the stack's Transformers.

    Up to 4.57 experts were linear layers of their own, which are quantized and adapted; today's are stacked.
    """
    if shape.model_type in WITHOUT_CLASS:
        raise UnsupportedError(
            f"{shape.id}: Transformers has no class for {shape.model_type}; its code is published with its weights, "
            "and foretune never runs remote code.",
            hint="`foretune models show` counts it, and `foretune estimate` has a program for it.",
            field="model.id",
        )
    is_stacked = shape.count("experts") > 0
    if is_stacked and int(stack.transformers.split(".")[0]) < 5:
        raise UnsupportedError(
            f"{shape.id}: its experts are stacked today; in Transformers {stack.transformers} they were layers of "
            "their own, and that class is not here to be traced.",
            field="model.id",
        )
