"""Do the examples of a packed row see each other? Asked of the training step itself, as it is called in every update.

Shape suffixes: B batch, S tokens of a row, H hidden width.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from foretune.runtime.live import Live, at_rest
from foretune.runtime.update import Batch

__all__ = ["Apart", "apart"]


class Apart(NamedTuple):
    """How far the hidden states of a packed example are from what they should be, relative to their norm."""

    from_alone: float
    """From those of the example alone in its row: rounding is left."""
    from_others: float
    """From those beside other examples. Nothing should be left, but where tokens are gathered for a product."""


def apart(live: Live, packed: Batch) -> Iterator[Apart]:
    """Yield it for each example of a micro batch, without dropout.

    Hidden states are caught while the step runs. The loss would not tell: a model that knows nothing
    yet has the same one whatever it sees.
    """
    assert packed.position_ids_BS is not None
    with at_rest(live.step):
        for ids_S, targets_S, positions_S in zip(*packed, strict=True):
            row = Batch(ids_S[None], targets_S[None], positions_S[None])
            starts = [int(place) for place in (positions_S == 0).nonzero()[:, 0]]
            spans = [slice(*pair) for pair in zip(starts, [*starts[1:], len(ids_S)], strict=True)]
            packed_1SH = _hidden(live, row)
            beside_1SH = _hidden(live, row._replace(input_ids_BS=_every_other_reversed(ids_S, spans)[None]))
            for number, span in enumerate(spans):
                here_1SH = packed_1SH[:, span]
                alone_1SH = _hidden(live, Batch(ids_S[None, span], targets_S[None, span]))
                others = _distance(here_1SH, beside_1SH[:, span]) if number % 2 else 0.0
                yield Apart(_distance(here_1SH, alone_1SH), others)


def _every_other_reversed(ids_S: Tensor, spans: list[slice]) -> Tensor:
    """Return the row with the tokens of its first, third, ... example backwards."""
    changed_S = ids_S.clone()
    for span in spans[::2]:
        changed_S[span] = ids_S[span].flip(0)
    return changed_S


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp_min(1e-12))


def _hidden(live: Live, batch: Batch) -> Tensor:
    """Run the step and return the hidden states that its head gets."""
    seen: list[Any] = []
    if live.step.head_map is None:  # a model's own forward may pass its backbone over for a part of it (OPT's decoder)
        head: Any = live.base.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    else:
        backbone = getattr(live.base, live.base.base_model_prefix)
        hook = backbone.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    try:
        live.step(*batch)
    finally:
        hook.remove()
    (hidden_BSH,) = seen
    return hidden_BSH.float()
