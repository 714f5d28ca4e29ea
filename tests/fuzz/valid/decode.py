"""Valid calls of `attention_decode`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz.valid.base import Valid
from tests.fuzz.valid.draw import LIMITS, lengths, rarely, shared, window
from tests.fuzz.valid.masks import Sizes, Window, visible_by
from tests.fuzz.valid.oracle import Expected, Problem, Rounding, solve
from tests.fuzz.valid.relative import Kind, relative
from tests.support.decode_cases import block_table, in_pages
from transformer_kernels.functional.decode import attention_decode
from transformer_kernels.masks.constraints import Align
from transformer_kernels.masks.mask import Mask


@dataclass(frozen=True, kw_only=True, repr=False)
class Decode(Valid):
    cache_seqlens: tuple[int, ...] = (1,)
    spare: int = 0
    """positions of the cache after the longest sequence; they hold NaN"""
    M: int = 1
    page_size: int | None = None
    index_dtype: Literal["int32", "int64"] = "int32"
    window: Window | None = None
    everything: bool = False
    """True for `Mask()`, which shows every key to every query"""
    key_ranges: tuple[tuple[int, int], ...] = ()
    """start and end of the visible keys of each sequence; empty: all"""
    alibi: bool = False
    return_lse: bool = False

    @property
    def B(self) -> int:
        return len(self.cache_seqlens)

    @property
    def _alibi_align(self) -> Align | None:
        return "bottom_right" if self.alibi else None

    @property
    def capacity(self) -> int:
        return max(self.cache_seqlens) + self.spare

    def results(self) -> dict[str, Tensor]:
        q, k, v = self.qkv((self.B, self.M), (self.B, self.capacity))
        for b, length in enumerate(self.cache_seqlens):
            k[b, :, length:] = v[b, :, length:] = math.nan
            hidden = ~self._in_range(b, self.capacity)
            k[b, :, hidden] = v[b, :, hidden] = math.nan
        table: Tensor | None = None
        if self.page_size is not None:
            generator = torch.Generator().manual_seed(self.seed)
            table = block_table(self.cache_seqlens, self.capacity, self.page_size, generator)
            k, v = (
                in_pages(x, table, self.cache_seqlens, self.page_size, math.nan) for x in (k, v)
            )
        index_dtype = getattr(torch, self.index_dtype)
        seqlens = torch.tensor(self.cache_seqlens, dtype=index_dtype)
        options = self.options() | {
            "mask": self._mask(),
            "bias": self.alibi_bias(self._alibi_align, self.B),
            "relative": self.distances(self.by_distance()),
            "sinks": self.sink_logits() if self.sinks else None,
            "return_lse": self.return_lse,
        }
        table = None if table is None else table.to(index_dtype)
        caches = (self.laid_out(k), self.laid_out(v), seqlens, table)
        result = attention_decode(self.laid_out(q), *caches, **options)
        return dict(zip(("o", "lse"), result, strict=True)) if self.return_lse else {"o": result}

    def expected(self, rounding: Rounding) -> dict[str, Expected]:
        q, k, v = self.qkv((self.B, self.M), (self.B, self.capacity))
        parts = [
            solve(self._sequence(b, q[b], k[b, :, :length], v[b, :, :length]), rounding)
            for b, length in enumerate(self.cache_seqlens)
        ]
        return {
            name: Expected(
                torch.cat([part[name].exact for part in parts]),
                torch.cat([part[name].allowed for part in parts]),
            )
            for name in ("o", "lse")
        }

    def _sequence(self, b: int, q: Tensor, k: Tensor, v: Tensor) -> Problem:
        sizes = Sizes(1, self.H_q, self.M, k.shape[1])
        table = {name: x.double() for name, x in self.by_distance().items()}
        causal = Window(right=0, align="bottom_right")
        constraints = () if self.everything else (self.window or causal,)
        return Problem(
            q=q[None].double(),
            k=k[None].double(),
            v=v[None].double(),
            do=torch.zeros(1, self.H_q, self.M, self.D_v, dtype=torch.float64),
            dlse=torch.zeros(1, self.H_q, self.M, dtype=torch.float64),
            visible=visible_by(constraints, sizes) & self._in_range(b, sizes.N),
            bias=self.dense_alibi(self._alibi_align, sizes.M, sizes.N, self.B, b),
            relative=self.distances(table),
            scale=self.effective_scale,
            softcap=self.softcap,
            sinks=self.sink_logits().double() if self.sinks else None,
        )

    def _in_range(self, b: int, length: int) -> Tensor:
        """bool (length,): the keys of sequence b that its key range shows."""
        j = torch.arange(length)
        if not self.key_ranges:
            return j >= 0
        start, end = self.key_ranges[b]
        return (j >= start) & (j < end)

    def _mask(self) -> Mask | None:
        mask = Mask() if self.everything else None
        if self.window is not None:
            mask = self.window.mask(Sizes(1, 1, 1, 1))
        if not self.key_ranges:
            return mask
        start, end = torch.tensor(self.key_ranges, dtype=getattr(torch, self.index_dtype)).unbind(1)
        return (mask or Mask.causal(align="bottom_right")) & Mask.key_range(start, end)


@st.composite
def decode_calls(draw: st.DrawFn, backend: str) -> Decode:
    limits = LIMITS[backend]
    fields = shared(draw, backend)
    if fields["layout"] == "expanded":
        del fields["layout"]
    longer = st.integers(0, 1500) if backend == "cpu" else lengths(limits, smallest=0)
    length = st.one_of(lengths(limits, smallest=0), longer)
    if draw(st.booleans()):
        fields["page_size"] = draw(st.sampled_from([16, 1, 20, 64]))
    mask = draw(st.sampled_from(["causal", "window", "window", "everything"]))
    if mask == "window":
        fields["window"] = replace(window(draw, limits.length), align="bottom_right")
    if rarely(draw):
        kinds: tuple[Kind, ...] = ("table",) if backend == "cuda" else ("table", "keys", "both")
        fields["relative"] = relative(draw, 40, "bottom_right", kinds)
    cache_seqlens = draw(st.lists(length, min_size=1, max_size=4).map(tuple))
    if rarely(draw):
        bound = st.integers(-3, max(cache_seqlens) + 3)
        fields["key_ranges"] = tuple((draw(bound), draw(bound)) for _ in cache_seqlens)
    fields["alibi"] = rarely(draw)
    fields["alibi_by_sequence"] = fields["alibi"] and draw(st.booleans())
    return Decode(
        cache_seqlens=cache_seqlens,
        spare=draw(st.sampled_from([0, 1, 40])),
        M=draw(st.sampled_from([1, 2, 5, 25])),
        index_dtype=draw(st.sampled_from(["int32", "int64"])),
        everything=mask == "everything",
        return_lse=draw(st.booleans()),
        **fields,
    )
