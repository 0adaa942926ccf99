"""What planning returns: an estimate or a trace held against a device, a model in figures, a plan beside its trace."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from foretune.contract import TrainingConfig
from foretune.memory import Fit, MemoryEstimate, Verdict
from foretune.models import Projection
from foretune.texts import escape
from foretune.traces import AliveTensors, Timeline, events_of, timeline_of
from foretune.values import Value

if TYPE_CHECKING:
    from foretune.runtime.trace import Trace

__all__ = ["EstimateAnswer", "Library", "ModelSummary", "TraceAnswer", "Traced", "VerifiedPlan"]


class EstimateAnswer(Value, frozen=True, kw_only=True):
    """What a fine-tune needs, and whether that fits."""

    config: TrainingConfig
    """The configuration as it was estimated."""
    estimate: MemoryEstimate | None
    """None: the model is published only quantized, and its family has no estimate."""
    fit: Fit | None = None
    """None: no device was given."""
    model: str
    total_params: int
    unknown_because: str | None = None
    """Why the verdict is unknown on any device: the model is published only quantized."""

    @property
    def verdict(self) -> Verdict | None:
        """Whether it fits; None without a device."""
        if self.unknown_because is not None:
            return "unknown"
        return None if self.fit is None else self.fit.verdict

    def __repr__(self) -> str:
        from foretune.memory.words import short_line

        known = "unknown" if self.estimate is None else short_line(self.estimate, self.fit)
        return f"<{type(self).__name__} of {escape(self.model)}, {self.config.method}: {escape(known)}>"

    def _repr_html_(self) -> str:
        from foretune.memory.notebook import show_estimate
        from foretune.pictures import card, paragraph

        batch = self.config.batch
        asked = f"{self.config.precision.dtype}, {batch.micro_batch_size:,} x {batch.sequence_length:,} tokens"
        title = f"{self.model}: {self.config.method}, {asked}"
        unknown = () if self.unknown_because is None else (f"Unknown: {self.unknown_because}",)
        if self.estimate is None:
            return card(title, *(paragraph(text) for text in unknown))
        advice = () if self.fit is None or self.fit.verdict == "fits" else (self.fit.because,)
        return show_estimate(self.estimate, self.fit, title=title, remarks=(*unknown, *advice))


class Library(Value, frozen=True, kw_only=True):
    """A library that took part."""

    name: str
    version: str


class TraceAnswer(EstimateAnswer, frozen=True, kw_only=True):
    """What a fine-tune needs by the real program, and whether that fits."""

    estimate: MemoryEstimate
    """Of the kind `traced`."""
    alive: tuple[AliveTensors, ...]
    """What is alive at the peak, the largest first; with the allocator's slack it is what is allocated."""
    num_events: int
    """Allocations, frees and emptied caches, from loading to the second update."""
    libraries: tuple[Library, ...]
    """On which the program ran."""
    remarks: tuple[str, ...] = ()
    """What Transformers said about the program, for example that a kernel is replaced by a reference."""


class Traced(NamedTuple):
    """A trace's answer, and the program that it rests on."""

    answer: TraceAnswer
    trace: "Trace"

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield every allocation and free, as `--events` writes them (docs/events.md)."""
        return events_of(self.trace.program, self.trace.births)

    def timeline(self, num_points: int = 400) -> Timeline:
        """Follow the components over the program, at about so many of its events."""
        return timeline_of(self.trace.program, num_points)

    def __repr__(self) -> str:
        return f"<Traced, {self.answer.num_events:,} events: {self.answer!r}>"

    def _repr_html_(self) -> str:
        return self.answer._repr_html_()


class ModelSummary(Value, frozen=True, kw_only=True):
    """What there is to know about a model before it is trained."""

    id: str
    model_type: str
    source: str
    revision: str | None
    total_params: int
    """All unique parameters; tied weights count once."""
    text_params: int
    """Those of the language model."""
    tower_params: int
    """Those outside it (vision, audio, projector)."""
    tied_embeddings: bool
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int | None
    adaptable_params: int
    """Weights of the linear layers that LoRA reaches with `all-linear`."""
    quantizable_params: int
    """Weights that 4-bit quantization reaches."""
    projections: tuple[Projection, ...]
    published_only_as: str | None
    notes: tuple[str, ...]

    @property
    def adaptable_share(self) -> float:
        """Share of all parameters that LoRA can reach."""
        return self.adaptable_params / self.total_params

    @property
    def quantizable_share(self) -> float:
        """Share of all parameters that 4-bit quantization can reach."""
        return self.quantizable_params / self.total_params


class VerifiedPlan(Value, frozen=True, kw_only=True):
    """A plan's estimate beside its trace."""

    rank: int
    allocated_bytes: int
    """Traced; so are the others."""
    reserved_bytes: int
    need_bytes: int
    verdict: Verdict | None
    is_equal: bool
    """Whether both peaks are the estimate's to the byte."""
