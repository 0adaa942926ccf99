"""Which libraries are there, without importing them, and whether foretune was tested with them."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from foretune.contract import TrainingConfig
from foretune.errors import MissingDependencyError, UnsupportedError

__all__ = [
    "DATA_INSTALL_LINE",
    "INSTALL_LINE",
    "TESTED",
    "all_versions",
    "installed_versions",
    "libraries_for",
    "require_libraries",
    "require_text_libraries",
]

INSTALL_LINE = "pip install 'foretune[train]'"
DATA_INSTALL_LINE = "pip install 'foretune[data]'"


class _Range(NamedTuple):
    """Tested versions: from `first` up to and without `stop`."""

    first: tuple[int, ...]
    stop: tuple[int, ...]

    def __str__(self) -> str:
        return f">={'.'.join(map(str, self.first))},<{'.'.join(map(str, self.stop))}"


TESTED = {
    "torch": _Range((2, 10), (2, 15)),
    "transformers": _Range((5, 24), (5, 25)),
    "peft": _Range((0, 21), (0, 22)),
    "bitsandbytes": _Range((0, 50), (0, 51)),
}
"""torch from 2.10 (CVE-2026-24747), Transformers from 5.3 (CVE-2026-4372): the floors lie above both."""

TEXT_TESTED = {
    "transformers": TESTED["transformers"],
    "tokenizers": _Range((0, 22), (1,)),
    "jinja2": _Range((3, 1, 6), (4,)),
}
"""What rows are read, rendered and tokenized with; jinja2 from 3.1.6, before which its sandbox can be left."""


def installed_versions() -> dict[str, str | None]:
    """Return each library's version, None where it is not installed."""
    return {name: _version(name) for name in TESTED}


def all_versions() -> dict[str, str]:
    """Return the versions of everything of ours that is installed."""
    found = {name: _version(name) for name in (*TESTED, "tokenizers", "jinja2", "safetensors")}
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


def _required(ranges: Mapping[str, _Range], install_line: str) -> dict[str, str]:
    found = {name: _version(name) for name in ranges}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise MissingDependencyError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed.", hint=f"Run: {install_line}"
        )
    for name, value in found.items():
        allowed = ranges[name]
        if not allowed.first <= _numbers(value or "") < allowed.stop:
            raise UnsupportedError(
                f"{name} {value} is outside the tested range {allowed}.", hint=f"Run: pip install '{name}{allowed}'"
            )
    return {name: value for name, value in found.items() if value is not None}


def _version(name: str) -> str | None:
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
