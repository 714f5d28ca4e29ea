"""Comparisons of the suite `gpu` that are not its grid, on a CPU."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu_cases import linear_cases, packed_case
from benchmarks.runner.packed import PackedContenders, by
from benchmarks.suites import linear
from benchmarks.suites.gpu import in_order
from transformer_kernels import attention as fused
from transformer_kernels.bench.contenders import Contender


@pytest.mark.parametrize("sums", [False, True])
def test_linear_attention(sums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(linear_cases()[sums], B=1, H_q=2, H_kv=2, M=130, N=130, D=8, D_v=8)
    assert case.operations("fwd") == 4 * 2 * 130 * 8 * 8
    monkeypatch.setitem(sys.modules, "fla.ops.linear_attn.naive", None)
    wrong = fused
    monkeypatch.setattr(linear, "ours", lambda case, backend, ours=linear.ours: (
        wrong if backend == "wrong" else ours(case, backend)))  # fmt: skip
    found = linear.LinearContenders(case, {"mine": "cpu", "wrong": "wrong"})
    assert list(found.skipped) == ["wrong", "fla"]
    assert "of the largest value" in found.skipped["wrong"]
    mine, sdpa = found.contenders("bwd")
    assert (mine.variant, sdpa.variant, sdpa.case.mask_name) == ("mine", "sdpa", "causal")
    assert 0 < mine.error < 0.03
    for one in (mine, sdpa):
        one.prepare()()


def test_packed_documents() -> None:
    case = packed_case(tokens=2000)
    assert sum(case.lengths) == case.N == 2000
    assert case.cu_seqlens()[-1] == 2000
    assert case.operations("fwd") == 4 * 16 * 128 * sum(n * (n + 1) / 2 for n in case.lengths)
    small = replace(case, lengths=(9, 30, 1, 12), M=52, N=52, H_q=2, H_kv=2, D=8, D_v=8)
    found = PackedContenders(small, {"mine": by("cpu"), "wrong": lambda _: fused})
    assert list(found.skipped) == ["wrong", "torch varlen"]
    assert "of the largest value" in found.skipped["wrong"]
    (mine,) = found.contenders("bwd")
    assert 0 < mine.error < 0.03
    mine.prepare()()


def test_deterministic_mode_of_a_contender() -> None:
    case = linear_cases()[0]
    seen = []
    mode = torch.are_deterministic_algorithms_enabled
    plain = Contender(case, "bwd", "mine", lambda: lambda: seen.append(mode()), 0.0)
    ordered = in_order(plain)
    ordered.prepare()()
    assert (ordered.variant, seen, mode()) == ("mine, deterministic", [True], False)
