"""Python, the system and the libraries: what is there, and whether foretune was tested with it."""

import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from foretune.devices import SPILL_NOTE, detect_platform
from foretune.machine.report import Finding, Need
from foretune.runtime.libraries import EXTRAS, Range, version_of

__all__ = [
    "TESTED_PYTHON",
    "Interpreter",
    "TorchBuild",
    "library_findings",
    "python_findings",
    "this_interpreter",
    "torch_build",
]

TESTED_PYTHON = Range((3, 11), (3, 14))
"""Below it nothing starts; what lies above it has not been tested."""
SYSTEMS = {"linux": "Linux", "win32": "Windows", "darwin": "macOS"}
_NEEDS: dict[str, Need] = {
    "core": "planning",
    "data": "training",
    "train": "training",
    "liger": "some settings",
    "web": "some settings",
}
_BRINGS = {
    "core": "estimates and recommendations",
    "data": "reading and tokenizing rows",
    "train": "training, tracing and evaluating",
    "liger": "the loss `liger`",
    "web": "the local page",
}
_SOMETIMES = {"bitsandbytes": "qlora, 8-bit bases and 8-bit optimizers"}
"""Libraries that only some settings need."""


class Interpreter(NamedTuple):
    """The Python that runs this, and the system below it."""

    version: tuple[int, int, int]
    system: str
    """As sys.platform says it."""
    machine: str
    is_wsl: bool
    is_virtual: bool
    """Whether packages go to an environment of their own: a virtual one, or conda's."""


def this_interpreter() -> Interpreter:
    """Look at the Python that runs this."""
    return Interpreter(
        version=sys.version_info[:3],
        system=sys.platform,
        machine=platform.machine(),
        is_wsl=detect_platform() == "wsl",
        is_virtual=sys.prefix != sys.base_prefix or bool(os.environ.get("CONDA_PREFIX")),
    )


def python_findings(python: Interpreter) -> Iterator[Finding]:
    """Say whether this Python and this system will do."""
    version = ".".join(map(str, python.version))
    where = "in an environment of its own" if python.is_virtual else "outside a virtual environment"
    found = f"Python {version}, {where}"
    activate = ".venv\\Scripts\\activate" if python.system == "win32" else ". .venv/bin/activate"
    if python.version < TESTED_PYTHON.first:
        yield Finding(
            check="python.version",
            group="Python",
            state="problem",
            found=found,
            advice=f"foretune needs Python {'.'.join(map(str, TESTED_PYTHON.first))} or later.",
            run=("uv venv --python 3.12 .venv", activate, "pip install foretune"),
            needed_for="planning",
        )
    elif not TESTED_PYTHON.holds(version):
        newest = ".".join(map(str, TESTED_PYTHON.stop or ()))
        yield Finding(
            check="python.version",
            group="Python",
            state="unknown",
            found=found,
            advice=f"foretune was not tested with Python {newest} and later; libraries may have no wheels for it.",
        )
    else:
        advice = None if python.is_virtual else "Install into a virtual environment, so that nothing else changes."
        yield Finding(
            check="python.version",
            group="Python",
            state="ok",
            found=found,
            advice=advice,
            run=() if python.is_virtual else (f"{_python(python)} -m venv .venv", activate),
        )
    yield _system(python)


def _python(python: Interpreter) -> str:
    return "py" if python.system == "win32" else "python3"


def _system(python: Interpreter) -> Finding:
    name = SYSTEMS.get(python.system, "an unknown system")
    if python.is_wsl:
        return Finding(
            check="system",
            group="Python",
            state="ok",
            found=f"Linux under WSL, {python.machine}",
            advice="The driver is that of Windows: install none here. Linux may use what `memory` in .wslconfig "
            f"allows (half of the memory where it says nothing). Of a card, {SPILL_NOTE}.",
        )
    if python.system == "win32":
        return Finding(
            check="system",
            group="Python",
            state="unknown",
            found=f"Windows, {python.machine}",
            advice="Estimates, recommendations and traces work here; no test has run a training on Windows. Of a card, "
            f"{SPILL_NOTE}. To train as tested, use WSL.",
            run=("wsl --install",),
        )
    if python.system == "linux":
        return Finding(check="system", group="Python", state="ok", found=f"Linux, {python.machine}")
    return Finding(
        check="system",
        group="Python",
        state="unknown",
        found=f"{name}, {python.machine}",
        advice="Estimates and recommendations work here; no test has run a training on this system.",
    )


# -- libraries


def library_findings(installed: Callable[[str], str | None] = version_of, *, quote: str = "'") -> Iterator[Finding]:
    """Say for each extra which libraries are there and tested; one finding for what is missing, one for each other."""
    for extra, ranges in EXTRAS.items():
        found = {name: installed(name) for name in ranges}
        missing = [name for name, version in found.items() if version is None]
        odd = {name: version for name, version in found.items() if version and not ranges[name].holds(version)}
        good = [f"{name} {version}" for name, version in found.items() if version and name not in odd]
        if good:
            text = f"{extra}, for {_BRINGS[extra]}: {', '.join(good)}"
            yield Finding(check=f"library.{extra}", group="Libraries", state="ok", found=text)
        yield from _missing(extra, missing, quote)
        for name, version in odd.items():
            yield Finding(
                check=f"library.{name}",
                group="Libraries",
                state="problem",
                found=f"{name} {version} is outside the range {ranges[name]} that foretune takes",
                run=(f"pip install {quote}{name}{ranges[name]}{quote}",),
                needed_for="some settings" if name in _SOMETIMES else _NEEDS[extra],
            )


def _missing(extra: str, missing: list[str], quote: str) -> Iterator[Finding]:
    """Tell what an extra lacks; what only some settings need is told apart."""
    seldom = [name for name in missing if name in _SOMETIMES]
    always = [name for name in missing if name not in _SOMETIMES]
    package = "foretune" if extra == "core" else f"foretune[{extra}]"
    line = f"pip install {quote}{package}{quote}"
    if always:
        yield Finding(
            check=f"library.{extra}",
            group="Libraries",
            state="missing",
            found=f"{extra}, for {_BRINGS[extra]}: {', '.join(always)}",
            run=(line,),
            needed_for=_NEEDS[extra],
        )
    for name in seldom:
        yield Finding(
            check=f"library.{name}",
            group="Libraries",
            state="missing",
            found=f"{name}, for {_SOMETIMES[name]}",
            run=(line,),
            needed_for="some settings",
        )


# -- torch, as it was built


class TorchBuild(NamedTuple):
    """For what the installed torch was built."""

    version: str
    cuda: str | None
    """`13.0`; None: without CUDA."""
    is_rocm: bool = False

    @property
    def is_cpu(self) -> bool:
        """Whether it can use no GPU."""
        return self.cuda is None and not self.is_rocm


_ASSIGNED = re.compile(r"^(__version__|cuda|hip)\b[^=]*=\s*(?:None|['\"]([^'\"]*)['\"])", re.MULTILINE)


def torch_build(folder: Path | None = None) -> TorchBuild | None:
    """Read from torch/version.py for what torch was built, without importing it; None: not installed, or not told."""
    if folder is None:
        folder = _torch_folder()
    try:
        text = "" if folder is None else (folder / "version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    found = {name: value or None for name, value in _ASSIGNED.findall(text)}
    version = found.get("__version__")
    return None if version is None else TorchBuild(version, found.get("cuda"), is_rocm=found.get("hip") is not None)


def _torch_folder() -> Path | None:
    try:
        spec = find_spec("torch")  # of a top-level package: this finds, and imports nothing
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None
