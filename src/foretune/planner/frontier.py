"""How many rows fit at each length: the frontier of sequence length against micro batch."""

from collections.abc import Collection

from foretune.contract import Method, TrainingConfig
from foretune.devices import DeviceSpec
from foretune.memory import FORETUNE, StackProfile, sure_budget
from foretune.models import ModelShape
from foretune.planner.search import Search
from foretune.planner.space import rows_of, space_for
from foretune.values import Value

__all__ = ["Frontier", "FrontierLine", "FrontierPoint", "find_frontier"]


class FrontierPoint(Value, frozen=True, kw_only=True):
    """A length and the largest micro batch that fits."""

    sequence_length: int
    micro_batch_size: int
    need_bytes: int


class FrontierLine(Value, frozen=True, kw_only=True):
    """A method's frontier, shortest rows first; lengths of which not one row fits are not in it."""

    method: Method
    points: tuple[FrontierPoint, ...]


class Frontier(Value, frozen=True, kw_only=True):
    """The frontiers of the methods on one device."""

    lines: tuple[FrontierLine, ...]
    most_rows: int
    """The largest micro batch that was tried."""


def find_frontier(
    config: TrainingConfig,
    shape: ModelShape,
    device: DeviceSpec,
    *,
    fixed: Collection[str] = (),
    stack: StackProfile = FORETUNE,
) -> Frontier:
    """Find for each length up to the model's context the largest micro batch that fits, method by method.

    Each method takes its row that needs least: recomputed activations, loss in chunks, 8-bit states where all weights
    are trained, as far as `fixed` leaves them open. Raises as `estimate_memory` does.
    """
    lengths = space_for(config, fixed, "longest-sequence", shape, device)
    batches = space_for(config, fixed, "largest-batch", shape, device)
    found = []
    for method in lengths.methods:
        points = []
        for length in lengths.values:
            at = config.with_(batch=config.batch.with_(sequence_length=length))
            search = Search(
                at,
                shape,
                device,
                batches,
                "batch.micro_batch_size",
                stack,
                budget=sure_budget(device),
                is_dtype_fixed="precision.dtype" in fixed,
            )
            best = search.best(method, rows=rows_of(batches, method)[-1:])
            if best is None:
                break  # longer rows do not fit either
            need = best.estimate.need_bytes
            rows = batches.values[best.place]
            points.append(FrontierPoint(sequence_length=length, micro_batch_size=rows, need_bytes=need))
        found.append(FrontierLine(method=method, points=tuple(points)))
    return Frontier(lines=tuple(found), most_rows=batches.values[-1])
