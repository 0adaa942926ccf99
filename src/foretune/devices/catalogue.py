"""Known devices by name: sizes as drivers report them where such a reading is known, else as on the box.

`catalogue.json` is our own selection of published facts; each row names its sources. A name is matched by its words:
brands and form factors may be left out, words that make another card (`Ti`, `Laptop`) may not.
"""

import os
import re
from collections.abc import Iterable
from functools import cache
from typing import Literal, TypeVar

import msgspec

from foretune.devices.spec import DeviceSpec
from foretune.errors import ConfigError
from foretune.units import GIB, MIB, format_bytes
from foretune.values import Value

__all__ = ["CatalogueEntry", "device_from_memory", "find_device", "list_devices", "with_free"]

T = TypeVar("T")

MARKETING_NOTE = "size as on the box; up to 7 % less may be there"
UNCHECKED = "vendor figure, not checked"
LONGEST_NAME = 120

# Words that say nothing about which card it is.
_FILLERS = frozenset(
    ("nvidia", "amd", "intel", "apple", "geforce", "tesla", "gpu", "graphics", "card", "generation", "hbm2", "hbm3")
)
# Words of a catalogue name that a request may leave out.
_OPTIONAL = frozenset(
    ("rtx", "gtx", "quadro", "radeon", "instinct", "rx", "arc", "pcie", "sxm", "nvl", "ada", "blackwell", "hgx")
)
_SIZE = r"(?<![a-z0-9.])(\d{1,4}) ?(?:gb|gib)\b"


class CatalogueEntry(Value, frozen=True, kw_only=True):
    """A row of `catalogue.json`: sizes and rates in the units in which they are published."""

    name: str
    vendor: Literal["NVIDIA", "AMD", "Intel", "Apple"]
    segment: str
    architecture: str
    compute_capability: str | None = None
    multiprocessors: int | None = None
    marketing_gb: int | float
    reported_mib: int | None = None
    """Total memory in a published nvidia-smi output."""
    bandwidth_gb_s: int | float | None = None
    fp16_tflops: int | float | None = None
    has_bf16: bool | None = None
    has_fp8: bool | None = None
    is_unified: bool = False
    sources: tuple[str, ...]
    notes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """The reported size, else the marketing size with GB read as GiB (which is how memory chips are made)."""
        return self.reported_mib * MIB if self.reported_mib is not None else int(self.marketing_gb * GIB)

    def spec(self) -> DeviceSpec:
        """Return the device in our units, with what there is to say about the figures."""
        notes = list(self.notes)
        if self.reported_mib is None and not self.is_unified:
            notes.append(MARKETING_NOTE)
        if UNCHECKED in self.sources:
            notes.append("bandwidth and rate not checked against the vendor's page")
        return DeviceSpec(
            name=self.name,
            total_bytes=self.total_bytes,
            total_is="marketing" if self.reported_mib is None else "reported",
            vendor=self.vendor,
            compute_capability=self.compute_capability,
            multiprocessors=self.multiprocessors,
            architecture=self.architecture,
            has_bf16=self.has_bf16,
            has_fp8=self.has_fp8,
            is_unified=self.is_unified,
            bandwidth_bytes_per_second=None if self.bandwidth_gb_s is None else round(self.bandwidth_gb_s * 10**9),
            fp16_flops=None if self.fp16_tflops is None else round(self.fp16_tflops * 10**12),
            notes=tuple(notes),
        )


@cache
def entries() -> tuple[CatalogueEntry, ...]:
    """Read the catalogue."""
    path = os.path.join(os.path.dirname(__file__), "catalogue.json")  # noqa: PTH118, PTH120 (pathlib costs 3 ms)
    with open(path, "rb") as file:  # noqa: PTH123
        return msgspec.json.decode(file.read(), type=tuple[CatalogueEntry, ...])


def list_devices() -> tuple[DeviceSpec, ...]:
    """Return every device of the catalogue.

    [device.name for device in list_devices() if device.total_bytes >= 80 << 30]
    """
    return tuple(entry.spec() for entry in entries())


def multiprocessors_like(compute_capability: str | None, total_bytes: int) -> int | None:
    """Return the multiprocessors of the card of this compute capability whose memory is nearest; None for none."""
    alike = [
        entry
        for entry in entries()
        if entry.compute_capability == compute_capability is not None and entry.multiprocessors is not None
    ]
    nearest = min(alike, key=lambda entry: abs(entry.total_bytes - total_bytes), default=None)
    return None if nearest is None else nearest.multiprocessors


def find_device(name: str) -> DeviceSpec:
    """Return the device that a name means: `4090`, `rtx4090`, `a100 80gb`, `t4`, `NVIDIA L4`.

    Cards of one name and one size (A100 80 GB SXM and PCIe) are one answer; what differs between them is left
    unknown. Raises ConfigError for a name that several sizes share (it lists them) and for an unknown one (it lists
    near ones).

    >>> find_device("rtx 3090").total_bytes
    25769803776
    """
    found = matching_entries(name)
    if not found:
        raise _unknown(name)
    if len({entry.marketing_gb for entry in found}) > 1:
        listed = "; ".join(f"{entry.name} ({format_bytes(entry.total_bytes)})" for entry in found[:8])
        raise ConfigError(
            f"{_echo(name)} may be any of {len(found)} devices: {listed}.",
            hint=f"Name the size as well: '{name} {found[0].marketing_gb}GB'.",
        )
    return found[0].spec() if len(found) == 1 else _merge(found)


def matching_entries(name: str) -> list[CatalogueEntry]:
    """Return the entries that a name can mean: the one spelled exactly so, else all whose words it leaves open."""
    words, size_gb = _request(name)
    if not words:
        return []
    fitting = [entry for entry in entries() if _fits(entry, words, size_gb)]
    spelled = _words(name)
    exact = [entry for entry in fitting if any(_words(text) == spelled for text in _names(entry))]
    if len(exact) == 1 and not _has_sizes(exact[0], fitting):
        return exact
    return fitting


def _has_sizes(exact: CatalogueEntry, fitting: list[CatalogueEntry]) -> bool:
    """Whether another of them has this very name and another size (RTX 3080 with 10 and 12 GB)."""
    core = _core(exact)
    return any(_core(entry) == core and entry.marketing_gb != exact.marketing_gb for entry in fitting)


def _names(entry: CatalogueEntry) -> tuple[str, ...]:
    return (entry.name, *entry.aliases)


def _fits(entry: CatalogueEntry, words: list[str], size_gb: float | None) -> bool:
    if size_gb is not None and not _is_size(entry, size_gb):
        return False
    return any(_covers(_core_words(text), words) for text in _names(entry))


def _is_size(entry: CatalogueEntry, size_gb: float) -> bool:
    """Whether somebody may call it that size: the GB on the box, or the reported GiB rounded down or up."""
    reported_gib = entry.total_bytes / GIB
    return size_gb == entry.marketing_gb or size_gb in (int(reported_gib), round(reported_gib))


def _covers(candidate: list[str], words: list[str]) -> bool:
    """Whether the request has only words of the candidate, and leaves out none that makes another card."""
    left = list(candidate)
    for word in words:
        if word not in left:
            return False
        left.remove(word)
    is_specific = any(character.isdigit() for word in words for character in word) or not left
    return is_specific and all(word in _OPTIONAL for word in left)


def _request(name: str) -> tuple[list[str], float | None]:
    """Split a request into its words and the size it names, if it does."""
    size = re.search(_SIZE, name.lower()[:LONGEST_NAME])
    return _core_words(name), float(size[1]) if size else None


def _core(entry: CatalogueEntry) -> list[str]:
    return [word for word in _core_words(entry.name) if word not in _OPTIONAL]


@cache
def _core_words_of(text: str) -> tuple[str, ...]:
    lowered = re.sub(r"\([^)]*core\)", " ", text.lower()[:LONGEST_NAME])
    return tuple(_words(re.sub(_SIZE, " ", lowered)))


def _core_words(text: str) -> list[str]:
    return list(_core_words_of(text))


def _words(text: str) -> list[str]:
    """Split into words of letters and digits without fillers: `GeForce RTX4090 Laptop GPU` is rtx, 4090, mobile."""
    lowered = text.lower()[:LONGEST_NAME].replace("max-q", "maxq").replace("tisuper", "ti super")
    lowered = re.sub(r"\b(laptop|notebook)\b", "mobile", lowered)
    lowered = re.sub(r"(\d)(ti|super|xtx|xt|gre)\b", r"\1 \2", lowered)
    lowered = re.sub(r"\b(rtx|gtx|rx|quadro|tesla|geforce)(?=[a-z]?\d)", r"\1 ", lowered)
    lowered = re.sub(r"\bsxm\d\b", "sxm", lowered)
    return [word for word in re.findall(r"[a-z0-9]+", lowered) if word not in _FILLERS]


def _merge(found: list[CatalogueEntry]) -> DeviceSpec:
    """Make one device of entries of one size; a figure in which they differ is left unknown."""
    first = next((entry for entry in found if entry.reported_mib is not None), found[0])
    smallest = min((entry for entry in found if entry.reported_mib is not None), key=_total, default=first)
    shared = [word for word in first.name.split() if all(word in entry.name.split() for entry in found)]
    specs = [entry.spec() for entry in found]
    note = f"one of {', '.join(entry.name for entry in found)}; what differs between them is left unknown"
    return DeviceSpec(
        name=" ".join(shared),
        total_bytes=smallest.total_bytes,
        total_is="marketing" if smallest.reported_mib is None else "reported",
        vendor=first.vendor,
        compute_capability=_agreed(spec.compute_capability for spec in specs),
        multiprocessors=_agreed(spec.multiprocessors for spec in specs),
        architecture=_agreed(spec.architecture for spec in specs),
        has_bf16=_agreed(spec.has_bf16 for spec in specs),
        has_fp8=_agreed(spec.has_fp8 for spec in specs),
        is_unified=any(spec.is_unified for spec in specs),
        bandwidth_bytes_per_second=_agreed(spec.bandwidth_bytes_per_second for spec in specs),
        fp16_flops=_agreed(spec.fp16_flops for spec in specs),
        notes=(*smallest.spec().notes, note),
    )


def _total(entry: CatalogueEntry) -> int:
    return entry.total_bytes


def _agreed(values: Iterable[T]) -> T | None:
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def _echo(name: str) -> str:
    shown = repr(name[:80])
    return shown if len(name) <= 80 else f"{shown[:-1]}...'"


def _unknown(name: str) -> ConfigError:
    words, _ = _request(name)
    other_sizes = [entry for entry in entries() if words and _fits(entry, words, None)]
    if other_sizes:
        listed = ", ".join(f"{entry.name} ({format_bytes(entry.total_bytes)})" for entry in other_sizes[:8])
        message = f"{_echo(name)} names a size that the catalogue does not have; it has {listed}."
        return ConfigError(message, hint="For a modified card give the memory itself: --vram 48.")
    near = _near_names(name)
    hint = f"Did you mean {', '.join(near)}?" if near else "`foretune devices list` shows all."
    return ConfigError(
        f"{_echo(name)} is no device of the catalogue.", hint=f"{hint} A plan may name its memory instead: --vram 24."
    )


def _near_names(name: str) -> list[str]:
    """Return up to five names with a model number of the request, else those spelled alike."""
    from difflib import get_close_matches

    words = _core_words(name)
    numbers = {word for word in words if any(character.isdigit() for character in word)}
    same = [entry.name for entry in entries() if numbers & set(_core_words(entry.name))]
    by_words = {" ".join(_words(entry.name)): entry.name for entry in entries()}
    alike = [by_words[text] for text in get_close_matches(" ".join(words), list(by_words), n=5, cutoff=0.5)]
    return list(dict.fromkeys([*same, *alike]))[:5]


def device_from_memory(total_bytes: int, free_bytes: int | None = None) -> DeviceSpec:
    """Describe a device by its size alone (`--vram`, `--free`). Raises ConfigError where free exceeds total.

    >>> device_from_memory(24 << 30, 20 << 30).free_bytes
    21474836480
    """
    if not 0 < total_bytes <= 1 << 60:
        raise ConfigError(f"{total_bytes} bytes is no size of a device.", hint="Give a size above 0: --vram 24.")
    spec = DeviceSpec(name=f"a device of {format_bytes(total_bytes)}", total_bytes=total_bytes, total_is="given")
    return with_free(spec, free_bytes)


def with_free(device: DeviceSpec, free_bytes: int | None) -> DeviceSpec:
    """Return the device with so much of it free (`--free`). Raises ConfigError where that exceeds its total."""
    if free_bytes is None:
        return device
    if not 0 <= free_bytes <= device.total_bytes:
        total = format_bytes(device.total_bytes)
        raise ConfigError(
            f"{format_bytes(free_bytes)} are said to be free, but {device.name} has {total}.",
            hint="--free lies between 0 and the device's memory.",
        )
    return device.with_(free_bytes=free_bytes)
