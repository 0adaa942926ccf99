"""`foretune help`: a command's help by its name, and topics that belong to no command."""

from collections.abc import Sequence

import click

from foretune.cli.commands import Command, Example, help_reply, nearest
from foretune.cli.output import Reply
from foretune.cli.terminal import Terminal, wrapped

__all__ = ["EXIT_CODES", "help_command"]

EXIT_CODES: tuple[tuple[int, str], ...] = (
    (0, "It worked; with --check: the answer is yes."),
    (1, "A mistake in foretune, or an answer that could not be written. The message says how to report it."),
    (2, "The request is wrong or not supported: option, file, field, value."),
    (
        3,
        (
            "The answer is no. Only with --check: does not fit, tight (unless --accept tight), unknown; a merge is not "
            "verified; the machine is not ready."
        ),
    ),
    (4, "The model's config cannot be had: token missing, access not granted, not found, offline."),
    (5, "The data cannot be read: no such file, nothing in it, or a line that is wrong."),
    (6, "Out of memory. The message has the phase, the largest parts and the nearest changes."),
    (7, "A library is missing; the message has the install line."),
    (8, "A run's folder is busy or not empty, or there is no run in it."),
    (9, "Observations or a record cannot be read: no such file, no row in it, or a line that is none."),
    (10, "A run failed. The message has the path of its record; so it is for the following three."),
    (11, "What ran differs from what was asked for; nothing was handed over."),
    (12, "A loss, or the norm of the gradients, was not finite."),
    (13, "An artifact or a checkpoint could not be written whole; nothing partial was left."),
    (130, "Interrupted (Ctrl-C); a run stops after its update with a checkpoint."),
    (141, "Whoever read stdout has closed it."),
    (143, "A run was stopped by SIGTERM (129 by SIGHUP), as by Ctrl-C."),
)

TOPICS = ("exit-codes",)


@click.command(
    cls=Command,
    name="help",
    examples=[
        Example("What a command takes", "foretune help models show"),
        Example("What exit codes mean", "foretune help exit-codes"),
    ],
)
@click.argument("words", metavar="[COMMAND...|TOPIC]", nargs=-1)
@click.pass_context
def help_command(ctx: click.Context, words: Sequence[str]) -> Reply:
    """Show the help of a command, or a topic: exit-codes."""
    if list(words) == ["exit-codes"]:
        codes = [{"exit_code": code, "meaning": meaning} for code, meaning in EXIT_CODES]
        return Reply("help.exit-codes", lambda: {"exit_codes": codes}, _draw_exit_codes)
    assert ctx.parent is not None
    return help_reply(_context_of(ctx.parent, words))


def _context_of(ctx: click.Context, words: Sequence[str]) -> click.Context:
    for word in words:
        command = ctx.command.get_command(ctx, word) if isinstance(ctx.command, click.Group) else None
        if command is None:
            names = ctx.command.list_commands(ctx) if isinstance(ctx.command, click.Group) else []
            near = nearest(word, [*names, *(TOPICS if ctx.parent is None else ())])
            advice = f" Did you mean {near}?" if near else ""
            raise click.UsageError(f"There is no help on {word!r}.{advice}", ctx)
        ctx = click.Context(command, info_name=word, parent=ctx)
    return ctx


def _draw_exit_codes(terminal: Terminal) -> list[str]:
    lines = [line for code, meaning in EXIT_CODES for line in wrapped(meaning, terminal, bullet=f"{code:>4}  ")]
    return [terminal.paint("Exit codes", "bold"), *lines]
