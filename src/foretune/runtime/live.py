"""A fine-tune that is loaded: model, step and optimizer, made in one order for training, resuming and evaluating."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foretune.contract import TrainingConfig
from foretune.memory.components import Facts
from foretune.runtime.adapters import adapted_names, attach_adapters, freeze_towers
from foretune.runtime.checkpointing import enable_checkpointing
from foretune.runtime.digest import digest
from foretune.runtime.load import DTYPES
from foretune.runtime.loss import liger_loss_sum
from foretune.runtime.optimizer import make_optimizer
from foretune.runtime.step import TrainingStep

__all__ = ["Live", "assemble", "at_rest", "fingerprint", "fingerprints", "make_live_optimizer", "remember", "seed_all"]


@dataclass
class Live:
    """What is alive while a run goes on."""

    config: TrainingConfig
    facts: Facts
    device: torch.device
    base: nn.Module
    """The causal model."""
    model: nn.Module
    """What is called: PEFT's wrapper, or the model itself."""
    step: TrainingStep
    adapted: frozenset[str]
    """Full names of the layers that have an adapter to be."""
    loaded: dict[str, tuple[nn.Parameter, int]]
    """Every parameter of the base as it was loaded, with its fingerprint then."""
    optimizer: Any = None
    scaler: torch.amp.GradScaler | None = None
    updates_applied: int = 0
    """In all processes of the run: what the optimizer has counted."""
    updates_here: int = 0
    """In this process."""
    steps_here: int = 0
    """How often the optimizer was stepped in this process, by its own account."""
    initial: dict[str, int] = field(default_factory=dict)
    """Fingerprints of the trained parameters before the first update of this process."""

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that want gradients, in module order."""
        return {name: each for name, each in self.model.named_parameters() if each.requires_grad}


@contextmanager
def at_rest(module: nn.Module) -> Iterator[None]:
    """Switch dropout off and keep no gradients, and put every module back as it was."""
    modes = {each: each.training for each in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for each, mode in modes.items():
            each.training = mode


def seed_all(seed: int) -> None:
    """Seed everything that may draw a number: adapters, dropout."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def fingerprints(model: nn.Module) -> dict[str, tuple[nn.Parameter, int]]:
    """Return every parameter with its fingerprint, that of a 4-bit weight with its scales."""
    return {name: (parameter, fingerprint(parameter)) for name, parameter in model.named_parameters()}


def fingerprint(parameter: nn.Parameter) -> int:
    """Return the fingerprint of a parameter, to be compared within this process."""
    return hash((digest(parameter), *map(digest, _scales(getattr(parameter, "quant_state", None)))))


def _scales(state: Any) -> Iterator[Tensor]:
    """Yield what turns 4-bit numbers into weights: the scales of blocks, and with double quantization those of them."""
    if state is None:
        return
    yield state.absmax
    if state.nested:
        yield state.offset
        yield from _scales(state.state2)


def assemble(
    base: nn.Module, config: TrainingConfig, facts: Facts, loaded: dict[str, tuple[nn.Parameter, int]]
) -> Live:
    """Freeze, adapt and switch on what the configuration asks for. Seeds first, so that adapters depend on it alone."""
    seed_all(config.seed)
    names: list[str] = []
    model = base
    if config.lora is None:
        freeze_towers(base, facts.shape)
    else:
        names = adapted_names(base, facts.shape, facts.adapted)
        dtypes = config.precision.adapter_dtype, config.precision.dtype
        dtype, base_dtype = (DTYPES[name] for name in dtypes)
        model = attach_adapters(base, config.lora, names, dtype=dtype, base_dtype=base_dtype)
    if config.gradient_checkpointing:
        enable_checkpointing(base)
    fused = liger_loss_sum if config.loss == "liger" else None
    step = TrainingStep(model, base, is_chunked=config.loss == "chunked", fused_loss=fused)
    step.train()
    device = next(base.parameters()).device
    return Live(config, facts, device, base, model, step, frozenset(names), loaded)


def make_live_optimizer(live: Live) -> None:
    """Give it its optimizer, and for fp16 the scaler that keeps small gradients from vanishing."""
    live.optimizer = make_optimizer(live.config.optimizer, list(live.trained.values()))
    live.optimizer.register_step_post_hook(lambda *_: _count_step(live))
    if live.config.precision.dtype == "fp16":
        live.scaler = torch.amp.GradScaler(live.device.type)
    remember(live)


def _count_step(live: Live) -> None:
    live.steps_here += 1


def remember(live: Live) -> None:
    """Note what the trained parameters are before the first update of this process."""
    live.initial = {name: digest(parameter) for name, parameter in live.trained.items()}
    held = {id(parameter) for parameter in live.trained.values()}
    for name, (parameter, _) in live.loaded.items():
        if id(parameter) in held:
            live.loaded[name] = parameter, fingerprint(parameter)
