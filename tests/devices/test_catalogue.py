"""The catalogue is consistent, and a name finds the one card it means or an answer that helps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretune.devices import device_from_memory, find_device, list_devices, with_free
from foretune.devices.catalogue import CatalogueEntry, entries
from foretune.errors import ConfigError
from foretune.units import GIB, MIB

NVIDIA = [entry for entry in entries() if entry.vendor == "NVIDIA"]

# Compute capability and architecture: developer.nvidia.com/cuda-gpus.
CAPABILITIES = {
    "Pascal": {"6.0", "6.1"},
    "Volta": {"7.0"},
    "Turing": {"7.5"},
    "Ampere": {"8.0", "8.6"},
    "Ada Lovelace": {"8.9"},
    "Hopper": {"9.0"},
    "Blackwell": {"10.0"},
    "Blackwell Ultra": {"10.3"},
    "Blackwell 2.0": {"12.0", "12.1"},
}


def test_all_entries_are_there_once() -> None:
    assert len(entries()) == 156
    assert len({entry.name for entry in entries()}) == 156
    assert all(entry.sources for entry in entries())


@pytest.mark.parametrize("entry", [entry for entry in entries() if entry.reported_mib], ids=lambda entry: entry.name)
def test_the_reported_size_is_near_the_marketing_size(entry: CatalogueEntry) -> None:
    assert entry.reported_mib is not None
    # B200: 180 GB on the box, 183 359 MiB shown; INTERFACE.md section 4 gives both.
    assert 0.93 <= entry.reported_mib / (entry.marketing_gb * 1024) <= 1.01


def test_half_of_the_nvidia_cards_have_a_reported_size() -> None:
    assert sum(entry.reported_mib is not None for entry in NVIDIA) == 50


def test_the_compute_capability_fits_the_architecture() -> None:
    assert all(entry.compute_capability in CAPABILITIES[entry.architecture] for entry in NVIDIA)
    assert all(entry.compute_capability is None for entry in entries() if entry.vendor != "NVIDIA")


def test_nvidia_cards_have_bf16_from_8_0_and_fp8_from_8_9() -> None:
    for entry in NVIDIA:
        capability = tuple(map(int, str(entry.compute_capability).split(".")))
        assert entry.has_bf16 is (capability >= (8, 0)), entry.name
        assert entry.has_fp8 is (capability >= (8, 9)), entry.name


def test_only_reported_sizes_are_called_reported() -> None:
    for entry, spec in zip(entries(), list_devices(), strict=True):
        assert spec.total_is == ("marketing" if entry.reported_mib is None else "reported")
        assert spec.total_bytes > 0
        says_so = any("7 % less" in note for note in spec.notes)
        assert says_so is (entry.reported_mib is None and not entry.is_unified), entry.name


def test_figures_that_nobody_checked_say_so() -> None:
    for entry, spec in zip(entries(), list_devices(), strict=True):
        unchecked = any("not checked" in source for source in entry.sources)
        assert any("not checked" in note for note in spec.notes) is unchecked


# Totals that nvidia-smi shows: INTERFACE.md, section 4.
@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("4090", 24564), ("rtx4090", 24564), ("RTX 4090", 24564), ("NVIDIA GeForce RTX 4090", 24564),
        ("rtx-4090", 24564), ("RTX 3090", 24576), ("a30", 24576), ("titan rtx", 24576), ("l4", 23034),
        ("NVIDIA L4", 23034),
        ("a10", 23028), ("A10G", 23028), ("t4", 15360), ("Tesla T4", 15360), ("tesla t4 16gb", 15360),
        ("a100 80gb", 81920), ("NVIDIA A100-SXM4-80GB", 81920), ("a100 40 GB", 40960), ("A100-PCIE-40GB", 40960),
        ("h100 80gb", 81559), ("NVIDIA H100 80GB HBM3", 81559), ("H100 SXM", 81559), ("h100 nvl", 95830),
        ("h200", 143771), ("b200", 183359), ("b300", 275040), ("gh200", 97871), ("h20", 97871),
        ("rtx pro 6000", 97887), ("5090", 32607), ("rtx 5080", 16303), ("5070ti", 16303), ("5070", 12227),
        ("a40", 46068), ("l40s", 46068), ("a6000", 49140), ("rtx 6000 ada", 49140), ("4090 laptop", 16376),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376), ("4060 ti 16gb", 16380), ("2080 Ti", 11264),
        ("3080 12gb", 12288), ("3080 10GB", 10240), ("v100 32gb sxm2", 32768), ("4070 ti super", 16384),
    ],
)  # fmt: skip
def test_a_name_finds_its_card(name: str, mib: int) -> None:
    assert find_device(name).total_bytes == mib * MIB


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_every_full_name_finds_its_own_size(entry: CatalogueEntry) -> None:
    name = entry.name if "GB" in entry.name else f"{entry.name} {entry.marketing_gb}GB"
    assert find_device(name).total_bytes == entry.total_bytes
    assert find_device(name.upper()).total_bytes == entry.total_bytes


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("3080", "10.00 GiB", "12.00 GiB"),
        ("NVIDIA GeForce RTX 3080", "10.00 GiB", "12.00 GiB"),
        ("a100", "40.00 GiB", "80.00 GiB"),
        ("h100", "79.65 GiB", "93.58 GiB"),
        ("v100", "16.00 GiB", "32.00 GiB"),
        ("4060 ti", "8.00 GiB", "16.00 GiB"),
        ("rtx 6000", "24.00 GiB", "47.99 GiB"),
        ("rtx 5000", "16.00 GiB", "32.00 GiB"),
        ("m3 max", "96.00 GiB", "128.00 GiB"),
    ],
)
def test_a_name_of_several_sizes_is_never_decided_for_the_user(name: str, one: str, other: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_device(name)
    assert one in str(caught.value)
    assert other in str(caught.value)
    assert "Name the size as well" in str(caught.value)


def test_cards_of_one_size_are_one_answer_with_gaps() -> None:
    spec = find_device("a100 80gb")
    assert spec.name == "NVIDIA A100 80 GB"
    assert spec.bandwidth_bytes_per_second is None
    assert spec.compute_capability == "8.0"
    assert any("SXM4" in note and "PCIe" in note for note in spec.notes)


def test_a_bare_name_means_the_desktop_card() -> None:
    assert find_device("4090").name == "NVIDIA GeForce RTX 4090"
    assert find_device("4080").total_bytes == 16376 * MIB


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("4091", "RTX 4090"),
        ("titan", "TITAN RTX"),
        ("a1000", "A100"),
        ("rtx 4090 ti", "RTX 4090"),
        ("gtx 4090", "4090"),
    ],
)
def test_an_unknown_name_is_answered_with_near_ones(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match="is no device of the catalogue") as caught:
        find_device(name)
    assert near in str(caught.value)
    assert "--vram" in str(caught.value)


def test_a_size_that_the_card_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"RTX 5090 \(31.84 GiB\)"):
        find_device("5090 48gb")


@given(st.text(max_size=80))
def test_no_name_raises_anything_but_a_config_error(name: str) -> None:
    message = ""
    try:
        find_device(name)
    except ConfigError as error:
        message = str(error)
    assert message.isprintable()


def test_boards_that_show_as_two_devices_are_described_as_one_of_them() -> None:
    assert find_device("MI250X").total_bytes == 64 * GIB
    assert any("two devices" in note for note in find_device("mi250").notes)


def test_shared_memory_is_marked() -> None:
    assert find_device("dgx spark").is_unified
    assert find_device("m1").is_unified


def test_a_device_is_described_by_its_size_alone() -> None:
    spec = device_from_memory(24 * GIB, 20 * GIB)
    assert (spec.total_is, spec.total_bytes, spec.free_bytes) == ("given", 24 * GIB, 20 * GIB)
    assert spec.has_bf16 is None


def test_more_free_than_total_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"25.00 GiB are said to be free, but a device of 24.00 GiB has 24.00 GiB"):
        device_from_memory(24 * GIB, 25 * GIB)
    with pytest.raises(ConfigError, match="are said to be free"):
        with_free(find_device("t4"), 16 * GIB)
    with pytest.raises(ConfigError):
        device_from_memory(0)


def test_a_catalogue_device_can_be_partly_used() -> None:
    assert with_free(find_device("t4"), 10 * GIB).free_bytes == 10 * GIB
    assert with_free(find_device("t4"), None).free_bytes is None
