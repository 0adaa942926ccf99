"""What this machine is and has: looked at without torch and without network, told without a private word."""

from foretune.machine.access import hub_findings
from foretune.machine.graphics import gpu_findings, torch_findings
from foretune.machine.leftovers import folder_findings
from foretune.machine.privacy import Private, private_words
from foretune.machine.report import Figure, Finding, MachineReport, Need, Readiness, State
from foretune.machine.software import library_findings, python_findings, this_interpreter, torch_build
from foretune.machine.storage import host_memory_now, memory_finding, places, storage_findings
from foretune.machine.surroundings import environment_findings

__all__ = [
    "Figure",
    "Finding",
    "MachineReport",
    "Need",
    "Private",
    "Readiness",
    "State",
    "environment_findings",
    "folder_findings",
    "gpu_findings",
    "host_memory_now",
    "hub_findings",
    "library_findings",
    "memory_finding",
    "places",
    "private_words",
    "python_findings",
    "storage_findings",
    "this_interpreter",
    "torch_build",
    "torch_findings",
]
