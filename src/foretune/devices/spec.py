"""A device's capacity and abilities."""

from typing import Annotated, Literal

from msgspec import Meta

from foretune.values import Value

__all__ = ["DeviceSpec", "MemoryHolder"]

Bytes = Annotated[int, Meta(ge=0, lt=1 << 62)]


class MemoryHolder(Value, frozen=True, kw_only=True):
    """A process that holds memory of a device."""

    pid: int
    name: str | None = None
    used_bytes: Bytes | None = None


class DeviceSpec(Value, frozen=True, kw_only=True):
    """One accelerator, from the catalogue, from detection, or described by its size alone; or a host's memory, for runs
    on its CPU. None: not known."""

    name: str
    total_bytes: Bytes
    """As the driver reports it, not the marketing size."""
    total_is: Literal["reported", "marketing", "given"]
    """`reported`: read from a driver (this machine's or a published reading). `marketing`: GB on the box, so up to
    7 % may be missing. `given`: the user's figure."""
    free_bytes: Bytes | None = None
    """Free now; None: not asked or not known."""
    vendor: Literal["NVIDIA", "AMD", "Intel", "Apple"] | None = None
    compute_capability: str | None = None
    """NVIDIA's, for example `8.9`."""
    multiprocessors: Annotated[int, Meta(ge=1, lt=1 << 16)] | None = None
    """Streaming multiprocessors; decides the workspaces of long sums."""
    architecture: str | None = None
    has_bf16: bool | None = None
    """bfloat16 in hardware (compute capability 8.0 and later)."""
    has_fp8: bool | None = None
    is_unified: bool = False
    """CPU and GPU share this memory: its size is not a budget for the GPU alone."""
    bandwidth_bytes_per_second: Bytes | None = None
    fp16_flops: Bytes | None = None
    """Dense tensor rate with fp32 accumulation, operations per second."""
    platform: Literal["linux", "windows", "wsl"] | None = None
    """Where it was detected; decides which attention kernels torch's wheels have."""
    holders: tuple[MemoryHolder, ...] = ()
    """Who holds its memory now, largest first."""
    notes: tuple[str, ...] = ()
