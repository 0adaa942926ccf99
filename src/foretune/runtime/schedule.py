"""How long a run is and how its learning rate moves: pure functions of the settings and the number of micro batches."""

import math
from typing import NamedTuple

from foretune.contract import ScheduleSettings
from foretune.errors import ConfigError

__all__ = ["Place", "RunLength", "learning_rate_factor", "run_length"]


class Place(NamedTuple):
    """The micro batches of one update."""

    epoch: int
    first: int
    """Micro batch of the epoch, from 0."""
    stop: int


class RunLength(NamedTuple):
    """How many updates there are, and where each takes its micro batches from."""

    num_updates: int
    batches_per_epoch: int
    accumulation_steps: int

    @property
    def updates_per_epoch(self) -> int:
        """The last one of an epoch takes what is left, and is divided by its own tokens."""
        return -(-self.batches_per_epoch // self.accumulation_steps)

    @property
    def last_group(self) -> int:
        """Micro batches of an epoch's last update."""
        return self.batches_per_epoch - (self.updates_per_epoch - 1) * self.accumulation_steps

    def place(self, update: int) -> Place:
        """Return where the micro batches of an update (from 0) stand. No update crosses from one epoch to the next."""
        epoch, group = divmod(update, self.updates_per_epoch)
        first = group * self.accumulation_steps
        return Place(epoch, first, min(first + self.accumulation_steps, self.batches_per_epoch))


def run_length(schedule: ScheduleSettings, batches_per_epoch: int, accumulation_steps: int) -> RunLength:
    """Count the updates: as many as are asked for, or as the passes over the data give, a part of one rounded up.

    Raises ConfigError where the warm-up does not end before the run does.
    """
    length = RunLength(0, batches_per_epoch, accumulation_steps)
    if schedule.updates is not None:
        num_updates = schedule.updates
    else:
        assert schedule.passes is not None
        num_updates = math.ceil(round(schedule.passes * length.updates_per_epoch, 9))
    if schedule.warmup_updates >= num_updates:
        raise ConfigError(
            f"schedule.warmup_updates is {schedule.warmup_updates}, and the rows give {num_updates:,} "
            f"update{'s' * (num_updates != 1)}: the learning rate would never reach its peak.",
            hint="Lower schedule.warmup_updates or batch.accumulation_steps, raise schedule.epochs, or add rows.",
            field="schedule.warmup_updates",
        )
    return length._replace(num_updates=num_updates)


def learning_rate_factor(schedule: ScheduleSettings, update: int, num_updates: int) -> float:
    """Return the share of the peak learning rate at an update (from 0).

    Warm-up rises in a line from 0, so a first update with warm-up moves nothing; then it stays, falls in a line to 0
    at the end, or follows half a cosine. As Transformers has them (optimization.py, get_*_schedule_with_warmup).
    """
    if update < schedule.warmup_updates:
        return update / schedule.warmup_updates
    if schedule.shape == "constant":
        return 1.0
    progress = (update - schedule.warmup_updates) / max(1, num_updates - schedule.warmup_updates)
    if schedule.shape == "linear":
        return max(0.0, 1.0 - progress)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
