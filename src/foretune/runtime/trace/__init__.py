"""The real program on tensors without data: every allocation and free, in order, replayed through the allocator."""

from foretune.runtime.trace.cpu_paths import trace_memory_on_cpu
from foretune.runtime.trace.trace import Trace, trace_memory

__all__ = ["Trace", "trace_memory", "trace_memory_on_cpu"]
