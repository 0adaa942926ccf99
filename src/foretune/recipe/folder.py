"""The folder of a recipe: there whole or not at all."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from foretune import __version__
from foretune.contract import TrainingConfig, dump_config, fingerprint, json_schema
from foretune.contract.dump import SCHEMA_FILE
from foretune.data.samples import sample_instructions, sample_messages, write_jsonl
from foretune.durable import publish_draft, staged, told
from foretune.errors import RunDirectoryError
from foretune.memory import Fit, MemoryEstimate
from foretune.recipe.readme import Readme, write_readme
from foretune.recipe.scripts import CONFIG_FILE, scripts
from foretune.recipe.version import RECIPE_FILE
from foretune.values import Value, encode_json

__all__ = ["Recipe", "require_free", "write_recipe"]

SAMPLES = "data/instructions.jsonl"
"""What is trained on where no rows are named: a form that every tokenizer can write, chat template or not."""
OUTPUT = "run"


class Recipe(Value, frozen=True, kw_only=True):
    """A recipe as it was written, and the plan behind it."""

    folder: str
    files: tuple[str, ...]
    """Names inside the folder."""
    foretune: str
    """The exact version that runs it."""
    config: TrainingConfig
    """As `config.yaml` in the folder loads."""
    fingerprint: str
    prediction: MemoryEstimate | None
    """None: nothing was predicted, and `warnings` says why."""
    fit: Fit | None = None
    """None: no device was named."""
    warnings: tuple[str, ...] = ()


def require_free(folder: str) -> None:
    """Raise RunDirectoryError where a recipe cannot come to be: a name that is taken, or no folder for it."""
    path = Path(folder)
    if os.path.lexists(path) and not (path.is_dir() and not path.is_symlink() and not any(path.iterdir())):
        raise RunDirectoryError(f"{folder} exists already.", hint="Choose another folder; nothing is overwritten.")
    if not path.absolute().parent.is_dir():
        raise RunDirectoryError(
            f"The folder {path.absolute().parent} does not exist.", hint="Make it, or choose another place."
        )


def write_recipe(
    config: TrainingConfig,
    folder: str,
    *,
    prediction: MemoryEstimate | None,
    fit: Fit | None = None,
    warnings: tuple[str, ...] = (),
) -> Recipe:
    """Write a recipe into a new folder.

    Rows and output that the configuration does not name become the sample rows and `run` in the folder. Raises
    RunDirectoryError where the folder is taken, SaveError where the disk does not take it.
    """
    require_free(folder)
    final = Path(os.path.abspath(folder))  # noqa: PTH100 - without `..`, as the configuration's own paths
    recipe = Recipe(
        folder=folder,
        files=(),
        foretune=__version__,
        config=_completed(config, final),
        fingerprint="",
        prediction=prediction,
        fit=fit,
        warnings=warnings,
    )
    files = _files(recipe, final, has_rows=config.data.train is not None)
    recipe = recipe.with_(files=tuple(files), fingerprint=fingerprint(recipe.config, folder=final))
    _publish({**files, RECIPE_FILE: f"{encode_json(_kept(recipe))}\n"}, final)
    return recipe.with_(files=tuple(sorted((*files, RECIPE_FILE))))


def _completed(config: TrainingConfig, final: Path) -> TrainingConfig:
    """Name rows and output where nobody did."""
    rows = config.data.train or str(final / SAMPLES)
    output = config.output or str(final / OUTPUT)
    return config.with_(data=config.data.with_(train=rows), output=output)


def _files(recipe: Recipe, final: Path, *, has_rows: bool) -> dict[str, str]:
    return {
        CONFIG_FILE: dump_config(recipe.config, comments=True, folder=final),
        SCHEMA_FILE: f"{encode_json(json_schema())}\n",
        "README.md": write_readme(
            Readme(recipe.config, recipe.prediction, recipe.fit, recipe.warnings, final, has_rows)
        ),
        "requirements.txt": f"foretune[train]=={__version__}\n",
        SAMPLES: write_jsonl(sample_instructions()),
        "data/messages.jsonl": write_jsonl(sample_messages()),
        **scripts(),
    }


def _kept(recipe: Recipe) -> dict[str, object]:
    """What `recipe.json` says. Where the folder stands is left out: it may be moved."""
    told = recipe.to_dict()
    return {"schema": "foretune.recipe/1"} | {
        name: told[name] for name in ("foretune", "fingerprint", "prediction", "fit", "warnings")
    }


def _publish(files: Mapping[str, str], final: Path) -> None:
    with told(final), staged(final) as draft:
        for name, text in files.items():
            path = draft / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        with suppress(OSError):  # an empty folder of that name makes room; a full one stays, and is told
            final.rmdir()
        publish_draft(draft, final)
