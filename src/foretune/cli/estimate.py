"""`foretune estimate`: the memory that a fine-tune needs, of what it consists, and whether it fits."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from foretune.cli.commands import Command, Example, completes, option
from foretune.cli.output import Reply
from foretune.errors import ConfigError, ForetuneError

if TYPE_CHECKING:
    from foretune.api import EstimateAnswer, StackProfile
    from foretune.contract import LoadedConfig
    from foretune.devices import DeviceSpec

__all__ = ["estimate", "exit_code_for"]

ANSWER_IS_NO = 3

EXAMPLES = [
    Example("Does LoRA fit on this card?", "foretune estimate --model Qwen/Qwen2.5-7B --gpu 'RTX 3090'"),
    Example(
        "QLoRA on a card of which a part is in use",
        "foretune estimate --model mistral-7b-v0.3 --method qlora --vram 16 --free 14",
    ),
    Example(
        "In a script: exit code 3 where the answer is no",
        "foretune estimate --model Qwen/Qwen2.5-0.5B --vram 24 --check --json",
    ),
    Example(
        "Where do the numbers come from?",
        "foretune estimate --model gpt2 --set optimizer.name=sgd --explain",
    ),
]


def _model_ids() -> Sequence[str]:
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


@click.command(cls=Command, name="estimate", examples=EXAMPLES)
@option(
    "--model",
    group="Model",
    metavar="ID|PATH",
    shell_complete=completes(_model_ids),
    help="Catalogue or hub id, or the path of a config.json or its folder.",
)
@option("--revision", group="Model", metavar="REV", help="Branch, tag or commit of the hub.")
@option("--offline", group="Model", is_flag=True, help="Never ask the hub; catalogue, paths and cache only.")
@option(
    "--method",
    group="Method",
    metavar="METHOD",
    shell_complete=completes(lambda: ("full", "lora", "qlora")),
    help="full, lora or qlora.  [default: lora]",
)
@option("--rank", group="Method", metavar="N", help="LoRA's r.  [default: 16]")
@option("--alpha", group="Method", metavar="X", help="LoRA's alpha.  [default: 32]")
@option(
    "--targets",
    group="Method",
    metavar="SCOPE|LIST",
    shell_complete=completes(lambda: ("all-linear", "attention", "mlp")),
    help="all-linear, attention, mlp, or names: q_proj,v_proj.  [default: all-linear]",
)
@option(
    "--dtype",
    group="Method",
    metavar="D",
    shell_complete=_words("precision.dtype"),
    help="bf16, fp16 or fp32.  [default: bf16; a file must say it]",
)
@option(
    "--optimizer",
    group="Method",
    metavar="NAME",
    shell_complete=_words("optimizer.name"),
    help="adamw, adamw_8bit, paged_adamw_8bit or sgd.  [default: adamw]",
)
@option("--seq-len", group="Memory", metavar="N", help="Tokens in a row on the device.  [default: 1024]")
@option("--micro-batch", group="Memory", metavar="N", help="Rows in one forward.  [default: 1]")
@option("--accumulation", group="Memory", metavar="N", help="Microsteps in an update.  [default: 1]")
@option(
    "--attention",
    group="Memory",
    metavar="NAME",
    shell_complete=_words("attention"),
    help="sdpa, eager or flash_attention_2.  [default: sdpa; eager where the model caps its scores]",
)
@option(
    "--loss",
    group="Memory",
    metavar="NAME",
    shell_complete=_words("loss"),
    help="stock, chunked or liger.  [default: stock]",
)
@option(
    "--gradient-checkpointing/--no-gradient-checkpointing",
    group="Memory",
    default=None,
    help="Recompute activations in backward, or keep them.  [default: recompute]",
)
@option("--gpu", group="Hardware", metavar="NAME", shell_complete=completes(_gpu_names), help="A card by its name.")
@option("--vram", group="Hardware", metavar="GIB", help="A device by its memory: 24, 24GiB, 15360MiB, 24GB.")
@option("--free", group="Hardware", metavar="GIB", help="How much of it is free.  [default: all of it]")
@option("--detect", group="Hardware", is_flag=True, help="This machine's first GPU, and what is free on it.")
@option("--stack", group="Hardware", metavar="NAME", default="foretune", show_default=True, help="Stack profile.")
@option(
    "--config",
    "configs",
    group="Configuration",
    metavar="FILE",
    multiple=True,
    type=click.Path(),
    help="A YAML or JSON file; flags beat it. Several: an answer each (with --json a line each).",
)
@option("--set", "settings", group="Configuration", metavar="KEY=VALUE", multiple=True, help="Any field; repeatable.")
@option("--check", group="Answer", is_flag=True, help="Exit with 3 unless it fits.")
@option(
    "--accept",
    group="Answer",
    type=click.Choice(["tight"]),
    metavar="tight",
    help="With --check: tight is good enough.",
)
@option("--explain", group="Answer", is_flag=True, help="Show formula, inputs and source of each component.")
def estimate(**given: Any) -> Reply | Iterator[Reply | ForetuneError]:
    """Estimate the memory that a fine-tune needs, and whether it fits.

    Needs no GPU, no torch and no weights. The hub is asked only for the config.json of a model that the catalogue
    does not have, and never with --offline. Without --gpu, --vram or --detect the need is given without a verdict.
    """
    replies = _replies(given)
    if len(given["configs"]) > 1:
        return replies
    reply = next(replies)
    if isinstance(reply, ForetuneError):
        raise reply
    return reply


def _replies(given: dict[str, Any]) -> Iterator[Reply | ForetuneError]:
    from foretune.api import find_stack
    from foretune.cli.request import chosen_device, requested_configs

    device, stack = chosen_device(given), find_stack(given["stack"])
    if given["accept"] and not given["check"]:
        raise ConfigError("--accept says what --check accepts.", hint="Add --check.")
    if given["check"] and device is None:
        hint = "Add --gpu NAME, --vram GIB or --detect."
        raise ConfigError("--check asks whether it fits, but on no device.", hint=hint)
    for file, loaded in requested_configs(given):
        if isinstance(loaded, ForetuneError):
            yield loaded
            continue
        try:
            yield _reply(file, loaded, device, stack, given)
        except ForetuneError as error:
            yield _located(error, loaded)


def _reply(
    file: str | None,
    loaded: "LoadedConfig",
    device: "DeviceSpec | None",
    stack: "StackProfile",
    given: dict[str, Any],
) -> Reply:
    from foretune import api
    from foretune.cli.drawing import draw_estimate
    from foretune.cli.request import with_default_attention

    source = loaded.config.model
    shape = api.resolve_model(source.id, revision=source.revision, offline=given["offline"])
    loaded = with_default_attention(loaded, shape, has_file=bool(given["configs"]))
    answer = api.estimate(loaded.config, device=device, stack=stack, shape=shape)
    return Reply(
        "estimate",
        lambda: {**estimate_document(answer, loaded), "config_file": file},
        lambda terminal: draw_estimate(
            answer, loaded.origins, terminal, title=file, notes=shape.notes, explain=given["explain"]
        ),
        exit_code_for(answer, check=given["check"], accept=given["accept"]),
    )


def _located(error: ForetuneError, loaded: "LoadedConfig") -> ForetuneError:
    """Return the error with the place at which each field that is to blame was set."""
    places = {path: origin.place for path, origin in loaded.origins.items() if origin.source != "command-line default"}
    problems = [problem._replace(place=problem.place or places.get(problem.field or "")) for problem in error.problems]
    return type(error).of(problems)


def exit_code_for(answer: "EstimateAnswer", *, check: bool, accept: str | None) -> int:
    """Return 0, or 3 where `--check` asks and the answer is not yes."""
    if not check or answer.verdict is None:
        return 0
    return 0 if answer.verdict in ("fits", accept) else ANSWER_IS_NO


def estimate_document(answer: "EstimateAnswer", loaded: "LoadedConfig") -> dict[str, Any]:
    """Return the flat JSON document: the estimate's fields, the verdict, the configuration and where it is from."""
    figures: dict[str, Any] = {"model": answer.model, "total_params": answer.total_params}
    if answer.estimate is not None:
        figures = {
            **answer.estimate.to_dict(),
            "largest_component": answer.estimate.largest_component.name,
            "components_bytes": {part.name: part.num_bytes for part in answer.estimate.components},
        }
    return {
        "verdict": answer.verdict,
        "unknown_because": answer.unknown_because,
        **figures,
        "fit": None if answer.fit is None else answer.fit.to_dict(),
        "config": answer.config.to_dict(),
        "origins": {path: origin._asdict() for path, origin in loaded.origins.items()},
    }
