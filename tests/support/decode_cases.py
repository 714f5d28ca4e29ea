"""Test cases of `attention_decode`, with a per-sequence reference in plain torch."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tests.support.cases import Layout, Relative, lay_out
from tests.support.evaluate import Expected, Outputs, assert_refused
from tests.support.plain import plain_attention
from transformer_kernels.functional.decode import attention_decode
from transformer_kernels.functional.explain import explain
from transformer_kernels.masks.mask import Mask
from transformer_kernels.scores.alibi import Alibi
from transformer_kernels.scores.relative import Relative as Distances
from transformer_kernels.scores.relative import RelativeBias, RelativeKeys

LENGTHS = (131, 0, 1, 64, 67)

GARBAGE = (-1, -(1 << 31), (1 << 31) - 1)
"""Values of block-table entries that must not be read."""


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """One call of attention_decode."""

    name: str
    cache_seqlens: tuple[int, ...] = LENGTHS
    N: int = 140
    """minimum capacity of the cache, in positions"""
    M: int = 1
    H_q: int = 2
    H_kv: int = 2
    D: int = 16
    D_v: int = 16
    page_size: int = 0
    """0 = contiguous cache"""
    mask: Mask | None = None
    key_ranges: tuple[tuple[int, int], ...] = ()
    """(start, end) of the visible keys of each sequence; empty = all"""
    alibi: bool = False
    alibi_by_sequence: bool = False
    relative: Relative | None = None
    """align is ignored: decoding aligns bottom right"""
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    layout: Layout = "contiguous"

    def __str__(self) -> str:
        return self.name

    @property
    def B(self) -> int:
        return len(self.cache_seqlens)

    def visible(self, b: int) -> Tensor:
        """Mask of sequence b: bool (M, its length), True = visible."""
        mask = Mask.causal(align="bottom_right") if self.mask is None else self.mask
        visible = mask.materialize(1, 1, self.M, self.cache_seqlens[b])[0, 0]
        if self.key_ranges:
            start, end = self.key_ranges[b]
            visible[:, : max(start, 0)] = visible[:, max(end, 0) :] = False
        return visible

    def make_mask(self, device: torch.device | str) -> Mask | None:
        """Returns the argument `mask`."""
        if not self.key_ranges:
            return self.mask
        mask = Mask.causal(align="bottom_right") if self.mask is None else self.mask
        start, end = torch.tensor(self.key_ranges, device=device).unbind(1)
        return mask & Mask.key_range(start, end)


@dataclass(frozen=True)
class DecodeInputs:
    """Tensors of a case. k and v are the contiguous rows from which the caches are built."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    block_table: Tensor | None
    slopes: Tensor
    table: Tensor | None
    keys: Tensor | None
    sinks: Tensor | None


def decode_inputs(
    case: DecodeCase, dtype: torch.dtype, hidden: float, device: torch.device | str = "cpu"
) -> DecodeInputs:
    """Standard normal inputs, the same in every run and on every device.

    `hidden` replaces keys that no query sees, queries that see no key, and unused cache rows.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    statistics = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    live_queries, live_keys = _live_rows(case)
    q = draw(case.B, case.H_q, case.M, case.D).to(dtype)
    q = q.masked_fill(~live_queries[:, None, :, None], hidden)
    k, v = (
        draw(case.B, case.H_kv, case.N, width)
        .to(dtype)
        .masked_fill(~live_keys[:, None, :, None], hidden)
        for width in (case.D, case.D_v)
    )
    table: Tensor | None = None
    caches = [k, v]
    if case.page_size:
        table = block_table(case.cache_seqlens, case.N, case.page_size, generator)
        caches = [in_pages(x, table, case.cache_seqlens, case.page_size, hidden) for x in (k, v)]
    q, k_cache, v_cache = (lay_out(x.to(device), case.layout) for x in (q, *caches))
    return DecodeInputs(
        q=q,
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        cache_seqlens=torch.tensor(case.cache_seqlens, dtype=torch.int64, device=device),
        block_table=None if table is None else table.to(device, torch.int32),
        slopes=_slopes(case, statistics).to(device),
        table=_by_distance(case, draw, "table", dtype, device),
        keys=_by_distance(case, draw, "keys", dtype, device),
        sinks=draw(case.H_q).to(device, statistics) if case.sinks else None,
    )


def _slopes(case: DecodeCase, dtype: torch.dtype) -> Tensor:
    slopes = torch.arange(1, case.H_q + 1, dtype=dtype) / 16
    rows = torch.arange(1, case.B + 1, dtype=dtype)[:, None]
    return slopes * rows if case.alibi_by_sequence else slopes


def _by_distance(
    case: DecodeCase,
    draw: Callable[..., Tensor],
    kind: Literal["table", "keys"],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor | None:
    if case.relative is None or case.relative.kind not in (kind, "both"):
        return None
    shape = (1 if case.relative.shared else case.H_q, case.relative.entries)
    return draw(*shape, *(case.D,) * (kind == "keys")).to(device, dtype)


def _live_rows(case: DecodeCase) -> tuple[Tensor, Tensor]:
    """Live queries, bool (B, M), which see a key, and live keys, bool (B, N), which are visible."""
    queries = torch.zeros(case.B, case.M, dtype=torch.bool)
    keys = torch.zeros(case.B, case.N, dtype=torch.bool)
    for b, length in enumerate(case.cache_seqlens):
        visible = case.visible(b)
        queries[b], keys[b, :length] = visible.any(dim=1), visible.any(dim=0)
    return queries, keys


def block_table(
    cache_seqlens: tuple[int, ...], N: int, page_size: int, generator: torch.Generator
) -> Tensor:
    """Block table (B, pages of N positions) of pages in random order, int64.

    Entries after the last page of a sequence are garbage.
    """
    counts = [-(-length // page_size) for length in cache_seqlens]
    pages = _page_count(cache_seqlens, page_size)
    order = torch.randperm(pages, generator=generator).tolist()
    columns = -(-N // page_size)
    table = torch.tensor((*GARBAGE, pages), dtype=torch.int64)
    table = table.repeat(len(counts), columns)[:, :columns]
    for b, count in enumerate(counts):
        for n in range(count):
            table[b, n] = order.pop()
    return table.clone()


def in_pages(
    rows: Tensor, table: Tensor, cache_seqlens: tuple[int, ...], page_size: int, hidden: float
) -> Tensor:
    """Returns rows (B, H_kv, N, width) as pages (pages, H_kv, page_size, width).

    `hidden` is the value of rows that no position uses.
    """
    pages = _page_count(cache_seqlens, page_size)
    cache = rows.new_full((pages, rows.shape[1], page_size, rows.shape[3]), hidden)
    for b, length in enumerate(cache_seqlens):
        for j0 in range(0, length, page_size):
            part = rows[b, :, j0 : min(j0 + page_size, length)]
            cache[table[b, j0 // page_size], :, : part.shape[1]] = part
    return cache


def _page_count(cache_seqlens: tuple[int, ...], page_size: int) -> int:
    """The pages in use, and three that no sequence uses."""
    return sum(-(-length // page_size) for length in cache_seqlens) + 3


def by_decoding(case: DecodeCase, x: DecodeInputs, backend: str) -> Outputs:
    """Returns the outputs of `attention_decode`."""
    o, lse = attention_decode(
        x.q, x.k_cache, x.v_cache, x.cache_seqlens, x.block_table,
        mask=case.make_mask(x.q.device),
        **_scores(case, x, x.slopes.dtype),
        return_lse=True,
        backend=backend,
    )  # fmt: skip
    return {"o": o, "lse": lse}


def reasons_against(
    case: DecodeCase, backend: str, device: torch.device | str = "cpu"
) -> tuple[str, ...]:
    """Returns the reasons why the backend does not support the case, as `explain` gives them."""
    x = decode_inputs(case, torch.float32, 0.0, device)
    explanation = explain(
        x.q, x.k_cache, x.v_cache, x.cache_seqlens, x.block_table,
        operator=attention_decode,
        mask=case.make_mask(x.q.device),
        **_scores(case, x, x.slopes.dtype),
        backend=backend,
    )  # fmt: skip
    return explanation.reasons[backend]


def one_by_one(case: DecodeCase, x: DecodeInputs, dtype: torch.dtype) -> Outputs:
    """Returns the outputs of `plain_attention`, run per sequence, in `dtype`."""
    o = x.q.new_zeros(case.B, case.H_q, case.M, case.D_v, dtype=dtype)
    lse = x.q.new_zeros(case.B, case.H_q, case.M, dtype=dtype)
    for b, length in enumerate(case.cache_seqlens):
        q, k, v = (t[b : b + 1].to(dtype) for t in (x.q, x.k[:, :, :length], x.v[:, :, :length]))
        o[b : b + 1], lse[b : b + 1] = plain_attention(
            q, k, v, visible=case.visible(b), **_scores(case, x, dtype, b)
        )
    return {"o": o, "lse": lse}


def _scores(
    case: DecodeCase, x: DecodeInputs, dtype: torch.dtype, b: int | None = None
) -> dict[str, Any]:
    """Options of `attention_decode`, or of `plain_attention` of sequence b; slopes, table and keys
    in `dtype`."""
    slopes = x.slopes if b is None or not case.alibi_by_sequence else x.slopes[b]
    return {
        "bias": Alibi(slopes.to(dtype), "bottom_right") if case.alibi else None,
        "relative": _relative(case, x, dtype),
        "scale": case.scale,
        "softcap": case.softcap,
        "sinks": x.sinks,
    }


def _relative(case: DecodeCase, x: DecodeInputs, dtype: torch.dtype) -> Distances | None:
    if case.relative is None:
        return None
    table = None if x.table is None else x.table.to(dtype)
    if x.keys is not None:
        return RelativeKeys(x.keys.to(dtype), table, case.relative.lowest, "bottom_right")
    return None if table is None else RelativeBias(table, case.relative.lowest, "bottom_right")


@functools.cache
def _expected(case: DecodeCase, dtype: torch.dtype) -> Expected:
    """Reference values from `one_by_one`; lse of half precision is in float32."""
    x = decode_inputs(case, dtype, 0.0)
    exact, plain = one_by_one(case, x, torch.float64), one_by_one(case, x, dtype)
    if dtype in (torch.float16, torch.bfloat16):
        plain["lse"] = one_by_one(case, x, torch.float32)["lse"]
    return Expected(exact, plain, terms={})


def assert_decode_case(
    case: DecodeCase, dtype: torch.dtype, backend: str, device: torch.device | str = "cpu"
) -> None:
    """Asserts the tolerance rule for o and lse, with NaN in rows that must not be read.

    A case that the backend does not support must be refused with its reasons.
    """
    x = decode_inputs(case, dtype, math.nan, device)
    if reasons := reasons_against(case, backend, device):
        assert_refused(reasons, lambda: by_decoding(case, x, backend))
        return
    got = by_decoding(case, x, backend)
    _expected(case, dtype).check(got)


def _window(left: int | None, right: int | None) -> Mask:
    return Mask.window(left, right, align="bottom_right")


_EVERYTHING = Mask()
_LONG = (1200, 513, 0, 512, 1030, 64)


def _sizes() -> list[DecodeCase]:
    lanes = ((1, 1), (1, 2), (4, 1), (8, 1), (5, 1), (1, 5), (4, 2), (4, 5), (1, 17), (8, 17))
    widths = ((1, 1), (7, 5), (17, 33), (64, 64), (48, 80), (100, 36), (128, 128), (256, 16))
    return [
        DecodeCase(name="plain"),
        DecodeCase(name="full", cache_seqlens=(140, 140)),
        DecodeCase(name="one-position", cache_seqlens=(1, 0), N=1),
        DecodeCase(name="no-room", cache_seqlens=(0, 0), N=0, M=2),
        DecodeCase(name="no-sequences", cache_seqlens=(), page_size=16),
        DecodeCase(name="no-queries", M=0),
        DecodeCase(name="long", cache_seqlens=_LONG, N=1300, D=32, D_v=32),
        DecodeCase(name="long-pages", cache_seqlens=_LONG, N=1300, D=32, D_v=32, page_size=64),
        *(DecodeCase(name=f"group-{group}-queries-{M}", H_q=2 * group, M=M) for group, M in lanes),
        *(
            DecodeCase(name=f"pages-group-{group}-queries-{M}", H_q=2 * group, M=M, page_size=48)
            for group, M in lanes
        ),
        DecodeCase(name="multi-query", H_q=5, H_kv=1, D=24, D_v=40, M=2),
        DecodeCase(name="pages-multi-query", H_q=5, H_kv=1, D=24, D_v=40, M=2, page_size=32),
        *(DecodeCase(name=f"widths-{D}-{D_v}", D=D, D_v=D_v) for D, D_v in widths),
        *(
            DecodeCase(name=f"pages-widths-{D}-{D_v}", D=D, D_v=D_v, page_size=16)
            for D, D_v in widths
        ),
        *(
            DecodeCase(
                name=f"pages-of-{size}",
                page_size=size,
                N=3 * size + 2,
                M=2,
                cache_seqlens=(size - 1, size, size + 1, 2 * size - 1, 2 * size + 1, 3 * size, 0),
            )
            for size in (1, 7, 16, 24, 32, 48, 64, 100, 128, 256)
        ),
    ]


def _options() -> list[DecodeCase]:
    masks = {
        "all": _EVERYTHING,
        "window": _window(40, 0),
        "window-ahead": _window(30, 3),
        "window-behind": _window(90, -5),
        "window-past": _window(None, -66),
        "windows": _window(80, None) & _window(None, 0),
    }
    return [
        *(DecodeCase(name=f"mask-{name}", M=5, mask=mask) for name, mask in masks.items()),
        *(
            DecodeCase(name=f"pages-mask-{name}", M=5, mask=mask, page_size=32)
            for name, mask in masks.items()
        ),
        *(
            DecodeCase(name=f"long-window-{size}", cache_seqlens=_LONG, N=1300, M=2, page_size=size,
                       mask=_window(600, 0))
            for size in (0, 16, 40)
        ),
        *_key_ranges(),
        DecodeCase(name="alibi", alibi=True, H_q=8, M=2),
        DecodeCase(name="alibi-by-sequence", alibi=True, alibi_by_sequence=True, H_q=8, M=2),
        DecodeCase(name="alibi-by-sequence-pages", alibi=True, alibi_by_sequence=True, M=30,
                   page_size=16, mask=_window(90, 3)),
        DecodeCase(name="alibi-all", alibi=True, M=17, mask=_EVERYTHING, page_size=16),
        DecodeCase(name="relative", relative=Relative(40, 0), H_q=8),
        DecodeCase(name="relative-all", relative=Relative(99, -16), M=17, mask=_EVERYTHING,
                   page_size=16),
        DecodeCase(name="relative-shared", relative=Relative(300, -20, shared=True), H_q=6, M=5,
                   mask=_window(90, 3)),
        DecodeCase(name="relative-long", relative=Relative(2000, -9), cache_seqlens=_LONG, N=1300,
                   D=32, D_v=32, page_size=64),
        *_relative_keys(),
        DecodeCase(name="softcap", softcap=1.5, scale=0.4),
        DecodeCase(name="scale-negative", scale=-0.2, M=5),
        DecodeCase(name="scale-zero", scale=0.0),
        DecodeCase(name="steep", scale=1.0, cache_seqlens=(1201, 600), N=1201),
        DecodeCase(name="sinks", sinks=True, M=5),
        *(
            DecodeCase(name=f"everything-{size}", H_q=8, M=2, D=24, D_v=17, mask=_window(50, 0),
                       alibi=True, softcap=2.0, sinks=True, layout="transposed", page_size=size)
            for size in (0, 16, 24)
        ),
        DecodeCase(name="relative-everything", relative=Relative(55, -8), H_q=8, M=2, D=24, D_v=17,
                   mask=_window(50, 4), alibi=True, softcap=2.0, sinks=True, layout="transposed",
                   page_size=24),
        *(
            DecodeCase(name=f"{layout}-{size}", H_q=4, M=2, D=32, D_v=24, layout=layout,
                       page_size=size)
            for layout in ("transposed", "strided", "unaligned")
            for size in (0, 16, 64)
        ),
    ]  # fmt: skip


def _key_ranges() -> list[DecodeCase]:
    """Left padding; ranges that are empty, end early or exceed the cache."""
    left = ((5, 131), (0, 0), (1, 1), (63, 64), (64, 67))
    any_ends = ((-7, 200), (3, 9), (0, 1), (70, 10), (-9, -2))
    long = ((700, 1200), (512, 513), (0, 0), (-5, 100), (3, 1025), (64, 9))
    return [
        DecodeCase(name="left-padding", key_ranges=left, M=2, H_q=4),
        DecodeCase(name="left-padding-pages", key_ranges=left, M=5, page_size=24, alibi=True),
        DecodeCase(name="left-padding-window", key_ranges=left, M=30, mask=_window(40, 0)),
        DecodeCase(name="key-ranges", key_ranges=any_ends, M=3, mask=_EVERYTHING, sinks=True),
        DecodeCase(name="key-ranges-long", key_ranges=long, cache_seqlens=_LONG, N=1300, D=32,
                   D_v=32, page_size=64, softcap=2.0),
        DecodeCase(name="key-ranges-packed", key_ranges=any_ends, M=40, page_size=16),
    ]  # fmt: skip


def _relative_keys() -> list[DecodeCase]:
    def keys(entries: int, lowest: int, shared: bool = False) -> Relative:
        return Relative(entries, lowest, shared=shared, kind="keys")

    return [
        DecodeCase(name="keys", relative=keys(40, 0), H_q=8),
        DecodeCase(name="keys-pages", relative=keys(200, -9), H_q=4, D=41, page_size=48),
        DecodeCase(name="keys-all", relative=keys(99, -16), M=17, mask=_EVERYTHING),
        DecodeCase(name="keys-shared", relative=keys(300, -20, shared=True), H_q=6, M=17,
                   mask=_window(90, 3), page_size=16),
        DecodeCase(name="keys-long", relative=keys(2000, -9), cache_seqlens=_LONG, N=1300,
                   D=32, D_v=32, page_size=64),
        DecodeCase(name="keys-and-table", relative=Relative(9, -4, kind="both"), M=5),
        DecodeCase(name="keys-everything", relative=Relative(55, -8, kind="both"), H_q=8, M=2,
                   D=24, D_v=17, mask=_window(50, 4), alibi=True, softcap=2.0, sinks=True,
                   layout="transposed", page_size=24),
        DecodeCase(name="keys-no-queries", relative=keys(7, 0), M=0),
    ]  # fmt: skip


DECODE_CASES: tuple[DecodeCase, ...] = (*_sizes(), *_options())
