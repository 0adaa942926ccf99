"""Detection says what a CUDA program would see, and stays whole when the driver answers in part."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from devices.fake_nvml import NVMLError, card, fake_nvml, process

from foretune.devices import Detection, detect_devices
from foretune.devices import detect as detect_module
from foretune.units import GIB, MIB


@pytest.fixture
def detect(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Detection]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setattr(detect_module, "detect_platform", lambda: "linux")

    def run(nvml: Any, **environment: str) -> Detection:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return detect_devices()

    return run


Detect = Callable[..., Detection]


def test_a_card_is_described_with_what_is_free_and_who_holds_the_rest(detect: Detect) -> None:
    nvml = fake_nvml(
        card(compute=[process(10, 100 * MIB), process(11, 2 * GIB)], graphics=[process(10, 300 * MIB)]),
        names={10: b"/usr/lib/xorg/Xorg", 11: "C:\\tools\\python.exe"},
    )
    found = detect(nvml)
    spec = found.devices[0]
    assert (spec.name, spec.total_bytes, spec.free_bytes) == ("Tesla T4", 15360 * MIB, 15000 * MIB)
    assert (spec.compute_capability, spec.architecture, spec.has_bf16, spec.has_fp8) == ("7.5", "Turing", False, False)
    assert [(holder.pid, holder.name, holder.used_bytes) for holder in spec.holders] == [
        (11, "python.exe", 2 * GIB),
        (10, "Xorg", 300 * MIB),
    ]
    assert spec.bandwidth_bytes_per_second == 320 * 10**9
    assert (found.reason, found.driver_version, spec.platform, spec.total_is) == (None, "580.95", "linux", "reported")
    assert nvml.closed == [True]


def test_no_library_no_driver_and_no_device_are_reasons(detect: Detect) -> None:
    def no_driver() -> None:
        raise NVMLError("Driver Not Loaded\x1b[31m")

    assert "nvidia-ml-py is not installed" in str(detect(None).reason)
    found = detect(fake_nvml(nvmlInit=no_driver))
    assert found.devices == ()
    assert found.reason == r"no NVIDIA driver answers (Driver Not Loaded\x1b[31m)"
    assert detect(fake_nvml()).reason == "the driver reports no device"


def test_a_device_that_answers_in_part_has_gaps(detect: Detect) -> None:
    nvml = fake_nvml(card(name=None, uuid=None, capability=None, compute=None, graphics=None))
    spec = detect(nvml).devices[0]
    assert spec.name == "NVIDIA device 0"
    assert (spec.compute_capability, spec.has_bf16, spec.holders) == (None, None, ())


def test_a_lost_device_does_not_hide_the_others(detect: Detect) -> None:
    found = detect(fake_nvml(card(lost=True), card("NVIDIA L4", capability=(8, 9))))
    assert [spec.name for spec in found.devices] == ["NVIDIA L4"]
    assert "device 0 does not answer" in found.notes[0]


def test_a_device_without_a_size_is_left_out_with_the_reason(detect: Detect) -> None:
    found = detect(fake_nvml(card(memory=None)))
    assert found.devices == ()
    assert found.reason == "Tesla T4: the driver does not report its memory"


def test_shared_memory_is_read_from_the_system(detect: Detect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect_module, "system_memory", lambda: (119 * GIB, 100 * GIB))
    spec = detect(fake_nvml(card("NVIDIA GB10", memory=None, capability=(12, 1)))).devices[0]
    assert (spec.total_bytes, spec.free_bytes, spec.is_unified) == (119 * GIB, 100 * GIB, True)


def test_a_library_that_lacks_a_question_is_no_failure(detect: Detect) -> None:
    nvml = fake_nvml(card())
    del nvml.nvmlDeviceGetMigMode
    del nvml.nvmlDeviceGetGraphicsRunningProcesses
    assert len(detect(nvml).devices) == 1


def test_names_are_escaped_and_short(detect: Detect) -> None:
    nvml = fake_nvml(card("Evil\x1b[2J\u202e" + "x" * 500, compute=[process(4, 1)]), names={4: "a\r\nb" * 100})
    spec = detect(nvml).devices[0]
    assert spec.name.isprintable()
    assert len(spec.name) < 200
    assert spec.holders[0].name is not None
    assert spec.holders[0].name.isprintable()


def test_windows_does_not_tell_how_much_a_process_holds(detect: Detect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect_module, "detect_platform", lambda: "wsl")
    spec = detect(fake_nvml(card(compute=[process(7, None)]), names={7: "python"})).devices[0]
    assert spec.holders[0].used_bytes is None
    assert spec.platform == "wsl"
    assert any("only dedicated memory counts" in note for note in spec.notes)


def test_mig_is_noted(detect: Detect) -> None:
    spec = detect(fake_nvml(card("NVIDIA H100 80GB HBM3", capability=(9, 0), mig=[1, 1]))).devices[0]
    assert any("MIG is on" in note for note in spec.notes)


FIRST, SECOND = card("NVIDIA L4", uuid="GPU-aaaa1111", capability=(8, 9)), card(uuid="GPU-bbbb2222")


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("0", ["NVIDIA L4"]),
        ("1", ["Tesla T4"]),
        ("1,0", ["Tesla T4", "NVIDIA L4"]),
        ("GPU-bbbb2222", ["Tesla T4"]),
        ("gpu-bb", ["Tesla T4"]),
        ("1,9,0", ["Tesla T4"]),
        ("GPU-", []),
        ("", []),
        ("-1", []),
        ("0,0", []),
        ("9", []),
        ("MIG-123", []),
        ("\x1b[31m", []),
    ],
)
def test_the_visible_devices_are_those_of_cuda(detect: Detect, value: str, names: list[str]) -> None:
    found = detect(fake_nvml(FIRST, SECOND), CUDA_VISIBLE_DEVICES=value)
    assert [spec.name for spec in found.devices] == names
    assert any("CUDA_VISIBLE_DEVICES" in note and note.isprintable() for note in found.notes)
    assert (found.reason is None) is bool(names)


def test_a_serial_number_in_the_variable_is_not_repeated(detect: Detect) -> None:
    found = detect(fake_nvml(FIRST, SECOND), CUDA_VISIBLE_DEVICES="GPU-bbbb2222")
    assert "bbbb2222" not in f"{found.notes}{found.reason}"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/usr/bin/python3 /home/me/train.py --token=x", "python3"),
        ("python /home/me/train.py", "python"),
        ("C:\\Program Files\\My App\\app.exe --key x", "app.exe"),
        ("[Insufficient Permissions]", None),
        ("/", None),
    ],
)
def test_of_a_process_only_its_name_is_told(detect: Detect, command: str, name: str | None) -> None:
    holders = detect(fake_nvml(card(compute=[process(4, 1)]), names={4: command})).devices[0].holders
    assert holders[0].name == name


def test_the_order_of_cuda_may_be_another(detect: Detect) -> None:
    found = detect(fake_nvml(FIRST, SECOND), CUDA_VISIBLE_DEVICES="0")
    assert any("PCI_BUS_ID" in note for note in found.notes)
    found = detect(fake_nvml(FIRST, SECOND), CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert not any("PCI_BUS_ID" in note for note in found.notes)


@pytest.mark.parametrize(
    ("version", "platform"),
    [
        ("Linux version 5.15.153.1-microsoft-standard-WSL2", "wsl"),
        ("Linux version 4.4.0-19041-Microsoft", "wsl"),
        ("Linux version 6.8.0-generic (buildd@lcy02)", "linux"),
        ("", "linux"),
    ],
)
def test_wsl_is_told_from_linux(monkeypatch: pytest.MonkeyPatch, version: str, platform: str) -> None:
    monkeypatch.setattr(detect_module.sys, "platform", "linux")
    monkeypatch.setattr(detect_module, "_first_bytes", lambda path: version)
    assert detect_module.detect_platform() == platform


def test_windows_and_macos_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect_module.sys, "platform", "win32")
    assert detect_module.detect_platform() == "windows"
    monkeypatch.setattr(detect_module.sys, "platform", "darwin")
    assert detect_module.detect_platform() is None


def test_the_memory_of_the_system_is_read_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect_module, "_first_bytes", lambda path: "MemTotal:  1024 kB\nMemAvailable:   512 kB\nx\n")
    assert detect_module.system_memory() == (1 << 20, 1 << 19)
    monkeypatch.setattr(detect_module, "_first_bytes", lambda path: "")
    assert detect_module.system_memory() == (None, None)
