"""How a tile of logits is folded into each token's statistics, and into its gradient, by torch's operators.

Follows trl/kernels/chunked_logprob.py of TRL 1.16 (_torch_transform, _forward_tile, _backward_tile); local names are
theirs, because they decide what dies when. What is written in place allocates nothing.
"""

from foretune.memory.ops import like, scale, tanh, to
from foretune.memory.tape import Tensor, current

__all__ = ["fold", "unfold"]


def _beside(term: Tensor, dtype: str | None = None) -> Tensor:
    """The result of an operator one of whose operands is a temporary."""
    return like(term, dtype)


def _row_sums(t: Tensor) -> Tensor:
    out = Tensor(t.shape[:1], t.dtype)
    current().reduction(t.shape[0], t.shape[1], is_inner=True)
    return out


def _row_maxima(t: Tensor) -> Tensor:
    return Tensor(t.shape[:1], t.dtype)


def _compared(words: Tensor, targets: Tensor) -> Tensor:
    return Tensor((targets.shape[0], words.shape[0]), "bool")


def _words(tile: Tensor) -> Tensor:
    return Tensor(tile.shape[1:], "i64")


def _logits(tile: Tensor, has_softcap: bool) -> tuple[Tensor, Tensor | None]:
    """The model's scale, the cap, the temperature, each out of place."""
    z = scale(to(tile, "f32"))
    bent = None
    if has_softcap:
        bent = tanh(scale(z))
        z = scale(bent)
    return scale(z), bent


def fold(tile: Tensor, *, has_softcap: bool) -> None:
    """Fold a tile into the running statistics of its tokens."""
    z, _ = _logits(tile, has_softcap)
    local = Tensor(tile.shape[:1], "i64")
    before_target = _compared(_words(tile), local)
    _beside(_row_maxima(_masked(z, like(before_target))))
    new = _beside(_row_maxima(z))
    rescale = _beside(like(new))
    e = _beside(like(z))
    _row_sums(e)
    _row_sums(like(e))
    in_tile = _both(like(local, "bool"), like(local, "bool"))
    of_target = _gathered(z, like(local))
    like(of_target)
    del _, z, local, before_target, new, rescale, e, in_tile, of_target


def unfold(tile: Tensor, *, has_softcap: bool) -> None:
    """Write a tile's gradient over it, for a loss that does not read the entropy."""
    y = scale(to(tile, "f32"))
    bent = None
    if has_softcap:
        bent = tanh(scale(y))
        z = scale(scale(bent))
    else:
        z = scale(y)
    log_p = like(z)
    p = like(log_p)
    grad = like(z)
    targets = Tensor(tile.shape[:1], "i64", storage=tile.storage)
    is_target = _compared(_words(tile), targets)
    _beside(_beside(like(is_target, "f32")))
    grad = scale(grad)
    if bent is not None:
        grad = _beside(_beside(like(bent)))
    scale(grad)
    del y, bent, z, log_p, p, grad, is_target


def _masked(z: Tensor, inverse: Tensor) -> Tensor:
    return like(z)


def _both(a: Tensor, b: Tensor) -> Tensor:
    return like(a)


def _gathered(z: Tensor, index: Tensor) -> Tensor:
    return Tensor((z.shape[0], 1), z.dtype)
