"""What lies outside the allocator, and what host and disk must hold."""

from foretune.contract import TrainingConfig
from foretune.devices import DeviceSpec
from foretune.memory.answer import ByteRange, HostNeed
from foretune.models import ModelShape
from foretune.units import GIB, MIB

__all__ = ["context_bytes", "host_need"]

T4_CONTEXT_BYTES = 147_718_144
"""process - reserved on each of 44 published T4 runs, whatever kernels and torch version: 140.875 MiB."""

T4_MULTIPROCESSORS, T4_LEAST_BYTES = 40, 12 * GIB
"""By which a T4 is known among cards of compute capability 7.5: a name decides nothing."""

HOPPER_CONTEXT_BYTES = 787_283_968, 804_061_184
"""Used on the device beside reserved, least and most of thirteen runs on an H200 (torch 2.11, CUDA 13.0): 750.8 to
766.8 MiB, the more with cuDNN's attention."""

ITEM = {"bf16": 2, "fp16": 2, "fp32": 4}


def context_bytes(device: DeviceSpec | None) -> ByteRange:
    """Estimate the CUDA context and loaded kernels: known for a T4 and for Hopper, a stated range elsewhere.

    Source: fitcheck-llm 0.3.1's T4 runs (context_bytes of every row); our own on an H200; elsewhere reports lie
    between 0.3 and 1 GiB (lazy module loading; grows with the number of kernels and of streaming multiprocessors).
    """
    if device is not None and _is_t4(device):
        known = T4_CONTEXT_BYTES
        basis = "measured: the same on 44 published T4 runs"
        return ByteRange(low_bytes=known, likely_bytes=known, high_bytes=known, basis=basis)
    if device is not None and device.compute_capability == "9.0":
        least, most = HOPPER_CONTEXT_BYTES
        basis = "measured on thirteen H200 runs of our own (torch 2.11)"
        return ByteRange(low_bytes=least, likely_bytes=most, high_bytes=most, basis=basis)
    basis = "not measured on this device: published reports lie between 0.3 and 1 GiB"
    return ByteRange(low_bytes=3 * GIB // 10, likely_bytes=GIB // 2, high_bytes=GIB, basis=basis)


def _is_t4(device: DeviceSpec) -> bool:
    is_alike = (device.compute_capability, device.multiprocessors) == ("7.5", T4_MULTIPROCESSORS)
    return is_alike and device.total_bytes > T4_LEAST_BYTES


def host_need(config: TrainingConfig, shape: ModelShape, trainable_params: int) -> HostNeed:
    """Estimate host memory and disk.

    Loading reads one tensor at a time: the largest one twice (file and copy), beside interpreter, libraries and
    driver (3 GiB assumed). Saving copies one tensor at a time back. The artifact is staged beside its place and
    renamed, so it is on disk once. Downloads are 16-bit safetensors.
    """
    item = ITEM[config.precision.dtype]
    largest = max(
        p.num_elements for p in (*shape.before, *shape.after, *(q for k in shape.kinds for q in k.parameters))
    )
    base = 3 * GIB
    trained = ITEM[config.precision.adapter_dtype] if config.lora is not None else item
    artifact = trainable_params * trained + 32 * MIB
    return HostNeed(
        ram_load_bytes=base + 2 * largest * max(item, 2),
        ram_save_bytes=base + 2 * largest * item if config.lora is None else base + artifact,
        download_bytes=shape.total_params * 2,
        artifact_bytes=artifact,
        disk_bytes=artifact + artifact // 20,
    )
