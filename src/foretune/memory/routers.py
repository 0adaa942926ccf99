"""Routers that several families share; each class names its file in transformers 5.24, and local names are theirs."""

from foretune.memory.blocks import softmax_f32
from foretune.memory.decoder import Modules
from foretune.memory.experts import divide_in_place, gather_last, sum_over, top_k
from foretune.memory.ops import add, add_scalar, expand, like, linear, reshape, scale, to, unsqueeze, view
from foretune.memory.pointwise import masked_fill, sigmoid
from foretune.memory.tape import Tensor

__all__ = ["GroupedRouter", "Routing", "TopKRouter"]

Routing = tuple[Tensor, Tensor, Tensor]
"""Logits, weights and indices of each token's experts."""


class TopKRouter:
    """Qwen2MoeTopKRouter (qwen2_moe, qwen3_moe, olmoe, flex_olmo): softmax over all experts in fp32, the k largest,
    divided by their sum where the config asks for it, in the logits' dtype."""

    def __init__(self, modules: Modules, name: str) -> None:
        t = modules.traits
        assert t.experts_per_token is not None
        self.top_k, self.norm_topk_prob = t.experts_per_token, t.normalizes_experts
        self.weight = modules.weight(f"{name}.weight")

    def __call__(self, hidden_states: Tensor) -> Routing:
        """Choose by the forward of the class."""
        hidden_states = view(hidden_states, -1, hidden_states.shape[-1])
        router_logits = linear(hidden_states, self.weight)
        router_probs = softmax_f32(router_logits)
        router_top_value, router_indices = top_k(router_probs, self.top_k)
        if self.norm_topk_prob:
            router_top_value = divide_in_place(router_top_value, sum_over(router_top_value, -1, keepdim=True))
        router_top_value = to(router_top_value, router_logits.dtype)
        router_scores = router_top_value
        return router_logits, router_scores, router_indices


class GroupedRouter:
    """DeepseekV3TopkRouter (deepseek_v3, glm4_moe, dots1, solar_open, exaone_moe): sigmoid scores and a correction, the
    best groups, the k best experts in them; logits and weights in fp32."""

    def __init__(self, modules: Modules, name: str) -> None:
        t = modules.traits
        assert t.num_experts is not None
        assert t.experts_per_token is not None
        self.top_k, self.num_experts, self.norm_topk_prob = t.experts_per_token, t.num_experts, t.normalizes_experts
        self.num_group, self.topk_group = t.expert_groups or 1, t.expert_groups_per_token or 1
        self.weight = modules.weight(f"{name}.weight")
        self.e_score_correction_bias = modules.buffer(f"{name}.e_score_correction_bias")

    def __call__(self, hidden_states: Tensor) -> Routing:
        """Choose by the forward of the class."""
        hidden_states = view(hidden_states, -1, hidden_states.shape[-1])
        router_logits = linear(to(hidden_states, "f32"), to(self.weight, "f32"))
        scores = sigmoid(router_logits)
        scores_for_choice = add(scores, self.e_score_correction_bias)
        grouped = (-1, self.num_group, self.num_experts // self.num_group)
        group_scores = sum_over(top_k(view(scores_for_choice, *grouped), 2)[0], -1)
        _group_idx = top_k(group_scores, self.topk_group)[1]
        group_mask = like(group_scores.detach())
        score_mask = reshape(
            expand(unsqueeze(group_mask, 2), (group_mask.shape[0], *grouped[1:])), scores_for_choice.shape
        )
        scores_for_choice = masked_fill(scores_for_choice, _inverted(_as_truth(score_mask)))
        topk_indices = top_k(scores_for_choice, self.top_k)[1]
        topk_weights = gather_last(scores, topk_indices)
        if self.norm_topk_prob:
            denominator = add_scalar(sum_over(topk_weights, -1, keepdim=True))
            topk_weights = divide_in_place(topk_weights, denominator)
        topk_weights = scale(topk_weights)
        return router_logits, topk_weights, topk_indices


def _as_truth(t: Tensor) -> Tensor:
    return like(t, "bool")


def _inverted(t: Tensor) -> Tensor:
    return like(t)
