"""Relative biases and relative keys in the Triton kernels: packed sequences, tiles, bounds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.attention import Relative
from tests.support.case import assert_case
from tests.support.masks import Window
from tests.support.varlen_cases import VarlenCase
from transformer_kernels.backends.triton import launch
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.masks.constraints import Align
from transformer_kernels.problem import Saved
from transformer_kernels.problem.dense import dense_problem
from transformer_kernels.problem.varlen import one_entry, varlen_problem

pytestmark = pytest.mark.usefixtures("poisoned")

Kind = Literal["bias", "keys"]
DIAGONALS = (-95, -33, -32, -31, -1, 0, 1, 31, 32, 33, 95)


def relative(kind: Kind, x: Tensor, **options: Any) -> tk.RelativeBias | tk.RelativeKeys:
    """The relative bias or keys that x holds."""
    return tk.relative_bias(x, **options) if kind == "bias" else tk.relative_keys(x, **options)


def starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([*itertools.accumulate(lengths, initial=0)], device=device).int()


def packed(name: str, *, width: int = 16, **options: Any) -> VarlenCase:
    lengths = ((67, 67), (0, 3), (5, 71), (3, 0), (33, 20))
    options |= {"lengths": lengths, "H_q": 4, "D": width, "D_v": width, "dlse": True}
    return VarlenCase(name=name, **options)


WINDOW = Window(30, 20, "bottom_right")
PACKED = {
    case.name: case
    for case in (
        packed("bias", relative=Relative(300, -150)),
        packed("bias-shared", relative=Relative(40, -20, "bottom_right", True), mask=WINDOW),
        packed("bias-beyond", relative=Relative(9, -5, "bottom_right"), max_seqlens=(167, 171)),
        packed("keys", relative=Relative(300, -150, kind="both"), width=19),
        packed("keys-shared", relative=Relative(40, -20, "bottom_right", True, "both"), width=19,
               mask=WINDOW),
        packed("keys-beyond", relative=Relative(9, -5, "bottom_right", kind="both"), width=19,
               max_seqlens=(167, 171)),
    )
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [*[*PACKED][:-1], pytest.param("keys-beyond", marks=pytest.mark.exhaustive)],
)
def test_packed_sequences(name: str, device: torch.device) -> None:
    """max_seqlen may be larger than the longest sequence, and than all rows in memory. With the
    bottom right corner, tiles of distances lie differently in each sequence."""
    assert_case(PACKED[name], torch.float32, "triton", device)


@pytest.mark.parametrize("diagonal", DIAGONALS)
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


@pytest.mark.parametrize("diagonal", DIAGONALS)
def test_blocks_contain_every_visible_distance(diagonal: int, device: torch.device) -> None:
    """One diagonal is visible and dlse = 1, so ds is 1 on it and its key's gradient is a sum of
    queries. The keys of all other distances are NaN. Tiles are 32 x 32."""
    M, N, B = 97, 103, 2
    q, k = torch.randn(B, 2, M, 8, device=device), torch.randn(B, 1, N, 8, device=device)
    keys = torch.full((1, M + N - 1, 8), math.nan, device=device)
    keys[:, N - 1 - diagonal] = r = torch.randn(8, device=device)
    x = [y.requires_grad_() for y in (q, k, keys)]
    _, lse = tk.attention(
        q,
        k,
        k,
        mask=tk.Mask.window(-diagonal, diagonal),
        relative=tk.relative_keys(keys, lowest=1 - N),
        scale=0.5,
        return_lse=True,
        backend="triton",
    )
    rows = torch.arange(max(0, -diagonal), min(M, N - diagonal), device=device)
    key = (k[:, :, rows + diagonal] + r).detach()
    assert_same_function(lse[:, :, rows], 0.5 * (q[:, :, rows] * key).sum(-1))
    assert (lse > -math.inf).sum() == 2 * B * len(rows)
    dq, dk, dkeys = torch.autograd.grad(lse[:, :, rows].sum(), x)
    expected = [torch.zeros_like(y) for y in x]
    expected[0][:, :, rows] = 0.5 * key.expand(-1, 2, -1, -1)
    expected[1][:, :, rows + diagonal] = 0.5 * q[:, :, rows].detach().sum(1, keepdim=True)
    expected[2][0, N - 1 - diagonal] = 0.5 * q[:, :, rows].detach().sum((0, 1, 2))
    assert_same_function([dq, dk, dkeys], expected)


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_splits_have_the_same_sum(
    shared: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program for all batch entries and heads that share keys, or one for each. Either sum has
    the same bits in every run."""
    q, k = torch.randn(3, 4, 40, 8, device=device), torch.randn(3, 2, 50, 8, device=device)
    keys = torch.randn(1 if shared else 4, 89, 8, device=device, requires_grad=True)
    do = torch.randn_like(q)

    def gradient() -> Tensor:
        relative = tk.relative_keys(keys, lowest=-49)
        o = tk.attention(q, k, k, relative=relative, backend="triton")
        return torch.autograd.grad(o, keys, do)[0]

    many = gradient()
    assert torch.equal(many, gradient())
    monkeypatch.setattr(launch, "MIN_PROGRAMS", 1)
    one = gradient()
    assert torch.equal(one, gradient())
    assert_same_function(one, many)
    assert not torch.equal(one, many)


@pytest.mark.parametrize("kind", ["bias", "keys"])
def test_blocks_that_the_block_mask_hides_are_skipped(kind: Kind, device: torch.device) -> None:
    """Sums of the other blocks have the same bits as without a block mask."""
    visible = torch.zeros(1, 1, 130, 70, dtype=torch.bool, device=device)
    visible[..., 64:128, 64:] = True
    q, k = torch.randn(2, 2, 130, 8, device=device), torch.randn(2, 2, 70, 8, device=device)
    table = torch.randn(1, 9, *((8,) if kind == "keys" else ()), device=device)
    given = relative(kind, table, lowest=-4)
    problem = dense_problem(q, k, k, mask=tk.Mask.dense(visible), relative=given)
    call = launch.prepare(problem, q, k, k)
    o, row_stats, block_mask = launch.forward(call)
    assert block_mask[0, 0].tolist() == [[0, 0], [0, 2], [0, 0]]
    saved = Saved(q, k, k, o, row_stats, block_mask)
    operands = launch.prepare_backward(call, torch.randn_like(o), None, saved)
    gradient = {
        "bias": launch.gradient_of_relative_bias,
        "keys": launch.gradient_of_relative_keys,
    }[kind]
    got = gradient(call, operands, block_mask)
    assert bool(got.any())
    expected = gradient(call, operands, torch.ones_like(block_mask))
    assert torch.equal(got, expected)
    assert not gradient(call, operands, block_mask * 0).any()


@pytest.mark.parametrize(
    "case", [*itertools.product(("bias", "keys"), ("top_left", "bottom_right"))], ids="-".join
)
def test_nothing_outside_the_table_is_read(case: tuple[Kind, Align], device: torch.device) -> None:
    """Lengths on a device are not validated and may exceed their upper bounds. The table lies
    between NaN."""
    kind, align = case
    name, width = f"relative_{kind}", (8,) if kind == "keys" else ()
    M, N, longer_M, longer_N = 20, 30, 60, 90  # one block of the backward preprocess: 64 rows
    q = torch.randn(longer_M, 1, 8, device=device)
    k = torch.randn(longer_N, 1, 8, device=device)
    given = relative(kind, torch.zeros(1, 1, *width, device=device), lowest=0, align=align)
    lengths = starts((M,), device), starts((N,), device)
    problem = varlen_problem(q, k, k, *lengths, max_seqlen_q=M, max_seqlen_k=N, relative=given)
    memory = torch.full((1, 1000, *width), math.nan, device=device)
    table = memory[:, 400 : 400 + M + N - 1].zero_()
    options: dict[str, Any] = {name: table}
    problem = replace(
        problem,
        scores=problem.scores._replace(**options),
        layout=problem.layout._replace(
            cu_seqlens_q=starts((longer_M,), device), cu_seqlens_k=starts((longer_N,), device)
        ),
    )
    call = launch.prepare(problem, one_entry(q), one_entry(k), one_entry(k))
    assert getattr(call.scores, name).data_ptr() == table.data_ptr()
    o, row_stats, _ = launch.forward(call)
    assert o.isfinite().all()
    assert row_stats[..., :M].isfinite().all()
    saved = Saved(call.q, call.k, call.v, o, row_stats, None)
    gradients = launch.backward(call, torch.randn_like(o), None, saved, (name,))
    assert getattr(gradients, name).shape == table.shape
    assert all(x is None or bool(x.isfinite().all()) for x in gradients)
    assert memory.isnan().sum() == (1000 - M - N + 1) * math.prod(width)
