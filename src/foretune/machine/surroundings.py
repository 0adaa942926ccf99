"""Environment variables that change what a run does: known names, and only values that are harmless to show."""

import re
from collections.abc import Iterator, Mapping

from foretune.machine.report import Finding

__all__ = ["SHOWN", "environment_findings"]

_NUMBERS = r"[-\d, ]{1,40}"
_SWITCH = r"(?i:0|1|true|false|on|off|yes|no)"
_ALLOCATOR = (
    r"(?:(?:expandable_segments|max_split_size_mb|garbage_collection_threshold|roundup_power2_divisions|backend"
    r"|pinned_use_cuda_host_register|pinned_num_register_threads)"
    r":(?:True|False|native|cudaMallocAsync|\d{1,6}(?:\.\d{1,6})?),?){1,7}"
)
SHOWN: dict[str, str | None] = {
    "CUDA_VISIBLE_DEVICES": _NUMBERS,
    "CUDA_DEVICE_ORDER": r"PCI_BUS_ID|FASTEST_FIRST",
    "CUDA_LAUNCH_BLOCKING": _SWITCH,
    "CUDA_MODULE_LOADING": r"LAZY|EAGER",
    "PYTORCH_ALLOC_CONF": _ALLOCATOR,
    "PYTORCH_CUDA_ALLOC_CONF": _ALLOCATOR,
    "PYTORCH_NO_CUDA_MEMORY_CACHING": _SWITCH,
    "NVIDIA_TF32_OVERRIDE": _SWITCH,
    "OMP_NUM_THREADS": r"\d{1,4}",
    "MKL_NUM_THREADS": r"\d{1,4}",
    "TOKENIZERS_PARALLELISM": _SWITCH,
    "HF_HUB_OFFLINE": _SWITCH,
    "TRANSFORMERS_OFFLINE": _SWITCH,
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": _SWITCH,
    "HF_ENDPOINT": None,
    "HF_HOME": None,
    "HF_HUB_CACHE": None,
    "HF_TOKEN_PATH": None,
    "FORETUNE_CACHE": None,
    "XDG_CACHE_HOME": None,
    "LD_LIBRARY_PATH": None,
    "LD_PRELOAD": None,
    "PYTHONPATH": None,
}
"""The names that are looked at, and which of their values are shown (None: none; it is said that they are set)."""
_ADVICE = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "Without the caching allocator no estimate of reserved memory holds.",
    "CUDA_LAUNCH_BLOCKING": "Kernels wait for each other: runs are slower than they need to be.",
    "LD_PRELOAD": "Another malloc makes the memory of a run on the CPU another than predicted.",
}


def environment_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Name the variables that are set; those with something to be known about them have a finding of their own."""
    plain = []
    for name, allowed in SHOWN.items():
        value = environment.get(name)
        if not value:
            continue
        is_shown = allowed is not None and re.fullmatch(allowed, value) is not None
        text = f"{name}={value}" if is_shown else f"{name} is set (not shown)"
        advice = _advice(name, value)
        if advice is None:
            plain.append(text)
        else:
            yield Finding(check=f"environment.{name}", group="Environment", state="problem", found=text, advice=advice)
    found = "; ".join(plain) or "none of the variables that change a run is set"
    yield Finding(check="environment", group="Environment", state="ok", found=found)


def _advice(name: str, value: str) -> str | None:
    if name.endswith("ALLOC_CONF"):
        if "cudaMallocAsync" in value:
            return "Estimates are of torch's own caching allocator (backend:native), not of cudaMallocAsync."
        return None
    is_on = value.lower() not in ("0", "false", "off", "no")
    return _ADVICE.get(name) if is_on else None
