"""The values that an estimate ends in: what is needed, of what it consists, and whether it fits."""

from typing import Annotated, Literal

from msgspec import Meta

from foretune.devices import DeviceSpec
from foretune.texts import escape
from foretune.values import Value

__all__ = [
    "ByteRange",
    "Change",
    "Component",
    "Fit",
    "HostNeed",
    "MemoryEstimate",
    "PhaseMemory",
    "Verdict",
]

Bytes = Annotated[int, Meta(ge=0)]
Verdict = Literal["fits", "tight", "does not fit", "unknown"]


class Component(Value, frozen=True, kw_only=True):
    """A share of the allocated peak. All components together are the allocated peak."""

    name: Literal[
        "weights",
        "adapters",
        "gradients",
        "optimizer states",
        "activations",
        "logits and loss",
        "workspaces",
        "allocator slack",
    ]
    num_bytes: Bytes
    """What of it is alive at the moment of the peak."""
    formula: str
    """How it comes about, in symbols."""
    inputs: tuple[tuple[str, int], ...]
    """The symbols' values."""
    source: str
    """Where the formula is from."""


class PhaseMemory(Value, frozen=True, kw_only=True):
    """The peaks of one phase; `(later)` marks updates after the first."""

    phase: str
    allocated_bytes: Bytes
    reserved_bytes: Bytes


class ByteRange(Value, frozen=True, kw_only=True):
    """A figure that is not known exactly."""

    low_bytes: Bytes
    likely_bytes: Bytes
    high_bytes: Bytes
    basis: str
    """Where the range is from."""


class HostNeed(Value, frozen=True, kw_only=True):
    """What the run needs beside the device."""

    ram_load_bytes: Bytes
    """Host memory while weights are loaded; on a CPU the process' growth by then."""
    ram_save_bytes: Bytes
    """Host memory while the result is saved; on a CPU the process' growth by then."""
    download_bytes: Bytes
    """The base model's files, where they are not there yet."""
    artifact_bytes: Bytes
    """The result on disk."""
    disk_bytes: Bytes
    """Free space that saving needs: staged and then renamed, so the artifact once and its margin."""


class MemoryEstimate(Value, frozen=True, kw_only=True):
    """What a fine-tune needs. Nothing in it depends on the size of a card."""

    kind: Literal["estimated", "traced", "calibrated"] = "estimated"
    estimator_version: str
    model: str
    model_type: str
    total_params: Bytes
    trainable_params: Bytes
    quantized_params: Bytes
    """Parameters that the quantization reaches."""
    adapted_params: Bytes
    """Parameters of the linear layers that carry adapters."""
    method: Literal["full", "lora", "qlora"]
    fingerprint: str
    """Of the configuration."""
    stack: str
    """The stack profile that was assumed, with its versions."""
    attention_kernel: str
    requested_bytes: Bytes
    """Peak of the sizes that the program asks for."""
    allocated_bytes: Bytes
    """Peak of `torch.cuda.memory_allocated`; on a CPU of the bytes of all tensors."""
    reserved_bytes: Bytes
    """Peak of `torch.cuda.memory_reserved`, on a card that does not limit it; on a CPU what the process grows by."""
    allocated_interval: ByteRange
    """Where the measured peak lies with 90 %, and what that rests on; so for the other two."""
    reserved_interval: ByteRange
    process_interval: ByteRange
    """Of reserved and the context together."""
    context: ByteRange
    """CUDA context and loaded kernels, outside the allocator; on a CPU there is none."""
    process_bytes: Bytes
    """Reserved plus the likely context: what nvidia-smi shows of the process; on a CPU its growth after imports."""
    safety_margin_bytes: Bytes
    """What we add because we may be wrong: up to the upper end of reserved's interval; never a share of the card."""
    safety_margin_basis: str
    need_bytes: Bytes
    """Upper end of the process' interval (reserved, context and safety margin): what must be free, on a CPU of the
    host's memory."""
    peak_phase: str
    components: tuple[Component, ...]
    phases: tuple[PhaseMemory, ...]
    host: HostNeed
    assumptions: tuple[str, ...]
    untested_paths: tuple[str, ...] = ()
    """Parts of the program that no measurement has touched."""

    @property
    def largest_component(self) -> Component:
        """The component that holds most at the peak."""
        return max(self.components, key=lambda component: component.num_bytes)

    @property
    def is_of_host(self) -> bool:
        """Whether the figures are the host's, of a run on its CPU, which has no context."""
        return self.context.high_bytes == 0

    def __repr__(self) -> str:
        from foretune.memory.words import short_line

        return f"<MemoryEstimate of {escape(self.model)}, {self.method}: {short_line(self, None)}>"

    def _repr_html_(self) -> str:
        from foretune.memory.notebook import show_estimate

        return show_estimate(self)


class Change(Value, frozen=True, kw_only=True):
    """One change of the configuration and what it would need."""

    label: str
    settings: tuple[str, ...]
    """As `--set` takes them."""
    method: Literal["full", "lora", "qlora"]
    """The method with these settings."""
    need_bytes: Bytes
    allocated_bytes: Bytes
    verdict: Verdict


class Fit(Value, frozen=True, kw_only=True):
    """An estimate held against a device."""

    verdict: Verdict
    device: DeviceSpec
    budget_bytes: Bytes
    budget_is: Literal["free now", "total"]
    """Whether the budget is what is free now or the whole of the card's memory."""
    headroom_bytes: int
    """Budget minus need; negative where it does not fit."""
    because: str
    changes: tuple[Change, ...] = ()
    """The nearest changes, re-estimated, where the answer is not yes."""
