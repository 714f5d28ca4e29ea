"""Measurement and tile tuning on a CUDA device."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks.gpu_cases import masked_cases
from benchmarks.tuning import triton
from transformer_kernels.backends.triton.config import Kernel, Tile
from transformer_kernels.bench import (
    VARIANTS,
    Case,
    Interleaver,
    Variant,
    clock_for,
    peak_extra_bytes,
)
from transformer_kernels.bench.trial import try_out
from transformer_kernels.bench.workload import Workload
from transformer_kernels.masks.mask import Mask

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
ON_GPU = [variant for variant in VARIANTS.values() if "cuda" in variant.devices]


def test_a_lap_measures_the_time_of_the_device_not_of_the_host() -> None:
    """Bounds are wide because other tests may use the device at the same time."""
    x = torch.randn(4096, 4096, device=CUDA, dtype=torch.bfloat16)

    def prepare_slowly() -> Workload:
        time.sleep(0.3)
        return lambda: x @ x

    interleaver = Interleaver(
        {
            "product": lambda: lambda: x @ x,
            "hundred products": lambda: lambda: [x @ x for _ in range(100)],
            "set-up": prepare_slowly,
        },
        clock=clock_for(CUDA),
    )
    interleaver.warm_up()
    for _ in range(5):
        interleaver.round()
    ms = {name: timing.p20_ms for name, timing in interleaver.timings().items()}
    assert ms["product"] > 2 * 4096**3 / 5e15 * 1e3  # 5 PFLOP/s, more than any current device
    assert ms["hundred products"] > 5.0 * ms["product"]
    assert ms["set-up"] < 150.0


def test_peak_memory_is_what_the_workload_allocates() -> None:
    x = torch.zeros(2**20, device=CUDA)
    peak = peak_extra_bytes(lambda: lambda: (x + 1) + (x + 2), CUDA)
    assert peak == 3 * 4 * 2**20


MASKED = {"full": None, "causal": Mask.causal()} | {
    case.mask_name: case.mask for case in masked_cases(1024) if case.mask_name != "none"
}


@pytest.mark.parametrize("mask", MASKED)
@pytest.mark.parametrize("variant", ON_GPU, ids=lambda variant: variant.name)
def test_every_variant_computes_the_same(variant: Variant, mask: str) -> None:
    """Only peers may be skipped, with a reason."""
    case = Case(
        name=mask, B=16, H_q=2, H_kv=2, M=1024, N=1024, D=64, D_v=64,
        dtype=torch.bfloat16, mask=MASKED[mask], mask_name=mask,
    )  # fmt: skip
    if (reason := variant.unavailable_reason()) is not None:
        pytest.skip(reason)
    torch.compiler.reset()
    trial = try_out(case.to(CUDA), [variant])
    if trial.skipped:
        pytest.skip(f"skipped: {trial.skipped}")
    assert trial.broken == {}
    assert list(trial.checked.outputs) == [variant.name]


@pytest.mark.parametrize("kernel", triton.KERNELS)
def test_tiles_that_do_not_fit_are_rejected_and_the_others_timed(kernel: Kernel) -> None:
    fits, too_large = Tile(64, 64, 4, 2), Tile(128, 128, 8, 9)
    shape = triton.Shape(B=1, H=2, S=512, D=128)
    tiles = [too_large, fits]
    results = triton.tune(kernel, torch.bfloat16, shape, CUDA, tiles=tiles, seconds=0.1)
    assert [(one.tile, one.median_ms is None) for one in results] == [
        (too_large, True), (fits, False),
    ]  # fmt: skip
