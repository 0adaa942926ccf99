"""`foretune config`: write, check and explain a configuration file."""

# os.path, as in the contract: pathlib costs 3 ms of every start.
# ruff: noqa: PTH118, PTH120, PTH123

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from foretune.cli.commands import Command, Example, Group, LazyCommand, option
from foretune.cli.files import write_new
from foretune.cli.output import Reply
from foretune.cli.terminal import Terminal, escape, wrapped
from foretune.errors import ConfigError, ForetuneError, Problem

if TYPE_CHECKING:
    from foretune.contract import LoadedConfig

__all__ = ["config", "init_command", "schema_command", "show_command", "validate_command"]

config = Group(
    name="config",
    help="Write, check and explain a configuration file.",
    lazy={
        "init": LazyCommand(__name__, "init_command", "Write a commented file to start from."),
        "import": LazyCommand("foretune.cli.config_import", "import_command", "Read a file of axolotl, TRL, ..."),
        "validate": LazyCommand(__name__, "validate_command", "Check files; every problem is reported."),
        "show": LazyCommand(__name__, "show_command", "Show every setting, and where it comes from."),
        "schema": LazyCommand(__name__, "schema_command", "Print the JSON Schema (draft-07)."),
    },
    examples=[
        Example("Start from a commented file", "foretune config init run.yaml"),
        Example("Check it, then estimate it", "foretune config validate run.yaml"),
    ],
)


@click.command(
    cls=Command,
    name="init",
    examples=[
        Example("A file for LoRA, with every setting and its text", "foretune config init run.yaml"),
        Example("For another model", "foretune config init gpt2.yaml --model gpt2 --method full"),
    ],
)
@click.argument("file", default="foretune.yaml", required=False, type=click.Path())
@option("--model", group="Content", metavar="ID|PATH", default="Qwen/Qwen2.5-0.5B", show_default=True, help="Model.")
@option("--method", group="Content", metavar="METHOD", default="lora", show_default=True, help="full, lora or qlora.")
@option("--set", "settings", group="Content", metavar="KEY=VALUE", multiple=True, help="Any field; repeatable.")
def init_command(file: str, model: str, method: str, settings: Sequence[str]) -> Reply:
    """Write a configuration with every setting and its text, and the JSON Schema beside it for editors.

    FILE is foretune.yaml unless it is given. Nothing is overwritten.
    """
    from foretune.contract import Override, build_config, dump_config

    loaded = build_config(overrides=[Override("model.id", model, "--model"), *settings], method=method)
    write_new(file, [dump_config(loaded.config, comments=True, folder=os.path.dirname(file) or ".")])
    schema = write_schema(os.path.dirname(file))
    return Reply(
        "config.init",
        lambda: {"file": file, "schema_file": schema.file, "wrote_schema": schema.is_new},
        lambda _: [escape(file), *([escape(schema.file)] if schema.is_new else [])],
        notes=schema.notes,
    )


class WrittenSchema(NamedTuple):
    """The JSON Schema beside a configuration."""

    file: str
    is_new: bool
    notes: tuple[str, ...]


def write_schema(folder: str) -> WrittenSchema:
    """Write the JSON Schema into a folder, where editors look for it; one that is there is kept."""
    from foretune.contract import json_schema
    from foretune.contract.dump import SCHEMA_FILE
    from foretune.values import encode_json

    file, text = os.path.join(folder, SCHEMA_FILE), f"{encode_json(json_schema())}\n"
    is_new = _write_missing(file, text)
    kept = f"{escape(file)} was there and is kept; `foretune config schema` prints the present one."
    return WrittenSchema(file, is_new, () if is_new or _reads(file, text) else (kept,))


def _write_missing(file: str, text: str) -> bool:
    """Write a file unless it is there. Returns whether it was written."""
    if os.path.lexists(file):
        return False
    write_new(file, [text])
    return True


def _reads(file: str, text: str) -> bool:
    try:
        with open(file, encoding="utf-8") as stream:
            return stream.read() == text
    except (OSError, ValueError):
        return False


@click.command(
    cls=Command,
    name="validate",
    examples=[
        Example("One file", "foretune config validate run.yaml"),
        Example("Several, for a script", "foretune config validate run.yaml gpt2.yaml --json"),
    ],
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path())
def validate_command(files: Sequence[str]) -> Reply:
    """Check configuration files. All problems of all files are reported, each with its line."""
    from foretune.contract import experimental_choices, fingerprint

    loaded = _loaded_files(files)
    rows = [
        {
            "file": file,
            "method": one.config.method,
            "fingerprint": fingerprint(one.config),
            "experimental": experimental_choices(one.config),
        }
        for file, one in zip(files, loaded, strict=True)
    ]
    return Reply("config.validate", lambda: {"files": rows}, lambda terminal: _draw_valid(rows, terminal))


def _loaded_files(files: Sequence[str]) -> "list[LoadedConfig]":
    from foretune.contract import load_config

    loaded: list[LoadedConfig] = []
    failures: list[ForetuneError] = []
    for file in files:
        try:
            loaded.append(load_config(file))
        except ForetuneError as error:
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        problems: list[Problem] = [problem for error in failures for problem in error.problems]
        raise ConfigError.of(problems)
    return loaded


def _draw_valid(rows: list[dict[str, Any]], terminal: Terminal) -> Iterator[str]:
    for row in rows:
        yield from wrapped(f"{escape(row['file'])}: valid ({row['method']}, {row['fingerprint']})", terminal)
        for choice in row["experimental"]:
            yield from wrapped(f"experimental: {choice}", terminal, indent="  ", bullet="- ")


@click.command(
    cls=Command,
    name="show",
    examples=[
        Example("The settings as they take effect", "foretune config show run.yaml"),
        Example(
            "Where does each value come from?",
            "foretune config show run.yaml --set lora.rank=8 --origin",
        ),
    ],
)
@click.argument("file", type=click.Path())
@option("--method", group="Change", metavar="METHOD", help="full, lora or qlora.")
@option("--set", "settings", group="Change", metavar="KEY=VALUE", multiple=True, help="Any field; repeatable.")
@option("--origin", group="Answer", is_flag=True, help="Say for each value where it comes from.")
def show_command(file: str, method: str | None, settings: Sequence[str], origin: bool) -> Reply:
    """Show every setting of a file as it takes effect: file, then the command line, else the default."""
    from foretune.contract import fingerprint, load_config

    loaded = load_config(file, overrides=settings, method=method)
    return Reply(
        "config.show",
        lambda: {
            "config": loaded.config.to_dict(),
            "method": loaded.config.method,
            "fingerprint": fingerprint(loaded.config),
            "origins": {path: where._asdict() for path, where in loaded.origins.items()},
        },
        lambda terminal: _draw_origins(loaded) if origin else _draw_config(loaded),
    )


def _draw_config(loaded: "LoadedConfig") -> Sequence[str]:
    from foretune.contract import dump_config

    return dump_config(loaded.config).rstrip("\n").split("\n")


def _draw_origins(loaded: "LoadedConfig") -> Iterator[str]:
    from foretune.contract.dump import write_value

    flat = dict(_flat(loaded.config.to_dict(), loaded.origins))
    width = max(len(f"{path}: {write_value(value)}") for path, value in flat.items())
    width = min(width, 48)
    for path, value in flat.items():
        yield f"{f'{path}: {write_value(value)}':<{width}}  # {escape(str(loaded.origins[path]))}"


def _flat(data: Mapping[str, Any], origins: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        path = f"{prefix}{name}"
        if path in origins:
            yield path, value
        else:
            yield from _flat(value, origins, f"{path}.")


@click.command(
    cls=Command,
    name="schema",
    examples=[
        Example("For an editor that checks while you type", "foretune config schema > foretune.schema.json"),
        Example("Inside one document, as every command has it", "foretune config schema --json"),
    ],
)
def schema_command() -> Reply:
    """Print the JSON Schema (draft-07) of a configuration file, with the text of each setting.

    With --json it stands under json_schema.
    """
    from foretune.contract import json_schema
    from foretune.values import encode_json

    schema = json_schema()
    return Reply("config.schema", lambda: {"json_schema": schema}, lambda _: encode_json(schema).split("\n"))
