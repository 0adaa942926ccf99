"""Rotary embedding over pairs of neighbours, where Llama's pairs the halves of a head: Cohere, GLM, Ernie, Helium.

Each function follows apply_rotary_pos_emb of the family it names (transformers 5.24).
"""

from foretune.memory.ops import add, cat_last, mul, narrow, scale, to, unsqueeze, view
from foretune.memory.tape import Grads, Node, Tensor, attach, node_for, promote

__all__ = [
    "apply_rotary_cohere",
    "apply_rotary_ernie",
    "apply_rotary_glm",
    "apply_rotary_helium",
    "every_other",
    "repeat_pairs",
    "rotate_every_two",
    "stack_last",
]


def every_other(t: Tensor) -> Tensor:
    """t[..., ::2], t[..., 1::2]: a view; backward fills a tensor of t's shape with zeros and the gradient."""
    full, dtype = t.shape, t.dtype
    node = node_for(lambda grads, node: (Tensor(full, dtype),), t)
    return attach(node, t.view_as((*t.shape[:-1], t.shape[-1] // 2), (*t.strides[:-1], 2 * t.strides[-1])))


def stack_last(a: Tensor, b: Tensor) -> Tensor:
    """torch.stack((a, b), dim=-1): n*s, contiguous; gradients are views."""

    def formula(grads: Grads, node: Node) -> Grads:
        grad = grads[0]
        assert grad is not None
        return [grad.view_as(grad.shape[:-1], grad.strides[:-1]) for _ in range(2)]

    return attach(node_for(formula, a, b), Tensor((*a.shape, 2), promote(a.dtype, b.dtype)))


def repeat_pairs(t: Tensor) -> Tensor:
    """repeat_interleave(2, dim=-1) of a table, which no gradient flows to: n*s, contiguous."""
    return Tensor((*t.shape[:-1], 2 * t.shape[-1]), t.dtype)


def rotate_every_two(x: Tensor) -> Tensor:
    """Pairs (a, b) become (-b, a) (rotate_half of these families)."""
    x1 = every_other(x)
    x2 = every_other(x)
    rot_x = view(stack_last(scale(x2), x1), *x.shape)
    return rot_x  # noqa: RET504


def apply_rotary_cohere(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """In fp32, cast back (modeling_cohere.py)."""
    dtype = q.dtype
    q = to(q, "f32")
    k = to(k, "f32")
    cos = unsqueeze(cos, 1)
    sin = unsqueeze(sin, 1)
    q_embed = add(mul(q, cos), mul(rotate_every_two(q), sin))
    k_embed = add(mul(k, cos), mul(rotate_every_two(k), sin))
    return to(q_embed, dtype), to(k_embed, dtype)


def apply_rotary_helium(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Tables are halved and repeated in every layer (modeling_helium.py)."""
    cos = unsqueeze(cos, 1)
    sin = unsqueeze(sin, 1)
    cos = repeat_pairs(narrow(cos, -1, cos.shape[-1] // 2))
    sin = repeat_pairs(narrow(sin, -1, sin.shape[-1] // 2))
    q_embed = add(mul(q, cos), mul(rotate_every_two(q), sin))
    k_embed = add(mul(k, cos), mul(rotate_every_two(k), sin))
    return q_embed, k_embed


def apply_rotary_ernie(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As helium's, by fp32 tables, cast back (modeling_ernie4_5.py)."""
    original_dtype = q.dtype
    cos = unsqueeze(cos, 1)
    sin = unsqueeze(sin, 1)
    cos = repeat_pairs(narrow(cos, -1, cos.shape[-1] // 2))
    sin = repeat_pairs(narrow(sin, -1, sin.shape[-1] // 2))
    q_embed = add(mul(to(q, "f32"), cos), mul(to(rotate_every_two(q), "f32"), sin))
    k_embed = add(mul(to(k, "f32"), cos), mul(to(rotate_every_two(k), "f32"), sin))
    return to(q_embed, original_dtype), to(k_embed, original_dtype)


def apply_rotary_glm(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As helium's, over the first part of each head (modeling_glm.py)."""
    cos = unsqueeze(cos, 1)
    sin = unsqueeze(sin, 1)
    cos = repeat_pairs(narrow(cos, -1, cos.shape[-1] // 2))
    sin = repeat_pairs(narrow(sin, -1, sin.shape[-1] // 2))
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = narrow(q, -1, rotary_dim), narrow(q, -1, q.shape[-1] - rotary_dim)
    k_rot, k_pass = narrow(k, -1, rotary_dim), narrow(k, -1, k.shape[-1] - rotary_dim)
    q_embed = add(mul(q_rot, cos), mul(rotate_every_two(q_rot), sin))
    k_embed = add(mul(k_rot, cos), mul(rotate_every_two(k_rot), sin))
    q_embed = cat_last([q_embed, q_pass])
    k_embed = cat_last([k_embed, k_pass])
    return q_embed, k_embed
