"""`flash_attn_with_kvcache` against its documentation, in plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.flash_attn.plain import OPTIONS, attend
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function, assert_within_rule
from transformer_kernels.integrations.flash_attn import flash_attn_with_kvcache

B, H, H_kv, D, CAPACITY = 3, 4, 2, 24, 80
LENGTHS = (70, 0, 33)
"""Positions in use before the call."""


class Cache:
    """Keys and values of each sequence, and the same as the arguments of a call.

    Rows of the cache that are not in use hold NaN.
    """

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32) -> None:
        self.rows = [
            [torch.randn(n, H_kv, D, dtype=dtype) for n in LENGTHS] for _ in range(2)
        ]  # of k, of v; of each sequence
        self.options: dict[str, Any] = {"cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32)}
        self.page_size, self.places = CAPACITY, torch.arange(B)[:, None]
        entries = B
        if kind == "entries":
            entries, self.places = 5, torch.tensor([[4], [0], [2]])
            self.options["cache_batch_idx"] = self.places[:, 0].int()
        elif kind.startswith("pages"):
            self.page_size = int(kind.removeprefix("pages-"))
            columns = -(-CAPACITY // self.page_size)
            entries = B * columns + 1
            self.places = torch.randperm(entries)[: B * columns].view(B, columns)
            self.options["block_table"] = self.places.int()
        shape = (entries, self.page_size, H_kv, D)
        self.k, self.v = (torch.full(shape, math.nan, dtype=dtype) for _ in range(2))
        for cache, rows in zip((self.k, self.v), self.rows, strict=True):
            for b, own in enumerate(rows):
                for j, row in enumerate(own):
                    cache[self.at(b, j)] = row

    def at(self, b: int, j: int) -> tuple[int, int]:
        """Entry and row of position j of sequence b."""
        return int(self.places[b, j // self.page_size]), j % self.page_size


KINDS = ["plain", "entries", "pages-16", "pages-7"]


def expected(cache: Cache, q: Tensor, new: tuple[Tensor, Tensor] | None, **options: Any) -> Any:
    """o (B, M, H, D) and lse (B, H, M), sequence by sequence."""
    slopes, firsts = options.pop("alibi_slopes", None), options.pop("firsts", (0,) * B)
    parts = []
    for b in range(B):
        k, v = (rows[b].to(q.dtype) for rows in cache.rows)
        if new is not None:
            k, v = torch.cat([k, new[0][b]]), torch.cat([v, new[1][b]])
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        one = q[b : b + 1], k[None], v[None]
        parts.append(attend(*one, alibi_slopes=own, first=firsts[b], **options))
    o, lse = zip(*parts, strict=True)
    return torch.cat(o), torch.cat(lse)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_against_float64(options: dict[str, Any], kind: str, dtype: torch.dtype) -> None:
    cache = Cache(kind, dtype)
    for M in (1, 5):
        q = torch.randn(B, M, H, D, dtype=dtype)
        got = flash_attn_with_kvcache(
            q, cache.k, cache.v, **cache.options, **options, return_softmax_lse=True
        )
        plain, exact = (expected(cache, x, None, **options) for x in (q, q.double()))
        for n, name in enumerate(("o", "lse")):
            assert_within_rule(name, got[n], exact[n], plain[n])
        o = flash_attn_with_kvcache(q, cache.k, cache.v, **cache.options, **options)
        assert isinstance(o, Tensor)
        torch.testing.assert_close(o, got[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [(1, 1), (4, 4), (3, 6)], ids=str)
def test_new_keys_are_appended(tokens: tuple[int, int], causal: bool, kind: str) -> None:
    """In their places, and nowhere else."""
    M, count = tokens
    cache = Cache(kind)
    q = torch.randn(B, M, H, D)
    new = torch.randn(B, count, H_kv, D), torch.randn(B, count, H_kv, D)
    written = [cache.k.clone(), cache.v.clone()]
    for x, rows in zip(written, new, strict=True):
        for b in range(B):
            for n in range(count):
                x[cache.at(b, LENGTHS[b] + n)] = rows[b, n]
    got = flash_attn_with_kvcache(
        q, cache.k, cache.v, *new, **cache.options, causal=causal, return_softmax_lse=True
    )
    assert_same_function(got, expected(cache, q, new, causal=causal))
    for x, wanted in zip((cache.k, cache.v), written, strict=True):
        torch.testing.assert_close(x, wanted, atol=0, rtol=0, equal_nan=True)


def rotated(x: Tensor, angle: Tensor, first: int, interleaved: bool) -> Tensor:
    """Rotates (tokens, heads, D), of which token n has the angles of position first + n."""
    x, half = x.clone(), angle.shape[1]
    for n in range(len(x)):
        for pair in range(half):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
            cos, sin = angle[first + n, pair].cos(), angle[first + n, pair].sin()
            one, other = x[n, :, a].clone(), x[n, :, b].clone()
            x[n, :, a], x[n, :, b] = one * cos - other * sin, one * sin + other * cos
    return x


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, D])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (40, -1)}], ids=str)
def test_rotary(options: dict[str, Any], rotary_dim: int, interleaved: bool) -> None:
    """Queries follow each other if causal or local; otherwise all are at the first new position."""
    cache = Cache("pages-16")
    angle = torch.rand(CAPACITY, rotary_dim // 2) * 6
    q = torch.randn(B, 3, H, D)
    k, v = (torch.randn(B, 3, H_kv, D) for _ in range(2))
    got = flash_attn_with_kvcache(
        q, cache.k, cache.v, k, v, angle.cos(), angle.sin(), **cache.options, **options,
        rotary_interleaved=interleaved, return_softmax_lse=True,
    )  # fmt: skip

    def turned(x: Tensor) -> Tensor:
        return torch.stack([rotated(x[b], angle, LENGTHS[b], interleaved) for b in range(B)])

    k = turned(k)
    q = turned(q) if options else torch.cat([turned(one) for one in q.split(1, dim=1)], dim=1)
    assert_same_function(got, expected(cache, q, (k, v), **options))
    assert_same_function(cache.k[cache.at(0, 70)], k[0, 0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_left_padding(options: dict[str, Any], kind: str) -> None:
    """Positions before cache_leftpad hold NaN; one sequence has nothing else."""
    cache, firsts = Cache(kind), (9, 0, 33)
    for b, first in enumerate(firsts):
        for j in range(first):
            cache.k[cache.at(b, j)] = cache.v[cache.at(b, j)] = math.nan
            cache.rows[0][b][j] = cache.rows[1][b][j] = 0.0
    q = torch.randn(B, 5, H, D)
    got = flash_attn_with_kvcache(
        q, cache.k, cache.v, cache_leftpad=torch.tensor(firsts, dtype=torch.int32),
        **cache.options, **options, return_softmax_lse=True,
    )  # fmt: skip
    assert_same_function(got, expected(cache, q, None, firsts=firsts, **options))


def test_lengths_may_be_an_int_or_missing() -> None:
    q, k, v = torch.randn(2, 1, H, D), torch.randn(2, 9, H_kv, D), torch.randn(2, 9, H_kv, D)
    o = flash_attn_with_kvcache(q, k, v, cache_seqlens=7)
    assert_same_function(o, attend(q, k[:, :7], v[:, :7])[0])
    assert_same_function(flash_attn_with_kvcache(q, k, v), attend(q, k, v)[0])
    table = torch.tensor([[1, 0], [0, 1]])
    o = flash_attn_with_kvcache(q, k, v, block_table=table)
    together = [torch.cat([x[[1, 0]], x[[0, 1]]], dim=1) for x in (k, v)]
    assert_same_function(o, attend(q, *together)[0])


def test_number_of_splits_changes_nothing() -> None:
    cache, q = Cache("plain"), torch.randn(B, 1, H, D)
    outputs = [
        flash_attn_with_kvcache(q, cache.k, cache.v, **cache.options, num_splits=n)
        for n in (0, 1, 7)
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_compiled() -> None:
    """One graph, which writes the cache."""
    torch.compiler.reset()
    compiled = torch.compile(flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    angle = torch.rand(CAPACITY, 4)
    tables = angle.cos(), angle.sin()
    q, k, v = (torch.randn(B, 1, heads, D) for heads in (H, H_kv, H_kv))
    once, again = Cache("pages-16"), Cache("pages-16")
    again.k, again.v = once.k.clone(), once.v.clone()
    options = once.options | {"causal": True, "cache_leftpad": torch.tensor([9, 0, 33])}
    o = flash_attn_with_kvcache(q, once.k, once.v, k, v, *tables, **options)
    other = compiled(q, again.k, again.v, k, v, *tables, **options)
    assert_same_function(other, o)
    torch.testing.assert_close(again.k, once.k, equal_nan=True)


NEW = torch.randn(B, 2, H_kv, D)
TABLE = torch.rand(CAPACITY, 4)
INVALID: dict[str, dict[str, Any]] = {
    "k and v must be given together, got k alone": {"k": NEW},
    "cache_seqlens must be given with k and v": {"k": NEW, "v": NEW, "cache_seqlens": None},
    "rotary_cos and rotary_sin must be given together": {"k": NEW, "v": NEW, "rotary_cos": TABLE},
    "rotary_cos and rotary_sin need k and v": {"rotary_cos": TABLE, "rotary_sin": TABLE},
    "with rotary_dim at most headdim = 24": (
        {"k": NEW, "v": NEW, "rotary_cos": torch.rand(9, 13), "rotary_sin": torch.rand(9, 13)}
    ),
    "must have rows for the positions 0 to 71, got 71 rows": (
        {"k": NEW, "v": NEW, "rotary_cos": TABLE[:71], "rotary_sin": TABLE[:71]}
    ),
    "cache_batch_idx and block_table must not be given together": (
        {"cache_batch_idx": torch.arange(B), "block_table": torch.arange(B)[:, None]}
    ),
    r"cache_batch_idx must be \(batch,\) with B = 3, got shape \(2,\)": (
        {"cache_batch_idx": torch.arange(2)}
    ),
    "block_table must hold pages 0 to 2 of k_cache.*got 3 at": (
        {"cache_batch_idx": torch.tensor([0, 1, 3]), "cache_seqlens": 9}
    ),
    r"cache_leftpad must be \(batch,\) with B = 3": (
        {"cache_leftpad": torch.zeros(B, 1, dtype=torch.int32)}
    ),
    "cache_seqlens must be from 0 to 80": {"cache_seqlens": 81},
    r"q must be \(batch, seqlen_q, heads, headdim\)": {"q": NEW[0]},
    r"v_cache must be \(batch_cache, capacity,": {"v_cache": NEW[0]},
}
"""Arguments of calls that raise a ValueError."""
OF_WRONG_TYPE: dict[str, dict[str, Any]] = {
    "rotary_sin must be a floating-point tensor": (
        {"k": NEW, "v": NEW, "rotary_cos": TABLE, "rotary_sin": 3}
    ),
    "block_table must be a tensor, got list": {"block_table": [[0]], "cache_seqlens": None},
    "cache_leftpad must be int32 or int64": {"cache_leftpad": torch.zeros(B)},
    "cache_seqlens must be an int, a tensor": {"cache_seqlens": 8.0},
    "num_splits must be an int": {"num_splits": None},
}


@each("message", [*INVALID, *OF_WRONG_TYPE])
def test_invalid_arguments(message: str) -> None:
    """The cache is as before."""
    wrong = (INVALID | OF_WRONG_TYPE)[message]
    cache = Cache("plain")
    before = cache.k.clone()
    valid: dict[str, Any] = {"q": torch.randn(B, 2, H, D), "k_cache": cache.k, "v_cache": cache.v}
    flash_attn_with_kvcache(**valid, **cache.options)
    with pytest.raises(ValueError if message in INVALID else TypeError, match=message):
        flash_attn_with_kvcache(**valid | cache.options | wrong)
    torch.testing.assert_close(cache.k, before, equal_nan=True)


@each("name", ["q", "k", "v", "k_cache", "s_aux"])
def test_tensors_that_require_grad_raise_before_the_cache_is_written(name: str) -> None:
    cache = Cache("plain")
    tensors: dict[str, Any] = {"q": torch.randn(B, 2, H, D), "k_cache": cache.k, "v_cache": cache.v}
    tensors |= {"k": NEW.clone(), "v": NEW.clone(), "s_aux": torch.zeros(H)}
    before = cache.k.clone()
    tensors[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name} must not require grad.*flash_attn_func"):
        flash_attn_with_kvcache(**tensors, **cache.options)
    torch.testing.assert_close(cache.k.detach(), before, equal_nan=True)
    with torch.no_grad():
        flash_attn_with_kvcache(**tensors, **cache.options)
