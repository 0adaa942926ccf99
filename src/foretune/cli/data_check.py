"""`foretune data check`: what a file of rows holds, and which of its tokens a model would learn from."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from foretune.cli.commands import Command, Example, Whole, completes, option
from foretune.cli.files import require_svg, write_new
from foretune.cli.options import model_ids
from foretune.cli.output import Reply
from foretune.cli.progress import watched
from foretune.cli.terminal import Terminal, escape, wrapped
from foretune.errors import ConfigError

if TYPE_CHECKING:
    from foretune.api import DataAnswer, RowPreview
    from foretune.contract import LoadedConfig

__all__ = ["check_command"]

MAX_RUN = 400
"""Characters of a run that a preview shows."""

FLAGS: dict[str, tuple[str, str]] = {
    "model": ("--model", "model.id"),
    "revision": ("--revision", "model.revision"),
    "file": ("FILE", "data.train"),
    "supervision": ("--supervision", "data.supervision"),
    "spans": ("--spans", "data.spans"),
    "truncation": ("--truncation", "data.truncation"),
    "template_date": ("--template-date", "data.template_date"),
    "seq_len": ("--seq-len", "batch.sequence_length"),
    "micro_batch": ("--micro-batch", "batch.micro_batch_size"),
    "allow_template_rewrite": ("--allow-template-rewrite", "data.allow_template_rewrite"),
}
"""Flags that are short for a field: parameter, flag, dotted path."""
NUMBERS = ("seq_len", "micro_batch")

STRADDLED = (
    "of which a token at the beginning or end of an answer is not learnt, since it stands for a character of the "
    "prompt too (often the space that the template puts before an answer)."
)


@click.command(
    cls=Command,
    name="check",
    examples=[
        Example("What would be learnt from these rows?", "foretune data check rows.jsonl --model ./model"),
        Example(
            "What from the answers alone?",
            "foretune data check rows.jsonl --model ./model --supervision assistant_only",
        ),
        Example(
            "Ids and labels of every row, for a script",
            "foretune data check rows.jsonl --model ./model --json --rows",
        ),
    ],
)
@click.argument("file", required=False, type=click.Path(readable=False), metavar="[FILE]")
@option(
    "--model",
    group="Model",
    metavar="ID|PATH",
    shell_complete=completes(model_ids),
    help="Whose tokenizer: catalogue or hub id, or a folder with tokenizer.json.",
)
@option("--revision", group="Model", metavar="REV", help="Branch, tag or commit of the hub.")
@option("--offline", group="Model", is_flag=True, help="Never ask the hub; paths and cache only.")
@option(
    "--chat-template",
    group="Model",
    metavar="FILE",
    type=click.Path(),
    help="Try another chat template than the tokenizer's own.",
)
@option(
    "--supervision",
    group="Labels",
    metavar="NAME",
    shell_complete=completes(lambda: ("all_tokens", "assistant_only")),
    help="Which tokens carry loss: all_tokens or assistant_only.  [default: all_tokens]",
)
@option(
    "--spans",
    group="Labels",
    metavar="NAME",
    shell_complete=completes(lambda: ("verified", "template")),
    help="How assistant_only finds answers: verified, or template (its generation tags).  [default: verified]",
)
@option(
    "--allow-template-rewrite",
    group="Labels",
    is_flag=True,
    default=None,
    help="Accept and count rows of which the template changes or drops a turn.",
)
@option(
    "--template-date",
    group="Labels",
    metavar="DAY",
    help="The day a template is told that asks, as 2026-01-31.  [default: today]",
)
@option("--seq-len", group="Length", metavar="N", help="Longest row in tokens.  [default: with --config its own]")
@option(
    "--truncation",
    group="Length",
    metavar="NAME",
    shell_complete=completes(lambda: ("error", "right")),
    help="Longer rows: error, or cut them on the right.  [default: error]",
)
@option("--micro-batch", group="Length", metavar="N", help="Rows padded to one length.  [default: 1]")
@option(
    "--config",
    group="Configuration",
    metavar="FILE",
    type=click.Path(),
    help="A YAML or JSON file; flags beat it, and FILE its data.train.",
)
@option("--set", "settings", group="Configuration", metavar="KEY=VALUE", multiple=True, help="Any field; repeatable.")
@option("--rows", group="Answer", is_flag=True, help="Show every row: text, and with --json ids, labels and pieces.")
@option(
    "--preview",
    group="Answer",
    type=Whole(0, 1000),
    default=2,
    metavar="N",
    help="Show so many rows, and what of them carries loss.  [default: 2]",
)
@option(
    "--plot",
    group="Answer",
    metavar="FILE.svg",
    type=click.Path(),
    help="Draw how long rows are. The file may not exist yet.",
)
@option(
    "--workers",
    group="Work",
    type=Whole(1, 256),
    metavar="N",
    help="Encode in so many processes.  [default: one a core, at most 4]",
)
@option("--no-cache", group="Work", is_flag=True, help="Neither use nor keep encoded rows.")
def check_command(**given: Any) -> Reply:
    """Check the rows of a JSONL file: every line, its tokens, and which of them carry loss.

    Any row that cannot be trained as it stands stops with its line and the reason; none is dropped, and no torch is
    needed. Without --config and --seq-len rows may have any length.
    """
    from foretune import api

    if given["plot"] is not None:
        require_svg(given["plot"])
    loaded = _configuration(given)
    has_limit = given["config"] is not None or loaded.origins["batch.sequence_length"].source != "default"
    answer = watched(
        api.check_data(
            loaded.config,
            chat_template=None if given["chat_template"] is None else _read_template(given["chat_template"]),
            limit=loaded.config.batch.sequence_length if has_limit else None,
            num_rows=None if given["rows"] else given["preview"],
            offline=given["offline"],
            workers=given["workers"],
            use_cache=not given["no_cache"],
        )
    )
    if given["plot"] is not None:
        from foretune.cli.data_plot import draw_lengths_plot

        write_new(given["plot"], [draw_lengths_plot(answer)])
    return Reply(
        "data.check",
        lambda: _document(answer, loaded, with_rows=given["rows"]),
        lambda terminal: _draw(answer, terminal),
    )


def _configuration(given: dict[str, Any]) -> "LoadedConfig":
    from foretune.contract import Override, build_config, load_config, parse_override

    overrides: list[str | Override] = []
    for name, (flag, field) in FLAGS.items():
        value = given[name]
        if value is None:
            continue
        overrides.append(
            parse_override(f"{field}={value}", place=flag) if name in NUMBERS else Override(field, value, flag)
        )
    overrides += given["settings"]
    if given["config"] is not None:
        return load_config(given["config"], overrides=overrides)
    if given["model"] is None and not any(str(text).startswith("model.id=") for text in given["settings"]):
        hint = "Write --model ID|PATH (a folder with tokenizer.json is enough), or --config FILE."
        raise ConfigError("No model is named, whose tokenizer would be used.", hint=hint, field="model.id")
    return build_config(overrides=overrides)


def _read_template(file: str) -> str:
    from foretune.data import MAX_TEMPLATE_BYTES

    try:
        with open(file, "rb") as stream:  # noqa: PTH123 - the path may be any text
            data = stream.read(MAX_TEMPLATE_BYTES + 1)
        if len(data) > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"The chat template is larger than {MAX_TEMPLATE_BYTES:,} bytes.", place=file)
        if not data.strip():
            raise ConfigError("The chat template is empty.", hint="Pass a Jinja file.", place=file)
        return data.decode()
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        if isinstance(error, FileNotFoundError):
            raise ConfigError("The file does not exist.", hint="Check the path.", place=file) from error
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"The chat template cannot be read: {reason}.", hint="Pass a Jinja file.", place=file
        ) from error


def _document(answer: "DataAnswer", loaded: "LoadedConfig", *, with_rows: bool) -> dict[str, Any]:
    document = answer.to_dict()
    del document["rows"]
    if with_rows:
        document["rows"] = [
            {
                "line": row.line,
                "text": row.text,
                "ids": row.ids,
                "labels": row.labels,
                "supervised": row.supervised,
            }
            for row in answer.rows
        ]
    return {**document, "config": loaded.config.to_dict()}


# -- text


def _draw(answer: "DataAnswer", terminal: Terminal) -> Iterator[str]:
    stats = answer.stats
    title = f"{escape(answer.file)}, by the tokenizer of {escape(answer.model)}"
    yield from (terminal.paint(line, "bold") for line in wrapped(title, terminal))
    for text in _facts(answer):
        yield from wrapped(text, terminal, indent="  ")
    notices = list(_notices(answer))
    if notices:
        yield ""
        yield terminal.paint("To know", "bold")
        for text in notices:
            yield from wrapped(text, terminal, indent="  ", bullet="- ")
    for row in answer.rows:
        yield ""
        yield from _draw_row(row, terminal)
    yield ""
    yield from wrapped(f"SHA-256 of ids and labels: {stats.sha256}", terminal)
    yield from wrapped(f"SHA-256 of the first epoch's order: {answer.order_sha256}", terminal)


def _facts(answer: "DataAnswer") -> Iterator[str]:
    stats, lengths = answer.stats, answer.stats.lengths
    kinds = f"{_count(stats.num_instruction_rows, 'instruction')}, {_count(stats.num_message_rows, 'conversation')}"
    yield f"{_count(stats.num_rows, 'row')}: {kinds}; {_count(stats.num_blank_lines, 'blank line')}, 0 rows dropped."
    what = "prompts and answers alike" if stats.supervision == "all_tokens" else "the answers alone"
    yield (
        f"{stats.num_tokens:,} tokens. {stats.num_supervised_tokens:,} of them carry loss "
        f"({_percent(stats.supervised_share)}): data.supervision is {stats.supervision}, {what}. "
        f"Answers are {stats.num_answer_tokens:,} tokens."
    )
    cut = ", before truncation" if stats.truncated_rows else ""
    yield (
        f"Tokens a row{cut}: {lengths.shortest:,} to {lengths.longest:,} (line {stats.longest_line:,}), "
        f"{lengths.mean_tokens:,.1f} in the mean; half have at most {lengths.p50:,}, 95 % at most {lengths.p95:,}."
    )
    padding, packing = answer.padding, answer.packing
    yield (
        f"Padded in micro batches of {_count(padding.micro_batch_size, 'row')}: {_percent(padding.real_share)} of the "
        f"tokens are real. Packed to {packing.row_tokens:,} tokens: {_count(packing.num_rows, 'row')}, "
        f"{_percent(packing.real_share)} real."
    )


def _notices(answer: "DataAnswer") -> Iterator[str]:
    stats, limit = answer.stats, answer.sequence_length
    if limit is None:
        yield "No length was asked for: a run stops at rows longer than batch.sequence_length (--seq-len N tries one)."
    if stats.truncated_rows:
        yield (
            f"{_count(stats.truncated_rows, 'row')} cut to {limit:,} tokens; {stats.cut_answers:,} of them lost the "
            "end of their answer, so a model does not learn from them to stop."
        )
    counted = (
        (stats.rewritten_rows, "of which the chat template changes, drops or moves a turn, as was allowed."),
        (
            stats.respaced_rows,
            "of which the chat template changes white space at the ends of a turn or of its thinking.",
        ),
        (
            stats.unclosed_rows,
            "whose last answer the chat template closes with nothing: a model does not learn to stop.",
        ),
        (stats.straddled_rows if stats.supervision == "assistant_only" else 0, STRADDLED),
        (stats.control_text_rows, "whose own text holds what the tokenizer takes for control tokens."),
        (stats.tagged_rows, "whose answers the template's own generation tags mark."),
    )
    for number, what in counted:
        if number:
            yield f"{_count(number, 'row')} {what}"
    if answer.has_chat_template and stats.num_instruction_rows:
        yield (
            f"{_count(stats.num_instruction_rows, 'instruction row')} in foretune's own form (### Instruction: ...), "
            "not in the model's chat template; write messages for that."
        )
    if 0 < stats.rows_with_bos < stats.num_rows:
        yield f"{_count(stats.rows_with_bos, 'row')} of {stats.num_rows:,} begin with BOS."
    if answer.template_date is not None:
        yield f"The chat template is told that today is {answer.template_date} (data.template_date fixes it)."


def _draw_row(row: "RowPreview", terminal: Terminal) -> Iterator[str]:
    num_learnt = sum(label >= 0 for label in row.labels[1:])
    title = f"Line {row.line:,}: {_count(len(row.ids), 'token')}, {num_learnt:,} with loss"
    yield terminal.paint(title, "bold")
    for run in row.runs:
        text, is_learnt = run.text, run.is_supervised
        shown = text if len(text) <= MAX_RUN else f"{text[: MAX_RUN // 2]} … {text[-MAX_RUN // 2 :]}"
        word = "loss  " if is_learnt else "      "
        for number, line in enumerate(wrapped(_written(shown) or " ", terminal, indent="        ")):
            head = f"  {word}" if number == 0 else "        "
            yield head + terminal.paint(line[8:], "green" if is_learnt else "dim")


def _written(text: str) -> str:
    """Write a text as JSON would, so that a line feed and a backslash before an n are told apart."""
    return escape(text.replace("\\", "\\\\"))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
