"""TRL's fused head: log-probabilities in tiles of tokens by words, so that full logits never exist.

Follows TRL 1.16 (trl/trainer/utils.py, trl/kernels/chunked_logprob.py), as runtime/trace/trl_head.py does. With Triton
a tile is folded by a kernel that allocates nothing, and only the supervised tokens are scored, which copies them;
without it, torch's operators fold and every token is scored. N tokens, V words.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from foretune.memory.head import TransformersHead
from foretune.memory.layout import numel
from foretune.memory.ops import (
    clone,
    count_all,
    like,
    mul,
    narrow,
    product_into,
    reshape,
    scale,
    sum_all,
    to,
    view,
)
from foretune.memory.tape import Grads, Node, Tensor, attach, current, function_node, node_for
from foretune.memory.tile_folds import fold, unfold

__all__ = ["TiledHead", "finished_loss"]

TOKENS, WORDS = 4096, 32768
"""TOKEN_CHUNK_SIZE and _CHUNKED_LOGPROB_CHUNK_SIZE."""


class _Way(NamedTuple):
    has_triton: bool
    has_softcap: bool


class TiledHead(TransformersHead):
    """add_fused_lm_head: log-probability, entropy and whether the target is on top, of each token."""

    has_triton = True

    def __call__(self, input_ids: Tensor, targets: Tensor, phase: str) -> dict[str, Any]:
        """Run the backbone, then the head in tiles."""
        outputs = self.backbone(input_ids)
        current().enter(phase)
        with current().counted_as("logits and loss"):
            hidden = narrow(outputs[0], 1, outputs[0].shape[1] - 1)
            labels = narrow(targets, 1, targets.shape[1] - 1)
            mask = like(labels, "bool")
            way = _Way(self.has_triton, self.has_softcap)
            log_probs, entropy, is_top1 = _per_token(hidden, labels, mask, self.weight, self.bias, way)
            loss = mul(scale(sum_all(log_probs)), _clamped(count_all(mask)))
        return {"loss": loss, "log_probs": log_probs, "entropy": entropy, "is_top1": is_top1, "label_mask": mask}


def finished_loss(outputs: dict[str, Any], count: Tensor, padding: Tensor | None) -> Tensor:
    """The loss of each token, then entropy and accuracy for the log (trl/trainer/sft_trainer.py, compute_loss)."""
    of_tokens = scale(outputs["log_probs"])
    loss = mul(sum_all(of_tokens), _clamped(count))
    loss = scale(loss)
    logged = [count_all(outputs["label_mask"]), sum_all(outputs["entropy"].detach()), count_all(outputs["is_top1"])]
    ratios = [Tensor((), "f32"), Tensor((), "f32")]
    while ratios:
        ratios.pop()
    if padding is not None:
        _whole_sum(padding)
    outputs.clear()
    del of_tokens
    while logged:
        logged.pop(0)
    return loss


def _clamped(t: Tensor) -> Tensor:
    return Tensor((), t.dtype)


def _whole_sum(t: Tensor) -> Tensor:
    out = Tensor((), "i64")
    current().reduction(1, numel(t.shape), is_inner=True)
    return out


def _per_token(
    hidden: Tensor, labels: Tensor, mask: Tensor, weight: Tensor, bias: Tensor | None, way: _Way
) -> tuple[Tensor, ...]:
    if way.has_triton:
        rows, targets = _selected(hidden, mask), Tensor((numel(mask.shape),), "i64")
    else:
        rows = reshape(hidden, (numel(hidden.shape[:2]), hidden.shape[2]))
        targets = reshape(like(labels), (numel(labels.shape),))
    per_token: Any = _tiled_log_probs(rows, weight, bias, targets, way)
    del rows, targets
    if way.has_triton:
        per_token = (_scattered(values, mask) for values in per_token)
    else:
        per_token = (_filled(view(values, *mask.shape), mask) for values in per_token)
    return tuple(per_token)  # the generator is theirs: it decides what dies when


def _selected(hidden: Tensor, mask: Tensor) -> Tensor:
    """hidden[mask], all of it: positions of the mask, then the rows (aten/src/ATen/native/IndexingUtils.h)."""
    shape, dtype, n = hidden.shape, hidden.dtype, numel(mask.shape)

    def formula(grads: Grads, node: Node) -> Grads:
        """index_put_ with sums: positions, their linear index, and both sorted (native/cuda/Indexing.cu)."""
        _mask = mask
        out = Tensor(shape, dtype)
        current().temporaries(16 * n, 8 * n, 8 * n, 8 * n)
        return [out]

    node = function_node(formula, hidden)
    positions = Tensor((n, 2), "i64")
    rows = Tensor((n, shape[-1]), dtype)
    del positions
    return attach(node, rows)


def _scattered(values: Tensor, mask: Tensor) -> Tensor:
    """zeros.masked_scatter(mask, values), and the way back by masked_select."""

    def formula(grads: Grads, node: Node) -> Grads:
        return [Tensor((numel(mask.shape),), "f32")]

    node = function_node(formula, values)
    zeros = Tensor(mask.shape, values.dtype)
    out = clone(zeros)
    sums = Tensor((numel(mask.shape),), "i64")
    del zeros, sums
    return attach(node, out)


def _filled(values: Tensor, mask: Tensor) -> Tensor:
    """values.masked_fill(~mask, 0)."""
    inverse = like(mask)
    node = node_for(lambda grads, node, inverse: (like(grads[0]),), values)
    if node:
        node.save(inverse)
    return attach(node, like(values))


# ------------------------------------------------------------------ tiles
def _tiled_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, way: _Way
) -> tuple[Tensor, Tensor, Tensor]:
    autocast = current().autocast
    dtype = hidden.dtype if autocast is None else autocast.dtype
    has_bias = bias is not None

    def formula(grads: Grads, node: Node, *saved: Tensor) -> Grads:
        wanted = [edge is not None for edge in node.edges]
        return _tiled_gradients(grads, dtype, way, wanted, has_bias, *saved)

    node = function_node(formula, hidden, weight, bias)
    tape = current()
    before, tape.is_grad_enabled = tape.is_grad_enabled, False
    log_probs, entropy, is_top1, to_save = _tiled_forward(hidden, weight, bias, targets, dtype, way)
    tape.is_grad_enabled = before
    if node:
        node.save(*to_save)
        node.num_outputs = 3
    return attach(node, log_probs), attach(node, entropy, 1), is_top1


def _tiled_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, dtype: str, way: _Way
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    statistics = [Tensor(hidden.shape[:1], "f32") for _ in range(7)]
    tiles = _tiles(hidden, dtype)
    for num_rows in _spans(hidden.shape[0], TOKENS):
        _chunk = to(narrow(hidden, 0, num_rows), dtype)
        for num_words in _spans(weight.shape[0], WORDS):
            tile = _product(tiles, num_rows, num_words, to(narrow(weight, 0, num_words), dtype), bias)
            if not way.has_triton:
                fold(tile, has_softcap=way.has_softcap)
    log_z, log_probs, entropy, is_top1 = _results(statistics)
    return log_probs, entropy, is_top1, (hidden, weight, bias, targets, log_z, entropy.detach())


def _tiled_gradients(grads: Grads, dtype: str, way: _Way, wanted: list[bool], has_bias: bool, *saved: Tensor) -> Grads:
    """Gradients are summed in fp32, and each tile becomes its own gradient in place."""
    hidden, weight, *_rest = saved
    bias = saved[2] if has_bias else None
    inputs = (hidden, weight, bias)
    sums = [
        Tensor(t.shape, "f32") if t is not None and is_wanted else None
        for t, is_wanted in zip(inputs, wanted, strict=True)
    ]
    tiles = _tiles(hidden, dtype)
    for num_rows in _spans(hidden.shape[0], TOKENS):
        _chunk = to(narrow(hidden, 0, num_rows), dtype)
        for num_words in _spans(weight.shape[0], WORDS):
            part = to(narrow(weight, 0, num_words), dtype)
            tile = _product(tiles, num_rows, num_words, part, bias)
            if not way.has_triton:
                unfold(tile, has_softcap=way.has_softcap)
            if sums[2] is not None:
                _column_sums(tile)
    return [to(s, t.dtype) if s is not None and t is not None else None for s, t in zip(sums, inputs, strict=True)]


def _tiles(hidden: Tensor, dtype: str) -> Tensor:
    return Tensor((min(hidden.shape[0], TOKENS), WORDS), dtype)


def _spans(length: int, step: int) -> Iterator[int]:
    """Sizes of the pieces."""
    for start in range(0, length, step):
        yield min(step, length - start)


def _product(tiles: Tensor, num_rows: int, num_words: int, part: Tensor, bias: Tensor | None) -> Tensor:
    """A tile of logits, written into the buffer."""
    tile = narrow(narrow(tiles, 0, num_rows), 1, num_words)
    product_into(tile)
    if bias is not None:
        to(narrow(bias, 0, num_words), tile.dtype)
    return tile


def _column_sums(tile: Tensor) -> None:
    out = Tensor(tile.shape[1:], "f32")
    current().reduction(tile.shape[1], tile.shape[0], is_inner=False)
    del out


def _results(statistics: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, total, weighted, _, _, before, target = statistics
    log_z = _beside(like(total))
    log_probs = like(target)
    entropy = _beside(like(weighted))
    is_top1 = _both(like(target, "bool"), like(before, "bool"))
    return log_z, log_probs, entropy, is_top1


def _beside(term: Tensor) -> Tensor:
    """A sum with a temporary."""
    return like(term)


def _both(a: Tensor, b: Tensor) -> Tensor:
    return like(a)
