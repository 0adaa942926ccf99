"""Fused kernels of other stacks by their allocations: norms, rotary embeddings, adapters and losses.

Follows fms-acceleration's fused-ops-and-kernels (Unsloth's Triton kernels) and Liger's fused linear cross-entropy.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from foretune.contract import TrainingConfig
from foretune.memory.stack import StackProfile
from foretune.runtime.trace.autocast import Autocast

__all__ = ["fuse", "liger_loss", "traced_liger_sum", "triton_cross_entropy"]


def fuse(
    base: nn.Module, stack: StackProfile, config: TrainingConfig, autocast: Autocast | None
) -> list[AbstractContextManager[Any]]:
    """Put the profile's kernels into a model. Returns the patches that must be in force while it trains.

    Fused adapters act only where the base is quantized.
    """
    if "rmsnorm" in stack.fused:
        for module in base.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = _norm_of(module)
    if "lora" in stack.fused and config.quantization is not None and config.lora is not None:
        for module in base.modules():
            if type(module).__name__.endswith("Attention"):
                _fuse_adapters(module, config.lora.dropout, autocast)
    modeling = importlib.import_module(type(base).__module__)
    if "rope" not in stack.fused or not hasattr(modeling, "apply_rotary_pos_emb"):
        return []
    return [patch.object(modeling, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k))]  # in place, both ways


class _RMSNorm(torch.autograd.Function):
    """Keeps the input and one fp32 number a row; the gradient is written into the incoming one.

    Source: fms-acceleration (fused-ops-and-kernels, rms_layernorm.py). Learnt on: A100 runs of fms-hf-tuning.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        rows = torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].contiguous(), None


def _norm_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: _RMSNorm.apply(x, module.weight)


class _Adapters(torch.autograd.Function):
    """Products of one input with several 4-bit weights and their adapters.

    Keeps the input and what dropout made of it for each adapter; the products' sums are made in place.
    Source: fms-acceleration (fused-ops-and-kernels, fast_lora.py). Learnt on: A100 runs of fms-hf-tuning.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: "_Group", *matrices: Tensor) -> tuple[Tensor, ...]:
        dtype = group.dtype_for(x)
        x = x.to(dtype)
        rows = x.view(-1, x.shape[-1])
        outs, dropped = [], []
        for number, linear in enumerate(group.linears):
            a, b = matrices[2 * number], matrices[2 * number + 1]
            out = rows @ group.weight(linear, dtype).t()
            kept = torch.native_dropout(rows, group.dropout, True)[0]
            dropped.append(kept)
            out += (kept @ a.t().to(dtype)) @ (b.t().to(dtype) * 1.0)
            outs.append(out.view(*x.shape[:-1], -1))
        ctx.group, ctx.matrices = group, matrices
        ctx.save_for_backward(x, *dropped)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *dropped = ctx.saved_tensors
        group, dtype, shape = ctx.group, x.dtype, x.shape
        rows = x.view(-1, shape[-1])
        incoming = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        of_matrices: list[Tensor] = []
        for number, grad in enumerate(incoming):
            a, b = (matrix.t().to(dtype) for matrix in ctx.matrices[2 * number : 2 * number + 2])
            of_a = dropped[number].t() @ (grad @ b.t())
            of_b = (a.t() @ dropped[number].t()) @ grad
            of_matrices += [of_a.t(), of_b.t()]
        of_x: Tensor | None = None
        for number, (linear, grad) in enumerate(zip(group.linears, incoming, strict=True)):
            a, b = (matrix.to(dtype) for matrix in ctx.matrices[2 * number : 2 * number + 2])
            weight = group.weight(linear, dtype)
            if of_x is not None:
                of_x += grad @ weight
            else:
                of_x = torch.matmul(grad, weight, out=rows) if len(group.linears) > 1 else grad @ weight
            del weight
            of_x += (dropped[number] != 0) * (grad @ b @ (a * 1.0))
        assert of_x is not None
        return of_x.view(shape), None, *[grad.float() for grad in of_matrices]


class _Group:
    """Adapted linear layers that share an input."""

    def __init__(self, linears: tuple[Any, ...], dropout: float, autocast: Autocast | None) -> None:
        self.linears, self.dropout, self.autocast = linears, dropout, autocast
        self.ready: list[Tensor] = []
        for number, linear in enumerate(linears):
            linear.forward = self.first if number == 0 else self.following

    def dtype_for(self, x: Tensor) -> torch.dtype:
        return self.autocast.dtype if self.autocast is not None and self.autocast.depth else x.dtype

    def weight(self, linear: Any, dtype: torch.dtype) -> Tensor:
        """Dequantize a layer's base weight."""
        base = linear.base_layer
        return base.state.dequantized(base.weight).to(dtype)

    def first(self, x: Tensor) -> Tensor:
        """Make all products of the group."""
        matrices = []
        for linear in self.linears:
            matrices += [linear.lora_A["default"].weight, linear.lora_B["default"].weight]
        self.ready = list(_Adapters.apply(x, self, *matrices))
        return self.ready.pop(0)

    def following(self, _: Tensor) -> Tensor:
        """Hand out the next product."""
        return self.ready.pop(0)


def _fuse_adapters(attention: Any, dropout: float, autocast: Autocast | None) -> None:
    for names in (("q_proj", "k_proj", "v_proj"), ("o_proj",)):
        linears = tuple(getattr(attention, name, None) for name in names)
        if all(hasattr(linear, "lora_A") for linear in linears):
            _Group(linears, dropout, autocast)


class _TritonCrossEntropy(torch.autograd.Function):
    """Keeps the logits and a number a row; the gradient is written over the logits.

    Source: fms-acceleration (fused-ops-and-kernels, cross_entropy_loss.py). Learnt on: A100 runs of fms-hf-tuning.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        losses, logsumexp = (torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(2))
        ctx.save_for_backward(logits, logsumexp, labels)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.saved_tensors[0], None


def triton_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean loss of [T, V] logits by Unsloth's kernel."""
    return _TritonCrossEntropy.apply(logits, labels).sum() / 1.0


class _LigerLoss(torch.autograd.Function):
    """Head and loss over chunks of tokens; the gradients exist from forward on.

    Source: Liger-Kernel (ops/fused_linear_cross_entropy.py). Learnt on: A100 runs of fms-hf-tuning.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        num_tokens, width = hidden.shape
        pieces = -(-weight.shape[0] // width)
        rows = 1 << (-(-num_tokens // pieces) - 1).bit_length()
        of_weight = torch.zeros_like(weight) if weight.requires_grad else None
        of_hidden = torch.zeros_like(hidden)
        losses = torch.zeros(num_tokens, dtype=torch.float32, device=hidden.device)
        for start in range(0, num_tokens, rows):
            chunk = hidden[start : start + rows]
            logits = chunk @ weight.t()
            logits = logits.float().to(weight.dtype)
            scaled = logits * 1.0
            of_hidden[start : start + rows] = scaled @ weight
            if of_weight is not None:
                of_weight.addmm_(logits.t(), chunk)
        ctx.save_for_backward(of_hidden, of_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (*ctx.saved_tensors, None)


def liger_loss(base: Any, batch: dict[str, Tensor], begin_loss: Callable[[], None]) -> Tensor:
    """Mean loss of a causal model by Liger's fused linear cross-entropy."""
    hidden = base.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])[0]
    begin_loss()
    hidden = hidden[..., :-1, :].contiguous().view(-1, hidden.shape[-1])
    labels = batch["labels"][..., 1:].contiguous().view(-1)
    return _LigerLoss.apply(hidden, base.lm_head.weight, labels)


class _LigerSum(torch.autograd.Function):
    """Today's Liger: one buffer for the logits of a chunk, gradients made beside the loss and scaled in place.

    Source: Liger-Kernel 0.8 (ops/fused_linear_cross_entropy.py).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
        num_tokens, width = hidden.shape
        pieces = -(-weight.shape[0] // width)
        rows = min(1 << (-(-num_tokens // pieces) - 1).bit_length(), num_tokens)
        of_hidden = torch.zeros_like(hidden)
        is_training = hidden.requires_grad
        of_weight = torch.zeros_like(weight) if is_training and weight.requires_grad else None
        of_bias = torch.zeros_like(bias) if is_training and bias is not None else None
        losses = torch.zeros(num_tokens, dtype=torch.float32, device=hidden.device)
        counted = targets != -100
        counted.sum().item()
        buffer = torch.empty((rows, weight.shape[0]), dtype=hidden.dtype, device=hidden.device)
        for start in range(0, num_tokens, rows):
            chunk = hidden[start : start + rows]
            logits = buffer[: chunk.shape[0]]
            torch.mm(chunk, weight.t(), out=logits)
            if bias is not None:
                logits.add_(bias)
            torch.mm(logits, weight, out=of_hidden[start : start + rows])
            if of_weight is not None:
                of_weight.addmm_(logits.t(), chunk)
        del buffer
        ctx.gradients = of_hidden, of_weight, of_bias
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        of_hidden, of_weight, of_bias = ctx.gradients
        return of_hidden, of_weight, None, of_bias


def traced_liger_sum(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
    """Stand in for the runtime's liger_loss_sum, whose kernels need a GPU."""
    return _LigerSum.apply(hidden, weight, targets, bias)
