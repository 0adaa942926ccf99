"""The search: walk what may be too large, replay what may fit, and find the best of each method.

A candidate is first bounded by arithmetic (weights, gradients, states), then walked (requested bytes, without an
allocator), and replayed only where neither rules it out. Both bounds lie below the need, so nothing that fits is lost.
"""

from bisect import bisect_right
from collections import Counter
from typing import NamedTuple

from foretune.contract import Method, TrainingConfig, check_config
from foretune.devices import DeviceSpec
from foretune.errors import ForetuneError
from foretune.memory import MemoryEstimate, Recorded, StackProfile, least_bytes, record_memory
from foretune.models import ModelShape
from foretune.planner.space import Dimension, Row, Space, config_at, every_point, rows_of

__all__ = ["Found", "Search"]

TOO_LARGE = "need more than the budget"
NO_PROGRAM = "cannot be run"
NOT_BETTER = "are no better than a plan that fits"


class Found(NamedTuple):
    """The best of some rows: the candidate and its estimate."""

    method: Method
    row: Row
    place: int
    """Of the value among the space's."""
    config: TrainingConfig
    estimate: MemoryEstimate


class Search:
    """What one search knows: candidates that were walked and replayed, each once."""

    def __init__(
        self,
        config: TrainingConfig,
        shape: ModelShape,
        device: DeviceSpec | None,
        space: Space,
        dimension: Dimension | None,
        stack: StackProfile,
        *,
        budget: int | None,
        is_dtype_fixed: bool,
    ) -> None:
        self.config, self.shape, self.device, self.space = config, shape, device, space
        self.dimension, self.stack, self.budget, self.is_dtype_fixed = dimension, stack, budget, is_dtype_fixed
        self.walked: dict[tuple[Method, Row, int], Recorded] = {}
        self.replayed: dict[tuple[Method, Row, int], MemoryEstimate] = {}
        self.refused: dict[tuple[Method, Row], ForetuneError] = {}

    @property
    def num_values(self) -> int:
        """How many values the objective's setting has."""
        return max(len(self.space.values), 1)

    # -- candidates
    def config_of(self, method: Method, row: Row, index: int) -> TrainingConfig:
        """Write a candidate out; the number format is one that the device has."""
        value = self.space.values[index] if self.space.values else 0
        return config_at(
            self.config,
            method,
            row,
            self.dimension,
            value,
            dtype=self.config.precision.dtype if self.is_dtype_fixed else self._dtype(method),
            attention=self._attention(),
        )

    def _dtype(self, method: Method) -> str:
        if self.device is None or self.device.has_bf16 is not False:
            return "bf16"
        return "fp32" if method == "full" else "fp16"

    def _attention(self) -> str:
        return "eager" if self.shape.refuses_sdpa and self.config.attention == "sdpa" else self.config.attention

    def recorded(self, method: Method, row: Row, index: int) -> Recorded | None:
        """Record a candidate; None where it breaks a rule or has no program (`refused` says which)."""
        if (method, row) in self.refused:
            return None
        key = method, row, index
        if key not in self.walked:
            config = self.config_of(method, row, index)
            try:
                check_config(config)
                self.walked[key] = record_memory(config, self.shape, self.device, stack=self.stack)
            except ForetuneError as error:
                self.refused[method, row] = error
                return None
        return self.walked[key]

    def least_need(self, method: Method, row: Row, index: int) -> int | None:
        """Return what the candidate needs at least; None where it cannot be run."""
        recorded = self.recorded(method, row, index)
        return None if recorded is None else recorded.least_need_bytes

    def known_need(self, method: Method, row: Row, index: int) -> int:
        """Return what is known of a candidate's need without walking it anew: its estimate, or a bound below it."""
        key = method, row, index
        if key in self.replayed:
            return self.replayed[key].need_bytes
        if key in self.walked:
            return self.walked[key].least_need_bytes
        return least_bytes(self.config_of(method, row, index), self.shape)

    def may_fit(self, method: Method, row: Row, index: int) -> bool:
        """Say whether neither bound rules it out."""
        if self.budget is not None:
            if (method, row) in self.refused:
                return False
            if least_bytes(self.config_of(method, row, index), self.shape) > self.budget:
                return False
        need = self.least_need(method, row, index)
        return need is not None and (self.budget is None or need <= self.budget)

    def estimate(self, method: Method, row: Row, index: int) -> MemoryEstimate | None:
        """Replay a candidate; None where it cannot be run."""
        key = method, row, index
        if key not in self.replayed:
            recorded = self.recorded(method, row, index)
            if recorded is None:
                return None
            self.replayed[key] = recorded.estimate()
        return self.replayed[key]

    def fits(self, method: Method, row: Row, index: int) -> bool:
        """Say whether a candidate's need is within the budget."""
        if not self.may_fit(method, row, index):
            return False
        estimate = self.estimate(method, row, index)
        return estimate is not None and (self.budget is None or estimate.need_bytes <= self.budget)

    # -- the best of a method
    def best(self, method: Method, *, rows: list[Row] | None = None) -> Found | None:
        """Return the largest value that fits in any of the rows (all by default), in the plainest row that has it."""
        rows = rows_of(self.space, method) if rows is None else rows
        index = self._highest_bound(method, rows)
        while index >= 0:
            for row in rows:
                if self.fits(method, row, index):
                    return self._found(method, row, index)
            index -= 1
        return None

    def _highest_bound(self, method: Method, rows: list[Row]) -> int:
        """Return the largest value that the bounds leave open in any row; -1 where they leave none.

        The row that departs most mostly needs least, so it is bisected; the others are asked whether they go further.
        """
        highest = -1
        for row in reversed(rows):
            if highest + 1 < self.num_values and self.may_fit(method, row, highest + 1):
                highest = self._bisect(method, row, highest + 1)
        return highest

    def _bisect(self, method: Method, row: Row, low: int) -> int:
        """Return the largest value that may fit, from one that may: more of a setting never requests less.

        Needs grow about in proportion to the setting, so each guess lies on the line through the last two walks.
        """
        high, budget = self.num_values, self.budget or 0
        values = self.space.values or (0,)
        guess = (low + high) // 2
        while high - low > 1:
            guess = min(max(guess, low + 1), high - 1)
            if not self.may_fit(method, row, guess):
                high = guess
                guess = (low + high) // 2 if high - low > 2 else low + 1
                continue
            slope = (self._need(method, row, guess) - self._need(method, row, low)) / (values[guess] - values[low])
            reach = values[guess] + (budget - self._need(method, row, guess)) / max(slope, 1e-9)
            low = guess
            guess = bisect_right(values, reach) - 1 if bisect_right(values, reach) - 1 > low else low + 1
        return low

    def _need(self, method: Method, row: Row, index: int) -> int:
        return self.least_need(method, row, index) or 0

    def smallest(self, method: Method) -> Found | None:
        """Return the method's candidate that needs least at the smallest value, within the budget or not."""
        best: Found | None = None
        rows = [row for row in rows_of(self.space, method) if self.least_need(method, row, 0) is not None]
        for row in sorted(rows, key=lambda row: (self.least_need(method, row, 0), row.cost)):
            if best is not None and (self.least_need(method, row, 0) or 0) >= best.estimate.need_bytes:
                break
            found = self._found(method, row, 0)
            if best is None or found.estimate.need_bytes < best.estimate.need_bytes:
                best = found
        return best

    def _found(self, method: Method, row: Row, index: int) -> Found:
        estimate = self.estimate(method, row, index)
        assert estimate is not None
        return Found(method, row, index, self.config_of(method, row, index), estimate)

    # -- the account
    def account(self) -> dict[str, int]:
        """Count every point of the space by what became of it; points that fit are not in it."""
        counts: Counter[str] = Counter()
        for method, row, index in every_point(self.space):
            counts[self._fate(method, row, index)] += 1
        return dict(counts)

    def _fate(self, method: Method, row: Row, index: int) -> str:
        if (method, row) in self.refused:
            return NO_PROGRAM
        if self.budget is None:
            return NOT_BETTER
        estimate = self.replayed.get((method, row, index))
        if estimate is not None:
            return NOT_BETTER if estimate.need_bytes <= self.budget else TOO_LARGE
        for lower in range(index, -1, -1):  # more of a setting never requests less
            recorded = self.walked.get((method, row, lower))
            if recorded is not None and recorded.least_need_bytes > self.budget:
                return TOO_LARGE
        config = self.config_of(method, row, index)
        return TOO_LARGE if least_bytes(config, self.shape) > self.budget else NOT_BETTER
