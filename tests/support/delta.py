"""Cases of the gated delta rule: dense calls, packed sequences and steps, and their definition."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.backends import NAMES, TABLE_WAYS
from tests.support.case import AnyCase, Device, Expected, Layout, Outputs, lay_out
from tests.support.oracle import Bound
from transformer_kernels.bench.tolerance import rounding_band
from transformer_kernels.common.torch_private import apply_of
from transformer_kernels.linear.delta.backends import DELTA_BACKENDS
from transformer_kernels.problem.types import accumulate_dtype

_ALL = tuple(backend.name for backend in DELTA_BACKENDS)
DELTA_NAMES = tuple(name for name in _ALL if name in NAMES)
"""Backends of the gated delta rule that run on CPU tensors."""
DELTA_TABLE_WAYS = tuple(way for way in TABLE_WAYS if way[0] in _ALL)


class DeltaInputs(NamedTuple):
    """Tensors of a call, and the cotangents of its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor
    S: Tensor | None
    do: Tensor
    ds: Tensor

    def differentiable(self) -> dict[str, Tensor]:
        return {n: x for n, x in self._asdict().items() if x is not None and n[0] != "d"}

    def to(self, to: torch.dtype) -> DeltaInputs:
        """Returns leaves in another dtype."""
        return DeltaInputs._make(
            None if x is None else x.detach().to(to).requires_grad_() for x in self
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class DeltaCase(AnyCase):
    """One call of `gated_delta_rule`; of `gated_delta_rule_varlen` with `packed`; or calls of
    `gated_delta_rule_step` with `steps`."""

    B: int = 2
    H_k: int = 2
    H_v: int = 2
    T: int = 70
    D: int = 8
    D_v: int = 8
    packed: tuple[int, ...] = ()
    """lengths of packed sequences; B and T are not used"""
    trailing: int = 0
    """rows of trailing padding of packed sequences"""
    steps: tuple[int, ...] = ()
    """numbers of tokens of the calls; T is not used"""
    gate: Literal["none", "scalar", "channel", "reset"] = "scalar"
    """"reset": of each channel, and tokens that clear the state"""
    l2norm: bool = False
    scale: float | None = None
    state: bool = False
    layout: Layout = "contiguous"

    @property
    def tokens(self) -> int:
        return sum(self.packed or self.steps) + self.trailing or self.T * (not self.packed)

    @property
    def sequences(self) -> int:
        return len(self.packed) or self.B

    def inputs(self, dtype: torch.dtype, device: Device = "cpu") -> DeltaInputs:
        """Random inputs, with keys of at most length 1, so that no state grows without bound.
        Trailing padding is NaN."""
        generator, real = self.generator(), accumulate_dtype(dtype)

        def rows(heads: int, *width: int, to: torch.dtype, positive: bool = False) -> Tensor:
            draw = torch.rand if positive else torch.randn
            x = draw(1 if self.packed else self.B, heads, self.tokens, *width, generator=generator)
            return x.to(to)

        def laid(x: Tensor) -> Tensor:
            """Laid out, with NaN after the last packed sequence; packed without an entry."""
            if self.packed:
                x[:, :, sum(self.packed) :] = math.nan
            flat = x if x.dim() == 4 else x[..., None]
            flat = lay_out(flat.transpose(1, 2).contiguous() if self.packed else flat, self.layout)
            x = flat if x.dim() == 4 else flat[..., 0]
            return (x[0] if self.packed else x).to(device)

        width = () if self.gate == "scalar" else (self.D,)
        decay = -0.1 * rows(self.H_v, *width, to=real, positive=True)
        if self.gate == "reset":
            decay[:, :, [t for t in (0, 40, 41, 100) if t < self.tokens]] = -math.inf
        k = rows(self.H_k, self.D, to=torch.float32)
        k = (k / k.norm(dim=-1, keepdim=True).clamp(min=1)).to(dtype)
        S = torch.randn(self.sequences, self.H_v, self.D, self.D_v, generator=generator).to(real)
        if self.steps and not self.state:
            S.zero_()
        x = {
            "q": laid(rows(self.H_k, self.D, to=dtype)),
            "k": laid(k),
            "v": laid(rows(self.H_v, self.D_v, to=dtype)),
            "log_decay": None if self.gate == "none" else laid(decay),
            "beta": laid(rows(self.H_v, to=real, positive=True)),
            "S": S.to(device) if self.state or self.steps else None,
        }
        leaves: dict[str, Any] = {
            name: None if one is None else one.requires_grad_() for name, one in x.items()
        }
        do = laid(rows(self.H_v, self.D_v, to=dtype)).nan_to_num()
        ds = torch.randn(S.shape, generator=generator).to(real).to(device)
        return DeltaInputs(**leaves, do=do, ds=ds)

    def run(self, x: DeltaInputs, backend: str) -> Outputs:
        options: dict[str, Any] = {"l2norm": self.l2norm, "scale": self.scale, "backend": backend}
        if self.steps:
            return self._in_steps(x, options)
        options |= {"initial_state": x.S, "return_state": True}
        o, end = self._operator(*self._arguments(x), **options)
        return with_gradients(x, o, end)

    def reasons(self, backend: str, device: Device = "cpu") -> tuple[str, ...]:
        if self.steps:
            return ()
        arguments = self._arguments(self.inputs(torch.float32, device))
        return tk.explain(*arguments, operator=self._operator, backend=backend).reasons[backend]

    @property
    def _operator(self) -> Any:
        return tk.gated_delta_rule_varlen if self.packed else tk.gated_delta_rule

    def _arguments(self, x: DeltaInputs) -> tuple[Any, ...]:
        starts = torch.tensor([0, *accumulate(self.packed)], device=x.q.device)
        return (*x[:5], starts) if self.packed else x[:5]

    def _in_steps(self, x: DeltaInputs, options: dict[str, Any]) -> Outputs:
        assert x.S is not None
        state, outputs = x.S.detach().clone(), []
        with torch.no_grad():
            for ends in pairwise(accumulate(self.steps, initial=0)):
                rows = [None if t is None else t[:, :, slice(*ends)] for t in x[:5]]
                call: Any = tk.gated_delta_rule_step
                outputs.append(call(*rows, state, **options))
        return {"o": torch.cat(outputs, dim=2), "S_end": state}

    def by_loop(self, x: DeltaInputs, rounded: torch.dtype, unit: float = 1.0) -> Outputs:
        """The definition, of each sequence alone, with the operands of products in `rounded`.

        Values and states are counted in a unit, which changes nothing but rounding errors.
        """
        parts: list[tuple[tuple[Tensor, ...], Tensor | None]] = []
        if not self.packed:
            parts.append((tuple(t for t in x[:5] if t is not None), x.S))
        for b, ends in enumerate(pairwise(accumulate(self.packed, initial=0))):
            rows = (t[slice(*ends)].transpose(0, 1)[None] for t in x[:5] if t is not None)
            parts.append((tuple(rows), None if x.S is None else x.S[b : b + 1]))
        scale = self.D**-0.5 if self.scale is None else self.scale
        results = []
        for (q, k, v, *gates), S in parts:
            decay = gates[0] if len(gates) == 2 else torch.zeros_like(gates[-1])
            S = None if S is None else S / unit
            inputs = q, k, v / unit, decay, gates[-1]
            o, end = recurrence(inputs, S, scale, self.l2norm, rounded)
            results.append((o * unit, end * unit))
        o = torch.cat([one for one, _ in results], dim=2)
        end = torch.cat([one for _, one in results])
        if self.packed:
            o = o[0].transpose(0, 1)
            o = torch.cat([o, o.new_zeros(self.trailing, *o.shape[1:])])
        if self.steps:
            return {"o": o.detach(), "S_end": end.detach()}
        return with_gradients(x, o, end)

    def expected(self, dtype: torch.dtype) -> Expected:
        return _expected(self, dtype)

    def bounds(self, dtype: torch.dtype) -> dict[str, Bound]:
        """Twice what the tolerance rule allows, for every element."""
        exact, plain, *_ = self.expected(dtype)
        bounds = {}
        for name, value in exact.items():
            stored = plain[name].dtype
            error = float((plain[name] - value).abs().max()) if value.numel() else 0.0
            allowed = 2 * (2 * error + rounding_band(value, stored))
            bounds[name] = Bound(value, torch.full_like(value, allowed))
        return bounds


class _Rounded(torch.autograd.Function):
    """x as an operand of a matrix multiplier for `dtype`; its gradient is not rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Product(torch.autograd.Function):
    """x, a product, whose gradient is an operand of a matrix multiplier for `dtype`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype).to(grads[0].dtype), None


_rounded, _of_product = apply_of(_Rounded), apply_of(_Product)


def recurrence(
    tensors: tuple[Tensor, ...], S: Tensor | None, scale: float, l2norm: bool, rounded: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gated delta rule of q, k, v, log_decay and beta, one token after another.

    Sums and the state are in the dtype of beta. Products, forward and backward, take their operands
    in `rounded`.
    """

    def product(equation: str, *x: Tensor) -> Tensor:
        operands = (_rounded(t, rounded) for t in x)
        y: Tensor = _of_product(torch.einsum(equation, *operands), rounded)
        return y

    q, k, v, log_decay, beta = tensors
    real, result = beta.dtype, v.dtype
    q, k, v = q.to(real), k.to(real), v.to(real)
    if l2norm:
        q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6) ** -0.5 for t in (q, k))
    H_v = v.shape[1]
    heads = torch.arange(H_v) // (H_v // q.shape[1])
    q, k = q[:, heads], k[:, heads]
    factor = log_decay.clamp(min=-800.0 if real == torch.float64 else -200.0).exp()
    factor = factor if factor.dim() == 4 else factor[..., None].expand(k.shape)
    if S is None:
        S = torch.zeros(*v.shape[:2], k.shape[3], v.shape[3], dtype=real)
    outputs = [v[:, :, :0]]
    for t in range(v.shape[2]):
        S = factor[:, :, t, :, None] * S
        held = product("bhd,bhde->bhe", k[:, :, t], S)
        u = (v[:, :, t] - held) * beta[:, :, t, None]
        S = S + product("bhd,bhe->bhde", k[:, :, t], u)
        outputs.append(scale * product("bhd,bhde->bhe", q[:, :, t], S)[:, :, None])
    return torch.cat(outputs, dim=2).to(result), S


def with_gradients(x: DeltaInputs, o: Tensor, S: Tensor) -> Outputs:
    """Returns the results, and the gradients for the cotangents of x."""
    named = x.differentiable()
    results = [(y, d) for y, d in ((o, x.do), (S, x.ds.to(S.dtype))) if y.requires_grad]
    outputs, cotangents = zip(*results, strict=True)
    grads = torch.autograd.grad(outputs, list(named.values()), cotangents, materialize_grads=True)
    ends = {"o": o.detach(), "S_end": S.detach()}
    return ends | {f"d{name}": g for name, g in zip(named, grads, strict=True)}


@functools.cache
def _expected(case: DeltaCase, dtype: torch.dtype) -> Expected:
    """In float64 the plain results tell the rounding errors of the exact ones: identical keys make
    them 40 times as large as those of the kernels."""
    x = case.inputs(dtype)
    exact = case.by_loop(x.to(torch.float64), torch.float64)
    return Expected(exact, case.by_loop(x, dtype, 3.0 if dtype == torch.float64 else 1.0))


_PACKED = (70, 0, 17, 1, 64)
_STEPS: tuple[tuple[Literal["none", "scalar", "channel"], bool], ...] = (
    ("none", False),
    ("scalar", True),
    ("channel", True),
)
DELTA_CASES: tuple[DeltaCase, ...] = (
    DeltaCase(name="plain"),
    DeltaCase(name="no-gate", gate="none", T=130, state=True),
    DeltaCase(name="channels", gate="channel", T=130, D=17, D_v=5),
    DeltaCase(name="channels-state", gate="channel", T=65, state=True, l2norm=True, H_v=4),
    DeltaCase(name="reset", gate="reset", T=130, state=True),
    DeltaCase(name="gva", H_v=6, T=100, state=True),
    DeltaCase(name="normalized", l2norm=True, T=100, D=33, D_v=40),
    DeltaCase(name="scaled", scale=-0.3, T=17),
    DeltaCase(name="wide", B=1, H_k=1, H_v=1, T=66, D=130, D_v=70),
    DeltaCase(name="full-width", B=1, H_k=1, H_v=2, T=70, D=64, D_v=128, l2norm=True, state=True),
    DeltaCase(name="one-channel", T=20, D=1, D_v=1),
    *(DeltaCase(name=f"tokens-{T}", T=T, state=True) for T in (0, 1, 15, 16, 17, 63, 64, 65)),
    DeltaCase(name="no-batch", B=0),
    DeltaCase(name="transposed", layout="transposed", H_v=4),
    DeltaCase(name="strided", layout="strided", gate="channel"),
    DeltaCase(name="unaligned", layout="unaligned", gate="channel", state=True),
    DeltaCase(name="expanded", layout="expanded", l2norm=True),
    DeltaCase(name="packed", packed=_PACKED, trailing=4, H_v=4, D_v=5),
    DeltaCase(name="packed-channels", packed=_PACKED, trailing=4, gate="channel", state=True),
    DeltaCase(name="packed-no-gate", packed=(0, 0), trailing=3, gate="none", state=True),
    *(
        DeltaCase(name=f"steps-{gate}-by-{sizes[0]}", steps=sizes, gate=gate, H_v=4, D=7, D_v=5,
                  state=state, l2norm=state)
        for sizes in ((1,) * 20, (8, 3), (33, 7))
        for gate, state in _STEPS
    ),
)  # fmt: skip
