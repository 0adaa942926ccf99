"""`foretune recommend`: what to run on a device, and why; how far one setting goes; which cards carry it."""

from typing import TYPE_CHECKING, Any, NamedTuple

import click

from foretune.cli.commands import Choice, Command, Example, Whole, completes, option
from foretune.cli.files import require_files
from foretune.cli.options import asking_options
from foretune.cli.output import Reply
from foretune.cli.terminal import escape
from foretune.errors import ConfigError

if TYPE_CHECKING:
    from foretune.contract import LoadedConfig
    from foretune.devices import DeviceSpec
    from foretune.memory import StackProfile
    from foretune.models import ModelShape

__all__ = ["recommend"]

OBJECTIVES = ("longest-sequence", "largest-batch", "highest-rank", "least-memory", "full-if-it-fits")
DEFAULT_OBJECTIVE: Any = OBJECTIVES[0]
LIMITS = ("seq-len", "batch", "rank")
ANSWER_IS_NO = 3

EXAMPLES = [
    Example("How long may the rows be on this card?", "foretune recommend --model Qwen/Qwen2.5-7B --gpu 'RTX 3090'"),
    Example(
        "All weights if they fit, else adapters",
        "foretune recommend --model qwen2.5-1.5b --vram 16 --objective full-if-it-fits",
    ),
    Example(
        "The largest batch with these settings",
        "foretune recommend --model gpt2 --method lora --vram 8 --max batch",
    ),
    Example(
        "Which cards carry it? Smallest first",
        "foretune recommend --model Qwen/Qwen2.5-0.5B --method qlora --devices all",
    ),
]


@click.command(cls=Command, name="recommend", examples=EXAMPLES)
@asking_options
@option(
    "--objective",
    group="Search",
    metavar="NAME",
    type=Choice(OBJECTIVES),
    shell_complete=completes(lambda: OBJECTIVES),
    help="longest-sequence, largest-batch, highest-rank, least-memory or full-if-it-fits.  [default: longest-sequence]",
)
@option(
    "--max",
    "limit",
    group="Search",
    metavar="WHAT",
    type=Choice(LIMITS),
    help="Instead: how far seq-len, batch or rank goes, everything else as it is.",
)
@option(
    "--devices",
    group="Search",
    metavar="all",
    type=Choice(["all"]),
    help="Instead: the cards of the catalogue that carry it, smallest first.",
)
@option(
    "--plot",
    group="Files",
    metavar="FILE.svg",
    type=click.Path(),
    help="Draw how many rows fit at each length, by method. The file may not exist yet.",
)
@option("--verify", group="Answer", metavar="N", type=Whole(1, 5), help="Trace the best N plans as well.")
@option("--check", group="Answer", is_flag=True, help="Exit with 3 if nothing fits.")
def recommend(**given: Any) -> Reply:
    """Recommend what to run on a device.

    What you set stays as it is; the rest is searched: method, checkpointing, loss, optimizer, and what the objective
    raises. Candidates are ruled out by their requests alone, what may fit is replayed, and the best of each method is
    shown with its reason. Needs no GPU and no torch (except --verify).
    """
    from foretune import api
    from foretune.cli.request import chosen_device, single_request

    _require_one_question(given)
    require_files(given, "plot")
    device, stack = chosen_device(given), api.find_stack(given["stack"])
    loaded, shape = single_request(given, several="--config: one file is recommended for at a time.")
    asked = _Asked(loaded, shape, device, stack)
    if given["devices"]:
        return _carriers(asked, given)
    return _boundary(asked, given) if given["limit"] else _plans(asked, given)


def _require_one_question(given: dict[str, Any]) -> None:
    questions = {"--objective": "objective", "--max": "limit", "--devices": "devices"}
    asked = [flag for flag, name in questions.items() if given[name]]
    about_plans = [flag for flag, name in (("--verify", "verify"), ("--plot", "plot")) if given[name]]
    if len(asked) > 1 or (asked and about_plans and not given["objective"]):
        flags = " and ".join([*asked, *about_plans])
        raise ConfigError(f"{flags} ask for different things.", hint="Give one of them.")
    if given["devices"] and any(given[flag] for flag in ("gpu", "vram", "detect", "free")):
        raise ConfigError("--devices all looks at every card, and one is named.", hint="Leave the card out.")


def fixed_settings(loaded: "LoadedConfig", given: dict[str, Any]) -> frozenset[str]:
    """Return what somebody has set: dotted paths, and `method` where a flag or a file says it."""
    fixed = {path for path, origin in loaded.origins.items() if origin.source in ("file", "command line")}
    return frozenset(fixed | {"method"}) if given["method"] or given["configs"] else frozenset(fixed)


class _Asked(NamedTuple):
    """What the flags ask about."""

    loaded: "LoadedConfig"
    shape: "ModelShape"
    device: "DeviceSpec | None"
    stack: "StackProfile"


def _plans(asked: _Asked, given: dict[str, Any]) -> Reply:
    from foretune import api
    from foretune.cli.plans import draw_recommendation

    loaded, shape, device, stack = asked

    fixed = fixed_settings(loaded, given)
    objective: Any = given["objective"] or OBJECTIVES[0]
    answer = api.recommend(
        loaded.config,
        device=device,
        objective=objective,
        fixed=fixed,
        stack=stack,
        shape=shape,
    )
    if given["plot"]:
        _draw_frontier(asked, fixed, given)
    verified: tuple[api.VerifiedPlan, ...] = ()
    if given["verify"]:
        verified = api.verify(answer, given["verify"], device=device, offline=given["offline"], stack=stack)

    def document() -> dict[str, Any]:
        return {
            "model": shape.id,
            "device": None if device is None else device.to_dict(),
            **answer.to_dict(),
            "verified": [each.to_dict() for each in verified],
            "fixed": sorted(fixed),
            "plot_file": given["plot"],
        }

    return Reply(
        "recommend",
        document,
        lambda terminal: draw_recommendation(answer, verified, shape, device, given, terminal),
        ANSWER_IS_NO if given["check"] and not answer.plans else 0,
        (f"Written: {escape(given['plot'])}",) if given["plot"] else (),
    )


def _draw_frontier(asked: _Asked, fixed: frozenset[str], given: dict[str, Any]) -> None:
    from foretune import api
    from foretune.cli.files import write_new
    from foretune.cli.frontier_plot import draw_frontier

    assert asked.device is not None
    found = api.frontier(asked.loaded.config, device=asked.device, fixed=fixed, stack=asked.stack, shape=asked.shape)
    write_new(given["plot"], [draw_frontier(found, asked.shape, asked.device, asked.stack.name)])


def _boundary(asked: _Asked, given: dict[str, Any]) -> Reply:
    from foretune import api
    from foretune.cli.plans import draw_boundary

    loaded, shape, device, stack = asked

    if device is None:
        hint = "Add --gpu NAME, --vram GIB or --detect."
        raise ConfigError("--max asks how far it fits, but on no device.", hint=hint)
    answer = api.boundary(loaded.config, given["limit"], device=device, stack=stack, shape=shape)

    def document() -> dict[str, Any]:
        return {"model": shape.id, "device": device.to_dict(), **answer.to_dict(), "config": loaded.config.to_dict()}

    return Reply(
        "boundary",
        document,
        lambda terminal: draw_boundary(answer, loaded.config, device, terminal),
        ANSWER_IS_NO if given["check"] and answer.value is None else 0,
    )


def _carriers(asked: _Asked, given: dict[str, Any]) -> Reply:
    from foretune import api
    from foretune.cli.plans import draw_carriers

    loaded, shape, _, stack = asked

    fixed = fixed_settings(loaded, given)
    answer = api.carriers(loaded.config, fixed=fixed, stack=stack, shape=shape)

    return Reply(
        "carriers",
        lambda: {"model": shape.id, **answer.to_dict(), "fixed": sorted(fixed)},
        lambda terminal: draw_carriers(answer, shape, loaded.config, terminal),
        ANSWER_IS_NO if given["check"] and not answer.carriers else 0,
    )
