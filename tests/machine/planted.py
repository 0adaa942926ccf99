"""Machines as they are met, planted part by part."""

from typing import Any

from foretune.devices import Detection, DeviceSpec, MemoryHolder
from foretune.machine.privacy import Private
from foretune.machine.software import Interpreter, TorchBuild
from foretune.units import GIB

NOBODY = Private()

LINUX = Interpreter((3, 12, 4), "linux", "x86_64", is_wsl=False, is_virtual=True)
CPU_TORCH = TorchBuild("2.13.0+cpu", None)
CUDA_TORCH = TorchBuild("2.13.0+cu130", "13.0")


def card(name: str = "NVIDIA GeForce RTX 3090", capability: str = "8.6", **changes: Any) -> DeviceSpec:
    spec = DeviceSpec(
        name=name,
        total_bytes=24 * GIB,
        total_is="reported",
        free_bytes=23 * GIB,
        vendor="NVIDIA",
        compute_capability=capability,
        has_bf16=tuple(map(int, capability.split("."))) >= (8, 0),
        platform="linux",
    )
    return spec.with_(**changes)


T4 = card("Tesla T4", "7.5", total_bytes=15 * GIB, free_bytes=14 * GIB)
BUSY = card(
    free_bytes=1 * GIB,
    holders=[
        MemoryHolder(pid=11, name="python3", used_bytes=22 * GIB),
        MemoryHolder(pid=10, name="Xorg", used_bytes=None),
    ],
)


def machine(*cards: DeviceSpec, driver: str | None = "580.95", reason: str | None = None) -> Detection:
    if not cards:
        return Detection((), reason or "no NVIDIA driver answers (NVML Shared Library Not Found)", None, ())
    return Detection(cards, None, driver, ())
