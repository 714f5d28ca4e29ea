"""Contenders of linear attention, tested with the CPU kernels."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.cases.gpu import linear_cases
from benchmarks.runner import gpu_linear
from benchmarks.runner.gpu_linear import LinearContenders, fla, ours
from transformer_kernels.bench import Case, Direction

SMALL = [replace(case, B=1, H_q=2, H_kv=2, M=130, N=130, D=8, D_v=8) for case in linear_cases()[:2]]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_contenders_can_be_measured(case: Case, direction: Direction) -> None:
    found = LinearContenders(case)
    found.add("mine", lambda: ours(case, "cpu"))
    contenders = found.contenders(direction)
    assert [one.variant for one in contenders] == ["mine", "sdpa"]
    assert 0 < contenders[0].error < 0.03
    for one in contenders:
        one.prepare()()
    assert contenders[1].case.mask_name == "causal"


def test_both_kinds_compute_different_results() -> None:
    q, k, v, _ = SMALL[0].inputs()
    normalized, sums = (ours(case, "cpu")(q, k, v) for case in SMALL)
    assert not torch.allclose(normalized, sums)


def test_wrong_and_missing_variants_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    found = LinearContenders(SMALL[0])
    found.add("wrong", lambda: lambda q, k, v: v + 0 * (q + k))
    monkeypatch.setitem(sys.modules, "fla.ops.linear_attn", None)
    found.add("fla", lambda: fla(SMALL[0]))
    assert "of the largest value" in found.skipped["wrong"]
    assert "fla" in found.skipped["fla"]
    assert [one.variant for one in found.contenders("fwd")] == ["sdpa"]


def test_cases_are_distinct_and_count_the_operations_of_the_recurrence() -> None:
    cases = linear_cases()
    assert len({(case.name, case.N, case.D) for case in cases}) == len(cases)
    case = cases[0]
    assert case.operations("fwd") == 4 * case.B * case.H_q * case.N * case.D * case.D_v
    assert case.operations("fwd+bwd") == case.operations("fwd") + case.operations("bwd")
    assert min(case.N for case in cases) >= gpu_linear.CHECKED_TOKENS
