"""Invalid `attention_decode` calls: errors name the argument, its value and what is expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transformer_kernels as tk
from tests.support.tiers import each

B, H, D, PAGE = 2, 2, 8, 4
Options = dict[str, Any]

PAGED: Options = {
    "k_cache": torch.randn(5, H, PAGE, D),
    "v_cache": torch.randn(5, H, PAGE, D),
    "block_table": torch.tensor([[0, 1, 2], [3, 4, -1]]),
}

ERRORS: dict[str, tuple[Options, type[Exception], str]] = {
    "q-list": ({"q": [1.0]}, TypeError, "q must be a tensor, got list"),
    "q-3d": (
        {"q": torch.randn(B, H, D)},
        ValueError,
        r"q must be \(batch, heads, length, width\), got shape \(2, 2, 8\)",
    ),
    "k-none": ({"k_cache": None}, TypeError, "k_cache must be a tensor, got NoneType"),
    "k-dtype": (
        {"k_cache": torch.randn(B, H, 9, D).half()},
        TypeError,
        "q, k_cache and v_cache must share a dtype, got k_cache torch.float16, q torch.float32",
    ),
    "v-integers": (
        {"v_cache": torch.ones(B, H, 9, D).long()},
        TypeError,
        "v_cache must be .*torch.int64",
    ),
    "k-device": (
        {"k_cache": torch.randn(B, H, 9, D, device="meta")},
        ValueError,
        "must be on one device, got k_cache on meta, q on cpu",
    ),
    "k-batch": (
        {"k_cache": torch.randn(3, H, 9, D)},
        ValueError,
        "q, k_cache and v_cache must share the batch size, got q .* k_cache .3, 2, 9, 8.",
    ),
    "v-length": (
        {"v_cache": torch.randn(B, H, 8, D)},
        ValueError,
        "k_cache and v_cache must share heads and length",
    ),
    "width": (
        {"k_cache": torch.randn(B, H, 9, D + 1)},
        ValueError,
        "q and k_cache must share the width D",
    ),
    "heads": (
        {"q": torch.randn(B, 3, 1, D)},
        ValueError,
        "q's heads must be a positive multiple of k_cache's",
    ),
    "pages-3d": (
        {**PAGED, "k_cache": torch.randn(5, PAGE, D)},
        ValueError,
        r"k_cache must be \(pages, heads, page_size, width\), got shape \(5, 4, 8\)",
    ),
    "pages-differ": (
        {**PAGED, "v_cache": torch.randn(6, H, PAGE, D)},
        ValueError,
        "k_cache and v_cache must share heads, pages and page_size",
    ),
    "pages-empty": (
        {**PAGED, "k_cache": torch.ones(5, H, 0, D), "v_cache": torch.ones(5, H, 0, D)},
        ValueError,
        r"page_size of k_cache must be at least 1, got shape \(5, 2, 0, 8\)",
    ),
    "cache_seqlens-list": (
        {"cache_seqlens": [9, 9]},
        TypeError,
        "cache_seqlens must be a tensor, got list",
    ),
    "cache_seqlens-float": (
        {"cache_seqlens": torch.tensor([9.0, 9.0])},
        TypeError,
        "cache_seqlens must be int32 or int64, got torch.float32",
    ),
    "cache_seqlens-count": (
        {"cache_seqlens": torch.tensor([9])},
        ValueError,
        r"cache_seqlens must be \(B,\) with B = 2, got shape \(1,\)",
    ),
    "cache_seqlens-2d": (
        {"cache_seqlens": torch.ones(B, 1).long()},
        ValueError,
        r"cache_seqlens must be \(B,\) with",
    ),
    "cache_seqlens-device": (
        {"cache_seqlens": torch.ones(B, device="meta").long()},
        ValueError,
        "cache_seqlens is on meta, q is on cpu",
    ),
    "cache_seqlens-long": (
        {"cache_seqlens": torch.tensor([9, 10])},
        ValueError,
        "cache_seqlens must be from 0 to 9, the capacity of k_cache, got 10 at 1",
    ),
    "cache_seqlens-negative": ({"cache_seqlens": torch.tensor([-1, 9])}, ValueError, "got -1 at 0"),
    "cache_seqlens-pages": (
        {**PAGED, "cache_seqlens": torch.tensor([13, 1])},
        ValueError,
        "cache_seqlens must be from 0 to 12, .* got 13 at 0",
    ),
    "table-list": ({**PAGED, "block_table": [[0]]}, TypeError, "block_table must be a tensor"),
    "table-bool": (
        {**PAGED, "block_table": torch.ones(B, 3).bool()},
        TypeError,
        "block_table must be int32 or int64, got torch.bool",
    ),
    "table-1d": (
        {**PAGED, "block_table": torch.ones(B).long()},
        ValueError,
        r"block_table must be \(B, pages\) with B = 2, got shape \(2,\)",
    ),
    "table-count": (
        {**PAGED, "block_table": torch.ones(3, 3).long()},
        ValueError,
        r"block_table must be \(B, pages\) with B = 2, got shape \(3, 3\)",
    ),
    "table-value": (
        {**PAGED, "block_table": torch.tensor([[0, 1, 5], [3, 4, -1]])},
        ValueError,
        r"block_table must hold pages 0 to 4 of k_cache for all positions in use, got 5 at "
        r"\(0, 2\), and sequence 0 has 9 positions",
    ),
    "table-negative": (
        {**PAGED, "cache_seqlens": torch.tensor([9, 9])},
        ValueError,
        r"got -1 at \(1, 2\), and sequence 1 has 9 positions",
    ),
    "capacity": (
        {
            "k_cache": torch.ones(1).expand(B, H, 1 << 31, D),
            "v_cache": torch.ones(1).expand(B, H, 1 << 31, D),
        },
        ValueError,
        "the cache capacity must be less than 2.31 positions per sequence, got k_cache",
    ),
    "mask-tensor": (
        {"mask": torch.ones(1, 9).bool()},
        TypeError,
        "mask must be a Mask or None, got Tensor",
    ),
    "mask-dense": (
        {"mask": tk.Mask.dense(torch.ones(9, dtype=torch.bool))},
        ValueError,
        "mask may combine only Mask.window, Mask.causal and Mask.key_range for decoding, got a "
        "Dense constraint",
    ),
    "mask-range-count": (
        {"mask": tk.Mask.key_range(torch.zeros(3).long(), torch.ones(3).long())},
        ValueError,
        r"the mask's start must be \(batch,\) = \(2,\), got \(3,\)",
    ),
    "mask-range-device": (
        {"mask": tk.Mask.padding(torch.ones(B, device="meta").long())},
        ValueError,
        "the mask's KeyRange.end is on meta, q is on cpu",
    ),
    "mask-align": (
        {"mask": tk.Mask.causal()},
        ValueError,
        "mask must have align='bottom_right' for decoding, got align='top_left'",
    ),
    "bias-tensor": (
        {"bias": torch.zeros(1, 9)},
        ValueError,
        r"bias must be alibi\(slopes\) or None for decoding, got a tensor \(1, 9\)",
    ),
    "bias-list": ({"bias": [0.0]}, TypeError, r"bias must be .*, got \[0.0\]"),
    "bias-align": (
        {"bias": tk.alibi(torch.ones(H))},
        ValueError,
        r"bias must be alibi\(slopes, align='bottom_right'\) for decoding, got",
    ),
    "bias-slopes": (
        {"bias": tk.alibi(torch.ones(3), align="bottom_right")},
        ValueError,
        r"= \(2,\) or \(B, H_q\) = \(2, 2\), got \(3,\)",
    ),
    "bias-slopes-count": (
        {"bias": tk.alibi(torch.ones(1, 2), align="bottom_right")},
        ValueError,
        r"or \(B, H_q\) = \(2, 2\), got \(1, 2\)",
    ),
    "sinks": ({"sinks": torch.ones(3)}, ValueError, r"sinks must be \(H_q,\) = \(2,\), got \(3,\)"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap must be positive, got 0.0"),
    "scale": ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    "backend": ({"backend": "gpu"}, ValueError, "backend must be one of 'auto', .*, got 'gpu'"),
}


def good() -> Options:
    return {
        "q": torch.randn(B, H, 1, D),
        "k_cache": torch.randn(B, H, 9, D),
        "v_cache": torch.randn(B, H, 9, D),
        "cache_seqlens": torch.tensor([9, 5]),
    }


@each(("changes", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_arguments(changes: Options, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tk.attention_decode(**good() | changes)


def test_unchanged_arguments_are_valid() -> None:
    for changes in ({}, PAGED):
        o = tk.attention_decode(**good() | changes)
        assert o.isfinite().all()
