"""What CUDA's kernels do that a program on tensors without data does not show: one table for estimate and trace.

Each rule names its source and what it was learnt on. Sizes are bytes; b, h, k, s, d: batch, query heads, key/value
heads, tokens, head width.
"""

from typing import Literal, NamedTuple

__all__ = [
    "FLASH_MAX_WIDTH",
    "MAX_MICROSTEPS",
    "NUM_UPDATES",
    "AttentionKernels",
    "efficient_backward_workspaces",
    "efficient_logsumexp_rows",
    "embedding_backward_workspaces",
    "flash_backward_workspaces",
    "flash_width",
    "foreach_norm_workspace",
]

NUM_UPDATES = 2
"""Updates that are run: states appear in the first, the second is like all later ones."""
MAX_MICROSTEPS = 3
"""Microsteps of an update that are run (first, middle, last); more repeat the middle one."""

FLASH_MAX_WIDTH = 256
MIN_CHUNK_TOKENS = 256
MAX_CHUNKS = 128


def chunk_tokens(num_tokens: int) -> int:
    """Return how many tokens' logits exist at once in the chunked loss: 256, and more beyond 32,768 tokens."""
    return max(MIN_CHUNK_TOKENS, -(-num_tokens // (MAX_CHUNKS * MIN_CHUNK_TOKENS)) * MIN_CHUNK_TOKENS)


class AttentionKernels(NamedTuple):
    """Which of torch's attention kernels a device and platform have.

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. Learnt on: its text; the memory-efficient path on
    T4 runs, the math path on RTX 4080 runs.
    """

    has_flash: bool
    """Compute capability 8.0 or later, and not a Windows wheel."""
    tensor_core_alignment: bool = True
    """fp32 head widths must be multiples of 4 for the memory-efficient kernel (compute capability 8.0 and later)."""
    repeats_heads: bool = False
    """The caller repeats keys and values for grouped heads before torch sees them."""
    is_package: bool = False
    """The flash-attn package's kernel runs, whatever torch would choose."""

    def choose(
        self, *, is_half: bool, head_width: int, is_grouped: bool, has_mask: bool
    ) -> Literal["flash", "efficient", "math"]:
        """Choose as torch does: flash, then memory-efficient, then math."""
        if self.is_package:
            return "flash"
        if self.has_flash and not has_mask and is_half and head_width <= FLASH_MAX_WIDTH:
            return "flash"
        alignment = 8 if is_half else (4 if self.tensor_core_alignment else 1)
        return "efficient" if not is_grouped and head_width % alignment == 0 else "math"


def _round_up(n: int, m: int) -> int:
    return -(-n // m) * m


def flash_width(d: int) -> int:
    """Head width that the flash kernel is given: padded to a multiple of 8.

    Source: aten/src/ATen/native/transformers/attention.cpp (pad_last_dim). Learnt on: its text.
    """
    return _round_up(d, 8)


def flash_backward_workspaces(b: int, h: int, k: int, s: int, d: int, item: int) -> list[int]:
    """softmax_d, the fp32 accumulator of dq and, for grouped heads, dk and dv for every query head.

    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (mha_bwd). Learnt on: its text; no
    published peak lies in it.
    """
    rows, width = _round_up(s, 128), _round_up(d, 32) if d <= 128 else _round_up(d, 64)
    expanded = [b * s * h * d * item] * 2 if h != k else []
    return [b * h * rows * 4, b * h * rows * width * 4, *expanded]


def efficient_backward_workspaces(b: int, h: int, s: int, d: int, *, is_half: bool) -> list[int]:
    """delta and the accumulator of the gradient of q; in fp32 the product that delta is summed from comes first.

    Source: aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h. Learnt on: T4 runs (fp16).
    """
    rows, cols = (64, 64) if d <= 64 or not is_half else (128, 64)
    accumulator = b * h * -(-s // rows) * -(-d // cols) * (rows * cols * 4 + 16)
    product = [] if is_half else [b * h * s * d * 4]
    return [*product, b * h * s * 4, accumulator]


def efficient_logsumexp_rows(s: int) -> int:
    """Rows of the logsumexp that the memory-efficient kernel keeps.

    Source: aten/src/ATen/native/transformers/cuda/attention.cu. Learnt on: T4 runs.
    """
    return _round_up(s, 32)


def embedding_backward_workspaces(num_tokens: int) -> list[int]:
    """Sorted and original indices and the sort's temporaries.

    Source: aten/src/ATen/native/cuda/Embedding.cu. Learnt on: its text.
    """
    return [num_tokens * 8] * 4


def foreach_norm_workspace(num_tensors: int, largest: int) -> int:
    """One fp32 partial sum for each 65,536 elements of the largest tensor, for every tensor; in bytes.

    Source: aten/src/ATen/native/cuda/ForeachReduceOp.cu (output_per_tensor). Learnt on: its text.
    """
    return num_tensors * -(-largest // 65_536) * 4
