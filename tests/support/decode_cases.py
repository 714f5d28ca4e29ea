"""Table of cases of `attention_decode`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tests.support.attention import AttentionCase, Index, Inputs, Kind, Relative, dead_rows
from tests.support.case import UNREAD_INT8, Device
from tests.support.masks import CAUSAL_END, Constraints, KeyRange, Sizes, Window, visible_by
from tests.support.oracle import Part
from transformer_kernels.functional.decode import attention_decode
from transformer_kernels.functional.kv_cache import quantize_cache


@dataclass(frozen=True, kw_only=True, repr=False)
class DecodeCase(AttentionCase):
    """One call of `attention_decode`. `mask` None shows what a bottom-right causal mask shows."""

    cache_seqlens: tuple[int, ...] = (131, 0, 1, 64, 67)
    N: int = 140
    """minimum capacity of the cache, in positions"""
    M: int = 1
    page_size: int = 0
    """0 = contiguous cache"""
    index: Index = "int64"
    int8: bool = False
    """True for int8 caches with scales"""
    requires_grad: tuple[str, ...] | None = ()

    operator: ClassVar[Any] = attention_decode

    @property
    def sizes(self) -> Sizes:
        return Sizes(len(self.cache_seqlens), self.H_q, self.M, self.N)

    def shape(self, of: Literal["q", "k"], heads: int, width: int) -> tuple[int, ...]:
        return len(self.cache_seqlens), heads, self.M if of == "q" else self.N, width

    def inputs(self, dtype: torch.dtype, device: Device = "cpu") -> Inputs:
        x = super().inputs(dtype, device)
        if not self.int8:
            return x
        k, v, *scales = quantize_cache(*(y.detach().nan_to_num(0, 0, 0) for y in (x.k, x.v)))
        rows = {"k": k, "v": v}
        if self.hidden is not None:
            dead = self.dead()[1].to(device)
            rows = {name: x.masked_fill(dead, UNREAD_INT8) for name, x in rows.items()}
            scales = [x.masked_fill(dead[..., 0], float(self.hidden)) for x in scales]
        k_scale, v_scale = scales
        return replace(
            x, k=rows["k"].to(dtype), v=rows["v"].to(dtype), k_scale=k_scale, v_scale=v_scale
        )

    def arguments(self, x: Inputs) -> tuple[Any, ...]:
        index = {"dtype": getattr(torch, self.index), "device": x.q.device}
        lengths = torch.tensor(self.cache_seqlens, **index)
        k, v = (self._cache(t.to(torch.int8) if self.int8 else t) for t in (x.k, x.v))
        if not self.page_size:
            return x.q, k, v, lengths
        return x.q, k, v, lengths, self._table().to(**index)

    def options(self, x: Inputs) -> dict[str, Any]:
        options = {n: o for n, o in super().options(x).items() if n not in ("dropout_p", "seed")}
        for name, scale in (("k_scale", x.k_scale), ("v_scale", x.v_scale)):
            if scale is not None:
                options[name] = self._cache(scale[..., None])[..., 0]
        return options

    def _table(self) -> Tensor:
        return block_table(self.cache_seqlens, self.N, self.page_size, self.generator())

    def _cache(self, rows: Tensor) -> Tensor:
        """Returns rows (B, H_kv, N, width) as the cache of the call."""
        if self.page_size:
            rows = in_pages(rows, self._table(), self.cache_seqlens, self.page_size)
        return self._laid_out(rows) if self.page_size or self.int8 else rows

    def _sequence(self, b: int, M: int, N: int) -> Tensor:
        mask = CAUSAL_END if self.mask is None else self.mask
        return visible_by(mask, Sizes(b + 1, self.H_q, M, N))[b:]

    def parts(self, x: Inputs) -> Iterator[Part]:
        if x.k_scale is not None and x.v_scale is not None:
            k, v = (
                (rows * scale[..., None]).to(x.q.dtype)
                for rows, scale in ((x.k, x.k_scale), (x.v, x.v_scale))
            )
            x = replace(x, k=k, v=v)
        for b, N in enumerate(self.cache_seqlens or (0,)):  # an empty part of no sequences
            q, do = (t[b : b + 1] for t in (x.q, x.do))
            k, v = (t[b : b + 1, :, :N] for t in (x.k, x.v))
            visible = self._sequence(b, self.M, N)[: len(q)]
            yield self._part(x, b, visible, q=q, k=k, v=v, do=do)

    def joined(self, name: str, values: list[Tensor]) -> Tensor:
        return torch.cat(values)

    def dead(self) -> tuple[Tensor, Tensor]:
        B, H_q, M, N = self.sizes
        queries, keys = torch.ones(B, H_q, M).bool(), torch.ones(B, self.H_kv, N).bool()
        for b, length in enumerate(self.cache_seqlens):
            one = dead_rows(self._sequence(b, M, length), self.H_kv)
            queries[b], keys[b, :, :length] = one[0][0], one[1][0]
        return queries[..., None], keys[..., None]


GARBAGE = (-1, -(1 << 31), (1 << 31) - 1)
"""Values of block-table entries that must not be read."""


def block_table(
    cache_seqlens: tuple[int, ...], N: int, page_size: int, generator: torch.Generator
) -> Tensor:
    """Block table (B, pages of N positions) of pages in random order, int64.

    Entries after the last page of a sequence are garbage.
    """
    pages = _page_count(cache_seqlens, page_size)
    order = torch.randperm(pages, generator=generator).tolist()
    columns = -(-N // page_size)
    table = torch.tensor((*GARBAGE, pages), dtype=torch.int64)
    table = table.repeat(len(cache_seqlens), columns)[:, :columns]
    for b, length in enumerate(cache_seqlens):
        for n in range(-(-length // page_size)):
            table[b, n] = order.pop()
    return table.clone()


def in_pages(rows: Tensor, table: Tensor, cache_seqlens: tuple[int, ...], page_size: int) -> Tensor:
    """Returns rows (B, H_kv, N, width) as pages (pages, H_kv, page_size, width), with NaN (or
    `UNREAD_INT8`) in rows that no position uses."""
    pages = _page_count(cache_seqlens, page_size)
    unread = math.nan if rows.is_floating_point() else UNREAD_INT8
    cache = rows.new_full((pages, rows.shape[1], page_size, rows.shape[3]), unread)
    for b, length in enumerate(cache_seqlens):
        for j0 in range(0, length, page_size):
            part = rows[b, :, j0 : min(j0 + page_size, length)]
            cache[table[b, j0 // page_size], :, : part.shape[1]] = part
    return cache


def _page_count(cache_seqlens: tuple[int, ...], page_size: int) -> int:
    """The pages in use, and three that no sequence uses."""
    return sum(-(-length // page_size) for length in cache_seqlens) + 3


def _window(left: int | None, right: int | None) -> Window:
    return Window(left, right, "bottom_right")


def _relative(entries: int, lowest: int, shared: bool = False, kind: Kind = "table") -> Relative:
    return Relative(entries, lowest, "bottom_right", shared, kind)


_EVERYTHING = ()
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
        *(
            DecodeCase(name=f"{pages}group-{group}-queries-{M}", H_q=2 * group, M=M, page_size=size)
            for pages, size in (("", 0), ("pages-", 48))
            for group, M in lanes
        ),
        DecodeCase(name="multi-query", H_q=5, H_kv=1, D=24, D_v=40, M=2),
        DecodeCase(name="pages-multi-query", H_q=5, H_kv=1, D=24, D_v=40, M=2, page_size=32),
        *(
            DecodeCase(name=f"{pages}widths-{D}-{D_v}", D=D, D_v=D_v, page_size=size)
            for pages, size in (("", 0), ("pages-", 16))
            for D, D_v in widths
        ),
        *(
            DecodeCase(name=f"pages-of-{n}", page_size=n, N=3 * n + 2, M=2,
                       cache_seqlens=(n - 1, n, n + 1, 2 * n - 1, 2 * n + 1, 3 * n, 0))
            for n in (1, 7, 16, 24, 32, 48, 64, 100, 128, 256)
        ),
    ]  # fmt: skip


def _options() -> list[DecodeCase]:
    masks: dict[str, Constraints] = {
        "all": _EVERYTHING,
        "window": _window(40, 0),
        "window-ahead": _window(30, 3),
        "window-behind": _window(90, -5),
        "window-past": _window(None, -66),
        "windows": (_window(80, None), CAUSAL_END),
    }
    return [
        *(
            DecodeCase(name=f"{pages}mask-{name}", M=5, mask=mask, page_size=size)
            for pages, size in (("", 0), ("pages-", 32))
            for name, mask in masks.items()
        ),
        *(
            DecodeCase(name=f"long-window-{size}", cache_seqlens=_LONG, N=1300, M=2, page_size=size,
                       mask=_window(600, 0))
            for size in (0, 16, 40)
        ),
        *_key_ranges(),
        DecodeCase(name="alibi", alibi="bottom_right", H_q=8, M=2),
        DecodeCase(name="alibi-by-sequence", alibi="bottom_right", alibi_by_entry=True, H_q=8, M=2),
        DecodeCase(name="alibi-by-sequence-pages", alibi="bottom_right", alibi_by_entry=True, M=30,
                   page_size=16, mask=_window(90, 3)),
        DecodeCase(name="alibi-all", alibi="bottom_right", M=17, mask=_EVERYTHING, page_size=16),
        DecodeCase(name="relative", bias_is_float32=True, relative=_relative(40, 0), H_q=8),
        DecodeCase(name="relative-all", relative=_relative(99, -16), bias_is_float32=True, M=17,
                   mask=_EVERYTHING, page_size=16),
        DecodeCase(name="relative-shared", relative=_relative(300, -20, shared=True), H_q=6, M=5,
                   mask=_window(90, 3)),
        DecodeCase(name="relative-long", relative=_relative(2000, -9), cache_seqlens=_LONG, N=1300,
                   D=32, D_v=32, page_size=64),
        *_relative_keys(),
        DecodeCase(name="softcap", softcap=1.5, scale=0.4),
        DecodeCase(name="scale-negative", scale=-0.2, M=5),
        DecodeCase(name="scale-zero", scale=0.0),
        DecodeCase(name="steep", scale=1.0, cache_seqlens=(1201, 600), N=1201),
        DecodeCase(name="sinks", sinks=True, M=5),
        *(
            DecodeCase(name=f"everything-{size}", H_q=8, M=2, D=24, D_v=17, mask=_window(50, 0),
                       alibi="bottom_right", softcap=2.0, sinks=True, layout="transposed",
                       page_size=size)
            for size in (0, 16, 24)
        ),
        DecodeCase(name="relative-everything", relative=_relative(55, -8), bias_is_float32=True,
                   H_q=8, M=2, D=24, D_v=17, mask=_window(50, 4), alibi="bottom_right", softcap=2.0,
                   sinks=True, layout="transposed", page_size=24),
        *(
            DecodeCase(name=f"{layout}-{size}", H_q=4, M=2, D=32, D_v=24, layout=layout,
                       page_size=size)
            for layout in ("transposed", "strided", "unaligned")
            for size in (0, 16, 64)
        ),
    ]  # fmt: skip


def _key_ranges() -> list[DecodeCase]:
    """Left padding; ranges that are empty, end early or exceed the cache."""
    left = KeyRange(start=(5, 0, 1, 63, 64), end=(131, 0, 1, 64, 67))
    any_ends = KeyRange(start=(-7, 3, 0, 70, -9), end=(200, 9, 1, 10, -2))
    long = KeyRange(start=(700, 512, 0, -5, 3, 64), end=(1200, 513, 0, 100, 1025, 9))
    return [
        DecodeCase(name="left-padding", mask=(CAUSAL_END, left), M=2, H_q=4),
        DecodeCase(name="left-padding-pages", mask=(CAUSAL_END, left), M=5, page_size=24,
                   alibi="bottom_right"),
        DecodeCase(name="left-padding-window", mask=(_window(40, 0), left), M=30),
        DecodeCase(name="key-ranges", mask=any_ends, M=3, sinks=True),
        DecodeCase(name="key-ranges-long", mask=(CAUSAL_END, long), cache_seqlens=_LONG, N=1300,
                   D=32, D_v=32, page_size=64, softcap=2.0),
        DecodeCase(name="key-ranges-packed", mask=(CAUSAL_END, any_ends), M=40, page_size=16),
    ]  # fmt: skip


def _relative_keys() -> list[DecodeCase]:
    keys = functools.partial(_relative, kind="keys")
    return [
        DecodeCase(name="keys", relative=keys(40, 0), H_q=8),
        DecodeCase(name="keys-pages", relative=keys(200, -9), H_q=4, D=41, page_size=48),
        DecodeCase(name="keys-all", relative=keys(99, -16), M=17, mask=_EVERYTHING),
        DecodeCase(name="keys-shared", relative=keys(300, -20, shared=True), H_q=6, M=17,
                   mask=_window(90, 3), page_size=16),
        DecodeCase(name="keys-long", relative=keys(2000, -9), cache_seqlens=_LONG, N=1300,
                   D=32, D_v=32, page_size=64),
        DecodeCase(name="keys-and-table", relative=_relative(9, -4, kind="both"), M=5),
        DecodeCase(name="keys-everything", relative=_relative(55, -8, kind="both"),
                   bias_is_float32=True, H_q=8, M=2, D=24, D_v=17, mask=_window(50, 4),
                   alibi="bottom_right", softcap=2.0, sinks=True, layout="transposed",
                   page_size=24),
        DecodeCase(name="keys-no-queries", relative=keys(7, 0), M=0),
    ]  # fmt: skip


def _int8() -> list[DecodeCase]:
    """Int8 caches."""
    int8 = functools.partial(DecodeCase, int8=True)
    lanes = ((1, 1), (4, 1), (5, 1), (1, 3), (4, 5), (1, 17), (4, 40))
    widths = ((1, 1), (7, 5), (17, 33), (64, 128), (100, 36), (128, 128), (130, 64), (256, 250))
    return [
        int8(name="int8", D=64, D_v=64),
        int8(name="int8-no-room", cache_seqlens=(0, 0), N=0, M=2),
        int8(name="int8-no-sequences", cache_seqlens=(), page_size=16),
        int8(name="int8-no-queries", M=0),
        *(
            int8(name=f"int8-long-{size}", cache_seqlens=_LONG, N=1300, D=64, D_v=64, H_q=8,
                 page_size=size)
            for size in (0, 64)
        ),
        *(
            int8(name=f"int8-group-{group}-queries-{M}-{size}", H_q=2 * group, M=M, page_size=size,
                 D=64, D_v=64)
            for size in (0, 48)
            for group, M in lanes
        ),
        *(int8(name=f"int8-widths-{D}-{D_v}", H_q=6, D=D, D_v=D_v, M=2) for D, D_v in widths),
        *(
            int8(name=f"int8-pages-of-{n}", page_size=n, N=3 * n + 2, M=2, D=64, D_v=128,
                 cache_seqlens=(n - 1, n, n + 1, 2 * n - 1, 2 * n + 1, 3 * n, 0))
            for n in (1, 7, 16, 64)
        ),
        *(
            int8(name=f"int8-{layout}-{size}", H_q=4, D=64, D_v=64, layout=layout, page_size=size)
            for layout in ("transposed", "strided", "unaligned")
            for size in (0, 16)
        ),
        int8(name="int8-all", M=5, mask=_EVERYTHING, page_size=32),
        int8(name="int8-window", M=5, mask=_window(30, 3), D=64, D_v=64, hidden="inf"),
        int8(name="int8-window-behind", M=17, mask=_window(90, -5), page_size=16),
        int8(name="int8-key-ranges", M=3, sinks=True, H_q=8, D=64, D_v=64,
             mask=KeyRange(start=(-7, 3, 0, 70, -9), end=(200, 9, 1, 10, -2))),
        int8(name="int8-left-padding", M=5, page_size=16, alibi="bottom_right", D=64, D_v=64,
             mask=(CAUSAL_END, KeyRange(start=(5, 0, 1, 63, 64), end=(131, 0, 1, 64, 67)))),
        int8(name="int8-alibi-by-sequence", alibi="bottom_right", alibi_by_entry=True, H_q=8, M=2),
        int8(name="int8-relative", bias_is_float32=True, relative=_relative(40, 0), H_q=8),
        int8(name="int8-relative-keys", relative=_relative(40, 0, kind="keys"), H_q=8),
        int8(name="int8-softcap", softcap=1.5, scale=0.4, D=64, D_v=64),
        int8(name="int8-scale-negative", scale=-0.2, M=5),
        int8(name="int8-steep", scale=1.0, cache_seqlens=(1201, 600), N=1201, D=64, D_v=64),
        int8(name="int8-large", deviation=100.0, D=64, D_v=64, H_q=8),
        int8(name="int8-everything", H_q=8, M=2, D=24, D_v=17, mask=_window(50, 0),
             alibi="bottom_right", softcap=2.0, sinks=True, layout="transposed", page_size=24),
    ]  # fmt: skip


DECODE_CASES: tuple[DecodeCase, ...] = (*_sizes(), *_options(), *_int8())
