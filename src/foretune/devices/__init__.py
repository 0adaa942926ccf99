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
    from foretune.devices.detect import Detection, detect_devices, host_memory, system_memory

__all__ = [
    "CatalogueEntry",
    "Detection",
    "DeviceSpec",
    "MemoryHolder",
    "detect_devices",
    "device_from_memory",
    "find_device",
    "host_memory",
    "list_devices",
    "multiprocessors_like",
    "system_memory",
    "with_free",
]


def __getattr__(name: str) -> Any:
    """Import detection when it is first asked for."""
    if name not in ("Detection", "detect_devices", "host_memory", "system_memory"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from foretune.devices import detect

    return getattr(detect, name)
