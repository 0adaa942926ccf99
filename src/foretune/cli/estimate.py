"""`foretune estimate`: the memory that a fine-tune needs, of what it consists, and whether it fits."""

import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from foretune.cli.commands import Command, Example, option
from foretune.cli.files import require_files, write_new
from foretune.cli.options import plot_option, request_options
from foretune.cli.output import Reply
from foretune.cli.terminal import Terminal, escape
from foretune.errors import ConfigError, ForetuneError

if TYPE_CHECKING:
    from foretune.api import EstimateAnswer, ImportedConfig, Lengths, LengthsAnswer, ModelShape, StackProfile
    from foretune.contract import LoadedConfig, TrainingConfig
    from foretune.devices import DeviceSpec

__all__ = ["Request", "answered", "estimate", "exit_code_for", "reply_with"]

ANSWER_IS_NO = 3


class Request(NamedTuple):
    """What the flags ask for, of one configuration."""

    file: str | None
    loaded: "LoadedConfig"
    shape: "ModelShape"
    device: "DeviceSpec | None"
    stack: "StackProfile"
    imported: "ImportedConfig | None" = None
    """The foreign file that it comes from."""


Answering = Callable[[Request, dict[str, Any]], Reply]

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
        "Where do the numbers come from, and when in the step?",
        "foretune estimate --model gpt2 --vram 8 --explain --plot step.svg",
    ),
]


@click.command(cls=Command, name="estimate", examples=EXAMPLES)
@request_options
@option(
    "--lengths",
    group="Files",
    metavar="FILE",
    type=click.Path(),
    help="Plan from data: need and verdict at the p50, p95 and longest row, padded and packed. Each line is a number "
    'of tokens, {"length": N} or {"length": N, "count": K}; or the file is one object {"LENGTH": COUNT}.',
)
@option(
    "--data",
    group="Files",
    metavar="FILE",
    type=click.Path(),
    help="The same from rows: a JSONL file as `data check` takes it, by the model's own tokenizer.",
)
@plot_option
@option(
    "--import",
    "foreign_file",
    group="Files",
    metavar="FILE",
    type=click.Path(),
    help="Price a configuration of axolotl, LLaMA-Factory, TRL or canifinetune as that tool runs it; the stack is its "
    "own unless --stack is given.",
)
@option(
    "--without", group="Files", metavar="KEY", multiple=True, help="With --import: leave a key of it out; repeatable."
)
def estimate(**given: Any) -> Reply | Iterator[Reply | ForetuneError]:
    """Estimate the memory that a fine-tune needs, and whether it fits.

    Needs no GPU, no torch and no weights. The hub is asked only for the config.json of a model that the catalogue
    does not have, and never with --offline. Without --gpu, --vram or --detect the need is given without a verdict.
    """
    require_files(given, "plot")
    if given["lengths"] is not None and given["data"] is not None:
        raise ConfigError("--lengths and --data both say how long rows are.", hint="Give one of them.")
    lengths = cache(_read_lengths)
    imported = _imported(given)
    return answered(given, lambda request, given: _reply(request, given, lengths), imported)


def answered(
    given: dict[str, Any], reply_to: Answering, imported: "ImportedConfig | None" = None
) -> Reply | Iterator[Reply | ForetuneError]:
    """Answer the request of a command's flags: one reply, or for several files one each."""
    replies = _replies(given, reply_to, imported)
    if len(given["configs"]) > 1:
        return replies
    reply = next(replies)
    if isinstance(reply, ForetuneError):
        raise reply
    return reply


def _imported(given: dict[str, Any]) -> "ImportedConfig | None":
    """Read the file of --import, where one is given."""
    from foretune import api
    from foretune.cli.request import overrides_of

    if given["foreign_file"] is None:
        if given["without"]:
            raise ConfigError("--without leaves out a key of a foreign file.", hint="Add --import FILE.")
        return None
    if given["configs"]:
        raise ConfigError("--import and --config both name a file.", hint="Give one of them.")
    return api.import_config(given["foreign_file"], overrides=overrides_of(given), without=given["without"])


def _requested(
    given: dict[str, Any], imported: "ImportedConfig | None"
) -> "tuple[StackProfile, list[tuple[str | None, LoadedConfig | ConfigError]]]":
    """Return the stack and what is asked; a foreign file is priced on its tool's own stack unless one is named."""
    from foretune import api
    from foretune.cli.request import overrides_of, requested_configs

    if imported is None:
        return api.find_stack(given["stack"]), list(requested_configs(given))
    is_named = click.get_current_context().get_parameter_source("stack") is not click.core.ParameterSource.DEFAULT
    stack = api.find_stack(given["stack"]) if is_named else imported.stack
    loaded = api.build_imported(imported, "estimate", overrides=overrides_of(given), method=given["method"])
    return stack, [(imported.file, loaded)]


def _replies(
    given: dict[str, Any], reply_to: Answering, imported: "ImportedConfig | None"
) -> Iterator[Reply | ForetuneError]:
    from foretune import api
    from foretune.cli.request import chosen_device, chosen_host, with_default_attention

    stack, requested = _requested(given, imported)
    on_host = {loaded.config.device == "cpu" for _, loaded in requested if not isinstance(loaded, ForetuneError)}
    device = chosen_device(given) if on_host != {True} else None
    host = chosen_host(given) if True in on_host else None
    if given["accept"] and not given["check"]:
        raise ConfigError("--accept says what --check accepts.", hint="Add --check.")
    if given["check"] and device is None and host is None:
        hint = "Add --gpu NAME, --vram GIB or --detect."
        raise ConfigError("--check asks whether it fits, but on no device.", hint=hint)
    for file, loaded in requested:
        if isinstance(loaded, ForetuneError):
            yield loaded
            continue
        try:
            source = loaded.config.model
            shape = api.resolve_model(source.id, revision=source.revision, offline=given["offline"])
            loaded = with_default_attention(loaded, shape, has_file=bool(given["configs"]))
            chosen = host if loaded.config.device == "cpu" else device
            yield reply_to(Request(file, loaded, shape, chosen, stack, imported), given)
        except ForetuneError as error:
            yield _located(error, loaded)


def _read_lengths(file: str) -> "Lengths":
    from foretune import api

    return api.read_lengths(file)


def _encoded_lengths(config: "TrainingConfig", file: str, *, offline: bool) -> "Lengths":
    """Encode a file of rows for their lengths."""
    from foretune import api
    from foretune.cli.progress import watched

    asked = config.with_(data=config.data.with_(train=os.path.abspath(file)))  # noqa: PTH100 - as in the contract
    found: Lengths = watched(api.prepare_data(asked, offline=offline)).lengths
    return found


def _reply(request: Request, given: dict[str, Any], read: "Callable[[str], Lengths]") -> Reply:
    from foretune import api

    config, plot, file = request.loaded.config, given["plot"], given["lengths"] or given["data"]
    lengths = None
    if given["data"] is not None:
        lengths = _encoded_lengths(config, file, offline=given["offline"])
    elif file is not None:
        lengths = read(file)
    answer = api.estimate(config, device=request.device, stack=request.stack, shape=request.shape)
    by_length = None
    if lengths is not None:
        by_length = api.estimate_lengths(
            config, lengths, device=request.device, stack=request.stack, shape=request.shape
        )
    if plot is not None:
        from foretune.cli.plot import draw_plot

        timeline = api.estimate_timeline(config, device=request.device, stack=request.stack, shape=request.shape)
        write_new(plot, [draw_plot(answer, timeline)])
    reply = reply_with(
        "estimate",
        answer,
        request,
        given,
        lambda: {
            "lengths": None if by_length is None else {"file": file, **by_length.to_dict()},
            "plot_file": plot,
            **({} if request.imported is None else {"imported": _import_document(request.imported)}),
        },
        lambda terminal: (*_by_length(by_length, file, terminal), *_import_lines(request, terminal)),
    )
    return reply._replace(notes=() if plot is None else (f"Written: {escape(plot)}",))


def _import_document(imported: "ImportedConfig") -> dict[str, Any]:
    """Return what an estimate says of the foreign file; `config import` says the rest."""
    told = imported.to_dict()
    return {key: told[key] for key in ("file", "tool", "title", "stack_notes", "notes", "priced", "decisions")}


def _import_lines(request: Request, terminal: Terminal) -> Iterable[str]:
    if request.imported is None:
        return ()
    from foretune.cli.config_import import draw_priced

    return draw_priced(request.imported, request.stack, terminal)


def _by_length(by_length: "LengthsAnswer | None", file: str, terminal: Terminal) -> Iterable[str]:
    if by_length is None:
        return ()
    from foretune.cli.lengths import draw_lengths

    return draw_lengths(by_length, file, terminal)


def reply_with(
    schema: str,
    answer: "EstimateAnswer",
    request: Request,
    given: dict[str, Any],
    more: Callable[[], dict[str, Any]] = dict,
    draw_more: Callable[[Terminal], Iterable[str]] = lambda _: (),
) -> Reply:
    """Return an answer in both forms; `more` and `draw_more` are added to the document and to the text."""
    from foretune.cli.drawing import draw_estimate

    def draw(terminal: Terminal) -> Iterator[str]:
        origins, notes = request.loaded.origins, request.shape.notes
        yield from draw_estimate(answer, origins, terminal, title=request.file, notes=notes, explain=given["explain"])
        yield from draw_more(terminal)

    return Reply(
        schema,
        lambda: {**estimate_document(answer, request.loaded), **more(), "config_file": request.file},
        draw,
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
