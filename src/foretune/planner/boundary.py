"""The largest value of one setting that still fits, and for how many rows each length fits."""

from collections.abc import Callable

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec
from foretune.errors import ConfigError
from foretune.memory import FORETUNE, MemoryEstimate, Recorded, StackProfile, least_bytes, record_memory, sure_budget
from foretune.models import ModelShape
from foretune.planner.space import LONGEST_UNASKED, Dimension
from foretune.values import Value

__all__ = ["BOUNDARIES", "Boundary", "find_boundary"]

BOUNDARIES: dict[str, Dimension] = {
    "seq-len": "batch.sequence_length",
    "batch": "batch.micro_batch_size",
    "rank": "lora.rank",
}
STEPS = {"batch.sequence_length": 64, "batch.micro_batch_size": 1, "lora.rank": 1}
"""Lengths are multiples of 64, which kernels like; the others are exact."""
MOST_ROWS = 4096


class Boundary(Value, frozen=True, kw_only=True):
    """How far one setting can be raised while everything else stays."""

    setting: str
    """Dotted path."""
    step: int
    value: int | None
    """The largest that fits; None: not even the smallest."""
    estimate: MemoryEstimate | None
    limit: int
    """The largest that was considered: the model's context, 4,096 rows, the hidden width."""
    next_value: int | None
    """The next one; None at the limit."""
    next_need_bytes: int | None
    num_estimates: int


class _Counted:
    """One configuration with a setting at so many steps, each recorded and replayed once."""

    def __init__(
        self, config: TrainingConfig, shape: ModelShape, device: DeviceSpec, setting: Dimension, stack: StackProfile
    ) -> None:
        self.config, self.shape, self.device, self.setting, self.stack = config, shape, device, setting, stack
        self.budget = sure_budget(device)
        self.walked: dict[int, Recorded] = {}
        self.replayed: dict[int, MemoryEstimate] = {}

    def at(self, count: int) -> TrainingConfig:
        """Write the configuration out."""
        section, _, field = self.setting.partition(".")
        value = count * STEPS[self.setting]
        return self.config.with_(**{section: getattr(self.config, section).with_(**{field: value})})

    def least(self, count: int) -> int:
        """Return a bound below the need: by arithmetic where that is too much, else by a walk."""
        if count not in self.walked:
            bound = least_bytes(self.at(count), self.shape)
            if bound > self.budget:
                return bound
            self.walked[count] = record_memory(self.at(count), self.shape, self.device, stack=self.stack)
        return self.walked[count].least_need_bytes

    def estimate(self, count: int) -> MemoryEstimate:
        """Replay."""
        if count not in self.replayed:
            self.replayed[count] = self.walked[count].estimate()
        return self.replayed[count]

    def may_fit(self, count: int) -> bool:
        """Say whether the bounds leave it open."""
        return self.least(count) <= self.budget

    def fits(self, count: int) -> bool:
        """Say whether the need is within the budget."""
        return self.may_fit(count) and self.estimate(count).need_bytes <= self.budget


def find_boundary(
    config: TrainingConfig,
    shape: ModelShape,
    device: DeviceSpec,
    setting: Dimension,
    *,
    stack: StackProfile = FORETUNE,
) -> Boundary:
    """Find the largest value of a setting with which the fine-tune fits; everything else stays as it is.

    What requests rule out is not replayed. Raises as `estimate_memory` does, and ConfigError for a rank without
    adapters.
    """
    if setting == "lora.rank" and config.lora is None:
        raise ConfigError("There is no rank where all weights are trained.", hint="Choose --method lora or qlora.")
    step, limit = STEPS[setting], _limit(setting, shape)
    counted, counts = _Counted(config, shape, device, setting, stack), limit // step
    largest = _last_fitting(_last_true(counts, counted.may_fit), counted.fits)
    following = largest + 1 if largest < counts else None
    needed = None
    if following is not None:
        counted.may_fit(following)
        estimate = counted.replayed.get(following)
        needed = estimate.need_bytes if estimate else counted.least(following)
    return Boundary(
        setting=setting,
        step=step,
        value=largest * step if largest else None,
        estimate=counted.estimate(largest) if largest else None,
        limit=counts * step,
        next_value=following * step if following else None,
        next_need_bytes=needed,
        num_estimates=len(counted.replayed),
    )


def _last_true(counts: int, holds: Callable[[int], bool]) -> int:
    """Return the last of 1 to `counts` that holds, where all before it hold too; 0 for none."""
    low, high = 0, 1
    while high <= counts and holds(high):
        low, high = high, high * 2
    high = min(high, counts + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _last_fitting(bound: int, fits: Callable[[int], bool]) -> int:
    """Return the largest up to `bound` that fits: back in growing steps to one that does, then between."""
    if not bound or fits(bound):
        return bound
    low, stride = bound, 1
    while low > 0 and not fits(low):
        high = low
        low, stride = max(low - stride, 0), stride * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _limit(setting: Dimension, shape: ModelShape) -> int:
    if setting == "batch.sequence_length":
        return shape.max_positions or LONGEST_UNASKED
    return MOST_ROWS if setting == "batch.micro_batch_size" else shape.traits.hidden_size
