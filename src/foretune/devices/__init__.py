"""Capacity and abilities of devices: a catalogue of known cards, and detection without torch."""

from typing import TYPE_CHECKING, Any

from foretune.devices.catalogue import (
    CatalogueEntry,
    device_from_memory,
    find_device,
    list_devices,
    multiprocessors_like,
    with_free,
)
from foretune.devices.spec import DeviceSpec, MemoryHolder

if TYPE_CHECKING:
    from foretune.devices.detect import (
        SPILL_NOTE,
        Detection,
        detect_devices,
        detect_platform,
        has_nvidia_card,
        host_memory,
        system_memory,
    )
    from foretune.devices.limits import MemoryLimit, memory_limit

__all__ = [
    "SPILL_NOTE",
    "CatalogueEntry",
    "Detection",
    "DeviceSpec",
    "MemoryHolder",
    "MemoryLimit",
    "detect_devices",
    "detect_platform",
    "device_from_memory",
    "find_device",
    "has_nvidia_card",
    "host_memory",
    "list_devices",
    "memory_limit",
    "multiprocessors_like",
    "system_memory",
    "with_free",
]


_DETECTION = {
    "SPILL_NOTE",
    "Detection",
    "detect_devices",
    "detect_platform",
    "has_nvidia_card",
    "host_memory",
    "system_memory",
}


def __getattr__(name: str) -> Any:
    """Import detection when it is first asked for."""
    if name in ("MemoryLimit", "memory_limit"):
        from foretune.devices import limits

        return getattr(limits, name)
    if name not in _DETECTION:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from foretune.devices import detect

    return getattr(detect, name)
