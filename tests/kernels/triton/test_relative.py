"""The relative bias in the Triton kernels: packed sequences, strips of tiles and their bounds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from transformer_kernels.backends.triton import launch
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.masks.constraints import Align
from transformer_kernels.problem import Saved
from transformer_kernels.problem.dense import dense_problem
from transformer_kernels.problem.varlen import one_entry, varlen_problem

pytestmark = pytest.mark.usefixtures("poisoned")

LENGTHS = ((67, 67), (0, 3), (5, 71), (3, 0), (33, 20))
"""(M, N) of each sequence"""


def starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([*itertools.accumulate(lengths, initial=0)], device=device).int()


@pytest.mark.parametrize(
    ("align", "left", "heads", "entries", "beyond"),
    [
        ("top_left", None, 4, 300, 0),
        ("bottom_right", 30, 1, 40, 0),
        ("bottom_right", None, 4, 9, 100),
    ],
)
def test_packed_sequences_match_the_reference(
    align: Align, left: int | None, heads: int, entries: int, beyond: int, device: torch.device
) -> None:
    """max_seqlen may be larger than the longest sequence, and than all rows in memory."""
    rows_q, rows_k = (starts(lengths, device) for lengths in zip(*LENGTHS, strict=True))
    q = torch.randn(int(rows_q[-1]), 4, 16, device=device)
    k, v = (torch.randn(int(rows_k[-1]), 2, 16, device=device) for _ in range(2))
    table, do = torch.randn(heads, entries, device=device), torch.randn_like(q)
    dlse = torch.randn(4, q.shape[0], device=device)

    def step(dtype: torch.dtype, backend: str) -> list[Tensor]:
        x = tuple(y.to(dtype).requires_grad_() for y in (q, k, v, table))
        o, lse = tk.attention_varlen(
            x[0], x[1], x[2], rows_q, rows_k,
            max_seqlen_q=67 + beyond,
            max_seqlen_k=71 + beyond,
            mask=tk.Mask.window(left, None if left is None else 20, align=align),
            relative=tk.relative_bias(x[3], lowest=-entries // 2, align=align),
            return_lse=True,
            backend=backend,
        )  # fmt: skip
        gradients = torch.autograd.grad([o, lse], x, [do.to(dtype), dlse.to(dtype)])
        return [y.detach().float() for y in (o, lse, *gradients)]

    got, expected = step(torch.float32, "triton"), step(torch.float64, "reference")
    assert_same_function(got, expected)


@pytest.mark.parametrize("diagonal", [-95, -33, -32, -31, -1, 0, 1, 31, 32, 33, 95])
def test_strips_contain_every_visible_distance(diagonal: int, device: torch.device) -> None:
    """With one visible diagonal and dlse = 1, ds is 1 on it: the gradient counts its elements.
    Tiles are 32 x 32."""
    M, N, B = 97, 103, 2
    q, k = torch.randn(B, 1, M, 8, device=device), torch.randn(B, 1, N, 8, device=device)
    table = torch.randn(1, M + N - 1, device=device, requires_grad=True)
    _, lse = tk.attention(
        q,
        k,
        k,
        mask=tk.Mask.window(-diagonal, diagonal),
        relative=tk.relative_bias(table, lowest=1 - N),
        return_lse=True,
        backend="triton",
    )
    visible = lse > -math.inf
    (gradient,) = torch.autograd.grad(lse[visible].sum(), table)
    expected = torch.zeros_like(gradient)
    expected[0, N - 1 - diagonal] = visible.sum()
    torch.testing.assert_close(gradient, expected)


def test_blocks_that_the_block_mask_hides_are_skipped(device: torch.device) -> None:
    """Sums of the other blocks have the same bits as without a block mask."""
    visible = torch.zeros(1, 1, 130, 70, dtype=torch.bool, device=device)
    visible[..., 64:128, 64:] = True
    q, k = torch.randn(2, 2, 130, 8, device=device), torch.randn(2, 2, 70, 8, device=device)
    relative = tk.relative_bias(torch.randn(1, 9, device=device), lowest=-4)
    problem = dense_problem(q, k, k, mask=tk.Mask.dense(visible), relative=relative)
    call = launch.prepare(problem, q, k, k)
    o, row_stats, block_mask = launch.forward(call)
    assert block_mask[0, 0].tolist() == [[0, 0], [0, 2], [0, 0]]
    saved = Saved(q, k, k, o, row_stats, block_mask)
    operands = launch.prepare_backward(call, torch.randn_like(o), None, saved)
    got = launch.gradient_of_relative_bias(call, operands, block_mask)
    assert bool(got.any())
    expected = launch.gradient_of_relative_bias(call, operands, torch.ones_like(block_mask))
    assert torch.equal(got, expected)
    assert not launch.gradient_of_relative_bias(call, operands, block_mask * 0).any()


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_nothing_outside_the_table_is_read(align: Align, device: torch.device) -> None:
    """Lengths on a device are not validated and may exceed their upper bounds. The table lies
    between NaN."""
    M, N, longer_M, longer_N = 20, 30, 60, 90  # one block of the backward preprocess: 64 rows
    q = torch.randn(longer_M, 1, 8, device=device)
    k = torch.randn(longer_N, 1, 8, device=device)
    relative = tk.relative_bias(torch.zeros(1, 1, device=device), lowest=0, align=align)
    lengths = starts((M,), device), starts((N,), device)
    problem = varlen_problem(q, k, k, *lengths, max_seqlen_q=M, max_seqlen_k=N, relative=relative)
    table = torch.full((1, 1000), math.nan, device=device)[:, 400 : 400 + M + N - 1].zero_()
    problem = replace(
        problem,
        scores=problem.scores._replace(relative_bias=table),
        layout=problem.layout._replace(
            cu_seqlens_q=starts((longer_M,), device), cu_seqlens_k=starts((longer_N,), device)
        ),
    )
    call = launch.prepare(problem, one_entry(q), one_entry(k), one_entry(k))
    assert call.scores.relative_bias is not None
    assert call.scores.relative_bias.data_ptr() == table.data_ptr()
    o, row_stats, _ = launch.forward(call)
    assert o.isfinite().all()
    assert row_stats[..., :M].isfinite().all()
    saved = Saved(call.q, call.k, call.v, o, row_stats, None)
    gradients = launch.backward(call, torch.randn_like(o), None, saved, ("relative_bias",))
    assert gradients.relative_bias is not None
    assert gradients.relative_bias.shape == table.shape
    assert all(x is None or bool(x.isfinite().all()) for x in gradients)
