"""How much memory a fine-tune needs: the allocator, the step's allocation program, stack profiles, the estimate."""

from foretune.memory.answer import (
    ByteRange,
    Change,
    Component,
    Fit,
    HostNeed,
    MemoryEstimate,
    PhaseMemory,
    Verdict,
)
from foretune.memory.estimate import estimate_memory, requested_bytes
from foretune.memory.figures import ESTIMATOR_VERSION
from foretune.memory.fit import assess_fit, published_quantized_because
from foretune.memory.stack import FORETUNE, LITGPT_0_2, LITGPT_0_4, MANUAL_LOOP, PROFILES, TRAINER, TRL, StackProfile

__all__ = [
    "ESTIMATOR_VERSION",
    "FORETUNE",
    "LITGPT_0_2",
    "LITGPT_0_4",
    "MANUAL_LOOP",
    "PROFILES",
    "TRAINER",
    "TRL",
    "ByteRange",
    "Change",
    "Component",
    "Fit",
    "HostNeed",
    "MemoryEstimate",
    "PhaseMemory",
    "StackProfile",
    "Verdict",
    "assess_fit",
    "estimate_memory",
    "published_quantized_because",
    "requested_bytes",
]
