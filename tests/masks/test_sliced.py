"""`Mask.sliced`: the mask of some queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function

B, H = 2, 3
SIZES = ((11, 17), (17, 11), (1, 13))
SLICES = (
    (slice(None), slice(None)),
    (slice(4, 9), slice(2, 13)),
    (slice(-3, None), slice(None)),
    (slice(6, None), slice(-5, -1)),
    (slice(3, 3), slice(5, None)),
    (slice(0, 8), slice(9, 2)),
)


def integers(*shape: int, low: int = 0, high: int = 5, dtype: Any = torch.int64) -> Tensor:
    return torch.randint(low, high, shape, dtype=dtype)


EXTREME = torch.tensor([-(1 << 63), (1 << 63) - 1])
MASKS: dict[str, Callable[[int, int], tk.Mask]] = {
    "all": lambda M, N: tk.Mask(),
    "window": lambda M, N: tk.Mask.window(4, 2),
    "bottom right": lambda M, N: tk.Mask.window(3, -1, align="bottom_right"),
    "causal": lambda M, N: tk.Mask.causal(align="bottom_right"),
    "unbounded": lambda M, N: tk.Mask.window(1 << 62, -(1 << 62)),
    "padding": lambda M, N: tk.Mask.padding(integers(B, high=N, dtype=torch.uint8)),
    "key range": lambda M, N: tk.Mask.key_range(integers(B, high=N), integers(B, high=N)),
    "extreme range": lambda M, N: tk.Mask.key_range(EXTREME, EXTREME.flip(0)),
    "segments": lambda M, N: tk.Mask.segments(integers(B, M), integers(B, N)),
    "unequal": lambda M, N: tk.Mask.segments(integers(B, M), integers(B, N), equal=False),
    "positions": lambda M, N: tk.Mask.positions(integers(1, M), integers(B, N), 1, 2),
    "by head": lambda M, N: tk.Mask.positions(integers(B, 1, M), integers(1, H, N), None, 0),
    "dense": lambda M, N: tk.Mask.dense(torch.rand(B, 1, M, N) > 0.5),
    "dense rows": lambda M, N: tk.Mask.dense(torch.rand(H, M, 1) > 0.5),
    "dense columns": lambda M, N: tk.Mask.dense(torch.rand(N) > 0.5),
    "blocks": lambda M, N: tk.Mask.block_sparse(torch.rand(H, -(-M // 4), -(-N // 4)) > 0.5, 4),
    "both": lambda M, N: tk.Mask.causal() & tk.Mask.segments(integers(B, M), integers(B, N)),
}


@each("kind", MASKS)
def test_it_shows_the_same_pairs(kind: str) -> None:
    for M, N in SIZES:
        mask = MASKS[kind](M, N)
        whole = mask.materialize(B, H, M, N)
        for rows, columns in SLICES:
            expected = whole[:, :, rows, columns]
            sliced = mask.sliced(rows, columns, M=M, N=N)
            assert torch.equal(sliced.materialize(*expected.shape), expected), (M, N, rows, columns)


def test_blocks_stay_whole_from_aligned_tokens_on() -> None:
    mask = tk.Mask.block_sparse(torch.rand(3, 5) > 0.5, 4)
    sizes = {
        start: mask.sliced(slice(start, None), slice(8, None), M=11, N=17).constraints[0]
        for start in (4, 6)
    }
    assert [getattr(one, "block_size", None) for one in sizes.values()] == [4, 2]


def test_the_last_queries_keep_their_bottom_right_mask() -> None:
    mask = tk.Mask.window(5, 0, align="bottom_right")
    assert mask.sliced(slice(-3, None), M=11, N=17).constraints == mask.constraints


def test_rows_of_attention() -> None:
    M, N, rows = 11, 17, slice(3, 9)
    q, k, v = (torch.randn(B, H, n, 8) for n in (M, N, N))
    mask = MASKS["segments"](M, N) & MASKS["blocks"](M, N) & MASKS["bottom right"](M, N)
    whole = tk.attention(q, k, v, mask=mask)
    part = mask.sliced(rows, M=M, N=N)
    got = tk.attention(q[:, :, rows], k, v, mask=part)
    assert_same_function(got, whole[:, :, rows])


def test_errors_name_the_argument() -> None:
    mask = tk.Mask.segments(integers(1, 5), integers(1, 7))
    with pytest.raises(TypeError, match="rows must be a slice, got 3"):
        mask.sliced(3, M=5, N=7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="columns must have step 1, got 2"):
        mask.sliced(columns=slice(0, 4, 2), M=5, N=7)
    with pytest.raises(ValueError, match=r"q_ids must be \(batch, length\) = \(1, 6\)"):
        mask.sliced(M=6, N=7)
    with pytest.raises(ValueError, match="M must be at least 0"):
        mask.sliced(M=-1, N=7)
