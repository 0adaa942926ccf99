"""From an objective to plans: the best of each method, in order, each with its reason; or the nearest misses."""

from collections.abc import Collection, Iterator

from foretune.contract import Method, TrainingConfig
from foretune.devices import DeviceSpec
from foretune.errors import ConfigError, UnsupportedError
from foretune.memory import (
    FORETUNE,
    Fit,
    MemoryEstimate,
    StackProfile,
    assess_fit,
    published_quantized_because,
    sure_budget,
)
from foretune.memory.words import short_line
from foretune.models import ModelShape
from foretune.planner.search import Found, Search
from foretune.planner.space import DIMENSIONS, Objective, Row, Space, every_point, rows_of, space_for
from foretune.texts import escape
from foretune.units import format_bytes
from foretune.values import Value

__all__ = ["Plan", "Recommendation", "Rejected", "recommend_plans"]

NAMES = {
    "batch.sequence_length": ("tokens a row", "rows of {:,} tokens"),
    "batch.micro_batch_size": ("rows in a micro batch", "micro batches of {:,}"),
    "lora.rank": ("rank", "rank {:,}"),
}
DEPARTURES = {
    "loss": ("the loss in chunks", "full logits"),
    "gradient_checkpointing": ("recomputed activations", "kept activations"),
    "optimizer": ("8-bit optimizer states", "32-bit or 16-bit states"),
}
METHODS = {"full": "all weights trained", "lora": "adapters on the 16-bit base", "qlora": "adapters on the 4-bit base"}


class Rejected(Value, frozen=True, kw_only=True):
    """Candidates that became no plan, and why."""

    reason: str
    count: int


class Plan(Value, frozen=True, kw_only=True):
    """A configuration with what it needs, its place and why it has it."""

    rank: int
    """1 for the best."""
    method: Method
    value: int | None
    """Of the setting that the objective raises."""
    config: TrainingConfig
    estimate: MemoryEstimate
    fit: Fit | None
    """None: no device was given. With the nearest changes where it does not fit."""
    why: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<Plan {self.rank}: {escape(self.config.model.id)}, {self.method}, {self._settings()}: {self._need()}>"

    def _repr_html_(self) -> str:
        from foretune.planner.notebook import show_plan

        return show_plan(self)

    def _settings(self) -> str:
        batch = self.config.batch
        return f"{self.config.precision.dtype}, {batch.micro_batch_size:,} x {batch.sequence_length:,} tokens"

    def _need(self) -> str:
        return escape(short_line(self.estimate, self.fit))


class Recommendation(Value, frozen=True, kw_only=True):
    """Plans for an objective, best first; where nothing fits, the nearest misses."""

    objective: Objective
    raises: str | None
    """Dotted path of the setting that the objective raises."""
    space: Space
    budget_bytes: int | None
    plans: tuple[Plan, ...]
    nearest_misses: tuple[Plan, ...] = ()
    """What needs least of each method, where no plan fits."""
    considered: int
    """Points of the space."""
    walked: int
    """Points whose requested bytes were walked; the others follow from them."""
    replayed: int
    rejected: tuple[Rejected, ...]
    refused: tuple[str, ...] = ()
    """Methods that cannot be run at all, with the reason."""

    def __repr__(self) -> str:
        shown = self.plans or self.nearest_misses
        what = "plans" if self.plans else "nearest misses (no plan fits)"
        lines = "".join(f"\n  {plan!r}" for plan in shown)
        return f"<Recommendation for {self.objective}: {len(shown)} {what} of {self.considered:,} candidates{lines}>"

    def _repr_html_(self) -> str:
        from foretune.planner.notebook import show_recommendation

        return show_recommendation(self)


def recommend_plans(
    config: TrainingConfig,
    shape: ModelShape,
    device: DeviceSpec | None,
    objective: Objective,
    *,
    fixed: Collection[str] = (),
    stack: StackProfile = FORETUNE,
) -> Recommendation:
    """Search the space around a configuration for what serves an objective best.

    `fixed` are the dotted paths that somebody has set (and `method`): they keep their value. The first plan has the
    largest value of all candidates that fit (the least need for `least-memory`); among equals it departs least from
    the plain way. Raises ConfigError without a device (except for `least-memory`), UnsupportedError where no method
    can be run.
    """
    _require_answerable(shape, device, objective)
    space = space_for(config, fixed, objective, shape, device)
    budget = None if device is None else sure_budget(device)
    search = Search(
        config,
        shape,
        device,
        space,
        DIMENSIONS.get(objective),
        stack,
        budget=budget,
        is_dtype_fixed="precision.dtype" in fixed,
    )
    return _Planner(search, objective).recommend()


def _require_answerable(shape: ModelShape, device: DeviceSpec | None, objective: Objective) -> None:
    if device is None and objective != "least-memory":
        hint = "Add --gpu NAME, --vram GIB or --detect; without a device --objective least-memory can be answered."
        raise ConfigError(f"{objective} depends on a device, and none is given.", hint=hint)
    because = published_quantized_because(shape)
    if because is not None:
        raise UnsupportedError(because, hint="Choose the unquantized model.")
    if device is not None and device.vendor not in (None, "NVIDIA"):
        raise UnsupportedError(
            f"{device.name} does not run CUDA, on which every plan rests.", hint="Choose an NVIDIA device."
        )
    if device is not None and device.is_unified:
        raise UnsupportedError(
            f"{device.name} shares its memory with the CPU: its size is no budget.", hint="Give --vram and --free."
        )


class _Planner:
    """Turns what a search finds into plans."""

    def __init__(self, search: Search, objective: Objective) -> None:
        self.search, self.objective = search, objective
        self.space, self.dimension = search.space, search.dimension

    def recommend(self) -> Recommendation:
        found = self._found()
        plans = [self._plan(rank, each, found) for rank, each in enumerate(found, start=1)]
        misses = () if plans else tuple(self._misses())
        search = self.search
        errors = {method: error for (method, _), error in search.refused.items()}
        refused = tuple(f"{method}: {error}" for method, error in errors.items() if self._is_refused(method))
        if not plans and not misses:
            raise type(next(iter(errors.values()))).of(
                [problem for error in errors.values() for problem in error.problems[:1]]
            )
        account = search.account()
        if plans:
            account["are no better than a plan that fits"] -= len(plans)
        return Recommendation(
            objective=self.objective,
            raises=self.dimension,
            space=self.space,
            budget_bytes=search.budget,
            plans=tuple(plans),
            nearest_misses=misses,
            considered=sum(1 for _ in every_point(self.space)),
            walked=len(search.walked),
            replayed=len(search.replayed),
            rejected=tuple(Rejected(reason=reason, count=count) for reason, count in sorted(account.items()) if count),
            refused=refused,
        )

    def _is_refused(self, method: Method) -> bool:
        return all((method, row) in self.search.refused for row in rows_of(self.space, method))

    # -- what to show
    def _found(self) -> list[Found]:
        """The best of each method, best first, and the best without recomputing where the first one recomputes."""
        least = self.objective == "least-memory"
        found = [each for method in self.space.methods if (each := self._best(method)) is not None]
        order = {method: place for place, method in enumerate(self.space.methods)}
        if least:
            found.sort(key=lambda each: (each.estimate.need_bytes, order[each.method]))
        elif self.objective != "full-if-it-fits":
            found.sort(key=lambda each: (-each.place, order[each.method]))
        if found and not least and found[0].row.gradient_checkpointing:
            faster = self._faster(found[0])
            found += [faster] if faster is not None else []
        return found

    def _best(self, method: Method) -> Found | None:
        if self.objective != "least-memory":
            return self.search.best(method)
        smallest = self.search.smallest(method) if not self._is_refused(method) else None
        budget = self.search.budget
        is_within = smallest is not None and (budget is None or smallest.estimate.need_bytes <= budget)
        return smallest if is_within else None

    def _faster(self, best: Found) -> Found | None:
        rows = [row for row in rows_of(self.space, best.method) if not row.gradient_checkpointing]
        return self.search.best(best.method, rows=rows) if rows else None

    def _misses(self) -> Iterator[Plan]:
        """What needs least of each method that can be run, with the changes that would help."""
        smallest = [self.search.smallest(method) for method in self.space.methods]
        found = sorted((each for each in smallest if each), key=lambda each: each.estimate.need_bytes)
        for rank, each in enumerate(found, start=1):
            fit = self._fit(each, with_changes=rank == 1)
            why = (f"the least that {METHODS[each.method]} need here",) if each.method != "full" else ()
            yield self._value(rank, each, fit, why or ("the least that training all weights needs here",))

    # -- one plan
    def _plan(self, rank: int, each: Found, found: list[Found]) -> Plan:
        return self._value(rank, each, self._fit(each, with_changes=False), tuple(self._reasons(each, found)))

    def _fit(self, each: Found, *, with_changes: bool) -> Fit | None:
        search = self.search
        if search.device is None:
            return None
        return assess_fit(
            each.estimate, each.config, search.shape, search.device, stack=search.stack, with_changes=with_changes
        )

    def _value(self, rank: int, each: Found, fit: Fit | None, why: tuple[str, ...]) -> Plan:
        return Plan(
            rank=rank,
            method=each.method,
            value=self.space.values[each.place] if self.space.values else None,
            config=each.config,
            estimate=each.estimate,
            fit=fit,
            why=why,
        )

    def _reasons(self, each: Found, found: list[Found]) -> Iterator[str]:
        yield self._value_reason(each, found)
        for departure, (what, plain) in DEPARTURES.items():
            row = each.row.without(departure)
            if row == each.row or row not in rows_of(self.space, each.method):
                continue
            yield f"{what}: {plain} would need {self._needed(each.method, row, each.place)}"

    def _needed(self, method: Method, row: Row, index: int) -> str:
        at_least = "" if (method, row, index) in self.search.replayed else "at least "
        return f"{at_least}{format_bytes(self.search.known_need(method, row, index))}"

    def _value_reason(self, each: Found, found: list[Found]) -> str:
        """Say why this value: what the next one would need, or where the space ends."""
        if self.objective == "least-memory":
            return f"{METHODS[each.method]}: nothing that was considered needs less"
        if self.dimension is None:
            return f"{METHODS[each.method]} fit" if each.method != "full" else "training all weights fits"
        words, sized = NAMES[self.dimension]
        said = f"{METHODS[each.method]}: {sized.format(self.space.values[each.place])}"
        if each.place + 1 == self.search.num_values:
            end = "the model's context" if self.dimension == "batch.sequence_length" else "the most that is tried"
            return f"{said}, {end}"
        following = self.space.values[each.place + 1]
        row = rows_of(self.space, each.method)[-1] if each.row.gradient_checkpointing else each.row
        is_plain = each is not found[0] and not each.row.gradient_checkpointing
        where = " without recomputing" if is_plain else ""
        need = self._needed(each.method, row, each.place + 1)
        return f"{said}, the most {words} that fit{where}; {following:,} would need {need}"
