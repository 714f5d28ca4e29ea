"""Keys and values in pages, of packed sequences and of a cache: the kernels read them in place, and
give the bits of contiguous keys."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from building.extension import ROOT
from tests.support.backends import DTYPES
from tests.support.decode_cases import block_table, in_pages
from transformer_kernels.dispatch import autograd

QUERIES = (1, 130, 3, 0, 40, 70)
KEYS = (300, 200, 64, 16, 5, 515)
"""One sequence is decoded, one has more queries than a group of blocks; one ends within a page."""
H_q, H_kv = 4, 2
END = tk.Mask.causal(align="bottom_right")
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"mask": END, "softcap": 3.0},
    "window": {"mask": tk.Mask.window(40, 5, align="bottom_right")},
    "alibi": {"mask": END, "bias": tk.alibi(torch.arange(4.0) / 16, align="bottom_right")},
    "dropout": {"dropout_p": 0.4, "seed": 3},
    "keys": {"relative": tk.relative_keys(torch.rand(1, 11, 16), lowest=-5)},
}  # fmt: skip
SIZES = (1, 7, 16, 17, 48, 64, 256)


def starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)])


def paged(rows: Tensor, table: Tensor, page_size: int, *, rows_first: bool) -> Tensor:
    """Pages of packed rows (total_k, H_kv, width), in the memory order of flash_attn if
    `rows_first`; NaN in rows that are not in use."""
    padded = torch.nn.utils.rnn.pad_sequence(rows.split(KEYS), batch_first=True)
    pages = in_pages(padded.transpose(1, 2), table, KEYS, page_size)
    return pages.transpose(1, 2).contiguous().transpose(1, 2) if rows_first else pages


def inputs(dtype: torch.dtype, D: int, D_v: int) -> tuple[Tensor, Tensor, Tensor]:
    widths = ((sum(QUERIES), H_q, D), (sum(KEYS), H_kv, D), (sum(KEYS), H_kv, D_v))
    q, k, v = (torch.randn(size).to(dtype) for size in widths)
    return q, k, v


def assert_pages_equal_rows(
    page_size: int, q: Tensor, k: Tensor, v: Tensor, *, rows_first: bool = False, **options: Any
) -> None:
    table = block_table(KEYS, max(KEYS), page_size, torch.Generator().manual_seed(page_size))
    pages = [paged(x, table, page_size, rows_first=rows_first) for x in (k, v)]
    offsets = starts(QUERIES), starts(KEYS)
    options = {**options, "return_lse": True, "backend": "cpu"}
    got = tk.attention_varlen(q, pages[0], pages[1], *offsets, block_table=table, **options)
    expected = tk.attention_varlen(q, k, v, *offsets, **options)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", SIZES)
def test_options(page_size: int, dtype: torch.dtype, options: str, isa: str) -> None:
    assert_pages_equal_rows(page_size, *inputs(dtype, 16, 24), **OPTIONS[options])


@pytest.mark.exhaustive
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (100, 33), (1, 7)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", SIZES)
def test_widths(
    page_size: int, dtype: torch.dtype, widths: tuple[int, int], rows_first: bool, isa: str
) -> None:
    """Rows of whole tiles are packed from the pages themselves."""
    assert_pages_equal_rows(page_size, *inputs(dtype, *widths), rows_first=rows_first)


@pytest.mark.exhaustive
@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 17, 64])
def test_values_that_amx_cannot_split(
    page_size: int, dtype: torch.dtype, value: float, isa: str
) -> None:
    """The call is repeated without AMX, from the same pages."""
    q, k, v = inputs(dtype, 64, 64)
    v[700, 1, 40] = value
    assert_pages_equal_rows(page_size, q, k, v)


@pytest.mark.exhaustive
@pytest.mark.parametrize("page_size", [1, 16, 17, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_keys_may_hold_nan(dtype: torch.dtype, page_size: int, isa: str) -> None:
    q, k, v = inputs(dtype, 64, 64)
    k[:250], v[:250] = math.nan, math.nan
    assert_pages_equal_rows(page_size, q, k, v, mask=tk.Mask.window(40, 0, align="bottom_right"))
    o = tk.attention_varlen(
        q, k, v, starts(QUERIES), starts(KEYS), mask=tk.Mask.window(40, 0, align="bottom_right")
    )
    assert not o[0].isnan().any()


@pytest.mark.exhaustive
@pytest.mark.parametrize("M", [1, 20, 70, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", SIZES)
def test_caches(page_size: int, dtype: torch.dtype, M: int, isa: str) -> None:
    k, v = torch.randn(2, len(KEYS), H_kv, max(KEYS), 64).to(dtype)
    q, lengths = torch.randn(len(KEYS), H_q, M, 64).to(dtype), torch.tensor(KEYS)
    table = block_table(KEYS, max(KEYS), page_size, torch.Generator().manual_seed(page_size))
    k_pages, v_pages = (in_pages(x, table, KEYS, page_size) for x in (k, v))
    got = tk.attention_decode(q, k_pages, v_pages, lengths, table, backend="cpu")
    assert torch.equal(got, tk.attention_decode(q, k, v, lengths, backend="cpu"))


def test_pages_are_copied_for_gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    q, pages = torch.randn(3, 2, 8), torch.randn(3, 1, 4, 8)
    arguments = pages, pages, torch.tensor([0, 3]), torch.tensor([0, 7])
    options: dict[str, Any] = {"block_table": torch.tensor([[2, 0]]), "backend": "cpu"}

    def refused(*_: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(autograd, "without_pages", refused)
    o = tk.attention_varlen(q, *arguments, **options)
    with pytest.raises(NotImplementedError):
        tk.attention_varlen(q.requires_grad_(), *arguments, **options)
    with torch.no_grad():
        assert torch.equal(tk.attention_varlen(q, *arguments, **options), o)


PEAK = """
import torch, transformer_kernels as tk
from transformer_kernels.bench.memory import peak_extra_bytes
torch.set_num_threads(2)
N, page_size = 1 << 17, 64
rows = torch.zeros(2, N, 1, 64, dtype=torch.bfloat16)
pages = rows.view(2, -1, page_size, 1, 64).transpose(2, 3)
q, ends = torch.zeros(QUERIES, 1, 64, dtype=torch.bfloat16), torch.tensor([0, N])
def peak(k, v, table):
    def call():
        starts = torch.tensor([0, QUERIES])
        return tk.attention_varlen(q, k, v, starts, ends, block_table=table, backend="cpu")
    return peak_extra_bytes(lambda: call) >> 20
print(peak(*pages, torch.randperm(N // page_size)[None]) - peak(*rows, None))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("queries", [1, 70])
def test_no_memory_for_copies(queries: int) -> None:
    """k and v are 16 MiB each. Many queries have them packed, in pages or not."""
    run = subprocess.run(
        [sys.executable, "-c", PEAK.replace("QUERIES", str(queries))],
        check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert int(run.stdout) < 4
