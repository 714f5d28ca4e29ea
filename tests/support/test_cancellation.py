"""`gradient_terms` against closed forms, and results that pass without the error of plain torch."""

from __future__ import annotations

import pytest
import torch

from tests.support.cancellation import gradient_terms
from tests.support.cases import Case, inputs
from tests.support.evaluate import Outputs, by_backend, expected
from tests.support.isas import ISAS, forced_isa
from tests.support.varlen_cases import VARLEN_CASES, varlen_by_backend, varlen_inputs
from tests.support.varlen_cases import expected as varlen_expected
from transformer_kernels.masks.mask import Mask

STEEP = Case(name="decode-steep", H_q=4, H_kv=2, M=2, N=1201, scale=1.0)


def test_terms_of_a_single_key_match_the_closed_form() -> None:
    """With p = 1, a term of dk is scale * (|do| |v| + |do o| + |dlse|) |q|."""
    q, v, do, dlse = torch.randn(1, 2, 5, 4), torch.randn(1, 1, 1, 3), torch.randn(1, 2, 5, 3), 2.0
    k = torch.randn(1, 1, 1, 4)
    o = v.expand(1, 2, 5, 3)
    terms = gradient_terms(q, k, v, o, do, torch.full((1, 2, 5), dlse), scale=0.5)
    ds = 2 * (do.abs() * v.abs()).sum(dim=-1) + dlse
    torch.testing.assert_close(
        terms["dk"], float(0.5 * (ds[..., None] * q.abs()).sum((1, 2)).max())
    )
    torch.testing.assert_close(terms["dq"], float(0.5 * ds.max() * k.abs().max()))


def test_terms_exceed_the_gradients() -> None:
    case = Case(name="terms", H_q=4, bias="1hmn", mask=lambda _: Mask.causal(), softcap=2.0)
    exact, _, terms = expected(case, torch.float32)
    assert terms.keys() == {"dq", "dk", "dbias"}
    assert all(exact[name].abs().max() < bound < 1e4 for name, bound in terms.items())


FLOAT32_ISAS = [name for name in ISAS if name != "amx"]
"""Without AMX, which multiplies float32 as bfloat16 parts."""


@pytest.mark.parametrize("isa", FLOAT32_ISAS)
@pytest.mark.parametrize("name", ["steep", "expanded"])
def test_the_rounding_band_alone_suffices(name: str, isa: str) -> None:
    """Cases in which the error of plain torch varies between CPUs: a large lse, or identical keys,
    so that dq and dk cancel to zero. The errors must be within the band without it."""
    with forced_isa(isa):
        if name == "steep":
            got: Outputs = by_backend(STEEP, inputs(STEEP, torch.float32), "cpu")
            reference = expected(STEEP, torch.float32)
        else:
            case = next(case for case in VARLEN_CASES if case.name == name)
            got = varlen_by_backend(case, varlen_inputs(case, torch.float32, 0.0), "cpu")
            reference = varlen_expected(case, torch.float32)
    reference._replace(plain={name: x.float() for name, x in reference.exact.items()}).check(got)
