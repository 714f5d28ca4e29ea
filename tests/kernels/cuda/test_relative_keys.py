"""Relative keys in the CUDA kernels, emulated: packed sequences, hidden distances and all tiles."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from building.emulated import Emulation
from building.tile_config import RELATIVE_WIDTHS
from tests.support import emulator
from tests.support.attention import Relative
from tests.support.case import assert_case
from tests.support.cases import Case
from tests.support.emulated import NOT_EMULATED
from tests.support.masks import CAUSAL_END
from transformer_kernels.bench.tolerance import assert_within_rule
from transformer_kernels.problem.fields import FIELDS
from transformer_kernels.problem.varlen import one_entry, varlen_problem

if NOT_EMULATED is not None:
    pytest.skip(f"kernels cannot be emulated: {NOT_EMULATED}", allow_module_level=True)

LARGE, SMALL, RACES = Emulation(), Emulation(arch=860), Emulation(races=True)
STARTS_Q, STARTS_K = [0, 5, 38, 39, 39], [0, 131, 151, 221, 224]
"""Sequences of (5, 131), (33, 20), (1, 70) and (0, 3) queries and keys: four offsets."""


def _packed_inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v of the packed sequences and shared keys of 99 distances."""
    torch.manual_seed(0)
    shapes = ((39, 4, 24), (224, 2, 24), (224, 2, 24), (1, 99, 24))
    return tuple(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)


def _packed(x: tuple[Tensor, ...]) -> dict[str, Tensor]:
    q, k, v, keys = x
    starts_q, starts_k = torch.tensor(STARTS_Q), torch.tensor(STARTS_K)
    relative = tk.relative_keys(keys, lowest=-40, align="bottom_right")
    mask = tk.Mask.causal(align="bottom_right")
    o = tk.attention_varlen(
        q, k, v, starts_q, starts_k, mask=mask, relative=relative, backend="cuda"
    )
    return _with_gradients(o, x)


def _each_alone(x: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The same sequences one by one, by the reference backend."""
    outputs = []
    for (q0, q1), (k0, k1) in zip(pairwise(STARTS_Q), pairwise(STARTS_K), strict=True):
        q, k, v = (y[None].transpose(1, 2) for y in (x[0][q0:q1], x[1][k0:k1], x[2][k0:k1]))
        relative = tk.relative_keys(x[3], lowest=-40, align="bottom_right")
        mask = tk.Mask.causal(align="bottom_right")
        outputs.append(tk.attention(q, k, v, mask=mask, relative=relative, backend="reference"))
    return _with_gradients(torch.cat(outputs, dim=2)[0].transpose(0, 1), x)


def _with_gradients(o: Tensor, x: tuple[Tensor, ...]) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(o.float().sin().sum(), x)
    return {"o": o.detach(), **dict(zip(("dq", "dk", "dv", "dkeys"), gradients, strict=True))}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_packed_sequences_with_several_offsets(dtype: torch.dtype) -> None:
    x = _packed_inputs(dtype)
    exact = _each_alone(tuple(y.detach().double().requires_grad_() for y in x))
    plain = _each_alone(x)
    for name, value in _packed(x).items():
        assert_within_rule(name, value, exact[name], plain[name])


def test_all_gradients_are_bitwise_equal_under_every_thread_order() -> None:
    """Also without deterministic algorithms: no sum is atomic."""
    assert not torch.are_deterministic_algorithms_enabled()
    x, runs = _packed_inputs(torch.float32), []
    for seed in range(4):
        with emulator.schedule(seed):
            runs.append(_packed(x))
    for run in runs[1:]:
        assert all(torch.equal(run[name], value) for name, value in runs[0].items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_hidden_distances_may_hold_nan(dtype: torch.dtype) -> None:
    """Distances outside the window are in the bands of tiles, as those of rows of padding are."""
    M, N, left, right = 70, 133, 20, 9
    torch.manual_seed(0)
    x = [torch.randn(1, 2, n, 16).to(dtype).requires_grad_() for n in (M, N, N)]
    keys = torch.randn(1, left + right + 1, 16).to(dtype)

    def run(hidden: float) -> tuple[Tensor, ...]:
        around = torch.full((1, 50, 16), hidden).to(dtype)
        table = torch.cat((around, keys, around), dim=1).requires_grad_()
        relative = tk.relative_keys(table, lowest=-right - 50)
        o = tk.attention(*x, mask=tk.Mask.window(left, right), relative=relative, backend="cuda")
        return o, *torch.autograd.grad(o.float().sin().sum(), (*x, table))

    zero, nan = run(0.0), run(math.nan)
    assert all(torch.equal(y, z) for y, z in zip(zero, nan, strict=True))
    assert nan[4][:, 50:-50].abs().amin(dim=-1).min() > 0
    assert not nan[4][:, :50].any()
    assert not nan[4][:, -50:].any()


def test_no_distance_beyond_the_table_is_read() -> None:
    """max_seqlen is not checked on a device: sequences may be longer. Rows within it, of which each
    sees every key, have defined results."""
    rows, bound = 70, 40
    q = torch.randn(rows, 1, 16)
    starts = torch.tensor([0, rows])
    nan = torch.full((3, 2 * bound - 1, 16), math.nan)
    nan[1] = 0.5
    problem = varlen_problem(q, q, q, starts, relative=tk.relative_keys(nan[1:2], lowest=0))
    packed = one_entry(q)
    given = dict(zip((field.name for field in FIELDS), problem.pack(), strict=True))
    given |= {"max_seqlen_q": bound, "max_seqlen_k": bound, "relative_keys": nan[1:2]}
    operators = torch.ops.transformer_kernels_emulated
    o, row_stats, _ = operators.attention_forward(packed, packed, packed, **given)
    assert o[:, :, :bound].isfinite().all()
    assert row_stats[..., :bound].isfinite().all()


def test_a_cache_is_not_supported() -> None:
    q, cache = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 8, 16)
    relative = tk.relative_keys(torch.randn(1, 3, 16), lowest=0, align="bottom_right")
    lengths = torch.tensor([5], dtype=torch.int32)
    with pytest.raises(ValueError, match="relative_keys with a cache"):
        tk.attention_decode(q, cache, cache, lengths, relative=relative, backend="cuda")


def test_hopper_runs_the_kernels_of_sm80() -> None:
    q = torch.randn(1, 2, 130, 64, dtype=torch.float16, requires_grad=True)
    relative = tk.relative_keys(torch.randn(2, 9, 64, requires_grad=True), lowest=-4)
    with emulator.chip(90):
        choice = tk.explain(q, q, q, relative=relative, backend="cuda")
        o = tk.attention(q, q, q, relative=relative, backend="cuda")
        assert "forward_kernel<Element, kWidth, kProducts>" in emulator.latest_launch()
        torch.autograd.grad(o.sum(), (q, relative.keys))
        assert "relative_keys_sum_kernel" in emulator.latest_launch()
    assert "csrc/cuda/sm80/relative, float16, width 64" in str(choice)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", RELATIVE_WIDTHS)
@pytest.mark.parametrize("emulation", [LARGE, SMALL], ids=["large", "small"])
def test_every_tile(emulation: Emulation, width: int, dtype: torch.dtype) -> None:
    case = Case(
        name="keys-tile",
        relative=Relative(200, -130, kind="both"),
        B=1,
        M=70,
        N=135,
        D=width,
        D_v=width,
        mask=CAUSAL_END,
        bias="11mn",
        dropout_p=0.2,
    )
    with emulator.emulation(emulation):
        assert_case(case, dtype, "cuda")


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packed_sequences_have_no_races(dtype: torch.dtype) -> None:
    for seed in range(2):
        with emulator.emulation(RACES), emulator.schedule(seed):
            _packed(_packed_inputs(dtype))
