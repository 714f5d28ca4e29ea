"""`attention_varlen` with a block table equals the call with packed keys and values."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import transformer_kernels as tk
from tests.support.backends import BACKENDS_AND_DTYPES
from tests.support.decode_cases import block_table, in_pages
from tests.support.tiers import crossed
from transformer_kernels.bench.tolerance import assert_same_function

LENGTHS_Q, LENGTHS_K = (3, 0, 20, 1), (70, 5, 33, 0)
H_q, H_kv, D, D_v = 4, 2, 16, 24
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal-dropout": {
        "mask": tk.Mask.causal(align="bottom_right"), "dropout_p": 0.3, "seed": 4, "softcap": 2.0,
    },
    "alibi-sinks": {"bias": tk.alibi(torch.arange(16).view(4, 4) / 16), "sinks": torch.zeros(4)},
    "relative": {"relative": tk.relative_bias(torch.arange(9.0)[None], lowest=-4)},
}  # fmt: skip


def starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)])


class Paged:
    """Packed tensors, and the same keys and values in pages, with NaN in rows not in use."""

    def __init__(
        self, page_size: int, dtype: torch.dtype = torch.float32, *, rows_first: bool = False
    ) -> None:
        self.q = torch.randn(sum(LENGTHS_Q), H_q, D, dtype=dtype)
        self.k = torch.randn(sum(LENGTHS_K), H_kv, D, dtype=dtype)
        self.v = torch.randn(sum(LENGTHS_K), H_kv, D_v, dtype=dtype)
        self.table = block_table(LENGTHS_K, max(LENGTHS_K), page_size, torch.Generator())
        self.pages = []
        for x in (self.k, self.v):
            rows = torch.nn.utils.rnn.pad_sequence(x.split(LENGTHS_K), batch_first=True)
            pages = in_pages(rows.transpose(1, 2), self.table, LENGTHS_K, page_size)
            if rows_first:
                pages = pages.transpose(1, 2).contiguous().transpose(1, 2)
            self.pages.append(pages)

    def attend(self, **options: Any) -> tuple[Tensor, Tensor]:
        """By pages."""
        k, v = self.pages
        o, lse = tk.attention_varlen(
            self.q, k, v, starts(LENGTHS_Q), starts(LENGTHS_K), block_table=self.table,
            **options, return_lse=True,
        )  # fmt: skip
        return o, lse

    def attend_packed(self, **options: Any) -> tuple[Tensor, Tensor]:
        cu_seqlens = starts(LENGTHS_Q), starts(LENGTHS_K)
        o, lse = tk.attention_varlen(
            self.q, self.k, self.v, *cu_seqlens, **options, return_lse=True
        )
        return o, lse


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("options", "backend", "dtype"), crossed(OPTIONS, BACKENDS_AND_DTYPES), ids=str
)
def test_equals_packed_keys(options: str, backend: str, dtype: torch.dtype) -> None:
    x = Paged(16, dtype)
    got = x.attend(**OPTIONS[options], backend=backend)
    assert_same_function(got, x.attend_packed(**OPTIONS[options], backend=backend))


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("page_size", [1, 7, 16, 70, 128])
def test_pages_of_any_size_and_layout(page_size: int, rows_first: bool) -> None:
    x = Paged(page_size, rows_first=rows_first)
    for got, expected in zip(x.attend(), x.attend_packed(), strict=True):
        assert torch.equal(got, expected)


def test_gradients(backend: str) -> None:
    """Rows in use have the gradient of packed keys, the others 0."""
    assert_gradients(Paged(16), 16, backend)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 7, 17, 64, 256])
def test_gradients_of_pages_of_any_size(page_size: int, dtype: torch.dtype) -> None:
    assert_gradients(Paged(page_size, dtype), page_size, "cpu")


def assert_gradients(x: Paged, page_size: int, backend: str) -> None:
    leaves = [x.q, *x.pages]
    for leaf in leaves:
        leaf.requires_grad_()
    o, lse = x.attend(backend=backend)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    dq, *pages = torch.autograd.grad([o, lse], leaves, [do, dlse])
    packed = [x.q, x.k.requires_grad_(), x.v.requires_grad_()]
    expected = torch.autograd.grad(x.attend_packed(backend=backend), packed, [do, dlse])
    assert_same_function(dq, expected[0])
    for got, wanted in zip(pages, expected[1:], strict=True):
        rows = torch.nn.utils.rnn.pad_sequence(wanted.split(LENGTHS_K), batch_first=True)
        in_place = in_pages(rows.transpose(1, 2), x.table, LENGTHS_K, page_size)
        assert_same_function(got, in_place.nan_to_num(0.0))


def test_sequences_may_share_pages() -> None:
    q, pages = torch.randn(9, H_q, D), torch.randn(3, H_kv, 16, D)
    table, ends = torch.tensor([[2, 0], [2, 1]]), torch.tensor([0, 20, 45])
    o = tk.attention_varlen(q, pages, pages, torch.tensor([0, 4, 9]), ends, block_table=table)
    rows = torch.cat([pages[[2, 0]], pages[[2, 1]]]).transpose(1, 2).reshape(2, 32, H_kv, D)
    k = torch.cat([rows[0, :20], rows[1, :25]])
    assert torch.equal(o, tk.attention_varlen(q, k, k, torch.tensor([0, 4, 9]), ends))


def test_a_contiguous_cache_is_one_page_for_each_sequence(backend: str) -> None:
    """Different numbers of new tokens, as in speculative decoding, by one call."""
    k, v = (torch.randn(3, H_kv, 50, width) for width in (D, D_v))
    new, used = (5, 16, 2), (50, 16, 33)
    q = torch.randn(sum(new), H_q, D)
    o = tk.attention_varlen(
        q, k, v, starts(new), starts(used), block_table=torch.arange(3)[:, None],
        mask=tk.Mask.causal(align="bottom_right"), backend=backend,
    )  # fmt: skip
    for b, (found, rows) in enumerate(zip(o.split(new), q.split(new), strict=True)):
        one = (rows.transpose(0, 1)[None], *(x[b : b + 1, :, : used[b]] for x in (k, v)))
        expected = tk.attention(*one, mask=tk.Mask.causal(align="bottom_right"), backend=backend)
        torch.testing.assert_close(found, expected[0].transpose(0, 1))


def test_no_keys() -> None:
    q, pages = torch.randn(3, H_q, D), torch.randn(0, H_kv, 16, D)
    for table in (torch.zeros(1, 2).long(), torch.zeros(1, 0).long()):
        o, lse = tk.attention_varlen(
            q, pages, pages, torch.tensor([0, 3]), torch.tensor([0, 0]), block_table=table,
            return_lse=True,
        )  # fmt: skip
        assert torch.equal(o, torch.zeros_like(q))
        assert torch.equal(lse, torch.full((H_q, 3), -math.inf))


def test_fullgraph() -> None:
    """Lengths are not read: one graph serves all values. Unused pages are not read either."""

    def call(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, table: Tensor) -> Tensor:
        return tk.attention_varlen(
            q, k, v, starts(LENGTHS_Q), ends, max_seqlen_q=20, max_seqlen_k=75, block_table=table,
            mask=tk.Mask.causal(align="bottom_right"),
        )  # fmt: skip

    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(call, fullgraph=True, backend=graphs)
    x = Paged(16)
    for ends in (starts(LENGTHS_K), starts((70, 1, 20, 0))):
        arguments = x.q, *x.pages, ends, x.table
        assert_same_function(fast(*arguments), call(*arguments))
    assert graphs.frame_count == 1


def test_compiled_code_tolerates_missing_pages() -> None:
    """Where it copies pages, it cannot check them. The sequences that have their pages are as they
    should be. The kernels that read pages in place refuse them."""
    x = Paged(16)
    k, v = (pages.nan_to_num(0.0) for pages in x.pages)

    def call(table: Tensor, backend: str = "reference") -> Tensor:
        return tk.attention_varlen(
            x.q, k, v, starts(LENGTHS_Q), starts(LENGTHS_K), max_seqlen_q=20, max_seqlen_k=70,
            block_table=table, backend=backend,
        )  # fmt: skip

    torch.compiler.reset()
    table = x.table.clone()
    table[0] = torch.tensor([-1, 99, -(1 << 31), 7, (1 << 31) - 1])
    o = torch.compile(call, backend="aot_eager")(table)
    assert_same_function(o[3:], call(x.table)[3:])
    with pytest.raises(RuntimeError, match="block_table must hold existing pages"):
        torch.compile(call, backend="aot_eager")(table, "cpu")
    k, v = k[:0], v[:0]
    assert torch.equal(torch.compile(call, backend="aot_eager")(table), torch.zeros_like(o))


@pytest.mark.exhaustive
def test_derivatives_that_kernels_lack() -> None:
    """Of slopes, in forward mode, and of a batch of tables: by copies of the pages."""
    x = Paged(16)
    x.pages = [pages.nan_to_num(0.0) for pages in x.pages]
    tables = torch.stack([x.table, x.table.roll(1, 0)])

    def call(slopes: Tensor, q: Tensor, table: Tensor | None = x.table) -> Tensor:
        k, v = (x.k, x.v) if table is None else x.pages
        o = tk.attention_varlen(
            q, k, v, starts(LENGTHS_Q), starts(LENGTHS_K), max_seqlen_q=20, max_seqlen_k=70,
            block_table=table, bias=tk.alibi(slopes),
        )  # fmt: skip
        return o.square()

    slopes = (torch.arange(4) / 4).requires_grad_()
    torch.compiler.reset()
    (expected,) = torch.autograd.grad(call(slopes, x.q, None).sum(), slopes)
    for one in (call, torch.compile(call, backend="aot_eager")):
        assert_same_function(torch.autograd.grad(one(slopes, x.q).sum(), slopes), (expected,))
    slopes = slopes.detach()
    got, wanted = (
        torch.func.jvp(lambda q, table=table: call(slopes, q, table), (x.q,), (x.q.cos(),))
        for table in (x.table, None)
    )
    assert_same_function(got, wanted)
    batch = torch.vmap(lambda table: call(slopes, x.q, table))(tables)
    assert_same_function(batch[0], call(slopes, x.q))


def test_explain() -> None:
    x = Paged(16)
    explained = tk.explain(
        x.q, *x.pages, starts(LENGTHS_Q), starts(LENGTHS_K), block_table=x.table,
        operator=tk.attention_varlen,
    )  # fmt: skip
    assert explained.chosen == "cpu"
    assert explained.problem.shape.N == 70


def test_autocast() -> None:
    x = Paged(16)
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = x.attend()
    x.q, x.pages = x.q.bfloat16(), [pages.bfloat16() for pages in x.pages]
    assert torch.equal(o, x.attend()[0])
