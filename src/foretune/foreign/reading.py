"""A foreign file on its way: its values as the tool reads them, and what has become of each key so far."""

from collections.abc import Collection, Mapping
from typing import Any

from foretune.contract.fields import Leaf, find_field
from foretune.contract.scalars import echo
from foretune.foreign.convert import BadValue, convert, shown
from foretune.foreign.reader import Given
from foretune.foreign.rules import Key, Tool
from foretune.foreign.values import Changes, Decision, Entry, Fate, Setting

__all__ = ["Reading", "is_within"]

_RANK: dict[Fate, int] = {"no effect": 0, "mapped": 1, "decided": 2, "to decide": 3, "refused": 4, "unknown": 5}


_EXAMPLES = {
    "attention": "sdpa",
    "batch.packing": "true",
    "data.supervision": "all_tokens",
    "data.truncation": "right",
    "gradient_checkpointing": "true",
    "lora": "{}",
    "model.id": "ID",
    "lora.targets": "[q_proj,v_proj]",
    "loss": "chunked",
    "optimizer.name": "adamw_8bit",
    "precision.adapter_dtype": "fp32",
    "precision.dtype": "bf16",
    "quantization": "null",
    "quantization.scheme": "nf4",
    "schedule.shape": "cosine",
}
"""A value to show for each field by which a key without counterpart may be decided."""


def is_within(key: str, names: Collection[str]) -> bool:
    """Whether a key is one of these, or stands inside one of them."""
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in names)


_EXCLUDES = {
    "schedule.epochs": "schedule.updates",
    "schedule.updates": "schedule.epochs",
    "evaluation.data": "evaluation.split",
    "evaluation.split": "evaluation.data",
}
"""Fields of which one alone is set: who sets one decides the other."""


class _Account:
    """What has become of a key of the file."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.fate: Fate | None = None
        self.settings: list[Setting] = []
        self.changes: Changes = "nothing"
        self.notes: list[str] = []

    def become(self, fate: Fate, note: str | None = None, changes: Changes = "nothing") -> None:
        """Take a fate, unless a graver one is there."""
        if self.fate is None or _RANK[fate] >= _RANK[self.fate]:
            self.fate = fate
            self.changes = changes
            if note and note not in self.notes:
                self.notes.append(note)

    def entry(self, key: str) -> Entry:
        return Entry(
            key=key,
            value=shown(key, self.given.value),
            place=self.given.place,
            fate=self.fate or "no effect",
            settings=tuple(self.settings),
            changes=self.changes,
            note=" ".join(self.notes) or None,
        )


def _is_off(value: Any, rule: Key) -> bool:
    """Whether a key that would be refused does nothing with this value. (False is not 0.)"""
    return value in (None, "", [], {}) or any(type(value) is type(off) and value == off for off in rule.off)


class Reading:
    """Collects what the keys of one file mean. A tool's `meaning` is given it.

    `decided` are fields that the user sets with their values, `left_out` keys that the user gives up.
    """

    def __init__(
        self,
        tool: Tool,
        given: Mapping[str, Given],
        rules: Mapping[str, Key | None],
        *,
        decided: Mapping[str, Any] | None = None,
        left_out: Collection[str] = (),
    ) -> None:
        self.tool = tool
        self.rules = rules
        """The row of each key of the file; None: the tool has no such key."""
        self.accounts = {key: _Account(one) for key, one in given.items()}
        self.values: dict[str, Any] = {}
        self.defaults: list[Entry] = []
        self.decisions: list[Decision] = []
        self.settings: dict[str, Setting] = {}
        self.priced: dict[str, Setting] = {}
        self.stack = tool.stack
        self.stack_notes = list(tool.stack_notes)
        self.notes: list[str] = []
        self.decided: Mapping[str, Any] = decided or {}
        """What the user sets, by field."""
        self._left_out = left_out

    # -- values
    def read(self) -> None:
        """Convert every value as the tool would, and settle the keys that need no other key."""
        for key, account in self.accounts.items():
            rule = self.rules[key]
            if is_within(key, self._left_out):
                account.become("decided", f"Left out (--without {key}).", "both")
            elif rule is None:
                continue
            elif account.given.value is None and not rule.takes_null:
                account.become("no effect", "Empty: as if it were not there.")
            else:
                self._convert(key, rule, account)
        for key, rule in self._rows():
            if rule.kind == "maps":
                note = rule.about if rule.about and self[key] else None
                self.set(rule.fields[0], self[key], key, note=note)

    def _convert(self, key: str, rule: Key, account: _Account) -> None:
        try:
            value = convert(account.given.value, rule.reads)
        except BadValue as error:
            account.become("refused", None, "both")
            self._decide((key,), f"{key} is {shown(key, account.given.value)}, but it takes {error}.", None, "both")
            return
        self.values[key] = value
        if rule.kind == "ignored":
            account.become("no effect", rule.about)
        elif rule.kind == "blocks":
            if _is_off(value, rule):
                account.become("no effect", "Off.")
            else:
                self.block(key, rule.changes, rule.about, field=rule.fields[0] if rule.fields else None)

    def _rows(self) -> list[tuple[str, Key]]:
        """Return the rows that apply: those of the file, and those of the table whose default counts."""
        found = {key: rule for key, rule in self.rules.items() if rule is not None and key in self.values}
        silent = {
            key: rule for key, rule in self.tool.keys.items() if key not in self.values and rule.default is not None
        }
        return [*found.items(), *silent.items()]

    def has(self, key: str) -> bool:
        """Whether the file gives the key a value."""
        return key in self.values

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key: the file's, else the tool's default."""
        return self.values[key] if key in self.values else self.tool.keys[key].default

    def get(self, key: str) -> Any:
        """Return the value of a key; None where the tool has no such key."""
        return self[key] if key in self.tool.keys else None

    def place(self, *keys: str) -> str | None:
        """Return where the first of these keys that is given stands."""
        return next((self.accounts[key].given.place for key in keys if key in self.accounts), None)

    def matching(self, start: str) -> tuple[str, ...]:
        """Return the keys of the file that begin so."""
        return tuple(key for key in self.accounts if key.startswith(start) and not is_within(key, self._left_out))

    # -- what becomes of them
    def set(self, field: str, value: Any, *keys: str, note: str | None = None) -> None:
        """Map keys to a field. Where none of them is given it is a default of the tool, listed where it is not ours."""
        given = [key for key in keys if key in self.values]
        if self.is_decided(field):
            for key in given:
                self.accounts[key].become("decided", f"You set {field}.")
            return
        setting = Setting(field=field, value=value, place=self.place(*given))
        self.settings[field] = setting
        for key in given:
            self.accounts[key].settings.append(setting)
            self.accounts[key].become("mapped", note)
        if not given and keys and self._differs(field, value):
            shown_default = shown(keys[0], self.tool.keys[keys[0]].default)
            self.defaults.append(
                Entry(key=keys[0], value=shown_default, place=None, fate="mapped", settings=(setting,), note=note)
            )

    def is_decided(self, field: str) -> bool:
        """Whether the user has set a field, what holds it, a part of it, or what excludes it."""
        return any(
            one in (field, _EXCLUDES.get(field)) or one.startswith(f"{field}.") or field.startswith(f"{one}.")
            for one in self.decided
        )

    def _differs(self, field: str, value: Any) -> bool:
        leaf = find_field(field)
        return not isinstance(leaf, Leaf) or leaf.default != value

    def always(self, field: str, value: Any, key: str, shown_default: str) -> None:
        """Map what the tool does where the file is silent, or cannot say otherwise; `key` is shown for it."""
        if self.is_decided(field):
            return
        setting = Setting(field=field, value=value)
        self.settings[field] = setting
        if self._differs(field, value):
            self.defaults.append(Entry(key=key, value=shown_default, place=None, fate="mapped", settings=(setting,)))

    def price(self, field: str, value: Any) -> None:
        """Take another value in an estimate: the tool's own program."""
        if not self.is_decided(field):
            self.priced[field] = Setting(field=field, value=value)

    def mean(self, what: str, *keys: str) -> None:
        """Say what keys mean that decide whether a whole section is there."""
        for key in keys:
            if key in self.values:
                self.accounts[key].become("mapped", what)

    def remark(self, note: str, *keys: str) -> None:
        """Say something of keys, whatever becomes of them."""
        for key in keys:
            if key in self.values and note not in self.accounts[key].notes:
                self.accounts[key].notes.append(note)

    def leave(self, note: str, *keys: str) -> None:
        """Say that keys change nothing here."""
        for key in keys:
            if key in self.values:
                self.accounts[key].become("no effect", note)

    def block(self, key: str, changes: Changes, why: str, *, field: str | None = None) -> None:
        """Refuse a key that has no counterpart and matters, unless the user has decided."""
        account = self.accounts[key]
        if field is not None and self.is_decided(field):
            account.become("decided", f"You set {field}.", changes)
            return
        account.become("refused", why, changes)
        self._decide((key,), f"{key} is {shown(key, account.given.value)}. {why}", field, changes)

    def decide(
        self, field: str, message: str, example: str, *keys: str, changes: Changes = "result", note: str | None = None
    ) -> None:
        """Ask for a setting, unless the user has given it. `example` is a value to show."""
        given = [key for key in keys if key in self.values]
        is_decided = self.is_decided(field)
        for key in given:
            self.accounts[key].become("decided" if is_decided else "to decide", note, changes)
        if not is_decided:
            flag = f"--set {field}={example}"
            self.decisions.append(
                Decision(
                    keys=tuple(given),
                    message=message,
                    flag=flag,
                    field=field,
                    place=self.place(*given),
                    changes=changes,
                )
            )

    def _decide(self, keys: tuple[str, ...], message: str, field: str | None, changes: Changes) -> None:
        flag = f"--without {keys[0]}" if field is None else f"--set {field}={_EXAMPLES[field]}"
        self.decisions.append(
            Decision(keys=keys, message=message, flag=flag, field=field, place=self.place(*keys), changes=changes)
        )

    def refuse_unknown(self, key: str) -> None:
        """Refuse a key that the tool does not have, with the nearest that it has."""
        from foretune.contract.hints import nearest

        account = self.accounts[key]
        if account.fate is not None:
            return
        meant = tuple(name for name, row in self.tool.keys.items() if row.kind in ("maps", "part"))
        near = nearest(key, meant) or nearest(key, tuple(self.tool.keys))
        hint = f" Did you mean {near}?" if near else ""
        why = f"{self.tool.title} {self.tool.version} has no such key.{hint}"
        account.become("unknown", why, "both")
        self._decide((key,), f"{echo(key)[1:-1]}: {why}", None, "both")

    def entries(self) -> tuple[Entry, ...]:
        """Return the account of every key, in the order of the file, then the tool's defaults."""
        for account in self.accounts.values():
            if account.fate is None:
                account.become("no effect", "Nothing reads it here.")
        return (*(account.entry(key) for key, account in self.accounts.items()), *self.defaults)
