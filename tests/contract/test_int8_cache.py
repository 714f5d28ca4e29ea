"""Int8 caches: `quantize_cache`, and the steps of a model that uses them. The table of cases of
`attention_decode` (support/decode_cases.py) has the results of its kernels."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import transformer_kernels as tk
from tests.support.backends import NAMES
from transformer_kernels.bench.tolerance import assert_same_function

pytestmark = pytest.mark.exhaustive

B, H_q, H_kv, D, D_v, PAGE = 3, 4, 2, 64, 64, 16
LENGTHS = torch.tensor([40, 1, 16])
TABLE = torch.tensor([[6, 0, 3], [2, -1, 99], [5, -9, 99]])
INT8 = tuple(name for name in NAMES if name != "cuda")
"""Backends that support int8 caches"""
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape, D).to(dtype), torch.randn(*shape, D_v).to(dtype)


def scales(cache: tk.QuantizedCache) -> dict[str, Any]:
    return {"k_scale": cache.k_scale, "v_scale": cache.v_scale}


def empty_cache(*shape: int) -> tk.QuantizedCache:
    """Nothing is written yet: arbitrary elements, and scales that are NaN."""
    k, v = (torch.randint(-128, 128, (*shape, width), dtype=torch.int8) for width in (D, D_v))
    return tk.QuantizedCache(k, v, *(torch.full(shape, math.nan) for _ in "kv"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_are_rounded_to_the_nearest_multiple_of_the_scale(dtype: torch.dtype) -> None:
    k, v = rows(2, 3, 50, dtype=dtype)
    tiny = torch.finfo(dtype).tiny
    k[0, 0, :5] *= torch.tensor([0.0, tiny, 100.0, 1e-3, 1.0], dtype=dtype)[:, None]
    k[0, 1, 0] = torch.arange(D) - 2.5  # ties, and a scale of (D - 3.5) / 127
    k[0, 2, 0] = torch.cat((torch.tensor([127.0]), torch.arange(1, D) - 0.5))
    cache = tk.quantize_cache(k, v)
    for x, of_x, scale in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        assert of_x.dtype == torch.int8
        assert scale.dtype == torch.float32
        largest = x.double().abs().amax(-1)
        smallest = torch.finfo(torch.float32).tiny
        wanted = (largest / 127).clamp(min=smallest).masked_fill(largest == 0, 0.0)
        torch.testing.assert_close(scale.double(), wanted, rtol=2.0**-24, atol=0.0)
        error = (of_x * scale.double()[..., None] - x.double()).abs()
        assert bool((error <= scale.double()[..., None] * (0.5 + 127 * 2.0**-23)).all())
    assert not cache.k[0, 0, 0].any()
    assert cache.k[0, 2, 0, 1:7].tolist() == [0, 2, 2, 4, 4, 6]


def test_pages_and_any_strides_are_quantised_alike() -> None:
    k, v = rows(2, 3, 50)
    cache = tk.quantize_cache(k, v)
    turned = tk.quantize_cache(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)))
    paged = tk.quantize_cache(
        *(x.unflatten(2, (5, 10)).transpose(1, 2).flatten(0, 1) for x in (k, v))
    )
    for x, y, z in zip(cache, turned, paged, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x, z.unflatten(0, (2, 5)).transpose(1, 2).flatten(2, 3))


@pytest.mark.parametrize(("dtype", "paged"), list(itertools.product(DTYPES, (False, True))))
def test_appended_tokens_are_quantised_like_a_cache(dtype: torch.dtype, paged: bool) -> None:
    cache = empty_cache(7, H_kv, PAGE) if paged else empty_cache(B, H_kv, 40)
    cache = cache._replace(k_scale=torch.full((*cache.k.shape[:3], 2), math.nan)[..., 0])
    before = [x.clone() for x in cache]
    k, v = rows(B, H_kv, 1, dtype=dtype)
    table = TABLE if paged else None
    tk.append_to_cache(cache.k, cache.v, k, v, LENGTHS, table, **scales(cache))
    for x, old, wanted in zip(cache, before, tk.quantize_cache(k, v), strict=True):
        for b, length in enumerate(LENGTHS.tolist()):
            entry = int(TABLE[b, (length - 1) // PAGE]) if paged else b
            row = (length - 1) % PAGE if paged else length - 1
            assert torch.equal(x[entry, :, row], wanted[b, :, 0])
            old[entry, :, row] = x[entry, :, row]
        assert torch.equal(x.nan_to_num(), old.nan_to_num())


@pytest.mark.parametrize("backend", INT8)
@pytest.mark.parametrize("page_size", [0, 16])
def test_stepwise_decoding_equals_one_call(backend: str, page_size: int) -> None:
    steps = (3, 1, 1, 2, 18)
    q, (k, v) = torch.randn(B, H_q, sum(steps), D), rows(B, H_kv, sum(steps))
    table = torch.randperm(6).reshape(B, 2) if page_size else None
    cache = empty_cache(6, H_kv, page_size) if page_size else empty_cache(B, H_kv, 30)
    lengths, parts, begin = torch.zeros(B, dtype=torch.int64), [], 0
    for M in steps:
        lengths, now = lengths + M, slice(begin, begin + M)
        new = k[:, :, now], v[:, :, now]
        tk.append_to_cache(cache.k, cache.v, *new, lengths, table, **scales(cache))
        arguments: Any = (q[:, :, now], cache.k, cache.v, lengths, table)
        parts.append(tk.attention_decode(*arguments, **scales(cache), backend=backend))
        begin += M
    exact = tk.quantize_cache(k, v)
    whole = tk.attention_decode(q, exact.k, exact.v, lengths, **scales(exact), backend=backend)
    assert_same_function(torch.cat(parts, dim=2), whole)


def test_the_fast_path_takes_plain_calls_and_reads_no_hidden_scale() -> None:
    cache = tk.quantize_cache(*rows(B, H_kv, 40))
    q, mask = torch.randn(B, H_q, 2, D), tk.Mask.key_range(torch.tensor([33, 0, 2]), LENGTHS)
    mask &= tk.Mask.window(5, 0, align="bottom_right")
    hidden = [x.clone() for x in cache]
    for b, (first, end) in enumerate(((33, 40), (0, 1), (9, 16))):
        for x in hidden:
            unread = math.nan if x.is_floating_point() else -128
            x[b, :, :first], x[b, :, end:] = unread, unread
    k, v, k_scale, v_scale = hidden
    options: dict[str, Any] = {"mask": mask, "k_scale": k_scale, "v_scale": v_scale}
    o = tk.attention_decode(q, k, v, LENGTHS, **options)
    explained = tk.explain(q, k, v, LENGTHS, operator=tk.attention_decode, **options)
    assert explained.general_path == ""
    assert "int8" in str(explained.kernel)
    wanted = tk.attention_decode(q, *cache[:2], LENGTHS, mask=mask, **scales(cache))
    assert torch.equal(o, wanted)
    general, _ = tk.attention_decode(q, k, v, LENGTHS, **options, return_lse=True)
    assert torch.equal(o, general)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_of_any_size(dtype: torch.dtype) -> None:
    cache = tk.quantize_cache(*rows(B, H_kv, 40))
    for size in (0.0, 1e-40, 1e-6, 200.0):
        q = (torch.randn(B, H_q, 1, D) * size).to(dtype)
        q[..., 3] *= 50
        given: Any = (q, cache.k, cache.v, LENGTHS)
        options: dict[str, Any] = {**scales(cache), "scale": 0.1 / max(size, 1e-6)}
        got = tk.attention_decode(*given, **options, return_lse=True)
        wanted = tk.attention_decode(*given, **options, return_lse=True, backend="reference")
        largest = float(wanted[1].abs().max())
        assert_same_function(got, wanted, lse=largest)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_in_queries_shows_in_their_rows(value: float) -> None:
    cache = tk.quantize_cache(*rows(B, H_kv, 40))
    q = torch.randn(B, H_q, 2, D)
    arguments = cache.k, cache.v, LENGTHS
    exact = tk.attention_decode(q, *arguments, **scales(cache))
    q[0, 1, 1, 3] = value
    o = tk.attention_decode(q, *arguments, **scales(cache))
    assert bool(o[0, 1, 1].isnan().all())
    exact[0, 1, 1] = o[0, 1, 1]
    assert torch.equal(o.nan_to_num(), exact.nan_to_num())


def test_the_reference_is_differentiable_in_q() -> None:
    cache = tk.quantize_cache(*rows(B, H_kv, 40))
    q = torch.randn(B, H_q, 1, D, dtype=torch.float64, requires_grad=True)

    def decode(q: Tensor) -> Tensor:
        o: Tensor = tk.attention_decode(
            q, cache.k, cache.v, LENGTHS, **scales(cache), backend="reference"
        )
        return o

    assert gradcheck(decode, (q,), fast_mode=True)
    with pytest.raises(ValueError, match="q must not require grad"):
        tk.attention_decode(q, cache.k, cache.v, LENGTHS, **scales(cache))


def test_the_cuda_kernels_refuse_int8_caches() -> None:
    """On a GPU "auto" takes the next backend, Triton; here, without tensors, the reference."""
    cache = [x.to("meta") for x in tk.quantize_cache(*rows(B, H_kv, 40))]
    q, (k, v, k_scale, v_scale) = torch.empty(B, H_q, 1, D, device="meta"), cache
    options: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    with pytest.raises(ValueError, match="int8 caches: the cpu, triton and reference backends"):
        tk.attention_decode(q, k, v, LENGTHS.to("meta"), **options, backend="cuda")
    explained = tk.explain(q, k, v, LENGTHS.to("meta"), operator=tk.attention_decode, **options)
    assert explained.chosen == "reference"
    assert not any("int8" in reason for reason in explained.reasons["triton"])


def step(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *cache: Tensor) -> Tensor:
    given = tk.QuantizedCache(*cache)
    tk.append_to_cache(given.k, given.v, k, v, lengths, **scales(given))
    o: Tensor = tk.attention_decode(q, given.k, given.v, lengths, **scales(given))
    return o


def test_compiled_steps() -> None:
    def whole(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        cache = tk.quantize_cache(k, v)
        new = k[:, :, :1], v[:, :, :1]
        return step(q, *new, lengths, *cache)

    fast = torch.compile(whole, fullgraph=True, backend="aot_eager")
    for lengths in (LENGTHS, LENGTHS - 1 + (LENGTHS == 1)):
        given = torch.randn(B, H_q, 1, D), *rows(B, H_kv, 40), lengths
        assert_same_function(fast(*given), whole(*given))


class Step(torch.nn.Module):
    def forward(self, *x: Tensor) -> Tensor:
        return step(*x)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_steps(strict: bool) -> None:
    """The program writes the caches that it is given."""
    cache = tk.quantize_cache(*rows(B, H_kv, 40))
    new = torch.randn(B, H_q, 1, D), *(x[:, :, :1] for x in rows(B, H_kv, 40))
    program = torch.export.export(Step(), (*new, LENGTHS, *cache), strict=strict).module()
    given, expected = ([x.clone() for x in cache] for _ in range(2))
    lengths = LENGTHS - 1 + (LENGTHS == 1)
    assert torch.equal(program(*new, lengths, *given), step(*new, lengths, *expected))
    assert all(map(torch.equal, given, expected))
    assert not all(map(torch.equal, given, cache))


def test_bad_scales_in_compiled_code() -> None:
    cache = tk.quantize_cache(*rows(B, H_kv, 40))
    fast = torch.compile(tk.attention_decode, fullgraph=True, backend="aot_eager")
    q = torch.randn(B, H_q, 1, D)
    cache.v_scale[2, 1, 15] = math.inf
    with pytest.raises(RuntimeError, match="k_scale and v_scale must be finite and not negative"):
        fast(q, cache.k, cache.v, LENGTHS, **scales(cache))


@pytest.mark.parametrize("backend", [name for name in INT8 if name != "reference"])
@pytest.mark.parametrize("paged", [False, True])
def test_operator(paged: bool, backend: str) -> None:
    """Schema, fake tensors and dispatch."""
    from transformer_kernels.problem.cache import cache_problem

    cache = tk.quantize_cache(*rows(*((7, H_kv, PAGE) if paged else (B, H_kv, 40))))
    q, table = torch.randn(B, H_q, 2, D), TABLE if paged else None
    problem = cache_problem(q, cache.k, cache.v, LENGTHS, table, **scales(cache))
    name = "triton_forward" if backend == "triton" else "attention_forward"
    operator = getattr(torch.ops.transformer_kernels, name).default
    torch.library.opcheck(operator, (q, cache.k, cache.v, *problem.pack()))


@pytest.mark.parametrize("backend", INT8)
def test_vmap(backend: str) -> None:
    cache = tk.quantize_cache(*rows(2 * B, H_kv, 40))
    split = [x.unflatten(0, (2, B)) for x in cache]
    q = torch.randn(2, B, H_q, 1, D)

    def decode(q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor) -> Tensor:
        options: Any = {"k_scale": k_scale, "v_scale": v_scale, "backend": backend}
        o: Tensor = tk.attention_decode(q, k, v, LENGTHS, **options)
        return o

    got = torch.vmap(decode)(q, *split)
    for n in range(2):
        assert_same_function(got[n], decode(q[n], *(x[n] for x in split)))


def test_two_sequences_do_not_append_to_one_place() -> None:
    k_cache, v_cache = torch.zeros(4, H_kv, PAGE, D), torch.zeros(4, H_kv, PAGE, D_v)
    shared = torch.tensor([[3, 0], [3, 1], [3, 2]])
    tk.append_to_cache(k_cache, v_cache, *rows(B, H_kv, 1), torch.full((B,), 17), shared)
    with pytest.raises(ValueError, match="got row 15 of page 3 twice"):
        tk.append_to_cache(k_cache, v_cache, *rows(B, H_kv, 1), torch.tensor([17, 16, 16]), shared)
