"""DeepSeek V2 (models/deepseek_v2 of transformers 5.24): latent attention rotated by complex numbers, experts chosen by
softmax, from the best groups where the config says so.
"""

from typing import Any, ClassVar

from foretune.memory import ops
from foretune.memory.decoder import Modules
from foretune.memory.experts import top_k
from foretune.memory.families.latent import LatentAttentionV2
from foretune.memory.families.moe_shared import SharedExpertsDecoder
from foretune.memory.layout import numel
from foretune.memory.ops import expand, like, linear, reshape, scale, to, unsqueeze, view
from foretune.memory.pointwise import masked_fill
from foretune.memory.routers import Routing
from foretune.memory.tape import Grads, Node, Tensor, attach, like_iterator, node_for
from foretune.models import DecoderTraits

__all__ = ["DeepseekV2Decoder"]


# ------------------------------------------------------------------ complex numbers
def _complex_view(t: Tensor) -> Tensor:
    return Tensor(t.shape[:-1], "c64", tuple(s // 2 for s in t.strides[:-1]), t.storage)


def _real_view(t: Tensor) -> Tensor:
    return Tensor((*t.shape, 2), "f32", (*(2 * s for s in t.strides), 1), t.storage)


def view_as_complex(t: Tensor) -> Tensor:
    """Pairs of fp32 as one number: a view, in backward too."""
    node = node_for(lambda grads, node: (_real_view(_grad(grads)),), t)
    return attach(node, _complex_view(t))


def view_as_real(t: Tensor) -> Tensor:
    """The other way; backward makes the gradient contiguous first."""
    node = node_for(lambda grads, node: (_complex_view(ops.contiguous(_grad(grads))),), t)
    return attach(node, _real_view(t))


def _turn(t: Tensor, by: Tensor) -> Tensor:
    """A product of complex numbers, of which the second wants no gradient: n*s; saves it; backward conjugates it (its
    size) and multiplies (n*s)."""

    def formula(grads: Grads, node: Node, by: Tensor) -> Grads:
        conjugate = like(by)
        out = like_iterator(_grad(grads), conjugate)
        del conjugate
        return [out]

    node = node_for(formula, t)
    if node:
        node.save(by)
    return attach(node, like_iterator(t, by))


def _grad(grads: Grads) -> Tensor:
    grad = grads[0]
    assert grad is not None
    return grad


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Of modeling_deepseek_v2.py."""
    xq_ = view_as_complex(_in_pairs(to(xq, "f32")))
    xk_ = view_as_complex(_in_pairs(to(xk, "f32")))
    freqs_cis = unsqueeze(freqs_cis, 1)
    xq_out = to(_flattened(view_as_real(_turn(xq_, freqs_cis))), xq.dtype)
    xk_out = to(_flattened(view_as_real(_turn(xk_, freqs_cis))), xk.dtype)
    return xq_out, xk_out


def _in_pairs(t: Tensor) -> Tensor:
    return reshape(t, (*t.shape[:-1], t.shape[-1] // 2, 2))


def _flattened(t: Tensor) -> Tensor:
    return reshape(t, (*t.shape[:3], numel(t.shape[3:])))


# ------------------------------------------------------------------ the model
class DeepseekV2Attention(LatentAttentionV2):
    """DeepseekV2Attention."""

    def rotate(self, q_rot: Tensor, k_rot: Tensor, position_embeddings: Any) -> tuple[Tensor, Tensor]:
        """By complex numbers."""
        return apply_rotary_emb(q_rot, k_rot, position_embeddings)


class _Router:
    """DeepseekV2TopkRouter: softmax in fp32, no correction."""

    def __init__(self, modules: Modules, name: str) -> None:
        t = modules.traits
        assert t.num_experts is not None
        assert t.experts_per_token is not None
        self.top_k, self.num_experts = t.experts_per_token, t.num_experts
        self.is_limited = "group_limited_greedy" in t.flags
        self.num_group, self.topk_group = t.expert_groups or 1, t.expert_groups_per_token or 1
        self.weight = modules.weight(f"{name}.weight")

    def __call__(self, hidden_states: Tensor) -> Routing:
        """Choose by the forward of the class."""
        hidden_states = view(hidden_states, -1, hidden_states.shape[-1])
        router_logits = linear(to(hidden_states, "f32"), to(self.weight, "f32"))
        scores = ops.softmax(router_logits)
        if self.is_limited:
            grouped = (-1, self.num_group, self.num_experts // self.num_group)
            group_scores = _largest(view(scores, *grouped))
            _group_idx = top_k(group_scores, self.topk_group)[1]
            group_mask = like(group_scores.detach())
            score_mask = reshape(expand(unsqueeze(group_mask, 2), (group_mask.shape[0], *grouped[1:])), scores.shape)
            scores = masked_fill(scores, like(like(score_mask, "bool")))
        topk_weights, topk_indices = top_k(scores, self.top_k)
        topk_weights = scale(topk_weights)
        return router_logits, topk_weights, topk_indices


def _largest(t: Tensor) -> Tensor:
    """max(dim=-1).values: as the largest alone of top_k."""
    values, indices = Tensor(t.shape[:-1], t.dtype), Tensor(t.shape[:-1], "i64")
    full = t.shape

    def formula(grads: Grads, node: Node, indices: Tensor) -> Grads:
        return [Tensor(full, _grad(grads).dtype)]

    node = node_for(formula, t)
    if node:
        node.save(indices)
    return attach(node, values)


class DeepseekV2Decoder(SharedExpertsDecoder):
    """DeepseekV2Model."""

    attention_class: ClassVar[Any] = DeepseekV2Attention
    router_class: ClassVar[Any] = _Router
    keyword_order = ("position_embeddings", "attention_mask", "position_ids", "cache")

    @classmethod
    def layer_buffers(
        cls, traits: DecoderTraits, parameters: frozenset[str], dtype: str
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """None: its router has no correction."""
        return []

    def position_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, Any]:
        """One complex number for each pair."""
        assert self.traits.rotary_dim
        return {"full": _angles(_frequencies(to(unsqueeze(position_ids, 2), "f32"), self.traits.rotary_dim // 2))}


def _frequencies(positions: Tensor, width: int) -> Tensor:
    return Tensor((*positions.shape[:-1], width), "f32")


def _angles(freqs: Tensor) -> Tensor:
    ones = like(freqs)
    freqs_cis = like(freqs, "c64")
    del ones
    freqs_cis = like(freqs_cis)
    return freqs_cis  # noqa: RET504
