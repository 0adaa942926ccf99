"""Losses of other stacks: those of older Transformers, Unsloth's Triton kernel, and Liger's over chunks of tokens.

Follows transformers/loss/loss_utils.py of 4.48, fms-acceleration (cross_entropy_loss.py) and Liger-Kernel
(ops/fused_linear_cross_entropy.py), as runtime/trace/{callers,fused}.py do. T tokens, V words.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from foretune.memory.head import ChunkedHead, StockHead, TransformersHead
from foretune.memory.ops import (
    contiguous,
    count_all,
    cross_entropy,
    like,
    mm,
    narrow,
    product_into,
    scale,
    sum_all,
    to,
    transposed,
    view,
)
from foretune.memory.stack import StackProfile
from foretune.memory.tape import Grads, Node, Tensor, attach, current, function_node
from foretune.memory.tiles import TiledHead

__all__ = ["make_head"]


def make_head(loss: str, stack: StackProfile, model_type: str, *arguments: Any, **options: Any) -> StockHead:
    """Return the head of a loss backend and a stack."""
    if stack.loss == "own":
        kind = {"stock": StockHead, "chunked": ChunkedHead, "liger": OwnLigerHead}[loss]
        return kind(*arguments, **options)
    if stack.loss_kernel == "trl":
        tiled = TiledHead(*arguments, **options)
        tiled.has_triton = stack.has_triton
        return tiled
    if stack.loss_kernel == "liger":
        return LigerHead(*arguments, **options)
    if stack.loss == "transformers" and stack.loss_kernel != "triton":
        return TransformersHead(*arguments, **options)
    is_kept = model_type in stack.losses_without_upcast
    older = Head445 if stack.loss == "transformers 4.45" else Head448AsIs if is_kept else Head448
    head = older(*arguments, **options)
    if stack.loss_kernel == "triton":
        head.of_tokens = _triton_cross_entropy
    return head


class Head448(TransformersHead):
    """Transformers 4.46 to 4.48: logits and labels lose a token, which copies them, and the loss makes them fp32."""

    upcasts: ClassVar[bool] = True
    of_tokens: Callable[[Tensor, Tensor], Tensor] = staticmethod(cross_entropy)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.upcasts:
            logits = to(logits, "f32")
        shifted = contiguous(narrow(logits, -2, logits.shape[-2] - 1))
        targets = contiguous(narrow(labels, -1, labels.shape[-1] - 1))
        return self.of_tokens(view(shifted, -1, shifted.shape[-1]), view(targets, -1))


class Head448AsIs(Head448):
    """The same of a class that computes its loss itself, on logits as they are."""

    upcasts = False


class Head445(Head448):
    """Transformers up to 4.45: the model makes its logits fp32."""

    def product(self, hidden_states: Tensor) -> Tensor:
        logits = super().product(hidden_states)
        logits = to(logits, "f32")
        return logits  # noqa: RET504


def _triton_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return scale(sum_all(_triton_losses(logits, labels)))


def _triton_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Keeps the logits and a number a row; the gradient is written over the logits."""
    node = function_node(lambda grads, node, logits, *_: [logits], logits)
    losses, logsumexp = Tensor(logits.shape[:1], "f32"), Tensor(logits.shape[:1], "f32")
    if node:
        node.save(logits, logsumexp, labels)
    return attach(node, losses)


class LigerHead(TransformersHead):
    """Liger's fused linear cross-entropy of fms-acceleration: head and loss over chunks; gradients from forward on."""

    def __call__(self, input_ids: Tensor, targets: Tensor, phase: str) -> dict[str, Any]:
        hidden = self.backbone(input_ids)[0]
        current().enter(phase)
        with current().counted_as("logits and loss"):
            hidden = view(contiguous(narrow(hidden, -2, hidden.shape[-2] - 1)), -1, hidden.shape[-1])
            labels = view(contiguous(narrow(targets, -1, targets.shape[-1] - 1)), -1)
            return {"loss": _liger_loss(hidden, self.weight, labels)}


def _liger_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    node = function_node(lambda grads, node, *saved: _for_edges(node, saved), hidden, weight)
    tape = current()
    before, tape.is_grad_enabled = tape.is_grad_enabled, False
    num_tokens, rows = hidden.shape[0], _rows_at_once(hidden, weight)
    of_weight = Tensor(weight.shape, weight.dtype) if weight.needs_grad else None
    of_hidden = Tensor(hidden.shape, hidden.dtype)
    losses = Tensor((num_tokens,), "f32")
    for start in range(0, num_tokens, rows):
        chunk = narrow(hidden, 0, min(rows, num_tokens - start))
        logits = mm(chunk, transposed(weight))
        logits = to(to(logits, "f32"), weight.dtype)
        scaled = scale(logits)
        mm(scaled, weight)
        if of_weight is not None:
            product_into(of_weight)
    out = sum_all(losses)
    tape.is_grad_enabled = before
    if node:
        node.save(of_hidden, of_weight)
    return attach(node, out)


def _rows_at_once(hidden: Tensor, weight: Tensor) -> int:
    """A power of two, so that the logits of a chunk are about as large as the hidden states."""
    num_tokens, width = hidden.shape
    pieces = -(-weight.shape[0] // width)
    return 1 << int(-(-num_tokens // pieces) - 1).bit_length()


def _for_edges(node: Node, gradients: Sequence[Tensor | None]) -> Grads:
    """Gradients that were made in forward, for the inputs that want one."""
    held = [t for t in gradients if t is not None]
    return [held.pop(0) if edge else None for edge in node.edges]


class OwnLigerHead(StockHead):
    """foretune's step with today's Liger: one buffer for a chunk's logits, gradients beside the loss."""

    def __call__(self, input_ids: Tensor, targets: Tensor, phase: str) -> dict[str, Any]:
        hidden_states = self.backbone(input_ids)[0]
        current().enter(phase)
        with current().counted_as("logits and loss"):
            hidden = view(hidden_states, -1, hidden_states.shape[-1])
            return {"loss": _liger_sum(hidden, self.weight, view(targets, -1), self.bias)}


def _liger_sum(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
    """Liger-Kernel 0.8. The gradients are no saved tensors: they live as long as the graph."""
    gradients: list[Tensor | None] = []
    node = function_node(lambda grads, node: _for_edges(node, gradients), hidden, weight, bias)
    tape = current()
    before, tape.is_grad_enabled = tape.is_grad_enabled, False
    out = _liger_forward(hidden, weight, targets, bias, gradients)
    tape.is_grad_enabled = before
    return attach(node, out)


def _liger_forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, gradients: list[Tensor | None]
) -> Tensor:
    num_tokens, is_training = hidden.shape[0], hidden.needs_grad
    rows = min(_rows_at_once(hidden, weight), num_tokens)
    of_hidden = like(hidden)
    of_weight = like(weight) if is_training and weight.needs_grad else None
    of_bias = like(bias) if is_training and bias is not None else None
    losses = Tensor((num_tokens,), "f32")
    counted = like(targets, "bool")
    count_all(counted)
    logits = Tensor((rows, weight.shape[0]), hidden.dtype)  # the buffer: its views are its chunks' logits
    for _ in range(0, num_tokens, rows):
        product_into(logits)
    gradients += [of_hidden, of_weight, of_bias]
    return sum_all(losses)
