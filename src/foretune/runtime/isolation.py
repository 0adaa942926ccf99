"""Do the examples of a packed row see each other? Asked of the training step itself, as it is called in every update.

Shape suffixes: B batch, S tokens of a row, H hidden width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from foretune.runtime.live import Live
from foretune.runtime.update import Batch

__all__ = ["differences"]


def differences(live: Live, packed: Batch) -> Iterator[float]:
    """Yield for each example how far its hidden states in its row are from those of the example alone.

    Both come from the backbone while the step runs, relative to the norm of the latter, without dropout. The loss
    would not tell: a model that knows nothing yet has the same one whatever it sees.
    """
    assert packed.position_ids_BS is not None
    with _at_rest(live.step), torch.no_grad():
        for ids_S, targets_S, positions_S in zip(*packed, strict=True):
            row = Batch(ids_S[None], targets_S[None], positions_S[None])
            together_1SH = _hidden(live, row)
            starts = [int(place) for place in (positions_S == 0).nonzero()[:, 0]]
            for start, stop in zip(starts, [*starts[1:], len(ids_S)], strict=True):
                alone_1SH = _hidden(live, Batch(ids_S[None, start:stop], targets_S[None, start:stop]))
                difference = (together_1SH[:, start:stop] - alone_1SH).norm() / alone_1SH.norm().clamp_min(1e-12)
                yield float(difference)


@contextmanager
def _at_rest(step: nn.Module) -> Iterator[None]:
    """Switch dropout off, and put every module back as it was."""
    modes = {module: module.training for module in step.modules()}
    step.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _hidden(live: Live, batch: Batch) -> Tensor:
    """Run the step and return what its backbone gave."""
    seen: list[Any] = []
    backbone = getattr(live.base, live.base.base_model_prefix)
    hook = backbone.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    try:
        live.step(*batch)
    finally:
        hook.remove()
    (hidden_BSH,) = seen
    return hidden_BSH.float()
