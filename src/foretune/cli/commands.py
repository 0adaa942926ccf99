"""What every command has in common: `-h`, `--json`, grouped options, examples, and groups that load when used."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import click

from foretune.cli.output import Reply

__all__ = [
    "Answered",
    "Choice",
    "Command",
    "Example",
    "Group",
    "LazyCommand",
    "Option",
    "Whole",
    "WrongValue",
    "help_reply",
    "nearest",
    "option",
]

HELP_WIDTH = 80


class Answered(Exception):
    """Leaves the parser early with an answer: `--help` and `--version`."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.schema)
        self.reply = reply


class WrongValue(click.BadParameter):
    """A value that an option or an argument does not take, told as the contract tells it of a setting."""

    def __init__(
        self, message: str, param: click.Parameter | None, ctx: click.Context | None, hint: str | None
    ) -> None:
        super().__init__(message, ctx, param)
        self.hint = hint


class Choice(click.Choice[str]):
    """One of a few words."""

    @property
    def words(self) -> str:
        """The choices as a sentence lists them."""
        *others, last = self.choices
        return f"{', '.join(others)} or {last}" if others else last

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the word. Raises WrongValue with the nearest one."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            near = nearest(str(value), list(self.choices))
            message = f"it is {str(value)[:60]!r}, but it must be {self.words}."
            raise WrongValue(message, param, ctx, f"Did you mean {near}?" if near else None) from error


class Whole(click.IntRange):
    """A whole number from `min` to `max`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number. Raises WrongValue."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            message = f"it is {str(value)[:60]!r}, but it must be a whole number from {self.min} to {self.max}."
            raise WrongValue(message, param, ctx, None) from error


class Example(NamedTuple):
    """A command that can be run as it stands, and what it is for."""

    purpose: str
    line: str


class Option(click.Option):
    """An option that stands under a heading in the help."""

    def __init__(self, *args: Any, group: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


option = partial(click.option, cls=Option)


def _show_help(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        raise Answered(help_reply(ctx))


def help_reply(ctx: click.Context) -> Reply:
    """Return a command's help as an answer."""
    text = ctx.get_help()
    return Reply("help", lambda: {"command": ctx.command_path, "text": text}, lambda _: text.splitlines())


def _output_options() -> list[click.Parameter]:
    """Return new options that every command takes. `Output` reads them from the raw arguments."""
    shared: dict[str, Any] = {"group": "Output", "expose_value": False}
    return [
        Option(
            ["--json"],
            is_flag=True,
            help="Print JSON, errors included: one document; `train` a line an event.",
            **shared,
        ),
        Option(
            ["--color"],
            type=Choice(["auto", "always", "never"]),
            metavar="WHEN",
            help="auto, always or never; beats NO_COLOR and FORCE_COLOR.  [default: auto]",
            **shared,
        ),
        Option(["--debug"], is_flag=True, help="Show the traceback of an internal error.", **shared),
    ]


class _Documented(click.Command):
    """Grouped options, and examples below them."""

    def __init__(
        self,
        name: str | None,
        *,
        params: Sequence[click.Parameter] | None = None,
        examples: Sequence[Example] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(name, params=[*(params or ()), *_output_options()], **kwargs)
        self.examples = tuple(examples)
        self._help = Option(
            ["-h", "--help"],
            is_flag=True,
            is_eager=True,
            callback=_show_help,
            help="Show this text.",
            group="Output",
            expose_value=False,
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words after the command; an error says which command it is about."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return `-h` and `--help`."""
        return self._help

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings, in the order in which the headings first occur."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(param, "group", "Arguments"), []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records, col_max=26)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, each on one line, so that it can be copied."""
        if self.examples:
            formatter.write_paragraph()
            formatter.write("Examples:\n")
            for example in self.examples:
                formatter.write(f"  # {example.purpose}\n  {example.line}\n")
        super().format_epilog(ctx, formatter)


class Command(_Documented):
    """A command: its function returns a `Reply`, or an iterator of them."""


class LazyCommand(NamedTuple):
    """Where a command is defined, and what is said about it without loading it."""

    module: str
    attribute: str
    summary: str


class Group(_Documented, click.Group):
    """A group whose commands are imported when they are used; without one it shows its help."""

    def __init__(self, name: str, *, lazy: dict[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(name, invoke_without_command=True, subcommand_metavar="COMMAND ...", **kwargs)
        self.lazy = lazy
        self.callback = self.callback or _show_group_help

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order in which a person meets them."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        entry = self.lazy.get(cmd_name)
        if entry is None:
            return None
        from importlib import import_module

        command: click.Command = getattr(import_module(entry.module), entry.attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the next word names, or say which one is near."""
        if args and not args[0].startswith("-") and args[0] not in self.lazy and not ctx.resilient_parsing:
            near = nearest(args[0], self.lazy)
            hint = f" Did you mean `{ctx.command_path} {near}`?" if near else f" There are: {', '.join(self.lazy)}."
            raise click.UsageError(f"{args[0]!r} is no command of {ctx.command_path}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands before the options, without importing one."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self.lazy.items()])
        _Documented.format_options(self, ctx, formatter)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Complete the names of commands without importing one."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=entry.summary) for name, entry in self.lazy.items() if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]


@click.pass_context
def _show_group_help(ctx: click.Context, /, **_: Any) -> None:
    if ctx.invoked_subcommand is None:
        raise Answered(help_reply(ctx))


def nearest(text: str, words: Sequence[str] | dict[str, Any]) -> str | None:
    """Return the word most like a text, or None."""
    from difflib import get_close_matches

    found = get_close_matches(text[:64].lower(), list(words), n=1, cutoff=0.6)
    return found[0] if found else None


def completes(words: Callable[[], Sequence[str]]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Make a completion of a list that is read only when the shell asks; a part of a word is enough."""

    def complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
        wanted = incomplete.lower()
        return [word for word in words() if wanted in word.lower()]

    return complete
