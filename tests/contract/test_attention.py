"""The contract of `attention`: every case of the table, for every backend and dtype; and a learned
scale."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import TABLE_WAYS, WITH_FLOAT64, dtypes_of
from tests.support.case import assert_case, named
from tests.support.cases import CASES, Case
from tests.support.masks import Selected, each_of
from tests.support.operators import operators_run_by
from tests.support.oracle import plain_attention
from tests.support.runtime import threads
from tests.support.tiers import crossed
from transformer_kernels.bench.memory import memory_can_be_measured, peak_extra_bytes
from transformer_kernels.bench.tolerance import assert_same_function, assert_within_rule


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("case", "backend", "dtype", "device"), crossed(CASES, TABLE_WAYS))
def test_case(case: Case, backend: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_case(case, dtype, backend, device)


def test_every_backend_supports_every_case() -> None:
    """The only reasons against a case are widths and lists, which the cuda backend lacks."""
    backends = {(backend, device) for backend, _, device in TABLE_WAYS}
    for case, (backend, device) in itertools.product(CASES, backends):
        listed = any(isinstance(one, Selected) for one in each_of(case.mask))
        reasons = (max(case.D, case.D_v) > 256) + listed if backend == "cuda" else 0
        assert len(case.reasons(backend, device)) == reasons, (case.name, backend)


def test_dtypes_of_outputs(backend: str) -> None:
    for dtype in dtypes_of(backend):
        x = torch.randn(1, 2, 3, 4, dtype=dtype)
        o, lse = tk.attention(x, x, x, sinks=torch.zeros(2), return_lse=True, backend=backend)
        assert o.dtype == dtype
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 50.0, 1e4])
def test_scores_of_any_size(magnitude: float, backend: str) -> None:
    """From uniform rows to one-hot rows, without overflow or underflow of exp."""
    q, k, v = (torch.randn(1, 2, 70, 8) for _ in range(3))
    q *= magnitude
    exact, lse = tk.attention(
        q.double(), k.double(), v.double(), return_lse=True, backend="reference"
    )
    plain, _ = plain_attention(q, k, v)
    o = tk.attention(q, k, v, backend=backend)
    assert_within_rule("o", o, exact, plain, lse=float(lse.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_outputs_round_to_nearest(dtype: torch.dtype, backend: str) -> None:
    """Truncation would bias the results by half a unit in the last place."""
    x = [torch.randn(1, 4, 128, 32).to(dtype).requires_grad_() for _ in range(3)]
    exact_x = [y.detach().double().requires_grad_() for y in x]
    do = torch.randn(1, 4, 128, 32).to(dtype)
    o, exact = tk.attention(*x, backend=backend), tk.attention(*exact_x, backend="reference")
    got = [o, *torch.autograd.grad(o, x, do)]
    expected = [exact, *torch.autograd.grad(exact, exact_x, do.double())]
    for one, other in zip(got, expected, strict=True):
        ulp = torch.finfo(dtype).eps * other.abs().log2().floor().exp2()
        too_large = (one.double() - other) * other.sign()
        assert abs(too_large.sum() / ulp.sum()) < 0.1


@pytest.mark.parametrize("backend", WITH_FLOAT64)
def test_sinks_equal_an_extra_key_column(backend: str) -> None:
    """The extra key has the sink as its score and a value of 0; in float64."""
    q, k, v = (torch.randn(2, 3, 9, 4, dtype=torch.float64) for _ in range(3))
    sinks = torch.randn(3, dtype=torch.float64)
    k_sink, v_sink = (torch.cat([x, torch.zeros(2, 3, 1, 4)], dim=2) for x in (k, v))
    column = torch.cat([torch.zeros(3, 9, 9), sinks[:, None, None].expand(3, 9, 1)], dim=2)
    got = tk.attention(q, k, v, sinks=sinks, return_lse=True, backend=backend)
    exact = tk.attention(q, k_sink, v_sink, bias=column, return_lse=True, backend="reference")
    assert_same_function(got, exact)


def test_transposed_tensors_are_not_copied() -> None:
    """(B, T, H, D) viewed as (B, H, T, D): no copy, and o, dq, dk and dv have the same layout."""
    q, k, v = (torch.randn(2, 67, 4, 16).transpose(1, 2).requires_grad_() for _ in range(3))
    do = torch.randn(2, 67, 4, 16).transpose(1, 2)

    def step() -> tuple[Tensor, ...]:
        o = tk.attention(q, k, v, mask=tk.Mask.causal(), backend="cpu")
        return o, *torch.autograd.grad(o, (q, k, v), do)

    assert all(x.transpose(1, 2).is_contiguous() for x in step())
    ran = operators_run_by(step)
    for name in ("aten::copy_", "aten::clone", "aten::cat"):
        assert name not in ran


REPEATED: list[Case] = named(
    CASES, "gqa-everything", "all-masks", "bias-1111", "bias-b1mn", "mqa", "many-keys"
)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("backend", WITH_FLOAT64)  # interpreted kernels always run in one order
@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_gradients_are_bit_identical_across_runs(case: Case, backend: str) -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(4)
    try:
        runs = [case.run(case.inputs(torch.float32), backend) for _ in range(6)]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(run[name], value) for name, value in runs[0].items())


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_forward_does_not_depend_on_the_number_of_threads(case: Case) -> None:
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        results.append(case.run(case.inputs(torch.float32), "cpu"))
    for other in results[1:]:
        assert torch.equal(other["o"], results[0]["o"])
        assert torch.equal(other["lse"], results[0]["lse"])
        for name, value in other.items():
            assert_same_function(value, results[0][name])


@pytest.mark.usefixtures("threads")
def test_concurrent_callers_are_independent() -> None:
    torch.set_num_threads(2)
    work = [case.inputs(torch.float32) for case in REPEATED] * 4
    expected = [case.run(x, "cpu") for case, x in zip(REPEATED * 4, work, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(Case.run, REPEATED * 4, work, ["cpu"] * len(work)))
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one["o"], other["o"])
        for name, value in one.items():
            assert_same_function(value, other[name])


@pytest.mark.exhaustive
@pytest.mark.skipif(not memory_can_be_measured(), reason="peak memory cannot be measured")
def test_memory_is_linear_in_the_length() -> None:
    """At S = 4096 a float32 S x S matrix is 64 MiB. The reference proves that it is detected."""
    S = 4096
    attn_mask = torch.zeros(S, S, dtype=torch.bool)  # S x S memory of the caller: 16 MiB
    attn_mask[:, ::3] = True
    q, k, v = (torch.randn(1, 1, S, 16, requires_grad=True) for _ in range(3))
    bias = torch.zeros(1, 1, 1, S, requires_grad=True)
    mask = tk.Mask.window(3000, 3000) & tk.Mask.dense(attn_mask)

    def step(backend: str, dropout_p: float) -> object:
        o = tk.attention(
            q, k, v, mask=mask, bias=bias, softcap=5.0, dropout_p=dropout_p, seed=1, backend=backend
        )
        return torch.autograd.grad(o.sum(), (q, k, v, bias))

    with threads(2):
        fused = peak_extra_bytes(lambda: lambda: step("cpu", 0.1))
        naive = peak_extra_bytes(lambda: lambda: step("reference", 0.0))
    assert fused is not None
    assert naive is not None
    assert fused < 16 << 20
    assert naive > 128 << 20


# A scale that is a tensor: a factor of the queries, with a gradient.


M, N, D, SCALE = 7, 13, 5, 0.37


def small(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, heads, n, D, dtype=dtype) for heads, n in ((4, M), (2, N), (2, N)))
    return q, k, v


def times(q: Tensor, scale: Tensor) -> Tensor:
    """The product, rounded once to q's dtype."""
    return (q.double() * scale.double()).to(q.dtype)


def test_a_scale_multiplies_the_queries(backend: str) -> None:
    keys = tk.relative_keys(torch.randn(4, 9, D), lowest=-4)
    for dtype in dtypes_of(backend):
        q, k, v = small(dtype)
        for scale in {torch.tensor(SCALE), torch.tensor([SCALE], dtype=dtype)}:
            options: dict[str, Any] = {"mask": tk.Mask.causal(), "backend": backend}
            options |= {
                "softcap": 3.0,
                "relative": tk.relative_keys(keys.keys.to(dtype), lowest=-4),
            }
            got = tk.attention(q, k, v, scale=scale, **options)
            assert torch.equal(got, tk.attention(times(q, scale), k, v, scale=1.0, **options))


DRAWS = 8
"""A gradient of one number may be right by chance: that of plain torch then allows no error."""


def with_gradients(attend: Callable[..., Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the results for each draw of the inputs."""
    draws = [_with_gradients(attend, dtype, seed) for seed in range(DRAWS)]
    return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}


def _with_gradients(attend: Callable[..., Any], dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    leaves = [x.to(dtype).requires_grad_() for x in (*small(), torch.tensor([SCALE]))]
    q, k, v, scale = leaves
    o, lse = attend(q, k, v, scale)
    do, dlse = torch.randn(o.shape).to(dtype), torch.randn(lse.shape).to(lse.dtype)
    gradients = torch.autograd.grad((o, lse), leaves, (do, dlse))
    return dict(zip(("o", "lse", "dq", "dk", "dv", "dscale"), (o, lse, *gradients), strict=True))


@pytest.mark.quick
def test_gradients_of_a_scale(backend: str) -> None:
    def ours(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Any:
        return tk.attention(q, k, v, scale=scale, return_lse=True, backend=backend)

    def plain(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Any:
        return plain_attention(q * scale, k, v, scale=1.0)

    exact, plain_results = (with_gradients(plain, x) for x in (torch.float64, torch.float32))
    for name, got in with_gradients(ours, torch.float32).items():
        assert_within_rule(name, got, exact[name], plain_results[name])


def test_derivatives_of_a_scale() -> None:
    q, k, v = (x[:1, :1].double() for x in small())

    def attend(q: Tensor, scale: Tensor) -> Tensor:
        return tk.attention(q, k, v, scale=scale)

    leaves = (q[:, :, :3].requires_grad_(), torch.tensor(SCALE).double().requires_grad_())
    assert torch.autograd.gradcheck(attend, leaves)
    assert torch.autograd.gradgradcheck(attend, leaves)


def test_scale_of_packed_sequences() -> None:
    q, k, v = (torch.randn(11, 2, D) for _ in range(3))
    lengths = torch.tensor([0, 4, 11])
    scale = torch.tensor(SCALE, requires_grad=True)
    o = tk.attention_varlen(q, k, v, lengths, scale=scale)
    assert torch.equal(o, tk.attention_varlen(times(q, scale), k, v, lengths, scale=1.0))
    assert torch.autograd.grad(o.sum(), scale)[0].isfinite()


def test_scale_of_caches() -> None:
    q, k, v = small()
    lengths, scale = torch.tensor([N, 9]), torch.tensor(SCALE, requires_grad=True)
    with torch.no_grad():
        o = tk.attention_decode(q, k, v, lengths, scale=scale)
        assert torch.equal(o, tk.attention_decode(times(q, scale), k, v, lengths, scale=1.0))
    for call in (tk.attention_decode, tk.explain):
        operator: Any = {} if call is tk.attention_decode else {"operator": tk.attention_decode}
        with pytest.raises(ValueError, match="scale must not require grad, because attention_dec"):
            call(q, k, v, lengths, scale=scale, **operator)
    o = tk.attention_decode(q, k, v, lengths, scale=scale, backend="reference")
    assert torch.autograd.grad(o.sum(), scale)[0].isfinite()


def test_autocast_rounds_a_scaled_query_once() -> None:
    q, k, v = small()
    scale = torch.tensor(SCALE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = tk.attention(q, k, v, scale=scale)
    q = (q * SCALE).bfloat16()
    assert torch.equal(got, tk.attention(q, k.bfloat16(), v.bfloat16(), scale=1.0))


def test_compiled_code_with_a_scale() -> None:
    q, k, v = small()
    scale = torch.tensor(SCALE, requires_grad=True)
    compiled = torch.compile(tk.attention, backend="aot_eager", fullgraph=True)
    for attend in (compiled, tk.attention):
        o = attend(q, k, v, scale=scale)
        (got,) = torch.autograd.grad(o.sum(), scale)
        assert torch.equal(o, tk.attention(times(q, scale), k, v, scale=1.0))
        assert got.shape == ()


def test_explain_with_a_scale() -> None:
    q, k, v = small()
    learned = tk.explain(q, k, v, scale=torch.tensor(SCALE))
    assert learned.kernel == tk.explain(q, k, v).kernel
    assert "scale" in learned.general_path
