"""What a merge of adapters into their base gave, and whether it may be called verified."""

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from foretune.values import Value

__all__ = ["MergeCheck", "MergedLayer", "WeightDtype"]

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
WeightDtype = Literal["fp32", "bf16", "fp16"]


class MergedLayer(Value, frozen=True, kw_only=True):
    """One weight that took up an adapter, or was trained whole. Sizes of differences are Frobenius norms."""

    name: str
    """Of the layer; of a tensor that was trained whole its name in the files."""
    dtype: WeightDtype
    """Of the weight in the base's files, and so of the merged one."""
    change: float
    """Of the weight by training, relative to the base's weight."""
    lost_to_rounding: float
    """What was rounded off when it was written, relative to the change. 1 or more: what was trained is gone."""
    from_training: float | None = None
    """The merged weight against the one that was trained (the quantized base's, dequantized, and the adapter), relative
    to the latter. None: that weight was not quantized in training."""


class MergeCheck(Value, frozen=True, kw_only=True):
    """The merged model held against the one that was trained."""

    verdict: Literal["verified", "not verified"]
    because: str
    """The reason, with the bound and where it comes from."""
    max_abs_logit_difference: float
    """Between the logits that the run stored of its probe rows and those of the merged model."""
    mean_abs_logit_difference: float
    bound: float
    """Of the largest one."""
    training_logit_change: float
    """The largest difference between the stored logits and those of the base that was merged into: what training did,
    and what quantization did where the base was quantized."""
    likeliest_tokens_kept: Count
    """Places of the probe at which both have the same likeliest token."""
    num_places: Count
    device: Literal["cpu"] = "cpu"
    """On which the merged model and the base were run."""
    precision: WeightDtype
    """In which they were run: that of the run."""
    attention: str
    quantization: Literal["nf4", "int8"] | None = None
    """Of the base in training. The weights that were merged into are those of its files."""
    layers: tuple[MergedLayer, ...]
    replaced: tuple[MergedLayer, ...]
    """Tensors of modules that were trained whole."""
    num_copied: Count
    """Tensors of the base that are as they were, byte by byte."""

    @property
    def is_verified(self) -> bool:
        """Whether the verdict is yes."""
        return self.verdict == "verified"

    @property
    def largest_from_training(self) -> MergedLayer | None:
        """The layer that is furthest from the one that was trained; None where the base was not quantized."""
        return max((each for each in self.layers if each.from_training is not None), key=_distance, default=None)

    @property
    def most_rounded(self) -> MergedLayer | None:
        """The weight that lost most of its training to rounding."""
        return max((*self.layers, *self.replaced), key=lambda each: each.lost_to_rounding, default=None)

    def measured(self) -> Iterator[str]:
        """Yield what was measured, one sentence a line."""
        yield (
            f"Logits at {self.num_places} places of two probe rows (measured, on the CPU in {self.precision}): they "
            f"differ from the trained model's by at most {self.max_abs_logit_difference:.3g}, "
            f"{self.mean_abs_logit_difference:.3g} in the mean; the likeliest token is the same at "
            f"{self.likeliest_tokens_kept}."
        )
        worst = self.most_rounded
        if worst is not None and worst.lost_to_rounding:
            yield (
                f"Sums of weight and adapter were made in fp32 and rounded once, to {worst.dtype}: that took "
                f"{worst.lost_to_rounding:.2%} of what training changed at most ({worst.name})."
            )
        elif worst is not None:
            yield f"Sums of weight and adapter were made and kept in {worst.dtype}: nothing was rounded off."
        furthest = self.largest_from_training
        if furthest is not None:
            yield (
                f"Trained on a base in {self.quantization}, merged into the unquantized one: a merged weight is up to "
                f"{furthest.from_training:.2%} away from the one that was trained ({furthest.name})."
            )
        layers = "1 layer has" if len(self.layers) == 1 else f"{len(self.layers):,} layers have"
        whole = f"tensors that were trained whole and replaced: {len(self.replaced):,}; " if self.replaced else ""
        yield f"{layers} another weight; {whole}tensors of the base, byte by byte: {self.num_copied:,}."


def _distance(layer: MergedLayer) -> float:
    return layer.from_training or 0.0
