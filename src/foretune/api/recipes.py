"""From a configuration to a folder that a person can read and run."""

from contextlib import suppress

from foretune.api.planning import require_qualified
from foretune.api.prediction import Predicted, predict, require_fit
from foretune.contract import TrainingConfig
from foretune.data import open_rows
from foretune.devices import DeviceSpec
from foretune.errors import MissingDependencyError
from foretune.models import ModelShape, resolve_model
from foretune.recipe import Recipe, require_free
from foretune.recipe import write_recipe as write_folder

__all__ = ["Recipe", "write_recipe"]

NO_DEVICE = "It is for an NVIDIA card, and none was named. For a run on a CPU: device: cpu with precision.dtype: fp32."


def write_recipe(
    config: TrainingConfig,
    folder: str,
    *,
    device: DeviceSpec | None = None,
    offline: bool = False,
    allow_infeasible: bool = False,
    shape: ModelShape | None = None,
) -> Recipe:
    """Write a fine-tune as a folder: configuration, entry scripts, exact requirements, sample rows, and the plan.

    Nothing is downloaded but a config, and nothing is written before the plan stands. Without a device there is a
    need and no verdict. `shape` is for a caller who has resolved the model.

    Raises ConfigError where it does not fit (unless `allow_infeasible`), UnsupportedError where foretune would not run
    it, ModelAccessError, DataError for rows that are not there, RunDirectoryError for a taken folder, SaveError.

        config = build_config({"model.id": "Qwen/Qwen2.5-0.5B", "lora.rank": 16}).config
        write_recipe(config, "my-recipe", device=find_device("rtx 3090")).files
    """
    require_free(folder)
    for rows in (config.data.train, config.evaluation.data):
        if rows is not None:
            open_rows(rows).close()
    source = config.model
    shape = shape or resolve_model(source.id, revision=source.revision, offline=offline)
    require_qualified(config, shape)
    found = _predicted(config, shape, device)
    if not allow_infeasible:
        require_fit(found.fit, "writes it all the same")
    warnings = found.warnings if device is not None or config.device == "cpu" else (*found.warnings, NO_DEVICE)
    return write_folder(config, folder, prediction=found.estimate, fit=found.fit, warnings=warnings)


def _predicted(config: TrainingConfig, shape: ModelShape, device: DeviceSpec | None) -> Predicted:
    """Predict; where only the trace could, and its libraries are missing, say so: the recipe installs them."""
    with suppress(MissingDependencyError):
        return predict(config, shape, device)
    why = "Its memory is known by the trace alone, whose libraries are not here: train.py predicts it before it runs."
    return Predicted(None, None, (why,))
