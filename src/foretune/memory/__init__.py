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
from foretune.memory.estimate import (
    Recorded,
    emit_program,
    estimate_memory,
    least_bytes,
    record_memory,
    requested_bytes,
)
from foretune.memory.figures import ESTIMATOR_VERSION
from foretune.memory.fit import assess_fit, published_quantized_because, sure_budget
from foretune.memory.stack import (
    FORETUNE,
    LITGPT_0_2,
    LITGPT_0_4,
    MANUAL_LOOP,
    PROFILES,
    TRAINER,
    TRAINER_4_36,
    TRL,
    StackProfile,
)

__all__ = [
    "ESTIMATOR_VERSION",
    "FORETUNE",
    "LITGPT_0_2",
    "LITGPT_0_4",
    "MANUAL_LOOP",
    "PROFILES",
    "TRAINER",
    "TRAINER_4_36",
    "TRL",
    "ByteRange",
    "Change",
    "Component",
    "Fit",
    "HostNeed",
    "MemoryEstimate",
    "PhaseMemory",
    "Recorded",
    "StackProfile",
    "Verdict",
    "assess_fit",
    "emit_program",
    "estimate_memory",
    "least_bytes",
    "published_quantized_because",
    "record_memory",
    "requested_bytes",
    "sure_budget",
]
