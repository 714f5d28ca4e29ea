"""Cases of attention: dense calls, packed sequences and decoding from a cache."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tests.support.case import AnyCase, Device, Expected, Layout, Outputs, lay_out
from tests.support.masks import Constraints, PlainValues, Sizes, mask_of
from tests.support.oracle import Bound, Part, Rounding, allowed_errors, gradient_terms
from transformer_kernels.functional.attention import attention
from transformer_kernels.functional.explain import explain
from transformer_kernels.masks.constraints import Align
from transformer_kernels.masks.mask import Mask
from transformer_kernels.problem.types import accumulate_dtype
from transformer_kernels.scores import philox
from transformer_kernels.scores.alibi import Alibi
from transformer_kernels.scores.relative import Relative as Distances
from transformer_kernels.scores.relative import RelativeBias, RelativeKeys

SEED = -1234567890123456789
"""Dropout seed of every case; it uses both words of the Philox key."""

Index = Literal["int64", "int32"]
Hidden = Literal["nan", "inf", "-inf"] | None
Kind = Literal["table", "keys", "both"]


@dataclass(frozen=True, repr=False)
class Relative(PlainValues):
    """A table of `entries` distances from `lowest` on, keys or both, for all heads or shared."""

    entries: int = 1
    lowest: int = 0
    align: Align = "top_left"
    shared: bool = False
    kind: Kind = "table"

    def of(self, table: Tensor | None, keys: Tensor | None) -> Distances:
        """Returns the argument `relative` with these tensors."""
        if keys is not None:
            return RelativeKeys(keys, table, self.lowest, self.align)
        assert table is not None
        return RelativeBias(table, self.lowest, self.align)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tensors of a case in one dtype, those of `Case.requires_grad` as leaves."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    slopes: Tensor | None
    table: Tensor | None
    keys: Tensor | None
    k_scale: Tensor | None = None
    """of an int8 cache (B, H_kv, N): k holds the values of its elements, in q's dtype"""
    v_scale: Tensor | None = None

    def differentiable(self) -> dict[str, Tensor]:
        """Returns the tensors that require grad, by the names of their gradients."""
        named = {f"d{name}": x for name, x in vars(self).items() if not name.startswith("d")}
        return {name: x for name, x in named.items() if x is not None and x.requires_grad}

    def to(self, dtype: torch.dtype) -> Inputs:
        """Returns contiguous copies in another dtype."""
        tensors: dict[str, Any] = {
            name: None if x is None else x.detach().to(dtype).requires_grad_(x.requires_grad)
            for name, x in vars(self).items()
        }
        return Inputs(**tensors)


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionCase(AnyCase):
    """Options that calls of all layouts have."""

    H_q: int = 2
    H_kv: int = 2
    D: int = 16
    D_v: int = 16
    mask: Constraints = None
    hidden: Hidden = "nan"
    """value of keys and values that no query sees, and of queries that see no key"""
    alibi: Align | None = None
    alibi_learns: bool = False
    alibi_by_entry: bool = False
    """True if batch entries, or sequences, have slopes of their own"""
    relative: Relative | None = None
    bias_is_float32: bool = False
    """True if bias and table have another dtype than half-precision inputs"""
    bias_hides: bool = False
    """True if some entries of the bias are -inf, including one whole row, or some of the table"""
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    sinks: bool = False
    return_lse: bool = True
    dlse: bool = False
    requires_grad: tuple[str, ...] | None = None
    """names of the tensors that require grad; None: all, but slopes only if `alibi_learns`"""
    layout: Layout = "contiguous"
    deviation: float = 1.0
    """standard deviation of the scores"""

    operator: ClassVar[Any] = attention

    @property
    @abstractmethod
    def sizes(self) -> Sizes:
        """Those of the mask."""

    @abstractmethod
    def shape(self, of: Literal["q", "k"], heads: int, width: int) -> tuple[int, ...]: ...

    @abstractmethod
    def arguments(self, x: Inputs) -> tuple[Any, ...]:
        """Returns the positional arguments of the operator."""

    @abstractmethod
    def parts(self, x: Inputs) -> Iterator[Part]:
        """Returns the attention of each sequence: views of x."""

    @abstractmethod
    def joined(self, name: str, values: list[Tensor]) -> Tensor:
        """Returns the result of the call from those of its parts."""

    @abstractmethod
    def dead(self) -> tuple[Tensor, Tensor]:
        """Returns the queries that see no key, and the keys that no query sees: bool, of the shapes
        of q and k but for the width, which is 1."""

    def options(self, x: Inputs) -> dict[str, Any]:
        return {
            "mask": self.make_mask(x.q.device),
            "bias": self.bias_of(x),
            "relative": self.relative_of(x),
            "scale": self.scale,
            "softcap": self.softcap,
            "dropout_p": self.dropout_p,
            "seed": SEED,
            "sinks": x.sinks,
            "return_lse": self.return_lse,
        }

    def make_mask(self, device: Device = "cpu") -> Mask | None:
        mask = mask_of(self.mask, self.sizes)
        return None if mask is None else mask.to(device)

    def inputs(self, dtype: torch.dtype, device: Device = "cpu") -> Inputs:
        """Normal inputs, the same in every run and on every device, in the case's layout."""
        generator, statistics = self.generator(), accumulate_dtype(dtype)
        dead_q, dead_k = (None, None) if self.hidden is None else self.dead()

        def draw(*shape: int, to: torch.dtype = dtype, size: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * size).to(to)

        def rows(of: Literal["q", "k"], heads: int, width: int, size: float = 1.0) -> Tensor:
            x = draw(*self.shape(of, heads, width), size=size)
            dead = dead_q if of == "q" else dead_k
            if dead is not None and self.layout != "expanded":
                x = x.masked_fill(dead, float(self.hidden or 0))
            return self._laid_out(x.to(device))

        def leaf(name: str, x: Tensor) -> Tensor:
            wanted = self.alibi_learns or name != "slopes"
            if self.requires_grad is not None:
                wanted = name in self.requires_grad
            return x.to(device).requires_grad_(wanted)

        size = math.sqrt(self.deviation)
        q = leaf("q", rows("q", self.H_q, self.D, size))
        k = leaf("k", rows("k", self.H_kv, self.D, size))
        v = leaf("v", rows("k", self.H_kv, self.D_v))
        do = self._laid_out(draw(*self.shape("q", self.H_q, self.D_v)).to(device))
        dlse = draw(*self._lse_shape, to=statistics).to(device) if self.dlse else None
        of_bias = torch.float32 if self.bias_is_float32 else dtype
        bias = self._draw_bias(functools.partial(draw, to=of_bias))
        sinks = draw(self.H_q, to=statistics) if self.sinks else None
        slopes = None if self.alibi is None else self._slopes(statistics)
        table = keys = None
        if (relative := self.relative) is not None:
            shape = 1 if relative.shared else self.H_q, relative.entries
            if relative.kind != "keys":
                table = draw(*shape, to=of_bias)
                table = table.masked_fill(table > (1.0 if self.bias_hides else math.inf), -math.inf)
            if relative.kind != "table":
                keys = draw(*shape, self.D)
        others = {"bias": bias, "sinks": sinks, "slopes": slopes, "table": table, "keys": keys}
        leaves = {n: None if x is None else leaf(n, x) for n, x in others.items()}
        return Inputs(q=q, k=k, v=v, do=do, dlse=dlse, **leaves)

    def run(self, x: Inputs, backend: str) -> Outputs:
        result = type(self).operator(*self.arguments(x), **self.options(x), backend=backend)
        return with_gradients(x, *(result if self.return_lse else (result,)))

    def reasons(self, backend: str, device: Device = "cpu") -> tuple[str, ...]:
        x = self.inputs(torch.float32, device)
        options = self.options(x) | {"operator": type(self).operator, "backend": backend}
        return explain(*self.arguments(x), **options).reasons[backend]

    def by_plain_torch(self, x: Inputs) -> Outputs:
        """Returns the outputs and gradients of `plain_attention`, in the dtype of the inputs."""
        parts = [part.attention() for part in self.parts(x)]
        o = self.joined("o", [part[0] for part in parts])
        lse = self.joined("lse", [part[1] for part in parts])
        return with_gradients(x, o, lse if self.return_lse else None)

    def expected(self, dtype: torch.dtype) -> Expected:
        return _expected(replace(self, hidden=None), dtype)

    def bounds(self, dtype: torch.dtype) -> dict[str, Bound]:
        x = replace(self, hidden=None).inputs(dtype).to(torch.float64)
        exact = self.by_plain_torch(x)
        allowed = [allowed_errors(part, Rounding.of(dtype)) for part in self.parts(x)]
        return {
            name: Bound(value, self.joined(name, [part[name] for part in allowed]))
            for name, value in exact.items()
        }

    @property
    def _lse_shape(self) -> tuple[int, ...]:
        return self.shape("q", self.H_q, 1)[:-1]

    def _laid_out(self, x: Tensor) -> Tensor:
        return lay_out(x, self.layout)

    def _draw_bias(self, draw: Any) -> Tensor | None:
        return None

    def _slopes(self, dtype: torch.dtype) -> Tensor:
        slopes = torch.arange(1, self.H_q + 1, dtype=dtype) / 16
        if self.alibi_by_entry:
            slopes = slopes * torch.arange(1, self.sizes.B + 1, dtype=dtype)[:, None]
        return slopes

    def bias_of(self, x: Inputs, b: int | None = None) -> Tensor | Alibi | None:
        """The argument `bias`, or that of sequence b alone."""
        if self.alibi is None or x.slopes is None:
            return x.bias
        by_entry = self.alibi_by_entry and b is not None
        return Alibi(x.slopes[b] if by_entry else x.slopes, self.alibi)

    def relative_of(self, x: Inputs) -> Distances | None:
        return None if self.relative is None else self.relative.of(x.table, x.keys)

    def _part(self, x: Inputs, b: int | None, visible: Tensor, **rows: Tensor | None) -> Part:
        keep_mask = None
        if self.dropout_p > 0.0:
            first = (b or 0, 0, 0, 0)
            B, H, M, N = visible.shape
            keep_mask = philox.keep_mask(torch.tensor(SEED), B, H, M, N, self.dropout_p, first)
        tensors: dict[str, Any] = rows
        return Part(
            **tensors,
            visible=visible,
            bias=self.bias_of(x, b),
            relative=self.relative_of(x),
            scale=self.scale,
            softcap=self.softcap,
            keep_mask=keep_mask,
            dropout_p=self.dropout_p,
            sinks=x.sinks,
        )


@functools.cache
def _expected(case: AttentionCase, dtype: torch.dtype) -> Expected:
    """Reference values; lse of half precision is computed in float32."""
    x = case.inputs(dtype)
    exact, plain = case.by_plain_torch(x.to(torch.float64)), case.by_plain_torch(x)
    if dtype in (torch.float16, torch.bfloat16):
        plain["lse"] = case.by_plain_torch(x.to(torch.float32))["lse"]
    terms = gradient_terms(case.parts(x.to(torch.float64))) if x.differentiable() else {}
    return Expected(exact, plain, terms)


def with_gradients(x: Inputs, o: Tensor, lse: Tensor | None = None) -> Outputs:
    """Returns o, lse and the gradients for the cotangents x.do and x.dlse."""
    results = {"o": o} if lse is None else {"o": o, "lse": lse}
    outputs, cotangents = [o], [x.do]
    if x.dlse is not None and lse is not None:
        outputs, cotangents = [o, lse], [x.do, x.dlse.to(lse.dtype)]
    if named := x.differentiable():
        grads = torch.autograd.grad(outputs, list(named.values()), cotangents)
        results |= dict(zip(named, grads, strict=True))
    return {name: value.detach() for name, value in results.items()}


def dead_rows(visible: Tensor, H_kv: int) -> tuple[Tensor, Tensor]:
    """Queries (B, H_q, M) that see no key, and keys (B, H_kv, N) that no query sees."""
    by_heads = visible.any(dim=2).unflatten(1, (H_kv, -1))
    return ~visible.any(dim=3), ~by_heads.any(dim=2)
