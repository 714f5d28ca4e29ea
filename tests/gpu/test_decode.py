"""Decoding on a CUDA device: long caches, CUDA graphs with changing lengths, 64-bit offsets."""

from __future__ import annotations

import pytest
import torch

import transformer_kernels as tk
from tests.gpu.test_graphs import capture
from tests.gpu.test_offsets import far_apart, need_gib
from tests.support.case import assert_case, named
from tests.support.decode_cases import DECODE_CASES, DecodeCase
from transformer_kernels.backends.native.cuda_support import not_built_reason

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not_built_reason() is not None, reason=not_built_reason() or ""),
]

B, H_q, H_kv, D, PAGE, MAX_PAGES = 5, 8, 2, 128, 64, 40
"""MAX_PAGES is per sequence."""


def test_long_caches_split_over_the_whole_device() -> None:
    """Uneven lengths, so that CTAs begin and end within sequences."""
    cache_seqlens = (30001, 1, 0, 17000, 64, 29999, 5)
    for page_size in (0, 16, 64):
        case = DecodeCase(
            name=f"long-{page_size}", cache_seqlens=cache_seqlens, N=30016, H_q=8, D=128, D_v=128,
            page_size=page_size,
        )  # fmt: skip
        assert_case(case, torch.bfloat16, "cuda", "cuda")


def test_results_are_bit_identical_in_every_run() -> None:
    (case,) = named(DECODE_CASES, "long-pages")
    x = case.inputs(torch.bfloat16, "cuda")
    first, *others = (case.run(x, "cuda") for _ in range(20))
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in first.items())


def test_a_graph_replay_uses_the_current_lengths_and_block_table() -> None:
    """A model captures one decoding step and replays it for each token."""
    pages = B * MAX_PAGES
    q = torch.randn(B, H_q, 1, D, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(pages, H_kv, PAGE, D, dtype=q.dtype, device="cuda") for _ in range(2))
    cache_seqlens = torch.full((B,), 7, dtype=torch.int32, device="cuda")
    table = torch.randperm(pages, device="cuda").int().reshape(B, MAX_PAGES)
    graph, (o,) = capture(
        lambda: (tk.attention_decode(q, k, v, cache_seqlens, table, backend="cuda"),)
    )
    for new in ([MAX_PAGES * PAGE] * B, [1, 0, 64, 65, 2000]):
        cache_seqlens.copy_(torch.tensor(new))
        table.copy_(torch.randperm(pages).int().reshape(B, MAX_PAGES))
        graph.replay()
        assert torch.equal(o, tk.attention_decode(q, k, v, cache_seqlens, table, backend="cuda"))


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["page", "head", "row"])
def test_strides_beyond_32_bits(dim: int) -> None:
    need_gib(16)
    q = torch.randn(3, 4, 1, 64, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(6, 2, PAGE, 64, dtype=q.dtype, device="cuda") for _ in range(2))
    cache_seqlens = torch.tensor([128, 3, 70], device="cuda")
    table = torch.tensor([[5, 0], [3, 3], [2, 4]], device="cuda")
    near = tk.attention_decode(q, k, v, cache_seqlens, table, backend="cuda")
    far = far_apart(k, dim), far_apart(v, dim)
    assert torch.equal(tk.attention_decode(q, *far, cache_seqlens, table, backend="cuda"), near)
    torch.cuda.empty_cache()
