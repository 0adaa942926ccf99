"""phimoe: LayerNorms, and a router that draws its two experts (models/phimoe of transformers 5.24)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from foretune.memory.blocks import Module
from foretune.memory.decoder import Modules
from foretune.memory.experts import divide, gather_last, max_last, scatter_value
from foretune.memory.families.classic import LayerNormDecoder
from foretune.memory.families.llama import MistralDecoder
from foretune.memory.families.moe import MixtralSparseMoeBlock, make_experts
from foretune.memory.longrope import largest_position
from foretune.memory.ops import cat_last, like, linear, mul, scale, softmax, to, unsqueeze, widened
from foretune.memory.pointwise import masked_fill, subtract
from foretune.memory.routers import Routing
from foretune.memory.tape import Grads, Node, Tensor, attach, current, like_iterator, node_for

__all__ = ["PhimoeDecoder"]


@contextmanager
def _no_grad() -> Iterator[None]:
    """torch.no_grad."""
    tape = current()
    before, tape.is_grad_enabled = tape.is_grad_enabled, False
    yield
    tape.is_grad_enabled = before


def _multiplier_grad(
    grads: Grads, node: Node, multiplier: Tensor, selected_experts: Tensor, masked_gates: Tensor
) -> Grads:
    """PhimoeMultiplier.backward: a gradient for the scores alone."""
    grad_at_output = grads[0]
    assert grad_at_output is not None
    grad_at_output = mul(grad_at_output, multiplier)
    grad_at_scores_expanded = mul(masked_gates, like(grad_at_output))
    return [grad_at_scores_expanded, None, None]


def _multiplier(
    scores: Tensor, multiplier: Tensor, selected_experts: Tensor, masked_gates: Tensor, mask_for_one: Tensor
) -> Tensor:
    """PhimoeMultiplier."""
    node = node_for(_multiplier_grad, scores, multiplier, masked_gates)
    out = like_iterator(multiplier, mask_for_one)
    if node:
        node.is_python = True
        node.save(multiplier, selected_experts, masked_gates)
    return attach(node, out)


def _threshold_mask(mask_logits_threshold: Tensor, scores: Tensor, factor: Tensor) -> Tensor:
    return like(divide(subtract(mask_logits_threshold, scores), factor), "bool")


def _sampled(masked_gates: Tensor) -> Tensor:
    """Gumbel sampling: the largest of the gates after noise; indices alone."""
    return max_last(subtract(masked_gates, like(like(masked_gates))))[1]


def _mask_for_one(selected_experts: Tensor, max_ind: Tensor, max_scores: Tensor) -> Tensor:
    return _either(like(selected_experts, "bool"), like(like(max_scores), "bool"))


def _either(a: Tensor, b: Tensor) -> Tensor:
    return like(a)


def _sparsemixer(scores: Tensor) -> tuple[Tensor, Tensor]:
    """sparsemixer, which draws and masks only in training."""
    is_training = current().is_training
    with _no_grad():
        mask_logits_threshold, max_ind = max_last(scores)
        factor = like_iterator(like(scores), mask_logits_threshold)
        mask_logits_threshold = _threshold_mask(mask_logits_threshold, scores, factor)
    masked_gates = masked_fill(scores, mask_logits_threshold)
    selected_experts = _sampled(masked_gates) if is_training else max_ind
    masked_gates = softmax(widened(masked_gates))
    multiplier_o = gather_last(masked_gates, selected_experts)
    if is_training:
        max_scores, max_ind = max_last(masked_gates)
        mask_for_one = _mask_for_one(selected_experts, max_ind, max_scores)
        mask_for_one = to(like(mask_for_one, "f32"), masked_gates.dtype)
        multiplier = _multiplier(scores, multiplier_o, selected_experts, masked_gates, mask_for_one)
    else:
        multiplier = multiplier_o
    masked_scores = scatter_value(scores, selected_experts)
    with _no_grad():
        mask_logits_threshold, max_ind = max_last(masked_scores)
        factor = like_iterator(like(scores), mask_logits_threshold)
        mask_logits_threshold = _threshold_mask(mask_logits_threshold, scores, factor)
    masked_gates_top2 = masked_fill(masked_scores, mask_logits_threshold)
    selected_experts_top2 = _sampled(masked_gates_top2) if is_training else max_ind
    masked_gates_top2 = softmax(widened(masked_gates_top2))
    multiplier_top2_o = gather_last(masked_gates_top2, selected_experts_top2)
    if is_training:
        max_scores, max_ind = max_last(masked_gates_top2)
        mask_for_one_top2 = _mask_for_one(selected_experts_top2, max_ind, max_scores)
        mask_for_one_top2 = to(like(mask_for_one_top2, "f32"), masked_gates_top2.dtype)
        multiplier_top2 = _multiplier(
            scores, multiplier_top2_o, selected_experts_top2, masked_gates_top2, mask_for_one_top2
        )
    else:
        multiplier_top2 = multiplier_top2_o
    multiplier = cat_last((multiplier, multiplier_top2))
    selected_experts = cat_last((selected_experts, selected_experts_top2))
    return multiplier, selected_experts


class PhimoeRouter:
    """PhimoeTopKRouter without jitter of its input."""

    def __init__(self, modules: Modules, name: str) -> None:
        self.weight = modules.weight(f"{name}.weight")

    def __call__(self, hidden_states: Tensor) -> Routing:
        router_logits = linear(hidden_states, self.weight)
        routing_weights, selected_experts = _sparsemixer(router_logits)
        return router_logits, routing_weights, selected_experts


def _rotary_tables(dtype: str, position_ids: Tensor, width: int, is_long: bool) -> tuple[Tensor, Tensor]:
    """PhimoeRotaryEmbedding: frequencies are made anew on the host, and the largest position is looked up."""
    _seq_len = largest_position(position_ids)
    if is_long:
        Tensor((), "bool")
    freqs = _angles(to(unsqueeze(position_ids, 2), "f32"), Tensor((width // 2,), "f32"))
    emb = cat_last([freqs, freqs])
    cos = scale(like(emb))
    sin = scale(like(emb))
    return to(cos, dtype), to(sin, dtype)


def _angles(positions: Tensor, inv_freq: Tensor) -> Tensor:
    return Tensor((*positions.shape[:-1], inv_freq.shape[0]), "f32")


class PhimoeDecoder(LayerNormDecoder, MistralDecoder):
    """PhimoeModel."""

    def make_mlp(self, name: str) -> Module:
        router = PhimoeRouter(self.modules, f"{name}.router")
        return MixtralSparseMoeBlock(router, make_experts(self.modules, f"{name}.experts"))

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        assert self.traits.rotary_dim
        return {
            "full": _rotary_tables(hidden_states.dtype, position_ids, self.traits.rotary_dim, self.traits.has_long_rope)
        }
