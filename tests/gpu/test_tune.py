"""Tile tuning on a CUDA device, with real compilation."""

from __future__ import annotations

import pytest
import torch

from benchmarks.tuning import triton
from transformer_kernels.backends.triton.config import Kernel, Tile

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kernel", triton.KERNELS)
def test_tiles_that_do_not_fit_are_rejected_and_the_others_timed(kernel: Kernel) -> None:
    fits, too_large = Tile(64, 64, 4, 2), Tile(128, 128, 8, 9)
    shape, device = triton.Shape(B=1, H=2, S=512, D=128), torch.device("cuda")
    tiles = [too_large, fits]
    results = triton.tune(kernel, torch.bfloat16, shape, device, tiles=tiles, seconds=0.1)
    assert [(one.tile, one.median_ms is None) for one in results] == [
        (too_large, True), (fits, False),
    ]  # fmt: skip
