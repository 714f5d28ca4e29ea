"""Decoding with Triton: the splits of the keys, and what o and lse do not depend on.

The table of cases of `attention_decode` has its results (tests/contract/test_decode.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.case import assert_case, named
from tests.support.decode_cases import DECODE_CASES, DecodeCase
from tests.support.operators import operator_arguments
from transformer_kernels import Mask
from transformer_kernels.backends.triton import launch, operators, target
from transformer_kernels.problem.cache import cache_problem

pytestmark = pytest.mark.exhaustive


def splits(
    *, B: int = 1, H_q: int = 8, H_kv: int = 2, M: int = 1, N: int = 1 << 16, mask: Any = None
) -> int:
    """Splits of the keys of a call on a GPU with 132 multiprocessors, 4 programs for each."""
    q = torch.empty(B, H_q, M, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(B, H_kv, N, 128, dtype=torch.bfloat16, device="meta")
    lengths = torch.empty(B, dtype=torch.int32, device="meta")
    *_, count = launch.decode_tiling(cache_problem(q, k, k, lengths, mask=mask))
    return count


def test_splits_fill_the_gpu_and_have_two_blocks() -> None:
    assert splits() == 264
    assert splits(B=64) == 5
    assert splits(B=300) == 1
    assert splits(H_q=2) == 264
    assert splits(N=1000) == 8  # blocks of 64 keys
    assert splits(N=0) == 1
    assert splits(mask=Mask.window(1000, 0, align="bottom_right")) == 8


@pytest.mark.parametrize("count", [1, 2, 30])
def test_any_number_of_splits(
    count: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Also more than there are blocks: some splits have no key."""
    before = launch.decode_tiling
    monkeypatch.setattr(launch, "decode_tiling", lambda p: (*before(p)[:3], count))
    for case in named(DECODE_CASES, "long-window-16", "int8-group-4-queries-5-48"):
        assert_case(case, torch.float32, "triton", device)


@pytest.mark.parametrize("name", ["long", "int8-long-0"])
def test_paged_and_contiguous_caches_are_bit_identical(name: str, device: torch.device) -> None:
    (case,) = named(DECODE_CASES, name)

    def run(one: DecodeCase) -> dict[str, torch.Tensor]:
        return one.run(one.inputs(torch.bfloat16, device.type), "triton")

    expected = run(case)
    for size in (1, 20, 64, 1300):
        got = run(replace(case, page_size=size))
        assert all(torch.equal(got[x], expected[x]) for x in ("o", "lse")), size


def test_there_is_no_backward_pass(device: torch.device) -> None:
    x = torch.randn(1, 2, 1, 16, device=device)
    lengths = torch.ones(1, dtype=torch.int32, device=device)
    arguments = operator_arguments(x, x, x, cache_seqlens=lengths)
    o, row_stats, block_mask = operators.forward(**arguments)
    q, k, v, *options = arguments.values()
    saved = (q, k, v, o, row_stats, block_mask)
    with pytest.raises(ValueError, match="no backward pass"):
        operators.backward(o, None, *saved, *options, False, False, False, False)


def test_a_gpu_without_properties_counts_as_an_h200() -> None:
    assert target.multiprocessors(torch.device("meta")) == 132
