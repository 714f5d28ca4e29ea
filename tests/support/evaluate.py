"""A case evaluated: by a backend, by plain torch, and exactly. Then the one comparison."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.cancellation import gradient_terms
from tests.support.cases import Case, Inputs, inputs, plant
from tests.support.plain import plain_attention
from transformer_kernels.bench.tolerance import assert_within_rule
from transformer_kernels.functional.attention import attention
from transformer_kernels.functional.explain import explain
from transformer_kernels.scores import philox
from transformer_kernels.scores.alibi import Alibi

SEED = -1234567890123456789
"""of every case's dropout; it fills both words of the key"""

Results = dict[str, Tensor]
"""o, lse, and the gradients that the case has: dq, dk, dv, dbias, dsinks."""


def by_backend(case: Case, x: Inputs, backend: str) -> Results:
    """What `attention` makes of the case's inputs."""
    o, lse = attention(
        x.q, x.k, x.v,
        mask=case.bound_mask(x.q.device),
        bias=_bias(case, x),
        scale=case.scale,
        softcap=case.softcap,
        dropout_p=case.dropout_p,
        seed=SEED,
        sinks=x.sinks,
        return_lse=True,
        backend=backend,
    )  # fmt: skip
    return with_gradients(x, o, lse)


def reasons_against(
    case: Case, backend: str, device: torch.device | str = "cpu"
) -> tuple[str, ...]:
    """Why the backend does not take the case, whatever the dtype; it raises them all if it must."""
    x = inputs(case, torch.float32, device)
    mask = case.bound_mask(x.q.device)
    told = explain(x.q, x.k, x.v, mask=mask, bias=_bias(case, x), backend=backend)
    return told.reasons[backend]


def by_plain_torch(case: Case, x: Inputs) -> Results:
    """The textbook's maths, every step in the inputs' own dtype."""
    kept: Tensor | None = None
    if case.dropout_p > 0.0:
        sizes = (case.B, case.H_q, case.M, case.N)
        kept = philox.keep_mask(torch.tensor(SEED), *sizes, case.dropout_p)
    o, lse = plain_attention(x.q, x.k, x.v, kept=kept, **_options(case, x))
    return with_gradients(x, o, lse)


def _options(case: Case, x: Inputs) -> dict[str, Any]:
    """Arguments of `plain_attention` beyond q, k, v and the weights that dropout keeps."""
    return {
        "shown": case.shown(),
        "bias": _bias(case, x),
        "scale": case.scale,
        "softcap": case.softcap,
        "dropout_p": case.dropout_p,
        "sinks": x.sinks,
    }


class Expected(NamedTuple):
    """Reference values of a case."""

    exact: Results
    """The reference in float64"""
    plain: Results
    """Plain torch in the dtype under test, on the same numbers; lse in the accumulation dtype,
    where the contract has it"""
    terms: dict[str, float]
    """`gradient_terms`, by the names of the gradients"""

    def check(self, got: Results) -> None:
        """AssertionError where a result is not within the rule."""
        assert got.keys() == self.exact.keys()
        lse = self.exact["lse"]
        largest = float(lse[lse.isfinite()].abs().max()) if lse.isfinite().any() else 0.0
        for name, value in got.items():
            assert_within_rule(
                name, value.cpu(), self.exact[name], self.plain[name],
                lse=0.0 if name == "lse" else largest, terms=self.terms.get(name, 0.0),
            )  # fmt: skip


@functools.cache
def expected(case: Case, dtype: torch.dtype) -> Expected:
    """Reference values for the results of a backend, in this dtype."""
    clean = inputs(case, dtype)
    exact = by_backend(case, clean.to(torch.float64), "reference")
    plain = by_plain_torch(case, clean)
    if dtype in (torch.float16, torch.bfloat16):
        plain["lse"] = by_plain_torch(case, clean.to(torch.float32))["lse"]
    terms = gradient_terms(
        clean.q, clean.k, clean.v, exact["o"], clean.do, clean.dlse, **_options(case, clean)
    )
    return Expected(exact, plain, terms)


def assert_case(
    case: Case, dtype: torch.dtype, backend: str, device: torch.device | str = "cpu"
) -> None:
    """The backend's o, lse and gradients are within the rule, hidden NaN or not.

    What they are held against is computed on the CPU, whatever `device` the backend runs on.
    """
    got = by_backend(case, plant(case, inputs(case, dtype, device)), backend)
    assert all(value.device.type == torch.device(device).type for value in got.values())
    expected(case, dtype).check(got)


def _bias(case: Case, x: Inputs) -> Tensor | Alibi | None:
    if case.alibi is not None and x.slopes is not None:
        return Alibi(x.slopes, case.alibi)
    return x.bias


def with_gradients(x: Inputs, o: Tensor, lse: Tensor) -> Results:
    """What the cotangents of x, do and dlse, make of o and lse."""
    outputs, cotangents = [o], [x.do]
    if x.dlse is not None:
        outputs, cotangents = [o, lse], [x.do, x.dlse.to(lse.dtype)]
    named = x.differentiable()
    grads = torch.autograd.grad(outputs, list(named.values()), cotangents)
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(named, grads, strict=True))}
