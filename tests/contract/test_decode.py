"""The contract of `attention_decode`, for paged and contiguous caches, and of `append_to_cache`."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad, gradcheck

import transformer_kernels as tk
from tests.support.backends import DECODERS, DTYPES, ISAS, NAMES, OTHER_WAYS, TRITON_WAYS
from tests.support.case import assert_case, named
from tests.support.decode_cases import DECODE_CASES, DecodeCase
from tests.support.operators import FORWARD, operators_run_by
from tests.support.tiers import crossed
from transformer_kernels.bench.memory import memory_can_be_measured, peak_extra_bytes
from transformer_kernels.bench.tolerance import assert_same_function

SMALL = ("plain", "one-position", "pages-of-7", "key-ranges", "int8-key-ranges")
"""Cases of Triton in the quick tier"""
Options = dict[str, Any]
Cached = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

B, H_q, H_kv, D, D_v, PAGE = 3, 4, 2, 16, 5, 16
LENGTHS = torch.tensor([70, 1, 16])


def paged(M: int = 1, dtype: torch.dtype = torch.float32) -> Cached:
    """Returns q, pages of keys and values, cache_seqlens and block_table."""
    q = torch.randn(B, H_q, M, D, dtype=dtype)
    k, v = (torch.randn(9, H_kv, PAGE, D, dtype=dtype) for _ in range(2))
    table = torch.tensor([[7, 0, 3, 8, 1], [2, 9, 9, 9, 9], [5, -1, -1, -1, -1]])
    return q, k, v, LENGTHS, table


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> str:
    """Name of a backend."""
    return str(request.param)


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("case", "decoder", "dtype", "device"),
    crossed(DECODE_CASES, OTHER_WAYS) + crossed(named(DECODE_CASES, *SMALL), TRITON_WAYS),
)
def test_case(case: DecodeCase, decoder: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_case(case, dtype, decoder, device)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("case", "decoder", "dtype", "device"), crossed(DECODE_CASES, TRITON_WAYS))
def test_every_case_with_triton(
    case: DecodeCase, decoder: str, dtype: torch.dtype, device: torch.device
) -> None:
    assert_case(case, dtype, decoder, device)


def test_only_relative_keys_and_int8_caches_are_left_out() -> None:
    """Both of the CUDA kernels, and together of those for the CPU and of Triton's."""
    for backend, case in itertools.product(NAMES, DECODE_CASES):
        has_keys = case.relative is not None and case.relative.kind != "table"
        both = int(has_keys and case.int8)
        left_out = {"cuda": has_keys + case.int8, "reference": 0}.get(backend, both)
        reasons = case.reasons(backend)
        assert len(reasons) == left_out, (case.name, backend)
        assert all("relative_keys" in reason or "int8" in reason for reason in reasons)


@pytest.mark.quick
@pytest.mark.usefixtures("poisoned", "isa")
@pytest.mark.parametrize(
    ("case", "isa", "dtype"),
    crossed(DECODE_CASES, itertools.product(ISAS, DTYPES[1:])),
    indirect=["isa"],
)
def test_every_instruction_set(case: DecodeCase, dtype: torch.dtype) -> None:
    assert_case(case, dtype, "cpu")


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (None, [[1, 1, 0], [1, 1, 1]]),
        (tk.Mask.causal(align="bottom_right"), [[1, 1, 0], [1, 1, 1]]),
        (tk.Mask(), [[1, 1, 1], [1, 1, 1]]),
        (tk.Mask.window(0, 0, align="bottom_right"), [[0, 1, 0], [0, 0, 1]]),
        (tk.Mask.window(1, None, align="bottom_right"), [[1, 1, 1], [0, 1, 1]]),
    ],
    ids=["none", "causal", "everything", "itself", "left"],
)
def test_visible_keys_of_the_last_queries(
    mask: tk.Mask | None, visible: list[int], decoder: str
) -> None:
    """Two new tokens, at positions 1 and 2. With v = identity, o holds the weights."""
    q, k, v = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 5, 4), torch.eye(5)[None, None]
    cache_seqlens = torch.tensor([3])
    o = tk.attention_decode(q, k, v, cache_seqlens, mask=mask, backend=decoder)
    assert torch.equal((o[0, 0, :, :3] > 0).int(), torch.tensor(visible, dtype=torch.int32))
    assert torch.equal(o[..., 3:], torch.zeros(1, 1, 2, 2))
    torch.testing.assert_close(o.sum(-1), torch.ones(1, 1, 2))


def test_queries_at_negative_positions_see_no_key(decoder: str) -> None:
    q, k, v = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 8, 4), torch.randn(1, 1, 8, 4)
    o, lse = tk.attention_decode(q, k, v, torch.tensor([2]), return_lse=True, backend=decoder)
    assert torch.equal(o[0, 0, 0], torch.zeros(4))
    assert lse[0, 0].isneginf().tolist() == [True, False, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_paged_and_contiguous_caches_are_bit_identical(dtype: torch.dtype, isa: str) -> None:
    """Pages read in place, in contiguous runs or copied: same sums in the same order."""
    (case,) = named(DECODE_CASES, "long")
    expected = case.run(case.inputs(dtype), "cpu")
    for size in (1, 16, 24, 32, 64, 256):
        other = replace(case, page_size=size)
        got = other.run(other.inputs(dtype), "cpu")
        assert torch.equal(got["o"], expected["o"])
        assert torch.equal(got["lse"], expected["lse"])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "case",
    named(DECODE_CASES, "long", "long-pages", "long-window-16", "pages-group-8-queries-17"),
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_thread_counts_are_bit_identical(dtype: torch.dtype, case: DecodeCase) -> None:
    x = case.inputs(dtype)
    results = []
    for count in (1, 2, 3, 8, 8, 8):
        torch.set_num_threads(count)
        results.append(case.run(x, "cpu"))
    for other in results[1:]:
        assert torch.equal(other["o"], results[0]["o"])
        assert torch.equal(other["lse"], results[0]["lse"])


def test_sequences_may_share_pages(decoder: str) -> None:
    """A prompt shared by several sequences is stored once."""
    q, k, v, _, _ = paged()
    cache_seqlens, table = torch.full((B,), 40), torch.tensor([[4, 6, 0], [4, 6, 1], [4, 6, 1]])
    o = tk.attention_decode(q, k, v, cache_seqlens, table, backend=decoder)
    for b in range(B):
        one = table[b : b + 1].clone(), cache_seqlens[b : b + 1]
        alone = tk.attention_decode(q[b : b + 1], k, v, one[1], one[0], backend=decoder)
        assert_same_function(o[b : b + 1], alone)


def test_dtypes_and_strides_of_lengths_and_tables(decoder: str) -> None:
    """int32 and int64, non-contiguous, and any values after the last page in use."""
    q, k, v, cache_seqlens, table = paged()
    expected = tk.attention_decode(q, k, v, cache_seqlens, table, backend=decoder)
    huge = table.masked_fill((table < 0) | (table > 8), 1 << 40)
    wide = torch.full((B, 7, 2), -9)
    wide[:, :5, 1] = table
    for one, other in (
        (cache_seqlens.int(), table.int()),
        (cache_seqlens.repeat_interleave(2)[::2], wide[:, :, 1]),
        (cache_seqlens.int().repeat_interleave(2)[::2], wide.int()[:, :, 1]),
        (cache_seqlens, huge),
        (cache_seqlens, table.T.contiguous().T),
    ):
        assert torch.equal(tk.attention_decode(q, k, v, one, other, backend=decoder), expected)
        o, _ = tk.attention_decode(q, k, v, one, other, return_lse=True, backend=decoder)
        assert torch.equal(o, expected)


def test_output_has_the_strides_of_q() -> None:
    q, k, v, cache_seqlens, table = paged(3)
    transposed = q.transpose(1, 2).contiguous().transpose(1, 2)
    for x in (q, transposed):
        o = tk.attention_decode(x, k, v, cache_seqlens, table, backend="cpu")
        other, _ = tk.attention_decode(
            x, k, v, cache_seqlens, table, return_lse=True, backend="cpu"
        )
        assert o.stride() == other.stride() == x.stride()
    o, lse = tk.attention_decode(
        q.double(), k.double(), v.double(), cache_seqlens, table, return_lse=True
    )
    assert (o.dtype, lse.dtype) == (torch.float64, torch.float64)


@pytest.mark.exhaustive
@pytest.mark.skipif(not memory_can_be_measured(), reason="peak memory cannot be measured")
def test_pages_are_read_in_place() -> None:
    """Keys and values are 32 MiB each; a gather would duplicate them."""
    q = torch.randn(1, 8, 2, 64).bfloat16()
    k, v = (torch.zeros(1 << 12, 1, 64, 64, dtype=torch.bfloat16) for _ in range(2))
    lengths, table = torch.tensor([1 << 18]), torch.randperm(1 << 12)[None]
    extra = peak_extra_bytes(lambda: lambda: tk.attention_decode(q, k, v, lengths, table))
    assert extra is not None
    assert extra < 8 << 20


def test_one_operator_and_no_copy() -> None:
    q, k, v, cache_seqlens, table = paged(2)
    integers = cache_seqlens.int(), table.int()
    ran = operators_run_by(lambda: tk.attention_decode(q, k, v, *integers, backend="cpu"))
    assert ran[FORWARD] == 1
    assert ran["aten::clone"] == 2  # of the integers, which another thread may write
    assert not {"aten::index", "aten::gather"} & ran.keys()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", DECODERS)
def test_fullgraph(backend: str, dynamic: bool) -> None:
    """One graph serves all values of cache_seqlens and block_table."""
    sinks = torch.randn(H_q)

    def call(q: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor, table: Tensor) -> Any:
        return tk.attention_decode(
            q, k, v, cache_seqlens, table, sinks=sinks, return_lse=True, backend=backend
        )

    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(call, fullgraph=True, backend=graphs, dynamic=dynamic)
    q, k, v, cache_seqlens, table = paged(2)
    for one in (cache_seqlens, torch.tensor([3, 16, 0])):
        assert_same_function(fast(q, k, v, one, table), call(q, k, v, one, table))
    assert graphs.frame_count == 1


def test_reference_is_differentiable() -> None:
    q, k, v, cache_seqlens, table = paged(2, torch.float64)
    sinks = torch.randn(H_q, dtype=torch.float64)
    tensors = tuple(x.requires_grad_() for x in (q, k, v, sinks))

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return tk.attention_decode(q, k, v, cache_seqlens, table, sinks=sinks, backend="reference")

    assert gradcheck(call, tensors, fast_mode=True)
    with torch.no_grad():
        assert_same_function(
            call(*tensors),
            tk.attention_decode(q, k, v, cache_seqlens, table, sinks=sinks, backend="cpu"),
        )


@pytest.mark.parametrize("backend", ["auto", *(n for n in NAMES if n != "reference")])
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "sinks", "bias"])
def test_tensors_that_require_grad_raise_in_grad_mode(name: str, backend: str) -> None:
    q, k, v, cache_seqlens, table = paged()
    slopes, sinks = torch.ones(H_q), torch.zeros(H_q)
    {"q": q, "k_cache": k, "v_cache": v, "sinks": sinks, "bias": slopes}[name].requires_grad_()
    both: Options = {"bias": tk.alibi(slopes, align="bottom_right"), "sinks": sinks}
    options: Options = {key: x for key, x in both.items() if key == name}
    message = rf"{name} must not require grad.*no_grad\(\), use attention\(\)"
    with pytest.raises(ValueError, match=message):
        tk.attention_decode(q, k, v, cache_seqlens, table, **options, backend=backend)
    with torch.no_grad():
        tk.attention_decode(q, k, v, cache_seqlens, table, **options, backend=backend)
    with torch.inference_mode():
        tk.attention_decode(q, k, v, cache_seqlens, table, **options, backend=backend)


def test_transforms(decoder: str) -> None:
    q, k, v, cache_seqlens, table = paged(2)

    def call(q: Tensor) -> Tensor:
        return tk.attention_decode(q, k, v, cache_seqlens, table, backend=decoder)

    o = torch.func.vmap(call)(torch.stack([q, -q]))
    assert_same_function(o[1], call(-q))
    tangent = torch.randn_like(q)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(call(forward_ad.make_dual(q, tangent))).tangent
    exact = torch.func.jvp(
        lambda q: tk.attention_decode(
            q, k.double(), v.double(), cache_seqlens, table, backend="reference"
        ),
        (q.double(),),
        (tangent.double(),),
    )[1]
    assert_same_function(found, exact, dtype=found.dtype)


def test_autocast_casts_nothing(decoder: str) -> None:
    q, k, v, cache_seqlens, table = paged()
    expected = tk.attention_decode(q, k, v, cache_seqlens, table, backend=decoder)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(
            tk.attention_decode(q, k, v, cache_seqlens, table, backend=decoder), expected
        )


# append_to_cache.


def new(M: int) -> tuple[Tensor, Tensor]:
    return torch.randn(B, H_kv, M, D), torch.randn(B, H_kv, M, D_v)


def nan_caches(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.full((*shape, D), math.nan), torch.full((*shape, D_v), math.nan)


def test_append_to_contiguous_cache() -> None:
    k_cache, v_cache = nan_caches(B, H_kv, 9)
    k, v = new(2)
    tk.append_to_cache(k_cache, v_cache, k, v, torch.tensor([2, 5, 9]))
    for b, length in enumerate((2, 5, 9)):
        for cache, x in ((k_cache, k), (v_cache, v)):
            assert torch.equal(cache[b, :, length - 2 : length], x[b])
            assert cache[b].isnan().all(dim=-1).sum() == H_kv * 7


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_append_to_paged_cache(dtype: torch.dtype) -> None:
    k_cache, v_cache = nan_caches(7, H_kv, 4)
    k, v = new(3)
    table = torch.tensor([[6, 0, -1], [2, 5, 1], [3, -1, 99]], dtype=dtype)
    tk.append_to_cache(k_cache, v_cache, k, v, torch.tensor([5, 12, 3], dtype=dtype), table)
    places = [[(6, 2), (6, 3), (0, 0)], [(1, 1), (1, 2), (1, 3)], [(3, 0), (3, 1), (3, 2)]]
    for cache, x in ((k_cache, k), (v_cache, v)):
        for b, rows in enumerate(places):
            for i, (page, row) in enumerate(rows):
                assert torch.equal(cache[page, :, row], x[b, :, i])
        assert cache.isnan().all(dim=-1).sum() == H_kv * (7 * 4 - 9)


@pytest.mark.parametrize("page_size", [0, 4])
def test_stepwise_decoding_equals_causal_attention(page_size: int, decoder: str) -> None:
    """A prompt of three tokens, then one or two at a time, equals one call with all tokens."""
    steps = (3, 1, 1, 2, 1)
    q, (k, v) = torch.randn(B, H_q, sum(steps), D), new(sum(steps))
    table = torch.randperm(6).reshape(B, 2) if page_size else None
    pages = (6, H_kv, page_size) if page_size else (B, H_kv, 10)
    k_cache, v_cache = nan_caches(*pages)
    cache_seqlens, parts, begin = torch.zeros(B, dtype=torch.int64), [], 0
    for M in steps:
        cache_seqlens, now = cache_seqlens + M, slice(begin, begin + M)
        tk.append_to_cache(k_cache, v_cache, k[:, :, now], v[:, :, now], cache_seqlens, table)
        caches = k_cache, v_cache, cache_seqlens, table
        parts.append(tk.attention_decode(q[:, :, now], *caches, backend=decoder))
        begin += M
    assert_same_function(torch.cat(parts, dim=2), tk.attention(q, k, v, mask=tk.Mask.causal()))


def test_compiled_append_to_cache() -> None:
    def step(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        tk.append_to_cache(k_cache, v_cache, k, v, lengths)
        return tk.attention_decode(k, k_cache, v_cache, lengths)

    caches = torch.zeros(B, H_kv, 9, D), torch.zeros(B, H_kv, 9, D_v)
    copies = caches[0].clone(), caches[1].clone()
    fast = torch.compile(step, fullgraph=True, backend="aot_eager")
    for length in (1, 2, 7):
        rows, lengths = new(1), torch.tensor([length] * B)
        assert_same_function(fast(*caches, *rows, lengths), step(*copies, *rows, lengths))
    torch.testing.assert_close(caches, copies)
