"""`foretune devices`: cards by name, and this machine's."""

import pytest

from foretune import devices
from foretune.devices import Detection, MemoryHolder, device_from_memory, list_devices


def test_list_has_every_device_of_the_catalogue(call) -> None:
    document = call("devices", "list", "--json").document
    assert len(document["devices"]) == len(list_devices())


def test_search_narrows_the_list(call) -> None:
    found = call("devices", "list", "--search", "L40", "--json").document["devices"]
    assert found
    assert all("L40" in device["name"] for device in found)


def test_show_takes_a_name_of_several_words(call) -> None:
    document = call("devices", "show", "rtx", "3090", "--json").document
    assert document["total_bytes"] == 24576 << 20  # nvidia-smi, public outputs


def test_name_with_several_sizes_lists_them(call) -> None:
    called = call("devices", "show", "a100")
    assert called.code == 2
    assert "40" in called.err
    assert "80" in called.err


def test_machine_without_gpu_is_an_answer_with_a_reason(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "detect_devices", lambda: Detection((), "no driver answers"), raising=False)
    called = call("devices", "detect")
    assert (called.code, called.out) == (0, "No GPU: no driver answers.\n")
    document = call("devices", "detect", "--json").document
    assert (document["devices"], document["reason"]) == ([], "no driver answers")


def test_detected_card_is_shown_with_who_holds_its_memory(call, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = MemoryHolder(pid=7, name="evil\x1b[2J", used_bytes=1 << 30)
    device = device_from_memory(8 << 30, 6 << 30).with_(holders=(holder,), notes=("a note",))
    detection = Detection((device,), None, "580.1", ("one of two visible",))
    monkeypatch.setattr(devices, "detect_devices", lambda: detection, raising=False)
    called = call("devices", "detect")
    assert "\x1b" not in called.out
    assert all(text in called.out for text in ("6.00 GiB", "pid 7", "1.00 GiB", "a note", "580.1", "one of two"))
