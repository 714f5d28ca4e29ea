"""Test cases of `attention_varlen`, with a per-sequence reference in plain torch."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from tests.support.cancellation import gradient_terms
from tests.support.cases import Inputs, Layout, Relative, lay_out
from tests.support.evaluate import SEED, Expected, Outputs, with_gradients
from tests.support.plain import plain_attention
from transformer_kernels.functional.varlen import attention_varlen
from transformer_kernels.masks.constraints import Align
from transformer_kernels.masks.mask import Mask
from transformer_kernels.scores import philox
from transformer_kernels.scores.alibi import Alibi
from transformer_kernels.scores.relative import Relative as Distances
from transformer_kernels.scores.relative import RelativeBias, RelativeKeys

LENGTHS = ((67, 67), (0, 3), (5, 131), (3, 0), (0, 0), (64, 64), (1, 70), (33, 20), (2, 2))
"""(M, N) of each sequence. The first two are long enough for several workers each."""


@dataclass(frozen=True, kw_only=True)
class VarlenCase:
    """One call of attention_varlen."""

    name: str
    lengths: tuple[tuple[int, int], ...] = LENGTHS
    trailing: tuple[int, int] = (0, 0)
    """rows of trailing padding in q, and in k and v"""
    bounds: tuple[int, int] | None = None
    """max_seqlen_q and max_seqlen_k; None = the longest lengths"""
    H_q: int = 2
    H_kv: int = 2
    D: int = 16
    D_v: int = 16
    mask: Mask | None = None
    alibi: Align | None = None
    alibi_learns: bool = False
    alibi_by_sequence: bool = False
    """True if sequences have slopes of their own"""
    relative: Relative | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    sinks: bool = False
    dlse: bool = False
    layout: Layout = "contiguous"

    def __str__(self) -> str:
        return self.name

    @property
    def starts(self) -> tuple[list[int], list[int]]:
        """cu_seqlens of q, and of k and v: 0, then the end of each sequence."""
        M, N = zip(*self.lengths, strict=True)
        return list(accumulate(M, initial=0)), list(accumulate(N, initial=0))


def varlen_inputs(
    case: VarlenCase, dtype: torch.dtype, hidden: float, device: torch.device | str = "cpu"
) -> Inputs:
    """Standard normal inputs, the same in every run and on every device.

    `hidden` replaces keys that no query sees, queries that see no key, and trailing padding.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    statistics = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def rows(live: Tensor, heads: int, width: int) -> Tensor:
        x = draw(len(live), heads, width).to(dtype).masked_fill(~live[:, None, None], hidden)
        return lay_out(x[None].to(device), case.layout)[0]

    q_rows, k_rows = _live_rows(case)
    slopes = torch.arange(1, case.H_q + 1, dtype=statistics, device=device) / 16
    if case.alibi_by_sequence:
        slopes = slopes * torch.arange(1, len(case.lengths) + 1, device=device)[:, None]
    return Inputs(
        q=rows(q_rows, case.H_q, case.D).requires_grad_(),
        k=rows(k_rows, case.H_kv, case.D).requires_grad_(),
        v=rows(k_rows, case.H_kv, case.D_v).requires_grad_(),
        do=rows(torch.ones_like(q_rows), case.H_q, case.D_v),
        dlse=draw(case.H_q, len(q_rows)).to(device, statistics) if case.dlse else None,
        bias=None,
        sinks=draw(case.H_q).to(device, statistics).requires_grad_() if case.sinks else None,
        slopes=slopes.requires_grad_(case.alibi_learns),
        **_by_distance(case, draw, dtype, device),
    )


def _by_distance(
    case: VarlenCase,
    draw: Callable[..., Tensor],
    dtype: torch.dtype,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """The table and the keys of the case, as far as it has them."""
    if (relative := case.relative) is None:
        return {}
    shape = (1 if relative.shared else case.H_q, relative.entries)
    drawn = {} if relative.kind == "keys" else {"table": draw(*shape)}
    if relative.kind != "table":
        drawn["keys"] = draw(*shape, case.D)
    return {name: x.to(device, dtype).requires_grad_() for name, x in drawn.items()}


def _live_rows(case: VarlenCase) -> tuple[Tensor, Tensor]:
    """Live rows: bool per row of q, True if it sees a key, and per key, True if it is visible."""
    mask = case.mask or Mask()
    visible = [mask.materialize(1, 1, M, N)[0, 0] for M, N in case.lengths]
    q_trailing, k_trailing = (torch.zeros(count, dtype=torch.bool) for count in case.trailing)
    q_rows = torch.cat([*(one.any(dim=1) for one in visible), q_trailing])
    return q_rows, torch.cat([*(one.any(dim=0) for one in visible), k_trailing])


def varlen_by_backend(case: VarlenCase, x: Inputs, backend: str) -> Outputs:
    """Returns the outputs and gradients of `attention_varlen`."""
    q_starts, k_starts = (torch.tensor(starts, device=x.q.device) for starts in case.starts)
    max_seqlen_q, max_seqlen_k = case.bounds or (None, None)
    o, lse = attention_varlen(
        x.q, x.k, x.v, q_starts, k_starts,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        mask=case.mask,
        bias=_alibi(case, x),
        relative=_relative(case, x),
        scale=case.scale,
        softcap=case.softcap,
        dropout_p=case.dropout_p,
        seed=SEED,
        sinks=x.sinks,
        return_lse=True,
        backend=backend,
    )  # fmt: skip
    return with_gradients(x, o, lse)


def one_by_one(case: VarlenCase, x: Inputs) -> Outputs:
    """Returns the outputs and gradients of `plain_attention`, run per sequence, in x's dtype."""
    o_parts, lse_parts = [], []
    for b, queries, keys, options in _sequences(case, x):
        q, k, v = (_entry(part, rows) for part, rows in ((x.q, queries), (x.k, keys), (x.v, keys)))
        keep_mask: Tensor | None = None
        if case.dropout_p > 0.0:
            sizes = (case.H_q, *case.lengths[b])
            keep_mask = philox.keep_mask(torch.tensor(SEED), b + 1, *sizes, case.dropout_p)[b:]
        o, lse = plain_attention(q, k, v, keep_mask=keep_mask, **options)
        o_parts.append(o[0].transpose(0, 1))
        lse_parts.append(lse[0])
    o_parts.append(x.q.new_zeros(case.trailing[0], case.H_q, case.D_v))
    lse_parts.append(x.q.new_full((case.H_q, case.trailing[0]), -math.inf))
    return with_gradients(x, torch.cat(o_parts), torch.cat(lse_parts, dim=1))


def _terms(case: VarlenCase, x: Inputs, o: Tensor) -> dict[str, float]:
    """Largest `gradient_terms` of the rows of all sequences; those that share a sum are added."""
    rows, shared = {"dq": 0.0, "dk": 0.0}, {"dslopes": 0.0, "dtable": 0.0, "dkeys": 0.0}
    shared |= {"dtable_spread": 0.0, "dtable_stored": 0.0}
    for _, queries, keys, options in _sequences(case, x):
        q, o_b, do = (_entry(part, queries) for part in (x.q, o, x.do))
        k, v = (_entry(part, keys) for part in (x.k, x.v))
        dlse = None if x.dlse is None else x.dlse[None, :, queries]
        terms = gradient_terms(q, k, v, o_b, do, dlse, **options)
        rows = {name: max(value, terms[name]) for name, value in rows.items()}
        shared = {name: value + terms.get(name, 0.0) for name, value in shared.items()}
    return rows | shared


def _sequences(case: VarlenCase, x: Inputs) -> Iterator[tuple[int, slice, slice, dict[str, Any]]]:
    """Yields for each sequence its index, query rows, key rows and `plain_attention` arguments."""
    for b, (queries, keys) in enumerate(zip(*map(pairwise, case.starts), strict=True)):
        options = {
            "visible": None if case.mask is None else case.mask.materialize(1, 1, *case.lengths[b]),
            "bias": _alibi(case, x, b),
            "relative": _relative(case, x),
            "scale": case.scale,
            "softcap": case.softcap,
            "dropout_p": case.dropout_p,
            "sinks": x.sinks,
        }
        yield b, slice(*queries), slice(*keys), options


def _entry(x: Tensor, rows: slice) -> Tensor:
    """Returns rows of (total, H, width) as (1, H, rows, width)."""
    return x[rows].transpose(0, 1)[None]


@functools.cache
def expected(case: VarlenCase, dtype: torch.dtype) -> Expected:
    """Reference values from `one_by_one`; lse of half precision is in float32."""
    x = varlen_inputs(case, dtype, 0.0)
    exact, plain = one_by_one(case, x.to(torch.float64)), one_by_one(case, x)
    if dtype in (torch.float16, torch.bfloat16):
        plain["lse"] = one_by_one(case, x.to(torch.float32))["lse"]
    return Expected(exact, plain, _terms(case, x, exact["o"]))


def assert_varlen_case(
    case: VarlenCase, dtype: torch.dtype, backend: str, device: torch.device | str = "cpu"
) -> None:
    """Asserts the tolerance rule for o, lse and gradients, with NaN in all dead rows."""
    got = varlen_by_backend(case, varlen_inputs(case, dtype, math.nan, device), backend)
    expected(case, dtype).check(got)


def _alibi(case: VarlenCase, x: Inputs, b: int | None = None) -> Alibi | None:
    """The bias of all sequences, or of sequence b."""
    if case.alibi is None or x.slopes is None:
        return None
    has_rows = case.alibi_by_sequence and b is not None
    return Alibi(x.slopes[b] if has_rows else x.slopes, case.alibi)


def _relative(case: VarlenCase, x: Inputs) -> Distances | None:
    if case.relative is None:
        return None
    lowest, align = case.relative.lowest, case.relative.align
    if x.keys is not None:
        return RelativeKeys(x.keys, x.table, lowest, align)
    return None if x.table is None else RelativeBias(x.table, lowest, align)


_CAUSAL, _CAUSAL_END = Mask.causal(), Mask.causal(align="bottom_right")


def _keys(entries: int, lowest: int, align: Align = "top_left", shared: bool = False) -> Relative:
    return Relative(entries, lowest, align, shared, "keys")


VARLEN_CASES: tuple[VarlenCase, ...] = (
    VarlenCase(name="plain", dlse=True),
    VarlenCase(name="behind", trailing=(5, 70), mask=_CAUSAL),
    VarlenCase(name="sinks-behind", trailing=(66, 3), sinks=True),
    VarlenCase(name="causal", mask=_CAUSAL, dlse=True),
    VarlenCase(name="causal-end", mask=_CAUSAL_END, dlse=True),
    VarlenCase(name="window", mask=Mask.window(9, 3)),
    VarlenCase(name="window-end", mask=Mask.window(40, -2, align="bottom_right")),
    VarlenCase(name="windows", mask=Mask.window(9, None) & Mask.window(30, 7) & _CAUSAL),
    VarlenCase(name="alibi", alibi="top_left", mask=_CAUSAL, H_q=4),
    VarlenCase(name="alibi-end", alibi="bottom_right", H_q=4, dlse=True),
    VarlenCase(name="alibi-causal-end", alibi="bottom_right", mask=_CAUSAL_END),
    VarlenCase(
        name="alibi-by-sequence",
        alibi="bottom_right",
        alibi_by_sequence=True,
        mask=_CAUSAL_END,
        H_q=4,
        trailing=(3, 7),
        dlse=True,
    ),
    VarlenCase(
        name="alibi-by-sequence-short",
        alibi="top_left",
        alibi_by_sequence=True,
        lengths=tuple((n % 7, n % 5) for n in range(40)),
        H_q=4,
    ),
    VarlenCase(
        name="alibi-learns",
        alibi="bottom_right",
        alibi_learns=True,
        lengths=((9, 12), (0, 3), (17, 6), (1, 33)),
        mask=_CAUSAL_END,
        H_q=8,
    ),
    VarlenCase(name="relative", relative=Relative(9, -4), dlse=True),
    VarlenCase(name="relative-end", relative=Relative(60, -30, "bottom_right"), dlse=True),
    VarlenCase(
        name="relative-causal-end",
        relative=Relative(300, -140, "bottom_right"),
        mask=_CAUSAL_END,
        H_q=4,
        trailing=(3, 70),
    ),
    VarlenCase(
        name="relative-shared",
        relative=Relative(40, 0, shared=True),
        bounds=(80, 140),
        H_q=4,
        mask=_CAUSAL,
    ),
    VarlenCase(
        name="relative-shared-end",
        relative=Relative(250, -150, "bottom_right", shared=True),
        bounds=(200, 300),
        H_q=6,
    ),
    VarlenCase(
        name="relative-everything",
        relative=Relative(90, -33, "bottom_right"),
        alibi="bottom_right",
        alibi_learns=True,
        bounds=(68, 133),
        mask=Mask.window(50, 6, align="bottom_right"),
        H_q=4,
        softcap=2.0,
        dropout_p=0.2,
        sinks=True,
        dlse=True,
    ),
    VarlenCase(
        name="relative-tokens",
        relative=Relative(99, -9, "bottom_right"),
        lengths=((1, 131), (1, 1), (1, 600), (1, 64)),
        H_q=4,
    ),
    VarlenCase(name="relative-no-queries", relative=Relative(7, 0), lengths=((0, 5), (0, 3))),
    VarlenCase(name="relative-no-rows", relative=Relative(7, 0), lengths=((0, 0), (0, 0))),
    VarlenCase(name="keys", relative=_keys(9, -4), dlse=True),
    VarlenCase(name="keys-end", relative=_keys(60, -30, "bottom_right"), dlse=True, D=41),
    VarlenCase(
        name="keys-causal-end",
        relative=_keys(300, -140, "bottom_right"),
        mask=_CAUSAL_END,
        H_q=4,
        trailing=(3, 70),
    ),
    VarlenCase(
        name="keys-shared",
        relative=_keys(40, 0, shared=True),
        bounds=(80, 140),
        H_q=4,
        mask=_CAUSAL,
    ),
    VarlenCase(
        name="keys-shared-end",
        relative=_keys(250, -150, "bottom_right", shared=True),
        bounds=(200, 300),
        H_q=6,
    ),
    VarlenCase(
        name="keys-everything",
        relative=Relative(90, -33, "bottom_right", kind="both"),
        alibi="bottom_right",
        alibi_learns=True,
        bounds=(68, 133),
        mask=Mask.window(50, 6, align="bottom_right"),
        H_q=4,
        softcap=2.0,
        dropout_p=0.2,
        sinks=True,
        dlse=True,
    ),
    VarlenCase(
        name="keys-and-table",
        relative=Relative(40, -20, shared=True, kind="both"),
        mask=Mask.window(9, 30),
        layout="strided",
        D=24,
    ),
    VarlenCase(
        name="keys-tokens",
        relative=_keys(99, -9, "bottom_right"),
        lengths=((1, 131), (1, 1), (1, 600), (1, 64)),
        H_q=4,
    ),
    VarlenCase(
        name="keys-many-short",
        relative=_keys(7, -3),
        lengths=tuple((n % 7, n % 5) for n in range(40)),
        H_q=4,
    ),
    VarlenCase(name="keys-no-queries", relative=_keys(7, 0), lengths=((0, 5), (0, 3))),
    VarlenCase(name="keys-no-rows", relative=_keys(7, 0), lengths=((0, 0), (0, 0))),
    VarlenCase(name="softcap", softcap=1.5, scale=0.4),
    VarlenCase(name="dropout", dropout_p=0.3, H_q=4, mask=_CAUSAL_END),
    VarlenCase(name="sinks", sinks=True, dlse=True, mask=Mask.window(3, 0)),
    VarlenCase(name="multi-query", H_q=4, H_kv=1, D=24, D_v=33),
    VarlenCase(name="tokens", lengths=((1, 131), (1, 1), (1, 600), (1, 64)), H_q=4),
    VarlenCase(name="many-short", lengths=tuple((n % 7, n % 5) for n in range(40))),
    VarlenCase(name="one", lengths=((130, 130),), mask=_CAUSAL),
    VarlenCase(name="nothing-but-empty", lengths=((0, 0), (0, 0))),
    *(
        VarlenCase(name=f"{layout}", layout=layout, lengths=((33, 67), (70, 5)), H_q=4, D=24)
        for layout in ("transposed", "strided", "unaligned", "expanded")
    ),
)
