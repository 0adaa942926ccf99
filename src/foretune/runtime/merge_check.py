"""Is the merged model the one that was trained? The verdict, the bound, and where the bound comes from."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foretune.contract import TrainingConfig
from foretune.errors import VerificationError
from foretune.evidence import MergeCheck, MergedLayer, WeightDtype
from foretune.runtime.reload import TOLERANCES

__all__ = ["Compared", "check_of"]


class Compared(NamedTuple):
    """Logits of the probe's rows: at the last places of each, over the vocabulary."""

    stored: list[Tensor]
    """Of the trained model, by the run itself."""
    base: list[Tensor]
    """Of the base that was merged into."""
    merged: list[Tensor]


class _Bound(NamedTuple):
    value: float
    source: str


def check_of(
    config: TrainingConfig,
    compared: Compared,
    *,
    layers: tuple[MergedLayer, ...],
    replaced: tuple[MergedLayer, ...],
    num_copied: int,
    attention: str,
    dtypes: Sequence[WeightDtype],
) -> MergeCheck:
    """Compare logits, and say whether the merged model is the trained one.

    `dtypes` are those of the merged weights. Raises VerificationError for logits that are no finite numbers.
    """
    stored, base, merged = (torch.cat(each).double() for each in compared)
    if not all(bool(torch.isfinite(each).all()) for each in (base, merged)):
        raise VerificationError(
            "The logits of the merged model, or of its base, are no finite numbers.",
            hint="Nothing was handed over. Use the adapter as it is, which PEFT loads.",
        )
    difference = (merged - stored).abs()
    changed = float((stored - base).abs().max())
    quantization = None if config.quantization is None else config.quantization.scheme
    bound = _bound(config, changed, float(stored.abs().max()), dtypes)
    largest = float(difference.max())
    kept = int((merged.argmax(-1) == stored.argmax(-1)).sum())
    is_verified = largest <= bound.value
    return MergeCheck(
        verdict="verified" if is_verified else "not verified",
        because=_because(largest, bound, is_verified=is_verified, is_quantized=quantization is not None),
        max_abs_logit_difference=largest,
        mean_abs_logit_difference=float(difference.mean()),
        bound=bound.value,
        training_logit_change=changed,
        likeliest_tokens_kept=kept,
        num_places=len(stored),
        precision=config.precision.dtype,
        attention=attention,
        quantization=quantization,
        layers=layers,
        replaced=replaced,
        num_copied=num_copied,
    )


def _bound(config: TrainingConfig, changed: float, largest_logit: float, dtypes: Sequence[WeightDtype]) -> _Bound:
    """Return how far logits may be apart at most.

    Half of the distance between the trained model and the base: by the triangle inequality the merged model is then
    nearer to the trained one than to the base. Where the base was not quantized in training, nothing but rounding may
    tell the two apart, so the tolerance of a reloaded artifact holds as well, relative to the largest logit, as
    rounding is: that of the coarsest of the run's precision and the formats of the merged weights.
    """
    half = _Bound(
        changed / 2, f"half of the {changed:.3g} that lie between the trained model and the base that was merged into"
    )
    if config.quantization is not None:
        return half
    coarsest = max({config.precision.dtype, *dtypes}, key=lambda name: TOLERANCES[name])
    share = TOLERANCES[coarsest]
    rounding = _Bound(
        share * largest_logit, f"{share:g} of the largest logit, {largest_logit:.3g}, for rounding in {coarsest}"
    )
    return min(half, rounding, key=lambda bound: bound.value)


def _because(largest: float, bound: _Bound, *, is_verified: bool, is_quantized: bool) -> str:
    said = (
        f"Logits of the trained model and the merged one differ by up to {largest:.3g}; "
        f"the bound is {bound.value:.3g}: {bound.source}."
    )
    if is_verified:
        return said
    if is_quantized:
        return (
            f"{said} The adapter was trained on a quantized base, and the merged model has the unquantized one: it is "
            "another model than the one that was trained. Its loss tells more: foretune evaluate --data."
        )
    return f"{said} Beyond it nothing says that what training changed is still there."
