"""From a file and a command line to a checked configuration, with everything that is wrong reported at once.

The command line beats the file, the file beats the defaults. A file must say `precision.dtype`; without a file the
command line's default is bf16.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from foretune.contract.config import TrainingConfig
from foretune.contract.document import Node, join_path, read_document, read_text, show_path
from foretune.contract.fields import (
    PATH_FIELDS,
    Leaf,
    Section,
    check_leaf,
    describe_type,
    field_tree,
    unreadable_problems,
)
from foretune.contract.overrides import Override, apply_method, apply_overrides
from foretune.contract.paths import resolve_model, resolve_path
from foretune.contract.scalars import echo
from foretune.errors import ConfigError, Problem, UnsupportedError

__all__ = [
    "COMMAND_LINE_DTYPE",
    "LoadedConfig",
    "Origin",
    "build_config",
    "check_config",
    "load_config",
    "parse_config",
]

COMMAND_LINE_DTYPE = "bf16"
MOST_PROBLEMS = 50


class Origin(NamedTuple):
    """Where a value comes from. `place` is `run.yaml:14:3` or the flag; None for a default."""

    source: Literal["default", "file", "command line", "command-line default"]
    place: str | None = None

    def __str__(self) -> str:
        return self.source if self.place is None else f"{self.source} ({self.place})"


class LoadedConfig(NamedTuple):
    """A configuration, and where each of its settings comes from (by dotted path; a None section is one entry)."""

    config: TrainingConfig
    origins: dict[str, Origin]


def load_config(
    path: str | os.PathLike[str], *, overrides: Iterable[str | Override] = (), method: str | None = None
) -> LoadedConfig:
    """Read a YAML or JSON file, lay the command line over it, and check everything.

    Paths in the file are relative to its folder, those of the overrides to the current folder; the configuration
    holds absolute ones. `method` is `--method`: see `apply_method`.
    Raises ConfigError with a problem for each thing that is wrong (UnsupportedError where all of it would make sense).

        load_config("run.yaml", overrides=["batch.micro_batch_size=4"]).config.batch
    """
    file = os.fsdecode(path)
    text = read_text(file)
    if file.lower().endswith(".json"):
        text = text.replace("\t", " ")  # JSON may be indented with tabs, YAML may not; JSON text holds no raw tab
    return parse_config(text, name=show_path(file), folder=os.path.dirname(file), overrides=overrides, method=method)  # noqa: PTH120


def parse_config(
    text: str,
    *,
    name: str = "text",
    folder: str | os.PathLike[str] = ".",
    overrides: Iterable[str | Override] = (),
    method: str | None = None,
) -> LoadedConfig:
    """Do what `load_config` does, with the text of the file given; `folder` is what its paths are relative to.

    parse_config("model: {id: gpt2}\\nprecision: {dtype: bf16}").config
    """
    _refuse_command(text, name)
    _refuse_rows(name)
    root, problems = read_document(text, name)
    if root is not None and isinstance(root.value, dict):
        _refuse_foreign(root.value, name)
    if root is None:
        raise ConfigError("the file is empty.", hint="It needs at least model.id and precision.dtype.", place=name)
    if not isinstance(root.value, dict):
        hint = "The top level is `key: value` lines, such as `model:` and `precision:`."
        message = f"the top level is {echo(root.value)}, not a mapping."
        raise ConfigError.of(_by_line([*problems, Problem(message, hint, root.place)], name))
    if "model_type" in root.value and "model" not in root.value:
        message = "this is a model's config.json (it has model_type), not a training configuration."
        raise ConfigError(
            message, hint="Write its path as model.id, or plan with it: `foretune estimate --model PATH`.", place=name
        )
    return _build(root, os.fspath(folder), name, overrides, method, problems)


def _refuse_command(text: str, name: str) -> None:
    from foretune.contract.elsewhere import is_command

    if is_command(text):
        message = "this is a command that trains by another tool, not a configuration."
        raise ConfigError(message, hint=f"`foretune config import {name}` reads it.", place=name)


def _refuse_rows(name: str) -> None:
    if name.lower().endswith(".jsonl"):
        message = "these are rows to train on (JSONL), not a configuration."
        raise ConfigError(message, hint="Name the file in a configuration, as data.train.", place=name)


def _refuse_foreign(given: Mapping[str, Node], name: str) -> None:
    """Say once what file this is, where it is another tool's, instead of refusing each of its keys."""
    from foretune.contract.elsewhere import recognise

    found = recognise(given)
    if found is None:
        return
    keys = ", ".join(found.keys[:4])
    message = f"this looks like a file of {found.title} (it has {keys}), not a configuration of foretune."
    raise ConfigError(message, hint=f"`foretune config import {name}` reads it.", place=name)


def build_config(
    data: Mapping[str, Any] | None = None, *, overrides: Iterable[str | Override] = (), method: str | None = None
) -> LoadedConfig:
    """Build a configuration without a file, from dotted keys or nested mappings and from `key=value` texts.

    `precision.dtype` is bf16 unless it is given. Paths are relative to the current folder.
    Raises ConfigError as `load_config` does.

    >>> build_config({"model.id": "gpt2"}, overrides=["lora.rank=8"]).config.method
    'lora'
    """
    given = [Override(str(key), value, "command line") for key, value in (data or {}).items()]
    return _build(Node({}, "command line"), "", None, [*given, *overrides], method)


def _build(
    root: Node,
    folder: str,
    file: str | None,
    overrides: Iterable[str | Override],
    method: str | None,
    found: Iterable[Problem] = (),
) -> LoadedConfig:
    from foretune.contract.rules import rule_problems

    walk = _Walk(folder, file)
    walk.refuse(found)
    root, problems = apply_overrides(root, overrides)
    walk.refuse(problems)
    walk.doubtful |= {str(problem.field).partition(".")[0] for problem in problems}
    if method is not None:
        root, problems = apply_method(root, method)
        walk.refuse(problems)
        walk.doubtful |= {"lora", "quantization"} if problems else set()
    config = walk.section(field_tree(), root)
    assert isinstance(config, TrainingConfig)
    places = {name: origin.place for name, origin in walk.origins.items()}
    broken = rule_problems(config, places, walk.doubtful)
    problems = [*walk.problems, *(problem for problem, _ in broken)]
    if not problems:
        return LoadedConfig(config, walk.origins)
    raise _error(_by_line(problems, file), walk.num_unsupported + sum(not_qualified for _, not_qualified in broken))


def _by_line(problems: list[Problem], file: str | None) -> list[Problem]:
    """Sort by line and column of the file; what has none follows, in the order in which it was found."""

    def key(problem: Problem) -> tuple[int, int]:
        place = problem.place or ""
        if file is None or not place.startswith(f"{file}:"):
            return (1 << 62, 0)
        line, _, column = place[len(file) + 1 :].partition(":")
        return (int(line) if line.isdecimal() else 0, int(column) if column.isdecimal() else 0)

    return sorted(problems, key=key)


def _error(problems: list[Problem], unsupported: int) -> Exception:
    kind = UnsupportedError if unsupported == len(problems) else ConfigError
    if len(problems) > MOST_PROBLEMS:
        more = Problem(f"and {len(problems) - MOST_PROBLEMS} more problems.", "Mend these first.")
        problems = [*problems[:MOST_PROBLEMS], more]
    return kind.of(problems)


def _placeholder(part: Leaf | Section) -> Any:
    """Return what stands for a value that is wrong while the rest is checked; no configuration ever holds it."""
    if isinstance(part, Leaf):
        return None if part.is_required else part.default
    if part.is_optional:
        return None
    return part.cls(**{name: _placeholder(inner) for name, inner in part.parts.items()})


class _Walk:
    """Checks a tree against the sections, collecting problems instead of stopping at the first."""

    def __init__(self, folder: str, file: str | None) -> None:
        self.folder = folder
        self.file = file
        self.problems: list[Problem] = []
        self.num_unsupported = 0
        self.origins: dict[str, Origin] = {}
        self.doubtful: set[str] = set()
        """Settings and sections that hold a placeholder, or that a mistaken key may have been meant for."""

    def refuse(self, problems: Iterable[Problem]) -> None:
        """Keep problems; the fields they name hold nothing that a rule may be checked on."""
        for problem in problems:
            self.problems.append(problem)
            if problem.field:
                self.doubtful.add(problem.field)

    def section(self, section: Section, node: Node) -> Any:
        """Return the section's value, with placeholders for what is wrong in it."""
        if not isinstance(node.value, dict):
            self._not_a_section(section, node)
            return _placeholder(section)
        has_unknown = self._refuse_unknown(section, node.value)
        values: dict[str, Any] = {}
        for name, part in section.parts.items():
            child = node.value.get(name)
            if child is None and has_unknown:
                self.doubtful.add(part.path)
            if isinstance(part, Leaf):
                values[name] = self._leaf(part, child, node)
            elif part.is_optional and (child is None or (child.value is None and not child.is_blank)):
                values[name] = None
                self.origins[part.path] = self._origin(child)
            else:
                values[name] = self.section(part, child or Node({}, self.file or "command line"))
        return section.cls(**values)

    def _leaf(self, leaf: Leaf, node: Node | None, outer: Node) -> Any:
        if node is None and leaf.path == "precision.dtype" and self.file is None:
            self.origins[leaf.path] = Origin("command-line default")
            return COMMAND_LINE_DTYPE
        if node is None and leaf.is_required:
            self._missing(leaf, outer)
            return _placeholder(leaf)
        self.origins[leaf.path] = self._origin(node)
        if node is None:
            return leaf.default
        try:
            return self._resolved(leaf, check_leaf(leaf, node), node)
        except ConfigError as error:
            self._bad_value(leaf, node, error)
            return _placeholder(leaf)

    def _bad_value(self, leaf: Leaf, node: Node, error: ConfigError) -> None:
        from foretune.contract.hints import unqualified

        problems = error.problems
        known = unqualified(leaf.path, node.value) if isinstance(node.value, str) else None
        if known is not None:
            problems = (problems[0]._replace(message=known),)
            self.num_unsupported += 1
        self.refuse(problems)

    def _resolved(self, leaf: Leaf, value: Any, node: Node) -> Any:
        folder = self.folder if self._origin(node).source == "file" else ""
        if value is not None and leaf.path in PATH_FIELDS:
            return resolve_path(value, folder)
        return resolve_model(value, folder) if leaf.path == "model.id" else value

    def _origin(self, node: Node | None) -> Origin:
        if node is None:
            return Origin("default")
        is_file = self.file is not None and node.place.startswith(f"{self.file}:")
        return Origin("file" if is_file else "command line", node.place)

    def _missing(self, leaf: Leaf, outer: Node) -> None:
        from foretune.contract.hints import missing_hint

        place = outer.place if self._origin(outer).source == "file" else self.file or "command line"
        message = f"{leaf.path} is missing; it must be {describe_type(leaf.type)}."
        self.refuse([Problem(message, missing_hint(leaf), place, leaf.path)])

    def _not_a_section(self, section: Section, node: Node) -> None:
        from foretune.contract.hints import blank_hint, section_hint

        path = section.path
        if section.is_optional and node.is_blank:
            problem = Problem(f"{path} is blank, which may mean none or the defaults.", blank_hint(path))
        else:
            shown = "blank" if node.is_blank else echo(node.value)
            problem = Problem(f"{path} is {shown}, but it must be a group of settings.", section_hint(path))
        self.refuse([problem._replace(place=node.place, field=path)])
        if isinstance(node.value, list):
            self.refuse(unreadable_problems(node, path))

    def _refuse_unknown(self, section: Section, given: dict[str, Node]) -> bool:
        """Refuse the keys that are no settings. Returns whether there is any, here or among what was no key at all."""
        unknown = [(key, node) for key, node in given.items() if key not in section.parts]
        for index, (key, node) in enumerate(unknown):
            path = join_path(section.path, key)
            hint = None
            if index < MOST_PROBLEMS:
                from foretune.contract.hints import key_hint

                hint = key_hint(section, key)
            self.refuse([Problem(f"{echo(path)[1:-1]} is no setting.", hint, node.place, path)])
            self.refuse(unreadable_problems(node, path))
        return bool(unknown) or any(self._is_unknown(section, path) for path in self.doubtful)

    def _is_unknown(self, section: Section, path: str) -> bool:
        outer, _, name = path.rpartition(".")
        return outer == section.path and name not in section.parts


def check_config(config: TrainingConfig) -> None:
    """Check the rules on a configuration built in code. Raises ConfigError or UnsupportedError."""
    from foretune.contract.rules import rule_problems

    broken = rule_problems(config, {})
    if broken:
        raise _error([problem for problem, _ in broken], sum(not_qualified for _, not_qualified in broken))
