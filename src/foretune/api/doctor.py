"""The journey of `doctor`: what this machine has, what it lacks, and what to run next."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from foretune import devices
from foretune.machine import (
    Finding,
    MachineReport,
    environment_findings,
    folder_findings,
    gpu_findings,
    host_memory_now,
    hub_findings,
    library_findings,
    memory_finding,
    places,
    private_words,
    python_findings,
    storage_findings,
    this_interpreter,
    torch_build,
    torch_findings,
)
from foretune.models import hub

__all__ = ["examine_machine"]


def examine_machine(
    folder: str | os.PathLike[str] = ".", *, online: bool = False, selftest: bool = False
) -> MachineReport:
    """Look at this machine: Python, libraries, GPUs, environment, memory, disks, the Hub, leftovers in a folder.

    Nothing is imported that is not needed (no torch), nothing is written, and no network is used; `online` asks the
    Hub one question, with a limit of 4 seconds. `selftest` makes a tiny model in the temporary folder and estimates,
    traces, trains and reloads it: about ten seconds, with torch. Sizes are in bytes. The report holds no user or host
    name, home, token or command line. What is missing is a finding, never an error: this raises nothing for it.

        report = examine_machine()
        [finding.run for finding in report.findings if finding.is_wrong], report.ready.training_on_gpu
    """
    detection = devices.detect_devices()
    findings = [*_found(Path(folder), detection, online=online)]
    if selftest:
        from foretune.api.selftest import selftest_findings

        findings += selftest_findings(use_gpu=bool(detection.devices))
    return MachineReport.of(findings, has_gpu=bool(detection.devices))


def _found(folder: Path, detection: devices.Detection, *, online: bool) -> Iterator[Finding]:
    private = private_words()
    yield from python_findings(this_interpreter())
    yield from library_findings(quote='"' if sys.platform == "win32" else "'")
    has_card = None if detection.devices else devices.has_nvidia_card()
    restricts = "CUDA_VISIBLE_DEVICES" in os.environ
    yield from gpu_findings(detection, has_card, private, restricts=restricts)
    yield from torch_findings(torch_build(), detection)
    yield from environment_findings(os.environ)
    yield memory_finding(host_memory_now())
    yield from storage_findings(places(folder, os.environ))
    yield from hub_findings(asks=hub.ask_hub if online else None)
    yield from folder_findings(folder, private)
