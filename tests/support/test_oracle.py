"""`gradient_terms` and `allowed_errors`, and results that pass without the error of plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.attention import AttentionCase
from tests.support.case import named
from tests.support.cases import Case
from tests.support.isas import ISAS, forced_isa
from tests.support.masks import CAUSAL
from tests.support.oracle import Part, gradient_terms
from tests.support.varlen_cases import VARLEN_CASES

STEEP = Case(name="decode-steep", H_q=4, H_kv=2, M=2, N=1201, scale=1.0)


def test_terms_of_a_single_key_match_the_closed_form() -> None:
    """With p = 1, a term of dk is scale * (|do| |v| + |do o| + |dlse|) |q|."""
    q, v, do, dlse = torch.randn(1, 2, 5, 4), torch.randn(1, 1, 1, 3), torch.randn(1, 2, 5, 3), 2.0
    k = torch.randn(1, 1, 1, 4)
    part = Part(q=q, k=k, v=v, do=do, dlse=torch.full((1, 2, 5), dlse), scale=0.5)
    terms = gradient_terms([part])
    ds = 2 * (do.abs() * v.abs()).sum(dim=-1) + dlse
    torch.testing.assert_close(
        terms["dk"], float(0.5 * (ds[..., None] * q.abs()).sum((1, 2)).max())
    )
    torch.testing.assert_close(terms["dq"], float(0.5 * ds.max() * k.abs().max()))


def test_terms_exceed_the_gradients() -> None:
    case = Case(name="terms", H_q=4, bias="1hmn", mask=CAUSAL, softcap=2.0)
    expected = case.expected(torch.float32)
    exact, terms = expected.exact, expected.terms
    assert terms.keys() == {"dq", "dk", "dbias"}
    assert all(exact[name].abs().max() < bound < 1e4 for name, bound in terms.items())


FLOAT32_ISAS = [name for name in ISAS if name != "amx"]
"""Without AMX, which multiplies float32 as bfloat16 parts."""


@pytest.mark.parametrize("isa", FLOAT32_ISAS)
@pytest.mark.parametrize("case", [STEEP, *named(VARLEN_CASES, "expanded")], ids=str)
def test_the_rounding_band_alone_suffices(case: AttentionCase, isa: str) -> None:
    """Cases in which the error of plain torch varies between CPUs: a large lse, or identical keys,
    so that dq and dk cancel to zero. The errors must be within the band without it."""
    with forced_isa(isa):
        got = case.run(replace(case, hidden=None).inputs(torch.float32), "cpu")
    reference = case.expected(torch.float32)
    reference._replace(plain={name: x.float() for name, x in reference.exact.items()}).check(got)
