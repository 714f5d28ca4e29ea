"""The backends and tables that the shared tests run, and the oracles of their results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.support.attention import AttentionCase
from tests.support.backends import ISAS, NAMES, NOT_EMULATED, forced_isa
from tests.support.case import AnyCase, named
from tests.support.cases import CASES, Case
from tests.support.decode_cases import DECODE_CASES
from tests.support.linear import LINEAR_CASES
from tests.support.masks import CAUSAL
from tests.support.oracle import Part, gradient_terms, plain_attention
from tests.support.tiers import each
from tests.support.varlen_cases import VARLEN_CASES

META = torch.device("meta")
"""A device that is always available."""
TABLES: tuple[Sequence[AnyCase], ...] = (CASES, VARLEN_CASES, DECODE_CASES, LINEAR_CASES)


def test_every_backend_that_runs_on_cpu_tensors_is_tested() -> None:
    expected = {"cpu", "reference"}
    if NOT_EMULATED is None:
        expected |= {"cuda"}
    if not torch.cuda.is_available():
        expected |= {"triton"}
    assert set(NAMES) == expected


@pytest.mark.parametrize("cases", TABLES, ids=lambda cases: type(cases[0]).__name__)
def test_names_are_unique(cases: Sequence[AnyCase]) -> None:
    assert len({case.name for case in cases}) == len(cases)


@each("case", [*CASES, *VARLEN_CASES, *DECODE_CASES], ids=str)
def test_inputs_have_the_same_layout_on_every_device(case: AttentionCase) -> None:
    on_cpu, on_meta = (vars(case.inputs(torch.bfloat16, device)) for device in ("cpu", META))
    for name, x in on_cpu.items():
        y = on_meta[name]
        if x is None:
            assert y is None
            continue
        assert y.device == META
        assert (y.shape, y.dtype, y.requires_grad) == (x.shape, x.dtype, x.requires_grad)
        assert (y.stride(), y.storage_offset()) == (x.stride(), x.storage_offset())


@each("case", [case for case in CASES if case.mask is not None], ids=str)
def test_masks_are_on_the_device_and_show_what_is_defined(case: Case) -> None:
    mask, there = case.make_mask(), case.make_mask(META)
    assert mask is not None
    assert there is not None
    assert {x.device for _, x in there.tensors()} <= {META}
    assert torch.equal(mask.materialize(*case.sizes), case.visible())


def test_plain_attention_equals_explicit_loops() -> None:
    """Over rows and keys, in float64."""
    M, N, D, D_v = 3, 4, 2, 3
    q, k, v = (torch.randn(1, 1, n, d, dtype=torch.float64) for n, d in ((M, D), (N, D), (N, D_v)))
    bias = torch.randn(M, N, dtype=torch.float64)
    visible, keep_mask = torch.rand(1, 1, M, N) < 0.7, torch.rand(1, 1, M, N) < 0.5
    visible[..., 1, :], visible[..., 0, 0] = False, True
    sinks = torch.tensor([0.4], dtype=torch.float64)
    for sink in (None, 0.4):
        o, lse = plain_attention(
            q, k, v,
            visible=visible, bias=bias, scale=0.7, softcap=1.3, keep_mask=keep_mask, dropout_p=0.5,
            sinks=None if sink is None else sinks,
        )  # fmt: skip
        for i in range(M):
            s = [
                1.3 * math.tanh(0.7 * float(q[0, 0, i] @ k[0, 0, j]) / 1.3) + float(bias[i, j])
                for j in range(N)
            ]
            visible_keys = [j for j in range(N) if visible[0, 0, i, j]]
            total = sum(math.exp(s[j]) for j in visible_keys) + (
                0.0 if sink is None else math.exp(sink)
            )
            assert float(lse[0, 0, i]) == pytest.approx(math.log(total) if total else -math.inf)
            row = torch.zeros(D_v, dtype=torch.float64)
            for j in visible_keys:
                row += math.exp(s[j]) / total * v[0, 0, j] * (2.0 if keep_mask[0, 0, i, j] else 0.0)
            torch.testing.assert_close(o[0, 0, i], row)


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
