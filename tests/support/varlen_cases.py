"""Table of cases of `attention_varlen`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tests.support.attention import AttentionCase, Index, Inputs, Relative, dead_rows
from tests.support.case import lay_out
from tests.support.masks import CAUSAL, CAUSAL_END, Sizes, Window, visible_by
from tests.support.oracle import Part
from transformer_kernels.functional.varlen import attention_varlen
from transformer_kernels.masks.constraints import Align

LENGTHS = ((67, 67), (0, 3), (5, 131), (3, 0), (0, 0), (64, 64), (1, 70), (33, 20), (2, 2))
"""(M, N) of each sequence. The first two are long enough for several workers each."""


@dataclass(frozen=True, kw_only=True, repr=False)
class VarlenCase(AttentionCase):
    lengths: tuple[tuple[int, int], ...] = LENGTHS
    """queries and keys of each sequence"""
    trailing: tuple[int, int] = (0, 0)
    """rows of trailing padding in q, and in k and v"""
    max_seqlens: tuple[int, int] | None = None
    """max_seqlen_q and max_seqlen_k"""
    one_cu_seqlens: bool = False
    """True if cu_seqlens_k is not given"""
    index: Index = "int64"

    operator: ClassVar[Any] = attention_varlen

    @property
    def sizes(self) -> Sizes:
        return Sizes(len(self.lengths), self.H_q, 1, 1)

    @property
    def starts(self) -> tuple[list[int], list[int]]:
        """cu_seqlens of q, and of k and v: 0, then the end of each sequence."""
        M, N = zip(*self.lengths, strict=True)
        return list(accumulate(M, initial=0)), list(accumulate(N, initial=0))

    def shape(self, of: Literal["q", "k"], heads: int, width: int) -> tuple[int, ...]:
        which = of == "k"
        return self.starts[which][-1] + self.trailing[which], heads, width

    @property
    def _lse_shape(self) -> tuple[int, ...]:
        return self.H_q, self.shape("q", 1, 1)[0]

    def _laid_out(self, x: Tensor) -> Tensor:
        return lay_out(x[None], self.layout)[0]

    def arguments(self, x: Inputs) -> tuple[Any, ...]:
        starts = (
            torch.tensor(one, dtype=getattr(torch, self.index), device=x.q.device)
            for one in (self.starts[:1] if self.one_cu_seqlens else self.starts)
        )
        return x.q, x.k, x.v, *starts

    def options(self, x: Inputs) -> dict[str, Any]:
        given = zip(("max_seqlen_q", "max_seqlen_k"), self.max_seqlens or (), strict=False)
        return super().options(x) | dict(given)

    def _sequences(self) -> Iterator[tuple[int, Tensor]]:
        """Each sequence and its visible pairs; trailing padding is one more, which sees nothing."""
        for b, (M, N) in enumerate(self.lengths):
            yield b, visible_by(self.mask, Sizes(1, self.H_q, M, N))
        if any(self.trailing):
            yield len(self.lengths), torch.zeros(1, self.H_q, *self.trailing).bool()

    def parts(self, x: Inputs) -> Iterator[Part]:
        ends = (
            pairwise((*n, n[-1] + more)) for n, more in zip(self.starts, self.trailing, strict=True)
        )
        for (b, visible), rows, keys in zip(self._sequences(), *ends, strict=False):
            q, do = (t[slice(*rows)].transpose(0, 1)[None] for t in (x.q, x.do))
            k, v = (t[slice(*keys)].transpose(0, 1)[None] for t in (x.k, x.v))
            dlse = None if x.dlse is None else x.dlse[None, :, slice(*rows)]
            is_padding = b == len(self.lengths)
            part = self._part(x, b - is_padding, visible, q=q, k=k, v=v, do=do, dlse=dlse)
            yield replace(part, sinks=None) if is_padding else part

    def joined(self, name: str, values: list[Tensor]) -> Tensor:
        if name == "lse":
            return torch.cat(values, dim=2)[0]
        if name in ("o", "dq", "dk", "dv"):
            return torch.cat(values, dim=2)[0].transpose(0, 1)
        return torch.stack(values).sum(0)

    def dead(self) -> tuple[Tensor, Tensor]:
        parts = [dead_rows(visible, self.H_kv) for _, visible in self._sequences()]
        queries, keys = (torch.cat(one, dim=2)[0].T[..., None] for one in zip(*parts, strict=True))
        return queries, keys


def _keys(entries: int, lowest: int, align: Align = "top_left", shared: bool = False) -> Relative:
    return Relative(entries, lowest, align, shared, "keys")


_SHORT = tuple((n % 7, n % 5) for n in range(40))
_TOKENS = ((1, 131), (1, 1), (1, 600), (1, 64))
VARLEN_CASES: tuple[VarlenCase, ...] = (
    VarlenCase(name="plain", dlse=True),
    VarlenCase(name="behind", trailing=(5, 70), mask=CAUSAL),
    VarlenCase(name="sinks-behind", trailing=(66, 3), sinks=True),
    VarlenCase(name="causal", mask=CAUSAL, dlse=True),
    VarlenCase(name="causal-end", mask=CAUSAL_END, dlse=True),
    VarlenCase(name="window", mask=Window(9, 3)),
    VarlenCase(name="window-end", mask=Window(40, -2, "bottom_right")),
    VarlenCase(name="windows", mask=(Window(9, None), Window(30, 7), CAUSAL)),
    VarlenCase(name="alibi", alibi="top_left", mask=CAUSAL, H_q=4),
    VarlenCase(name="alibi-end", alibi="bottom_right", H_q=4, dlse=True),
    VarlenCase(name="alibi-causal-end", alibi="bottom_right", mask=CAUSAL_END),
    VarlenCase(name="alibi-by-sequence", alibi="bottom_right", alibi_by_entry=True, mask=CAUSAL_END,
               H_q=4, trailing=(3, 7), dlse=True),
    VarlenCase(name="alibi-by-sequence-short", alibi="top_left", alibi_by_entry=True,
               lengths=_SHORT, H_q=4),
    VarlenCase(name="alibi-learns", alibi="bottom_right", alibi_learns=True,
               lengths=((9, 12), (0, 3), (17, 6), (1, 33)), mask=CAUSAL_END, H_q=8),
    VarlenCase(name="relative", relative=Relative(9, -4), dlse=True),
    VarlenCase(name="relative-end", relative=Relative(60, -30, "bottom_right"), dlse=True),
    VarlenCase(name="relative-causal-end", relative=Relative(300, -140, "bottom_right"),
               mask=CAUSAL_END, H_q=4, trailing=(3, 70)),
    VarlenCase(name="relative-shared", relative=Relative(40, 0, shared=True), max_seqlens=(80, 140),
               H_q=4, mask=CAUSAL),
    VarlenCase(name="relative-shared-end",
               relative=Relative(250, -150, "bottom_right", shared=True), max_seqlens=(200, 300),
               H_q=6),
    VarlenCase(name="relative-everything", relative=Relative(90, -33, "bottom_right"),
               alibi="bottom_right", alibi_learns=True, max_seqlens=(68, 133),
               mask=Window(50, 6, "bottom_right"), H_q=4, softcap=2.0, dropout_p=0.2, sinks=True,
               dlse=True),
    VarlenCase(name="relative-tokens", relative=Relative(99, -9, "bottom_right"),
               lengths=_TOKENS, H_q=4),
    VarlenCase(name="relative-no-queries", relative=Relative(7, 0), lengths=((0, 5), (0, 3))),
    VarlenCase(name="relative-no-rows", relative=Relative(7, 0), lengths=((0, 0), (0, 0))),
    VarlenCase(name="keys", relative=_keys(9, -4), dlse=True),
    VarlenCase(name="keys-end", relative=_keys(60, -30, "bottom_right"), dlse=True, D=41),
    VarlenCase(name="keys-causal-end", relative=_keys(300, -140, "bottom_right"), mask=CAUSAL_END,
               H_q=4, trailing=(3, 70)),
    VarlenCase(name="keys-shared", relative=_keys(40, 0, shared=True), max_seqlens=(80, 140), H_q=4,
               mask=CAUSAL),
    VarlenCase(name="keys-shared-end", relative=_keys(250, -150, "bottom_right", shared=True),
               max_seqlens=(200, 300), H_q=6),
    VarlenCase(name="keys-everything", relative=Relative(90, -33, "bottom_right", kind="both"),
               alibi="bottom_right", alibi_learns=True, max_seqlens=(68, 133),
               mask=Window(50, 6, "bottom_right"), H_q=4, softcap=2.0, dropout_p=0.2, sinks=True,
               dlse=True),
    VarlenCase(name="keys-and-table", relative=Relative(40, -20, shared=True, kind="both"),
               mask=Window(9, 30), layout="strided", D=24),
    VarlenCase(name="keys-tokens", relative=_keys(99, -9, "bottom_right"), H_q=4,
               lengths=_TOKENS),
    VarlenCase(name="keys-many-short", relative=_keys(7, -3), lengths=_SHORT, H_q=4),
    VarlenCase(name="keys-no-queries", relative=_keys(7, 0), lengths=((0, 5), (0, 3))),
    VarlenCase(name="keys-no-rows", relative=_keys(7, 0), lengths=((0, 0), (0, 0))),
    VarlenCase(name="softcap", softcap=1.5, scale=0.4),
    VarlenCase(name="dropout", dropout_p=0.3, H_q=4, mask=CAUSAL_END),
    VarlenCase(name="sinks", sinks=True, dlse=True, mask=Window(3, 0)),
    VarlenCase(name="multi-query", H_q=4, H_kv=1, D=24, D_v=33),
    VarlenCase(name="tokens", lengths=_TOKENS, H_q=4),
    VarlenCase(name="many-short", lengths=_SHORT),
    VarlenCase(name="one-cu-seqlens", lengths=((67, 67), (0, 0), (5, 5)), one_cu_seqlens=True),
    VarlenCase(name="one", lengths=((130, 130),), mask=CAUSAL),
    VarlenCase(name="nothing-but-empty", lengths=((0, 0), (0, 0))),
    *(
        VarlenCase(name=f"{layout}", layout=layout, lengths=((33, 67), (70, 5)), H_q=4, D=24)
        for layout in ("transposed", "strided", "unaligned", "expanded")
    ),
)  # fmt: skip
