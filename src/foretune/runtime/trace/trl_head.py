"""TRL's fused head: log-probabilities in tiles of tokens by words, so that full logits never exist.

Follows TRL 1.16: trl/trainer/utils.py (add_fused_lm_head) and trl/kernels/chunked_logprob.py. With Triton (Linux) a
tile is folded by a kernel that allocates nothing, and only the supervised tokens are scored, which copies them;
without it, torch's operators fold and every token is scored. N tokens, H hidden, V words.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from foretune.errors import UnsupportedError
from foretune.runtime.trace.recorder import Recorder

__all__ = ["add_fused_head"]

aten = torch.ops.aten
TOKENS, WORDS = 4096, 32768
"""TOKEN_CHUNK_SIZE and _CHUNKED_LOGPROB_CHUNK_SIZE."""


class _Settings(NamedTuple):
    recorder: Recorder
    has_triton: bool
    softcap: float | None


def add_fused_head(model: nn.Module, recorder: Recorder, *, has_triton: bool, begin: Callable[[], None]) -> None:
    """Put TRL's head into a causal model; `begin` is called where the head begins."""
    base: Any = model
    original, config = base.forward, base.config.get_text_config()
    settings = _Settings(recorder, has_triton, getattr(config, "final_logit_softcapping", None))
    balances = _balances_experts(config)

    @wraps(original)
    def forward(*args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return original(*args, labels=labels, **kwargs)
        outputs = base.base_model(*args, **kwargs, **({"output_router_logits": True} if balances else {}))
        begin()
        hidden = outputs.last_hidden_state[:, :-1]
        labels = labels[:, 1:]
        mask = labels != -100
        head = base.get_output_embeddings()
        log_probs, entropy, is_top1 = _per_token(hidden, labels, mask, head, settings)
        loss = -log_probs.sum() / mask.sum().clamp(min=1)
        found = {"log_probs": log_probs, "entropy": entropy, "is_top1": is_top1, "label_mask": mask}
        if not balances:
            return {"loss": loss, **found}
        experts, each = config.num_experts, config.num_experts_per_tok
        aux_loss = load_balancing_loss_func(outputs.router_logits, experts, each, kwargs.get("attention_mask"))
        return {"loss": loss + 1.0 * aux_loss, "aux_loss": aux_loss, **found}

    base.forward = forward


def _balances_experts(config: Any) -> bool:
    """Say whether SFTTrainer adds the routers' loss: where a model can return their logits and gives it a weight."""
    if not hasattr(config, "output_router_logits") or getattr(config, "router_aux_loss_coef", 0.0) == 0.0:
        return False
    if not hasattr(config, "num_experts"):
        raise UnsupportedError(
            f"TRL asks the config of {config.model_type} for num_experts, which it does not have: SFTTrainer fails.",
            hint="Set router_aux_loss_coef: 0.0 in the model's config, as SFTConfig can.",
        )
    return True


def _per_token(hidden: Tensor, labels: Tensor, mask: Tensor, head: nn.Module, settings: _Settings) -> Any:
    if settings.has_triton:
        rows, targets = _Selected.apply(hidden, mask), torch.empty(mask.numel(), dtype=torch.long, device=mask.device)
    else:
        rows, targets = hidden.reshape(-1, hidden.size(-1)), labels.clamp(min=0).reshape(-1)
    per_token: Any = _TiledLogProbs.apply(rows, head.weight, head.bias, targets, settings)
    del rows, targets
    if settings.has_triton:
        per_token = (_Scattered.apply(values, mask) for values in per_token)
    else:
        per_token = (values.view(mask.shape).masked_fill(~mask, 0) for values in per_token)
    return tuple(per_token)  # the generator is theirs: it decides what dies when


class _Selected(torch.autograd.Function):
    """hidden[mask], all of it: positions of the mask, then the rows (aten/src/ATen/native/IndexingUtils.h)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, mask: Tensor) -> Tensor:
        ctx.mask, ctx.shape = mask, hidden.shape
        positions = torch.empty(mask.numel(), 2, dtype=torch.long, device=mask.device)
        rows = torch.empty(mask.numel(), hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)
        del positions
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """index_put_ with sums: positions, their linear index, and both sorted (native/cuda/Indexing.cu)."""
        grad = grads[0]
        out = torch.zeros(ctx.shape, dtype=grad.dtype, device=grad.device)
        n, like = ctx.mask.numel(), {"dtype": torch.long, "device": grad.device}
        held = [torch.empty(2 * n, **like), *(torch.empty(n, **like) for _ in range(3))]
        del held
        return out, None


class _Scattered(torch.autograd.Function):
    """zeros.masked_scatter(mask, values), and the way back by masked_select."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor) -> Tensor:
        ctx.mask = mask
        zeros = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
        out = zeros.clone()
        sums = torch.empty(mask.numel(), dtype=torch.long, device=mask.device)
        del zeros, sums
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.empty(ctx.mask.numel(), dtype=grads[0].dtype, device=grads[0].device), None


class _TiledLogProbs(torch.autograd.Function):
    """Log-probability, entropy and whether the target is on top, in tiles; gradients are summed in fp32.

    Source: trl/kernels/chunked_logprob.py (ChunkedLogProbFunction). Learnt on: SFTTrainer on a CPU, without Triton.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else hidden_NH.dtype
        statistics = [torch.zeros(len(hidden_NH), dtype=torch.float32, device=hidden_NH.device) for _ in range(7)]
        tiles = _tiles(hidden_NH, dtype)
        for rows in _spans(len(hidden_NH), TOKENS):
            chunk_NH = hidden_NH[rows].to(dtype)
            for words in _spans(len(weight_VH), WORDS):
                tile = _product(settings.recorder, tiles, chunk_NH, weight_VH[words].to(dtype), bias_V, words)
                if not settings.has_triton:
                    _fold(tile, targets_N[rows], [values[rows] for values in statistics], words, settings.softcap)
        log_z, log_probs, entropy, is_top1 = _results(statistics)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, log_z, entropy)
        ctx.dtype, ctx.settings = dtype, settings
        ctx.mark_non_differentiable(is_top1)
        return log_probs, entropy, is_top1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients are summed in fp32, and each tile becomes its own gradient in place."""
        hidden_NH, weight_VH, bias_V, targets_N, log_z, _ = ctx.saved_tensors
        recorder, has_triton, softcap = ctx.settings
        component, recorder.component = recorder.component, "logits and loss"
        like = (hidden_NH, weight_VH, bias_V)
        sums = [
            torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device) if needed else None
            for tensor, needed in zip(like, ctx.needs_input_grad, strict=False)
        ]
        tiles = _tiles(hidden_NH, ctx.dtype)
        grad_N = grads[0].float().contiguous()
        for rows in _spans(len(hidden_NH), TOKENS):
            chunk_NH = hidden_NH[rows].to(ctx.dtype)
            for words in _spans(len(weight_VH), WORDS):
                part_VH = weight_VH[words].to(ctx.dtype)
                tile = _product(recorder, tiles, chunk_NH, part_VH, bias_V, words)
                if not has_triton:
                    _unfold(tile, targets_N[rows], log_z[rows], grad_N[rows], words, softcap)
                if sums[2] is not None:  # the two products' sums are made in place, on CUDA without fp32 factors
                    sums[2][words] += tile.sum(dim=0, dtype=torch.float32)
        recorder.component = component
        return *(None if s is None else s.to(t.dtype) for s, t in zip(sums, like, strict=True)), None, None


def _tiles(hidden_NH: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty((min(len(hidden_NH), TOKENS), WORDS), dtype=dtype, device=hidden_NH.device)


def _results(statistics: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    largest, total, weighted, _, _, before, target = statistics
    log_z = largest + torch.log(total)
    log_probs = target - log_z
    entropy = log_z - weighted / total
    is_top1 = (target >= largest) & (target > before)
    return log_z, log_probs, entropy, is_top1


def _spans(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _product(
    recorder: Recorder, tiles: Tensor, chunk_NH: Tensor, part_VH: Tensor, bias_V: Tensor | None, words: slice
) -> Tensor:
    """A tile of logits, written into the buffer. The recorder's rule for cuBLAS knows products without `out` only."""
    tile = tiles[: len(chunk_NH), : len(part_VH)]
    recorder.library_workspaces(aten.mm.default, (chunk_NH, part_VH))
    if bias_V is not None:
        tile.add_(bias_V[words].to(tile.dtype))
    return tile


def _logits(tile: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """_torch_transform: the model's scale, the cap, the temperature, each out of place."""
    z = tile.float() * 1.0
    bent = None
    if softcap is not None:
        bent = torch.tanh(z / softcap)
        z = softcap * bent
    return z * 1.0, bent


def _fold(tile: Tensor, targets: Tensor, statistics: list[Tensor], words: slice, softcap: float | None) -> None:
    """_forward_tile."""
    largest, total, weighted, _, _, before, target = statistics
    z, _ = _logits(tile, softcap)
    local = targets - words.start
    num_words = words.stop - words.start
    before_target = torch.arange(num_words, device=z.device) < local.unsqueeze(-1)
    before.copy_(torch.maximum(before, z.masked_fill(~before_target, -math.inf).amax(-1)))
    new = torch.maximum(largest, z.amax(-1))
    rescale = torch.exp(largest - new)
    e = torch.exp(z - new.unsqueeze(-1))
    total.mul_(rescale).add_(e.sum(-1))
    weighted.mul_(rescale).add_((e * z).sum(-1))
    largest.copy_(new)
    in_tile = (local >= 0) & (local < num_words)
    of_target = z.gather(-1, local.clamp(0, num_words - 1).unsqueeze(-1)).squeeze(-1)
    target.copy_(torch.where(in_tile, of_target, target))


def _unfold(
    tile: Tensor, targets: Tensor, log_z: Tensor, grad_of_log_probs: Tensor, words: slice, softcap: float | None
) -> None:
    """_backward_tile, for a loss that does not read the entropy."""
    y = tile.float() * 1.0
    bent = None
    if softcap is not None:
        bent = torch.tanh(y / softcap)
        z = softcap * bent * 1.0
    else:
        z = y * 1.0
    log_p = z - log_z.unsqueeze(-1)
    p = torch.exp(log_p)
    grad = torch.zeros_like(z)
    is_target = torch.arange(words.start, words.stop, device=z.device) == targets.unsqueeze(-1)
    grad += grad_of_log_probs.unsqueeze(-1) * (is_target.float() - p)
    grad = grad * 1.0
    if bent is not None:
        grad = grad * (1 - bent * bent)
    tile.copy_(grad * 1.0)
