"""Decoding with Triton: the splits of the keys, and what o and lse do not depend on.

The table of cases of `attention_decode` has its results (tests/contract/test_decode.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import transformer_kernels as tk
from tests.support.case import assert_case, named
from tests.support.decode_cases import DECODE_CASES, DecodeCase
from tests.support.operators import operator_arguments
from transformer_kernels.backends.triton import launch, operators, target
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.dispatch import autograd
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
    assert splits(mask=tk.Mask.window(1000, 0, align="bottom_right")) == 8


@pytest.mark.parametrize("count", [1, 2, 30])
def test_any_number_of_splits(
    count: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Also more than there are blocks: some splits have no key. The combine kernel loads a few."""
    before = launch.decode_tiling
    monkeypatch.setattr(launch, "decode_tiling", lambda p: (*before(p)[:3], count))
    monkeypatch.setattr(launch, "COMBINED_ELEMENTS", 128)
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


def test_other_lengths_change_no_bit(device: torch.device) -> None:
    q, k, v = (torch.randn(3, H, n, 16, device=device) for H, n in ((4, 2), (2, 500), (2, 500)))
    first, second = (
        tk.attention_decode(q, k, v, torch.tensor(x, device=device), backend="triton")
        for x in ([500, 77, 1], [0, 77, 400])
    )
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[2], second[2])


@pytest.mark.parametrize("size", [1.0, 5e-5])
def test_weights_of_int8_values_in_float16(size: float, device: torch.device) -> None:
    """Weights times their scales are as exact as weights in float16, also below its range."""
    q, k = torch.randn(1, 1, 64, 16), torch.randn(1, 1, 3, 16)
    cache = tk.quantize_cache(k, (1 + torch.rand(1, 1, 3, 16)) * size)
    given = q.half(), cache.k, cache.v, torch.tensor([3], dtype=torch.int32)
    scales: Any = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    there: Any = [x.to(device) for x in given]
    moved: Any = {name: x.to(device) for name, x in scales.items()} | {"mask": tk.Mask()}
    got = tk.attention_decode(*there, **moved, backend="triton").cpu()
    rows = [x.double() * scale[..., None] for x, scale in zip(cache[:2], cache[2:], strict=True)]
    p = torch.softmax(q.half().double() @ rows[0].mT / 4, -1)
    exact, plain = p @ rows[1], p.half() @ rows[1].half()
    assert (got - exact).abs().max() <= 2 * (plain - exact).abs().max()


@pytest.mark.parametrize("page_size", [1, 7, 16, 70])
def test_packed_queries_read_pages_in_place(
    page_size: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Unlike calls with gradients."""
    q, (k, v) = torch.randn(9, 4, 16), torch.randn(2, 90, 2, page_size, 16)
    table = torch.randint(90, (3, -(-70 // page_size)))
    starts = torch.tensor([0, 4, 4, 9]), torch.tensor([0, 70, 80, 113])
    options: Any = {"block_table": table, "mask": tk.Mask.window(50, 0, align="bottom_right")}
    wanted = tk.attention_varlen(q, k, v, *starts, **options, backend="reference")
    monkeypatch.setattr(autograd, "without_pages", None)
    there: Any = [x.to(device) for x in (q, k, v, *starts)]
    options["block_table"] = table.to(device)
    got = tk.attention_varlen(*there, **options, max_seqlen_q=9, max_seqlen_k=70, backend="triton")
    assert_same_function(got.cpu(), wanted)
    with pytest.raises(TypeError):
        tk.attention_varlen(there[0].requires_grad_(), *there[1:], **options, backend="triton")


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
