"""From a file and a command line to a checked configuration, with everything that is wrong reported at once.

The command line beats the file, the file beats the defaults. A file must say `precision.dtype`; without a file the
command line's default is bf16.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from foretune.contract.config import TrainingConfig
from foretune.contract.document import Node, read_document, read_text, show_path
from foretune.contract.fields import PATH_FIELDS, Leaf, Section, check_leaf, describe_type, field_tree
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
    """Do what `load_config` does, with the text of the file given; `folder` is what its paths are relative to."""
    root = read_document(text, name)
    if root is None:
        raise ConfigError("the file is empty.", hint="It needs at least model.id and precision.dtype.", place=name)
    if not isinstance(root.value, dict):
        hint = "The top level is `key: value` lines, such as `model:` and `precision:`."
        raise ConfigError(f"the top level is {echo(root.value)}, not a mapping.", hint=hint, place=root.place)
    if "model_type" in root.value and "model" not in root.value:
        message = "this is a model's config.json (it has model_type), not a training configuration."
        raise ConfigError(message, hint=f"Pass it as --model {name}, or write its path as model.id.", place=name)
    return _build(root, os.fspath(folder), name, overrides, method)


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
    root: Node, folder: str, file: str | None, overrides: Iterable[str | Override], method: str | None
) -> LoadedConfig:
    from foretune.contract.rules import rule_problems

    root, problems = apply_overrides(root, overrides)
    if method is not None:
        root, method_problems = apply_method(root, method)
        problems += method_problems
    walk = _Walk(folder, file)
    config = walk.section(field_tree(), root)
    problems += walk.problems
    unsupported = walk.num_unsupported
    if config is not None and not problems:
        assert isinstance(config, TrainingConfig)
        broken = rule_problems(config, {name: origin.place for name, origin in walk.origins.items()})
        problems, unsupported = [problem for problem, _ in broken], sum(not_qualified for _, not_qualified in broken)
        if not problems:
            return LoadedConfig(config, walk.origins)
    raise _error(problems, unsupported)


def _error(problems: list[Problem], unsupported: int) -> Exception:
    kind = UnsupportedError if unsupported == len(problems) else ConfigError
    if len(problems) > MOST_PROBLEMS:
        more = Problem(f"and {len(problems) - MOST_PROBLEMS} more problems.")
        problems = [*problems[:MOST_PROBLEMS], more]
    return kind.of(problems)


class _Walk:
    """Checks a tree against the sections, collecting problems instead of stopping at the first."""

    def __init__(self, folder: str, file: str | None) -> None:
        self.folder = folder
        self.file = file
        self.problems: list[Problem] = []
        self.num_unsupported = 0
        self.origins: dict[str, Origin] = {}

    def section(self, section: Section, node: Node) -> Any:
        """Return the section's value, or None where something in it is wrong."""
        if not isinstance(node.value, dict):
            self._not_a_section(section, node)
            return None
        before = len(self.problems)
        self._refuse_unknown(section, node.value)
        values: dict[str, Any] = {}
        for name, part in section.parts.items():
            child = node.value.get(name)
            if isinstance(part, Leaf):
                self._leaf(part, child, values, name)
            elif part.is_optional and (child is None or child.value is None):
                values[name] = None
                self.origins[part.path] = self._origin(child)
            else:
                values[name] = self.section(part, child or Node({}, node.place))
        return section.cls(**values) if len(self.problems) == before else None

    def _leaf(self, leaf: Leaf, node: Node | None, values: dict[str, Any], name: str) -> None:
        if node is None and leaf.path == "precision.dtype" and self.file is None:
            values[name] = COMMAND_LINE_DTYPE
            self.origins[leaf.path] = Origin("command-line default")
        elif node is None and leaf.is_required:
            self._missing(leaf)
        elif node is None:
            values[name] = leaf.default
            self.origins[leaf.path] = Origin("default")
        else:
            self.origins[leaf.path] = self._origin(node)
            try:
                values[name] = self._resolved(leaf, check_leaf(leaf, node.plain()), node)
            except ConfigError as error:
                self._bad_value(leaf, node, error)

    def _bad_value(self, leaf: Leaf, node: Node, error: ConfigError) -> None:
        from foretune.contract.hints import unqualified

        problem = error.problems[0]._replace(place=node.place)
        known = unqualified(leaf.path, node.value) if isinstance(node.value, str) else None
        if known is not None:
            problem = problem._replace(message=known)
            self.num_unsupported += 1
        self.problems.append(problem)

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

    def _missing(self, leaf: Leaf) -> None:
        message = f"{leaf.path} is missing; it must be {describe_type(leaf.type)}."
        hint = "The format is never inferred: say it." if leaf.path == "precision.dtype" else None
        self.problems.append(Problem(message, hint, self.file or "command line", leaf.path))

    def _not_a_section(self, section: Section, node: Node) -> None:
        from foretune.contract.hints import section_hint

        message = f"{section.path} is {echo(node.value)}, but it must be a group of settings."
        self.problems.append(Problem(message, section_hint(section.path), node.place, section.path))

    def _refuse_unknown(self, section: Section, given: dict[str, Node]) -> None:
        for key, node in given.items():
            if key in section.parts:
                continue
            path = f"{section.path}.{key}" if section.path else key
            hint = None
            if len(self.problems) < MOST_PROBLEMS:
                from foretune.contract.hints import key_hint

                hint = key_hint(section, key)
            self.problems.append(Problem(f"{echo(path)[1:-1]} is no setting.", hint, node.place, path))


def check_config(config: TrainingConfig) -> None:
    """Check the rules on a configuration built in code. Raises ConfigError or UnsupportedError."""
    from foretune.contract.rules import rule_problems

    broken = rule_problems(config, {})
    if broken:
        raise _error([problem for problem, _ in broken], sum(not_qualified for _, not_qualified in broken))
