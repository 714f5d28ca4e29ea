"""Decoding as the suites measure it, by the CPU's kernels: nothing in it asks for a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.cases.gpu import decode_cases
from benchmarks.runner import caches
from benchmarks.runner.caches import CacheContenders, cache_attends, in_pages
from transformer_kernels import attention
from transformer_kernels.bench import Attend, Case, Variant, usable_variants

NAMES = ["caches: none", "caches: in order", "caches: pages of 64", "caches: pages of 16"]
CASE = replace(decode_cases()[0], B=3, H_q=4, H_kv=2, N=128, D=8, D_v=8)


def test_every_way_gives_the_same_without_the_tensors_it_is_given() -> None:
    q, k, v, _ = replace(CASE, dtype=torch.float32).inputs()
    attends = cache_attends(k, v, "cpu")
    assert list(attends) == NAMES
    expected = attention(q, k, v)
    for attend in attends.values():
        torch.testing.assert_close(attend(q, k.fill_(0), v.fill_(0)), expected)


def test_pages_are_where_the_table_says() -> None:
    x = torch.arange(2 * 3 * 8).reshape(2, 1, 24, 1)
    table = torch.tensor([[4, 0, 5], [1, 3, 2]])
    pages = in_pages(x, table)
    assert pages.shape == (6, 1, 8, 1)
    for b in range(2):
        together = torch.cat([pages[n, 0, :, 0] for n in table[b]])
        assert torch.equal(together, x[b, 0, :, 0])


def test_contenders_are_ready_to_be_measured() -> None:
    every = CacheContenders(CASE)
    ours = every.ours("mine", "cpu")
    assert [(one.case.name, one.variant) for one in ours] == [(name, "mine") for name in NAMES]
    for one in ours:
        assert 0.0 < one.error < 0.02
        o = one.prepare()()
        assert isinstance(o, Tensor)
        assert o.shape == (3, 4, 1, 8)


def test_a_copy_moves_the_bytes_of_keys_and_values() -> None:
    every = CacheContenders(CASE)
    copied = every.copy().prepare()()
    assert isinstance(copied, Tensor)
    assert torch.equal(copied, every.inputs.k)
    assert 2 * copied.nbytes == sum(x.nbytes for x in every.inputs[1:3])


def test_peers_that_cannot_are_left_out() -> None:
    def refuse(_case: Case) -> Attend:
        raise ValueError("knows no groups")

    (sdpa,) = usable_variants(["sdpa"])
    contenders, left_out = CacheContenders(CASE).peers([sdpa, Variant("none", "none", refuse)])
    assert [(one.case.name, one.variant) for one in contenders] == [("caches: none", "sdpa")]
    assert left_out == {"none": "knows no groups"}


def test_one_that_errs_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_in_the_last_entry(make: Callable[..., Attend]) -> Callable[..., Attend]:
        def made(*arguments: object) -> Attend:
            attend = make(*arguments)
            return lambda *x: attend(*x) + torch.tensor([0.0, 0.0, 0.5])[:, None, None, None]

        return made

    monkeypatch.setattr(caches, "_cached", off_in_the_last_entry(caches._cached))
    with pytest.raises(AssertionError, match="mine, caches: in order: o"):
        CacheContenders(CASE).ours("mine", "cpu")
