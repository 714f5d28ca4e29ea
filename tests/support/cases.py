"""Tables of cases of `attention`: those that every backend runs in every dtype, and those with NaN
in keys that the mask hides from every query.

Many sizes are just below, at or above 64, a common tile size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from tests.support.attention import AttentionCase, Hidden, Inputs, Relative, dead_rows
from tests.support.case import Device, Layout
from tests.support.masks import (
    CAUSAL,
    CAUSAL_END,
    DOCUMENTS,
    MIXED,
    UNEQUAL,
    Blocks,
    Constraint,
    Dense,
    Intervals,
    Positions,
    Selected,
    Sizes,
    Window,
    key_range,
    padding,
    visible_by,
)
from tests.support.oracle import Part
from transformer_kernels.masks.constraints import Align


@dataclass(frozen=True, kw_only=True, repr=False)
class Case(AttentionCase):
    B: int = 2
    M: int = 67
    N: int = 131
    hidden: Hidden = None
    bias: str | None = None
    """shape of the bias, as in `Sizes.shape`"""

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.B, self.H_q, self.M, self.N)

    def visible(self) -> Tensor:
        """Returns the visible pairs: bool (B, H_q, M, N)."""
        return visible_by(self.mask, self.sizes)

    def shape(self, of: Literal["q", "k"], heads: int, width: int) -> tuple[int, ...]:
        return self.B, heads, self.M if of == "q" else self.N, width

    def arguments(self, x: Inputs) -> tuple[Any, ...]:
        return x.q, x.k, x.v

    def parts(self, x: Inputs) -> Iterator[Part]:
        yield self._part(x, None, self.visible(), q=x.q, k=x.k, v=x.v, do=x.do, dlse=x.dlse)

    def joined(self, name: str, values: list[Tensor]) -> Tensor:
        return values[0]

    def dead(self) -> tuple[Tensor, Tensor]:
        queries, keys = dead_rows(self.visible(), self.H_kv)
        return queries[..., None], keys[..., None]

    def _draw_bias(self, draw: Any) -> Tensor | None:
        if self.bias is None:
            return None
        bias: Tensor = draw(*self.sizes.shape(self.bias))
        if self.bias_hides:
            bias[bias > 1.0] = -math.inf
            if bias.shape[-2] > 3:
                bias[..., 3, :] = -math.inf
        return bias.mT.contiguous().mT if self.layout == "transposed" else bias


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
        Case(name="no-keys-masked", N=0, mask=CAUSAL, bias="bhmn", sinks=True),
        Case(name="no-batch", B=0, mask=CAUSAL, bias="bhmn"),
        Case(name="nothing", B=0, M=0, N=0),
        *(
            Case(name=f"width-{D}", B=1, H_q=1, H_kv=1, M=13, N=67, D=D, D_v=D, mask=CAUSAL)
            for D in _WIDTHS
        ),
        Case(name="gqa", H_q=6, H_kv=2, M=37, N=71),
        Case(name="mqa", H_q=5, H_kv=1, M=37, N=71, mask=CAUSAL_END),
        Case(name="mqa-blocks-by-head", H_q=3, H_kv=1, M=37, N=131, mask=Blocks(16, by_head=True)),
        Case(name="mqa-blocks-few-queries", H_q=3, H_kv=1, M=20, N=131,
             mask=Blocks(9, by_head=True)),
        Case(name="gqa-everything", H_q=4, H_kv=2, M=37, N=71, mask=(CAUSAL, padding(71)),
             bias="1hmn", softcap=2.0, dropout_p=0.2, sinks=True, dlse=True),
    ]  # fmt: skip


def _few_queries() -> list[Case]:
    """Calls of the decode kernels without a cache."""
    return [
        Case(name="few-queries", H_q=4, H_kv=2, M=3, N=1100, D=24, D_v=40, dlse=True),
        Case(name="few-queries-one", B=4, M=1, N=1024, mask=padding(1024), hidden="nan"),
        Case(name="few-queries-causal", M=16, N=1030, mask=CAUSAL, hidden="inf", dlse=True),
        Case(name="few-queries-options", relative=Relative(50, -9, "bottom_right"),
             H_q=6, H_kv=2, M=5, N=1100, mask=(Window(900, 40, "bottom_right"), key_range(1100)),
             alibi="bottom_right", softcap=2.0, sinks=True, hidden="nan", dlse=True),
        *(
            Case(name=f"few-queries-{layout}", M=2, N=1100, D=17, D_v=9, H_q=4, H_kv=2,
                 layout=layout, mask=CAUSAL_END)
            for layout in ("strided", "unaligned", "expanded")
        ),
    ]  # fmt: skip


def _masks() -> list[Case]:
    return [
        Case(name="causal", M=131, N=131, mask=CAUSAL, dlse=True),
        Case(name="causal-short", M=67, N=131, mask=CAUSAL),
        Case(name="causal-long", M=193, N=71, mask=CAUSAL),
        Case(name="causal-bottom-right", M=67, N=131, mask=CAUSAL_END),
        Case(name="causal-empty-rows", M=193, N=71, mask=CAUSAL_END, dlse=True),
        Case(name="causal-decode", M=1, N=131, mask=CAUSAL_END),
        Case(name="window", M=193, N=193, mask=Window(17, 5)),
        Case(name="window-left", M=193, N=193, mask=Window(70, 0)),
        Case(name="window-right", M=131, N=193, mask=Window(None, 66)),
        Case(name="window-of-one", M=131, N=131, mask=Window(0, 0)),
        Case(name="window-behind", M=131, N=131, mask=Window(90, -70)),
        Case(name="window-ahead", M=131, N=131, mask=Window(-3, 9)),
        Case(name="window-bottom-right", M=67, N=193, mask=Window(20, 3, "bottom_right")),
        Case(name="windows-of-both-aligns", mask=(Window(30, 9), Window(70, 3, "bottom_right"))),
        Case(name="window-out-of-sight", M=7, N=7, mask=Window(None, -50)),
        Case(name="window-crossed", M=7, N=7, mask=Window(-3, 1)),
        Case(name="padding", B=4, mask=padding(), dlse=True),
        Case(name="padding-nan", B=4, mask=padding(), hidden="nan", dlse=True),
        Case(name="padding-inf", B=4, mask=padding(), hidden="inf", bias="b1mn"),
        Case(name="key-range", B=4, mask=key_range()),
        Case(name="key-range-nan", B=4, mask=(key_range(), CAUSAL), hidden="nan"),
        Case(name="key-ranges", B=4, mask=(padding(), key_range()), hidden="nan"),
        Case(name="segments", M=131, N=131, mask=DOCUMENTS),
        Case(name="segments-nan", M=131, N=131, mask=(DOCUMENTS, CAUSAL), hidden="nan"),
        Case(name="segments-inf", M=67, N=193, mask=DOCUMENTS, hidden="-inf"),
        Case(name="segments-mixed", M=71, N=131, mask=MIXED),
        Case(name="segments-unequal", M=131, N=193, mask=UNEQUAL, dlse=True),
        Case(name="positions", M=193, N=257, mask=Positions(), dlse=True),
        Case(name="positions-window", M=193, N=193, mask=Positions(70, -3)),
        Case(name="positions-mixed", M=131, N=193, mask=Positions(40, 3, k_order="shuffled")),
        Case(name="positions-heads", M=71, N=131, mask=Positions(None, -1, "bh", "h")),
        Case(name="positions-shared", M=131, N=71, mask=Positions(5, None, "")),
        Case(name="positions-crossed", M=7, N=7, mask=Positions(-3, 1)),
        Case(name="intervals", M=131, N=193, mask=Intervals(), dlse=True),
        Case(name="intervals-outside", M=67, N=131, mask=Intervals("low", False, "bh", "h")),
        Case(name="positions-nan", M=67, N=193, mask=Positions(20, -9), hidden="nan"),
        Case(name="positions-segments", M=131, N=131, hidden="inf",
             mask=(Positions(80, 80, "h", "h"), UNEQUAL, DOCUMENTS, CAUSAL)),
        Case(name="dense", mask=Dense("bhmn"), dlse=True),
        Case(name="dense-batch", mask=Dense("b1mn")),
        Case(name="dense-heads", mask=Dense("hmn")),
        Case(name="dense-shared", mask=Dense("mn")),
        Case(name="dense-keys", mask=Dense("b11n")),
        Case(name="dense-queries", mask=Dense("1hm1")),
        Case(name="dense-both", mask=(Dense("bhmn"), Dense("mn", seed=1))),
        Case(name="dense-transposed", mask=Dense("b1mn", 50, transposed=True)),
        Case(name="blocks-64", M=193, N=193, mask=Blocks(64)),
        Case(name="blocks-heads", M=193, N=131, mask=Blocks(16, by_head=True)),
        Case(name="blocks-odd", M=67, N=71, mask=Blocks(7)),
        Case(name="blocks-large", M=193, N=193, mask=Blocks(100)),
        Case(name="causal-padding", M=131, N=131, mask=(CAUSAL, padding())),
        Case(name="causal-blocks", M=193, N=193, mask=(CAUSAL, Blocks(32))),
        Case(name="all-masks", M=131, N=131, dlse=True, mask=(
            Window(50, 10), key_range(), MIXED, Positions(90, 60), Dense("1hmn"), Blocks(16))),
    ]  # fmt: skip


def _lists() -> list[Case]:
    return [
        Case(name="selected", M=67, N=131, mask=Selected(), dlse=True),
        Case(name="selected-blocks", H_q=4, M=67, N=131, mask=(Selected(9, 7, "bh"), CAUSAL_END),
             hidden="nan"),
        Case(name="selected-twice", M=35, mask=(Selected(90, dims=""), Selected(5, 32, "h")),
             bias="bhmn"),
        Case(name="selected-few-queries", M=3, N=331, D=8, mask=Selected(90), softcap=1.5),
    ]  # fmt: skip


def _options() -> list[Case]:
    return [
        *(
            Case(name=f"bias-{dimensions}", M=37, N=71, bias=dimensions, dlse=True)
            for dimensions in ("bhmn", "1hmn", "b1mn", "bh1n", "bhm1", "11mn", "1111", "hmn", "mn")
        ),
        Case(name="bias-tiles", M=131, N=131, bias="1hmn", mask=CAUSAL, dlse=True),
        Case(name="bias-float32", bias="b1mn", bias_is_float32=True),
        Case(name="bias-hides", bias="11mn", bias_hides=True, dlse=True),
        Case(name="bias-transposed", bias="bhmn", layout="transposed"),
        Case(name="softcap", softcap=1.5, dlse=True),
        Case(name="softcap-bias", softcap=0.7, bias="1hmn", mask=CAUSAL),
        Case(name="scale", scale=0.31),
        Case(name="scale-negative", scale=-0.2, mask=CAUSAL),
        Case(name="scale-zero", scale=0.0),
        Case(name="steep", scale=5.0, M=37, N=193),  # lse stays below 128, where its ulp doubles
        Case(name="dropout", dropout_p=0.1, M=131, N=193),
        Case(name="dropout-half", dropout_p=0.5, mask=CAUSAL, dlse=True),
        Case(name="dropout-all", dropout_p=1.0, dlse=True),
        Case(name="dropout-bias", dropout_p=0.3, bias="1hmn"),
        Case(name="dropout-gqa", dropout_p=0.3, H_q=4, H_kv=2, mask=(CAUSAL, padding())),
        Case(name="window-bias", M=197, N=197, bias="1hmn", mask=Window(20, 0)),
        Case(name="window-bias-keys", M=197, N=197, bias="bh1n", mask=Window(20, 0)),
        Case(name="window-alibi", M=197, N=197, alibi="top_left", mask=Window(20, 3)),
        Case(name="window-softcap", M=197, N=197, softcap=1.5, mask=Window(9, 9), dlse=True),
        Case(name="window-dropout", M=197, N=197, dropout_p=0.3, mask=Window(20, 0)),
        Case(name="sinks", sinks=True),
        Case(name="sinks-empty-rows", sinks=True, mask=padding(), dlse=True),
        Case(name="dlse", dlse=True),
    ]


def _distances() -> list[Case]:
    """Biases by distance: ALiBi and tables."""
    end: Align = "bottom_right"
    return [
        Case(name="alibi", alibi="top_left", mask=CAUSAL, M=131),
        Case(name="alibi-bottom-right", alibi="bottom_right", H_q=4),
        Case(name="alibi-of-another-align", alibi="bottom_right", mask=CAUSAL),
        Case(name="alibi-by-entry", alibi="bottom_right", alibi_by_entry=True, B=3, H_q=4,
             dlse=True),
        Case(name="alibi-by-entry-step", alibi="top_left", alibi_by_entry=True, M=3, N=200,
             mask=CAUSAL),
        Case(name="alibi-learns", alibi="bottom_right", alibi_learns=True, mask=CAUSAL, dlse=True),
        Case(name="relative", relative=Relative(9, -4), dlse=True),
        Case(name="relative-all", relative=Relative(197, -130), H_q=4),
        Case(name="relative-wide", relative=Relative(999, -500, end), mask=CAUSAL),
        Case(name="relative-one", relative=Relative(1, 3), M=5, N=9, dlse=True),
        Case(name="relative-hides", relative=Relative(40, -20), bias_hides=True, dlse=True),
        Case(name="relative-hides-rows", relative=Relative(2, 0), bias_hides=True, H_q=4, N=9),
        Case(name="relative-shared", relative=Relative(65, 0, shared=True), B=3, mask=CAUSAL),
        Case(name="relative-empty-rows", relative=Relative(33, -20, end), M=193, N=71,
             mask=(CAUSAL_END, padding(71)), hidden="nan", dlse=True),
        Case(name="relative-blocks", relative=Relative(40, 0), M=193, N=193, mask=Blocks(32)),
        Case(name="relative-one-query", relative=Relative(40, 0, end), M=1, H_q=6,
             mask=CAUSAL_END),
        Case(name="relative-everything", relative=Relative(50, -9, end), H_q=4, H_kv=2, M=37, N=71,
             mask=(CAUSAL, padding(71)), bias="1hmn", softcap=2.0, dropout_p=0.2, sinks=True,
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
        Case(name="keys-wide", relative=keys(999, -500, end), mask=CAUSAL, D=41, D_v=24),
        Case(name="keys-causal", relative=keys(131, 0), M=131, N=131, mask=CAUSAL, D=64, D_v=64),
        Case(name="keys-memory", relative=keys(193, 0, end), M=67, N=193, D=64, D_v=64,
             mask=CAUSAL_END),
        Case(name="keys-tiles", relative=keys(256, -127), M=128, N=128, D=64, D_v=64, B=1),
        Case(name="keys-one", relative=keys(1, 3), M=5, N=9, D=7, D_v=3, dlse=True),
        Case(name="keys-shared", relative=keys(65, 0, shared=True), B=3, H_q=4, mask=CAUSAL),
        Case(name="keys-long", relative=keys(50, -20), B=1, H_q=1, H_kv=1, M=300, N=65, D=33),
        Case(name="keys-window", relative=keys(40, -10), M=193, N=193, mask=Window(20, 5)),
        Case(name="keys-window-behind", relative=keys(99, 0), M=131, N=131, mask=Window(90, -70)),
        Case(name="keys-empty-rows", relative=keys(33, -20, end), M=193, N=71,
             mask=(CAUSAL_END, padding(71)), hidden="nan", dlse=True),
        Case(name="keys-blocks", relative=keys(40, 0), M=193, N=193, mask=Blocks(32)),
        Case(name="keys-segments", relative=keys(40, -20), M=131, N=131, mask=DOCUMENTS,
             hidden="nan"),
        Case(name="keys-dense", relative=keys(300, -150), mask=Dense("bhmn"), dlse=True),
        Case(name="keys-one-query", relative=keys(40, 0, end), M=1, H_q=6,
             mask=CAUSAL_END),
        Case(name="keys-one-key", relative=keys(40, 0), M=131, N=1),
        Case(name="keys-wide-rows", relative=keys(40, -20), M=37, N=71, D=129, D_v=16),
        Case(name="keys-and-table", relative=Relative(40, -20, kind="both"), mask=CAUSAL,
             softcap=1.5, dlse=True),
        Case(name="keys-everything", relative=Relative(50, -9, end, kind="both"), H_q=4, H_kv=2,
             M=37, N=71, D=41, mask=(CAUSAL, padding(71)), bias="1hmn", softcap=2.0, dropout_p=0.2,
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
             mask=CAUSAL if mask == "causal" else None)
        for layout in layouts
        for mask in ("full", "causal")
    ]  # fmt: skip


CASES: tuple[Case, ...] = (
    *_sizes(),
    *_few_queries(),
    *_masks(),
    *_lists(),
    *_options(),
    *_distances(),
    *_relative_keys(),
    *_layouts(),
)

_EMPTY = Window(-2, 1)
_KEYS = Relative(30, -9, "bottom_right", kind="keys")
_KINDS: dict[str, tuple[Constraint, ...]] = {
    "window": (CAUSAL, CAUSAL_END, Window(9, 3), Window(-40, None), _EMPTY),
    "keys": (padding(64), key_range(64)),
    "segments": (DOCUMENTS, MIXED),
    "dense": (Dense("mn"), Dense("b1mn"), Dense("bhmn")),
    "blocks": (Blocks(16), Blocks(7, by_head=True), Blocks(64)),
}
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"softcap": 1.5, "dlse": True},
    {"bias": "bhmn", "dropout_p": 0.3},
    {"alibi": "top_left"},
    {"relative": Relative(9, -4), "dlse": True},
    {"relative": Relative(30, -9, kind="keys"), "softcap": 1.5},
    {"bias": "1h1n"},
)


def _conjunction(seed: int) -> Case:
    """Two to four kinds of constraint at random, with keys that are dead in one key head only."""
    generator = torch.Generator().manual_seed(seed)

    def pick(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    order = torch.randperm(len(_KINDS), generator=generator).tolist()
    names = [list(_KINDS)[n] for n in order[: 2 + pick(3)]]
    constraints = tuple(_KINDS[name][pick(len(_KINDS[name]))] for name in names)
    return Case(
        name=f"{seed}-{'-'.join(names)}", M=(1, 5, 33, 70)[pick(4)], N=(37, 64, 131)[pick(3)],
        H_q=4, D=8, D_v=8, mask=constraints, hidden="nan", **_OPTIONS[pick(len(_OPTIONS))],
    )  # fmt: skip


HIDDEN_CASES = (
    Case(name="crossed-window", M=70, N=131, mask=_EMPTY, hidden="nan"),
    Case(name="crossed-windows", M=131, N=70, mask=(Window(-3, None), CAUSAL), hidden="nan"),
    Case(name="crossed-window-bias", M=70, mask=_EMPTY, bias="bhmn", hidden="nan"),
    Case(name="crossed-window-bias-keys", M=70, mask=_EMPTY, bias="1h1n", hidden="nan"),
    Case(name="crossed-window-keys", M=70, mask=_EMPTY, relative=_KEYS, hidden="nan"),
    Case(name="keys-heads-gqa", H_q=4, N=96, mask=Dense("bhmn"), relative=_KEYS, hidden="nan"),
    Case(name="keys-padding", M=70, mask=(padding(), CAUSAL_END), relative=_KEYS, hidden="nan"),
    Case(name="one-query-crossed-window", M=1, mask=_EMPTY, hidden="nan"),
    Case(name="dense-heads-gqa", B=1, H_q=4, mask=Dense("bhmn"), softcap=1.5, hidden="nan"),
    Case(name="few-queries-dense", M=5, H_q=4, mask=Dense("bhmn"), hidden="nan"),
    Case(name="blocks-heads-gqa", H_q=4, N=96, mask=Blocks(7, by_head=True), hidden="nan"),
    *map(_conjunction, range(12)),
)


def assert_hidden_nan_changes_nothing(
    case: Case, dtype: torch.dtype, backend: str, device: Device = "cpu"
) -> None:
    """Asserts that NaN in dead keys and in fully masked queries changes no bit of any result."""
    clean, x = (one.inputs(dtype, device) for one in (replace(case, hidden=None), case))
    queries, keys = (dead.to(device) for dead in case.dead())
    assert torch.equal(x.k.isnan().any(dim=3, keepdim=True), keys)
    expected, got = case.run(clean, backend), case.run(x, backend)
    for name, value in got.items():
        assert torch.equal(value, expected[name]), name
    for name in ("dk", "dv"):
        assert not got[name].masked_fill(~keys, 0.0).any(), name
    assert not got["o"].masked_fill(~queries, 0.0).any()
