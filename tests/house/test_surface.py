"""The command line is a promise: every command and every option stands in this table."""

from collections.abc import Iterator

import click
import pytest

from foretune.api import build_config
from foretune.cli.app import root
from foretune.cli.commands import Command, Group, Option
from foretune.cli.request import FLAGS
from foretune.contract.fields import Leaf, find_field

EVERYWHERE = {"--json", "--color", "--debug", "-h/--help"}

REQUEST = {
    "--model", "--revision", "--offline", "--method", "--rank", "--alpha", "--targets", "--dtype", "--optimizer",
    "--seq-len", "--micro-batch", "--accumulation", "--attention", "--loss",
    "--gradient-checkpointing/--no-gradient-checkpointing", "--gpu", "--vram", "--free", "--detect", "--stack",
    "--config", "--set", "--check", "--accept", "--explain",
}  # fmt: skip

SURFACE: dict[str, set[str]] = {
    "": {"--version"},
    "estimate": {*REQUEST, "--lengths", "--data", "--plot", "--import", "--without"},
    "recommend": {
        *(REQUEST - {"--accept", "--explain"}), "--objective", "--max", "--devices", "--verify", "--plot",
    },
    "trace": {*REQUEST, "--why", "--events", "--plot"},
    "recipe": {*(REQUEST - {"--check", "--accept", "--explain", "--stack"}), "folder", "--data", "--allow-infeasible"},
    "train": {
        "config", "--set", "--output", "--resume", "--dry-run", "--allow-infeasible", "--offline", "--workers",
        "--no-cache",
    },
    "evaluate": {
        "run", "--data", "--prompt", "--max-tokens", "--format", "--allow-other-format", "--offline", "--workers",
    },
    "merge": {"run", "--output", "--dry-run", "--check", "--offline"},
    "quickstart": {"folder"},
    "score": {"file", "--engine", "--rows", "--workers"},
    "data": set(),
    "data check": {
        "file", "--model", "--revision", "--offline", "--chat-template", "--supervision", "--spans",
        "--allow-template-rewrite", "--template-date", "--seq-len", "--truncation", "--micro-batch", "--config",
        "--set", "--rows", "--preview", "--plot", "--workers", "--no-cache",
    },
    "data convert": {"in_file", "out_file", "--from", "--drop"},
    "models": set(),
    "models list": {"--search"},
    "models show": {"model", "--revision", "--offline"},
    "devices": set(),
    "devices list": {"--search"},
    "devices show": {"name"},
    "devices detect": set(),
    "config": set(),
    "config init": {"file", "--model", "--method", "--set"},
    "config import": {"file", "--tool", "--set", "--without", "--output"},
    "config validate": {"files"},
    "config show": {"file", "--method", "--set", "--origin"},
    "config schema": set(),
    "doctor": {"--selftest", "--online", "--check"},
    "completion": {"shell"},
    "help": {"words"},
}  # fmt: skip


def commands(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    yield " ".join(words), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, (*words, name))


ALL = dict(commands(root))


def spelled(param: click.Parameter) -> str:
    names = [*param.opts, *param.secondary_opts]
    return "/".join(names) if isinstance(param, click.Option) else str(param.name)


def test_commands_are_those_of_the_table() -> None:
    assert list(ALL) == list(SURFACE)


@pytest.mark.parametrize("name", SURFACE)
def test_options_are_those_of_the_table(name: str) -> None:
    found = {spelled(param) for param in ALL[name].get_params(click.Context(ALL[name]))}
    assert found == SURFACE[name] | EVERYWHERE


@pytest.mark.parametrize("name", SURFACE)
def test_command_is_documented(name: str) -> None:
    command = ALL[name]
    assert isinstance(command, (Command, Group))
    assert 2 <= len(command.examples) <= 4
    for param in command.params:
        assert not isinstance(param, click.Option) or (isinstance(param, Option) and param.help)
    assert all(entry.summary for entry in getattr(command, "lazy", {}).values())


@pytest.mark.parametrize("name", SURFACE)
def test_help_fits_80_columns(call, name: str) -> None:
    words = name.split()
    short, long = call(*words, "-h"), call(*words, "--help")
    assert short == long
    assert max(map(len, long.out.splitlines())) <= 80
    assert call("help", *words).out == long.out


def test_stated_defaults_are_the_contracts() -> None:
    config = build_config({"model.id": "gpt2", "lora.rank": 16}).config
    options = {param.name: param for param in ALL["estimate"].params if isinstance(param, click.Option)}
    for name, (_, field) in FLAGS.items():
        leaf = find_field(field)
        assert isinstance(leaf, Leaf)
        text = options[name].help or ""
        default = leaf.default if not leaf.is_required else getattr(config.precision, field.split(".")[1], None)
        if "[default: " in text and not isinstance(default, bool):
            stated = text.partition("[default: ")[2].rstrip("]").partition(";")[0]
            assert stated == (f"{default:g}" if isinstance(default, float) else str(default))
