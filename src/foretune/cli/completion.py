"""`foretune completion`: a script that completes commands, options, model ids and GPU names."""

from typing import Any

import click

from foretune.cli.commands import Choice, Command, Example
from foretune.cli.output import Reply

__all__ = ["SHELLS", "completion"]

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_FORETUNE_COMPLETE"


@click.command(
    cls=Command,
    name="completion",
    examples=[
        Example("bash: in this shell", 'eval "$(foretune completion bash)"'),
        Example("zsh: for every shell", "foretune completion zsh >> ~/.zshrc"),
        Example("fish", "foretune completion fish > ~/.config/fish/completions/foretune.fish"),
    ],
)
@click.argument("shell", type=Choice(SHELLS))
def completion(shell: str) -> Reply:
    """Print a completion script for bash, zsh or fish. Nothing is installed."""
    script = _script(shell)
    document: dict[str, Any] = {"shell": shell, "script": script}
    return Reply("completion", lambda: document, lambda _: script.rstrip("\n").split("\n"))


def _script(shell: str) -> str:
    from click.shell_completion import get_completion_class

    from foretune.cli.app import root

    completer = get_completion_class(shell)
    assert completer is not None
    made = completer(root, {}, "foretune", VARIABLE)
    # Not source(): for bash that starts a shell to ask its version.
    return made.source_template % made.source_vars()
