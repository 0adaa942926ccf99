"""What the runtime does not run yet, refused by name before anything is imported or built."""

from foretune.contract import TrainingConfig
from foretune.errors import Problem, UnsupportedError
from foretune.memory.packing import packed_model_problems
from foretune.memory.qualify import class_problems, setting_problems
from foretune.memory.stack import StackProfile
from foretune.models import WITHOUT_CLASS, ModelShape

__all__ = ["require_rows_apart", "require_runnable", "require_same_class"]


def require_runnable(config: TrainingConfig, stack: StackProfile) -> None:
    """Raise UnsupportedError for every setting that the runtime has no code for on this stack, all at once."""
    problems = setting_problems(config, stack, "traced")
    if config.device == "cpu" and stack.loss != "own":
        text = f"device is cpu: how the stack {stack.name} runs there is not traced."
        problems.append(Problem(text, "Take the stack foretune, or set device: cuda.", None, "device"))
    if problems:
        raise UnsupportedError.of(problems)


def require_same_class(shape: ModelShape, stack: StackProfile) -> None:
    """Raise UnsupportedError where a model has no class, or its class was another one in the stack's Transformers."""
    if shape.model_type in WITHOUT_CLASS:
        raise UnsupportedError(
            f"{shape.id}: Transformers has no class for {shape.model_type}; its code is published with its weights, "
            "and foretune never runs remote code.",
            hint="`foretune models show` counts it, and `foretune estimate` has a program for it.",
            field="model.id",
        )
    problems = class_problems(shape, stack)
    if problems:
        raise UnsupportedError.of(problems)


def require_rows_apart(config: TrainingConfig, shape: ModelShape) -> None:
    """Raise UnsupportedError where rows are packed and the model's class does not keep their examples apart."""
    problems = packed_model_problems(config, shape)
    if problems:
        raise UnsupportedError.of(problems)
