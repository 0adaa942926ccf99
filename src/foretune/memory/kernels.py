"""What CUDA's kernels do that a program on tensors without data does not show: one table for estimate and trace.

Each rule names its source and what it was learnt on. Sizes are bytes; b, h, k, s, d: batch, query heads, key/value
heads, tokens, head width.
"""

from typing import Literal, NamedTuple

__all__ = [
    "CUDNN_FORWARD_WORKSPACE",
    "CUDNN_MAX_WIDTHS",
    "FLASH_MAX_WIDTH",
    "MAX_MICROSTEPS",
    "NUM_UPDATES",
    "SORTED_FROM_TOKENS",
    "AttentionKernels",
    "Multiprocessors",
    "cudnn_backward_workspace",
    "efficient_backward_workspaces",
    "efficient_logsumexp_rows",
    "embedding_backward_workspaces",
    "flash_backward_workspaces",
    "flash_width",
    "foreach_norm_workspace",
    "reduction_workspaces",
]

NUM_UPDATES = 2
"""Updates that are run: states appear in the first, the second is like all later ones."""
MAX_MICROSTEPS = 3
"""Microsteps of an update that are run (first, middle, last); more repeat the middle one."""

FLASH_MAX_WIDTH = 256
CUDNN_MAX_WIDTHS = {"9.0": 256, "10.0": 128}
"""By compute capability; on others cuDNN's attention is not preferred."""
SORTED_FROM_TOKENS = 3072
"""Of the embedding's gradient: up to so many nothing is sorted."""
MIN_CHUNK_TOKENS = 256
MAX_CHUNKS = 128


def chunk_tokens(num_tokens: int) -> int:
    """Return how many tokens' logits exist at once in the chunked loss: 256, and more beyond 32,768 tokens."""
    return max(MIN_CHUNK_TOKENS, -(-num_tokens // (MAX_CHUNKS * MIN_CHUNK_TOKENS)) * MIN_CHUNK_TOKENS)


class AttentionKernels(NamedTuple):
    """Which of torch's attention kernels a device and platform have.

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. Learnt on: its text; the memory-efficient path on
    T4 runs, the math path on RTX 4080 and H200 runs, cuDNN's on H200 runs.
    """

    has_flash: bool
    """Compute capability 8.0 or later, and not a Windows wheel."""
    tensor_core_alignment: bool = True
    """fp32 head widths must be multiples of 4 for the memory-efficient kernel (compute capability 8.0 and later)."""
    repeats_heads: bool = False
    """The caller repeats keys and values for grouped heads before torch sees them."""
    cudnn_max_width: int = 0
    """Up to this head width cuDNN's kernel comes first; 0: never (check_cudnn_tensor_shapes)."""
    has_safe_softmax: bool = True
    """Math attention looks for rows without any allowed key, and masks are made by `where`; not so in torch 2.6."""
    is_package: bool = False
    """The flash-attn package's kernel runs, whatever torch would choose."""

    def choose(
        self, *, is_half: bool, head_width: int, is_grouped: bool, has_mask: bool, has_narrow_values: bool = False
    ) -> Literal["cudnn", "flash", "efficient", "math"]:
        """Choose as torch does: cuDNN where it is preferred, flash, then memory-efficient, then math.

        Values narrower than keys (latent attention) are for the memory-efficient kernel alone.
        """
        if self.is_package:
            return "flash"
        is_fused = is_half and head_width <= FLASH_MAX_WIDTH and not has_narrow_values
        if is_fused and head_width % 8 == 0 and head_width <= self.cudnn_max_width:
            return "cudnn"
        if self.has_flash and is_fused and not has_mask:
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


CUDNN_FORWARD_WORKSPACE = 16
"""Bytes; learnt on H200 runs, where it is one small block."""


def cudnn_backward_workspace(b: int, h: int, k: int, s: int, d: int, item: int) -> int:
    """One block: sums of softmax, the fp32 accumulator of dq, for grouped heads dk and dv for every query head.

    Source: cuDNN frontend's graph (aten/src/ATen/native/cudnn/MHA.cpp asks for its size). Learnt on: H200 runs with
    widths of 64 and 128, grouped and not.
    """
    expanded = 2 * b * s * h * d * item if h != k else 0
    return b * h * s * 4 + b * h * s * d * 4 + expanded + 512


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
    """Sorted and original indices and the sort's temporaries; up to 3,072 tokens nothing is sorted.

    Source: aten/src/ATen/native/cuda/Embedding.cu. Learnt on: its text, and H200 runs with 2,048 tokens.
    """
    return [num_tokens * 8] * 4 if num_tokens > SORTED_FROM_TOKENS else []


class Multiprocessors(NamedTuple):
    """What a device has of them."""

    number: int
    threads: int
    """Of one."""


def _last_power_of_two(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def reduction_workspaces(outputs: int, inputs: int, *, is_inner: bool, device: Multiprocessors) -> list[int]:
    """Partial sums that blocks of threads share, and their counters, where one output takes several blocks; fp32.

    `inputs` for each of the `outputs`; `is_inner`: they lie beside each other in memory.
    Source: aten/src/ATen/native/cuda/Reduce.cuh (setReduceConfig). Learnt on: its text, and H200 runs (gradients of
    norms and biases, means of quantized scales).
    """
    vector = 1
    if is_inner:
        width, height = (inputs // 4 if inputs >= 128 else inputs), outputs
    else:
        vector = next(n for n in (4, 2, 1) if outputs % n == 0)
        width, height = outputs // vector, inputs
    limit = 512 // vector
    width, height = (_last_power_of_two(n) if n < limit else limit for n in (width, height))
    block_width = min(width, 32)
    block_height = min(height, limit // block_width)
    block_width = min(width, limit // block_height)
    threads = block_width * block_height
    step_in, step_out = (block_width, 1) if is_inner else (1, block_width)
    is_split = -(-inputs // step_in) >= min(block_height * 16, 256)
    if is_split:
        step_in *= block_height
    else:
        step_out *= block_height
    grid, wanted = -(-(outputs // vector) // step_out), device.number * (device.threads // threads)
    per_thread = -(-inputs // step_in)
    if not is_split or per_thread < 256 or grid > wanted:
        return []
    blocks = max(min(-(-wanted // grid), -(-per_thread // 16)), -(-per_thread // 256))
    if blocks < 2:
        return []
    return [4 * outputs * blocks * (1 if is_inner else block_width * vector), 4 * grid]


def foreach_norm_workspace(num_tensors: int, largest: int) -> int:
    """One fp32 partial sum for each 65,536 elements of the largest tensor, for every tensor; in bytes.

    Source: aten/src/ATen/native/cuda/ForeachReduceOp.cu (output_per_tensor). Learnt on: its text.
    """
    return num_tensors * -(-largest // 65_536) * 4
