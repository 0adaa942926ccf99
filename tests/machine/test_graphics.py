"""GPUs and the build of torch beside them."""

import pytest
from machine.planted import BUSY, CPU_TORCH, CUDA_TORCH, NOBODY, T4, card, machine

from foretune.devices import Detection
from foretune.machine import gpu_findings, torch_findings
from foretune.machine.report import Finding, MachineReport
from foretune.machine.software import TorchBuild
from foretune.units import GIB


def gpus(detection: Detection, *, has_card: bool | None = False, restricts: bool = False) -> dict[str, Finding]:
    found = gpu_findings(detection, has_card, NOBODY, restricts=restricts)
    return {finding.check: finding for finding in found}


def torch_of(build: TorchBuild | None, detection: Detection) -> Finding:
    (finding,) = torch_findings(build, detection)
    return finding


def test_without_a_gpu_it_is_said_what_works_all_the_same() -> None:
    found = gpus(machine())["gpu"]
    assert (found.state, found.needed_for) == ("missing", "training on a GPU")
    assert all(word in (found.advice or "") for word in ("Estimates", "CPU in fp32", "rent"))
    ready = MachineReport.of([found], has_gpu=False).ready
    assert (ready.planning, ready.training_on_cpu, ready.training_on_gpu) == (True, True, False)


@pytest.mark.parametrize(
    ("reason", "has_card", "restricts", "state", "line"),
    [
        ("no NVIDIA driver answers (Driver/library version mismatch)", True, False, "problem", "sudo reboot"),
        ("no NVIDIA driver answers (NVML Shared Library Not Found)", True, False, "problem", "nvidia-smi"),
        ("the package nvidia-ml-py is not installed", None, False, "unknown", "pip install nvidia-ml-py"),
        ("no device is visible to CUDA", True, True, "problem", "unset CUDA_VISIBLE_DEVICES"),
        ("no NVIDIA driver answers (Driver Not Loaded)", False, True, "missing", None),
    ],
)
def test_each_reason_has_its_state_and_its_line(
    reason: str, has_card: bool | None, restricts: bool, state: str, line: str | None
) -> None:
    found = gpus(machine(reason=reason), has_card=has_card, restricts=restricts)["gpu"]
    assert (found.state, found.run) == (state, () if line is None else (line,))
    assert reason in found.found


def test_a_card_is_told_with_its_driver_abilities_and_memory() -> None:
    found = gpus(machine(card()))
    assert list(found) == ["gpu.0"]
    text = found["gpu.0"].found
    for word in ("cuda:0", "RTX 3090", "driver 580.95", "capability 8.6", "bf16 yes", "23.00 GiB of 24.00 GiB free"):
        assert word in text
    assert [(figure.name, figure.value) for figure in found["gpu.0"].figures] == [
        ("total_bytes", 24 * GIB),
        ("free_bytes", 23 * GIB),
    ]


def test_a_t4_has_no_bf16_and_trains_all_the_same() -> None:
    findings = gpus(machine(T4))
    found = findings["gpu.0.bf16"]
    assert (found.state, found.needed_for) == ("missing", "some settings")
    assert "--dtype fp16" in (found.advice or "")
    assert MachineReport.of(findings.values(), has_gpu=True).is_ready


def test_of_two_cards_the_busy_one_is_told_with_its_holders_and_the_other_is_named() -> None:
    found = gpus(machine(BUSY, card("NVIDIA RTX A6000")))
    assert (found["gpu.0"].state, found["gpu.1"].state) == ("problem", "ok")
    assert "python3 (pid 11, 22.00 GiB), Xorg (pid 10)" in found["gpu.0"].found
    assert found["gpu.0"].run == ("export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1",)
    assert not MachineReport.of(found.values(), has_gpu=True).ready.training_on_gpu
    assert gpus(machine(BUSY, card()), restricts=True)["gpu.0"].run == ()


def test_a_busy_second_card_prevents_nothing() -> None:
    found = gpus(machine(card(), BUSY))
    assert found["gpu.1"].state == "problem"
    assert MachineReport.of(found.values(), has_gpu=True).is_ready


def test_what_the_driver_does_not_tell_is_said_to_be_so() -> None:
    bare = card(free_bytes=None, compute_capability=None, has_bf16=None)
    text = gpus(machine(bare, driver=None))["gpu.0"].found
    for word in ("driver not told", "capability not told", "bf16 not told", "free not told"):
        assert word in text


# -- torch


def test_a_cpu_build_beside_a_gpu_is_a_problem_with_the_line_that_mends_it() -> None:
    found = torch_of(CPU_TORCH, machine(card()))
    assert (found.state, found.needed_for) == ("problem", "training on a GPU")
    assert found.run == (
        "pip install --force-reinstall torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130",
    )
    report = MachineReport.of([found], has_gpu=True)
    assert (report.ready.training_on_cpu, report.ready.training_on_gpu, report.is_ready) == (True, False, False)


def test_without_a_gpu_every_build_is_right() -> None:
    for build in (CPU_TORCH, CUDA_TORCH):
        assert torch_of(build, machine()).state == "ok"


def test_without_torch_nothing_is_said_of_its_build() -> None:
    assert not list(torch_findings(None, machine(card())))


@pytest.mark.parametrize(
    ("build", "capability", "driver", "wheel"),
    [
        (("2.13.0", "13.0"), "8.6", "580.95.05", None),
        (("2.13.0", "12.6"), "8.6", "525.60", None),
        (("2.13.0", "13.0"), "8.6", "570.86", "cu126"),  # CUDA 13 needs 580 (NVIDIA, minor version compatibility)
        (("2.13.0", "13.0"), "7.0", "580.95", "cu126"),  # no Volta in CUDA 13 (pytorch issue 190385)
        (("2.10.0", "12.8"), "6.1", "580.95", "cu126"),  # no Pascal in 12.8 (pytorch issue 157517)
        (("2.10.0", "12.8"), "7.0", "580.95", None),
        (("2.13.0", "12.6"), "12.0", "580.95", "cu130"),  # Blackwell begins with 12.8
        (("2.13.0", "12.6"), "8.6", "470.10", ""),  # no wheel that is tested runs on it
        (("2.13.0", "13.0"), None, None, None),  # not told: nothing is claimed
    ],
)
def test_the_build_is_held_against_card_and_driver(
    build: tuple[str, str], capability: str | None, driver: str | None, wheel: str | None
) -> None:
    device = card().with_(compute_capability=capability)
    found = torch_of(TorchBuild(*build), machine(device, driver=driver))
    if wheel is None:
        assert found.state == "ok"
    elif wheel:
        assert (found.state, found.run[0].rpartition("/")[2]) == ("problem", wheel)
    else:
        assert (found.state, found.run) == ("problem", ())
        assert "driver" in (found.advice or "")


def test_a_build_for_amd_beside_an_nvidia_card_is_a_problem() -> None:
    assert torch_of(TorchBuild("2.13.0+rocm7.1", None, is_rocm=True), machine(card())).state == "problem"
