"""What a search may choose: one grid for each setting, collapsed to a point where the person has fixed it."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from foretune.contract import LoraSettings, Method, QuantizationSettings, TrainingConfig
from foretune.devices import DeviceSpec
from foretune.models import ModelShape
from foretune.values import Value

__all__ = ["DIMENSIONS", "OBJECTIVES", "Dimension", "Objective", "Row", "Space", "space_for"]

Objective = Literal["longest-sequence", "largest-batch", "highest-rank", "least-memory", "full-if-it-fits"]
OBJECTIVES: tuple[Objective, ...] = (
    "longest-sequence",
    "largest-batch",
    "highest-rank",
    "least-memory",
    "full-if-it-fits",
)
Dimension = Literal["batch.sequence_length", "batch.micro_batch_size", "lora.rank"]
DIMENSIONS: dict[str, Dimension] = {
    "longest-sequence": "batch.sequence_length",
    "largest-batch": "batch.micro_batch_size",
    "highest-rank": "lora.rank",
}
"""The setting that an objective raises; the other two objectives raise none."""

LENGTHS = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536, 98304, 131072)
LONGEST_UNASKED = 32_768
"""Where a model's context is not known."""
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
RANKS = (4, 8, 16, 32, 64, 128, 256, 512)


class Space(Value, frozen=True, kw_only=True):
    """The settings that are tried: every combination of these is considered."""

    methods: tuple[Method, ...]
    values: tuple[int, ...]
    """Of the setting that the objective raises, ascending; empty where it raises none."""
    checkpointing: tuple[bool, ...]
    losses: tuple[Literal["stock", "chunked", "liger"], ...]
    optimizers: tuple[Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "sgd"], ...]


class Row(NamedTuple):
    """A combination of everything but what the objective raises. The smaller, the less it departs from the plain way.

    In order of what a departure costs: an 8-bit optimizer rounds its states, recomputing takes a third more time, the
    chunked loss next to nothing.
    """

    optimizer: str
    gradient_checkpointing: bool
    loss: str

    @property
    def cost(self) -> tuple[bool, bool, bool]:
        """Orders rows: the plain way first."""
        return self.optimizer != "adamw", self.gradient_checkpointing, self.loss != "stock"

    def without(self, departure: str) -> "Row":
        """Return the row with one setting put back to the plain way."""
        plain: dict[str, Any] = {"optimizer": "adamw", "gradient_checkpointing": False, "loss": "stock"}
        return self._replace(**{departure: plain[departure]})


def space_for(
    config: TrainingConfig, fixed: Collection[str], objective: Objective, shape: ModelShape, device: DeviceSpec | None
) -> Space:
    """Return the space of an objective around a configuration.

    `fixed` holds the dotted paths that somebody has set (`lora.rank`, and `method`): they keep their value. What the
    objective does not raise keeps the configuration's value too.
    """
    dimension = DIMENSIONS.get(objective)
    return Space(
        methods=_methods(config, fixed, objective),
        values=() if dimension is None else _values(dimension, config, fixed, shape),
        checkpointing=_kept(fixed, "gradient_checkpointing", config.gradient_checkpointing, (False, True)),
        losses=_kept(fixed, "loss", config.loss, ("stock", "chunked")),
        optimizers=_kept(fixed, "optimizer.name", config.optimizer.name, ("adamw", "adamw_8bit")),
    )


def _kept(fixed: Collection[str], path: str, value: Any, grid: tuple[Any, ...]) -> tuple[Any, ...]:
    return (value,) if path in fixed else grid


def _methods(config: TrainingConfig, fixed: Collection[str], objective: Objective) -> tuple[Method, ...]:
    """Adapters first: they are what most people mean; a rank can be raised only where there is one."""
    if "method" in fixed:
        return (config.method,)
    if any(path.partition(".")[0] == "quantization" for path in fixed):
        return ("qlora",)
    has_adapters = any(path.partition(".")[0] == "lora" for path in fixed)
    if has_adapters or objective == "highest-rank":
        return ("lora", "qlora")
    return ("full", "lora", "qlora") if objective == "full-if-it-fits" else ("lora", "full", "qlora")


def _values(dimension: Dimension, config: TrainingConfig, fixed: Collection[str], shape: ModelShape) -> tuple[int, ...]:
    batch = config.batch
    if dimension == "batch.sequence_length":
        if dimension in fixed:
            return (batch.sequence_length,)
        longest = shape.max_positions or LONGEST_UNASKED
        return (*(n for n in LENGTHS if n < longest), longest)
    if dimension == "batch.micro_batch_size":
        return (batch.micro_batch_size,) if dimension in fixed else BATCHES
    if dimension in fixed and config.lora is not None:
        return (config.lora.rank,)
    return tuple(n for n in RANKS if n <= max(shape.traits.hidden_size, RANKS[0]))


def rows_of(space: Space, method: Method) -> list[Row]:
    """List a method's rows, the plain way first. An 8-bit optimizer is tried for full training only: adapters have few
    states, and rounding them saves next to nothing."""
    optimizers: Sequence[str] = space.optimizers
    if method != "full" and len(optimizers) > 1:
        optimizers = [name for name in optimizers if not name.endswith("8bit")]
    rows = [
        Row(optimizer, checkpointing, loss)
        for optimizer in optimizers
        for checkpointing in space.checkpointing
        for loss in space.losses
    ]
    return sorted(rows, key=lambda row: row.cost)


def config_at(
    config: TrainingConfig,
    method: Method,
    row: Row,
    dimension: Dimension | None,
    value: int,
    *,
    dtype: str,
    attention: str,
) -> TrainingConfig:
    """Write one candidate out."""
    lora = None if method == "full" else config.lora or LoraSettings()
    batch, optimizer = config.batch, config.optimizer
    if dimension == "lora.rank" and lora is not None:
        lora = lora.with_(rank=value)
    elif dimension is not None:
        batch = batch.with_(**{dimension.partition(".")[2]: value})
    if optimizer.name != row.optimizer:
        optimizer = optimizer.with_(name=row.optimizer, implementation=None)
    return config.with_(
        lora=lora,
        quantization=(config.quantization or QuantizationSettings()) if method == "qlora" else None,
        precision=config.precision.with_(dtype=dtype),
        attention=attention,
        batch=batch,
        optimizer=optimizer,
        gradient_checkpointing=row.gradient_checkpointing,
        loss=row.loss,
    )


def every_point(space: Space) -> Iterator[tuple[Method, Row, int]]:
    """Yield all that is considered: method, row and index of the value (0 where nothing is raised)."""
    for method in space.methods:
        for row in rows_of(space, method):
            for index in range(max(len(space.values), 1)):
                yield method, row, index
