"""The memory of what is about to be run, predicted, and held against where it is to run."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec
from foretune.errors import ConfigError, UnsupportedError
from foretune.memory import Fit, MemoryEstimate
from foretune.models import ModelShape

__all__ = ["Predicted", "predict", "require_fit"]


class Predicted(NamedTuple):
    """A prediction, and what there is to say about it."""

    estimate: MemoryEstimate | None
    """None: there is none, and `warnings` says why."""
    fit: Fit | None = None
    warnings: tuple[str, ...] = ()


def predict(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None, raw_config: Mapping[str, Any] | None = None
) -> Predicted:
    """Predict what a configuration needs, against a card or the host's memory where one is named.

    Estimated; traced where no estimate is written, and on a CPU, whose kernels only the trace knows. Raises
    MissingDependencyError where only the trace could answer and its libraries are missing.
    """
    try:
        found = None if config.device == "cpu" else _estimated(config, shape, device)
        prediction, fit = found or _traced(config, shape, device, raw_config)
    except UnsupportedError as error:
        return Predicted(None, None, (f"There is no prediction of the memory: {error.message}",))
    warnings = () if fit is None or fit.verdict == "fits" else (f"Memory: {fit.verdict}. {fit.because}",)
    return Predicted(prediction, fit, warnings)


def _estimated(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None
) -> tuple[MemoryEstimate, Fit | None] | None:
    from foretune import api

    with suppress(UnsupportedError):
        answer = api.estimate(config, device=device, shape=shape)
        if answer.estimate is not None:
            return answer.estimate, answer.fit
    return None


def _traced(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None, raw_config: Mapping[str, Any] | None
) -> tuple[MemoryEstimate, Fit | None]:
    from foretune import api

    answer = api.trace(config, device=device, shape=shape, raw_config=raw_config).answer
    return answer.estimate, answer.fit


def require_fit(fit: Fit | None, what_goes_on: str) -> None:
    """Raise ConfigError with the nearest changes where it does not fit. `what_goes_on` is what the override does."""
    if fit is None or fit.verdict != "does not fit":
        return
    nearest = "; or ".join(f"`--set {' --set '.join(change.settings)}`" for change in fit.changes)
    hint = f"What fits is nearest with: {nearest}. " if nearest else ""
    raise ConfigError(f"It does not fit. {fit.because}", hint=f"{hint}--allow-infeasible {what_goes_on}.")
