"""The Triton kernels of linear attention: segments, rounding, tiles and limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import transformer_kernels as tk
from tests.support.case import assert_case, named
from tests.support.linear import LINEAR_CASES, LinearCase
from tests.support.tiers import crossed
from transformer_kernels.backends.triton.config import CHIPS
from transformer_kernels.linear.backends import LINEAR_BACKENDS
from transformer_kernels.linear.triton import TritonLinear, passes, tiles
from transformer_kernels.linear.triton.kernels.arithmetic import rounded_to_tf32
from transformer_kernels.linear.types import Inputs, Options

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""A GPU, or the CPU with Triton's interpreter."""
SEGMENTED = named(
    LINEAR_CASES, "segments", "segments-gqa", "segments-all", "gqa", "range", "all-lengths"
)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("case", "programs"), crossed(SEGMENTED, [(1,), (12,)]))
def test_segments_of_several_chunks(
    case: LinearCase, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default segments of short sequences have one chunk each."""
    monkeypatch.setattr(passes, "PROGRAMS", programs)
    assert_case(case, torch.float32, "triton", DEVICE)


def test_segments_fill_the_device() -> None:
    def segments(B: int, N: int, H_kv: int, *, packed: bool = False) -> passes.Segments:
        k = torch.empty(1 if packed else B, H_kv, N, 64, dtype=torch.bfloat16)
        starts = torch.empty(B + 1, dtype=torch.int32) if packed else None
        x = Inputs(k, k, k, cu_seqlens=starts)
        options = Options("elu", causal=True, normalize=True, eps=1e-6)
        return passes.prepare(x, options).segments(N)

    assert segments(1, 64, 1).count == 1
    assert not segments(1, 64, 1).are_several
    assert segments(1, 65536, 8) == passes.Segments(65536, 1024, 64, 64, 65)
    assert segments(64, 4096, 8).count == 1  # 512 heads
    packed = segments(10, 65536, 8, packed=True)
    assert (packed.tokens, packed.programs) == (1024, 64 + 20)
    assert segments(0, 65536, 8, packed=True).programs == 0


@triton.jit  # type: ignore[untyped-decorator]
def round_kernel(x: Any, y: Any, SIZE: tl.constexpr) -> None:
    i = tl.arange(0, SIZE)
    tl.store(y + i, rounded_to_tf32(tl.load(x + i)))


def test_tf32_operands_are_rounded_to_nearest_even() -> None:
    bits = torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int64).to(torch.int32)
    special = [0x3F801000, 0x3F803000, 0x7FFFFFFF, 0x7F800000, -0x800000, 1, 0x7F7FFFFF]
    bits[: len(special)] = torch.tensor(special, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32).to(DEVICE)
    y = torch.empty_like(x)
    round_kernel[(1,)](x, y, SIZE=4096)
    exact = x.double().cpu().numpy()
    mantissa, exponent = np.frexp(exact)
    expected = np.ldexp(np.rint(mantissa * 2**11), np.maximum(exponent, -125) - 11)
    normal = np.abs(exact) >= 2.0**-126
    with np.errstate(over="ignore"):
        expected = expected.astype(np.float32)
    got = y.cpu().numpy()
    np.testing.assert_array_equal(got[normal], expected[normal])
    assert y[2].isnan()  # the NaN of a GPU, whose rounded bits would be those of -0
    assert y[3] == torch.inf


def test_every_precision_of_a_chip_has_tiles() -> None:
    """Chunks and slices are powers of 2 of at least 16, which matrix products need."""
    for chip in CHIPS.values():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for needs_grad in (False, True):
                precision = tiles.precision(chip, dtype, log_decay_needs_grad=needs_grad)
                for columns in (1, 64, 65, 128, 129, 256):
                    tile = tiles.tile(chip, columns, precision)
                    assert tile.chunk in (16, 32, 64)
                    assert tile.slice in (16, 32, 64)


def test_explain_names_the_tile() -> None:
    x = torch.zeros(1, 1, 3, 8, dtype=torch.bfloat16, device=DEVICE)
    report = tk.explain(x, x, x, operator=tk.linear_attention, backend="triton")
    assert "linear/triton" in str(report)
    assert "chunks of 64 tokens, 64 columns" in str(report)


def test_interpreted_kernels_are_not_chosen_by_auto() -> None:
    if not TritonLinear.is_interpreted:
        pytest.skip("Triton's interpreter is off: there is a GPU here")
    names = [backend.name for backend in LINEAR_BACKENDS]
    assert names.index("triton") > names.index("reference")
