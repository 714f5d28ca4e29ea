"""Valid calls of `attention`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz.valid.base import SEED, Valid, with_gradients
from tests.fuzz.valid.draw import LIMITS, constraints, lengths, rarely, shared
from tests.fuzz.valid.masks import Constraint, Sizes, mask_of, visible_by
from tests.fuzz.valid.oracle import Expected, Problem, Rounding, solve
from tests.fuzz.valid.relative import relative
from tests.support.cases import lay_out
from transformer_kernels.functional.attention import attention
from transformer_kernels.masks.constraints import Align


@dataclass(frozen=True, kw_only=True, repr=False)
class Attention(Valid):
    B: int = 1
    M: int = 1
    N: int = 1
    mask: tuple[Constraint, ...] = ()
    hidden: bool = False
    """True to put NaN into dead keys and fully masked queries"""
    bias: str | None = None
    """dimensions of "bhmn" that are not 1"""
    bias_is_float32: bool = False
    bias_hides: bool = False
    """True if some entries of the bias are -inf"""
    alibi_align: Align | None = None
    dropout_p: float = 0.0
    requires_grad: tuple[Literal["q", "k", "v", "bias", "sinks", "table", "keys"], ...] = ()
    return_lse: bool = False

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.B, self.H_q, self.M, self.N)

    def results(self) -> dict[str, Tensor]:
        x = self._inputs(hidden=self.hidden)
        for name, tensor in x.items():
            tensor.requires_grad_(name in self.requires_grad)
        options = self.options() | {
            "mask": mask_of(self.mask, self.sizes),
            "bias": self.alibi_bias(self.alibi_align, self.B) or x.get("bias"),
            "relative": self.distances(x),
            "dropout_p": self.dropout_p,
            "seed": SEED if self.dropout_p else None,
            "sinks": x.get("sinks"),
            "return_lse": self.return_lse,
        }
        result = attention(x["q"], x["k"], x["v"], **options)
        return with_gradients(result, x, self._do(), self._dlse())

    def expected(self, rounding: Rounding) -> dict[str, Expected]:
        x = {name: tensor.double() for name, tensor in self._inputs().items()}
        differentiable = {f"d{name}": x[name].requires_grad_() for name in self.requires_grad}
        alibi = self.dense_alibi(self.alibi_align, self.M, self.N, self.B)
        problem = Problem(
            q=x["q"],
            k=x["k"],
            v=x["v"],
            do=self._do().double(),
            dlse=self._dlse().double() * self.return_lse,
            visible=visible_by(self.mask, self.sizes),
            bias=x.get("bias") if alibi is None else alibi,
            relative=self.distances(x),
            scale=self.effective_scale,
            softcap=self.softcap,
            dropout=self.dropout_factors(self.dropout_p, *self.sizes),
            sinks=x.get("sinks"),
            differentiable=differentiable,
        )
        return solve(problem, rounding)

    def _inputs(self, *, hidden: bool = False) -> dict[str, Tensor]:
        """q, k, v, and bias, sinks, table and keys if the call has them."""
        q, k, v = self.qkv((self.B, self.M), (self.B, self.N))
        dead_queries = dead_keys = None
        if hidden:
            visible = visible_by(self.mask, self.sizes)
            dead_queries = ~visible.any(3)
            dead_keys = ~visible.any(2).unflatten(1, (self.H_kv, self.group)).any(2)
        x = {
            "q": self.laid_out(q, dead_queries),
            "k": self.laid_out(k, dead_keys),
            "v": self.laid_out(v, dead_keys),
        }
        if self.bias is not None:
            x["bias"] = self._bias(self.bias)
        if self.sinks:
            x["sinks"] = self.sink_logits()
        return x | self.by_distance()

    def _bias(self, dims: str) -> Tensor:
        shape = [n if name in dims else 1 for name, n in zip("bhmn", self.sizes, strict=True)]
        bias = self.normal("bias", *shape)
        if self.bias_hides:
            bias = bias.masked_fill(bias > 1.0, -math.inf)
        return bias.float() if self.bias_is_float32 else bias

    def _do(self) -> Tensor:
        return lay_out(self.normal("do", self.B, self.H_q, self.M, self.D_v), self.layout)

    def _dlse(self) -> Tensor:
        return self.normal("dlse", self.B, self.H_q, self.M)


@st.composite
def attention_calls(draw: st.DrawFn, backend: str) -> Attention:
    limits = LIMITS[backend]
    fields = shared(draw, backend)
    M, N = draw(lengths(limits, smallest=0)), draw(lengths(limits, smallest=0))
    fields["mask"] = constraints(draw, max(M, N))
    fields["hidden"] = draw(st.booleans())
    bias = draw(st.sampled_from([None, None, "tensor", "alibi"]))
    if bias == "tensor":
        fields["bias"] = draw(st.sampled_from(["mn", "bhmn", "n", "hn", "bm", ""]))
        fields["bias_is_float32"] = fields["dtype"] != "float64" and draw(st.booleans())
        fields["bias_hides"] = rarely(draw)
    if bias == "alibi":
        fields["alibi_align"] = draw(st.sampled_from(["top_left", "bottom_right"]))
        fields["alibi_by_sequence"] = draw(st.booleans())
    if draw(st.integers(0, 3)) == 3:
        fields["relative"] = relative(draw, max(M, N))
    if draw(st.integers(0, 3)) == 3:
        fields["dropout_p"] = draw(st.sampled_from([0.3, 0.9, 1.0]))
    names = ["q", "k", "v"]
    names += ["bias"] * (bias == "tensor") + ["sinks"] * fields["sinks"]
    names += fields["relative"].names if "relative" in fields else ()
    fields["requires_grad"] = draw(st.sampled_from([(), tuple(names), ("q",), ("k", "v")]))
    fields["return_lse"] = draw(st.booleans())
    return Attention(B=draw(st.integers(1, 3)), M=M, N=N, **fields)
