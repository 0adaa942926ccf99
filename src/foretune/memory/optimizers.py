"""What optimizers allocate: states in the first update, temporaries in each."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from foretune.contract import OptimizerSettings
from foretune.memory.kernels import foreach_norm_workspace
from foretune.memory.layout import numel
from foretune.memory.tape import ITEM_BYTES, Storage, Tensor, current, promote
from foretune.models import ParameterSpec

__all__ = ["Optimizer", "Parameters", "clip_gradients", "has_decay", "make_optimizer"]

Parameters = Sequence[tuple[int | None, Tensor]]

PAGED_FROM_ELEMENTS = 100_000
MIN_8BIT_ELEMENTS = 4096


class Optimizer(Protocol):
    """What the loop asks of an optimizer."""

    def step(self) -> None:
        """Apply one update."""

    def zero_grad(self) -> None:
        """Let go of all gradients."""


class _Optimizer:
    """Parameters with the layers they are in, and states made in the first step."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.states: dict[int, Any] = {}

    def step(self) -> None:
        tape = current()
        before, tape.component = tape.component, "optimizer states"
        trained = [(i, layer, p) for i, (layer, p) in enumerate(self.parameters) if p.grad is not None]
        for i, layer, p in trained:
            if i not in self.states:
                tape.segment("states", layer)
                self.states[i] = self.make_states(p)
        tape.segment("states end")
        self.update([(layer, p) for _, layer, p in trained])
        tape.component = before

    def make_states(self, p: Tensor) -> Any:
        raise NotImplementedError

    def update(self, trained: Parameters) -> None:
        """Temporaries of the update."""

    def zero_grad(self) -> None:
        let_go(self.parameters)


def let_go(parameters: Parameters) -> None:
    """Let go of all gradients."""
    tape = current()
    for layer, p in parameters:
        tape.segment("zero", layer)
        p.grad = None
    tape.segment("zero end")


def _by_dtype(trained: Parameters) -> Sequence[Parameters]:
    """Group as foreach operators do, which take one dtype at a time (torch/utils/_foreach_utils.py). Their map is
    C++'s, where the dtype that was met last comes first."""
    groups: dict[str, list[tuple[int | None, Tensor]]] = {}
    for layer, p in trained:
        groups.setdefault(p.dtype, []).append((layer, p))
    return list(groups.values())[::-1]


def _temporary_of_gradients(trained: Parameters, kind: str) -> None:
    """A foreach operator's results: one tensor a parameter, all alive together, freed from the last."""
    tape = current()
    for group in _by_dtype(trained):
        results: list[Tensor] = []
        name = f"{kind} {group[0][1].dtype}"
        for layer, p in group:
            tape.segment(name, layer)
            results.append(Tensor(p.shape, p.dtype))
        tape.segment(f"{name} end")
        while results:
            tape.segment(f"{name} free", group[len(results) - 1][0])
            results.pop()
    tape.segment("update")


class AdamwForeach(_Optimizer):
    """torch's foreach AdamW (torch/optim/adam.py, _multi_tensor_adam): two states of the parameter's dtype each;
    square roots of all second moments alive together."""

    def make_states(self, p: Tensor) -> Any:
        return Tensor(p.shape, p.dtype), Tensor(p.shape, p.dtype)

    def update(self, trained: Parameters) -> None:
        _temporary_of_gradients(trained, "roots")


class AdamwFused(_Optimizer):
    """torch's fused AdamW: a step counter on the device (4 B) and two states each; no temporary."""

    def make_states(self, p: Tensor) -> Any:
        return Tensor((), "f32"), Tensor(p.shape, p.dtype), Tensor(p.shape, p.dtype)


class Adamw8bit(_Optimizer):
    """bitsandbytes' AdamW8bit (optim/optimizer.py): two states of one byte and two fp32 scales for 256 elements;
    tensors under 4,096 elements keep fp32 states. Paged: states of 1e5 elements and more live in managed memory."""

    def __init__(
        self, parameters: Parameters, *, is_paged: bool, maps: list[Storage], in_32bit: Collection[int]
    ) -> None:
        super().__init__(parameters)
        self.is_paged, self.maps, self.in_32bit = is_paged, maps, in_32bit

    def make_states(self, p: Tensor) -> Any:
        n = numel(p.shape)
        is_on_device = not self.is_paged or n < PAGED_FROM_ELEMENTS
        if n < MIN_8BIT_ELEMENTS or id(p) in self.in_32bit:
            return [Tensor(p.shape, "f32") for _ in range(2)] if is_on_device else []
        if not self.maps:
            current().segment("maps")
            self.maps += [Storage(256 * ITEM_BYTES["f32"]) for _ in range(2)]
        states = [Tensor(p.shape, "u8") for _ in range(2)] if is_on_device else []
        return states + [Tensor((-(-n // 256),), "f32") for _ in range(2)]


class Sgd(_Optimizer):
    """torch's SGD: no state, or with momentum one each, cloned from the first gradient."""

    def __init__(self, parameters: Parameters, *, has_momentum: bool, is_foreach: bool, has_decay: bool) -> None:
        super().__init__(parameters)
        self.has_momentum, self.is_foreach, self.has_decay = has_momentum, is_foreach, has_decay

    def make_states(self, p: Tensor) -> Any:
        return Tensor(p.shape, p.dtype) if self.has_momentum else ()

    def update(self, trained: Parameters) -> None:
        if self.is_foreach and self.has_decay:
            _temporary_of_gradients(trained, "decay")


_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of parameters without weight decay (Trainer.get_decay_parameter_names)."""


def has_decay(spec: ParameterSpec) -> bool:
    """Say whether Trainer's optimizer gives a parameter weight decay: norms and biases have none."""
    return spec.role != "norm" and not _WITHOUT_DECAY.search(spec.name.lower())


class _Groups:
    """One optimizer with several groups, each with its own pass."""

    def __init__(self, parameters: Parameters, groups: Sequence[_Optimizer]) -> None:
        self.parameters, self.groups = parameters, groups

    def step(self) -> None:
        for group in self.groups:
            group.step()

    def zero_grad(self) -> None:
        """The model's: in module order."""
        let_go(self.parameters)


def make_optimizer(
    settings: OptimizerSettings,
    parameters: Parameters,
    *,
    undecayed: Collection[int] | None = None,
    in_32bit: Collection[int] = (),
) -> Optimizer:
    """Return the optimizer that the settings name.

    `undecayed` are a group of their own, without weight decay; 8-bit optimizers keep fp32 states for those `in_32bit`.
    Both by identity.
    """
    maps: list[Storage] = []
    if undecayed is None:
        return _one_group(settings, parameters, maps, in_32bit, settings.weight_decay > 0)
    groups = [[(layer, p) for layer, p in parameters if (id(p) in undecayed) is not has] for has in (True, False)]
    decays = settings.weight_decay > 0, False
    made = [_one_group(settings, group, maps, in_32bit, decay) for group, decay in zip(groups, decays, strict=True)]
    return _Groups(parameters, made)


def _one_group(
    settings: OptimizerSettings,
    parameters: Parameters,
    maps: list[Storage],
    in_32bit: Collection[int],
    has_weight_decay: bool,
) -> _Optimizer:
    is_fused = settings.kernel == "fused"
    if settings.name in ("adamw_8bit", "paged_adamw_8bit"):
        return Adamw8bit(parameters, is_paged=settings.name == "paged_adamw_8bit", maps=maps, in_32bit=in_32bit)
    if settings.name == "sgd":
        return Sgd(
            parameters,
            has_momentum=settings.momentum > 0,
            is_foreach=not is_fused,
            has_decay=has_weight_decay,
        )
    return AdamwFused(parameters) if is_fused else AdamwForeach(parameters)


def clip_gradients(parameters: Parameters, num_standing_for: Mapping[int, int]) -> None:
    """clip_grad_norm_ with foreach: one partial sum for each 65,536 elements, one norm a gradient, their norm.

    `num_standing_for` says how many layers each recorded one stands for: the sums of all gradients lie in one tensor.
    torch/nn/utils/clip_grad.py; aten/src/ATen/native/cuda/ForeachReduceOp.cu.
    """
    tape = current()
    trained = [(layer, p) for layer, p in parameters if p.grad is not None]
    if not trained:
        return
    num_gradients, norms, places = 0, [], []
    for group in _by_dtype(trained):
        name = f"norms {group[0][1].dtype}"
        number = sum(1 if layer is None else num_standing_for[layer] for layer, _ in group)
        partial = Storage(foreach_norm_workspace(number, max(numel(p.shape) for _, p in group)))
        for layer, p in group:
            tape.segment(name, layer)
            norms.append(Tensor((), p.dtype))
            places.append((f"{name} free", layer))
        tape.segment(f"{name} end")
        del partial
        num_gradients += number
    dtype = promote(*[norm.dtype for norm in norms])
    stacked = Tensor((num_gradients,), dtype)
    total = Tensor((), dtype)
    del stacked
    while norms:
        tape.segment(*places.pop())
        norms.pop()
    tape.segment("clip")
    shifted = Tensor((), dtype)
    inverse = Tensor((), dtype)
    coefficient = Tensor((), dtype)
    del inverse, shifted
    clamped = Tensor((), dtype)
    del coefficient, clamped, total
