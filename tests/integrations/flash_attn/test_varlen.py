"""`flash_attn_varlen_func` and its packed forms, with packed and paged keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.flash_attn.plain import (
    OPTIONS,
    PACKED_OPTIONS,
    assert_agrees,
    by_sequence,
    in_pages,
    starts,
)
from tests.support.tiers import each
from transformer_kernels.bench.tolerance import assert_same_function
from transformer_kernels.integrations.flash_attn import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

LENGTHS_Q, LENGTHS_K = (3, 70, 17), (5, 35, 40)


OFFSETS = starts(LENGTHS_Q), starts(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K)


def separate(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return by_sequence(q, k, v, LENGTHS_Q, LENGTHS_K, **options)


def packed(
    dtype: torch.dtype, lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], H_kv: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    k, v = (torch.randn(sum(lengths_k), H_kv, 24, dtype=dtype) for _ in range(2))
    return torch.randn(sum(lengths_q), 4, 24, dtype=dtype), k, v


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_against_float64(options: dict[str, Any], dtype: torch.dtype) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        o: Tensor = flash_attn_varlen_func(q, k, v, *OFFSETS, **options)
        return o

    assert_agrees(call, separate, packed(dtype, LENGTHS_Q, LENGTHS_K), **options)


@each("options", PACKED_OPTIONS.values(), ids=PACKED_OPTIONS)
def test_packed_forms(options: dict[str, Any]) -> None:
    cu_seqlens, longest = starts(LENGTHS_K), torch.tensor(40)
    q, k, v = packed(torch.float32, LENGTHS_K, LENGTHS_K, 4)
    both: tuple[Any, ...] = (cu_seqlens, cu_seqlens, 40, longest)
    o = flash_attn_varlen_func(q, k, v, *both, **options)
    kv, qkv = torch.stack([k, v], dim=1), torch.stack([q, k, v], dim=1)
    assert torch.equal(flash_attn_varlen_kvpacked_func(q, kv, *both, **options), o)
    assert torch.equal(flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 40, **options), o)

    def call(qkv: Tensor, **options: Any) -> Tensor:
        o: Tensor = flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 40, **options)
        return o

    def expected(qkv: Tensor, **options: Any) -> Tensor:
        q, k, v = qkv.unbind(1)
        return by_sequence(q, k, v, LENGTHS_K, LENGTHS_K, **options)

    assert_agrees(call, expected, (qkv,), **options)


@pytest.mark.parametrize("page_size", [16, 7, 64])
@pytest.mark.parametrize("lengths_q", [(1, 1, 1), (4, 4, 4), (1, 9, 0), (3, 70, 17)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_pages(options: dict[str, Any], lengths_q: tuple[int, ...], page_size: int) -> None:
    """In random order; of about equal numbers of queries, pages are read in place."""
    q, k, v = packed(torch.float32, lengths_q, LENGTHS_K)
    columns = -(-max(LENGTHS_K) // page_size)
    table = torch.randperm(3 * columns).view(3, columns).int()
    k_pages, v_pages = (in_pages(x, LENGTHS_K, page_size, table) for x in (k, v))
    offsets = starts(lengths_q), starts(LENGTHS_K), max(lengths_q), 40
    leaf = q.clone().requires_grad_()  # pages are copied
    expected = by_sequence(leaf, k, v, lengths_q, LENGTHS_K, **options)
    for one in (q, leaf):
        o = flash_attn_varlen_func(one, k_pages, v_pages, *offsets, block_table=table, **options)
        assert_same_function(o, expected)
    assert_same_function(*(torch.autograd.grad(x.sum(), leaf) for x in (o, expected)))


def test_pages_with_dropout() -> None:
    """The bits are those of packed keys."""
    q, k, v = packed(torch.float32, (2, 2, 2), LENGTHS_K)
    table = torch.arange(9).view(3, 3)
    k_pages, v_pages = (in_pages(x, LENGTHS_K, 16, table) for x in (k, v))
    valid = (starts((2, 2, 2)), starts(LENGTHS_K), 2, 40, 0.4)
    torch.manual_seed(3)
    expected = flash_attn_varlen_func(q, k, v, *valid)
    torch.manual_seed(3)
    o = flash_attn_varlen_func(q, k_pages, v_pages, *valid, block_table=table)
    assert torch.equal(o, expected)


@pytest.mark.parametrize("lengths_q", [(2, 2), (1, 3)], ids=str)
def test_pages_with_trailing_queries(lengths_q: tuple[int, ...]) -> None:
    """Rows after the last sequence have 0, and may hold NaN."""
    q, k, v = packed(torch.float32, lengths_q, (9, 16))
    table, longer = torch.tensor([[1], [0]]), torch.full((6, 4, 24), torch.nan)
    longer[:4] = q
    k_pages, v_pages = (in_pages(x, (9, 16), 16, table) for x in (k, v))
    cu_seqlens = starts(lengths_q), starts((9, 16))
    o = flash_attn_varlen_func(longer, k_pages, v_pages, *cu_seqlens, 3, 16, block_table=table)
    assert_same_function(o[:4], by_sequence(q, k, v, lengths_q, (9, 16)))
    assert torch.equal(o[4:], torch.zeros(2, 4, 24))


def test_compiled_pages() -> None:
    """One graph for all lengths; the values of cu_seqlens are not read."""
    torch.compiler.reset()
    compiled = torch.compile(flash_attn_varlen_func, backend="aot_eager", fullgraph=True)
    pages, table = torch.randn(6, 16, 2, 24), torch.arange(6).view(2, 3)
    for lengths_q in ((4, 4), (3, 5)):
        q = torch.randn(8, 4, 24)
        valid = (q, pages, pages, starts(lengths_q), starts((33, 17)), 5, 40)
        expected = flash_attn_varlen_func(*valid, causal=True, block_table=table)
        o = compiled(*valid, causal=True, block_table=table)
        assert_same_function(o, expected)


def test_compiled_training() -> None:
    compiled = torch.compile(flash_attn_varlen_func, backend="aot_eager", fullgraph=True)
    options = OPTIONS["alibi-by-entry"] | {"causal": True}

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        o: Tensor = compiled(q, k, v, *OFFSETS, **options)
        return o

    assert_agrees(call, separate, packed(torch.float32, LENGTHS_Q, LENGTHS_K), **options)


def test_invalid_arguments() -> None:
    q, k, v = packed(torch.float32, LENGTHS_Q, LENGTHS_K)
    cu_seqlens, longest = OFFSETS[:2], OFFSETS[2:]
    flash: Any = flash_attn_varlen_func
    for error, message, call in (
        (ValueError, r"q must be \(total_q, heads, headdim\), got shape",
         lambda: flash(q[None], k, v, *OFFSETS)),
        (ValueError, "max_seqlen_k must be at least 40",
         lambda: flash(q, k, v, *cu_seqlens, 70, 39)),
        (TypeError, "max_seqlen_q must be an int",
         lambda: flash(q, k, v, *cu_seqlens, torch.tensor(70.0), 40)),
        (ValueError, r"kv must be \(total, 2, heads_k, headdim\)",
         lambda: flash_attn_varlen_kvpacked_func(q, k, *cu_seqlens, *longest)),
        (ValueError, r"qkv must be \(total, 3, heads, headdim\)",
         lambda: flash_attn_varlen_qkvpacked_func(q, cu_seqlens[0], 70)),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("lengths_q", [(4, 4, 4), LENGTHS_Q], ids=["in-place", "copied"])
def test_invalid_arguments_with_pages(lengths_q: tuple[int, ...]) -> None:
    q, k, v = packed(torch.float32, lengths_q, LENGTHS_K)
    table = torch.arange(3)[:, None]
    valid: dict[str, Any] = {
        "q": q, "k": in_pages(k, LENGTHS_K, 40, table), "v": in_pages(v, LENGTHS_K, 40, table),
        "cu_seqlens_q": starts(lengths_q), "cu_seqlens_k": starts(LENGTHS_K),
        "max_seqlen_q": max(lengths_q), "max_seqlen_k": 40, "block_table": table,
    }  # fmt: skip
    flash_attn_varlen_func(**valid)
    wrong: tuple[tuple[type[Exception], str, dict[str, Any]], ...] = (
        (ValueError, r"k must be \(blocks, page_size, heads_k, headdim\)", {"k": k}),
        (TypeError, "cu_seqlens_k must be a tensor, got NoneType", {"cu_seqlens_k": None}),
        (ValueError, "cu_seqlens_k must not decrease, got 35, then 9",
         {"cu_seqlens_k": torch.tensor([0, 35, 9, 40])}),
        (ValueError, "max_seqlen_k must be at least 40", {"max_seqlen_k": 39}),
        (ValueError, r"block_table must be \(B, pages\) with B = 3", {"block_table": table[:2]}),
    )  # fmt: skip
    for error, message, options in wrong:
        with pytest.raises(error, match=message):
            flash_attn_varlen_func(**valid | options)


@pytest.mark.parametrize("lengths_q", [(4, 4, 4), LENGTHS_Q], ids=["even", "uneven"])
def test_gradient_of_sinks_with_pages(lengths_q: tuple[int, ...]) -> None:
    """Pages that could be read in place are copied if the sinks alone require a gradient."""
    q, k, v = packed(torch.float32, lengths_q, LENGTHS_K)
    table = torch.randperm(9).view(3, 3).int()
    k_pages, v_pages = (in_pages(x, LENGTHS_K, 16, table) for x in (k, v))
    offsets = starts(lengths_q), starts(LENGTHS_K), max(lengths_q), max(LENGTHS_K)

    def call(s_aux: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k_pages, v_pages, *offsets, block_table=table, s_aux=s_aux)

    def expected(s_aux: Tensor) -> Tensor:
        q_, k_, v_ = (x.to(s_aux.dtype) for x in (q, k, v))
        return by_sequence(q_, k_, v_, lengths_q, LENGTHS_K, s_aux=s_aux)

    assert_agrees(call, expected, (OPTIONS["sinks"]["s_aux"],))
