"""`foretune recipe`: a fine-tune as a folder that a person can read and run."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from foretune.cli.commands import Command, Example, option
from foretune.cli.options import running_options
from foretune.cli.output import Reply
from foretune.cli.terminal import Terminal, escape, wrapped
from foretune.texts import quoted
from foretune.units import format_bytes

if TYPE_CHECKING:
    from foretune.api import Recipe
    from foretune.devices import DeviceSpec

__all__ = ["recipe"]

PURPOSES = {
    "config.yaml": "every setting, with its text",
    "train.sh": "sets up what it needs, trains, evaluates",
    "train.py": "trains; --dry-run shows the plan, --resume goes on",
    "evaluate.py": "reloads what was trained; --prompt asks it",
    "requirements.txt": "the exact version",
    "README.md": "how to run it, where your rows go, the plan and its basis",
}


@click.command(
    cls=Command,
    name="recipe",
    examples=[
        Example(
            "QLoRA for a card, on sample rows",
            "foretune recipe my-recipe --model Qwen/Qwen2.5-7B --method qlora --gpu 3090",
        ),
        Example(
            "On rows of your own",
            "foretune recipe my-recipe --model gpt2 --vram 24 --data rows.jsonl",
        ),
        Example("From a configuration", "foretune recipe my-recipe --config run.yaml"),
    ],
)
@click.argument("folder", type=click.Path(), metavar="FOLDER")
@running_options
@option(
    "--data",
    group="Configuration",
    metavar="FILE",
    type=click.Path(),
    help="A JSONL file of rows to train on (data.train).  [default: the sample rows]",
)
@option("--allow-infeasible", group="Answer", is_flag=True, help="Write it although the plan does not fit.")
def recipe(folder: str, **given: Any) -> Reply:
    """Write a fine-tune as a folder that can be read and run.

    It holds a commented configuration, entry scripts that call the package, the exact version that runs it, sample
    rows in both forms, and a README with the plan. What does not fit is not written, and nothing is overwritten.
    """
    from foretune import api
    from foretune.cli.request import single_request
    from foretune.contract import Override

    if given["data"] is not None:
        given["settings"] = (*given["settings"], Override("data.train", given["data"], "--data"))
    loaded, shape = single_request(given, several="--config: a recipe is of one file.")
    config = loaded.config
    written = api.write_recipe(
        config,
        folder,
        device=_device(config.device, given),
        offline=given["offline"],
        allow_infeasible=given["allow_infeasible"],
        shape=shape,
    )
    return Reply("recipe", written.to_dict, lambda terminal: _draw(written, terminal))


def _device(device: str, given: dict[str, Any]) -> "DeviceSpec | None":
    from foretune.cli.request import chosen_device, chosen_host

    return chosen_host(given) if device == "cpu" else chosen_device(given)


def _draw(written: "Recipe", terminal: Terminal) -> Iterator[str]:
    folder = escape(written.folder)
    yield from (terminal.paint(line, "bold") for line in wrapped(f"Written: {folder}", terminal))
    for name, purpose in PURPOSES.items():
        yield from wrapped(purpose, terminal, indent="  ", bullet=f"{name:<18}")
    yield from wrapped(_plan(written), terminal)
    for text in written.warnings:
        yield from wrapped(escape(text), terminal, indent="  ", bullet="- ")
    yield from wrapped(f"Next: sh {quoted(f'{written.folder}/train.sh')}, or read its README.md", terminal)


def _plan(written: "Recipe") -> str:
    need, fit = written.prediction, written.fit
    if need is None:
        return "Memory: unknown."
    text = f"needs {format_bytes(need.need_bytes)} ({need.kind}; stack {escape(need.stack)})"
    if fit is None:
        return f"The plan {text}; no device was named."
    budget = f"{format_bytes(fit.budget_bytes)} on {escape(fit.device.name)}"
    return f"The plan: {fit.verdict}; {text}, of {budget}."
