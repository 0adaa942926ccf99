"""Does what runs equal what was asked for? Read from living modules, tensors and optimizer states, never from settings.

Everything is looked at before the first update and after the last one, and every difference is told at once.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from foretune.contract import LoraSettings
from foretune.errors import Problem, VerificationError
from foretune.evidence import Check
from foretune.runtime.digest import digest
from foretune.runtime.live import Live, fingerprint
from foretune.runtime.load import DTYPES, eight_bit_layers, four_bit_layers
from foretune.runtime.update import Batch

__all__ = ["observe", "require_verified"]

Moment = Literal["before", "after"]
Found = tuple[str, object, object]
"""Field, requested, effective."""

NAMES = {value: key for key, value in DTYPES.items()}
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit"}
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


def observe(live: Live, moment: Moment, packed: Batch | None) -> tuple[Check, ...]:
    """Read every property, whether it is as it was asked for or not."""
    with torch.no_grad():
        found = [
            *_formats(live),
            *_frozen(live, moment),
            *_adapters(live),
            *_program(live),
            *_quantized(live),
            *_optimizer(live, moment),
            *_isolation(live, packed),
        ]
    return tuple(
        Check(field=field, moment=moment, requested=str(requested), effective=str(effective))
        for field, requested, effective in found
    )


# -- formats and places


def _formats(live: Live) -> Iterator[Found]:
    precision, others = live.config.precision, []
    base, adapters = [], []
    for name, parameter in live.model.named_parameters():
        if ".lora_" in name:
            adapters.append(parameter)
        elif ".modules_to_save." in name:
            others.append(parameter)
        elif getattr(parameter, "quant_state", None) is None and parameter.dtype != torch.int8:
            base.append((name, parameter))
    kept = tuple(getattr(live.base, "_keep_in_fp32_modules_strict", None) or ())
    plain = [
        parameter
        for name, parameter in base
        if not (
            parameter.dtype == torch.float32 and (_is_prepared(live, parameter) or any(key in name for key in kept))
        )
    ]
    yield "precision.dtype", precision.dtype, _dtypes(plain) or precision.dtype
    if adapters:
        yield "precision.adapter_dtype", precision.adapter_dtype, _dtypes(adapters)
    if others:
        yield "lora.modules_to_save (dtype)", "a floating point dtype", _floating(others)
    wanted = live.config.device
    tensors: Iterable[Tensor] = (*live.model.parameters(), *live.model.buffers())
    places = Counter(tensor.device.type for tensor in tensors)
    yield "device", wanted, _listed(places)


def _is_prepared(live: Live, parameter: nn.Parameter) -> bool:
    """Norms may be held in fp32 beside a quantized base (PEFT's preparation does so)."""
    return live.config.quantization is not None and parameter.dim() == 1


def _dtypes(parameters: Iterable[Tensor]) -> str:
    return _listed(Counter(NAMES.get(each.dtype, str(each.dtype).removeprefix("torch.")) for each in parameters))


def _floating(parameters: Iterable[Tensor]) -> str:
    return "a floating point dtype" if all(each.is_floating_point() for each in parameters) else _dtypes(parameters)


def _listed(counts: "Counter[str]") -> str:
    """One word where all agree, else each with its number."""
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} ({count:,} tensors)" for name, count in counts.most_common())


# -- what is trained


def _frozen(live: Live, moment: Moment) -> Iterator[Found]:
    trained = live.trained
    yield "trainable parameters", f"{live.facts.trainable_params:,}", f"{sum(map(Tensor.numel, trained.values())):,}"
    identities = {id(parameter) for parameter in trained.values()}
    may_change = identities if moment == "after" else set()
    changed = [
        name
        for name, (parameter, before) in live.loaded.items()
        if id(parameter) not in may_change and fingerprint(parameter) != before
    ]
    yield "base weights that are not trained", "unchanged", _few(changed, "changed") or "unchanged"
    with_gradient = [
        name for name, each in live.model.named_parameters() if not each.requires_grad and each.grad is not None
    ]
    yield "gradients of frozen weights", "none", _few(with_gradient, "have one") or "none"
    if moment == "after" and live.updates_here:
        still = [name for name, each in trained.items() if digest(each) == live.initial[name]]
        yield "trained weights", "changed", "unchanged" if len(still) == len(trained) else "changed"
        endless = [name for name, each in trained.items() if not bool(torch.isfinite(each).all())]
        yield "values of trained weights", "finite", _few(endless, "are not finite") or "finite"


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
        yield (
            f"lora.{name}",
            f"{value:g}",
            _listed(Counter(f"{_adapter_value(each, name):g}" for each in layers.values())),
        )
    yield (
        "lora.use_dora",
        lora.use_dora,
        _listed(Counter(str(bool(each.use_dora.get("default"))) for each in layers.values())),
    )
    switched_off = sorted(name for name, each in layers.items() if each.disable_adapters or each.merged)
    yield "adapters", "in use", _few(switched_off, "are switched off") or "in use"


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
    step = live.step
    loss = "liger" if step.fused_loss is not None else "chunked" if step.is_chunked else "stock"
    yield "loss", config.loss, loss
    resting = [name for name, each in live.model.named_modules() if not each.training]
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
    share = f"{live.facts.quantized_params / live.facts.shape.loaded_params:.1%}"
    reached = sum(module.in_features * module.out_features for _, module in layers)
    wanted = f"{live.facts.quantized_params:,} weights ({share} of the model) in {settings.scheme}"
    found = f"{reached:,} weights ({reached / live.facts.shape.loaded_params:.1%} of the model) in {settings.scheme}"
    if others:
        found += f", {len(others):,} layers in another scheme"
    yield "quantization.scheme", wanted, found
    if settings.scheme == "nf4":
        kinds = Counter(str(module.weight.quant_state.quant_type) for _, module in layers)
        yield "quantization (kind)", "nf4", _listed(kinds)
        nested = Counter(str(bool(module.weight.quant_state.nested)) for _, module in layers)
        yield "quantization.double_quant", settings.uses_double_quant, _listed(nested)
        compute = settings.compute_dtype_for(live.config.precision)
        dtypes = Counter(
            NAMES.get(module.compute_dtype, str(module.compute_dtype))
            if module.compute_type_is_set
            else "left to the first input"
            for _, module in layers
        )
        yield "quantization.compute_dtype", compute, _listed(dtypes)


# -- optimizer


def _optimizer(live: Live, moment: Moment) -> Iterator[Found]:
    settings, optimizer = live.config.optimizer, live.optimizer
    yield "optimizer.name", OPTIMIZERS[settings.name], type(optimizer).__name__
    groups = optimizer.param_groups
    held = Counter(id(parameter) for group in groups for parameter in group["params"])
    wanted = {id(parameter) for parameter in live.trained.values()}
    matches = set(held) == wanted and set(held.values()) <= {1}
    yield "optimizer's parameters", "those that are trained", "those that are trained" if matches else "others"
    yield (
        "optimizer.weight_decay",
        f"{settings.weight_decay:g}",
        _listed(Counter(f"{g['weight_decay']:g}" for g in groups)),
    )
    if settings.name == "sgd":
        yield "optimizer.momentum", f"{settings.momentum:g}", _listed(Counter(f"{g['momentum']:g}" for g in groups))
    else:
        asked = f"{settings.beta1:g}, {settings.beta2:g}, {settings.epsilon:g}"
        found = Counter(f"{g['betas'][0]:g}, {g['betas'][1]:g}, {g['eps']:g}" for g in groups)
        yield "optimizer.beta1, beta2, epsilon", asked, _listed(found)
    if settings.kernel is not None:
        kernels = Counter("fused" if g["fused"] else "foreach" if g["foreach"] else "for-loop" for g in groups)
        yield "optimizer.implementation", settings.kernel, _listed(kernels)
    if moment == "after" and live.updates_applied:
        yield from _states(live)


def _states(live: Live) -> Iterator[Found]:
    settings, states = live.config.optimizer, live.optimizer.state
    keeps = settings.name != "sgd" or settings.momentum > 0
    trained = live.trained
    if not keeps:
        return
    lacking = [name for name, parameter in trained.items() if not states.get(parameter)]
    yield "optimizer states", "one for each trained weight", _few(lacking, "lack one") or "one for each trained weight"
    strange: Counter[str] = Counter()
    elsewhere: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    for parameter in trained.values():
        for name, value in states.get(parameter, {}).items():
            if name == "step":
                steps[str(int(value))] += 1
            elif (
                isinstance(value, Tensor)
                and value.dim()
                and name in ("exp_avg", "exp_avg_sq", "momentum_buffer", "state1", "state2")
            ):
                if value.dtype != _state_dtype(settings.name, parameter):
                    strange[f"{name} in {NAMES.get(value.dtype, str(value.dtype))}"] += 1
                if value.device != parameter.device:
                    elsewhere[str(value.device)] += 1
    yield "optimizer states (dtype)", "as the weights ask", _listed(strange) if strange else "as the weights ask"
    yield (
        "optimizer states (device)",
        "beside their weights",
        _listed(elsewhere) if elsewhere else "beside their weights",
    )
    if settings.name != "sgd":
        yield "optimizer steps", f"{live.updates_applied:,}", _listed(steps)


def _state_dtype(name: str, parameter: nn.Parameter) -> torch.dtype:
    if name.endswith("8bit"):
        return torch.uint8 if parameter.numel() >= BLOCK_8BIT else torch.float32
    return parameter.dtype


# -- packed rows


def _isolation(live: Live, packed: Batch | None) -> Iterator[Found]:
    """Hidden states of an example in its packed row beside those of the example alone, without dropout."""
    if packed is None or packed.position_ids_BS is None:
        return
    worst = 0.0
    was_training = {module for module in live.model.modules() if module.training}
    live.model.eval()
    try:
        for row in range(packed.input_ids_BS.shape[0]):
            worst = max(worst, _leak(live, packed.input_ids_BS[row : row + 1], packed.position_ids_BS[row : row + 1]))
    finally:
        for module in was_training:
            module.training = True
    limit = ISOLATION.get(DTYPES[live.config.precision.dtype], ISOLATION_16_BIT)
    yield "packed examples", "isolated", "isolated" if worst <= limit else f"not isolated (they differ by {worst:.2g})"


def _leak(live: Live, ids_1S: Tensor, positions_1S: Tensor) -> float:
    together = _hidden(live, ids_1S, positions_1S)
    starts = [int(place) for place in (positions_1S[0] == 0).nonzero()[:, 0]]
    worst = 0.0
    for start, stop in zip(starts, [*starts[1:], ids_1S.shape[1]], strict=True):
        alone = _hidden(live, ids_1S[:, start:stop], None)
        here = together[:, start:stop]
        worst = max(worst, float((here - alone).norm() / alone.norm().clamp_min(1e-12)))
    return worst


def _hidden(live: Live, ids_BS: Tensor, positions_BS: Tensor | None) -> Tensor:
    positions = {} if positions_BS is None else {"position_ids": positions_BS}
    backbone = getattr(live.base, live.base.base_model_prefix)
    return backbone(input_ids=ids_BS, use_cache=False, **positions).last_hidden_state.float()
