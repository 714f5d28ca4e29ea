"""Contenders of the decoding benchmarks, tested with the CPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_cases import decode_cases
from benchmarks.runner import caches
from benchmarks.runner.caches import Caches, cache_attends, in_pages
from transformer_kernels import attention
from transformer_kernels.bench import Attend, Case, Variant, usable_variants
from transformer_kernels.bench.tolerance import assert_same_function

NAMES = ["caches: none", "caches: in order", "caches: pages of 64", "caches: pages of 16"]
CASE = replace(decode_cases()[0], B=3, H_q=4, H_kv=2, N=128, D=8, D_v=8)


def test_all_caches_give_the_same_result_from_their_own_copies() -> None:
    q, k, v, _ = replace(CASE, dtype=torch.float32).inputs()
    attends = cache_attends(k, v, "cpu")
    assert list(attends) == NAMES
    expected = attention(q, k, v)
    for attend in attends.values():
        assert_same_function(attend(q, k.fill_(0), v.fill_(0)), expected)


def test_pages_are_at_the_positions_in_the_table() -> None:
    x = torch.arange(2 * 3 * 8).reshape(2, 1, 24, 1)
    table = torch.tensor([[4, 0, 5], [1, 3, 2]])
    pages = in_pages(x, table)
    assert pages.shape == (6, 1, 8, 1)
    for b in range(2):
        together = torch.cat([pages[n, 0, :, 0] for n in table[b]])
        assert torch.equal(together, x[b, 0, :, 0])


def test_contenders_can_be_measured() -> None:
    ours = Caches(CASE).ours("mine", "cpu")
    assert [(one.case.name, one.variant) for one in ours] == [(name, "mine") for name in NAMES]
    for one in ours:
        assert 0.0 < one.error < 0.02
        o = one.prepare()()
        assert isinstance(o, Tensor)
        assert o.shape == (3, 4, 1, 8)


def test_a_copy_moves_as_many_bytes_as_keys_and_values_have() -> None:
    contenders = Caches(CASE)
    copied = contenders.copy().prepare()()
    assert isinstance(copied, Tensor)
    assert torch.equal(copied, contenders.inputs.k)
    assert 2 * copied.nbytes == sum(x.nbytes for x in contenders.inputs[1:3])


def test_peers_that_cannot_run_are_skipped() -> None:
    def refuse(_case: Case) -> Attend:
        raise ValueError("knows no groups")

    (sdpa,) = usable_variants(["sdpa"])
    contenders, skipped = Caches(CASE).peers([sdpa, Variant("none", "none", refuse)])
    assert [(one.case.name, one.variant) for one in contenders] == [("caches: none", "sdpa")]
    assert skipped == {"none": "knows no groups"}


def test_a_wrong_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_in_the_last_entry(make: Callable[..., Attend]) -> Callable[..., Attend]:
        def make_wrong(*arguments: object) -> Attend:
            attend = make(*arguments)
            return lambda *x: attend(*x) + torch.tensor([0.0, 0.0, 0.5])[:, None, None, None]

        return make_wrong

    monkeypatch.setattr(caches, "_on", wrong_in_the_last_entry(caches._on))
    with pytest.raises(AssertionError, match="mine, caches: none: o"):
        Caches(CASE).ours("mine", "cpu")
