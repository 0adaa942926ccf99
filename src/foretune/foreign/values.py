"""What an import answers: each key of a foreign file with its fate, what is left to decide, and the result."""

from typing import Any, Literal

from foretune.contract import TrainingConfig
from foretune.memory import StackProfile
from foretune.values import Value

__all__ = ["Changes", "Decision", "Entry", "Fate", "ImportedConfig", "Setting", "ToolName"]

ToolName = Literal["axolotl", "canifinetune", "llama-factory", "trl"]
Fate = Literal["mapped", "no effect", "refused", "to decide", "decided", "unknown"]
Changes = Literal["nothing", "result", "memory", "both"]


class Setting(Value, frozen=True, kw_only=True):
    """One of our fields with the value that it takes, and where that is written."""

    field: str
    value: str | int | float | bool | tuple[str, ...] | None
    place: str | None = None
    """`train.yml:3:1`; None: a default of the tool."""


class Entry(Value, frozen=True, kw_only=True):
    """A key of the file, or a default of the tool that differs from ours."""

    key: str
    value: str
    """As the file writes it, shortened; secrets are not shown."""
    place: str | None
    """`train.yml:3:1`; None: it is not in the file, and this is the tool's default."""
    fate: Fate
    settings: tuple[Setting, ...] = ()
    """What it became. With several keys of one meaning, each names it."""
    changes: Changes = "nothing"
    """What is another without it, where it has no counterpart."""
    note: str | None = None


class Decision(Value, frozen=True, kw_only=True):
    """What only the user can say."""

    keys: tuple[str, ...]
    """Keys of the file that are about it; empty: the file is silent."""
    message: str
    flag: str
    """What to add to the command."""
    field: str | None = None
    """The setting that decides it; None: leaving the key out does."""
    place: str | None = None
    changes: Changes = "both"
    """What depends on it; an estimate asks only for what changes memory."""


class ImportedConfig(Value, frozen=True, kw_only=True):
    """A configuration of another tool in our words."""

    file: str
    tool: ToolName
    title: str
    """The tool and the release whose keys and defaults are known."""
    recognised_by: tuple[str, ...]
    """Keys by which it was told; empty: the tool was named."""
    entries: tuple[Entry, ...]
    decisions: tuple[Decision, ...]
    """Open; empty: a run has everything it needs."""
    settings: tuple[Setting, ...]
    """What maps, as a run here takes it."""
    priced: tuple[Setting, ...]
    """What an estimate takes instead: the tool's own program where foretune's run has none like it."""
    stack: StackProfile
    """What the tool's own run allocates."""
    stack_notes: tuple[str, ...]
    """What that profile does not describe."""
    notes: tuple[str, ...] = ()
    config: TrainingConfig | None = None
    """None: something is open."""

    def of(self, *fates: Fate) -> tuple[Entry, ...]:
        """Return the entries with one of these fates."""
        return tuple(entry for entry in self.entries if entry.fate in fates)

    @property
    def open_for_estimate(self) -> tuple[Decision, ...]:
        """Decisions that change how much memory is needed."""
        return tuple(one for one in self.decisions if one.changes in ("memory", "both"))

    def to_dict(self) -> dict[str, Any]:
        """Return it as `--json` prints it."""
        return {**super().to_dict(), "is_complete": not self.decisions}
