"""Does what runs equal what was asked for? Read from living modules, tensors and optimizer states, never from settings.

Everything is looked at before the first update and after the last one, and every difference is told at once.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from foretune.contract import LoraSettings, OptimizerSettings, QuantizationSettings
from foretune.errors import Problem, VerificationError
from foretune.evidence import Check
from foretune.runtime.digest import digest
from foretune.runtime.isolation import apart
from foretune.runtime.live import Live, fingerprint
from foretune.runtime.load import DTYPE_NAMES, DTYPES, build_model, decoder_linears, eight_bit_layers, four_bit_layers
from foretune.runtime.update import Batch

__all__ = ["observe", "require_gradients", "require_verified"]

Moment = Literal["before", "after"]
Found = tuple[str, object, object]
"""Field, requested, effective."""

OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit"}
STATES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "adamw_8bit": ("state1", "state2"),
    "paged_adamw_8bit": ("state1", "state2"),
}
"""What an optimizer keeps for each trained weight, by its own names."""
BLOCK_8BIT = 4096
"""bitsandbytes keeps states of smaller tensors in fp32 (optim/optimizer.py, min_8bit_size)."""
ISOLATION = {torch.float32: 1e-3}
ISOLATION_16_BIT = 5e-2
"""How far hidden states of a packed example may be from those of the example alone, relative to their norm: rounding
is 1e-6 and 1e-2; a leak is of the order of one."""


def require_verified(live: Live, moment: Moment, packed: Batch | None) -> tuple[Check, ...]:
    """Return all checks. `packed` is the first micro batch where rows are packed. Raises VerificationError."""
    checks = observe(live, moment, packed)
    wrong = [check for check in checks if not check.holds]
    if wrong:
        when = {"before": "before the first update", "after": "after the last update"}[moment]
        hint = (
            "Nothing was handed over. Please report this with the configuration: it is a fault of ours or a library's."
        )
        problems = [
            Problem(
                f"{check.field} is {check.effective} {when}, and {check.requested} was asked for.",
                hint,
                None,
                check.field,
            )
            for check in wrong
        ]
        raise VerificationError(problems[0].message, hint=hint, problems=tuple(problems))
    return checks


def require_gradients(live: Live) -> None:
    """Refuse weights that are to be trained and that no loss reaches: they would fail after the last update.

    Raises VerificationError.
    """
    lacking = [name for name, parameter in live.trained.items() if parameter.grad is None]
    if lacking:
        raise VerificationError(
            f"Trained weights without a gradient: {_few(lacking, 'get none')}.",
            hint="The model's own code does not train them; train adapters on other layers, or another model.",
        )


def observe(live: Live, moment: Moment, packed: Batch | None) -> tuple[Check, ...]:
    """Read every property, whether it is as it was asked for or not.

    Values are not read where a tensor has none (one left on meta), and nothing is run through a model that is known
    to be wrong: torch would end the run with less than what is known.
    """
    with torch.no_grad():
        found = [*_formats(live), *_adapters(live), *_program(live), *_quantized(live), *_optimizer(live, moment)]
        if not any(tensor.is_meta for tensor in _tensors(live)):
            found += _values(live, moment)
        if packed is not None and packed.position_ids_BS is not None and _all_hold(found):
            found += _isolation(live, packed)
    return tuple(
        Check(field=field, moment=moment, requested=str(requested), effective=str(effective))
        for field, requested, effective in found
    )


def _all_hold(found: Iterable[Found]) -> bool:
    return all(str(requested) == str(effective) for _, requested, effective in found)


def _tensors(live: Live) -> Iterator[Tensor]:
    yield from live.model.parameters()
    yield from live.model.buffers()


# -- formats and places


def _formats(live: Live) -> Iterator[Found]:
    precision = live.config.precision
    base, adapters, whole = {}, [], []
    quantized = {id(layer.weight) for _, layer in (*four_bit_layers(live.model), *eight_bit_layers(live.model))}
    names = {id(parameter): name for name, (parameter, _) in live.loaded.items()}
    for name, parameter in live.model.named_parameters():
        if ".lora_" in name:
            adapters.append(parameter)
        elif ".modules_to_save." in name:
            whole.append(parameter)
        elif id(parameter) not in quantized:
            base[names.get(id(parameter), name)] = parameter
    in_fp32 = {name: parameter for name, parameter in base.items() if parameter.dtype == torch.float32}
    if in_fp32 and precision.dtype != "fp32":
        for name in _kept_in_fp32(live, in_fp32):
            del base[name]
    yield "precision.dtype", precision.dtype, _dtypes(base.values())
    if adapters:
        yield "precision.adapter_dtype", precision.adapter_dtype, _dtypes(adapters)
    if whole:  # PEFT copies these modules as they are
        yield "lora.modules_to_save (dtype)", precision.dtype, _dtypes(whole)
    yield "device", live.config.device, _listed(Counter(tensor.device.type for tensor in _tensors(live)))


def _kept_in_fp32(live: Live, in_fp32: dict[str, nn.Parameter]) -> Iterator[str]:
    """Yield the names of what may be in fp32: norms beside a quantized base (PEFT's preparation makes them so), what
    the class lists (modeling_utils.py, _get_dtype_plan), and what it makes so whatever the dtype."""
    config = live.config
    listed = set(getattr(live.base, "_keep_in_fp32_modules_strict", None) or ())
    if config.precision.dtype == "fp16":
        listed |= set(getattr(live.base, "_keep_in_fp32_modules", None) or ())
    dtype = DTYPES[config.precision.dtype]
    made = build_model(copy.deepcopy(live.base.config), dtype=dtype, device="meta", attention=config.attention)
    of_class = {name for name, parameter in made.named_parameters() if parameter.dtype == torch.float32}
    for name, parameter in in_fp32.items():
        is_norm = config.quantization is not None and parameter.dim() == 1
        if is_norm or name in of_class or any(key in name for key in listed):
            yield name


def _dtypes(parameters: Iterable[Tensor]) -> str:
    return _listed(Counter(_name(each.dtype) for each in parameters))


def _name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _listed(counts: "Counter[str]") -> str:
    """One word where all agree, else each with its number."""
    if len(counts) == 1:
        return next(iter(counts))
    if not counts:
        return "on none"
    return ", ".join(f"{name} ({count:,} tensors)" for name, count in counts.most_common())


# -- what is trained


def _values(live: Live, moment: Moment) -> Iterator[Found]:
    trained = live.trained
    yield "trainable parameters", f"{live.facts.trainable_params:,}", f"{sum(map(Tensor.numel, trained.values())):,}"
    yield "base weights that are not trained", "unchanged", "; ".join(_strange(live, moment)) or "unchanged"
    with_gradient = [
        name for name, each in live.model.named_parameters() if not each.requires_grad and each.grad is not None
    ]
    yield "gradients of frozen weights", "none", _few(with_gradient, "have one") or "none"
    if moment == "after" and live.updates_here:
        still = [name for name, each in trained.items() if digest(each) == live.initial.get(name)]
        yield "trained weights", "changed", "unchanged" if len(still) == len(trained) else "changed"
        endless = [name for name, each in trained.items() if not bool(torch.isfinite(each).all())]
        yield "values of trained weights", "finite", _few(endless, "are not finite") or "finite"


def _strange(live: Live, moment: Moment) -> Iterator[str]:
    """Say which of the base's weights have other values, or gave their place to others."""
    may_change = {id(each) for each in live.trained.values()} if moment == "after" else set()
    living = {id(each): name for name, each in live.model.named_parameters() if not each.requires_grad}
    loaded = {id(parameter) for parameter, _ in live.loaded.values()}
    changed = [
        name
        for name, (parameter, before) in live.loaded.items()
        if id(parameter) not in may_change and fingerprint(parameter) != before
    ]
    added = [name for key, name in living.items() if key not in loaded]
    yield from filter(None, (_few(changed, "changed"), _few(added, "were not loaded")))


def _few(names: list[str], what: str) -> str:
    if not names:
        return ""
    return f"{len(names):,} {what}: {', '.join(names[:3])}{' ...' * (len(names) > 3)}"


def _adapters(live: Live) -> Iterator[Found]:
    lora = live.config.lora
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in live.model.named_modules()
        if "default" in (getattr(module, "lora_A", None) or ())
    }
    if lora is None:
        yield "lora", "no adapters", f"{len(layers)} adapted layers" if layers else "no adapters"
        return
    lacking, extra = sorted(live.adapted - set(layers)), sorted(set(layers) - live.adapted)
    wanted = f"{len(live.adapted):,} layers"
    found = "; ".join(text for text in (_few(lacking, "lack one"), _few(extra, "have one unasked")) if text)
    yield "lora.targets", wanted, found or wanted
    for name, value in (("rank", lora.rank), ("scaling", _scaling(lora)), ("dropout", lora.dropout)):
        values = Counter(f"{_adapter_value(each, name):g}" for each in layers.values())
        yield f"lora.{name}", f"{value:g}", _listed(values)
    # The variant decides what runs; the flag of old is only kept beside it (peft#2443).
    variants = Counter("DoRA" if _has_dora(each) else "LoRA" for each in layers.values())
    yield "lora.use_dora", "DoRA" if lora.use_dora else "LoRA", _listed(variants)
    resting = [name for name, each in live.model.named_modules() if _is_bypassed(each)]
    yield "adapters", "in use", _few(resting, "are switched off") or "in use"


def _has_dora(layer: Any) -> bool:
    return "Dora" in type(layer.lora_variant.get("default")).__name__


def _is_bypassed(module: Any) -> bool:
    """Whether a layer with an adapter, or a module with a trained copy, runs without it."""
    if not hasattr(module, "lora_A") and "modules_to_save" not in dict(module.named_children()):
        return False
    is_used = "default" in module.active_adapters and not module.disable_adapters
    return not is_used or bool(getattr(module, "merged", False))


def _scaling(lora: LoraSettings) -> float:
    return lora.alpha / (lora.rank**0.5 if lora.use_rslora else lora.rank)


def _adapter_value(layer: Any, name: str) -> float:
    if name == "rank":
        return layer.lora_A["default"].weight.shape[0]
    return layer.scaling["default"] if name == "scaling" else getattr(layer.lora_dropout["default"], "p", 0.0)


# -- the program


def _program(live: Live) -> Iterator[Found]:
    config = live.config
    configs: dict[int, Any] = {id(each.config): each.config for each in live.base.modules() if hasattr(each, "config")}
    yield "attention", config.attention, _listed(Counter(str(each._attn_implementation) for each in configs.values()))
    yield "use_cache", "off", _on(bool(getattr(live.base.config, "use_cache", False)))
    yield "gradient_checkpointing", _on(config.gradient_checkpointing), _checkpointing(live.base)
    step = live.step  # in the order in which its forward asks
    loss = "stock" if step.head_map is None else "chunked" if step.fused_loss is None else "liger"
    yield "loss", config.loss, loss
    resting = [name for name, each in live.model.named_modules() if not each.training]
    resting += [] if step.training else ["the step"]
    yield "training mode", "on", _few(resting, "are in evaluation mode") or "on"


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def _checkpointing(model: nn.Module) -> str:
    """On where every layer that can recompute does so by torch's non-reentrant form, off where none does."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    states: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            function = getattr(module, "_gradient_checkpointing_func", None)
            keywords = getattr(function, "keywords", None) or {}
            is_reentrant = bool(module.gradient_checkpointing) and keywords.get("use_reentrant") is not False
            states["reentrant" if is_reentrant else _on(bool(module.gradient_checkpointing))] += 1
    if not states:
        return _on(bool(getattr(model, "is_activation_checkpointing", False)))
    return _listed(states)


# -- quantization


def _quantized(live: Live) -> Iterator[Found]:
    settings = live.config.quantization
    four, eight = four_bit_layers(live.model), eight_bit_layers(live.model)
    if settings is None:
        count = len(four) + len(eight)
        yield "quantization", "none", f"{count:,} layers" if count else "none"
        return
    layers, others = (four, eight) if settings.scheme == "nf4" else (eight, four)
    wanted = _share(live, live.facts.quantized_params, settings.scheme)
    found = _share(live, sum(layer.in_features * layer.out_features for _, layer in layers), settings.scheme)
    if found != wanted:
        plain = [name for name in decoder_linears(live.base) if ".lora_" not in name]
        found = f"{len(layers):,} of {len(layers) + len(others) + len(plain):,} layers quantized, {found}"
    if others:
        found += f", {len(others):,} layers in another scheme"
    yield "quantization.scheme", wanted, found
    if settings.scheme == "nf4" and layers:
        yield from _four_bit(live, settings, [layer for _, layer in layers])


def _share(live: Live, num_weights: int, scheme: str) -> str:
    return f"{num_weights:,} weights ({num_weights / live.facts.shape.loaded_params:.1%} of the model) in {scheme}"


def _four_bit(live: Live, settings: QuantizationSettings, layers: list[Any]) -> Iterator[Found]:
    """Read it from what the product takes: each weight's state, and the dtype that the layer casts its input to."""
    states = [layer.weight.quant_state for layer in layers]
    lacking = sum(state is None for state in states)
    yield "quantization (state)", "of every layer", f"lost by {lacking:,} layers" if lacking else "of every layer"
    held = [state for state in states if state is not None]
    yield "quantization (kind)", "nf4", _listed(Counter(str(state.quant_type) for state in held))
    nested = Counter(_on(bool(state.nested)) for state in held)
    yield "quantization.double_quant", _on(settings.uses_double_quant), _listed(nested)
    dtypes = Counter(
        _name(layer.compute_dtype) if layer.compute_type_is_set else "left to the first input" for layer in layers
    )
    yield "quantization.compute_dtype", settings.compute_dtype_for(live.config.precision), _listed(dtypes)


# -- optimizer


def _optimizer(live: Live, moment: Moment) -> Iterator[Found]:
    settings, optimizer = live.config.optimizer, live.optimizer
    yield "optimizer.name", OPTIMIZERS[settings.name], type(optimizer).__name__
    groups = optimizer.param_groups
    held = Counter(id(parameter) for group in groups for parameter in group["params"])
    wanted = {id(parameter) for parameter in live.trained.values()}
    matches = set(held) == wanted and set(held.values()) <= {1}
    yield "optimizer's parameters", "those that are trained", "those that are trained" if matches else "others"
    yield "optimizer.learning_rate", *_rates(live)
    for field, names, values in _numbers(settings):
        found = Counter(", ".join(_text(group.get(name)) for name in names) for group in groups)
        yield f"optimizer.{field}", ", ".join(map(_text, values)), _listed(found)
    if settings.kernel is not None:
        kernels = Counter("fused" if g.get("fused") else "foreach" if g.get("foreach") else "for-loop" for g in groups)
        yield "optimizer.implementation", settings.kernel, _listed(kernels)
    if moment == "after" and live.updates_applied and (settings.name != "sgd" or settings.momentum > 0):
        yield from _states(live)
    if moment == "after" and settings.name == "sgd" and live.scaler is None:
        # Its states count nothing. A scaler steps it even where an update is to be skipped.
        yield "optimizer steps", f"{live.updates_here:,}", f"{live.steps_here:,}"


def _rates(live: Live) -> tuple[str, str]:
    """The peak before anything was applied; later no more than that, for the loop sets it before every update."""
    peak = live.config.optimizer.learning_rate
    rates = [float(group["lr"]) for group in live.optimizer.param_groups]
    if live.updates_applied == 0:
        return f"{peak:g}", _listed(Counter(f"{rate:g}" for rate in rates))
    wanted = f"between 0 and {peak:g}"
    return wanted, wanted if all(0 <= rate <= peak for rate in rates) else _listed(Counter(map("{:g}".format, rates)))


def _numbers(settings: OptimizerSettings) -> Iterator[tuple[str, tuple[str, ...], tuple[object, ...]]]:
    """Yield what the groups hold: field, names in a group, values."""
    yield "weight_decay", ("weight_decay",), (settings.weight_decay,)
    if settings.name == "sgd":
        yield "momentum", ("momentum",), (settings.momentum,)
    else:
        yield "beta1, beta2, epsilon", ("betas", "eps"), ((settings.beta1, settings.beta2), settings.epsilon)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_text, value))
    return "none" if value is None else f"{value:g}"


def _states(live: Live) -> Iterator[Found]:
    name, trained = live.config.optimizer.name, live.trained
    states = {key: live.optimizer.state.get(parameter, {}) for key, parameter in trained.items()}
    lacking = [key for key, state in states.items() if any(state.get(each) is None for each in STATES[name])]
    whole = "whole for each trained weight"
    yield "optimizer states", whole, _few(lacking, "lack one") or whole
    kept = [
        (trained[key], state[each])
        for key, state in states.items()
        for each in STATES[name]
        if state.get(each) is not None
    ]
    strange = Counter(_name(state.dtype) for parameter, state in kept if state.dtype != _state_dtype(name, parameter))
    yield "optimizer states (dtype)", "as the weights ask", _listed(strange) if strange else "as the weights ask"
    elsewhere = Counter(str(state.device) for parameter, state in kept if _is_elsewhere(state, parameter))
    beside = "beside their weights"
    yield "optimizer states (device)", beside, _listed(elsewhere) if elsewhere else beside
    if name != "sgd":
        steps = Counter(f"{int(state['step']):,}" for state in states.values() if "step" in state)
        yield "optimizer steps", f"{live.updates_applied:,}", _listed(steps)


def _is_elsewhere(state: Tensor, parameter: nn.Parameter) -> bool:
    """Paged states lie in managed memory, which torch takes for the CPU's (bitsandbytes/functional.py, get_paged)."""
    return state.device != parameter.device and not getattr(state, "is_paged", False)


def _state_dtype(name: str, parameter: nn.Parameter) -> torch.dtype:
    if name.endswith("8bit"):
        return torch.uint8 if parameter.numel() >= BLOCK_8BIT else torch.float32
    return parameter.dtype


# -- packed rows


def _isolation(live: Live, packed: Batch) -> Iterator[Found]:
    settings = live.config.quantization
    rounding = ISOLATION.get(DTYPES[live.config.precision.dtype], ISOLATION_16_BIT)
    # Experts and int8's outliers take tokens of the whole row together, so others change the rounding.
    gathers = live.facts.shape.count("experts") > 0 or (settings is not None and settings.scheme == "int8")
    limits = rounding, rounding if gathers else 0.0
    found = [each for each in apart(live, packed) if not (each[0] <= limits[0] and each[1] <= limits[1])]  # NaN neither
    worst = (
        f"not isolated ({len(found):,} examples differ, by up to {max((max(each) for each in found), default=0):.2g})"
    )
    yield "packed examples", "isolated", worst if found else "isolated"
