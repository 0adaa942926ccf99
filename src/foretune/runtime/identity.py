"""Who runs: the code, the libraries, the machine. Read once, before anything is loaded."""

import platform
import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import foretune
from foretune import __version__
from foretune.devices import DeviceSpec, system_memory
from foretune.evidence import CodeIdentity, Hardware

__all__ = ["code_identity", "hardware_of"]


def code_identity(versions: dict[str, str]) -> CodeIdentity:
    """Say which code runs. The hash is of every Python file of the package, by its name."""
    root = Path(foretune.__file__).parent
    found = sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return CodeIdentity(
        foretune=__version__,
        source_sha256=found.hexdigest(),
        python=platform.python_version(),
        libraries=tuple(f"{name} {version}" for name, version in versions.items()),
    )


def hardware_of(device: DeviceSpec | None, *, driver: str | None = None) -> Hardware:
    """Describe the card, or this machine where there is none, with what is free now."""
    threads = None
    if "torch" in sys.modules:
        import torch

        threads = torch.get_num_threads()
    shared = {"processor": _processor(), "num_threads": threads, "platform": f"{sys.platform}-{platform.machine()}"}
    if device is None:
        total, available = system_memory()
        return Hardware(device="cpu", total_bytes=total, free_bytes=available, **shared)
    return Hardware(
        device=device.name,
        total_bytes=device.total_bytes,
        free_bytes=device.free_bytes,
        compute_capability=device.compute_capability,
        driver=driver,
        other_processes=len(device.holders),
        **shared,
    )


def _processor() -> str | None:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None
