"""Decoding and linear attention on a CUDA device: long sequences, CUDA graphs, equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transformer_kernels as tk
from tests.gpu.test_device import far_apart, need_gib
from tests.gpu.test_graphs import capture
from tests.support.case import assert_case, named
from tests.support.decode_cases import DECODE_CASES, DecodeCase
from tests.support.linear import LINEAR_CASES, LinearCase
from transformer_kernels.backends.native.cuda_support import not_built_reason
from transformer_kernels.bench.tolerance import assert_same_function

pytestmark = pytest.mark.gpu
B, H_q, H_kv, D, PAGE, MAX_PAGES = 5, 8, 2, 128, 64, 40
"""MAX_PAGES is per sequence."""


def test_long_caches_split_over_the_whole_device(backend: str) -> None:
    """Uneven lengths, so that CTAs begin and end within sequences."""
    cache_seqlens = (30001, 1, 0, 17000, 64, 29999, 5)
    for page_size in (0, 16, 64):
        case = DecodeCase(
            name=f"long-{page_size}", cache_seqlens=cache_seqlens, N=30016, H_q=8, D=128, D_v=128,
            page_size=page_size,
        )  # fmt: skip
        assert_case(case, torch.bfloat16, backend, "cuda")


def test_results_are_bit_identical_in_every_run(backend: str) -> None:
    (case,) = named(DECODE_CASES, "long-pages")
    x = case.inputs(torch.bfloat16, "cuda")
    first, *others = (case.run(x, backend) for _ in range(20))
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in first.items())


def test_a_graph_replay_uses_the_current_lengths_and_block_table(backend: str) -> None:
    """A model captures one decoding step and replays it for each token."""
    pages = B * MAX_PAGES
    q = torch.randn(B, H_q, 1, D, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(pages, H_kv, PAGE, D, dtype=q.dtype, device="cuda") for _ in range(2))
    cache_seqlens = torch.full((B,), 7, dtype=torch.int32, device="cuda")
    table = torch.randperm(pages, device="cuda").int().reshape(B, MAX_PAGES)
    graph, (o,) = capture(
        lambda: (tk.attention_decode(q, k, v, cache_seqlens, table, backend=backend),)
    )
    for new in ([MAX_PAGES * PAGE] * B, [1, 0, 64, 65, 2000]):
        cache_seqlens.copy_(torch.tensor(new))
        table.copy_(torch.randperm(pages).int().reshape(B, MAX_PAGES))
        graph.replay()
        assert torch.equal(o, tk.attention_decode(q, k, v, cache_seqlens, table, backend=backend))


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["page", "head", "row"])
def test_strides_beyond_32_bits(dim: int, backend: str) -> None:
    need_gib(16)
    q = torch.randn(3, 4, 1, 64, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(6, 2, PAGE, 64, dtype=q.dtype, device="cuda") for _ in range(2))
    cache_seqlens = torch.tensor([128, 3, 70], device="cuda")
    table = torch.tensor([[5, 0], [3, 3], [2, 4]], device="cuda")
    near = tk.attention_decode(q, k, v, cache_seqlens, table, backend=backend)
    far = far_apart(k, dim), far_apart(v, dim)
    assert torch.equal(tk.attention_decode(q, *far, cache_seqlens, table, backend=backend), near)
    torch.cuda.empty_cache()


def test_auto_runs_int8_caches_by_triton() -> None:
    q, rows = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 700, 64)
    cache = tk.quantize_cache(rows, -rows)
    scales: Any = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    lengths = torch.tensor([700, 3])
    wanted = tk.attention_decode(q, cache.k, cache.v, lengths, **scales)
    on_gpu: Any = [x.cuda() for x in (q, cache.k, cache.v, lengths)]
    moved: Any = {name: x.cuda() for name, x in scales.items()}
    assert tk.explain(*on_gpu, operator=tk.attention_decode, **moved).chosen == "triton"
    assert_same_function(tk.attention_decode(*on_gpu, **moved).cpu(), wanted)


def test_linear_results_are_bit_identical_in_every_run(backend: str) -> None:
    (case,) = named(LINEAR_CASES, "gqa")
    x = case.inputs(torch.bfloat16, "cuda")
    first, second = (case.run(x, backend) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_packed_linear_attention(backend: str) -> None:
    """One of them is longer than the states of a chunk."""
    case = LinearCase(name="packed-long", packed=(700, 0, 1, 2299), trailing=1, D=64, D_v=64)
    assert_case(case, torch.float32, backend, "cuda")


@pytest.mark.parametrize("D", [64, 96])
def test_linear_decoding_in_many_steps(D: int, backend: str) -> None:
    case = LinearCase(name="many-steps", steps=(100, *(1,) * 30), H_q=4, H_kv=4, D=D, D_v=D)
    assert_case(case, torch.bfloat16, backend, "cuda")


def test_auto_chooses_the_faster_backend_of_linear_attention() -> None:
    """Triton, except for a step of decoding: there the launch from Python would take longest."""
    q, k, v = (torch.randn(1, 1, 3, 8, device="cuda") for _ in range(3))
    assert tk.explain(q, k, v, operator=tk.linear_attention).chosen == "triton"
    one = q[:, :, :1]
    _, state = tk.linear_attention(q, k, v, return_state=True, backend="triton")
    step = tk.explain(one, one, one, state, operator=tk.linear_attention_decode)
    assert step.chosen == ("cuda" if not_built_reason() is None else "triton")
