"""Linear biases on attention scores (ALiBi), as Bloom, Falcon and MPT build them (transformers 5.24)."""

from foretune.memory.decoder import RunOptions
from foretune.memory.ops import add_scalar, like, mul, to
from foretune.memory.tape import Tensor

__all__ = ["bloom_biases", "mpt_biases"]


def _slopes(num_heads: int) -> Tensor:
    """_get_alibi_slopes (modeling_bloom.py): powers of a base; more of them where heads are no power of two."""
    closest = 1 << (num_heads.bit_length() - 1)
    base = Tensor((), "f32")
    powers = Tensor((closest,), "i32")
    slopes = Tensor((closest,), "f32")
    if closest != num_heads:
        rest = num_heads - closest
        extra_base = Tensor((), "f32")
        extra_powers = Tensor((rest,), "i32")
        extra = Tensor((rest,), "f32")
        joined = Tensor((num_heads,), "f32")
        del slopes, extra
        slopes = joined
        del joined
        del base, powers, extra_base, extra_powers
        return slopes
    del base, powers
    return slopes


def bloom_biases(run: RunOptions, num_heads: int, dtype: str) -> tuple[Tensor | None, Tensor]:
    """BloomModel.forward without a padding mask, build_alibi_tensor with one: slopes, which the forward then holds,
    and biases as [B * heads, 1, S]."""
    b, s = run.micro_batch_size, run.sequence_length
    slopes = _slopes(num_heads)
    if run.padding is not None:
        return None, _biases_of_mask(run.padding, slopes, num_heads, dtype)
    arange = Tensor((s,), "i64")
    alibi = Tensor((num_heads, 1, s), "f32")
    del arange
    alibi = to(Tensor((b * num_heads, 1, s), "f32"), dtype)
    return slopes, alibi


def _biases_of_mask(mask: Tensor, slopes: Tensor, num_heads: int, dtype: str) -> Tensor:
    b, s = mask.shape
    arange_tensor = mul(add_scalar(like(mask)), mask)
    alibi = Tensor((b, num_heads, s), "f32")
    del arange_tensor
    return to(alibi.view_as((b * num_heads, 1, s), (s, s, 1)), dtype)


def _inverse(t: Tensor) -> Tensor:
    """1.0 / t: the reciprocal times the number."""
    return like(like(t))


def mpt_biases(num_heads: int, sequence_length: int) -> Tensor:
    """build_mpt_alibi_tensor (modeling_mpt.py): [heads, 1, longest sequence], fp32."""
    rounded = 1 << (num_heads - 1).bit_length()
    alibi = Tensor((sequence_length,), "i32")
    base = to(Tensor((rounded,), "i64"), "f32")
    base = like(base)
    slopes = _inverse(like(base))
    if rounded != num_heads:
        slopes = Tensor((rounded,), "f32")
    product = Tensor((num_heads, 1, sequence_length), "f32")
    alibi = product
    del product, base, slopes
    return alibi
