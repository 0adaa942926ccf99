"""GPUs as their driver describes them, and whether the installed torch can use them."""

from collections.abc import Iterator

from foretune.devices import Detection, DeviceSpec, MemoryHolder
from foretune.machine.privacy import Private
from foretune.machine.report import Figure, Finding
from foretune.machine.software import TorchBuild
from foretune.units import format_bytes

__all__ = ["gpu_findings", "torch_findings"]

MIN_DRIVER = {11: 450, 12: 525, 13: 580}
"""The oldest driver for each major version of CUDA (NVIDIA: CUDA Compatibility, minor version compatibility)."""
CUDA_13_LEAST, CUDA_128_LEAST = (7, 5), (7, 0)
"""Compute capabilities below have no code in torch's wheels: CUDA 13 left out Maxwell, Pascal and Volta, and the wheels
for 12.8 and 12.9 Maxwell and Pascal (pytorch/pytorch issues 190385, 157517)."""
BLACKWELL, BLACKWELL_CUDA = (10, 0), (12, 8)
"""From this compute capability on CUDA 12.8 is the oldest with code for it (same matrix)."""
INDEX = "https://download.pytorch.org/whl"
MOST_HOLDERS = 5
WITHOUT = (
    "Estimates, recommendations and traces need none. A small model trains on the CPU in fp32 (device: cpu); for more, "
    "rent a card: `foretune recommend --devices all` says which carries the fine-tune."
)


def gpu_findings(
    detection: Detection, has_card: bool | None, private: Private, *, restricts: bool
) -> Iterator[Finding]:
    """Say which cards answer; the first is the one that a run uses.

    `has_card`: whether the bus has an NVIDIA card, driver or not. `restricts`: CUDA_VISIBLE_DEVICES is set.
    """
    if not detection.devices:
        yield _no_gpu(detection.reason or "no device answers", has_card, private, restricts=restricts)
        return
    for index, device in enumerate(detection.devices):
        yield _card(index, detection, private, restricts=restricts)
        yield from _abilities(index, device)


def _no_gpu(reason: str, has_card: bool | None, private: Private, *, restricts: bool) -> Finding:
    """Say why there is no GPU, and what is to be done where there should be one."""
    text = reason.lower()
    found, state = f"no GPU that CUDA can use: {private.foreign(reason)}", "missing"
    run: tuple[str, ...] = ()
    if "mismatch" in text:
        state, advice = "problem", "The driver was updated and its older kernel module still runs: restart the machine."
        run = ("sudo reboot",)
    elif "not installed" in text:
        state, advice = "unknown", "Without the package nvidia-ml-py no driver is asked."
        run = ("pip install nvidia-ml-py",)
    elif restricts and "driver answers" not in text:
        state, advice = "problem", "CUDA_VISIBLE_DEVICES hides every card."
        run = ("unset CUDA_VISIBLE_DEVICES",)
    elif has_card:
        state, run = "problem", ("nvidia-smi",)
        advice = (
            "There is an NVIDIA card, and no driver answers: install your system's driver; in a container, start that "
            "with `--gpus all`."
        )
    else:
        advice = WITHOUT
    return Finding.create(
        check="gpu", group="GPU", state=state, found=found, advice=advice, run=run, needed_for="training on a GPU"
    )


def _card(index: int, detection: Detection, private: Private, *, restricts: bool) -> Finding:
    device = detection.devices[index]
    driver = detection.driver_version
    facts = [
        f"cuda:{index} {private.foreign(device.name)}",
        f"driver {private.foreign(driver)}" if driver else "driver not told",
        f"compute capability {device.compute_capability or 'not told'}",
        f"bf16 {'not told' if device.has_bf16 is None else 'yes' if device.has_bf16 else 'no'}",
        _memory(device),
        *_holders(device.holders, private),
    ]
    figures = [Figure(name="total_bytes", value=device.total_bytes)]
    if device.free_bytes is not None:
        figures.append(Figure(name="free_bytes", value=device.free_bytes))
    busy = device.free_bytes is not None and 2 * device.free_bytes < device.total_bytes
    advice, run = _freer(index, detection, restricts=restricts) if busy else (None, ())
    return Finding(
        check=f"gpu.{index}",
        group="GPU",
        state="problem" if busy else "ok",
        found="; ".join(facts),
        advice=advice,
        run=run,
        needed_for="training on a GPU" if index == 0 else None,
        figures=tuple(figures),
    )


def _memory(device: DeviceSpec) -> str:
    total = format_bytes(device.total_bytes)
    return (
        f"{total}, free not told" if device.free_bytes is None else f"{format_bytes(device.free_bytes)} of {total} free"
    )


def _holders(holders: tuple[MemoryHolder, ...], private: Private) -> Iterator[str]:
    """Name the processes that hold memory: number, name and size, nothing else."""
    if not holders:
        return
    told = [
        f"{private.foreign(holder.name or 'a process')} (pid {holder.pid}"
        f"{'' if holder.used_bytes is None else f', {format_bytes(holder.used_bytes)}'})"
        for holder in holders[:MOST_HOLDERS]
    ]
    more = len(holders) - MOST_HOLDERS
    yield f"held by {', '.join(told)}{f' and {more} more' if more > 0 else ''}"


def _freer(index: int, detection: Detection, *, restricts: bool) -> tuple[str, tuple[str, ...]]:
    """Say what to do about a card of which less than half is free."""
    other = max(range(len(detection.devices)), key=lambda number: detection.devices[number].free_bytes or 0)
    if other == index:
        return "Less than half of it is free: end what holds it, or plan with what is free (--detect does).", ()
    advice = f"Less than half of it is free; cuda:{other} has more."
    if restricts or index:
        return f"{advice} A run uses the first one that CUDA_VISIBLE_DEVICES names.", ()
    order = f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={other}"
    return f"{advice} A run uses the first card that it sees.", (f"export {order}",)


def _abilities(index: int, device: DeviceSpec) -> Iterator[Finding]:
    """Say what a card lacks that a setting may ask for, and what else is to be known."""
    if device.has_bf16 is False:
        yield Finding(
            check=f"gpu.{index}.bf16",
            group="GPU",
            state="missing",
            found=f"bf16 on cuda:{index} (it begins with compute capability 8.0)",
            advice="Use fp16 for lora and qlora, or fp32: --dtype fp16.",
            needed_for="some settings",
        )
    for number, note in enumerate(device.notes):
        yield Finding(check=f"gpu.{index}.note.{number}", group="GPU", state="ok", found=f"cuda:{index}: {note}")


# -- torch


def torch_findings(build: TorchBuild | None, detection: Detection) -> Iterator[Finding]:
    """Say whether torch was built for the first card and its driver. Without torch there is nothing to say."""
    if build is None:
        return
    what = "ROCm (AMD)" if build.is_rocm else "the CPU alone" if build.cuda is None else f"CUDA {build.cuda}"
    found = f"torch {build.version} is built for {what}"
    if not detection.devices:
        advice = None if build.is_cpu else "Without a GPU it runs on the CPU all the same."
        yield Finding(check="torch.build", group="GPU", state="ok", found=found, advice=advice)
        return
    device, driver = detection.devices[0], _major(detection.driver_version)
    why = _unfit(build, device, driver)
    if why is None:
        yield Finding(check="torch.build", group="GPU", state="ok", found=f"{found}, which fits cuda:0 and its driver")
        return
    wheel = _wheel(device, driver)
    yield Finding(
        check="torch.build",
        group="GPU",
        state="problem",
        found=f"{found}; {why}",
        advice="Install the build for this card." if wheel else "Update the NVIDIA driver first, then look again.",
        run=(f"pip install --force-reinstall torch=={_public(build.version)} --index-url {INDEX}/{wheel}",)
        if wheel
        else (),
        needed_for="training on a GPU",
    )


def _unfit(build: TorchBuild, device: DeviceSpec, driver: int | None) -> str | None:
    """Say why a build cannot use a card; None where it can, as far as is known."""
    if build.is_rocm:
        return "this machine has an NVIDIA GPU"
    if build.cuda is None:
        return "this machine has an NVIDIA GPU, which it cannot use"
    cuda = _pair(build.cuda)
    least = MIN_DRIVER.get(cuda[0])
    if driver is not None and least is not None and driver < least:
        return f"CUDA {cuda[0]} needs driver {least} or later, and this one is {driver}"
    capability = _pair(device.compute_capability or "")
    if capability == (0, 0):
        return None
    floor = CUDA_13_LEAST if cuda >= (13, 0) else CUDA_128_LEAST if cuda >= (12, 8) else (0, 0)
    if capability < floor:
        return f"it has no code for compute capability {device.compute_capability}"
    if capability >= BLACKWELL and cuda < BLACKWELL_CUDA:
        return f"it has no code for compute capability {device.compute_capability}, which needs CUDA 12.8"
    return None


def _wheel(device: DeviceSpec, driver: int | None) -> str | None:
    """Choose the wheel of torch for a card and its driver; None where the driver is too old for any that is tested."""
    capability = _pair(device.compute_capability or "")
    if (driver is None or driver >= MIN_DRIVER[13]) and (capability >= CUDA_13_LEAST or capability == (0, 0)):
        return "cu130"
    if (driver is None or driver >= MIN_DRIVER[12]) and capability < BLACKWELL:
        return "cu126"
    return None


def _public(version: str) -> str:
    return version.partition("+")[0]


def _pair(text: str) -> tuple[int, int]:
    """Read `12.8` as (12, 8); (0, 0) where it is no version."""
    parts = text.split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) >= 2 and all(part.isdecimal() for part in parts[:2]) else (0, 0)


def _major(version: str | None) -> int | None:
    head = (version or "").partition(".")[0]
    return int(head) if head.isdecimal() else None
