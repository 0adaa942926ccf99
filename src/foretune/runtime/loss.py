"""From hidden states to one number: the head of a model, and cross-entropy over all or over chunks of the tokens.

Shape suffixes: B batch, S tokens of a row, T all tokens, H hidden width, V vocabulary.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foretune.errors import MissingDependencyError, UnsupportedError
from foretune.memory.kernels import chunk_tokens

__all__ = [
    "IGNORED",
    "FusedLoss",
    "HeadMap",
    "chunked_loss_sum",
    "liger_loss_sum",
    "probe_head_map",
    "token_loss_sum",
]

FusedLoss = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""From hidden states [T, H], the head's weight [V, H], targets [T] and the head's bias to the summed loss."""

IGNORED = -100
"""Targets of tokens that carry no loss."""

PROBE_TOKENS, PROBE_VOCABULARY = 8, 16


class HeadMap(NamedTuple):
    """What a model does between its head's product and its logits."""

    name: str
    factor: float
    apply: Callable[[Tensor, float], Tensor]
    """From scores and factor to logits. Called directly: a frame in between would hold the scores."""


def _soft_cap(scores: Tensor, cap: float) -> Tensor:
    scores = scores / cap
    scores = torch.tanh(scores)
    return scores * cap


def token_loss_sum(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Sum the cross-entropies of all tokens whose target is not IGNORED, in fp32."""
    logits_BSV = logits_BSV.float()
    return F.cross_entropy(
        logits_BSV.view(-1, logits_BSV.shape[-1]), targets_BS.view(-1), ignore_index=IGNORED, reduction="sum"
    )


def chunked_loss_sum(hidden_BSH: Tensor, targets_BS: Tensor, head: nn.Module, head_map: HeadMap) -> Tensor:
    """As token_loss_sum of the head's logits, over a chunk of tokens at a time, recomputed in backward."""

    def chunk(hidden_TH: Tensor, targets_T: Tensor) -> Tensor:
        logits_TV = head_map.apply(head(hidden_TH), head_map.factor)
        return F.cross_entropy(logits_TV.float(), targets_T, ignore_index=IGNORED, reduction="sum")

    hidden_TH = hidden_BSH.view(-1, hidden_BSH.shape[-1])
    targets_T = targets_BS.view(-1)
    rows = chunk_tokens(targets_T.shape[0])
    total = torch.zeros((), dtype=torch.float32, device=hidden_TH.device)
    for hidden, targets in zip(hidden_TH.split(rows), targets_T.split(rows), strict=True):
        total = total + checkpoint(chunk, hidden, targets, use_reentrant=False)
    return total


def liger_loss_sum(hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, bias_V: Tensor | None) -> Tensor:
    """As token_loss_sum of the head's logits, by Liger's kernel: experimental, and for a GPU alone.

    Raises MissingDependencyError.
    """
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]
    except ImportError as error:
        raise MissingDependencyError(
            "loss is liger, and liger-kernel is not installed.", hint="Run: pip install 'foretune[liger]'", field="loss"
        ) from error
    kernel = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum")
    loss: Tensor = kernel(weight_VH, hidden_TH, targets_T, bias_V)
    return loss


def probe_head_map(model: nn.Module) -> HeadMap:
    """Find what the model does after its head, by eight tokens through its own forward.

    The backbone is replaced by one that returns given hidden states, the head by a small random one, so this needs
    neither weights nor a device. Raises UnsupportedError where none of identity, multiply, divide and soft-cap agrees.
    """
    config: Any = model.config
    config = getattr(config, "text_config", None) or config
    hidden_BSH = torch.randn(1, PROBE_TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(0))
    head = nn.Linear(config.hidden_size, PROBE_VOCABULARY, bias=False)
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(1))
        expected = _logits_of(model, hidden_BSH, head)
        scores = head(hidden_BSH)
    for candidate in _candidates(config):
        if torch.allclose(candidate.apply(scores, candidate.factor), expected, rtol=1e-4, atol=1e-4):
            return candidate
    raise UnsupportedError(
        f"{type(model).__name__} changes its logits in a way the chunked loss does not know.", hint="Set loss: stock."
    )


def _logits_of(model: nn.Module, hidden_BSH: Tensor, head: nn.Linear) -> Tensor:
    """Run the model's own forward with a stub for its backbone and a small head."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Output(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            """What else a model's forward reads off its backbone's output (router logits) is not there."""
            if name.startswith("__"):
                raise AttributeError(name)

    backbone = model.get_submodule(model.base_model_prefix)

    class Backbone(nn.Module):
        def __getattr__(self, name: str) -> Any:
            """What a model's forward reads off its backbone (Falcon H1's multiplier of logits) is the backbone's."""
            return getattr(backbone, name)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return Output(last_hidden_state=hidden_BSH)

    probe = copy.copy(model)
    probe._modules = {**model._modules}
    probe._modules[model.base_model_prefix] = Backbone()
    name = next(name for name, module in model.named_children() if module is model.get_output_embeddings())
    probe._modules[name] = head
    ids = torch.zeros(1, hidden_BSH.shape[1], dtype=torch.long)
    return probe(input_ids=ids, use_cache=False).logits


def _candidates(config: Any) -> list[HeadMap]:
    found = [HeadMap("identity", 1.0, lambda scores, factor: scores)]
    for key in ("final_logit_softcapping", "logits_soft_cap", "logit_softcapping"):
        if getattr(config, key, None):
            found.append(HeadMap("soft-cap", float(getattr(config, key)), _soft_cap))
    for key in ("logits_scaling", "logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, key, None):
            factor = float(getattr(config, key))
            found.append(HeadMap("multiply", factor, lambda scores, factor: scores * factor))
            found.append(HeadMap("divide", factor, lambda scores, factor: scores / factor))
    return found
