"""Tile tuning on a CUDA device, with real compilation."""

from __future__ import annotations

import pytest
import torch

from transformer_kernels.backends.triton.config import Kernel, Tile
from transformer_kernels.bench import tune

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_tiles_that_do_not_fit_are_rejected_and_the_others_timed(kernel: Kernel) -> None:
    fits, too_large = Tile(64, 64, 4, 2), Tile(128, 128, 8, 9)
    shape = tune.Shape(B=1, H=2, S=512, D=128)
    results = list(
        tune.tune(
            kernel, torch.bfloat16, shape, torch.device("cuda"), tiles=[too_large, fits],
            seconds=0.1,
        )
    )  # fmt: skip
    assert [type(one) for one in results] == [tune.Rejected, tune.Timed]
    assert [one.tile for one in results] == [too_large, fits]
