"""A scale that is a tensor: a factor of the queries, with a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import dtypes_of
from tests.support.plain import plain_attention
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_within_rule

M, N, D = 7, 13, 5
SCALE = 0.37


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, heads, n, D, dtype=dtype) for heads, n in ((4, M), (2, N), (2, N)))
    return q, k, v


def times(q: Tensor, scale: Tensor) -> Tensor:
    """The product, rounded once to q's dtype."""
    return (q.double() * scale.double()).to(q.dtype)


def test_it_multiplies_the_queries(backend: str) -> None:
    keys = tk.relative_keys(torch.randn(4, 9, D), lowest=-4)
    for dtype in dtypes_of(backend):
        q, k, v = inputs(dtype)
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
    leaves = [x.to(dtype).requires_grad_() for x in (*inputs(), torch.tensor([SCALE]))]
    q, k, v, scale = leaves
    o, lse = attend(q, k, v, scale)
    do, dlse = torch.randn(o.shape).to(dtype), torch.randn(lse.shape).to(lse.dtype)
    gradients = torch.autograd.grad((o, lse), leaves, (do, dlse))
    return dict(zip(("o", "lse", "dq", "dk", "dv", "dscale"), (o, lse, *gradients), strict=True))


@pytest.mark.quick
def test_gradients(backend: str) -> None:
    def ours(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Any:
        return tk.attention(q, k, v, scale=scale, return_lse=True, backend=backend)

    def plain(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Any:
        return plain_attention(q * scale, k, v, scale=1.0)

    exact, plain_results = (with_gradients(plain, x) for x in (torch.float64, torch.float32))
    for name, got in with_gradients(ours, torch.float32).items():
        assert_within_rule(name, got, exact[name], plain_results[name])


def test_derivatives_of_any_order() -> None:
    q, k, v = (x[:1, :1].double() for x in inputs())

    def attend(q: Tensor, scale: Tensor) -> Tensor:
        return tk.attention(q, k, v, scale=scale)

    leaves = (q[:, :, :3].requires_grad_(), torch.tensor(SCALE).double().requires_grad_())
    assert torch.autograd.gradcheck(attend, leaves)
    assert torch.autograd.gradgradcheck(attend, leaves)


def test_packed_sequences() -> None:
    q, k, v = (torch.randn(11, 2, D) for _ in range(3))
    lengths = torch.tensor([0, 4, 11])
    scale = torch.tensor(SCALE, requires_grad=True)
    o = tk.attention_varlen(q, k, v, lengths, scale=scale)
    assert torch.equal(o, tk.attention_varlen(times(q, scale), k, v, lengths, scale=1.0))
    assert torch.autograd.grad(o.sum(), scale)[0].isfinite()


def test_caches() -> None:
    q, k, v = inputs()
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


def test_autocast_rounds_once() -> None:
    q, k, v = inputs()
    scale = torch.tensor(SCALE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = tk.attention(q, k, v, scale=scale)
    q = (q * SCALE).bfloat16()
    assert torch.equal(got, tk.attention(q, k.bfloat16(), v.bfloat16(), scale=1.0))


def test_compiled_code() -> None:
    q, k, v = inputs()
    scale = torch.tensor(SCALE, requires_grad=True)
    compiled = torch.compile(tk.attention, backend="aot_eager", fullgraph=True)
    for attend in (compiled, tk.attention):
        o = attend(q, k, v, scale=scale)
        (got,) = torch.autograd.grad(o.sum(), scale)
        assert torch.equal(o, tk.attention(times(q, scale), k, v, scale=1.0))
        assert got.shape == ()


ERRORS: dict[str, tuple[Tensor, type[Exception], str]] = {
    "elements": (torch.ones(2), ValueError, r"scale must have one element, got shape \(2,\)"),
    "empty": (torch.ones(0), ValueError, r"scale must have one element, got shape \(0,\)"),
    "dtype": (torch.ones((), dtype=torch.float64), TypeError, "scale must be float32, got .*64"),
    "integers": (torch.tensor(1), TypeError, "scale must be float32, got torch.int64"),
    "device": (torch.ones((), device="meta"), ValueError, "scale is on meta, q is on cpu"),
}


@each(("scale", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_arguments(scale: Tensor, error: type[Exception], message: str) -> None:
    q, k, v = inputs()
    packed, lengths = torch.randn(5, 2, D), torch.tensor([0, 5])
    for call in (
        lambda: tk.attention(q, k, v, scale=scale),
        lambda: tk.explain(q, k, v, scale=scale),
        lambda: tk.attention_varlen(packed, packed, packed, lengths, scale=scale),
        lambda: tk.attention_decode(q, k, v, torch.tensor([N, N]), scale=scale),
    ):
        with pytest.raises(error, match=message):
            call()
    with pytest.raises(TypeError, match=r"q must be .*, got list"):
        tk.attention([1], k, v, scale=torch.ones(()))  # type: ignore[call-overload]


def test_explain_names_the_kernel_of_the_call() -> None:
    q, k, v = inputs()
    learned = tk.explain(q, k, v, scale=torch.tensor(SCALE))
    assert learned.kernel == tk.explain(q, k, v).kernel
    assert "scale" in learned.general_path
