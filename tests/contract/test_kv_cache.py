"""`append_to_cache`: written positions, and stepwise decoding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import DECODING
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function

B, H, D, D_v, PAGE = 3, 2, 8, 5, 4


def new(M: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(B, H, M, D, dtype=dtype), torch.randn(B, H, M, D_v, dtype=dtype)


def test_append_to_contiguous_cache() -> None:
    k_cache, v_cache = torch.full((B, H, 9, D), math.nan), torch.full((B, H, 9, D_v), math.nan)
    k, v = new(2)
    tk.append_to_cache(k_cache, v_cache, k, v, torch.tensor([2, 5, 9]))
    for b, length in enumerate((2, 5, 9)):
        for cache, x in ((k_cache, k), (v_cache, v)):
            assert torch.equal(cache[b, :, length - 2 : length], x[b])
            assert cache[b].isnan().all(dim=-1).sum() == H * 7


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_append_to_paged_cache(dtype: torch.dtype) -> None:
    k_cache, v_cache = (
        torch.full((7, H, PAGE, D), math.nan),
        torch.full((7, H, PAGE, D_v), math.nan),
    )
    k, v = new(3)
    table = torch.tensor([[6, 0, -1], [2, 5, 1], [3, -1, 99]], dtype=dtype)
    tk.append_to_cache(k_cache, v_cache, k, v, torch.tensor([5, 12, 3], dtype=dtype), table)
    places = [[(6, 2), (6, 3), (0, 0)], [(1, 1), (1, 2), (1, 3)], [(3, 0), (3, 1), (3, 2)]]
    for cache, x in ((k_cache, k), (v_cache, v)):
        for b, rows in enumerate(places):
            for i, (page, row) in enumerate(rows):
                assert torch.equal(cache[page, :, row], x[b, :, i])
        assert cache.isnan().all(dim=-1).sum() == H * (7 * PAGE - 9)


@pytest.mark.parametrize("page_size", [0, PAGE])
@pytest.mark.parametrize("backend", DECODING)
def test_stepwise_decoding_equals_causal_attention(page_size: int, backend: str) -> None:
    """A prompt of three tokens, then one or two at a time, equals one call with all tokens."""
    steps = (3, 1, 1, 2, 1)
    q = torch.randn(B, 4, sum(steps), D)
    k, v = torch.randn(B, H, sum(steps), D), torch.randn(B, H, sum(steps), D_v)
    table = torch.randperm(6).reshape(B, 2) if page_size else None
    shape = (6, H, page_size) if page_size else (B, H, 10)
    k_cache, v_cache = torch.full((*shape, D), math.nan), torch.full((*shape, D_v), math.nan)
    cache_seqlens, parts, begin = torch.zeros(B, dtype=torch.int64), [], 0
    for M in steps:
        cache_seqlens, now = cache_seqlens + M, slice(begin, begin + M)
        tk.append_to_cache(k_cache, v_cache, k[:, :, now], v[:, :, now], cache_seqlens, table)
        parts.append(
            tk.attention_decode(
                q[:, :, now], k_cache, v_cache, cache_seqlens, table, backend=backend
            )
        )
        begin += M
    assert_same_function(torch.cat(parts, dim=2), tk.attention(q, k, v, mask=tk.Mask.causal()))


def test_compiled() -> None:
    def step(
        k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor
    ) -> Tensor:
        tk.append_to_cache(k_cache, v_cache, k, v, cache_seqlens)
        return tk.attention_decode(k, k_cache, v_cache, cache_seqlens)

    caches = torch.zeros(B, H, 9, D), torch.zeros(B, H, 9, D_v)
    copies = caches[0].clone(), caches[1].clone()
    fast = torch.compile(step, fullgraph=True, backend="aot_eager")
    for length in (1, 2, 7):
        rows, cache_seqlens = new(1), torch.tensor([length] * B)
        assert_same_function(
            fast(*caches, *rows, cache_seqlens), step(*copies, *rows, cache_seqlens)
        )
    torch.testing.assert_close(caches, copies)


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "short": ({"cache_seqlens": torch.tensor([1, 9, 9])}, ValueError, "at least M = 2, got 1 at 0"),
    "long": ({"cache_seqlens": torch.tensor([2, 9, 10])}, ValueError, "from 0 to 9, .*got 10 at 2"),
    "heads": ({"k": torch.randn(B, 4, 2, D)}, ValueError, "k and v must be .*got k .3, 4, 2, 8."),
    "v-length": ({"v": torch.randn(B, H, 1, D_v)}, ValueError, "k and v must be .* v .3, 2, 1, 5."),
    "v-width": ({"v": torch.randn(B, H, 2, D)}, ValueError, "k and v must be .*heads and widths"),
    "k-width": ({"k": torch.randn(B, H, 2, 9)}, ValueError, "k and k_cache must share the width D"),
    "k-dtype": (
        {"k": torch.randn(B, H, 2, D).half()},
        TypeError,
        "k, k_cache and v_cache must share a dtype, got k_cache torch.float32, k torch.float16",
    ),
    "v-dtype": ({"v": torch.randn(B, H, 2, D_v).half()}, TypeError, "k and v must share a dtype"),
    "table": (
        {"block_table": torch.tensor([[0], [1], [3]])},
        ValueError,
        "block_table must hold pages 0 to 2 of k_cache .* got 3",
    ),
}


@each(("changes", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_invalid_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    k, v = new(2)
    caches = torch.zeros(B, H, 9, D), torch.zeros(B, H, 9, D_v)
    good = {"k_cache": caches[0], "v_cache": caches[1], "k": k, "v": v}
    with pytest.raises(error, match=message):
        tk.append_to_cache(**{**good, "cache_seqlens": torch.tensor([2, 5, 9]), **changes})
