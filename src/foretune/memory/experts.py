"""Stacked experts and what routers need: the operations, and the forward that Transformers 5 runs for all of them.

As in ops.py each docstring says what is allocated and saved and what backward allocates; n is the number of elements
of the result, s its item size, T the tokens, k the experts of a token, E the experts. Which token goes to which
expert decides nothing: every array has T*k rows, sorted by expert.
"""

from collections.abc import Callable

from foretune.memory.blocks import Module, call
from foretune.memory.layout import Shape, numel
from foretune.memory.ops import (
    add_in_place,
    expand,
    like,
    mul,
    product,
    reshape,
    split_last,
    to,
    transpose,
    unsqueeze,
    view,
    widened,
)
from foretune.memory.tape import ITEM_BYTES, Grads, Node, Tensor, attach, current, like_iterator, node_for

__all__ = [
    "Experts",
    "divide",
    "divide_in_place",
    "gated",
    "gather_last",
    "gather_rows",
    "grouped_product",
    "max_last",
    "repeat_rows",
    "scatter_in_place",
    "scatter_value",
    "sort",
    "sum_over",
    "top_k",
]


# ------------------------------------------------------------------ what routers need
def top_k(t: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last dimension: values (n*s) and indices (8n); saves the indices; backward fills a tensor
    of t's shape with zeros and the gradient."""
    full = t.shape

    def formula(grads: Grads, node: Node, indices: Tensor) -> Grads:
        return [Tensor(full, _only(grads).dtype)]

    node = node_for(formula, t)
    shape = (*full[:-1], k)
    values, indices = Tensor(shape, t.dtype), Tensor(shape, "i64")
    if node:
        node.save(indices)
    return attach(node, values), indices


def max_last(t: Tensor) -> tuple[Tensor, Tensor]:
    """max(-1, keepdim): values (n*s) and indices (8n); saves and computes as top_k."""
    return top_k(t, 1)


def sum_over(t: Tensor, dim: int, *, keepdim: bool = False) -> Tensor:
    """Sum over one dimension: n*s (fp32 under autocast, from a copy); backward expands the gradient, which allocates
    nothing."""
    t = widened(t)
    full, dim = t.shape, dim % len(t.shape)

    def formula(grads: Grads, node: Node) -> Grads:
        grad = _only(grads)
        return [expand(grad if keepdim else unsqueeze(grad, dim), full)]

    node = node_for(formula, t)
    rest = (*full[:dim], 1, *full[dim + 1 :]) if keepdim else (*full[:dim], *full[dim + 1 :])
    out = Tensor(rest, t.dtype)
    current().reduction(numel(rest), full[dim], is_inner=dim == len(full) - 1)
    return attach(node, out)


def _divide_grad(grads: Grads, node: Node, *saved: Tensor) -> Grads:
    grad, (first, second) = _only(grads), node.edges
    other, dividend = saved[0], saved[-1]  # `self` is saved where `other` wants a gradient
    other_grad = None
    if second:
        once = like_iterator(dividend, other)
        twice = like_iterator(once, other)
        negative = like(grad)
        other_grad = like_iterator(negative, twice)
        del negative, twice, once
    return [like_iterator(grad, other) if first else None, other_grad]


def divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b: n*s; saves b, and a where b wants a gradient; backward n*s for a, and for b two quotients, the negated
    gradient and their product (then the sum to a broadcast shape)."""
    node = node_for(_divide_grad, a, b)
    if node:
        node.save(b, a if b.needs_grad else None)
    return attach(node, like_iterator(a, b))


def divide_in_place(a: Tensor, b: Tensor) -> Tensor:
    """a /= b: a keeps its storage; where b wants a gradient, a is copied first (n*s); saves and computes as divide."""
    node = node_for(_divide_grad, a, b)
    if node is None:
        return a
    node.save(b, like(a) if b.needs_grad else None)
    return attach(node, a.detach())


def gather_last(t: Tensor, index: Tensor) -> Tensor:
    """gather on the last dimension: n*s; saves the index and t; backward fills a tensor of t's shape with zeros and
    adds the gradient to it in place."""

    def formula(grads: Grads, node: Node, index: Tensor, t: Tensor) -> Grads:
        return [Tensor(t.shape, _only(grads).dtype)]

    node = node_for(formula, t)
    if node:
        node.save(index, t)
    return attach(node, Tensor(index.shape, t.dtype))


def scatter_value(t: Tensor, index: Tensor) -> Tensor:
    """scatter of a number, out of place: n*s; saves the index; backward n*s."""
    node = node_for(lambda grads, node, index: (like(_only(grads)),), t)
    if node:
        node.save(index)
    return attach(node, like(t))


def scatter_in_place(t: Tensor, index: Tensor, source: Tensor) -> Tensor:
    """scatter_ into a tensor that wants no gradient: nothing; saves the index; backward gathers the source's (n*s)."""
    node = node_for(lambda grads, node, index: (Tensor(index.shape, _only(grads).dtype),), source)
    if node is None:
        return t
    node.save(index)
    return attach(node, t.detach())


def repeat_rows(t: Tensor, times: int) -> Tensor:
    """repeat(times, 1): n*s; backward sums over the repetitions."""
    rows, width = t.shape

    def formula(grads: Grads, node: Node) -> Grads:
        return [sum_over(view(_only(grads), times, rows, width), 0)]

    return attach(node_for(formula, t), Tensor((times * rows, width), t.dtype))


# ------------------------------------------------------------------ what experts need
def sort(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted whole numbers and where they stood: 8n each."""
    return Tensor(ids.shape, ids.dtype), Tensor(ids.shape, "i64")


def gather_rows(t: Tensor, index: Tensor) -> Tensor:
    """t[index], an index on the device: n*s; saves the index; backward fills a tensor of t's shape with zeros and adds
    the gradient's rows to it in place."""
    full = t.shape

    def formula(grads: Grads, node: Node, index: Tensor) -> Grads:
        return [Tensor(full, _only(grads).dtype)]

    node = node_for(formula, t)
    if node:
        node.save(index)
    return attach(node, Tensor((*index.shape, *full[1:]), t.dtype))


def _count(ids: Tensor, bins: int) -> Tensor:
    """histc: one number for each bin."""
    return Tensor((bins,), ids.dtype)


def _cumulated(counts: Tensor) -> Tensor:
    """cumsum, of whole numbers by way of a copy as int64."""
    out = like(counts)
    current().temporaries(numel(counts.shape) * ITEM_BYTES["i64"])
    return out


def grouped_product(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """_grouped_mm: rows of a, expert by expert, times that expert's matrix of b [E, K, N]: rows*N*s; saves b if a wants
    a gradient, the offsets, a if b wants one; backward: b's gradient first (all experts, in b's layout), then a's."""
    shape, is_transposed = b.shape, b.strides[-2] == 1

    def formula(grads: Grads, node: Node, *saved: Tensor) -> Grads:
        grad, (first, second) = _only(grads), node.edges
        second_grad = _stack_gradient(shape, grad.dtype, is_transposed) if second else None
        first_grad = product((grad.shape[0], shape[1]), grad.dtype) if first else None
        return [first_grad, second_grad]

    node = node_for(formula, a, b)
    if node:
        node.save(b if a.needs_grad else None, offsets, a if b.needs_grad else None)
    return attach(node, product((a.shape[0], shape[2]), a.dtype))


def _stack_gradient(shape: Shape, dtype: str, is_transposed: bool) -> Tensor:
    """_grouped_mm_mat2_backward: laid out as the stack is."""
    if not is_transposed:
        return product(shape, dtype)
    out = product((shape[0], shape[2], shape[1]), dtype)
    return transpose(out, 1, 2)


def gated(act: Module) -> Callable[[Tensor], Tensor]:
    """_default_apply_gate: act(gate) * up of one projection's halves."""

    def apply_gate(gate_up_out: Tensor) -> Tensor:
        width = gate_up_out.shape[-1] // 2
        gate, up = split_last(gate_up_out, [width, width])
        return mul(call(act, gate), up)

    return apply_gate


class Experts:
    """grouped_mm_experts_forward (integrations/moe.py), which Transformers takes unless another is asked for.

    `apply_gate` is the class's `_apply_gate`. Stacks are [E, out, in], or [E, in, out] where `is_transposed`.
    """

    def __init__(
        self,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        apply_gate: Callable[[Tensor], Tensor],
        *,
        biases: tuple[Tensor, Tensor] | None = None,
        is_transposed: bool = False,
    ) -> None:
        self.gate_up_proj, self.down_proj, self.apply_gate = gate_up_proj, down_proj, apply_gate
        self.biases, self.is_transposed, self.num_experts = biases, is_transposed, gate_up_proj.shape[0]

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run T rows through the experts that their k indices name; weights in fp32 make the last rows fp32."""
        num_top_k, num_tokens, hidden_dim = top_k_index.shape[-1], *hidden_states.shape
        sample_weights = reshape(top_k_weights, (num_tokens * num_top_k,))
        expert_ids = reshape(top_k_index, (num_tokens * num_top_k,))
        expert_ids_g, perm = sort(expert_ids)
        selected_hidden_states_g = gather_rows(hidden_states, like(perm))
        sample_weights_g = gather_rows(sample_weights, perm)
        histc_input = like(expert_ids_g, "i32")
        tokens_per_expert = _count(histc_input, self.num_experts)
        offsets = _cumulated(tokens_per_expert)
        selected_biases = gather_rows(self.biases[0], expert_ids_g) if self.biases else None
        proj_out = self._grouped_linear(selected_hidden_states_g, self.gate_up_proj, offsets, selected_biases)
        proj_out = self.apply_gate(proj_out)
        selected_biases = gather_rows(self.biases[1], expert_ids_g) if self.biases else None
        proj_out = self._grouped_linear(proj_out, self.down_proj, offsets, selected_biases)
        weighted_out = mul(proj_out, unsqueeze(sample_weights_g, 1))
        inv_perm = like(perm)
        like(perm)  # arange
        weighted_out = gather_rows(weighted_out, inv_perm)
        final_hidden_states = sum_over(view(weighted_out, num_tokens, num_top_k, hidden_dim), 1)
        return to(final_hidden_states, hidden_states.dtype)

    def _grouped_linear(self, input: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None) -> Tensor:
        """_grouped_linear and _grouped_mm, which casts rows to the stack's dtype."""
        matrices = weight if self.is_transposed else transpose(weight, -2, -1)
        out = grouped_product(to(input, weight.dtype), matrices, offs)
        if bias is not None:
            out = add_in_place(out, bias)
        return out


def _only(grads: Grads) -> Tensor:
    grad = grads[0]
    assert grad is not None
    return grad
