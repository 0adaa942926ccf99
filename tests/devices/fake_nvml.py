"""A driver that answers what a test plants."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from foretune.units import MIB


class NVMLError(Exception):
    pass


def card(name: str = "Tesla T4", **answers: Any) -> dict[str, Any]:
    return {
        "name": name,
        "uuid": f"GPU-{abs(hash(name)) % 10**8:08d}",
        "memory": (15360 * MIB, 15000 * MIB),
        "capability": (7, 5),
        "mig": None,
        "compute": [],
        "graphics": [],
        **answers,
    }


def process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def fake_nvml(*cards: dict[str, Any], names: dict[int, Any] | None = None, **changes: Any) -> SimpleNamespace:
    def ask(field: str) -> Callable[[int], Any]:
        def answer(handle: int) -> Any:
            value = cards[handle][field]
            if value is None:
                raise NVMLError(f"{field}: Not Supported")
            return value

        return answer

    def memory(handle: int) -> SimpleNamespace:
        total, free = ask("memory")(handle)
        return SimpleNamespace(total=total, free=free, used=total - free)

    def handle_of(index: int) -> int:
        if cards[index].get("lost"):
            raise NVMLError("GPU is lost")
        return index

    def process_name(pid: int) -> Any:
        if pid not in (names or {}):
            raise NVMLError("Not Found")
        return (names or {})[pid]

    functions = {
        "NVMLError": NVMLError,
        "closed": [],
        "nvmlInit": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.95",
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": handle_of,
        "nvmlDeviceGetName": ask("name"),
        "nvmlDeviceGetUUID": ask("uuid"),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetCudaComputeCapability": ask("capability"),
        "nvmlDeviceGetMigMode": ask("mig"),
        "nvmlDeviceGetComputeRunningProcesses": ask("compute"),
        "nvmlDeviceGetGraphicsRunningProcesses": ask("graphics"),
        "nvmlSystemGetProcessName": process_name,
    }
    module = SimpleNamespace(**{**functions, **changes})
    module.nvmlShutdown = lambda: module.closed.append(True)
    return module
