"""Scores of any finite size: docs/attention.md, section 8."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tests.support.backends import (
    BACKENDS_AND_DTYPES,
    COMPILED_AND_DTYPES,
    DECODERS_AND_DTYPES,
    NAMES,
)
from tests.support.finite_masks import (
    CASES,
    SCALE,
    assert_exact,
    by_formula,
    draw,
    make_call,
    with_shared_product,
)
from tests.support.tiers import crossed
from transformer_kernels import (
    Mask,
    alibi,
    attention,
    attention_decode,
    attention_varlen,
    relative_bias,
    relative_keys,
)
from transformer_kernels.bench.tolerance import assert_same_function, assert_within_rule

DEVIATIONS = (1.0, 1e2, 1e3, 1e4, 1e6)
"""Standard deviations of the scores."""
SIZES = ((40, 70, 32), (5, 67, 16))
"""M, N, D. Five queries are few enough for the CPU's decoding kernel."""
SAME = 2.0**15
"""An element of q and k: equal products are exact in any order of summation."""
HALF = (torch.bfloat16, torch.float16)
EXPONENTIAL_ERROR = 2.6e-6
"""Relative error of the weights in half precision on AMX: docs/attention.md, section 8."""
HALF_AND_FLOAT32 = tuple(way for way in BACKENDS_AND_DTYPES if way[1] != torch.float64)
Results = dict[str, Tensor]


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(x.to(dtype) for x in self))


def normal_inputs(M: int, N: int, D: int, deviation: float, dtype: torch.dtype) -> Inputs:
    size = math.sqrt(deviation)
    q, k = torch.randn(1, 2, M, D) * size, torch.randn(1, 2, N, D) * size
    return Inputs(q, k, torch.randn(1, 2, N, D), torch.randn(1, 2, M, D)).to(dtype)


def by_backend(x: Inputs, backend: str, causal: bool = False, **options: Any) -> Results:
    """Returns o, lse, dq, dk, dv."""
    q, k, v = (t.clone().requires_grad_() for t in x[:3])
    mask = Mask.causal() if causal else None
    o, lse = attention(q, k, v, mask=mask, return_lse=True, backend=backend, **options)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), x.do.to(o.dtype))
    return {"o": o.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def by_flash(x: Inputs, causal: bool) -> Results:
    """Returns o, dq, dk, dv of torch's kernel, which computes weights from lse too."""
    q, k, v = (t.clone().requires_grad_() for t in x[:3])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        o = scaled_dot_product_attention(q, k, v, is_causal=causal)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), x.do)
    return {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}


class Bounds(NamedTuple):
    """Magnitudes that rounding errors are relative to, by name of the result, in float64."""

    terms: dict[str, float]
    """the largest sum of the magnitudes of an element's terms"""
    changes: dict[str, float]
    """the largest change from a unit error of the scores, which changes a weight by p (1 - p): 0
    if one score of each row is much larger than the others"""
    score: float
    """the largest score"""


def bounds(x: Inputs, causal: bool) -> Bounds:
    q, k, v, do = x.to(torch.float64)
    scale = 1 / math.sqrt(q.shape[-1])
    s = scale * (q @ k.mT)
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    p = s.softmax(-1)
    ds = do.abs() @ v.abs().mT + (do * (p @ v)).abs().sum(-1, keepdim=True)

    def largest(weights: Tensor) -> dict[str, float]:
        terms = {
            "o": weights @ v.abs(),
            "dv": weights.mT @ do.abs(),
            "dq": scale * (weights * ds) @ k.abs(),
            "dk": scale * (weights * ds).mT @ q.abs(),
        }
        return {name: float(value.max()) for name, value in terms.items()}

    score = float(s.masked_fill(s == -math.inf, 0).abs().max())
    return Bounds(largest(p) | {"lse": score}, largest(p * (1 - p)) | {"lse": 0.0}, score)


def assert_close(
    got: Tensor, exact: Tensor, message: str, largest: float | None = None, more: float = 0.0
) -> None:
    """Asserts an error of at most 4 ulp of `largest`, by default the largest exact value.

    `more` is a further error that is allowed.
    """
    eps = max(torch.finfo(got.dtype).eps, 8 * torch.finfo(torch.float64).eps)
    error = float((got - exact).abs().max())
    largest = float(exact.abs().max()) if largest is None else largest
    assert error <= 4 * eps * largest + more, f"{message} error {error:.3g} of {largest:.3g}"


@pytest.mark.parametrize(("causal", "backend", "dtype"), crossed([False, True], HALF_AND_FLOAT32))
def test_errors_are_those_of_flash_attention(
    causal: bool, backend: str, dtype: torch.dtype
) -> None:
    """Errors are at most twice those of torch's flash attention, plus rounding."""
    float32_eps = torch.finfo(torch.float32).eps
    for size, deviation in itertools.product(SIZES, DEVIATIONS):
        x = normal_inputs(*size, deviation, dtype)
        exact = by_backend(x.to(torch.float64), "reference", causal)
        flash = by_flash(x, causal) | {"lse": exact["lse"]}
        terms, changes, score = bounds(x, causal)
        for name, value in by_backend(x, backend, causal).items():
            error = float((value - exact[name]).abs().max())
            flash_error = float((flash[name] - exact[name]).abs().max())
            allowed = 2 * flash_error + 4 * torch.finfo(value.dtype).eps * terms[name]
            allowed += 4 * float32_eps * score * changes[name]
            if name == "lse" and dtype in HALF:
                allowed += EXPONENTIAL_ERROR
            assert error <= allowed, (
                f"{name}, M, N, D = {size}, deviation {deviation:.0e}: error {error:.3g}, that of "
                f"torch {flash_error:.3g}, allowed {allowed:.3g}"
            )


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_one_large_score_in_each_row(backend: str, dtype: torch.dtype) -> None:
    """Scores near 1e12, or 1e8 in float16: one key of each row has all the weight."""
    factor = 1e4 if dtype == torch.float16 else 1e6
    for size in SIZES:
        x = normal_inputs(*size, 1.0, dtype)
        x = x._replace(q=x.q * factor, k=x.k * factor)
        exact = by_backend(x.to(torch.float64), "reference")
        got = by_backend(x, backend)
        for name in ("o", "lse", "dv"):
            assert_close(got[name], exact[name], f"{name}, M, N, D = {size}:")


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_scores_that_grow_from_key_to_key(backend: str, dtype: torch.dtype) -> None:
    """Row maxima rise over several key blocks, up to 2^30 or slowly near 2^27, where units of
    exponents change; or from as far below 0."""
    for M, N, (lowest, highest) in ((40, 400, (-14, 15)), (40, 391, (9, 12.5)), (5, 391, (9, 12))):
        x = normal_inputs(M, N, 16, 1.0, dtype)
        growing = 2.0 ** torch.linspace(lowest, highest, N)
        for sign, sizes in ((1.0, growing), (-1.0, growing.flip(0))):
            x.q.zero_()[..., 0] = sign * 2.0**15
            x.k.zero_()[..., 0] = sizes
            exact = by_backend(x.to(torch.float64), "reference", scale=1.9)
            got = by_backend(x, backend, scale=1.9)
            for name in ("o", "lse", "dv"):
                assert_close(got[name], exact[name], f"{name}, {M} queries, {sign} to {highest}:")


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_equal_large_scores(backend: str, dtype: torch.dtype) -> None:
    """The output is the mean of the values, and gradients are finite."""
    for M, N, D in SIZES:
        x = normal_inputs(M, N, D, 1.0, dtype)
        x = x._replace(q=torch.full_like(x.q, SAME), k=torch.full_like(x.k, SAME))
        got = by_backend(x, backend)
        exact = x.v.double().mean(dim=2, keepdim=True).expand(got["o"].shape)
        assert_close(got["o"], exact, f"M, N, D = {M, N, D}:", float(x.v.abs().max()))
        if dtype != torch.float16:  # dq and dk exceed its range
            assert all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize(
    ("scale", "backend", "dtype"),
    crossed([1e20, 1e10, 1e-30, 1e-40, 1e-320], BACKENDS_AND_DTYPES),
)
def test_large_and_small_scales(scale: float, backend: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        x = normal_inputs(*size, 1.0, dtype)
        exact = by_backend(x.to(torch.float64), "reference", causal=True, scale=scale)
        got = by_backend(x, backend, causal=True, scale=scale)
        assert_close(got["o"], exact["o"], f"o, M, N, D = {size}:")
        more = EXPONENTIAL_ERROR if dtype in HALF else 0.0
        assert_close(got["lse"], exact["lse"], f"lse, M, N, D = {size}:", more=more)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_a_large_softcap_changes_nothing(backend: str, dtype: torch.dtype) -> None:
    x = normal_inputs(*SIZES[0], 100.0, dtype)
    without = by_backend(x, backend)
    for softcap in (1e30, 1e40, 1e300):
        for name, value in by_backend(x, backend, softcap=softcap).items():
            assert torch.equal(value, without[name]), f"{name}, softcap={softcap}"


@pytest.mark.parametrize(("backend", "dtype"), DECODERS_AND_DTYPES)
def test_decoding_large_scores(backend: str, dtype: torch.dtype) -> None:
    """Cache lengths with one split of the keys, and with several."""
    for length in (67, 1300):
        x = normal_inputs(1, length, 32, 1.0, dtype)
        seqlens = torch.tensor([length], dtype=torch.int32)
        for factor, scale in ((3e2, None), (1.0, 1e10), (SAME, None)):
            same = torch.full_like(x.k, SAME)
            q, k = (same[:, :, :1], same) if factor == SAME else (x.q * factor, x.k * factor)
            got = attention_decode(q, k, x.v, seqlens, scale=scale, backend=backend)
            wide = (t.double() for t in (q, k, x.v))
            exact = attention(*wide, scale=scale, backend="reference")
            message = f"length {length}, factor {factor}, scale {scale}:"
            assert_close(got, exact, message, float(x.v.abs().max()))


@pytest.mark.parametrize("kind", ["dense", "relative", "keys"])
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS_AND_DTYPES)
def test_a_large_bias_of_all_keys_changes_nothing(
    kind: str, backend: str, dtype: torch.dtype
) -> None:
    """It cancels in the softmax. Tiles are padded: exp(200) of a row past M would be infinite."""
    x = normal_inputs(67, 131, 16, 1.0, dtype)
    large = torch.tensor([[200.0]]).to(torch.float64 if dtype == torch.float64 else torch.float32)
    bias: dict[str, Any] = {"bias": large}
    if kind == "relative":
        bias = {"relative": relative_bias(large, lowest=0)}
    shift = torch.full_like(x.q[..., 0], 200.0).to(large.dtype)
    if kind == "keys":
        keys = torch.full((1, 1, 16), 64.0, dtype=dtype)
        bias = {"relative": relative_keys(keys, lowest=0)}
        shift = 16.0 * x.q.to(large.dtype).sum(3)
    got, expected = by_backend(x, backend, **bias), by_backend(x, backend)
    expected["lse"] += shift
    if kind == "keys":
        del expected["dq"]  # the sum of ds times 64 cancels only up to the rounding of ds
    lse = float(expected["lse"].abs().max())
    assert_same_function({name: got[name] for name in expected}, expected, lse=lse)


# Rows hidden by a large negative bias, such as the masks of many models: the weights that the
# backward pass recomputes are those of the forward pass.


FUSED = tuple(name for name in NAMES if name != "reference")
WAYS = tuple(way for way in BACKENDS_AND_DTYPES if way[0] in FUSED)


@pytest.mark.parametrize(("case", "backend", "dtype"), crossed(CASES, WAYS))
def test_rows_hidden_by_a_bias(case: str, backend: str, dtype: torch.dtype) -> None:
    assert_exact(make_call(case, dtype), backend)


@pytest.mark.parametrize(("backend", "dtype"), COMPILED_AND_DTYPES)
def test_few_queries_hidden_by_a_product(backend: str, dtype: torch.dtype) -> None:
    """Decoding kernels compute the forward pass."""
    assert_exact(with_shared_product(draw({}, dtype, 3, 1030)), backend)


@pytest.mark.parametrize("backend", FUSED)
def test_packed_sequences_with_far_keys(backend: str) -> None:
    """ALiBi makes all scores large if a window hides the nearest 1100 keys."""
    slopes = torch.tensor([1.0, 0.5])
    options: dict[str, Any] = {
        "bias": alibi(slopes, align="bottom_right"),
        "mask": Mask.window(None, -1100, align="bottom_right"),
    }
    calls = [draw(options, torch.float32, M, N) for M, N in ((5, 1203), (3, 1150))]

    def packed(name: str) -> Tensor:
        return torch.cat([getattr(call, name) for call in calls], dim=2)[0].transpose(0, 1)

    q, k, v, do = (
        packed(name).clone().requires_grad_(name != "do") for name in ("q", "k", "v", "do")
    )
    o = attention_varlen(
        q, k, v, torch.tensor([0, 5, 8]), torch.tensor([0, 1203, 2353]),
        **options, scale=SCALE, backend=backend,
    )  # fmt: skip
    got = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), do), strict=True))
    calls = [call._replace(dlse=torch.zeros_like(call.dlse)) for call in calls]
    exact, plain = (
        [by_formula(call, dtype) for call in calls] for dtype in (torch.float64, torch.float32)
    )
    for name, gradient in got.items():
        whole = (torch.cat([one[name] for one in each], dim=2)[0] for each in (exact, plain))
        assert_within_rule(name, gradient.transpose(0, 1), *whole)


@pytest.mark.parametrize("backend", NAMES)
def test_derivatives_of_lse(backend: str) -> None:
    """First and second order, and forward mode. In float32 the hidden scores are all equal."""
    N, D = 67, 4
    q, k = torch.randn(1, 1, 1, D, requires_grad=True), torch.randn(1, 1, N, D, requires_grad=True)
    bias = torch.full((1, N), -1e9)
    share = 1 / (N * D**0.5)

    def lse(k: Tensor) -> Tensor:
        return attention(q, k, k, bias=bias, return_lse=True, backend=backend)[1].sum()

    (dk,) = torch.autograd.grad(lse(k), k, create_graph=True)
    assert_same_function(dk.detach(), (share * q.detach()).expand_as(k).contiguous())
    (dq,) = torch.autograd.grad(dk.sum(), q)
    assert_same_function(dq, torch.full_like(q, share * N))
    tangent = torch.func.jvp(lse, (k.detach(),), (torch.ones_like(k),))[1]
    assert_same_function(tangent.detach(), share * N * q.detach().sum())
