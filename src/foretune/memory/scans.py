"""Operations of state-space layers, short convolutions and the delta rule, as `ops.py` has those of attention.

The docstring of each function says what it allocates, what it saves for backward, what its backward allocates. n is
the number of elements of the result, s its item size.
"""

from collections.abc import Callable, Sequence

from foretune.memory.ops import narrow, to, unsqueeze, view
from foretune.memory.tape import Grads, Node, Tensor, attach, node_for

__all__ = ["causal_conv1d", "conv1d", "split", "squeeze"]


# ------------------------------------------------------------------ views
def split(t: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """split or chunk of any dimension: views of one node; backward concatenates the gradients (n*s, contiguous)."""
    full, dtype = t.shape, t.dtype
    node = node_for(lambda grads, node: (Tensor(full, dtype),), t)
    out = []
    for size in sizes:
        shape = list(full)
        shape[dim] = size
        out.append(t.view_as(tuple(shape), t.strides))
    if node:
        node.num_outputs = len(out)
    return [attach(node, one, number) for number, one in enumerate(out)]


def squeeze(t: Tensor, dim: int) -> Tensor:
    """Allocates nothing."""
    shape = list(t.shape)
    del shape[dim]
    return view(t, *shape)


# ------------------------------------------------------------------ convolution
def conv1d(t: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """Depthwise convolution of [B, C, S]: n*s, contiguous; saves input and weight; backward: the input's gradient, the
    weight's, the bias', each contiguous. What a convolution library takes as a workspace is not counted."""
    kernel = weight.shape[-1]

    def formula(grads: Grads, node: Node, *saved: Tensor) -> Grads:
        (t, weight), wanted = saved, node.edges
        out: Grads = [None, None, None]
        if wanted[0]:
            out[0] = Tensor(t.shape, t.dtype)
        if wanted[1]:
            out[1] = Tensor(weight.shape, weight.dtype)
        if wanted[2]:
            out[2] = Tensor((weight.shape[0],), weight.dtype)
        return out

    node = node_for(formula, t, weight, bias)
    if node:
        node.save(t, weight)
    b, c, s = t.shape
    return attach(node, Tensor((b, c, s + 2 * padding - kernel + 1), t.dtype))


def causal_conv1d(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, activation: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """causal_conv1d_fn in torch: padded on both sides, the surplus sliced off (n*s twice with an activation)."""
    seq_len = hidden_states.shape[-1]
    padding = weight.shape[-1] - 1
    out = conv1d(to(hidden_states, weight.dtype), unsqueeze(weight, 1), bias, padding)
    out = narrow(out, 2, seq_len)
    if activation is not None:
        out = activation(out)
    return to(out, hidden_states.dtype)
