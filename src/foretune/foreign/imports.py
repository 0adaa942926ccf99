"""From a foreign file to our configuration: recognise, read by the tool's table, and build."""

import os
from collections.abc import Iterable, Sequence
from typing import Literal

from foretune.contract import LoadedConfig, Origin, Override, build_config, parse_override
from foretune.contract.document import plain_node
from foretune.contract.elsewhere import Recognised, rank_tools, recognise
from foretune.contract.fields import Leaf, check_leaf, field_tree, find_field
from foretune.contract.hints import key_hint, nearest
from foretune.contract.scalars import echo
from foretune.errors import ConfigError, Problem, UnsupportedError
from foretune.foreign.axolotl import AXOLOTL
from foretune.foreign.canifinetune import CANIFINETUNE, is_before_04
from foretune.foreign.llama_factory import LLAMA_FACTORY
from foretune.foreign.meanings import base_model
from foretune.foreign.reader import ForeignFile, flatten, read_foreign
from foretune.foreign.reading import Reading, is_within
from foretune.foreign.rules import Tool
from foretune.foreign.trl import TRL
from foretune.foreign.values import Decision, ImportedConfig, Setting

__all__ = ["TOOLS", "build_imported", "import_config"]

TOOLS: dict[str, Tool] = {tool.name: tool for tool in (AXOLOTL, LLAMA_FACTORY, TRL, CANIFINETUNE)}
_CHOSEN_ATTENTION = (
    "Attention is left to Transformers: sdpa, or eager where the model's class has no other; a run here takes sdpa."
)
Purpose = Literal["run", "estimate"]


def import_config(
    file: str | os.PathLike[str],
    *,
    tool: str | None = None,
    overrides: Sequence[str | Override] = (),
    without: Sequence[str] = (),
) -> ImportedConfig:
    """Read a configuration of another tool. Nothing is written, downloaded or changed.

    `overrides` are settings of ours (`precision.dtype=bf16`) that decide, `without` keys of the file that are given
    up. Raises ConfigError for a file that cannot be read or that no tool is recognised by, and for settings that make
    no configuration. What has no counterpart is no error but a decision of the answer.

        imported = import_config("axolotl.yaml")
        [decision.flag for decision in imported.decisions]
    """
    found = read_foreign(file)
    chosen, marks = _choose(found, tool)
    _refuse_old(chosen, found)
    settings = [parse_override(one) if isinstance(one, str) else one for one in overrides]
    _refuse_no_settings(settings)
    given = list(flatten(found.keys, chosen.keys))
    _refuse_absent(without, [key for key, _, _ in given])
    reading = Reading(
        chosen,
        {key: value for key, value, _ in given},
        {key: row for key, _, row in given},
        decided={one.key: one.value for one in settings},
        left_out=frozenset(without),
    )
    reading.read()
    base_model(reading)
    chosen.meaning(reading)
    if "attention" not in reading.settings and not reading.is_decided("attention"):
        reading.notes.append(_CHOSEN_ATTENTION)
    for key, row in reading.rules.items():
        if row is None:
            reading.refuse_unknown(key)
    answer = _answer(found, chosen, marks, reading)
    if answer.decisions:
        return answer
    try:
        return answer.with_(config=build_imported(answer, "run", overrides=settings).config)
    except ConfigError as error:
        return answer.with_(decisions=tuple(_contradiction(one) for one in error.problems))


def _contradiction(problem: Problem) -> Decision:
    """Return what the file asks for and no configuration of ours may hold."""
    flag = "--set KEY=VALUE" if problem.field is None else f"--set {problem.field}=..."
    message = f"{problem.message} {problem.hint or ''}".strip()
    return Decision(keys=(), message=message, flag=flag, field=problem.field, place=problem.place, changes="result")


def _choose(found: ForeignFile, named: str | None) -> tuple[Tool, tuple[str, ...]]:
    if named is not None:
        tool = TOOLS.get(named)
        if tool is None:
            raise ConfigError(
                f"{named!r} is no tool that is read.", hint=f"There are: {', '.join(TOOLS)}.", place="--tool"
            )
        return tool, ()
    by_command = _tool_of_command(found.command)
    if by_command is not None:
        return by_command, (str(found.command),)
    known = recognise(found.keys)
    if known is not None:
        return TOOLS[known.tool], known.keys
    raise _unrecognised(found, rank_tools(found.keys))


def _tool_of_command(command: str | None) -> Tool | None:
    if command is None:
        return None
    if command.startswith("llamafactory-cli"):
        return LLAMA_FACTORY
    return TRL if command.startswith("trl ") or command.endswith(("sft.py", "sft")) else None


def _unrecognised(found: ForeignFile, ranked: list[Recognised]) -> ConfigError:
    names = ", ".join(TOOLS)
    if {"model", "precision"} & set(found.keys):
        message = "this looks like foretune's own configuration, which needs no import."
        return ConfigError(message, hint=f"`foretune config validate {found.name}` checks it.", place=found.name)
    if ranked:
        seen = "; ".join(f"{one.title}: {', '.join(one.keys[:3])}" for one in ranked)
        message = f"whose configuration this is cannot be told ({seen})."
    else:
        message = "no key of it tells whose configuration this is."
    return ConfigError(message, hint=f"Name the tool with --tool: {names}.", place=found.name)


def _refuse_old(tool: Tool, found: ForeignFile) -> None:
    if tool is CANIFINETUNE and is_before_04(found.keys):
        message = "this recipe is of canifinetune before 0.4, whose runs were others than its keys say."
        raise ConfigError(message, hint="Make it again with canifinetune 0.4, then import that.", place=found.name)


def _refuse_no_settings(settings: Iterable[Override]) -> None:
    """Refuse what the user sets where it is no setting, or not a value of it; nothing else would check it yet."""
    problems: list[Problem] = []
    for one in settings:
        part = find_field(one.key)
        if part is None:
            message = f"{echo(one.key)[1:-1]} is no setting."
            problems.append(Problem(message, key_hint(field_tree(), one.key), one.place, one.key))
        elif isinstance(part, Leaf):
            try:
                check_leaf(part, plain_node(one.value, one.place))
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError.of(problems)


def _refuse_absent(without: Iterable[str], keys: Sequence[str]) -> None:
    problems = []
    for key in without:
        if not any(is_within(one, [key]) for one in keys):
            near = nearest(key, tuple(keys))
            hint = f"Did you mean {near}?" if near else "Name a key of the file."
            problems.append(Problem(f"The file has no key {key!r}.", hint, "--without"))
    if problems:
        raise ConfigError.of(problems)


def _answer(found: ForeignFile, tool: Tool, marks: tuple[str, ...], reading: Reading) -> ImportedConfig:
    settings = tuple(_placed(setting, tool, found) for setting in reading.settings.values())
    return ImportedConfig(
        file=found.name,
        tool=tool.name,
        title=f"{tool.title} {tool.version}",
        recognised_by=marks,
        entries=reading.entries(),
        decisions=tuple(reading.decisions),
        settings=settings,
        priced=tuple(reading.priced.values()),
        stack=reading.stack,
        stack_notes=tuple(reading.stack_notes),
        notes=tuple(reading.notes),
    )


def _placed(setting: Setting, tool: Tool, found: ForeignFile) -> Setting:
    """Return paths as the tool finds them: relative to the shell, or to the file."""
    is_path = setting.field in ("data.train", "evaluation.data", "output")
    if tool.paths == "file" and is_path and isinstance(setting.value, str):
        return setting.with_(value=os.path.join(found.folder, setting.value))  # noqa: PTH118
    return setting


def build_imported(
    imported: ImportedConfig,
    purpose: Purpose,
    *,
    overrides: Sequence[str | Override] = (),
    method: str | None = None,
) -> LoadedConfig:
    """Build the configuration of a run, or of an estimate, in which only what changes memory needs a decision.

    Raises UnsupportedError with a problem for each decision that is open, and ConfigError as `build_config` does.

        loaded = build_imported(import_config("axolotl.yaml"), "estimate")
        estimate(loaded.config, stack=find_stack("trainer"))
    """
    is_run = purpose == "run"
    open_decisions = imported.decisions if is_run else imported.open_for_estimate
    if open_decisions:
        raise UnsupportedError.of([_problem(imported, one) for one in open_decisions])
    settings = [parse_override(one) if isinstance(one, str) else one for one in overrides]
    decided = {one.key for one in settings}
    chosen = {one.field: one for one in imported.settings}
    if not is_run:
        chosen = {field: one for field, one in chosen.items() if not _matters_to_a_run_alone(field)}
        chosen |= {one.field: one for one in imported.priced}
    ours = [
        Override(
            field, list(one.value) if isinstance(one.value, tuple) else one.value, one.place or _by_default(imported)
        )
        for field, one in chosen.items()
        if not _is_set(field, decided)
    ]
    loaded = build_config(overrides=[*ours, *settings], method=method)
    return LoadedConfig(loaded.config, {path: _origin(one, imported) for path, one in loaded.origins.items()})


def _matters_to_a_run_alone(field: str) -> bool:
    """Whether a setting has no part in an estimate, so that what it needs beside it may be missing."""
    return field.partition(".")[0] in ("data", "evaluation", "checkpoint", "output", "schedule")


def _is_set(field: str, decided: Iterable[str]) -> bool:
    return any(field == one or field.startswith(f"{one}.") or one.startswith(f"{field}.") for one in decided)


def _by_default(imported: ImportedConfig) -> str:
    return f"default of {imported.title}"


def _origin(origin: Origin, imported: ImportedConfig) -> Origin:
    place = origin.place or ""
    if place.startswith(f"{imported.file}:"):
        return Origin("file", place)
    return Origin("default", place) if place == _by_default(imported) else origin


def _problem(imported: ImportedConfig, decision: Decision) -> Problem:
    place = decision.place or imported.file
    is_unknown = any(entry.key in decision.keys for entry in imported.of("unknown"))
    hint = f"Correct the key, or add {decision.flag}." if is_unknown else f"Add {decision.flag}."
    return Problem(decision.message, hint, place, decision.field)
