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


def _of_each(group: Parameters, kind: str) -> list[tuple[int | None, Tensor]]:
    """A foreach operator's results: a tensor like each parameter, all alive together."""
    results = []
    for layer, p in group:
        current().segment(f"{kind} {p.dtype}", layer)
        results.append((layer, Tensor(p.shape, p.dtype)))
    current().segment(f"{kind} end")
    return results


def _free_from_the_last(results: list[tuple[int | None, Tensor]], kind: str) -> None:
    while results:
        layer, result = results[-1]
        current().segment(f"{kind} free {result.dtype}", layer)
        del result
        results.pop()


class AdamwForeach(_Optimizer):
    """torch's foreach AdamW (torch/optim/adam.py, _multi_tensor_adam): two states of the parameter's dtype each;
    square roots of all second moments of a dtype alive together, until those of the next are there."""

    def make_states(self, p: Tensor) -> Any:
        return Tensor(p.shape, p.dtype), Tensor(p.shape, p.dtype)

    def update(self, trained: Parameters) -> None:
        roots: list[tuple[int | None, Tensor]] = []
        for group in _by_dtype(trained):
            results = _of_each(group, "roots")
            _free_from_the_last(roots, "roots")
            roots = results
            del results
        _free_from_the_last(roots, "roots")
        current().segment("update")


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


class PagedAdamw(_Optimizer):
    """bitsandbytes' PagedAdamW: two fp32 states each; those of 1e5 elements and more live in managed memory."""

    def make_states(self, p: Tensor) -> Any:
        return () if numel(p.shape) >= PAGED_FROM_ELEMENTS else (Tensor(p.shape, "f32"), Tensor(p.shape, "f32"))


class SgdFused(_Optimizer):
    """torch's fused SGD: no state, or with momentum one each."""

    def __init__(self, parameters: Parameters, *, has_momentum: bool) -> None:
        super().__init__(parameters)
        self.has_momentum = has_momentum

    def make_states(self, p: Tensor) -> Any:
        return Tensor(p.shape, p.dtype) if self.has_momentum else ()


class SgdForeach(SgdFused):
    """torch's foreach SGD (torch/optim/sgd.py, _multi_tensor_sgd), one dtype after the other: gradients with the decay
    added, which momentum is cloned from in the first step."""

    def __init__(self, parameters: Parameters, *, has_momentum: bool, has_decay: bool) -> None:
        super().__init__(parameters, has_momentum=has_momentum)
        self.has_decay = has_decay

    def step(self) -> None:
        tape = current()
        before, tape.component = tape.component, "optimizer states"
        for group in _by_dtype([(layer, p) for layer, p in self.parameters if p.grad is not None]):
            decayed = _of_each(group, "decay") if self.has_decay else []
            for layer, p in group:
                if id(p) not in self.states:
                    tape.segment(f"states {p.dtype}", layer)
                    self.states[id(p)] = self.make_states(p)
            tape.segment("states end")
            _free_from_the_last(decayed, "decay")
        tape.segment("update")
        tape.component = before


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
    pages_adamw: bool = False,
) -> Optimizer:
    """Return the optimizer that the settings name; `pages_adamw`: the stack takes the paged one for `adamw`.

    `undecayed` are a group of their own, without weight decay; 8-bit optimizers keep fp32 states for those `in_32bit`.
    Both by identity.
    """
    if pages_adamw and settings.name == "adamw":
        return PagedAdamw(parameters)
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
        if is_fused:
            return SgdFused(parameters, has_momentum=settings.momentum > 0)
        return SgdForeach(parameters, has_momentum=settings.momentum > 0, has_decay=has_weight_decay)
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
    num_gradients, norms = 0, []
    for group in _by_dtype(trained):
        num_in_group = sum(1 if layer is None else num_standing_for[layer] for layer, _ in group)
        partial = Storage(foreach_norm_workspace(num_in_group, max(numel(p.shape) for _, p in group)))
        for layer, p in group:
            tape.segment(f"norms {p.dtype}", layer)
            norms.append((layer, Tensor((), p.dtype)))
        tape.segment("norms end")
        del partial
        num_gradients += num_in_group
    dtype = promote(*[norm.dtype for _, norm in norms])
    stacked = Tensor((num_gradients,), dtype)
    total = Tensor((), dtype)
    del stacked
    _free_from_the_last(norms, "norms")
    tape.segment("clip")
    shifted = Tensor((), dtype)
    inverse = Tensor((), dtype)
    coefficient = Tensor((), dtype)
    del inverse, shifted
    clamped = Tensor((), dtype)
    del coefficient, clamped, total
