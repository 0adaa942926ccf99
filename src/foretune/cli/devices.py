"""`foretune devices`: the GPUs that are known, and those of this machine."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from foretune.cli.commands import Command, Example, Group, LazyCommand, completes, option
from foretune.cli.output import Reply
from foretune.cli.terminal import Heading, Terminal, escape, table, wrapped
from foretune.units import format_bytes

if TYPE_CHECKING:
    from foretune.devices import Detection, DeviceSpec

__all__ = ["detect_command", "devices", "list_command", "show_command"]

devices = Group(
    name="devices",
    help="The GPUs that are known, and those of this machine.",
    lazy={
        "list": LazyCommand(__name__, "list_command", "List the catalogue."),
        "show": LazyCommand(__name__, "show_command", "Show one card of the catalogue."),
        "detect": LazyCommand(__name__, "detect_command", "Look at this machine's GPUs."),
    },
    examples=[
        Example("How much memory does the driver report on an L4?", "foretune devices show l4"),
        Example("What is in this machine, and what is free?", "foretune devices detect"),
    ],
)


@click.command(
    cls=Command,
    name="list",
    examples=[
        Example("Everything", "foretune devices list"),
        Example("Names that hold a text", "foretune devices list --search rtx"),
    ],
)
@option("--search", group="Choice", metavar="TEXT", help="Only names that hold this text, in any case.")
def list_command(search: str | None) -> Reply:
    """List the devices of the catalogue, with the memory that their driver reports."""
    from foretune.devices import list_devices

    found = [device for device in list_devices() if search is None or search.lower() in device.name.lower()]
    return Reply(
        "devices.list",
        lambda: {"devices": [device.to_dict() for device in found]},
        lambda terminal: _draw_list(found, terminal),
        notes=() if found else (f"No device of the catalogue holds {escape(search or '')!r}.",),
    )


def _draw_list(found: "Sequence[DeviceSpec]", terminal: Terminal) -> list[str]:
    if not found:
        return []
    headings = (Heading("device"), Heading("memory", True), Heading("is"), Heading("compute"), Heading("bf16"))
    rows = [
        (
            escape(device.name),
            format_bytes(device.total_bytes),
            device.total_is,
            device.compute_capability or "",
            _yes_no(device.has_bf16),
        )
        for device in found
    ]
    return table(headings, rows, terminal)


def _yes_no(value: bool | None) -> str:
    return "?" if value is None else "yes" if value else "no"


def _names() -> Sequence[str]:
    from foretune.devices import list_devices

    return [device.name for device in list_devices()]


@click.command(
    cls=Command,
    name="show",
    examples=[
        Example("A card by the name one says", "foretune devices show 4090"),
        Example("One of several sizes", "foretune devices show 'a100 80gb' --json"),
    ],
)
@click.argument("name", metavar="NAME", nargs=-1, required=True, shell_complete=completes(_names))
def show_command(name: Sequence[str]) -> Reply:
    """Show a card of the catalogue: memory, abilities, rates."""
    from foretune.devices import find_device

    device = find_device(" ".join(name))
    return Reply("devices.show", device.to_dict, lambda terminal: _draw_device(device, terminal))


def _draw_device(device: "DeviceSpec", terminal: Terminal) -> Iterator[str]:
    yield terminal.paint(escape(device.name), "bold")
    for name, value in _facts(device):
        yield from wrapped(f"{name:<19}{value}", terminal, indent="  ")
    for holder in device.holders:
        size = "unknown" if holder.used_bytes is None else format_bytes(holder.used_bytes)
        name = escape(holder.name or "a process")
        yield from wrapped(f"held by {name} (pid {holder.pid}): {size}", terminal, indent="  ")
    for note in device.notes:
        yield from wrapped(escape(note), terminal, indent="  ", bullet="- ")


def _facts(device: "DeviceSpec") -> list[tuple[str, str]]:
    """Return what is known, in words; the unknown is left out."""
    kinds = {"reported": "as the driver reports it", "marketing": "as on the box", "given": "as you say"}
    rate, flops = device.bandwidth_bytes_per_second, device.fp16_flops
    facts: list[tuple[str, str | None]] = [
        ("memory", f"{format_bytes(device.total_bytes)}, {kinds[device.total_is]}"),
        ("free now", None if device.free_bytes is None else format_bytes(device.free_bytes)),
        ("shared with the CPU", "yes" if device.is_unified else None),
        ("vendor", device.vendor),
        ("architecture", device.architecture),
        ("compute capability", device.compute_capability),
        ("bf16", None if device.has_bf16 is None else _yes_no(device.has_bf16)),
        ("fp8", None if device.has_fp8 is None else _yes_no(device.has_fp8)),
        ("bandwidth", None if rate is None else f"{rate / 1e9:,.0f} GB/s"),
        ("fp16 rate", None if flops is None else f"{flops / 1e12:,.0f} TFLOPS, dense"),
        ("platform", device.platform),
    ]
    return [(name, value) for name, value in facts if value is not None]


@click.command(
    cls=Command,
    name="detect",
    examples=[
        Example("What would a CUDA program see here?", "foretune devices detect"),
        Example("For a script: .devices[0].free_bytes", "foretune devices detect --json"),
    ],
)
def detect_command() -> Reply:
    """Ask the NVIDIA driver what a CUDA program started here would see: memory, what is free, who holds it.

    A machine without a GPU is an answer, not a failure: the reason is given and the exit code is 0.
    """
    from foretune.devices import detect_devices

    detection = detect_devices()
    return Reply("devices.detect", lambda: _document(detection), lambda terminal: _draw_detection(detection, terminal))


def _document(detection: "Detection") -> dict[str, Any]:
    return {**detection._asdict(), "devices": [device.to_dict() for device in detection.devices]}


def _draw_detection(detection: "Detection", terminal: Terminal) -> Iterator[str]:
    if detection.reason is not None:
        yield from wrapped(f"No GPU: {escape(detection.reason)}.", terminal)
    for device in detection.devices:
        yield from _draw_device(device, terminal)
    if detection.driver_version is not None:
        yield f"driver {escape(detection.driver_version)}"
    for note in detection.notes:
        yield from wrapped(escape(note), terminal, bullet="- ")
