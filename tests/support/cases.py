"""Table of attention cases that every backend runs in every dtype.

Many sizes are just below, at or above 64, a common tile size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tests.support.mask_makers import (
    MaskMaker,
    blocks,
    both,
    causal,
    causal_bottom_right,
    dense,
    generator_of,
    key_range,
    mixed_segments,
    padding,
    positions,
    segments,
    shape_of,
    transposed_dense,
    unequal_segments,
    window,
)
from transformer_kernels.masks.constraints import Align
from transformer_kernels.masks.mask import Mask

Layout = Literal["contiguous", "transposed", "strided", "unaligned", "expanded"]


class Relative(NamedTuple):
    """A table of `entries` distances from `lowest` on, keys or both, for all heads or shared."""

    entries: int
    lowest: int
    align: Align = "top_left"
    shared: bool = False
    kind: Literal["table", "keys", "both"] = "table"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of attention: sizes, options and the memory layout of the inputs."""

    name: str
    B: int = 2
    H_q: int = 2
    H_kv: int = 2
    M: int = 67
    N: int = 131
    D: int = 16
    D_v: int = 16
    mask: MaskMaker | None = None
    bias: str | None = None
    """shape of the bias: letters of "bhmn" are sizes, "1" is 1; "b1mn" is (B, 1, M, N)"""
    bias_is_float32: bool = False
    bias_hides: bool = False
    """True if some entries of the bias are -inf, including one whole row, or some of the table"""
    alibi: Align | None = None
    alibi_learns: bool = False
    alibi_by_entry: bool = False
    """True if batch entries have slopes of their own"""
    relative: Relative | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    sinks: bool = False
    dlse: bool = False
    layout: Layout = "contiguous"
    hidden: float = 0.0
    """value of keys and values that no query sees, and of queries that see no key"""

    def __str__(self) -> str:
        return self.name

    def make_mask(self, device: torch.device | str = "cpu") -> Mask | None:
        """Returns the mask of the case on a device."""
        return None if self.mask is None else self.mask(self).to(device)

    def visible(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Returns the materialized mask: bool (B, H_q, M, N), True = visible."""
        mask = self.make_mask(device)
        return None if mask is None else mask.materialize(self.B, self.H_q, self.M, self.N, device)


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case in one dtype; all but do, dlse and most slopes require grad."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    slopes: Tensor | None
    table: Tensor | None = None
    keys: Tensor | None = None

    def differentiable(self) -> dict[str, Tensor]:
        """Returns the tensors that require grad, by the names of their gradients."""
        named = {"dq": self.q, "dk": self.k, "dv": self.v, "dbias": self.bias}
        named |= {"dsinks": self.sinks, "dslopes": self.slopes, "dtable": self.table}
        named["dkeys"] = self.keys
        return {name: x for name, x in named.items() if x is not None and x.requires_grad}

    def to(self, dtype: torch.dtype) -> Inputs:
        """Returns contiguous copies in another dtype."""
        tensors: dict[str, Any] = {
            name: None if x is None else x.detach().to(dtype).requires_grad_(x.requires_grad)
            for name, x in vars(self).items()
        }
        return Inputs(**tensors)


def inputs(case: Case, dtype: torch.dtype, device: torch.device | str = "cpu") -> Inputs:
    """Standard normal inputs, the same in every run and on every device, in the case's layout."""
    generator = generator_of(case.name)
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(to).to(device)

    def leaf(*shape: int) -> Tensor:
        return lay_out(draw(*shape), case.layout).requires_grad_()

    B, H_q, H_kv, M, N = case.B, case.H_q, case.H_kv, case.M, case.N
    return Inputs(
        q=leaf(B, H_q, M, case.D),
        k=leaf(B, H_kv, N, case.D),
        v=leaf(B, H_kv, N, case.D_v),
        do=lay_out(draw(B, H_q, M, case.D_v), case.layout),
        dlse=draw(B, H_q, M, to=accumulate) if case.dlse else None,
        bias=_bias(case, draw, torch.float32 if case.bias_is_float32 else dtype),
        sinks=draw(H_q, to=accumulate).requires_grad_() if case.sinks else None,
        slopes=None if case.alibi is None else _slopes(case, accumulate).to(device),
        table=_table(case, draw),
        keys=_keys(case, draw),
    )


def _slopes(case: Case, dtype: torch.dtype) -> Tensor:
    slopes = torch.arange(1, case.H_q + 1, dtype=dtype) / 16
    if case.alibi_by_entry:
        slopes = slopes * torch.arange(1, case.B + 1, dtype=dtype)[:, None]
    return slopes.requires_grad_(case.alibi_learns)


def _table(case: Case, draw: Callable[..., Tensor]) -> Tensor | None:
    if case.relative is None or case.relative.kind == "keys":
        return None
    table = draw(1 if case.relative.shared else case.H_q, case.relative.entries)
    if case.bias_hides:
        table[table > 1.0] = -math.inf
    return table.requires_grad_()


def _keys(case: Case, draw: Callable[..., Tensor]) -> Tensor | None:
    if case.relative is None or case.relative.kind == "table":
        return None
    shape = (1 if case.relative.shared else case.H_q, case.relative.entries, case.D)
    return draw(*shape).requires_grad_()


def _bias(case: Case, draw: Callable[..., Tensor], dtype: torch.dtype) -> Tensor | None:
    if case.bias is None:
        return None
    bias = draw(*shape_of(case, case.bias), to=dtype)
    if case.bias_hides:
        bias[bias > 1.0] = -math.inf
        bias[..., 3, :] = -math.inf
    return (bias.mT.contiguous().mT if case.layout == "transposed" else bias).requires_grad_()


def lay_out(x: Tensor, layout: Layout) -> Tensor:
    """Returns x in another memory layout ("expanded" repeats the first batch entry and head)."""
    B, H, L, width = x.shape
    match layout:
        case "contiguous":
            return x
        case "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "strided":
            wide = x.new_full((B, H, L, 2 * width), math.nan)
            wide[..., ::2] = x
            return wide[..., ::2]
        case "unaligned":
            wide = x.new_full((B, H, L + 1, width + 1), math.nan)
            wide[:, :, 1:, 1:] = x
            return wide[:, :, 1:, 1:]
        case "expanded":
            return x[:1, :1].expand(B, H, L, width)


def plant(case: Case, clean: Inputs) -> Inputs:
    """Returns the inputs with `case.hidden` in dead keys and values and in fully masked queries."""
    visible = case.visible(clean.q.device)
    if visible is None or case.hidden == 0.0:
        return clean
    seen = visible.any(dim=2).unflatten(1, (case.H_kv, -1)).any(dim=2)  # by heads that share k, v
    dead_keys = ~seen[..., None]
    empty_rows = ~visible.any(dim=3)[..., None]
    planted = {
        name: x.detach().masked_fill(where, case.hidden).requires_grad_()
        for name, x, where in (
            ("q", clean.q, empty_rows),
            ("k", clean.k, dead_keys),
            ("v", clean.v, dead_keys),
        )
    }
    return Inputs(**{**vars(clean), **planted})


_WIDTHS = (1, 2, 3, 7, 8, 15, 31, 33, 64, 65, 80, 96, 127, 128, 129, 255, 256, 257, 511, 512)


def _sizes() -> list[Case]:
    return [
        Case(name="one-of-all", B=1, H_q=1, H_kv=1, M=1, N=1, D=1, D_v=1),
        Case(name="one-query", M=1, N=193, D=24, D_v=24),
        Case(name="one-key", M=131, N=1),
        Case(name="half-a-tile", M=32, N=32),
        Case(name="over-half-a-tile", M=33, N=33),
        Case(name="under-a-tile", M=63, N=63),
        Case(name="a-tile", M=64, N=64, D=64, D_v=64),
        Case(name="over-a-tile", M=65, N=65),
        Case(name="two-tiles", M=128, N=128, D=32, D_v=32),
        Case(name="primes", B=1, H_q=3, H_kv=3, M=193, N=127, D=37, D_v=41),
        Case(name="wide-keys", D=40, D_v=8),
        Case(name="wide-values", D=8, D_v=72),
        Case(name="many-keys", B=1, H_q=1, H_kv=1, M=5, N=1021, D=8, D_v=8),
        Case(name="many-queries", B=1, H_q=1, H_kv=1, M=1021, N=5, D=8, D_v=8),
        Case(name="no-queries", M=0, dlse=True),
        Case(name="no-keys", N=0, dlse=True),
        Case(name="no-keys-masked", N=0, mask=causal, bias="bhmn", sinks=True),
        Case(name="no-batch", B=0, mask=causal, bias="bhmn"),
        Case(name="nothing", B=0, M=0, N=0),
        *(
            Case(name=f"width-{D}", B=1, H_q=1, H_kv=1, M=13, N=67, D=D, D_v=D, mask=causal)
            for D in _WIDTHS
        ),
        Case(name="gqa", H_q=6, H_kv=2, M=37, N=71),
        Case(name="mqa", H_q=5, H_kv=1, M=37, N=71, mask=causal_bottom_right),
        Case(name="mqa-blocks-by-head", H_q=3, H_kv=1, M=37, N=131, mask=blocks(16, heads=3)),
        Case(name="mqa-blocks-few-queries", H_q=3, H_kv=1, M=20, N=131, mask=blocks(9, heads=3)),
        Case(name="gqa-everything", H_q=4, H_kv=2, M=37, N=71, mask=both(causal, padding),
             bias="1hmn", softcap=2.0, dropout_p=0.2, sinks=True, dlse=True),
    ]  # fmt: skip


def _few_queries() -> list[Case]:
    """Calls of the decode kernels without a cache."""
    return [
        Case(name="few-queries", H_q=4, H_kv=2, M=3, N=1100, D=24, D_v=40, dlse=True),
        Case(name="few-queries-one", B=4, M=1, N=1024, mask=padding, hidden=math.nan),
        Case(name="few-queries-causal", M=16, N=1030, mask=causal, hidden=math.inf, dlse=True),
        Case(name="few-queries-options", relative=Relative(50, -9, "bottom_right"),
             H_q=6, H_kv=2, M=5, N=1100, mask=both(window(900, 40, "bottom_right"), key_range),
             alibi="bottom_right", softcap=2.0, sinks=True, hidden=math.nan, dlse=True),
        *(
            Case(name=f"few-queries-{layout}", M=2, N=1100, D=17, D_v=9, H_q=4, H_kv=2,
                 layout=layout, mask=causal_bottom_right)
            for layout in ("strided", "unaligned", "expanded")
        ),
    ]  # fmt: skip


def _masks() -> list[Case]:
    return [
        Case(name="causal", M=131, N=131, mask=causal, dlse=True),
        Case(name="causal-short", M=67, N=131, mask=causal),
        Case(name="causal-long", M=193, N=71, mask=causal),
        Case(name="causal-bottom-right", M=67, N=131, mask=causal_bottom_right),
        Case(name="causal-empty-rows", M=193, N=71, mask=causal_bottom_right, dlse=True),
        Case(name="causal-decode", M=1, N=131, mask=causal_bottom_right),
        Case(name="window", M=193, N=193, mask=window(17, 5)),
        Case(name="window-left", M=193, N=193, mask=window(70, 0)),
        Case(name="window-right", M=131, N=193, mask=window(None, 66)),
        Case(name="window-of-one", M=131, N=131, mask=window(0, 0)),
        Case(name="window-behind", M=131, N=131, mask=window(90, -70)),
        Case(name="window-ahead", M=131, N=131, mask=window(-3, 9)),
        Case(name="window-bottom-right", M=67, N=193, mask=window(20, 3, "bottom_right")),
        Case(name="window-out-of-sight", M=7, N=7, mask=window(None, -50)),
        Case(name="window-crossed", M=7, N=7, mask=window(-3, 1)),
        Case(name="padding", B=4, mask=padding, dlse=True),
        Case(name="padding-nan", B=4, mask=padding, hidden=math.nan, dlse=True),
        Case(name="padding-inf", B=4, mask=padding, hidden=math.inf, bias="b1mn"),
        Case(name="key-range", B=4, mask=key_range),
        Case(name="key-range-nan", B=4, mask=both(key_range, causal), hidden=math.nan),
        Case(name="segments", M=131, N=131, mask=segments),
        Case(name="segments-nan", M=131, N=131, mask=both(segments, causal), hidden=math.nan),
        Case(name="segments-inf", M=67, N=193, mask=segments, hidden=-math.inf),
        Case(name="segments-mixed", M=71, N=131, mask=mixed_segments),
        Case(name="segments-unequal", M=131, N=193, mask=unequal_segments, dlse=True),
        Case(name="positions", M=193, N=257, mask=positions(), dlse=True),
        Case(name="positions-window", M=193, N=193, mask=positions(70, -3)),
        Case(name="positions-mixed", M=131, N=193, mask=positions(40, 3, step=7)),
        Case(name="positions-heads", M=71, N=131, mask=positions(None, -1, "bh")),
        Case(name="positions-shared", M=131, N=71, mask=positions(5, None, "")),
        Case(name="positions-crossed", M=7, N=7, mask=positions(-3, 1)),
        Case(name="positions-nan", M=67, N=193, mask=positions(20, -9), hidden=math.nan),
        Case(name="positions-segments", M=131, N=131, hidden=math.inf, mask=both(
            positions(80, 80, "h"), unequal_segments, segments, causal)),
        Case(name="dense", mask=dense("bhmn"), dlse=True),
        Case(name="dense-batch", mask=dense("b1mn")),
        Case(name="dense-heads", mask=dense("hmn")),
        Case(name="dense-shared", mask=dense("mn")),
        Case(name="dense-keys", mask=dense("b11n")),
        Case(name="dense-queries", mask=dense("1hm1")),
        Case(name="dense-transposed", mask=transposed_dense),
        Case(name="blocks-64", M=193, N=193, mask=blocks(64)),
        Case(name="blocks-heads", M=193, N=131, mask=blocks(16, heads=2)),
        Case(name="blocks-odd", M=67, N=71, mask=blocks(7)),
        Case(name="blocks-large", M=193, N=193, mask=blocks(100)),
        Case(name="causal-padding", M=131, N=131, mask=both(causal, padding)),
        Case(name="causal-blocks", M=193, N=193, mask=both(causal, blocks(32))),
        Case(name="all-masks", M=131, N=131, dlse=True, mask=both(
            window(50, 10), key_range, mixed_segments, positions(90, 60), dense("1hmn"),
            blocks(16))),
    ]  # fmt: skip


def _options() -> list[Case]:
    return [
        *(
            Case(name=f"bias-{dimensions}", M=37, N=71, bias=dimensions, dlse=True)
            for dimensions in ("bhmn", "1hmn", "b1mn", "bh1n", "bhm1", "11mn", "1111", "hmn", "mn")
        ),
        Case(name="bias-tiles", M=131, N=131, bias="1hmn", mask=causal, dlse=True),
        Case(name="bias-float32", bias="b1mn", bias_is_float32=True),
        Case(name="bias-hides", bias="11mn", bias_hides=True, dlse=True),
        Case(name="bias-transposed", bias="bhmn", layout="transposed"),
        Case(name="softcap", softcap=1.5, dlse=True),
        Case(name="softcap-bias", softcap=0.7, bias="1hmn", mask=causal),
        Case(name="scale", scale=0.31),
        Case(name="scale-negative", scale=-0.2, mask=causal),
        Case(name="scale-zero", scale=0.0),
        Case(name="steep", scale=5.0, M=37, N=193),  # lse stays below 128, where its ulp doubles
        Case(name="dropout", dropout_p=0.1, M=131, N=193),
        Case(name="dropout-half", dropout_p=0.5, mask=causal, dlse=True),
        Case(name="dropout-all", dropout_p=1.0, dlse=True),
        Case(name="dropout-bias", dropout_p=0.3, bias="1hmn"),
        Case(name="dropout-gqa", dropout_p=0.3, H_q=4, H_kv=2, mask=both(causal, padding)),
        Case(name="window-bias", M=197, N=197, bias="1hmn", mask=window(20, 0)),
        Case(name="window-bias-keys", M=197, N=197, bias="bh1n", mask=window(20, 0)),
        Case(name="window-alibi", M=197, N=197, alibi="top_left", mask=window(20, 3)),
        Case(name="window-softcap", M=197, N=197, softcap=1.5, mask=window(9, 9), dlse=True),
        Case(name="window-dropout", M=197, N=197, dropout_p=0.3, mask=window(20, 0)),
        Case(name="sinks", sinks=True),
        Case(name="sinks-empty-rows", sinks=True, mask=padding, dlse=True),
        Case(name="dlse", dlse=True),
    ]


def _distances() -> list[Case]:
    """Biases by distance: ALiBi and tables."""
    end: Align = "bottom_right"
    return [
        Case(name="alibi", alibi="top_left", mask=causal, M=131),
        Case(name="alibi-bottom-right", alibi="bottom_right", H_q=4),
        Case(name="alibi-by-entry", alibi="bottom_right", alibi_by_entry=True, B=3, H_q=4,
             dlse=True),
        Case(name="alibi-by-entry-step", alibi="top_left", alibi_by_entry=True, M=3, N=200,
             mask=causal),
        Case(name="alibi-learns", alibi="bottom_right", alibi_learns=True, mask=causal, dlse=True),
        Case(name="relative", relative=Relative(9, -4), dlse=True),
        Case(name="relative-all", relative=Relative(197, -130), H_q=4),
        Case(name="relative-wide", relative=Relative(999, -500, end), mask=causal),
        Case(name="relative-one", relative=Relative(1, 3), M=5, N=9, dlse=True),
        Case(name="relative-hides", relative=Relative(40, -20), bias_hides=True, dlse=True),
        Case(name="relative-hides-rows", relative=Relative(2, 0), bias_hides=True, H_q=4, N=9),
        Case(name="relative-shared", relative=Relative(65, 0, shared=True), B=3, mask=causal),
        Case(name="relative-empty-rows", relative=Relative(33, -20, end), M=193, N=71,
             mask=both(causal_bottom_right, padding), hidden=math.nan, dlse=True),
        Case(name="relative-blocks", relative=Relative(40, 0), M=193, N=193, mask=blocks(32)),
        Case(name="relative-one-query", relative=Relative(40, 0, end), M=1, H_q=6,
             mask=causal_bottom_right),
        Case(name="relative-everything", relative=Relative(50, -9, end), H_q=4, H_kv=2, M=37, N=71,
             mask=both(causal, padding), bias="1hmn", softcap=2.0, dropout_p=0.2, sinks=True,
             dlse=True),
        Case(name="relative-alibi", relative=Relative(7, 0), alibi="bottom_right",
             alibi_learns=True, M=37, N=71),
        Case(name="relative-no-keys", relative=Relative(7, 0), N=0, dlse=True),
    ]  # fmt: skip


def _relative_keys() -> list[Case]:
    end: Align = "bottom_right"

    def keys(
        entries: int, lowest: int, align: Align = "top_left", shared: bool = False
    ) -> Relative:
        return Relative(entries, lowest, align, shared, kind="keys")

    return [
        Case(name="keys", relative=keys(9, -4), dlse=True),
        Case(name="keys-all", relative=keys(197, -130), H_q=4, H_kv=2),
        Case(name="keys-wide", relative=keys(999, -500, end), mask=causal, D=41, D_v=24),
        Case(name="keys-causal", relative=keys(131, 0), M=131, N=131, mask=causal, D=64, D_v=64),
        Case(name="keys-memory", relative=keys(193, 0, end), M=67, N=193, D=64, D_v=64,
             mask=causal_bottom_right),
        Case(name="keys-tiles", relative=keys(256, -127), M=128, N=128, D=64, D_v=64, B=1),
        Case(name="keys-one", relative=keys(1, 3), M=5, N=9, D=7, D_v=3, dlse=True),
        Case(name="keys-shared", relative=keys(65, 0, shared=True), B=3, H_q=4, mask=causal),
        Case(name="keys-long", relative=keys(50, -20), B=1, H_q=1, H_kv=1, M=300, N=65, D=33),
        Case(name="keys-window", relative=keys(40, -10), M=193, N=193, mask=window(20, 5)),
        Case(name="keys-window-behind", relative=keys(99, 0), M=131, N=131, mask=window(90, -70)),
        Case(name="keys-empty-rows", relative=keys(33, -20, end), M=193, N=71,
             mask=both(causal_bottom_right, padding), hidden=math.nan, dlse=True),
        Case(name="keys-blocks", relative=keys(40, 0), M=193, N=193, mask=blocks(32)),
        Case(name="keys-segments", relative=keys(40, -20), M=131, N=131, mask=segments,
             hidden=math.nan),
        Case(name="keys-dense", relative=keys(300, -150), mask=dense("bhmn"), dlse=True),
        Case(name="keys-one-query", relative=keys(40, 0, end), M=1, H_q=6,
             mask=causal_bottom_right),
        Case(name="keys-one-key", relative=keys(40, 0), M=131, N=1),
        Case(name="keys-wide-rows", relative=keys(40, -20), M=37, N=71, D=129, D_v=16),
        Case(name="keys-and-table", relative=Relative(40, -20, kind="both"), mask=causal,
             softcap=1.5, dlse=True),
        Case(name="keys-everything", relative=Relative(50, -9, end, kind="both"), H_q=4, H_kv=2,
             M=37, N=71, D=41, mask=both(causal, padding), bias="1hmn", softcap=2.0, dropout_p=0.2,
             sinks=True, dlse=True),
        Case(name="keys-alibi", relative=keys(7, 0), alibi="bottom_right", M=37, N=71),
        Case(name="keys-strided", relative=keys(60, -20), layout="strided", H_q=4, H_kv=2, D=24),
        Case(name="keys-steep", relative=keys(60, -20), scale=3.0, M=37, N=71),
        Case(name="keys-no-keys", relative=keys(7, 0), N=0, dlse=True),
        Case(name="keys-no-queries", relative=keys(7, 0), M=0, dlse=True),
    ]  # fmt: skip


def _layouts() -> list[Case]:
    layouts: tuple[Layout, ...] = ("transposed", "strided", "unaligned", "expanded")
    return [
        Case(name=f"{layout}-{mask}", M=67, N=131, D=24, D_v=17, H_q=4, H_kv=2, layout=layout,
             mask=causal if mask == "causal" else None)
        for layout in layouts
        for mask in ("full", "causal")
    ]  # fmt: skip


CASES: tuple[Case, ...] = (
    *_sizes(),
    *_few_queries(),
    *_masks(),
    *_options(),
    *_distances(),
    *_relative_keys(),
    *_layouts(),
)
