"""Which cards carry a fine-tune: every CUDA card of the catalogue, smallest first."""

from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

from foretune.contract import Method, TrainingConfig
from foretune.devices import DeviceSpec
from foretune.memory import FORETUNE, StackProfile, Verdict, assess_fit, sure_budget
from foretune.models import ModelShape
from foretune.planner.search import Search
from foretune.planner.space import Row, rows_of, space_for
from foretune.values import Value

__all__ = ["Carrier", "Carriers", "find_carriers"]


class Carrier(Value, frozen=True, kw_only=True):
    """A card on which the fine-tune fits, and how."""

    device: DeviceSpec
    method: Method
    config: TrainingConfig
    need_bytes: int
    verdict: Verdict
    without_bf16: bool
    """The card has no bfloat16: the configuration's number format is another."""


class Carriers(Value, frozen=True, kw_only=True):
    """The cards that carry a fine-tune, smallest first, and how many do not."""

    carriers: tuple[Carrier, ...]
    considered: int
    too_small: int
    not_cuda: int
    """Cards that do not run CUDA or share their memory with the CPU."""
    refused: int
    """Cards whose kernels or number formats rule the configuration out."""


class _Kind(NamedTuple):
    """What of a card its programs depend on."""

    capability: str | None
    multiprocessors: int | None


def find_carriers(
    config: TrainingConfig,
    shape: ModelShape,
    devices: Iterable[DeviceSpec],
    *,
    fixed: Collection[str] = (),
    stack: StackProfile = FORETUNE,
) -> Carriers:
    """List the cards on which the fine-tune fits in one of the ways that `fixed` leaves open (the plainest that does):
    recomputing or not, loss in chunks or not, optimizer; the method too where nobody has set it."""
    found, counts = [], {"considered": 0, "too small": 0, "not cuda": 0, "refused": 0}
    searches: dict[_Kind, Search] = {}
    for device in sorted(devices, key=lambda device: (device.total_bytes, device.name)):
        counts["considered"] += 1
        if device.vendor != "NVIDIA" or device.is_unified:
            counts["not cuda"] += 1
            continue
        kind = _Kind(device.compute_capability, device.multiprocessors)
        if kind not in searches:
            searches[kind] = _search(config, shape, device, fixed, stack)
        outcome = _carrier(searches[kind], device)
        if isinstance(outcome, Carrier):
            found.append(outcome)
        else:
            counts[outcome] += 1
    return Carriers(
        carriers=tuple(found),
        considered=counts["considered"],
        too_small=counts["too small"],
        not_cuda=counts["not cuda"],
        refused=counts["refused"],
    )


def _search(
    config: TrainingConfig, shape: ModelShape, device: DeviceSpec, fixed: Collection[str], stack: StackProfile
) -> Search:
    space = space_for(config, fixed, "full-if-it-fits", shape, device)
    methods = space.methods if "method" in fixed or len(space.methods) < 3 else ("lora", "qlora", "full")
    space = space.with_(methods=methods)
    is_dtype_fixed = "precision.dtype" in fixed
    return Search(config, shape, device, space, None, stack, budget=None, is_dtype_fixed=is_dtype_fixed)


def _carrier(search: Search, device: DeviceSpec) -> Carrier | Literal["too small", "refused"]:
    """Return how the card carries it: the first method, in its plainest row that fits."""
    search.budget = sure_budget(device)
    tried = False
    for method in search.space.methods:
        for row in rows_of(search.space, method):
            tried = tried or (method, row) not in search.refused
            if search.fits(method, row, 0):
                return _as_carrier(search, device, method, row)
    is_refused = all((m, row) in search.refused for m in search.space.methods for row in rows_of(search.space, m))
    return "refused" if is_refused or not tried else "too small"


def _as_carrier(search: Search, device: DeviceSpec, method: Method, row: Row) -> Carrier:
    estimate, config = search.estimate(method, row, 0), search.config_of(method, row, 0)
    assert estimate is not None
    fit = assess_fit(estimate, config, search.shape, device, stack=search.stack, with_changes=False)
    return Carrier(
        device=device,
        method=method,
        config=config,
        need_bytes=estimate.need_bytes,
        verdict=fit.verdict,
        without_bf16=device.has_bf16 is False,
    )
