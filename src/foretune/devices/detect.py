"""What is in this machine: NVIDIA's management library (NVML), without torch and without a CUDA context.

Everything foreign stops here: a missing library or driver is a reason in words, a device that answers only in part
becomes a DeviceSpec with gaps, and names are escaped.
"""

import os
import re
import sys
from typing import Any, Literal, NamedTuple

from foretune.devices.catalogue import matching_entries
from foretune.devices.limits import memory_limit
from foretune.devices.spec import DeviceSpec, MemoryHolder

__all__ = [
    "SPILL_NOTE",
    "Detection",
    "detect_devices",
    "detect_platform",
    "has_nvidia_card",
    "host_memory",
    "system_memory",
]

_ARCHITECTURES = {
    "5": "Maxwell", "6": "Pascal", "7.0": "Volta", "7.2": "Volta", "7.5": "Turing", "8.0": "Ampere", "8.6": "Ampere",
    "8.7": "Ampere", "8.9": "Ada Lovelace", "9": "Hopper", "10.0": "Blackwell", "10.3": "Blackwell Ultra",
    "11": "Blackwell", "12": "Blackwell 2.0",
}  # fmt: skip
_NUMBERS = re.compile(r"[-\d, ]{0,64}")
SPILL_NOTE = "only dedicated memory counts: past it the Windows driver spills into system memory, which is slow"


class Detection(NamedTuple):
    """The devices that a CUDA program started here would see, and what there is to say about them."""

    devices: tuple[DeviceSpec, ...]
    reason: str | None = None
    """Why there are none."""
    driver_version: str | None = None
    notes: tuple[str, ...] = ()


def detect_devices() -> Detection:
    """Ask the driver for the visible devices: total and free memory, abilities, who holds memory.

    `CUDA_VISIBLE_DEVICES` is honoured. Never raises for what the machine lacks: `reason` says it.

        detection = detect_devices()
        [device.free_bytes for device in detection.devices] or detection.reason
    """
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        return Detection((), "the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError) as error:
        return Detection((), f"no NVIDIA driver answers ({_clean(error)})")
    try:
        return _Probe(pynvml).detection(os.environ)
    finally:
        _quietly(pynvml, pynvml.nvmlShutdown)


def _quietly(nvml: Any, call: Any, *arguments: Any) -> Any:
    """Ask one question of the driver; None where it has no answer."""
    try:
        return call(*arguments)
    except (nvml.NVMLError, UnicodeDecodeError, OSError, AttributeError):
        return None


def _clean(value: Any) -> str:
    """Make text of a foreign name: at most 120 characters, control characters escaped."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    text = text.strip()[:120]
    return text if text.isprintable() else repr(text)[1:-1]


class _Card(NamedTuple):
    number: int
    handle: Any
    uuid: str


class _Probe:
    """Questions to one initialised NVML."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.platform = detect_platform()
        self.notes: list[str] = []

    def ask(self, function: str, *arguments: Any) -> Any:
        return _quietly(self.nvml, getattr(self.nvml, function, _missing), *arguments)

    def detection(self, environment: Any) -> Detection:
        version = self.ask("nvmlSystemGetDriverVersion")
        driver = None if version is None else _clean(version)
        cards = self._cards()
        if not cards:
            return Detection((), "the driver reports no device", driver, tuple(self.notes))
        cards = self._visible(cards, environment)
        specs = [self._spec(card) for card in cards]
        devices = tuple(spec for spec in specs if spec is not None)
        reason = None if devices else (self.notes[-1] if self.notes else "no device is visible")
        return Detection(devices, reason, driver, tuple(self.notes))

    def _cards(self) -> list[_Card]:
        cards = []
        for index in range(self.ask("nvmlDeviceGetCount") or 0):
            handle = self.ask("nvmlDeviceGetHandleByIndex", index)
            if handle is None:
                self.notes.append(f"device {index} does not answer (it may be lost or in use by another container)")
                continue
            cards.append(_Card(index, handle, _clean(self.ask("nvmlDeviceGetUUID", handle) or "")))
        return cards

    def _visible(self, cards: list[_Card], environment: Any) -> list[_Card]:
        wanted = environment.get("CUDA_VISIBLE_DEVICES")
        if wanted is None:
            return cards
        visible, note = select_visible(cards, wanted)
        shown = repr(wanted) if _NUMBERS.fullmatch(wanted) else "(not shown: it holds more than numbers)"
        self.notes.append(f"CUDA_VISIBLE_DEVICES={shown}: {note}")
        if len(visible) < len(cards) and len(cards) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            self.notes.append(
                "without CUDA_DEVICE_ORDER=PCI_BUS_ID, CUDA numbers the fastest card first; these are bus numbers"
            )
        return visible

    def _spec(self, card: _Card) -> DeviceSpec | None:
        answer = self.ask("nvmlDeviceGetName", card.handle)
        name = _clean(answer) if answer else f"NVIDIA device {card.number}"
        memory = self.ask("nvmlDeviceGetMemoryInfo", card.handle)
        total, free = (None, None) if memory is None else (int(memory.total), int(memory.free))
        is_unified = any(entry.is_unified for entry in matching_entries(name))
        if total is None and is_unified:
            total, free = system_memory()
        if total is None:
            self.notes.append(f"{name}: the driver does not report its memory")
            return None
        capability = self.ask("nvmlDeviceGetCudaComputeCapability", card.handle)
        known = _known(name, total)
        return DeviceSpec(
            name=name,
            total_bytes=total,
            total_is="reported",
            free_bytes=None if free is None else min(free, total),
            vendor="NVIDIA",
            compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
            multiprocessors=known.multiprocessors if known else None,
            architecture=None if capability is None else _architecture(*capability),
            has_bf16=None if capability is None else tuple(capability) >= (8, 0),
            has_fp8=None if capability is None else tuple(capability) >= (8, 9),
            is_unified=is_unified,
            bandwidth_bytes_per_second=known.bandwidth_bytes_per_second if known else None,
            fp16_flops=known.fp16_flops if known else None,
            platform=self.platform,
            holders=self._holders(card),
            notes=tuple(self._device_notes(card)),
        )

    def _device_notes(self, card: _Card) -> list[str]:
        notes = []
        if self.platform in ("windows", "wsl"):
            notes.append(SPILL_NOTE)
        mode = self.ask("nvmlDeviceGetMigMode", card.handle)
        if mode and mode[0]:
            notes.append("MIG is on: a program sees an instance, which is smaller than the card")
        return notes

    def _holders(self, card: _Card) -> tuple[MemoryHolder, ...]:
        """Return who holds memory, largest first; the size is None where the driver does not tell (Windows)."""
        used: dict[int, int | None] = {}
        for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            for process in self.ask(function, card.handle) or ():
                used[process.pid] = _larger(used.get(process.pid), process.usedGpuMemory)
        holders = [MemoryHolder(pid=pid, name=self._process_name(pid), used_bytes=size) for pid, size in used.items()]
        return tuple(sorted(holders, key=lambda holder: (-(holder.used_bytes or 0), holder.pid)))

    def _process_name(self, pid: int) -> str | None:
        """Return the program's name; some drivers answer with its whole command line."""
        answer = self.ask("nvmlSystemGetProcessName", pid) or _name_in_proc(pid)
        return _program_name(_clean(answer)) if answer else None


def _program_name(command: str) -> str | None:
    """Return the name of a program without its folder and its arguments.

    >>> _program_name("/usr/bin/python3 /home/me/train.py --token=x")
    'python3'
    """
    if command.startswith("["):  # [Insufficient Permissions]
        return None
    path = command.replace("\\", "/")
    end = path.lower().find(".exe")  # folders of Windows have spaces
    path = path[: end + len(".exe")] if end >= 0 else path.partition(" ")[0]
    return path.rsplit("/", 1)[-1] or None


def _missing(*_: Any) -> None:
    """Stand in for a question that this version of the library cannot ask."""


def _larger(old: int | None, new: int | None) -> int | None:
    return new if old is None else old if new is None else max(old, new)


def _name_in_proc(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:  # noqa: PTH123
            return file.read(64).decode("utf-8", "replace").strip()
    except OSError:
        return None


def _architecture(major: int, minor: int) -> str | None:
    return _ARCHITECTURES.get(f"{major}.{minor}") or _ARCHITECTURES.get(str(major))


def _known(name: str, total_bytes: int) -> DeviceSpec | None:
    """Look up the catalogue's card of that name and about that size (within 7 %): what a driver does not tell."""
    near = [
        entry.spec()
        for entry in matching_entries(name)
        if abs(entry.total_bytes - total_bytes) <= 0.07 * entry.total_bytes
    ]
    return near[0] if len(near) == 1 else None


def select_visible(cards: list[_Card], wanted: str) -> tuple[list[_Card], str]:
    """Choose as CUDA does: by index or by the start of a UUID, up to the first that names nothing; twice is none.

    Returns the cards and a note that says what the variable did.
    """
    chosen: list[_Card] = []
    for text in [part.strip() for part in wanted.split(",")]:
        if text.startswith("MIG-"):
            return [], "MIG instances are not looked at; no device is described"
        found = [card for card in cards if text == str(card.number)]
        if not found and text.upper().startswith("GPU-"):
            found = [card for card in cards if card.uuid.lower().startswith(text.lower())]
        if len(found) != 1:
            break
        if found[0] in chosen:
            return [], "a device is named twice, so CUDA sees none"
        chosen.append(found[0])
    if not chosen:
        return [], "no device is visible to CUDA"
    return chosen, f"{len(chosen)} of {len(cards)} devices visible"


def has_nvidia_card() -> bool | None:
    """Say whether the bus has an NVIDIA display device, with a driver or without; None where the system does not tell.

    Linux does. Inside a container these are the host's.
    """
    try:
        folders = [entry.path for entry in os.scandir("/sys/bus/pci/devices")]
    except OSError:
        return None
    return any(
        _first_bytes(f"{folder}/vendor").strip() == "0x10de" and _first_bytes(f"{folder}/class").startswith("0x03")
        for folder in folders
    )


def detect_platform() -> Literal["linux", "windows", "wsl"] | None:
    """Say where this runs; None for a system without NVIDIA drivers."""
    if sys.platform == "win32":
        return "windows"
    if sys.platform != "linux":
        return None
    return "wsl" if "microsoft" in _first_bytes("/proc/version").lower() else "linux"


def _first_bytes(path: str) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read(4096).decode("utf-8", "replace")
    except OSError:
        return ""


def host_memory() -> DeviceSpec | None:
    """Describe the memory of this machine, for a run on its CPU; None where the system does not tell (Linux does).

    A limit of the container or service that this process runs in is the machine's size.

        trace(config, device=host_memory()).answer.verdict
    """
    total, available = system_memory()
    if total is None:
        return None
    limit = memory_limit()
    if limit is not None and limit.limit_bytes < total:
        total = limit.limit_bytes
        available = min(size for size in (total, available, limit.free_bytes) if size is not None)
    return DeviceSpec(name="this machine's memory", total_bytes=total, total_is="reported", free_bytes=available)


def system_memory() -> tuple[int | None, int | None]:
    """Read total and available bytes of the machine's memory, for a CPU and devices that share it (Linux)."""
    sizes = {}
    for line in _first_bytes("/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        number = value.split()[:1]
        if number and number[0].isdigit():
            sizes[name] = int(number[0]) * 1024
    return sizes.get("MemTotal"), sizes.get("MemAvailable")
