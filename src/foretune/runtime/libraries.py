"""Which libraries are there, without importing them, and whether foretune was tested with them."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from foretune.contract import TrainingConfig
from foretune.errors import MissingDependencyError, UnsupportedError

__all__ = [
    "DATA_INSTALL_LINE",
    "EXTRAS",
    "INSTALL_LINE",
    "TESTED",
    "Range",
    "all_versions",
    "installed_versions",
    "libraries_for",
    "require_libraries",
    "require_text_libraries",
    "version_of",
]

INSTALL_LINE = "pip install 'foretune[train]'"
DATA_INSTALL_LINE = "pip install 'foretune[data]'"


class Range(NamedTuple):
    """Versions that are taken: from `first` up to and without `stop` (None: whatever comes after)."""

    first: tuple[int, ...]
    stop: tuple[int, ...] | None = None

    def __str__(self) -> str:
        least = f">={'.'.join(map(str, self.first))}"
        return least if self.stop is None else f"{least},<{'.'.join(map(str, self.stop))}"

    def holds(self, version: str) -> bool:
        """Say whether a version is one of these."""
        numbers = _numbers(version)
        return self.first <= numbers and (self.stop is None or numbers < self.stop)


TESTED = {
    "torch": Range((2, 10), (2, 15)),
    "transformers": Range((5, 24), (5, 25)),
    "peft": Range((0, 21), (0, 22)),
    "bitsandbytes": Range((0, 50), (0, 51)),
}
"""torch from 2.10 (CVE-2026-24747), Transformers from 5.3 (CVE-2026-4372): the floors lie above both."""

TEXT_TESTED = {
    "transformers": TESTED["transformers"],
    "tokenizers": Range((0, 22), (1,)),
    "jinja2": Range((3, 1, 6), (4,)),
}
"""What rows are read, rendered and tokenized with; jinja2 from 3.1.6, before which its sandbox can be left."""

EXTRAS: dict[str, dict[str, Range]] = {
    "core": {
        "msgspec": Range((0, 20)),
        "click": Range((8, 2)),
        "ruamel.yaml": Range((0, 18, 10)),
        "huggingface_hub": Range((1, 0)),
        "nvidia-ml-py": Range((12, 560)),
    },
    "data": TEXT_TESTED,
    "train": {
        "torch": TESTED["torch"],
        "peft": TESTED["peft"],
        "bitsandbytes": TESTED["bitsandbytes"],
        "safetensors": Range((0, 7)),
        "numpy": Range((2, 0)),
        "filelock": Range((3, 20)),
    },
    "liger": {"liger-kernel": Range((0, 8))},
    "web": {"starlette": Range((0, 46)), "uvicorn": Range((0, 34))},
}
"""What each extra of pyproject.toml brings, `core` what is always there; `train` brings `data` too."""


def installed_versions() -> dict[str, str | None]:
    """Return each library's version, None where it is not installed."""
    return {name: version_of(name) for name in TESTED}


def all_versions() -> dict[str, str]:
    """Return the versions of everything of ours that is installed."""
    found = {name: version_of(name) for name in (*TESTED, "tokenizers", "jinja2", "safetensors")}
    return {name: version for name, version in found.items() if version is not None}


def libraries_for(config: TrainingConfig) -> tuple[str, ...]:
    """Name the libraries that a configuration needs: bitsandbytes only for a quantized base and 8-bit optimizers."""
    needs_bitsandbytes = config.quantization is not None or config.optimizer.name.endswith("8bit")
    return tuple(name for name in TESTED if name != "bitsandbytes" or needs_bitsandbytes)


def require_libraries(*names: str) -> dict[str, str]:
    """Return the versions of libraries that must be there.

    Raises MissingDependencyError with the install line, UnsupportedError outside the tested range.
    """
    return _required({name: TESTED[name] for name in names}, INSTALL_LINE)


def require_text_libraries() -> dict[str, str]:
    """Return the versions of what rows are tokenized with. Raises as `require_libraries`."""
    return _required(TEXT_TESTED, DATA_INSTALL_LINE)


def _required(ranges: Mapping[str, Range], install_line: str) -> dict[str, str]:
    found = {name: version_of(name) for name in ranges}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise MissingDependencyError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed.", hint=f"Run: {install_line}"
        )
    for name, value in found.items():
        allowed = ranges[name]
        if not allowed.holds(value or ""):
            raise UnsupportedError(
                f"{name} {value} is outside the tested range {allowed}.", hint=f"Run: pip install '{name}{allowed}'"
            )
    return {name: value for name, value in found.items() if value is not None}


def version_of(name: str) -> str | None:
    """Return the version of an installed distribution, without importing it; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu gives (2, 13, 0)."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = "".join(character for character in part if character.isdigit())
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
