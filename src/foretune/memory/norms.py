"""Norms that are neither Llama's RMSNorm nor nn.LayerNorm, each as its family writes it (transformers 5.24)."""

from foretune.memory import ops
from foretune.memory.blocks import LayerNorm, call
from foretune.memory.ops import add_scalar, mean_last, mul, rsqrt, square, to
from foretune.memory.pointwise import subtract
from foretune.memory.tape import Grads, Node, Tensor, attach, node_for

__all__ = ["BareLayerNorm", "BareRmsNorm", "CohereNorm", "HeliumNorm", "LayerNormPlusOne", "NormPerHead"]


class CohereNorm:
    """CohereLayerNorm: mean and variance in fp32, no bias (modeling_cohere.py)."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = to(hidden_states, "f32")
        mean = mean_last(hidden_states)
        variance = mean_last(square(subtract(hidden_states, mean)))
        hidden_states = mul(subtract(hidden_states, mean), rsqrt(add_scalar(variance)))
        hidden_states = mul(to(self.weight, "f32"), hidden_states)
        return to(hidden_states, input_dtype)


class HeliumNorm:
    """HeliumRMSNorm: the weight is cast too (modeling_helium.py)."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = to(hidden_states, "f32")
        variance = mean_last(square(hidden_states))
        hidden_states = mul(hidden_states, rsqrt(add_scalar(variance)))
        return to(mul(to(self.weight, "f32"), hidden_states), input_dtype)


class BareRmsNorm:
    """NanoChatRMSNorm: no weight (modeling_nanochat.py)."""

    def __call__(self, x: Tensor) -> Tensor:
        return to(self._norm(to(x, "f32")), x.dtype)

    @staticmethod
    def _norm(x: Tensor) -> Tensor:
        return mul(x, rsqrt(add_scalar(mean_last(square(x)))))


class BareLayerNorm:
    """OlmoLayerNorm: no parameters, in fp32 (modeling_olmo.py)."""

    def __call__(self, hidden_states: Tensor) -> Tensor:
        orig_dtype = hidden_states.dtype
        return to(ops.layer_norm(to(hidden_states, "f32"), None, None), orig_dtype)


class LayerNormPlusOne(LayerNorm):
    """NemotronLayerNorm1P: the weight plus one (modeling_nemotron.py)."""

    def __call__(self, x: Tensor) -> Tensor:
        args = x, add_scalar(self.weight), self.bias
        return ops.layer_norm(*args)


class NormPerHead:
    """StableLmLayerNormPerHead: a norm of its own for each head of [B, H, S, D] (modeling_stablelm.py)."""

    def __init__(self, norms: list[LayerNorm]) -> None:
        self.norms = norms

    def __call__(self, hidden_states: Tensor) -> Tensor:
        states_per_heads = _split_heads(hidden_states)
        return _cat_heads([call(norm, states) for norm, states in zip(self.norms, states_per_heads, strict=True)])


def _split_heads(t: Tensor) -> list[Tensor]:
    """torch.split(t, 1, dim=1): views of one node; backward concatenates the gradients (n*s)."""
    b, h, *rest = t.shape
    full, dtype = t.shape, t.dtype
    node = node_for(lambda grads, node: (Tensor(full, dtype),), t)
    parts = [t.view_as((b, 1, *rest), t.strides) for _ in range(h)]
    if node:
        node.num_outputs = h
    return [attach(node, part, number) for number, part in enumerate(parts)]


def _cat_heads(parts: list[Tensor]) -> Tensor:
    """torch.cat(parts, dim=1): n*s, contiguous; gradients are views."""

    def formula(grads: Grads, node: Node) -> Grads:
        grad = grads[0]
        assert grad is not None
        return [grad.view_as(shape, grad.strides) for _ in range(num_heads)]

    num_heads, shape, dtype = len(parts), parts[0].shape, parts[0].dtype
    return attach(node_for(formula, *parts), Tensor((shape[0], num_heads, *shape[2:]), dtype))
