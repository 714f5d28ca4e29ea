"""Evaluation of a case by a backend, by plain torch and in float64, and their comparison."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
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
from transformer_kernels.scores.relative import Relative, RelativeBias, RelativeKeys

SEED = -1234567890123456789
"""Dropout seed of every case; it uses both words of the Philox key."""

Outputs = dict[str, Tensor]
"""o, lse and the gradients of the case by name: those of `Inputs.differentiable`."""


def by_backend(case: Case, x: Inputs, backend: str) -> Outputs:
    """Returns the outputs and gradients of `attention`."""
    o, lse = attention(
        x.q,
        x.k,
        x.v,
        mask=case.make_mask(x.q.device),
        **biases(case, x),
        scale=case.scale,
        softcap=case.softcap,
        dropout_p=case.dropout_p,
        seed=SEED,
        sinks=x.sinks,
        return_lse=True,
        backend=backend,
    )
    return with_gradients(x, o, lse)


def reasons_against(
    case: Case, backend: str, device: torch.device | str = "cpu"
) -> tuple[str, ...]:
    """Returns the reasons why the backend does not support the case, as `explain` gives them."""
    x = inputs(case, torch.float32, device)
    mask = case.make_mask(x.q.device)
    explanation = explain(x.q, x.k, x.v, mask=mask, **biases(case, x), backend=backend)
    return explanation.reasons[backend]


def by_plain_torch(case: Case, x: Inputs) -> Outputs:
    """Returns the outputs and gradients of `plain_attention`, in the dtype of the inputs."""
    keep_mask: Tensor | None = None
    if case.dropout_p > 0.0:
        sizes = (case.B, case.H_q, case.M, case.N)
        keep_mask = philox.keep_mask(torch.tensor(SEED), *sizes, case.dropout_p)
    o, lse = plain_attention(x.q, x.k, x.v, keep_mask=keep_mask, **_options(case, x))
    return with_gradients(x, o, lse)


def _options(case: Case, x: Inputs) -> dict[str, Any]:
    """Arguments of `plain_attention` besides q, k, v and the keep mask."""
    return {
        "visible": case.visible(),
        **biases(case, x),
        "scale": case.scale,
        "softcap": case.softcap,
        "dropout_p": case.dropout_p,
        "sinks": x.sinks,
    }


class Expected(NamedTuple):
    """Reference values of a case."""

    exact: Outputs
    """the reference backend in float64"""
    plain: Outputs
    """plain torch on the same inputs in the dtype under test; lse in the accumulation dtype"""
    terms: dict[str, float]
    """`gradient_terms` by name of the gradient"""

    def check(self, got: Outputs) -> None:
        """Raises AssertionError if an output violates the tolerance rule."""
        assert got.keys() == self.exact.keys()
        lse = self.exact["lse"]
        largest = float(lse[lse.isfinite()].abs().max()) if lse.isfinite().any() else 0.0
        for name, value in got.items():
            assert_within_rule(
                name, value.cpu(), self.exact[name], self.plain[name],
                lse=0.0 if name == "lse" else largest, terms=self.terms.get(name, 0.0),
                spread=self.terms.get(f"{name}_spread", 0.0),
                stored=self.terms.get(f"{name}_stored", 0.0),
            )  # fmt: skip


@functools.cache
def expected(case: Case, dtype: torch.dtype) -> Expected:
    """Returns the reference values of a case in this dtype."""
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
    """Asserts the tolerance rule for o, lse and gradients, with `case.hidden` in dead rows.

    The reference values are computed on the CPU, also if the backend runs on another device. A case
    that the backend does not support must be refused with its reasons.
    """
    x = plant(case, inputs(case, dtype, device))
    if reasons := reasons_against(case, backend, device):
        assert_refused(reasons, lambda: by_backend(case, x, backend))
        return
    got = by_backend(case, x, backend)
    assert all(value.device.type == torch.device(device).type for value in got.values())
    expected(case, dtype).check(got)


def assert_refused(reasons: Sequence[str], call: Callable[[], object]) -> None:
    """Asserts that the call raises ValueError with these reasons."""
    with pytest.raises(ValueError, match=re.escape("; ".join(reasons))):
        call()


def biases(case: Case, x: Inputs) -> dict[str, Any]:
    """Returns the arguments `bias` and `relative`."""
    bias: Tensor | Alibi | None = x.bias
    if case.alibi is not None and x.slopes is not None:
        bias = Alibi(x.slopes, case.alibi)
    relative: Relative | None = None
    if case.relative is not None:
        lowest, align = case.relative.lowest, case.relative.align
        if x.keys is not None:
            relative = RelativeKeys(x.keys, x.table, lowest, align)
        elif x.table is not None:
            relative = RelativeBias(x.table, lowest, align)
    return {"bias": bias, "relative": relative}


def with_gradients(x: Inputs, o: Tensor, lse: Tensor) -> Outputs:
    """Returns o, lse and the gradients for the cotangents x.do and x.dlse."""
    outputs, cotangents = [o], [x.do]
    if x.dlse is not None:
        outputs, cotangents = [o, lse], [x.do, x.dlse.to(lse.dtype)]
    named = x.differentiable()
    grads = torch.autograd.grad(outputs, list(named.values()), cotangents)
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(named, grads, strict=True))}
