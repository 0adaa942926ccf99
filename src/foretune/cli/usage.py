"""What is wrong with the words of a command line, in one message with the nearest right word and where help is."""

import re
from typing import Any, NamedTuple

import click

from foretune.cli.commands import Choice, WrongValue, nearest

__all__ = ["usage_error"]

LONGEST_SHOWN = 60


class _Told(NamedTuple):
    message: str
    hint: str | None = None
    place: str | None = None


def usage_error(error: click.ClickException) -> dict[str, Any]:
    """Return the object that `--json` prints for an error of the command line."""
    ctx = getattr(error, "ctx", None)
    command = ctx.command_path if ctx else "foretune"
    told = _told(error, ctx, command)
    hint = " ".join(filter(None, (told.hint, f"`{command} --help` shows what there is.")))
    problem = {"message": told.message, "hint": hint, "place": told.place, "field": None}
    return {"code": "usage", "message": told.message, "hint": hint, "exit_code": 2, "problems": [problem]}


def _told(error: click.ClickException, ctx: click.Context | None, command: str) -> _Told:
    if isinstance(error, click.NoSuchOption):
        near = nearest(error.option_name, _option_names(ctx)) if ctx else None
        return _Told(f"{error.option_name!r} is no option of {command}.", f"Did you mean {near}?" if near else None)
    if isinstance(error, click.MissingParameter):
        kind = error.param.type if error.param else None
        what = f": it must be {kind.words}" if isinstance(kind, Choice) else ""
        return _Told(f"{_name_of(error.param, ctx)} is missing{what}.", _example(ctx))
    if isinstance(error, WrongValue):
        return _Told(error.message, error.hint, _name_of(error.param, ctx))
    if isinstance(error, click.BadOptionUsage):
        return _about_value(error, ctx)
    message = error.format_message()
    if extra := re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", message, re.DOTALL):
        return _Told(f"{_short(extra[1])} is more than {command} takes.", _example(ctx))
    what, _, advice = message.partition(". ")
    return _Told(f"{what}.", advice) if advice else _Told(message)


def _about_value(error: click.BadOptionUsage, ctx: click.Context | None) -> _Told:
    name = error.option_name
    if "requires an argument" not in error.message:
        return _Told(f"{name} takes no value.", f"Write {name} alone.")
    found = [param for param in ctx.command.get_params(ctx) if name in param.opts] if ctx else []
    example = f"Write {name} {found[0].make_metavar(ctx)}." if ctx and found else None
    return _Told(f"{name} needs a value.", example)


def _name_of(param: click.Parameter | None, ctx: click.Context | None) -> str:
    """Return an option's flag, or an argument's name as the help shows it."""
    if param is None or ctx is None:
        return "An argument"
    return max(param.opts, key=len) if isinstance(param, click.Option) else param.make_metavar(ctx)


def _example(ctx: click.Context | None) -> str | None:
    examples = getattr(ctx.command, "examples", ()) if ctx else ()
    return f"For example: `{examples[0].line}`." if examples else None


def _short(text: str) -> str:
    return repr(text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}...")


def _option_names(ctx: click.Context) -> list[str]:
    return [name for param in ctx.command.get_params(ctx) for name in (*param.opts, *param.secondary_opts)]
