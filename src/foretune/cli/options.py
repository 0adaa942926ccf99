"""The options of a request: one definition for every command that says what a fine-tune needs."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import click

from foretune.cli.commands import Choice, completes, option

__all__ = ["DEFAULT_STACK", "asking_options", "model_ids", "plot_option", "request_options", "running_options"]

DEFAULT_STACK = "foretune"


def model_ids() -> Sequence[str]:
    """List what `--model` completes to."""
    from foretune.models import list_models

    return [entry.id for entry in list_models()]


def _gpu_names() -> Sequence[str]:
    from foretune.devices import list_devices

    return [device.name for device in list_devices()]


def _words(field: str) -> Any:
    """Complete the words that a field may hold."""

    def words() -> Sequence[str]:
        from foretune.contract.fields import Leaf, choices, find_field

        leaf = find_field(field)
        return choices(leaf.type) if isinstance(leaf, Leaf) else ()

    return completes(words)


STACK = option(
    "--stack",
    group="Hardware",
    metavar="NAME",
    default=DEFAULT_STACK,
    show_default=True,
    help="Stack profile, or installed: the libraries here.",
)
REQUEST: tuple[Callable[[Any], Any], ...] = (
    option(
        "--model",
        group="Model",
        metavar="ID|PATH",
        shell_complete=completes(model_ids),
        help="Catalogue or hub id, or the path of a config.json or its folder.",
    ),
    option("--revision", group="Model", metavar="REV", help="Branch, tag or commit of the hub."),
    option("--offline", group="Model", is_flag=True, help="Never ask the hub; catalogue, paths and cache only."),
    option(
        "--method",
        group="Method",
        metavar="METHOD",
        shell_complete=completes(lambda: ("full", "lora", "qlora")),
        help="full, lora or qlora.  [default: lora]",
    ),
    option("--rank", group="Method", metavar="N", help="LoRA's r.  [default: 16]"),
    option("--alpha", group="Method", metavar="X", help="LoRA's alpha.  [default: 32]"),
    option(
        "--targets",
        group="Method",
        metavar="SCOPE|LIST",
        shell_complete=completes(lambda: ("all-linear", "attention", "mlp")),
        help="all-linear, attention, mlp, or names: q_proj,v_proj.  [default: all-linear]",
    ),
    option(
        "--dtype",
        group="Method",
        metavar="D",
        shell_complete=_words("precision.dtype"),
        help="bf16, fp16 or fp32.  [default: bf16; a file must say it]",
    ),
    option(
        "--optimizer",
        group="Method",
        metavar="NAME",
        shell_complete=_words("optimizer.name"),
        help="adamw, adamw_8bit, paged_adamw_8bit or sgd.  [default: adamw]",
    ),
    option("--seq-len", group="Memory", metavar="N", help="Tokens in a row on the device.  [default: 1024]"),
    option("--micro-batch", group="Memory", metavar="N", help="Rows in one forward.  [default: 1]"),
    option("--accumulation", group="Memory", metavar="N", help="Microsteps in an update.  [default: 1]"),
    option(
        "--attention",
        group="Memory",
        metavar="NAME",
        shell_complete=_words("attention"),
        help="sdpa, eager or flash_attention_2.  [default: sdpa; eager where the model caps its scores]",
    ),
    option(
        "--loss",
        group="Memory",
        metavar="NAME",
        shell_complete=_words("loss"),
        help="stock, chunked or liger.  [default: stock]",
    ),
    option(
        "--gradient-checkpointing/--no-gradient-checkpointing",
        group="Memory",
        default=None,
        help="Recompute activations in backward, or keep them.  [default: recompute]",
    ),
    option("--gpu", group="Hardware", metavar="NAME", shell_complete=completes(_gpu_names), help="A card by its name."),
    option("--vram", group="Hardware", metavar="GIB", help="A device by its memory: 24, 24GiB, 15360MiB, 24GB."),
    option("--free", group="Hardware", metavar="GIB", help="How much of it is free.  [default: all of it]"),
    option(
        "--detect",
        group="Hardware",
        is_flag=True,
        help="This machine's first GPU, and what is free on it; with device: cpu its memory.",
    ),
    STACK,
    option(
        "--config",
        "configs",
        group="Configuration",
        metavar="FILE",
        multiple=True,
        type=click.Path(),
        help="A YAML or JSON file; flags beat it. Several: an answer each (with --json a line each).",
    ),
    option(
        "--set", "settings", group="Configuration", metavar="KEY=VALUE", multiple=True, help="Any field; repeatable."
    ),
    option("--check", group="Answer", is_flag=True, help="Exit with 3 unless it fits."),
    option(
        "--accept",
        group="Answer",
        type=Choice(["tight"]),
        metavar="tight",
        help="With --check: tight is good enough.",
    ),
    option("--explain", group="Answer", is_flag=True, help="Show formula, inputs and source of each component."),
)
"""Model, method, memory, hardware, configuration and answer, in the order of the help."""


NUM_ABOUT_ANSWERS = 3
"""The last of them say how one answer is given; a search has none of these."""
plot_option = option(
    "--plot",
    group="Files",
    metavar="FILE.svg",
    type=click.Path(),
    help="Draw the memory over the step by component. The file may not exist yet.",
)


def request_options(function: Any) -> Any:
    """Give a command the options of a request."""
    return _decorated(function, REQUEST)


def asking_options(function: Any) -> Any:
    """Give a command the options that say what is asked, without those about one answer."""
    return _decorated(function, REQUEST[:-NUM_ABOUT_ANSWERS])


def running_options(function: Any) -> Any:
    """Give a command the options that say what is to be run: foretune's own step, on no other tool's stack."""
    return _decorated(function, [each for each in REQUEST[:-NUM_ABOUT_ANSWERS] if each is not STACK])


def _decorated(function: Any, options: Sequence[Callable[[Any], Any]]) -> Any:
    return reduce(lambda decorated, decorate: decorate(decorated), reversed(options), function)
