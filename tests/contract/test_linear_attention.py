"""The contract of linear attention, of packed sequences and of steps: every case of the table, for
every backend and dtype."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import DTYPES, ISAS, forced_isa
from tests.support.case import assert_case
from tests.support.linear import (
    LINEAR_CASES,
    LINEAR_NAMES,
    LINEAR_TABLE_WAYS,
    LinearCase,
    widest,
)
from tests.support.operators import operators_run_by
from tests.support.runtime import threads
from tests.support.tiers import crossed, each
from transformer_kernels.bench.memory import memory_can_be_measured, peak_extra_bytes
from transformer_kernels.bench.tolerance import assert_same_function

ISAS_AND_DTYPES = tuple((isa, dtype) for isa in ISAS for dtype in DTYPES)
SEGMENTED = [case for case in LINEAR_CASES if case.name.startswith("segments")]
ZEROS = torch.zeros(2, 2, 8)
every_backend = pytest.mark.parametrize("backend", LINEAR_NAMES)


attend_varlen: Any = tk.linear_attention_varlen
decode: Any = tk.linear_attention_decode


def qkv(N: int = 70, H_kv: int = 2, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, heads, N, 8, **options) for heads in (2, H_kv, H_kv))
    return q, k, v


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("case", "backend", "dtype", "device"), crossed(LINEAR_CASES, LINEAR_TABLE_WAYS)
)
def test_case(case: LinearCase, backend: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_case(case, dtype, backend, device)


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("case", "isa", "dtype"), crossed(LINEAR_CASES, ISAS_AND_DTYPES))
def test_instruction_sets(case: LinearCase, isa: str, dtype: torch.dtype) -> None:
    with forced_isa(isa):
        assert_case(case, dtype, "cpu")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", SEGMENTED, ids=str)
def test_segments_of_a_head(case: LinearCase) -> None:
    """Few heads on several threads are cut into segments, whose states are summed first."""
    with threads(1):
        assert_case(case, torch.float64, "cpu")
        whole = case.run(case.inputs(torch.float32), "cpu")
    with threads(3):
        assert_case(case, torch.float64, "cpu")
        cut = case.run(case.inputs(torch.float32), "cpu")
    case.expected(torch.float32).check(cut)
    assert any(not torch.equal(whole[name], cut[name]) for name in whole)


def widen(x: Tensor) -> Tensor:
    return torch.cat([x.exp(), (-x).exp()], dim=-1)


@every_backend
def test_a_callable_feature_map_runs_before_the_kernels(backend: str) -> None:
    q, k, v = qkv(requires_grad=True)
    o = tk.linear_attention(q, k, v, feature_map=widen, backend=backend)
    expected = tk.linear_attention(
        widen(q), widen(k), v, feature_map="identity", backend="reference"
    )
    assert_same_function(o, expected)
    grads, wanted = (torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (o, expected))
    assert_same_function(grads, wanted)


@every_backend
@pytest.mark.parametrize("cut", [1, 64, 90])
def test_a_state_continues_a_sequence(cut: int, backend: str) -> None:
    dtype = widest(backend)
    q, k, v = qkv(131, dtype=dtype)
    decay = -torch.rand(2, 2, 131, dtype=dtype)
    whole, end = tk.linear_attention(q, k, v, log_decay=decay, return_state=True, backend=backend)
    state, parts = None, []
    for rows in (slice(0, cut), slice(cut, 131)):
        o, state = tk.linear_attention(
            *(x[:, :, rows] for x in (q, k, v)), log_decay=decay[:, :, rows],
            initial_state=state, return_state=True, backend=backend,
        )  # fmt: skip
        parts.append(o)
    assert_same_function(torch.cat(parts, dim=2), whole)
    assert_same_function(state, end)


@pytest.mark.quick
@every_backend
def test_gradients_flow_through_the_state(backend: str) -> None:
    q, k, v = qkv(100, dtype=widest(backend), requires_grad=True)

    def in_two_parts() -> Tensor:
        first, second = ([x[:, :, rows] for x in (q, k, v)] for rows in (slice(40), slice(40, 100)))
        o, state = tk.linear_attention(*first, return_state=True, backend=backend)
        rest = tk.linear_attention(*second, initial_state=state, backend=backend)
        return torch.cat([o, rest], dim=2)

    do = torch.randn(2, 2, 100, 8, dtype=q.dtype)
    whole = tk.linear_attention(q, k, v, backend=backend)
    assert_same_function(
        torch.autograd.grad(in_two_parts(), (q, k, v), do),
        torch.autograd.grad(whole, (q, k, v), do),
    )


@every_backend
def test_later_nan_does_not_reach_earlier_chunks(backend: str) -> None:
    q, k, v = qkv(150)
    before = tk.linear_attention(q, k, v, backend=backend)
    for x in (q, k, v):
        x[:, :, 128:] = math.nan
    after = tk.linear_attention(q, k, v, backend=backend)
    assert_same_function(before[:, :, :128], after[:, :, :128])
    assert after[:, :, 128:].isnan().all()


@every_backend
def test_later_tokens_change_no_earlier_row(backend: str) -> None:
    q, k, v = qkv(70)
    before = tk.linear_attention(q, k, v, backend=backend)
    for x in (k, v):
        x[:, :, 40:] = 1e3
    after = tk.linear_attention(q, k, v, backend=backend)
    assert torch.equal(before[:, :, :40], after[:, :, :40])
    assert not torch.isclose(before[:, :, 40:], after[:, :, 40:]).any(dim=-1).all()


@every_backend
def test_visible_nan_propagates(backend: str) -> None:
    for where in range(3):
        tensors = qkv(150)
        tensors[where][0, 0, 70, 3] = math.nan
        hit = tk.linear_attention(*tensors, backend=backend).isnan().any(dim=-1)
        assert not hit[1].any()
        assert not hit[:, 1].any()
        assert not hit[0, 0, :64].any()
        assert hit[0, 0, 70]
        assert bool(hit[0, 0, 71:].all()) == (where != 0)


@every_backend
def test_without_normalization_z_changes_nothing_but_itself(backend: str) -> None:
    x = qkv(requires_grad=True)
    S, z = torch.randn(2, 2, 8, 8), torch.full((2, 2, 8), math.nan)
    o, end = tk.linear_attention(
        *x, normalize=False, initial_state=tk.LinearState(S, z), return_state=True, backend=backend
    )
    grads = torch.autograd.grad(o.sum(), x)
    assert all(y.isfinite().all() for y in (o, end.S, *grads))
    assert end.z.isnan().all()


@every_backend
def test_large_features_of_elu(backend: str) -> None:
    """exp underflows far below zero; phi grows linearly above it."""
    x = torch.tensor([-math.inf, -1e30, -200.0, -104.0, -80.0, -1e-8, 0.0, 1e-8, 1e4])
    q = x.clone().view(1, 1, 1, 9).requires_grad_()
    S, z = torch.eye(9).view(1, 1, 9, 9), torch.zeros(1, 1, 9)
    k = torch.full((1, 1, 1, 9), -math.inf)  # phi is 0
    v = torch.zeros(1, 1, 1, 9)
    o = tk.linear_attention(
        q, k, v, initial_state=tk.LinearState(S, z), normalize=False, backend=backend
    )
    (slope,) = torch.autograd.grad(o.sum(), q)
    torch.testing.assert_close(o[0, 0, 0], torch.nn.functional.elu(x) + 1)
    torch.testing.assert_close(slope[0, 0, 0], torch.clamp(x.exp(), max=1.0))


@every_backend
def test_growth_and_extreme_decay(backend: str) -> None:
    q, k, v = qkv(6, dtype=widest(backend))
    for step in (0.5, -1e4, -math.inf, 0.0):
        decay = torch.tensor([0.1, step], dtype=q.dtype)
        o = tk.linear_attention(q, k, v, log_decay=decay, backend=backend)
        if step < -1e3:  # each token sees itself alone
            phi = torch.nn.functional.elu(q[:, 1]) + 1, torch.nn.functional.elu(k[:, 1]) + 1
            weight = (phi[0] * phi[1]).sum(-1, keepdim=True)
            assert_same_function(o[:, 1], v[:, 1] * weight / (weight + 1e-6))
        expected = tk.linear_attention(q, k, v, log_decay=decay, backend="reference")
        assert_same_function(o, expected)


@every_backend
def test_a_decay_that_clears_the_state_has_no_gradient(backend: str) -> None:
    q, k, v = qkv(70)
    decay = torch.full((2, 2, 70), -0.1)
    decay[:, :, 3], decay[:, :, 40] = -math.inf, -300.0
    decay.requires_grad_()
    o = tk.linear_attention(q, k, v, log_decay=decay, backend=backend)
    (gradient,) = torch.autograd.grad(o.sin().sum(), decay)
    assert not gradient[:, :, [3, 40]].any()
    assert gradient[:, :, 41:].all()


@every_backend
def test_half_precision_state_is_float32(backend: str) -> None:
    """A state in bfloat16 would stop to grow after some hundred tokens."""
    N = 4096
    x = torch.ones(1, 1, N, 4, dtype=torch.bfloat16)
    o, state = tk.linear_attention(
        x, x, x, feature_map="identity", return_state=True, backend=backend
    )
    assert torch.equal(state.S, torch.full((1, 1, 4, 4), float(N)))
    assert torch.equal(state.z, torch.full((1, 1, 4), float(N)))
    assert torch.equal(o, x)


@each("case", LINEAR_CASES, ids=str)
def test_results_are_bit_identical_across_runs(case: LinearCase) -> None:
    x = case.inputs(torch.float32)
    first, second = (case.run(x, "cpu") for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_transposed_tensors_are_not_copied() -> None:
    x = torch.randn(2, 70, 3, 8).transpose(1, 2).requires_grad_()
    o = tk.linear_attention(x, x, x)
    assert o.stride() == x.stride()
    ran = operators_run_by(lambda: tk.linear_attention(x, x, x))
    assert ran["transformer_kernels::linear_forward"] == 1
    assert not ran["aten::copy_"]


@pytest.mark.skipif(not memory_can_be_measured(), reason="the system does not report peak memory")
def test_memory_does_not_grow_with_the_state_of_every_token() -> None:
    """The states of all tokens would take 1 GiB; o and the state take 17 MiB."""
    q, k, v = (torch.randn(1, 1, 65536, 64) for _ in range(3))
    extra = peak_extra_bytes(lambda: lambda: tk.linear_attention(q, k, v, backend="cpu"))
    assert extra is not None
    assert extra < 40 << 20


def test_explain() -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    report = tk.explain(q, k, v, operator=tk.linear_attention, log_decay=torch.zeros(2))
    assert report.chosen == "cpu"
    assert "csrc/cpu/linear" in str(report)
    assert "reference: supported, not chosen" in str(report)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    starts = torch.tensor([0, 30, 70])
    report = tk.explain(*packed, starts, operator=tk.linear_attention_varlen)
    assert "(varlen)" in str(report)
    state = tk.LinearState(torch.zeros(2, 2, 8, 8), torch.zeros(2, 2, 8))
    report = tk.explain(q, k, v, state, operator=tk.linear_attention_decode, backend="reference")
    assert report.chosen == "reference"
    assert not state.S.any()


def test_bits_do_not_depend_on_the_batch_the_strides_or_other_heads() -> None:
    q, k, v = (torch.randn(8, 3, 100, 8) for _ in range(3))
    whole = tk.linear_attention(q, k, v)
    alone = tk.linear_attention(*(x[5:6, 1:2] for x in (q, k, v)))
    assert torch.equal(whole[5:6, 1:2], alone)
    strided = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert torch.equal(tk.linear_attention(*strided), whole)
    prefix = tk.linear_attention(*(x[:, :, :70] for x in (q, k, v)))
    assert torch.equal(whole[:, :, :64], prefix[:, :, :64])


# linear_attention_varlen, beyond the table of cases.


def packed() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(270, 4, 8), torch.randn(270, 2, 8), torch.randn(270, 2, 5)
    return q, k, v


@pytest.mark.parametrize("count", [1, 3])
@every_backend
def test_few_long_sequences_are_cut_into_segments(backend: str, count: int) -> None:
    dtype = widest(backend)
    x = [torch.randn(2300, 1, 4, dtype=dtype, requires_grad=True) for _ in range(3)]
    cu_seqlens = torch.tensor([0, 1200, 2300])
    decay = torch.tensor([-0.01], dtype=dtype, requires_grad=True)
    with threads(count):
        results = []
        for name in (backend, "reference"):
            o = attend_varlen(*x, cu_seqlens, log_decay=decay, backend=name)
            results.append((o, *torch.autograd.grad(o.sin().sum(), [*x, decay])))
    assert_same_function(results[0], results[1])


@every_backend
def test_without_sequences(backend: str) -> None:
    starts = torch.tensor([0])
    o, state = attend_varlen(*packed(), cu_seqlens=starts, return_state=True, backend=backend)
    assert not o.any()
    assert state.S.shape == (0, 2, 8, 5)


# linear_attention_decode, beyond the table of cases.


def tokens(N: int, B: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(B, 2, N, width) for width in (7, 7, 5))
    return q, k, v


def zeros(width: int = 7) -> tk.LinearState:
    return tk.LinearState(torch.zeros(2, 2, width, 5), torch.zeros(2, 2, width))


@every_backend
def test_a_callable_feature_map_of_decode(backend: str) -> None:
    (q, k, v), states = tokens(3), [zeros(14), zeros(14)]
    o = decode(q, k, v, states[0], feature_map=widen, backend=backend)
    expected = decode(widen(q), widen(k), v, states[1], feature_map="identity", backend=backend)
    assert torch.equal(o, expected)
    assert torch.equal(states[0].S, states[1].S)


@every_backend
def test_no_tokens_and_no_batch(backend: str) -> None:
    state = zeros()
    assert decode(*tokens(0), state, backend=backend).shape == (2, 2, 0, 5)
    assert not state.S.any()
    empty = tk.LinearState(state.S[:0], state.z[:0])
    assert decode(*tokens(1, B=0), empty, backend=backend).shape == (0, 2, 1, 5)


def test_decode_in_no_grad_mode() -> None:
    q, k, v = tokens(1)
    with torch.no_grad():
        o = decode(q.requires_grad_(), k, v, zeros())
    assert not o.requires_grad
