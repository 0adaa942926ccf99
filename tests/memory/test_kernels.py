"""Rules of CUDA's kernels, where a number is known from elsewhere."""

import pytest

from foretune.devices import DeviceSpec, find_device
from foretune.memory import FORETUNE, PROFILES
from foretune.memory.figures import kernels_of
from foretune.memory.kernels import (
    AttentionKernels,
    Multiprocessors,
    cudnn_backward_workspace,
    embedding_backward_workspaces,
    reduction_workspaces,
)

H200 = Multiprocessors(132, 2048)


@pytest.mark.parametrize(
    ("outputs", "inputs", "is_inner", "measured"),
    [
        (896, 2048, False, [14_680_064, 28]),  # the gradient of a norm, H200
        (128, 2048, False, [2_097_152, 4]),  # the gradient of a bias, H200
        (1, 262_144, True, [128, 4]),  # the mean of 262,144 scales, H200 (two blocks of 512 B)
        (1, 65_536, True, []),  # of 65,536: none
        (2048, 896, True, []),  # a sum along the last dimension needs no second block
    ],
)
def test_partial_sums_are_as_large_as_measured(outputs: int, inputs: int, is_inner: bool, measured: list[int]) -> None:
    assert reduction_workspaces(outputs, inputs, is_inner=is_inner, device=H200) == measured


def test_a_smaller_device_divides_a_long_sum_into_fewer_parts() -> None:
    sizes = [reduction_workspaces(4096, 8192, is_inner=False, device=Multiprocessors(n, 1536)) for n in (28, 128)]
    assert 0 < sizes[0][0] < sizes[1][0]


def test_cudnns_workspace_is_what_an_h200_took() -> None:
    assert cudnn_backward_workspace(2, 14, 2, 1024, 64, 2) == 14_795_264
    assert cudnn_backward_workspace(2, 32, 8, 1024, 128, 2) == 67_371_520
    assert cudnn_backward_workspace(2, 32, 32, 1024, 64, 2) == 17_039_872


def test_few_tokens_are_not_sorted() -> None:
    assert embedding_backward_workspaces(3072) == []
    assert sum(embedding_backward_workspaces(3073)) > 0


def kernel(device: str, width: int = 128, *, has_mask: bool = False, narrow: bool = False, is_half: bool = True) -> str:
    kernels = kernels_of(find_device(device), FORETUNE)
    return kernels.choose(
        is_half=is_half, head_width=width, is_grouped=False, has_mask=has_mask, has_narrow_values=narrow
    )


def test_hopper_takes_cudnn_first_and_older_cards_flash() -> None:
    assert kernel("h200") == kernel("h200", has_mask=True) == "cudnn"
    assert kernel("rtx 4090") == "flash"
    assert kernel("rtx 4090", has_mask=True) == "efficient"
    assert kernel("h200", is_half=False) == "efficient"
    assert kernel("h200", width=100) == "flash"


def test_narrower_values_are_for_the_memory_efficient_kernel() -> None:
    assert kernel("h200", 192, narrow=True) == kernel("rtx 4090", 192, narrow=True) == "efficient"


def test_older_torch_does_not_prefer_cudnn() -> None:
    device = DeviceSpec(name="H100", total_bytes=1 << 36, total_is="given", compute_capability="9.0")
    assert kernels_of(device, FORETUNE).cudnn_max_width == 256
    assert kernels_of(device, PROFILES["manual-loop-5.0"]).cudnn_max_width == 0
    assert AttentionKernels(has_flash=True).cudnn_max_width == 0


def test_blackwell_takes_cudnn_for_narrower_heads_only() -> None:
    assert kernel("b200") == "cudnn"
    assert kernel("b200", 256) == "flash"
    assert kernel("h200", 256) == "cudnn"
