"""Weights that take up their adapters, one layer at a time, by PEFT's own layers in fp32 on the CPU.

PEFT's layers stand on meta: names, shapes and adapters without the base's weights. A layer gets its weight from the
files and merges it by PEFT's own `merge`, so LoRA, rsLoRA, DoRA and transposed weights are what PEFT says they are. The
result is held against what PEFT's own forward of the unmerged layer does.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from foretune.contract import QuantizationSettings, TrainingConfig
from foretune.errors import UnsupportedError, VerificationError
from foretune.evidence import MergedLayer, WeightDtype
from foretune.memory.components import Facts
from foretune.models import StoredTensor
from foretune.runtime.adapters import adapted_names, attach_adapters
from foretune.runtime.artifact import ADAPTER_WEIGHTS
from foretune.runtime.load import DTYPE_NAMES, build_model, decoder_linears, model_config
from foretune.runtime.reload import load_adapters
from foretune.runtime.stored_names import stored_names

__all__ = ["LayerChange", "Skeleton", "adapted_skeleton", "merge_layer", "replace_whole"]

WRAPPER = "base_model.model."
"""What PEFT's wrapper puts before the names of a model."""
STORED: dict[str, WeightDtype] = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
"""Formats of weights that can take up an adapter, by safetensors' name."""
CHECKED_COLUMNS = 64
"""Columns of each merged weight, drawn by the seed 0, that are held against the unmerged layer's forward."""
FEW = 16
"""Roundings in fp32 beside those of a product over the rank: scaling, sum, DoRA's norm and factor."""


class LayerChange(NamedTuple):
    """A layer whose weight takes up an adapter."""

    name: str
    stored: str
    """Name of its weight in the files."""
    dtype: WeightDtype
    layer: Any
    """PEFT's layer with its adapter; its base's weight is on meta."""
    num_weights: int
    is_quantizable: bool
    """Whether loading in 4 or 8 bits would have quantized its weight."""


class Skeleton(NamedTuple):
    """What a merge changes in the files of a base."""

    layers: tuple[LayerChange, ...]
    whole: dict[str, Tensor]
    """Tensors of modules that were trained whole, in fp32, by the name in the files."""
    stored: frozenset[str]
    """Names in the files that the model takes as they are."""


def adapted_skeleton(
    config: TrainingConfig,
    facts: Facts,
    raw_config: Mapping[str, Any],
    artifact: Path,
    *,
    attention: str,
    tensors: Mapping[str, StoredTensor],
) -> Skeleton:
    """Build the model on meta, give it the artifact's adapters, and find where each changed weight is stored.

    Raises UnsupportedError where a weight cannot be replaced in the files, VerificationError for adapters that do not
    fit.
    """
    assert config.lora is not None
    dtype = torch.float32
    base = build_model(model_config(raw_config, attention=attention), dtype=dtype, device="meta", attention=attention)
    names, tied, quantizable = stored_names(base, tensors), _tied(base), set(decoder_linears(base))
    model = attach_adapters(base, config.lora, adapted_names(base, facts.shape, facts.adapted))
    _give_places(model)
    load_adapters(model, {name: each.float() for name, each in load_file(artifact / ADAPTER_WEIGHTS).items()})
    model.eval()
    layers, whole = dict(_adapted(model)), dict(_trained_whole(model))
    for name in (*layers, *whole):
        _require_place(name, names, tied, tensors, layers, whole)
    found = tuple(
        LayerChange(
            name=name.removesuffix(".weight"),
            stored=names[name],
            dtype=STORED[tensors[names[name]].dtype],
            layer=layer,
            num_weights=layer.get_base_layer().weight.numel(),
            is_quantizable=name.removesuffix(".weight") in quantizable,
        )
        for name, layer in layers.items()
    )
    return Skeleton(found, {names[name]: each for name, each in whole.items()}, frozenset(names.values()))


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of each parameter that has several."""
    found = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[id(parameter)].append(name)
    return {name: names for names in found.values() if len(names) > 1 for name in names}


def _give_places(model: nn.Module) -> None:
    """Give every trained parameter memory, to be filled."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                setattr(module, name, nn.Parameter(torch.zeros_like(parameter, device="cpu")))


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield PEFT's layers with the name of the base's weight."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield f"{name.removeprefix(WRAPPER)}.weight", module


def _trained_whole(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of modules that were trained whole, with the names that they have in the base."""
    from peft.utils import ModulesToSaveWrapper

    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            for part, parameter in module.modules_to_save["default"].named_parameters():
                yield f"{name.removeprefix(WRAPPER)}.{part}", parameter.detach()


def _require_place(
    name: str,
    names: Mapping[str, str],
    tied: Mapping[str, list[str]],
    tensors: Mapping[str, StoredTensor],
    layers: Mapping[str, Any],
    whole: Mapping[str, Tensor],
) -> None:
    """Refuse a weight that the files do not hold for itself, in a format that can be written back."""
    if name in tied:
        other = next(each for each in tied[name] if each != name)
        raise UnsupportedError(
            f"{name} was trained apart, and the base has one weight for it and for {other} (they are tied): merged, "
            "the one would overwrite the other.",
            hint="Use the adapter as it is, which PEFT loads, or train on a base whose head has a weight of its own.",
        )
    entry = tensors.get(names.get(name, ""))
    if entry is None:
        raise UnsupportedError(
            f"{name} is put together from other tensors when the base is loaded: its files have no such tensor that "
            "could be replaced.",
            hint="Use the adapter as it is, which PEFT loads.",
        )
    shape = tuple((layers[name].get_base_layer().weight if name in layers else whole[name]).shape)
    if entry.dtype not in STORED or entry.shape != shape:
        raise UnsupportedError(
            f"{names[name]} is {entry.dtype} of the shape {list(entry.shape)} in the base's files, and what was "
            f"trained has the shape {list(shape)}: only {', '.join(STORED)} of the same shape can be merged.",
            hint="Use the adapter as it is, which PEFT loads.",
        )


# -- one layer


def merge_layer(
    change: LayerChange, stored: Tensor, *, quantization: QuantizationSettings | None, trained_dtype: torch.dtype
) -> tuple[Tensor, MergedLayer]:
    """Return a stored weight with its adapter taken up, in the stored format, and what there is to say of it.

    The sum is made in fp32 and rounded once. Raises VerificationError where the result is not what the adapter does.
    """
    base = stored.float()
    exact = _taken_up(change.layer, base)
    merged = exact.to(stored.dtype)
    _require_finite(change.name, merged, change.dtype)
    _require_what_the_layer_does(change, base, merged)
    moved = _norm(exact - base)
    changed, lost = _share(moved, _norm(base)), _share(_norm(merged.float() - exact), moved)
    del base, exact  # two copies less while the next ones are made
    distance = None
    if quantization is not None and change.is_quantizable:
        distance = _from_training(change, stored, merged, quantization, trained_dtype)
    return merged, MergedLayer(
        name=change.name, dtype=change.dtype, change=changed, lost_to_rounding=lost, from_training=distance
    )


def _taken_up(layer: Any, weight: Tensor) -> Tensor:
    """Return a weight in fp32 as PEFT's layer merges it."""
    own = _with_weight(layer, weight.clone())
    own.merge()
    merged: Tensor = own.get_base_layer().weight.detach()
    return merged


def _with_weight(layer: Any, weight: Tensor) -> Any:
    """Return a copy of PEFT's layer over a weight. No bias: what it adds is the same before and after."""
    own = copy.deepcopy(layer)
    base = own.get_base_layer()
    base.weight = nn.Parameter(weight, requires_grad=False)
    if getattr(base, "bias", None) is not None:
        base.bias = nn.Parameter(torch.zeros(base.bias.shape), requires_grad=False)
    return own


def _require_what_the_layer_does(change: LayerChange, base: Tensor, merged: Tensor) -> None:
    """Hold the merged weight against the unmerged layer's forward, column by column.

    A layer gives, for the unit vector j, column j of what it multiplies with. The two may differ by half a unit in the
    last place of the stored format for each weight, and by the roundings of the unmerged layer's sums in fp32.
    Raises VerificationError.
    """
    layer = _with_weight(change.layer, base)
    columns = torch.randperm(layer.in_features, generator=torch.Generator().manual_seed(0))[:CHECKED_COLUMNS]
    units = torch.zeros(len(columns), layer.in_features)
    units[torch.arange(len(columns)), columns] = 1.0
    with torch.no_grad():
        wanted = layer(units)
        found = _with_weight(change.layer, merged.float()).get_base_layer()(units)
    stored, single = torch.finfo(merged.dtype), torch.finfo(torch.float32)
    terms = layer.r["default"] + FEW
    allowed = (
        stored.eps / 2 * wanted.abs() + terms * single.eps * wanted.abs().max() + stored.smallest_normal * stored.eps
    )
    beyond = ((found - wanted).abs() > allowed).sum().item()
    if beyond or not bool(torch.isfinite(wanted).all()):
        raise VerificationError(
            f"The merged weight of {change.name} is not what the layer and its adapter do: {beyond:,} of "
            f"{wanted.numel():,} values that were looked at differ by more than rounding to {change.dtype} explains.",
            hint="Nothing was handed over. Please report this: it is a fault of ours or of a library's.",
        )


def _from_training(
    change: LayerChange, stored: Tensor, merged: Tensor, settings: QuantizationSettings, dtype: torch.dtype
) -> float:
    """Return how far the merged weight is from the one that was trained, relative to it."""
    trained = _taken_up(change.layer, _dequantized(stored.to(dtype), settings))
    return _share(_norm(merged.float() - trained), _norm(trained))


def _dequantized(weight: Tensor, settings: QuantizationSettings) -> Tensor:
    """Return a weight as training had it: quantized by bitsandbytes, and back, in fp32."""
    import bitsandbytes as bnb

    library: Any = bnb
    if settings.scheme == "nf4":
        held = library.nn.Params4bit(
            weight, requires_grad=False, quant_type="nf4", compress_statistics=settings.uses_double_quant
        ).to("cpu")
        back = library.functional.dequantize_4bit(held.data, held.quant_state)
    else:
        held = library.nn.Int8Params(weight, has_fp16_weights=False, requires_grad=False).to("cpu")
        back = library.functional.int8_vectorwise_dequant(held.data, held.SCB)
    found: Tensor = back.float()
    return found


def replace_whole(name: str, trained: Tensor, stored: Tensor) -> tuple[Tensor, MergedLayer]:
    """Return a tensor that was trained whole in the stored format, and what there is to say of it.

    Raises VerificationError where the format cannot hold it.
    """
    merged, base, dtype = trained.to(stored.dtype), stored.float(), DTYPE_NAMES[stored.dtype]
    _require_finite(name, merged, dtype)
    moved = _norm(trained - base)
    changed, lost = _share(moved, _norm(base)), _share(_norm(merged.float() - trained), moved)
    return merged, MergedLayer(name=name, dtype=dtype, change=changed, lost_to_rounding=lost)


def _require_finite(name: str, merged: Tensor, dtype: WeightDtype) -> None:
    if not bool(torch.isfinite(merged).all()):
        raise VerificationError(
            f"The merged weight of {name} holds values that {dtype} cannot hold.",
            hint="Nothing was handed over. Use the adapter as it is, which PEFT loads.",
        )


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
