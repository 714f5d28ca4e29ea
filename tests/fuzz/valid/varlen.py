"""Valid calls of `attention_varlen`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz.valid.base import SEED, Valid, with_gradients
from tests.fuzz.valid.draw import LIMITS, lengths, shared, window
from tests.fuzz.valid.masks import Sizes, Window, mask_of, visible_by
from tests.fuzz.valid.oracle import Expected, Problem, Rounding, solve
from tests.fuzz.valid.relative import relative
from tests.support.cases import lay_out
from transformer_kernels.functional.varlen import attention_varlen
from transformer_kernels.masks.constraints import Align


@dataclass(frozen=True, kw_only=True, repr=False)
class Varlen(Valid):
    M: tuple[int, ...] = (1,)
    """query lengths"""
    N: tuple[int, ...] | None = None
    """key lengths; None: cu_seqlens_k is not given"""
    trailing: int = 0
    """rows of trailing padding; they hold NaN, as do keys that no query sees"""
    index_dtype: Literal["int32", "int64"] = "int32"
    given_max: bool = False
    window: Window | None = None
    alibi_align: Align | None = None
    dropout_p: float = 0.0
    requires_grad: tuple[Literal["q", "k", "v", "sinks", "table", "keys"], ...] = ()
    return_lse: bool = False

    @property
    def _lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.M, self.M if self.N is None else self.N

    @property
    def _constraints(self) -> tuple[Window, ...]:
        return () if self.window is None else (self.window,)

    def results(self) -> dict[str, Tensor]:
        x = self._inputs(dead=math.nan)
        for name, tensor in x.items():
            tensor.requires_grad_(name in self.requires_grad)
        options = self.options() | {
            "max_seqlen_q": max(self.M) if self.given_max else None,
            "max_seqlen_k": max(self.N) if self.given_max and self.N is not None else None,
            "mask": mask_of(self._constraints, Sizes(1, self.H_q, 1, 1)),
            "bias": self.alibi_bias(self.alibi_align, len(self.M)),
            "relative": self.distances(x),
            "dropout_p": self.dropout_p,
            "seed": SEED if self.dropout_p else None,
            "sinks": x.get("sinks"),
            "return_lse": self.return_lse,
        }
        k_starts = None if self.N is None else self._starts(self.N)
        result = attention_varlen(x["q"], x["k"], x["v"], self._starts(self.M), k_starts, **options)
        return with_gradients(result, x, self._do(), self._dlse())

    def expected(self, rounding: Rounding) -> dict[str, Expected]:
        parts = [solve(problem, rounding) for problem in self._problems()]
        return {
            name: _joined(name, [part[name] for part in parts if name in part]) for name in parts[0]
        }

    def _problems(self) -> Iterator[Problem]:
        """Each sequence, and trailing padding as one more, without visible keys."""
        x = {name: tensor.double() for name, tensor in self._inputs(dead=0.0).items()}
        x |= {"do": self._do().double(), "dlse": self._dlse().double() * self.return_lse}
        q_ends, k_ends = (accumulate((*n, self.trailing), initial=0) for n in self._lengths)
        for b, (rows, keys) in enumerate(zip(pairwise(q_ends), pairwise(k_ends), strict=True)):
            yield self._sequence(b, x, slice(*rows), slice(*keys))

    def _sequence(self, b: int, x: dict[str, Tensor], rows: slice, keys: slice) -> Problem:
        padding = b == len(self.M)
        leaves = {"q": x["q"][rows], "k": x["k"][keys], "v": x["v"][keys]}
        leaves = {
            name: tensor.transpose(0, 1)[None].detach().requires_grad_()
            for name, tensor in leaves.items()
        }
        for name in () if padding else {"sinks", "table", "keys"} & x.keys():
            leaves[name] = x[name].clone().requires_grad_()
        sizes = Sizes(1, self.H_q, leaves["q"].shape[2], leaves["k"].shape[2])
        return Problem(
            q=leaves["q"],
            k=leaves["k"],
            v=leaves["v"],
            do=x["do"][rows].transpose(0, 1)[None],
            dlse=x["dlse"][None, :, rows],
            visible=visible_by(self._constraints, sizes) & (not padding),
            bias=self.dense_alibi(self.alibi_align, sizes.M, sizes.N, len(self.M), b),
            relative=None if padding else self.distances(leaves),
            scale=self.effective_scale,
            softcap=self.softcap,
            dropout=self.dropout_factors(self.dropout_p, *sizes, first_batch=b),
            sinks=leaves.get("sinks"),
            differentiable={f"d{n}": leaves[n] for n in self.requires_grad if n in leaves},
        )

    def _inputs(self, *, dead: float) -> dict[str, Tensor]:
        """q, k, v as (rows, H, width), with `dead` in dead rows, and sinks, table and keys if
        there are such."""
        dead_q, dead_k = self._dead_rows()
        q, k, v = self.qkv((1, len(dead_q)), (1, len(dead_k)))
        rows = {"q": (q, dead_q), "k": (k, dead_k), "v": (v, dead_k)}
        x = {
            name: lay_out(tensor.masked_fill(where[:, None], dead), self.layout)[0].transpose(0, 1)
            for name, (tensor, where) in rows.items()
        }
        return x | self.by_distance() | ({"sinks": self.sink_logits()} if self.sinks else {})

    def _dead_rows(self) -> tuple[Tensor, Tensor]:
        """Queries without a visible key, keys that no query sees, and trailing padding: bool."""
        visible = [
            visible_by(self._constraints, Sizes(1, 1, M, N))[0, 0]
            for M, N in zip(*self._lengths, strict=True)
        ]
        padding = torch.ones(self.trailing, dtype=torch.bool)
        return (
            torch.cat([*(~x.any(1) for x in visible), padding]),
            torch.cat([*(~x.any(0) for x in visible), padding]),
        )

    def _starts(self, lengths: tuple[int, ...]) -> Tensor:
        dtype = getattr(torch, self.index_dtype)
        return torch.tensor(list(accumulate(lengths, initial=0)), dtype=dtype)

    def _do(self) -> Tensor:
        return self.normal("do", sum(self.M) + self.trailing, self.H_q, self.D_v)

    def _dlse(self) -> Tensor:
        return self.normal("dlse", self.H_q, sum(self.M) + self.trailing)


def _joined(name: str, parts: list[Expected]) -> Expected:
    """Packed results: rows (total, H, width), lse (H, total), sums of the other gradients."""
    exact, allowed = [part.exact for part in parts], [part.allowed for part in parts]
    if name in ("dsinks", "dtable", "dkeys"):
        return Expected(torch.stack(exact).sum(0), torch.stack(allowed).sum(0))
    exact_rows, allowed_rows = torch.cat(exact, dim=2)[0], torch.cat(allowed, dim=2)[0]
    if name == "lse":
        return Expected(exact_rows, allowed_rows)
    return Expected(exact_rows.transpose(0, 1), allowed_rows.transpose(0, 1))


@st.composite
def varlen_calls(draw: st.DrawFn, backend: str) -> Varlen:
    limits = LIMITS[backend]
    fields = shared(draw, backend)
    several = st.lists(lengths(limits, smallest=0), min_size=1, max_size=4).map(tuple)
    M = draw(several)
    if draw(st.booleans()):
        fields["N"] = tuple(draw(lengths(limits, smallest=0)) for _ in M)
    align: Align = "top_left"
    if draw(st.booleans()):
        fields["window"] = window(draw, limits.length)
        align = fields["window"].align
    if draw(st.integers(0, 3)) == 3:
        fields["alibi_align"] = align
        fields["alibi_by_sequence"] = draw(st.booleans())
    if draw(st.integers(0, 3)) == 3:
        fields["relative"] = relative(draw, max(M), align)
    if draw(st.integers(0, 3)) == 3:
        fields["dropout_p"] = draw(st.sampled_from([0.3, 0.9, 1.0]))
    names = ("q", "k", "v", *["sinks"] * fields["sinks"])
    names += fields["relative"].names if "relative" in fields else ()
    return Varlen(
        M=M,
        trailing=draw(st.sampled_from([0, 3])),
        index_dtype=draw(st.sampled_from(["int32", "int64"])),
        given_max=draw(st.booleans()),
        requires_grad=draw(st.sampled_from([(), names, ("q",), ("k", "v")])),
        return_lse=draw(st.booleans()),
        **fields,
    )
