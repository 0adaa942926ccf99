"""Linear biases on attention scores (ALiBi), as Bloom, Falcon and MPT build them (transformers 5.24)."""

from foretune.memory.decoder import RunOptions
from foretune.memory.ops import add_scalar, like, mul, to
from foretune.memory.tape import Tensor

__all__ = ["as_numbers", "bloom_biases", "falcon_biases", "merged", "mpt_biases"]


def _slopes(num_heads: int) -> tuple[Tensor, ...]:
    """Powers of a base, and more of them where heads are no power of two: base, powers, slopes, and the second base and
    powers, in the order in which a function's locals die (_get_alibi_slopes of modeling_bloom.py)."""
    closest = 1 << (num_heads.bit_length() - 1)
    base = Tensor((), "f32")
    powers = Tensor((closest,), "i32")
    slopes = Tensor((closest,), "f32")
    if closest == num_heads:
        return base, powers, slopes
    rest = num_heads - closest
    extra_base = Tensor((), "f32")
    extra_powers = Tensor((rest,), "i32")
    slopes = _joined([slopes, Tensor((rest,), "f32")], num_heads)
    return base, powers, slopes, extra_base, extra_powers


def _joined(parts: list[Tensor], num_heads: int) -> Tensor:
    """torch.cat(parts)."""
    return Tensor((num_heads,), parts[0].dtype)


def bloom_biases(run: RunOptions, num_heads: int, dtype: str) -> tuple[Tensor | None, Tensor]:
    """BloomModel.forward without a padding mask, build_alibi_tensor with one: slopes, which the forward then holds,
    and biases as [B * heads, 1, S]."""
    b, s = run.micro_batch_size, run.sequence_length
    if run.padding is not None:
        return None, _biases_of_mask(run.padding, num_heads, dtype)
    slopes = _bloom_slopes(num_heads)
    arange = Tensor((s,), "i64")
    alibi = Tensor((num_heads, 1, s), "f32")
    del arange
    alibi = to(Tensor((b * num_heads, 1, s), "f32"), dtype)
    return slopes, alibi


def _bloom_slopes(num_heads: int) -> Tensor:
    """_get_alibi_slopes returns, and its other locals die."""
    parts = list(_slopes(num_heads))
    slopes = parts[2]
    while parts:
        parts.pop(0)
    return slopes


def _biases_of_mask(mask: Tensor, num_heads: int, dtype: str) -> Tensor:
    """build_alibi_tensor (modeling_bloom.py)."""
    b, s = mask.shape
    slopes = _bloom_slopes(num_heads)
    arange_tensor = mul(add_scalar(like(mask)), mask)
    alibi = Tensor((b, num_heads, s), "f32")
    cast = to(alibi.view_as((b * num_heads, 1, s), (s, s, 1)), dtype)
    del slopes, arange_tensor, alibi
    return cast


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


def falcon_biases(mask: Tensor, num_heads: int, dtype: str) -> Tensor:
    """build_alibi_tensor (modeling_falcon.py): in bf16, [B * heads, 1, S]."""
    b, s = mask.shape
    parts = list(_slopes(num_heads))
    arange_tensor = mul(add_scalar(like(mask)), mask)
    alibi = _bf16_product(to(parts[2], "bf16"), (b, num_heads, s))
    alibi = to(alibi.view_as((b * num_heads, 1, s), (s, s, 1)), dtype)
    while parts:
        parts.pop(0)
    del arange_tensor
    return alibi


def _bf16_product(slopes: Tensor, shape: tuple[int, ...]) -> Tensor:
    return Tensor(shape, "bf16")


def as_numbers(mask: Tensor, dtype: str) -> Tensor:
    """where(mask, full((), 0.0), least number): both on the device."""
    zero, least = Tensor((), dtype), Tensor((), dtype)
    out = Tensor(mask.shape, dtype)
    del least, zero
    return out


def merged(alibi: Tensor, mask: Tensor) -> Tensor:
    """masked_fill(alibi / number, mask < -1, least number): [B, heads, S, S]."""
    scaled = like(alibi)
    is_masked = like(mask, "bool")
    b, _, rows, columns = mask.shape
    out = Tensor((b, alibi.shape[1], rows, columns), alibi.dtype)
    del scaled, is_masked
    return out
