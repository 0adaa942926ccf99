"""Fused kernels of other stacks on the tape: norms, rotary embeddings, adapters; what keeps a class's cache.

Follows fms-acceleration's fused-ops-and-kernels (Unsloth's Triton kernels), as runtime/trace/fused.py does.
"""

from collections.abc import Iterator
from types import FunctionType
from typing import Any

from foretune.memory.adapters import LoraLinear
from foretune.memory.blocks import RmsNorm
from foretune.memory.layout import numel
from foretune.memory.ops import contiguous, like, mm, product_into, reshape, scale, to, transposed
from foretune.memory.quantized import Linear4bit
from foretune.memory.stack import StackProfile
from foretune.memory.tape import Grads, Node, Tensor, attach, current, function_node

__all__ = ["fuse", "keep_products"]


def fuse(decoder: Any, stack: StackProfile) -> None:
    """Put the profile's kernels into a decoder; fused adapters act only on a quantized base."""
    for part in _parts_of(decoder) if stack.fused else ():
        if "rmsnorm" in stack.fused and isinstance(part, RmsNorm):
            part.forward = _fused_norm
        if "rope" in stack.fused and hasattr(part, "rotate"):
            part.rotate = _rotate_in_place
        if "lora" in stack.fused:
            for names in (("q_proj", "k_proj", "v_proj"), ("o_proj",)):
                _fuse_adapters(part, names)


def keep_products(decoder: Any, kept: list[Tensor]) -> None:
    """Keep each attention's fused product of a forward: a cache made of views holds it until the outputs go."""
    for part in _parts_of(decoder):
        if hasattr(part, "c_attn"):
            part.c_attn = _Keeping(part.c_attn, kept)


def _parts_of(part: Any) -> Iterator[Any]:
    """Yield a module and all modules inside it."""
    yield part
    for child in list(vars(part).values()):
        for each in child if isinstance(child, list) else (child,):
            if hasattr(each, "__dict__") and not isinstance(each, (type, FunctionType)):
                yield from _parts_of(each)


class _Keeping:
    def __init__(self, module: Any, kept: list[Tensor]) -> None:
        self.module, self.kept = module, kept

    def __call__(self, x: Tensor) -> Any:
        product = self.module(x)
        if current().thread == "forward":
            self.kept.append(product)
        return product


# ------------------------------------------------------------------ norms and rotary embedding
def _fused_norm(norm: RmsNorm, x: Tensor) -> Tensor:
    """Keeps the input and one fp32 number a row; the gradient is written into the incoming one (rms_layernorm.py)."""
    node = function_node(lambda grads, node, *saved: [contiguous(_only(grads)), None], x, norm.weight)
    out = like(x)
    rows = Tensor((numel(x.shape[:-1]),), "f32")
    if node:
        node.save(x, norm.weight, rows)
    del rows
    return attach(node, out)


def _rotate_in_place(q: Tensor, k: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return q, k


# ------------------------------------------------------------------ adapters
def _fuse_adapters(attention: Any, names: tuple[str, ...]) -> None:
    linears = [getattr(attention, name, None) for name in names]
    if not all(isinstance(linear, LoraLinear) and isinstance(linear.base, Linear4bit) for linear in linears):
        return
    group = _Group(linears)
    for number, name in enumerate(names):
        setattr(attention, name, _Following(group) if number else group)


class _Group:
    """Adapted linear layers that share an input; called for the first of their products."""

    def __init__(self, linears: list[Any]) -> None:
        self.linears = linears
        self.ready: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        """Make all products of the group."""
        self.ready = _adapted_products(x, self.linears)
        return self.ready.pop(0)


class _Following:
    """Hands out the next product of its group."""

    def __init__(self, group: _Group) -> None:
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.ready.pop(0)


def _adapted_products(x: Tensor, linears: list[Any]) -> list[Tensor]:
    """Products of one input with several 4-bit weights and their adapters (fast_lora.py).

    Keeps the input and what dropout made of it for each adapter; the products' sums are made in place.
    """
    matrices = [matrix for linear in linears for matrix in (linear.lora_a.weight, linear.lora_b.weight)]

    def formula(grads: Grads, node: Node, *saved: Tensor) -> Grads:
        return _adapted_gradients(grads, linears, *saved)

    node = function_node(formula, x, *matrices)
    tape = current()
    before, tape.is_grad_enabled = tape.is_grad_enabled, False
    outs, to_save = _adapted_forward(x, linears)
    tape.is_grad_enabled = before
    if node:
        node.save(*to_save)
        node.num_outputs = len(outs)
    return [attach(node, out, number) for number, out in enumerate(outs)]


def _adapted_forward(x: Tensor, linears: list[Any]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """The products, and what is saved: it dies together where there is no graph."""
    autocast = current().autocast
    dtype = x.dtype if autocast is None else autocast.dtype
    x = to(x, dtype)
    rows = _rows(x)
    outs, dropped = [], []
    for linear in linears:
        a, b = _matrices(linear)
        out = mm(rows, transposed(_base_weight(linear, dtype)))
        kept = _dropped(rows, linear.probability)
        dropped.append(kept)
        mm(mm(kept, to(transposed(a), dtype)), scale(to(transposed(b), dtype)))
        outs.append(reshape(out, (*x.shape[:-1], out.shape[-1])))
    return outs, (x, *dropped)


def _adapted_gradients(grads: Grads, linears: list[Any], x: Tensor, *dropped: Tensor) -> Grads:
    """Of the input, then of each adapter's matrices in fp32."""
    dtype, shape = x.dtype, x.shape
    rows = _rows(x)
    incoming = [_rows(grad) for grad in grads if grad is not None]
    of_matrices: list[Tensor] = []
    for number, grad in enumerate(incoming):
        a, b = (to(transposed(m), dtype) for m in _matrices(linears[number]))
        of_a = mm(transposed(dropped[number]), mm(grad, transposed(b)))
        of_b = mm(mm(transposed(a), transposed(dropped[number])), grad)
        of_matrices += [transposed(of_a), transposed(of_b)]
    of_x: Tensor | None = None
    for number, grad in enumerate(incoming):
        a, b = (to(m, dtype) for m in _matrices(linears[number]))
        weight = _base_weight(linears[number], dtype)
        if of_x is not None:
            mm(grad, weight)
        elif len(linears) > 1:
            of_x = product_into(rows)
        else:
            of_x = mm(grad, weight)
        del weight
        _masked(dropped[number], grad, a, b)
    assert of_x is not None
    return [reshape(of_x, shape), *[to(grad, "f32") for grad in of_matrices]]


def _matrices(linear: Any) -> tuple[Tensor, Tensor]:
    return linear.lora_a.weight, linear.lora_b.weight


def _base_weight(linear: Any, dtype: str) -> Tensor:
    return to(linear.base.dequantize(), dtype)


def _rows(x: Tensor) -> Tensor:
    return reshape(x, (numel(x.shape[:-1]), x.shape[-1]))


def _dropped(rows: Tensor, probability: float) -> Tensor:
    """native_dropout: nobody keeps its mask, and at a probability of 0 the input is the result."""
    _mask = like(rows, "bool")
    return like(rows) if probability else rows.detach()


def _masked(kept: Tensor, grad: Tensor, a: Tensor, b: Tensor) -> None:
    """(kept != 0) * (grad @ b @ a), which is added in place."""
    is_kept = like(kept, "bool")
    update = mm(mm(grad, b), scale(a))
    _added = like(update)
    del is_kept, update


def _only(grads: Grads) -> Tensor:
    grad = grads[0]
    assert grad is not None
    return grad
