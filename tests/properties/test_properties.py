"""Property tests over shapes, strides and masks, drawn by hypothesis."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import transformer_kernels as tk
from tests.fuzz.valid.draw import dense, valid_calls
from tests.support.backends import WITH_FLOAT64
from transformer_kernels.bench.tolerance import assert_same_function

# The backend fixture is constant over all examples of a test.
SETTINGS = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(params=WITH_FLOAT64)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.quick
@settings(SETTINGS, max_examples=150)
@given(data=st.data())
def test_calls_match_the_oracle(data: st.DataObject, backend: str) -> None:
    """The first calls of the fuzzer."""
    data.draw(valid_calls(backend, dense)).check()


def qkv(M: int, N: int, D: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, 2, length, D, dtype=torch.float64) for length in (M, N, N))
    return q, k, v


SIZES = given(M=st.integers(1, 70), N=st.integers(2, 140))


@SETTINGS
@SIZES
def test_key_order_does_not_matter(M: int, N: int, backend: str) -> None:
    q, k, v = qkv(M, N)
    order, bias = torch.randperm(N), torch.randn(M, N, dtype=torch.float64)
    assert_same_function(
        tk.attention(q, k[:, :, order], v[:, :, order], bias=bias[:, order], backend=backend),
        tk.attention(q, k, v, bias=bias, backend=backend),
    )


@SETTINGS
@SIZES
def test_permuted_queries_permute_rows(M: int, N: int, backend: str) -> None:
    q, k, v = qkv(M, N)
    order = torch.randperm(M)
    assert_same_function(
        tk.attention(q[:, :, order], k, v, backend=backend),
        tk.attention(q, k, v, backend=backend)[:, :, order],
    )


@SETTINGS
@SIZES
def test_row_constant_shifts_only_lse(M: int, N: int, backend: str) -> None:
    q, k, v = qkv(M, N)
    shift = 50 * torch.randn(M, 1, dtype=torch.float64)
    o, lse = tk.attention(q, k, v, return_lse=True, backend=backend)
    shifted, shifted_lse = tk.attention(q, k, v, bias=shift, return_lse=True, backend=backend)
    assert_same_function(shifted, o, lse=float(shifted_lse.abs().max()))
    assert_same_function(shifted_lse, lse + shift[:, 0])


@SETTINGS
@given(M=st.integers(1, 70), N=st.integers(2, 140), cut=st.floats(0, 1))
def test_split_keys_merge_by_lse(M: int, N: int, cut: float, backend: str) -> None:
    q, k, v = qkv(M, N)
    at = round(cut * N)
    parts = [
        tk.attention(q, k[:, :, part], v[:, :, part], return_lse=True, backend=backend)
        for part in (slice(None, at), slice(at, None))
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    o = sum(part * (one - lse).exp()[..., None] for part, one in parts)
    assert_same_function((o, lse), tk.attention(q, k, v, return_lse=True, backend=backend))


@SETTINGS
@SIZES
def test_linear_in_values(M: int, N: int, backend: str) -> None:
    q, k, v = qkv(M, N)
    other = torch.randn_like(v)
    assert_same_function(
        tk.attention(q, k, 2 * v - 3 * other, backend=backend),
        2 * tk.attention(q, k, v, backend=backend) - 3 * tk.attention(q, k, other, backend=backend),
    )


@SETTINGS
@SIZES
def test_duplicated_key_equals_bias_of_log_two(M: int, N: int, backend: str) -> None:
    q, k, v = qkv(M, N)
    twice = [torch.cat([x, x[:, :, :1]], dim=2) for x in (k, v)]
    bias = torch.zeros(1, N, dtype=torch.float64)
    bias[0, 0] = 2.0
    bias = torch.where(bias == 2.0, bias.log(), 0.0)
    assert_same_function(
        tk.attention(q, *twice, backend=backend),
        tk.attention(q, k, v, bias=bias, backend=backend),
    )


@SETTINGS
@SIZES
def test_grouped_heads_equal_repeated_heads(M: int, N: int, backend: str) -> None:
    q, k, v = qkv(M, N)
    q = torch.cat([q, -q], dim=1)
    repeated = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    assert_same_function(
        tk.attention(q, k, v, backend=backend), tk.attention(q, *repeated, backend=backend)
    )


@SETTINGS
@given(split=st.integers(1, 130))
def test_packed_documents_equal_separate_documents(split: int, backend: str) -> None:
    q, k, v = qkv(131, 131)
    mask = tk.Mask.segments((torch.arange(131) >= split).long().expand(2, -1)) & tk.Mask.causal()
    packed = tk.attention(q, k, v, mask=mask, backend=backend)
    alone = [
        tk.attention(*(x[:, :, part] for x in (q, k, v)), mask=tk.Mask.causal(), backend=backend)
        for part in (slice(None, split), slice(split, None))
    ]
    assert_same_function(packed, torch.cat(alone, dim=2))


@SETTINGS
@given(M=st.integers(1, 70), N=st.integers(1, 140))
def test_last_queries_equal_last_rows_of_full_attention(M: int, N: int, backend: str) -> None:
    """Bottom-right alignment places the queries at the end of a longer sequence."""
    N = max(M, N)
    q, k, v = qkv(N, N)
    causal = tk.Mask.causal(align="bottom_right")
    whole = tk.attention(q, k, v, mask=causal, backend=backend)
    last = tk.attention(q[:, :, N - M :], k, v, mask=causal, backend=backend)
    assert_same_function(last, whole[:, :, N - M :])


def test_mask_intersection_is_set_intersection() -> None:
    B, H, M, N = 2, 2, 9, 11
    some = [
        tk.Mask.causal(),
        tk.Mask.window(3, 2, align="bottom_right"),
        tk.Mask.padding(torch.tensor([7, 0])),
        tk.Mask.dense(torch.rand(M, N) < 0.5),
        tk.Mask.block_sparse(torch.rand(3, 3) < 0.5, 4),
        tk.Mask.block_sparse(torch.rand(2, 2) < 0.5, 6),
    ]
    for a, b in itertools.combinations(some, 2):
        both = (a & b).materialize(B, H, M, N)
        assert torch.equal(both, (b & a).materialize(B, H, M, N))
        assert torch.equal(both, a.materialize(B, H, M, N) & b.materialize(B, H, M, N))
        assert torch.equal(both, (a & b & a).materialize(B, H, M, N))
